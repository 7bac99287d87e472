"""Tiny members, a Hydra and data of each task."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hydra_transformers import AutoHydra
from tests import tiny_tags
from tests.families import VIT, bert_backbone


ROWS = 60


class Case(NamedTuple):
    """member: seed -> a backbone; data: labelled; ood: out-of-distribution data or None; first: the first metric"""

    name: str
    member: Callable[[int], PreTrainedModel]
    data: Any
    ood: Any
    first: str

    def members(self) -> list[PreTrainedModel]:
        return [self.member(seed) for seed in range(3)]

    def hydra(self) -> PreTrainedModel:
        hydra = AutoHydra.from_pruned_members(self.members(), shared=()).eval()
        hydra.config.aggregate = "mean" if self.name == "reward" else None
        return hydra


def vit(**fields: Any) -> Callable[[int], PreTrainedModel]:
    return lambda seed: VIT.backbone(seed, num_hidden_layers=2, **fields).float()


def reward_member(seed: int) -> PreTrainedModel:
    model = bert_backbone(seed, num_labels=1).float().eval()
    model.config.aggregate = "mean"
    return model


def images(labels: torch.Tensor | None, scale: float = 1.0, seed: int = 0) -> list[dict]:
    pixels = scale * torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return [{"pixel_values": pixels} | ({} if labels is None else {"labels": labels})]


def texts(seed: int) -> list[dict]:
    return [{"input_ids": torch.randint(5, 38, (ROWS, 6), generator=torch.Generator().manual_seed(seed))}]


def tagged(seed: int) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(*span, (ROWS, 7), generator=generator) for span in ((5, 13), (0, 5)))
    return [{"input_ids": i, "labels": t} for i, t in zip(ids.tolist(), labels.tolist(), strict=True)]


GENERATOR = torch.Generator().manual_seed(3)
OOD = images(None, scale=3.0, seed=1)
CASES = [
    Case("single_label_classification", vit(), images(torch.arange(ROWS) % 5), OOD, "accuracy"),
    Case(
        "multi_label_classification",
        vit(num_labels=3, problem_type="multi_label_classification"),
        images((torch.rand(ROWS, 3, generator=GENERATOR) > 0.5).float()),
        OOD,
        "map",
    ),
    Case(
        "regression",
        vit(num_labels=2, problem_type="regression"),
        images(torch.randn(ROWS, 2, generator=GENERATOR)),
        OOD,
        "rmse",
    ),
    Case("token_classification", tiny_tags.backbone, tagged(0), tagged(1), "entity_f1"),
    Case("reward", reward_member, {"chosen": texts(0), "rejected": texts(1)}, None, "pair_accuracy"),
]
