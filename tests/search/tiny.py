"""Tiny fine-tunings that have learned something, and their data."""

import copy
from functools import cache

import torch
from transformers import PreTrainedModel

from tests.training.tiny import tiny_dataset, tiny_model


FAST = {"seconds": 0.0, "progress": False, "batch_size": 16}
TRAINING = {"max_steps": 2, "use_cpu": True}


def fine_tunings(name: str, count: int = 3) -> list[PreTrainedModel]:
    """Of one model that has learned half of the task, each with steps of its own; for the test to change as it likes."""
    return copy.deepcopy(_fine_tunings(name))[:count]


@cache
def _fine_tunings(name: str) -> list[PreTrainedModel]:
    start = _trained(tiny_model(name, "backbone", num_labels=3, num_hidden_layers=2), name, seed=10, steps=8)
    return [_trained(copy.deepcopy(start), name, seed, steps=3) for seed in (1, 2, 3)]


def _trained(model: PreTrainedModel, name: str, seed: int, steps: int) -> PreTrainedModel:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = tiny_dataset(name, 24, seed=1000 * seed + step)
        batch = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def id_rows(name: str, count: int = 90) -> list[dict]:
    """Every eighth label is wrong, so that no model is always right."""
    rows = tiny_dataset(name, count, seed=50)
    return [row | {"labels": (row["labels"] + (place % 8 == 0)) % 3} for place, row in enumerate(rows)]


def ood_rows(name: str, count: int = 20, seed: int = 60) -> list[dict]:
    """Rows that show no class."""
    generator = torch.Generator().manual_seed(seed)
    if name == "bert":
        return [{"input_ids": torch.randint(1, 30, (10,), generator=generator)} for _ in range(count)]
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator)} for _ in range(count)]


def near_and_far(name: str) -> dict:
    return {"near": {"one": ood_rows(name)}, "far": {"two": ood_rows(name, seed=61)}}


def everything() -> dict:
    """What `hydrate` takes beside models and a folder, so that all that there is is tried."""
    return {
        "train_data": tiny_dataset("vit", 16, seed=70),
        "data": id_rows("vit"),
        "ood_data": near_and_far("vit"),
        "training_arguments": TRAINING,
        "target": "quality",
        "card": {"dataset": "me/tiny", "base_model": "me/vit"},
        **FAST,
    }
