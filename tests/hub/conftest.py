"""A tiny Hydra, its report, and a Hub that only takes notes."""

import pytest
import torch

from hydra_transformers.reports import evaluate_uncertainty
from tests.families import VIT
from tests.hub.fake_hub import hub, hydra_of


__all__ = ["hub", "hydra", "report"]


@pytest.fixture(scope="module")
def hydra():
    return hydra_of(VIT)


@pytest.fixture(scope="module")
def report(hydra):
    generator = torch.Generator().manual_seed(0)
    pixel_values = torch.randn(12, 3, 8, 8, generator=generator)
    id_data = [{"pixel_values": pixel_values, "labels": torch.arange(12) % 5}]
    ood = {"near": {"noise": [{"pixel_values": 3 * pixel_values}]}}
    return evaluate_uncertainty({"Single": VIT.backbone().float(), "Hydra": hydra}, id_data, ood)
