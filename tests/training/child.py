"""What the processes do that test_processes.py starts."""

import copy
import dataclasses
import json
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

from hydra_transformers.data.batches import collate
from hydra_transformers.training import finetune_members, recipe
from tests.training.tiny import FAMILIES, QUIET, copy_of_weights, tiny_dataset, tiny_members, tiny_model, tiny_trainer


# No dropout: two processes would draw other masks than one.
RECIPE = dataclasses.replace(recipe("imagenet1k"), max_steps=6, warmup_steps=1, learning_rate=0.1, dropout=None)
ROWS, GLOBAL_BATCH = 12, 4

# What accelerate launch and torchrun set for the processes of a group.
GROUP = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")


def train_fused(output_dir: Path, per_device_batch: int, **overrides) -> dict[str, torch.Tensor]:
    """The weights of a fused Hydra, one layer of which has no heads left, after a few steps as a whole."""
    model = tiny_model("vit", "fused")
    arguments = RECIPE.training_arguments(
        output_dir,
        per_device_train_batch_size=per_device_batch,
        eval_strategy="no",
        save_strategy="no",
        **QUIET,
        **overrides,
    )
    trainer = tiny_trainer(
        "vit",
        model,
        arguments,
        train_dataset=tiny_dataset("vit", ROWS),
        compute_loss_func=RECIPE.loss(),
        callbacks=RECIPE.callbacks(),
    )
    trainer.train()
    return copy_of_weights(model)


def train_members(
    output_dir: Path, per_device_batch: int, train_dataset=None, members: int = 2, **options
) -> list[dict[str, torch.Tensor]]:
    members = finetune_members(
        tiny_members(FAMILIES["vit"])[:members],
        RECIPE,
        tiny_dataset("vit", ROWS) if train_dataset is None else train_dataset,
        tiny_dataset("vit", 6, seed=2),
        output_dir=output_dir,
        per_device_train_batch_size=per_device_batch,
        **QUIET,
        **options,
    )
    return [copy_of_weights(member) for member in members]


def steps(model, rows: list[dict]) -> None:
    """A few steps of plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        batch = collate(rows)
        model(pixel_values=batch["pixel_values"].double(), labels=batch["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_sharded(form: str, rank: int) -> float:
    """How far a model that FSDP spreads over both processes ends from one that a process trains alone."""
    whole = tiny_model("vit", form).double().eval()
    sharded, rows = copy.deepcopy(whole), tiny_dataset("vit", 8)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for part in [*sharded.vit.layers, sharded]:
        fully_shard(part, mesh=mesh)
    steps(whole, rows)
    steps(sharded, rows[4 * rank : 4 * rank + 4])
    pairs = zip(whole.parameters(), sharded.parameters(), strict=True)
    return max((one - other.full_tensor()).abs().max().item() for one, other in pairs if one.numel())


class Deadly(list):
    """A dataset that kills the process, as a machine that goes away does, when it has been read often enough."""

    reads_left = 2 * ROWS + 12 + 9  # to know it again, one epoch, which ends with a checkpoint, and most of the next

    def __getitem__(self, index):
        self.reads_left -= 1
        if self.reads_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Stalling(list):
    """A dataset that says when the training begins, and lets it get no further."""

    reads_left = 2 * ROWS

    def __getitem__(self, index):
        self.reads_left -= 1
        if self.reads_left < 0:
            print("training", flush=True)
            signal.pause()
        return super().__getitem__(index)


class FailingMember(TrainerCallback):
    """Stops the training of one member after a few steps."""

    def on_step_end(self, args, state, control, **kwargs):
        if "member-1" in args.output_dir and state.global_step == 4:
            raise OSError("the disk is full")


def train_apart(folder: Path, rank: int) -> None:
    """Each process trains its own members: one of them fails, the same call goes on, and a third one loads the results."""
    try:
        train_members(folder / "apart", GLOBAL_BATCH, members=3, callbacks=[FailingMember()])
    except RuntimeError as error:
        (folder / f"failed-{rank}.txt").write_text(str(error))
    assert (folder / "apart" / "member-2" / "finished.json").exists()
    assert torch.distributed.get_world_size() == 2 and os.environ["WORLD_SIZE"] == "2"
    for index, weights in enumerate(train_members(folder / "apart", GLOBAL_BATCH, members=3)):
        save_file(weights, folder / f"apart-{index}-{rank}.safetensors")


def main(folder: Path) -> None:
    """Both processes train together; then the first one goes on alone, until it is killed."""
    rank = int(os.environ["RANK"])
    train_apart(folder, rank)
    runs = {"plain": {}, "checkpointing": {"gradient_checkpointing": True}}
    for name, overrides in runs.items():
        save_file(train_fused(folder / name, GLOBAL_BATCH // 2, **overrides), folder / f"{name}-{rank}.safetensors")
    for index, weights in enumerate(train_members(folder / "members", GLOBAL_BATCH // 2, divide="batches")):
        save_file(weights, folder / f"member-{index}-{rank}.safetensors")
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    try:
        train_members(folder / "refused", GLOBAL_BATCH)
    except ValueError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))
    distances = {form: train_sharded(form, rank) for form in ("member", "fused")}
    (folder / f"sharded-{rank}.json").write_text(json.dumps(distances))
    torch.distributed.destroy_process_group()
    if rank == 0:
        for name in GROUP:
            del os.environ[name]
        train_members(folder / "killed", GLOBAL_BATCH, Deadly(tiny_dataset("vit", ROWS)))


def lose_one(folder: Path) -> None:
    """Trains a member in each of two processes, the second of which is killed."""
    rows = tiny_dataset("vit", ROWS)
    if os.environ["RANK"] == "1":
        rows = Deadly(rows)
        rows.reads_left = ROWS  # only the first process reads them to know them again
    train_members(folder / "lost", GLOBAL_BATCH, rows)


def stall(folder: Path) -> None:
    """Begins to train and gets no further."""
    train_members(folder, GLOBAL_BATCH, Stalling(tiny_dataset("vit", ROWS)))
