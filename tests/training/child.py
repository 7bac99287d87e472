"""What the processes do that test_processes.py starts."""

import dataclasses
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import save_file

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


def train_members(output_dir: Path, per_device_batch: int, train_dataset=None) -> list[dict[str, torch.Tensor]]:
    members = finetune_members(
        tiny_members(FAMILIES["vit"])[:2],
        RECIPE,
        tiny_dataset("vit", ROWS) if train_dataset is None else train_dataset,
        tiny_dataset("vit", 6, seed=2),
        output_dir=output_dir,
        per_device_train_batch_size=per_device_batch,
        **QUIET,
    )
    return [copy_of_weights(member) for member in members]


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


def main(folder: Path) -> None:
    """Both processes train together; then the first one goes on alone, until it is killed."""
    rank = int(os.environ["RANK"])
    runs = {"plain": {}, "checkpointing": {"gradient_checkpointing": True}}
    for name, overrides in runs.items():
        save_file(train_fused(folder / name, GLOBAL_BATCH // 2, **overrides), folder / f"{name}-{rank}.safetensors")
    for index, weights in enumerate(train_members(folder / "members", GLOBAL_BATCH // 2)):
        save_file(weights, folder / f"member-{index}-{rank}.safetensors")
    torch.distributed.destroy_process_group()
    if rank == 0:
        for name in GROUP:
            del os.environ[name]
        train_members(folder / "killed", GLOBAL_BATCH, Deadly(tiny_dataset("vit", ROWS)))


def stall(folder: Path) -> None:
    """Begins to train and gets no further."""
    train_members(folder, GLOBAL_BATCH, Stalling(tiny_dataset("vit", ROWS)))
