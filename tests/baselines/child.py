"""What the processes do that test_baselines_in_processes.py starts."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

from hydra_transformers.baselines import MIMO, BatchEnsemble, MIMOCollator
from tests.training.tiny import QUIET, copy_of_weights, tiny_dataset, tiny_model


GLOBAL_BATCH = 4


def train(kind: str, output_dir: Path, per_device_batch: int) -> dict[str, torch.Tensor]:
    """The weights of a baseline after a few steps."""
    model, options = tiny_model("vit", "backbone"), {}
    if kind == "mimo":
        # One example in all places, once: else two processes would draw other places than one.
        options["data_collator"] = MIMOCollator(2, rho=1.0, repetitions=1)
    baseline = MIMO(model, num_members=2) if kind == "mimo" else BatchEnsemble(model, num_members=2)
    arguments = TrainingArguments(
        output_dir,
        max_steps=3,
        learning_rate=0.05,
        optim="sgd",
        per_device_train_batch_size=per_device_batch,
        save_strategy="no",
        **QUIET,
    )
    Trainer(model=baseline, args=arguments, train_dataset=tiny_dataset("vit"), **options).train()
    return copy_of_weights(baseline)


def main(folder: Path) -> None:
    """As one of two processes."""
    rank = os.environ["RANK"]
    for kind in ("batch-ensemble", "mimo"):
        weights = train(kind, folder / kind, GLOBAL_BATCH // 2)
        save_file(
            {name: weight.contiguous() for name, weight in weights.items()}, folder / f"{kind}-{rank}.safetensors"
        )
