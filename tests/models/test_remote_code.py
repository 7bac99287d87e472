"""Hydras whose classes came with their repository (`trust_remote_code`), side by side with those of the package."""

import pytest
import torch
from peft import get_peft_model
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.pruning import extract_circuit, prune_heads, taylor_scores
from hydra_transformers.training import PostPruningCallback, lora_config
from tests.families import CLIP, VIT, each_of, images
from tests.fresh_process import run_fresh


@pytest.fixture
def by_remote_code(family, tmp_path, remote_code):
    """Two members, each loaded with the code of a repository of its own, and the same members by the package's."""
    members = family.members()[:2]
    loaded = []
    for index, member in enumerate(members):
        folder = tmp_path / f"{family.name}-{index}"
        member.save_pretrained(folder)
        reference = next(name for name in member.config.auto_classes.values() if name.endswith(family.hydra.__name__))
        loaded.append(get_class_from_dynamic_module(reference, folder).from_pretrained(folder))
    assert len({type(member) for member in (*members, *loaded)}) == 3
    return loaded, members


@pytest.mark.slow
@each_of([VIT, CLIP])
@torch.no_grad()
def test_members_of_several_repositories_are_fused(family, by_remote_code):
    loaded, members = by_remote_code
    inputs = family.inputs()
    expected = family.hydra.from_pruned_members(members, shared=())(**inputs).member_logits
    for fuse, parts in (
        (family.hydra.from_pruned_members, loaded),
        (family.hydra.from_pruned_members, [loaded[0], members[1]]),
        (type(loaded[0]).from_pruned_members, [members[0], loaded[1]]),
    ):
        hydra = fuse(parts, shared=())
        torch.testing.assert_close(hydra(**inputs).member_logits, expected)
    again = family.hydra.from_pruned_members([type(loaded[1]).from_pruned_members(loaded, shared=())], shared=())
    torch.testing.assert_close(again(**inputs).member_logits, expected)


@pytest.mark.slow
@each_of([VIT])
def test_the_package_works_on_them_as_on_its_own(family, by_remote_code):
    loaded, members = by_remote_code
    data = [{"pixel_values": images(), "labels": torch.tensor([0, 1, 2, 3])}]
    assert taylor_scores(loaded[0], data) == taylor_scores(members[0], data)
    rankings = [extract_circuit(each, data, budget=2).ranking for each in (loaded[0], members[0])]
    assert rankings[0] == rankings[1]
    assert prune_heads(loaded[0], {0: [2]}).config.kept_heads[0] == [[0, 3]]
    configs = [lora_config(each).target_parameters for each in (loaded[0], members[0])]
    assert configs[0] == configs[1] != []
    get_peft_model(loaded[1], lora_config(loaded[1]))
    assert PostPruningCallback().trains(loaded[0]) == PostPruningCallback().trains(members[0])
    assert count_multiply_adds(loaded[0]) == count_multiply_adds(members[0])


LOADED_BEFORE_THE_PACKAGE = """
import sys, torch
from transformers import AutoModelForImageClassification
folder = sys.argv[1]
first, second = (
    AutoModelForImageClassification.from_pretrained(f"{folder}/{name}", trust_remote_code=True) for name in "ab"
)
assert not type(first).__module__.startswith("hydra_transformers"), type(first).__module__
from hydra_transformers import HydraViTForImageClassification
from hydra_transformers.pruning import taylor_scores
from hydra_transformers.training import lora_config
pixel_values = torch.randn(4, 3, 8, 8)
assert len(taylor_scores(first, [{"pixel_values": pixel_values, "labels": torch.tensor([0, 1, 2, 3])}])) == 12
assert lora_config(second).target_parameters
hydra = HydraViTForImageClassification.from_pruned_members([first, second], shared=())
with torch.no_grad():
    expected = torch.cat([each(pixel_values).member_logits for each in (first, second)], 1)
    torch.testing.assert_close(hydra(pixel_values).member_logits, expected)
"""


@pytest.mark.slow
def test_a_hydra_loaded_before_the_package_is_imported(tmp_path):
    for seed, name in enumerate("ab"):
        VIT.hydra.from_backbone(VIT.backbone(seed).float()).save_pretrained(tmp_path / name)
    result = run_fresh(LOADED_BEFORE_THE_PACKAGE, tmp_path, folder=tmp_path)
    assert result.returncode == 0, result.stderr
