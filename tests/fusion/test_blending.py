"""Members' weights on the way to their mean, and the cosines between them."""

import copy

import pytest
import torch

from hydra_transformers import AutoHydra
from hydra_transformers.fusion.blending import (
    PARTS,
    difference_cosines,
    has_equal_heads,
    moved,
    weight_cosines,
    weights_of,
)
from tests.families import BERT, FAMILIES, LLAMA, VIT


CLASSIFIERS = [family for family in FAMILIES if not family.has_towers]
SUBSETS = [("embeddings",), ("layernorm",), ("mlp",), ("embeddings", "layernorm", "mlp")]


def weights_by_part(hydra):
    return {part: weights_of(hydra, part) for part in PARTS}


def member_logits(model, family):
    with torch.no_grad():
        return model(**family.inputs()).member_logits


@pytest.mark.parametrize("family", [VIT, BERT, LLAMA], ids=lambda family: family.name)
def test_at_the_mean_members_answer_as_in_the_fused_hydra(family):
    members = family.members()
    hydra = AutoHydra.from_pruned_members(members, shared=())
    weights = weights_by_part(hydra)
    for shared in SUBSETS:
        fused = AutoHydra.from_pruned_members(members, shared=shared)
        with moved(weights[part] for part in shared):
            torch.testing.assert_close(member_logits(hydra, family), member_logits(fused, family))


@pytest.mark.parametrize("family", CLASSIFIERS, ids=lambda family: family.name)
def test_every_parameter_belongs_to_one_part(family):
    hydra = AutoHydra.from_pruned_members([family.backbone(0), family.backbone(1)], shared=())
    weights = weights_by_part(hydra)
    assert all(weights[part] for part in PARTS)
    assert sum(tensor.numel() for part in PARTS for each in weights[part].values() for tensor in each) == sum(
        parameter.numel() for parameter in hydra.parameters()
    )


def test_on_the_way_each_member_keeps_a_share_of_its_own():
    hydra = AutoHydra.from_pruned_members([VIT.backbone(seed) for seed in range(2)], shared=())
    found = []
    for t in (0.0, 0.5, 1.0):
        with moved([weights_of(hydra, "mlp")], t):
            found.append(copy.deepcopy(weights_by_part(hydra)))
    own, half, mean = found
    for name, tensors in own["mlp"].items():
        for m, tensor in enumerate(tensors):
            torch.testing.assert_close(half["mlp"][name][m], (tensor + mean["mlp"][name][m]) / 2)
        assert torch.equal(*mean["mlp"][name])
    for part in set(PARTS) - {"mlp"}:
        for name, tensors in own[part].items():
            assert all(map(torch.equal, tensors, mean[part][name]))


@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_weights_are_moved_for_a_while(family):
    members = [family.backbone(seed) for seed in range(3)]
    hydra = AutoHydra.from_pruned_members(members, shared=())
    before, own = copy.deepcopy(hydra.state_dict()), member_logits(hydra, family)
    for t in (0.5, 1.0):
        with pytest.raises(InterruptedError), moved([weights_of(hydra, part) for part in ("layernorm", "mlp")], t):
            assert not torch.equal(member_logits(hydra, family), own)
            raise InterruptedError
        torch.testing.assert_close(hydra.state_dict(), before, rtol=0, atol=0)
        assert torch.equal(member_logits(hydra, family), own)


def test_members_with_other_heads_have_no_mean_attention():
    ragged = AutoHydra.from_pruned_members(VIT.members(), shared=())
    assert not has_equal_heads(ragged) and weights_by_part(ragged)["attention"] == {}
    alike = AutoHydra.from_pruned_members(
        [VIT.hydra.from_backbone(VIT.backbone(s), {0: [1]}) for s in (0, 1)], shared=()
    )
    assert has_equal_heads(alike)
    as_many = [VIT.hydra.from_backbone(VIT.backbone(0), {0: [head]}) for head in (0, 1)]
    assert not has_equal_heads(AutoHydra.from_pruned_members(as_many, shared=()))


@pytest.mark.slow
@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_cosines_are_those_of_the_flattened_weights(family):
    start, *members = (family.backbone(seed) for seed in range(3))
    hydra = AutoHydra.from_pruned_members(members, shared=())
    a, b = (torch.cat([tensors[m].flatten() for tensors in weights_of(hydra, "mlp").values()]) for m in (0, 1))
    assert weight_cosines(hydra)["mlp"]["0-1"] == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), abs=1e-5)
    first = weights_of(AutoHydra.from_pruned_members([start, start], shared=(), allow_equal=True), "mlp")
    c = torch.cat([tensors[0].flatten() for tensors in first.values()])
    expected = float(torch.cosine_similarity(a - c, b - c, dim=0))
    for pretrained in (start, start.base_model, AutoHydra.from_backbone(start)):  # with a head and without
        assert difference_cosines(hydra, pretrained)["mlp"]["0-1"] == pytest.approx(expected, abs=1e-5)


def test_what_nobody_trained_has_no_cosine():
    start = VIT.backbone(0)
    members = [VIT.backbone(0) for _ in range(2)]
    with torch.no_grad():
        for member in members:
            member.vit.layers[0].mlp.fc1.weight += torch.randn_like(member.vit.layers[0].mlp.fc1.weight)
    cosines = difference_cosines(AutoHydra.from_pruned_members(members, shared=()), start)
    assert cosines["embeddings"] == {"0-1": None} and abs(cosines["mlp"]["0-1"]) < 0.5


def test_heads_that_pretraining_had_are_not_compared_with_those_that_are_left():
    pruned = [VIT.hydra.from_backbone(VIT.backbone(seed), {0: [1]}) for seed in (1, 2)]
    hydra = AutoHydra.from_pruned_members(pruned, shared=())
    assert "attention" in weight_cosines(hydra) and "attention" not in difference_cosines(hydra, VIT.backbone(0))


@pytest.mark.parametrize(
    ("pretrained", "message"),
    [
        (BERT.backbone(0), "pretrained is not what these members were fine-tuned from: .* is built from vit models"),
        (VIT.backbone(0, image_size=16), r"position_embeddings has the shape \(1, 17, 32\) in pretrained"),
        (VIT.backbone(0, num_hidden_layers=2), "is missing in pretrained"),
    ],
)
def test_another_pretrained_model_is_refused(pretrained, message):
    hydra = AutoHydra.from_pruned_members([VIT.backbone(1), VIT.backbone(2)], shared=())
    with pytest.raises(ValueError, match=message):
        difference_cosines(hydra, pretrained)
