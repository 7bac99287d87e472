"""A small real problem, handwritten digits: pruning costs accuracy, and fine-tuning brings it back."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from hydra_transformers import HydraViTForImageClassification
from hydra_transformers.training import finetune_members, recipe
from tests.training.tiny import QUIET


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits():
    """Training, validation and test rows of 8 x 8 images in ten classes."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images.reshape(-1, 1, 8, 8) / 8 - 1, dtype=torch.float32)
    rows = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, labels, strict=True)]
    train, rest = train_test_split(rows, test_size=600, random_state=0, stratify=labels)
    return train, rest[:200], rest[200:]


@pytest.fixture(scope="module")
def backbone(digits, tmp_path_factory):
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        initializer_range=0.1,
    )
    model = ViTForImageClassification(config)
    arguments = TrainingArguments(
        tmp_path_factory.mktemp("backbone"),
        num_train_epochs=10,
        per_device_train_batch_size=64,
        learning_rate=4e-3,
        warmup_steps=0.1,
        save_strategy="no",
        **QUIET,
    )
    Trainer(model=model, args=arguments, train_dataset=digits[0]).train()
    return model.eval()


def accuracy(model, rows) -> float:
    with torch.no_grad():
        logits = model(torch.stack([row["pixel_values"] for row in rows])).logits
    return float(np.mean(logits.argmax(-1).numpy() == [row["labels"] for row in rows]))


def test_fine_tuning_brings_the_accuracy_of_pruned_members_back(backbone, digits, tmp_path):
    train, validation, test = digits
    members = [
        HydraViTForImageClassification.from_backbone(backbone, {0: [0, 1, 2], 1: [1, 2, 3]}),
        HydraViTForImageClassification.from_backbone(backbone, {0: [1, 2, 3], 1: [0, 2, 3]}),
    ]
    settings = recipe("imagenet1k").with_arguments(learning_rate=0.03, max_steps=300, warmup_steps=15)
    settings = dataclasses.replace(settings, dropout=None)
    tuned = finetune_members(
        members,
        settings,
        train,
        validation,
        output_dir=tmp_path,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=200,
        **QUIET,
    )
    whole = accuracy(backbone, test)
    before = [accuracy(member, test) for member in members]
    after = [accuracy(member, test) for member in tuned]
    assert whole > 0.93
    assert max(before) < whole - 0.25
    assert min(after) > whole - 0.05
    assert accuracy(HydraViTForImageClassification.from_pruned_members(tuned, shared=()), test) > whole - 0.03
