"""What the processes do that test_processes.py starts."""

import copy
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

from hydra_transformers import AutoHydra
from hydra_transformers.data.batches import collate
from hydra_transformers.training import HydraTrainer, HydraTrainingArguments, finetune_members, recipe
from tests.baselines.one_training import train_baseline
from tests.training.tiny import FAMILIES, QUIET, tiny_dataset, tiny_members, tiny_model, weights_of


# No dropout: two processes would draw other masks than one.
RECIPE = replace(recipe("imagenet1k").with_arguments(max_steps=6, warmup_steps=1, learning_rate=0.1), dropout=None)
ROWS = 12
GLOBAL_BATCH = 4
BASELINES = ("batch-ensemble", "mimo")

# What accelerate launch and torchrun set for the processes of a group.
GROUP = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")


def train_in_one_run(output_dir: Path, per_device_batch: int, **options) -> dict[str, torch.Tensor]:
    """The weights of a Hydra with new classifiers after a few steps, with label smoothing and rates
    of its own."""
    model = AutoHydra.from_backbone(tiny_model("vit", "backbone"), num_members=3, num_labels=3)
    arguments = HydraTrainingArguments(
        output_dir,
        per_device_train_batch_size=per_device_batch,
        max_steps=6,
        learning_rate=0.02,
        classifier_learning_rate=0.1,
        optim="sgd",
        label_smoothing_factor=0.1,
        save_strategy="no",
        **QUIET,
        **options,
    )
    HydraTrainer(model, arguments, train_dataset=tiny_dataset("vit", ROWS)).train()
    return weights_of(model)


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
    return [weights_of(member) for member in members]


def steps(model, rows: list[dict]) -> None:
    """A few steps of plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        batch = collate(rows)
        model(pixel_values=batch["pixel_values"].double(), labels=batch["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_sharded(form: str, rank: int) -> float:
    """How far a model that FSDP spreads over both processes ends from one that a process trains
    alone."""
    whole = tiny_model("vit", form).double().eval()
    sharded = copy.deepcopy(whole)
    rows = tiny_dataset("vit", 8)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for part in [*sharded.vit.layers, sharded]:
        fully_shard(part, mesh=mesh)
    steps(whole, rows)
    steps(sharded, rows[4 * rank : 4 * rank + 4])
    pairs = zip(whole.parameters(), sharded.parameters(), strict=True)
    return max((one - other.full_tensor()).abs().max().item() for one, other in pairs if one.numel())


class Deadly(list):
    """A dataset that kills the process, as a machine that goes away does, when it has been read
    often enough."""

    reads_left = 12 + 9  # one epoch, which ends with a checkpoint, and most of the next

    def __getitem__(self, index):
        self.reads_left -= 1
        if self.reads_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def main(folder: Path) -> None:
    """Both processes train together; then the first one goes on alone, until it is killed."""
    rank = int(os.environ["RANK"])
    for name, options in {"plain": {}, "checkpointing": {"gradient_checkpointing": True}}.items():
        weights = train_in_one_run(folder / name, GLOBAL_BATCH // 2, **options)
        save_file(weights, folder / f"{name}-{rank}.safetensors")
    for kind in BASELINES:
        weights = train_baseline(kind, folder / kind, GLOBAL_BATCH // 2)
        save_file({name: each.contiguous() for name, each in weights.items()}, folder / f"{kind}-{rank}.safetensors")
    for index, weights in enumerate(train_members(folder / "members", GLOBAL_BATCH // 2)):
        save_file(weights, folder / f"member-{index}-{rank}.safetensors")
    distances = {form: train_sharded(form, rank) for form in ("member", "fused")}
    (folder / f"sharded-{rank}.json").write_text(json.dumps(distances))
    torch.distributed.destroy_process_group()
    if rank == 0:
        for name in GROUP:
            del os.environ[name]
        train_members(folder / "killed", GLOBAL_BATCH, Deadly(tiny_dataset("vit", ROWS)))
