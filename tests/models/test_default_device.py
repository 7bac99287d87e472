"""`torch.set_default_device` and `with torch.device(...)` are for new models; what exists is computed where it lies."""

import copy

import pytest
import torch

from hydra_transformers.pruning import draw_members, extract_circuit, prune_heads, taylor_prune, taylor_scores
from hydra_transformers.uncertainty import (
    TemperatureScaling,
    classification_metrics,
    decompose,
    diversity_metrics,
    ood_metrics,
    ood_score,
)
from tests.families import CLIP, OWN_LAYERS, VIT, for_families, images


# Nothing can be computed on it, so that any tensor which strays there is noticed, as on a GPU beside the CPU's.
ELSEWHERE = torch.device("meta")


@for_families([VIT, CLIP])
def test_fusing_and_taking_apart(family):
    backbones = [family.backbone(seed) for seed in range(2)]
    with ELSEWHERE:
        members = [prune_heads(each, heads) for each, heads in zip(backbones, family.heads_to_prune, strict=False)]
        hydra = family.hydra.from_pruned_members(members)
        alone = hydra.member(1)
    assert {parameter.device.type for parameter in (*hydra.parameters(), *alone.parameters())} == {"cpu"}
    expected = family.hydra.from_pruned_members(family.members()[:2])
    for name, tensor in expected.state_dict().items():
        assert torch.equal(hydra.state_dict()[name], tensor), name


@for_families(OWN_LAYERS)
@torch.no_grad()
def test_inference(family):
    hydra, inputs = family.fused(), family.inputs()
    expected = hydra(**inputs).member_logits
    with ELSEWHERE:
        assert torch.equal(hydra(**inputs).member_logits, expected)


@pytest.mark.slow
def test_pruning():
    model, data = VIT.backbone(), [{"pixel_values": images(), "labels": torch.tensor([0, 1, 2, 0])}]
    ood = [{"pixel_values": images().flip(1)[:3]}]

    def everything() -> list:
        circuit = extract_circuit(model, data, ood, objective="ood", budget=3)
        return [
            taylor_scores(model, data),
            taylor_prune(model, data, heads_per_layer=2).heads_to_prune,
            circuit.ranking,
            [member.config.kept_heads for member in draw_members(model, circuit=circuit, num_members=2, budget=2)],
        ]

    expected = everything()
    with ELSEWHERE:
        assert everything() == expected


@pytest.mark.parametrize("as_data", [lambda tensor: tensor, lambda tensor: tensor.tolist()], ids=["tensors", "lists"])
def test_uncertainty(as_data):
    generator = torch.Generator().manual_seed(0)
    logits, others = torch.randn(2, 40, 3, 5, generator=generator).unbind(0)
    labels = (logits.mean(1) + torch.randn(40, 5, generator=generator)).argmax(-1)

    def everything() -> list:
        member_logits, truth = as_data(logits), as_data(labels)
        return [
            decompose(member_logits).total.tolist(),
            classification_metrics(member_logits, truth),
            diversity_metrics(member_logits),
            ood_metrics(ood_score(member_logits), ood_score(as_data(others))),
            TemperatureScaling.fit(member_logits, truth).temperature,
        ]

    expected = copy.deepcopy(everything())
    with ELSEWHERE:
        assert everything() == expected
