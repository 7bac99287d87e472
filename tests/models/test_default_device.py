"""`torch.set_default_device` and `with torch.device(...)` are for new models; what exists is computed where it lies."""

import torch

from hydra_transformers.pruning import prune_heads
from tests.families import CLIP, OWN_LAYERS, VIT, for_families


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
