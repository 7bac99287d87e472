"""A training of a baseline, in one process or as one of several."""

from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from hydra_transformers.baselines import MIMO, BatchEnsemble, MIMOCollator
from tests.training.tiny import QUIET, tiny_dataset, tiny_model, weights_of


def train_baseline(kind: str, output_dir: Path, per_device_batch: int) -> dict[str, torch.Tensor]:
    """The weights of a baseline after a few steps."""
    model = tiny_model("vit", "backbone")
    options = {}
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
    return weights_of(baseline)
