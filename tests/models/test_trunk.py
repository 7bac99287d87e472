"""The trunk: leading layers that are one for all members run once, and nobody sees a difference."""

import copy
import json
from functools import cache

import pytest
import torch
from torch import nn

from hydra_transformers import AutoHydra, HydraCLIPConfig, HydraViTConfig
from hydra_transformers.cost import count_multiply_adds, count_parameters, multiply_adds_of
from hydra_transformers.fusion.reading import read_members
from hydra_transformers.fusion.structure import attention_names, slots, tower_configs, without_weights
from hydra_transformers.fusion.trunk import equal_layers, trunk_depth
from hydra_transformers.training.parameter_groups import places
from tests.families import CLIP, DISTINCT, LLAMA, MODERNBERT, OWN_LAYERS, SIGLIP, SIZES, VIT, Family, each_of


LAYERS = 3
TRUNK = 2


def in_trunk(model: nn.Module, layers: int) -> list[str]:
    """The parameters of the first layers and of what comes before them."""
    return [name for name, place in places(model).items() if place.layers_to_end > LAYERS - layers]


@cache
def _members(family: Family, layers: int):
    prunings = [{0: [1], 2: lost} if layers < LAYERS else {0: [1]} for lost in ([0], [], [0, 1, 2, 3])]
    members = [
        family.hydra.from_backbone(family.backbone(seed), family.in_every_tower(pruned))
        for seed, pruned in enumerate(prunings)
    ]
    with torch.no_grad():
        for name in in_trunk(members[0], layers):
            for member in members[1:]:
                member.get_parameter(name).copy_(members[0].get_parameter(name))
    return members


def members_with_trunk(family: Family, layers: int = TRUNK):
    """Members of different backbones but for what comes before and in the first layers; behind these with ragged heads."""
    return copy.deepcopy(_members(family, layers))


@cache
def _pair(family: Family, layers: int):
    members = _members(family, layers)
    return family.hydra.from_pruned_members(members), family.hydra.from_pruned_members(members, trunk_layers=0)


def with_and_without(family: Family, layers: int = TRUNK):
    """The same members fused with a trunk, and without one."""
    return copy.deepcopy(_pair(family, layers))


def trunk_layers(hydra: nn.Module) -> set[int]:
    return {config.trunk_layers for config in tower_configs(hydra.config).values()}


def assert_close(found, expected) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def runs_of_layers(hydra: nn.Module, inputs: dict) -> list[int]:
    """How many members each layer computes."""
    seen = []
    hooks = [
        hydra.get_submodule(name.removesuffix(".attention")).register_forward_hook(
            lambda module, given, states: seen.append(states.shape[0])
        )
        for names in attention_names(hydra).values()
        for name in names
    ]
    hydra(**inputs)
    for hook in hooks:
        hook.remove()
    return seen


# What it computes


# Where the trunk ends is decided above the layers: in encoders, in decoders, and where layers are not all alike.
ENDS = [(family, layers) for family in (CLIP, LLAMA, MODERNBERT) for layers in (1, LAYERS)]
TRUNKS = [*ENDS, *((family, TRUNK) for family in DISTINCT)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), TRUNKS, ids=[f"{family.name}-{layers}" for family, layers in TRUNKS])
def test_a_trunk_changes_no_answer(family, layers):
    """With gradients and without."""
    hydra, whole = with_and_without(family, layers)
    assert trunk_layers(hydra) == {layers} and trunk_layers(whole) == {0}
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            for inputs in (family.inputs(), {key: value[:3] for key, value in family.inputs().items()}):
                found = hydra(**inputs)
                expected = whole(**inputs)
                assert_close(found.member_logits, expected.member_logits)
                assert_close(family.ensemble_logits(found), family.ensemble_logits(expected))


@each_of([CLIP, LLAMA])
def test_a_layer_of_the_trunk_runs_once(family):
    found = runs_of_layers(with_and_without(family)[0], family.inputs())
    assert found == [1, 1, 3] * len(family.outputs)
    found = runs_of_layers(with_and_without(family, LAYERS)[0], family.inputs())
    assert found == [1, 1, 1] * len(family.outputs)


@each_of([CLIP, LLAMA])
@torch.no_grad()
def test_states_between_the_layers_are_those_of_every_member(family):
    hydra, whole = with_and_without(family)
    for encoder, other in zip(encoders(family, hydra), encoders(family, whole), strict=True):
        inputs = inputs_of(encoder, family)
        found, expected = (each(**inputs, output_hidden_states=True) for each in (encoder, other))
        for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            assert_close(mine, theirs)
        assert_close(found.member_last_hidden_state, expected.member_last_hidden_state)
        assert_close(encoder(**inputs).last_hidden_state, expected.last_hidden_state)


def encoders(family: Family, hydra: nn.Module) -> list[nn.Module]:
    return [hydra.vision_model, hydra.text_model] if family.has_towers else [hydra.base_model]


def inputs_of(encoder: nn.Module, family: Family) -> dict:
    reads_images = encoder.main_input_name == "pixel_values"
    return {key: value for key, value in family.inputs().items() if (key == "pixel_values") == reads_images}


@each_of([CLIP, LLAMA])
def test_gradients_of_states_are_those_of_all_members_together(family):
    hydra, whole = with_and_without(family)
    for encoder, other in zip(encoders(family, hydra), encoders(family, whole), strict=True):
        gradients = []
        for each in (encoder, other):
            outputs = each(**inputs_of(each, family), output_hidden_states=True)
            states = outputs.hidden_states[:-1]
            loss = outputs.member_last_hidden_state.square().sum()
            gradients.append(torch.autograd.grad(loss, states))
        for layer, (mine, theirs) in enumerate(zip(*gradients, strict=True)):
            torch.testing.assert_close(mine.sum(dim=1), theirs.sum(dim=1), atol=family.gradient_tolerance, rtol=0)
            if layer >= TRUNK:
                torch.testing.assert_close(mine, theirs, atol=family.gradient_tolerance, rtol=0)


@torch.no_grad()
@each_of([CLIP])
def test_the_eager_backend_masks_the_trunk_too(family):
    hydra, whole = with_and_without(family)
    for each in (hydra, whole):
        each.set_attn_implementation("eager")
    outputs = hydra(**family.inputs(), output_attentions=True)
    assert_close(outputs.member_logits, whole(**family.inputs()).member_logits)
    attentions = outputs.vision_model_output.attentions if family.has_towers else outputs.attentions
    assert [weights.shape[:2] for weights in attentions] == [(4, 3), (4, 4), (4, 7)]


# Training


@each_of([CLIP, LLAMA])
def test_the_trunk_gets_the_sum_of_what_members_would(family):
    hydra, whole = with_and_without(family)
    for each in (hydra, whole):
        each(**family.inputs()).member_logits.square().sum().backward()
    for name, slot in slots(whole):
        mine = hydra.get_parameter(name).grad
        theirs = whole.get_parameter(name).grad
        if slot.rows is not None and name in in_trunk(hydra, TRUNK):
            theirs = torch.stack(theirs.split(slot.rows)).sum(0)
        # Where the trunk's states enter the products, their gradients are sums of those of three members.
        torch.testing.assert_close(mine, theirs, atol=family.gradient_tolerance, rtol=1e-10)


@each_of([VIT, CLIP])
def test_members_train_through_the_trunk_as_one(family):
    """With dropouts switched on, those of the embeddings included."""
    fields = {} if family.has_towers else family.dropout
    member = family.hydra.from_backbone(family.backbone(**fields))
    hydra = family.hydra.from_pruned_members([member, member], trunk_layers=TRUNK, allow_equal=True).train()
    assert runs_of_layers(hydra, family.inputs()) == [1, 1, 2] * len(family.outputs)


# Which layers


@each_of([CLIP, LLAMA])
def test_the_longest_run_of_equal_layers_is_found(family):
    read = [read_members(family.hydra, member, "member")[0] for member in members_with_trunk(family, LAYERS)]
    towers = list(family.outputs)
    assert equal_layers(family.hydra, read) == dict.fromkeys(towers, LAYERS)
    for name, place in places(_members(family, LAYERS)[0]).items():
        expected = LAYERS - min(place.layers_to_end, LAYERS)
        if place.layers_to_end == 0 or "mask_token" in name:
            continue
        tensor = read[2].tensors[name]
        read[2].tensors[name] = tensor.clone()
        read[2].tensors[name].view(-1)[-1] += 1e-6
        changed = "text" if name.startswith("text_") else towers[0]
        assert equal_layers(family.hydra, read) == dict.fromkeys(towers, LAYERS) | {changed: expected}, name
        read[2].tensors[name] = tensor


def test_found_only_where_all_that_can_be_shared_is():
    members = members_with_trunk(VIT)
    for shared in ((), ("embeddings", "mlp")):
        assert trunk_layers(VIT.hydra.from_pruned_members(members, shared=shared)) == {0}
    assert trunk_layers(VIT.hydra.from_backbone(members[0])) == {0}


def test_equal_weights_of_other_heads_are_no_trunk():
    backbone = VIT.backbone()
    for name, parameter in backbone.named_parameters():  # every head is the same
        if ".attention." in name:
            parameter.data.fill_(0.1)
    members = [VIT.hydra.from_backbone(backbone, {1: [head]}) for head in (0, 1)]
    assert torch.equal(*(member.vit.layers[1].attention.qkv_proj.weight for member in members))
    assert VIT.hydra.from_pruned_members(members).config.trunk_layers == 1


def test_the_towers_are_looked_at_one_by_one():
    members = members_with_trunk(CLIP)
    trunk = CLIP.hydra.from_pruned_members(members, trunk_layers={"vision": 1}).config
    assert (trunk.vision_config.trunk_layers, trunk.text_config.trunk_layers) == (1, TRUNK)
    backbone = CLIP.backbone()
    of_vision = [CLIP.hydra.from_backbone(backbone, {"vision": {2: [head]}}) for head in (0, 1)]
    config = CLIP.hydra.from_pruned_members(of_vision).config
    assert (config.vision_config.trunk_layers, config.text_config.trunk_layers) == (2, 0)
    assert config.text_config.num_members == 1


# Layers merged whole


@each_of([*OWN_LAYERS, SIGLIP])
@torch.no_grad()
@pytest.mark.parametrize("shared", [("embeddings", "layernorm", "mlp"), ("embeddings",)], ids=len)
def test_merged_layers_are_the_mean_of_the_members(family, shared):
    prunings = [{0: [1], 2: lost} for lost in ([0], [1, 2], [])]
    members = [
        family.hydra.from_backbone(family.backbone(seed), family.in_every_tower(pruned))
        for seed, pruned in enumerate(prunings)
    ]
    hydra = family.hydra.from_pruned_members(members, shared=shared, trunk_layers=TRUNK)
    averaged = set(in_trunk(members[0], TRUNK))
    averaged |= {name for name, place in places(members[0]).items() if place.part in shared}
    for name in averaged:
        mean = torch.stack([member.get_parameter(name) for member in members]).mean(0)
        for member in members:
            member.get_parameter(name).copy_(mean)
    for index, member in enumerate(members):
        expected = member(**family.inputs()).member_logits
        assert_close(hydra(**family.inputs()).member_logits[:, index : index + 1], expected)
        assert_close(hydra.member(index)(**family.inputs()).member_logits, expected)


@torch.no_grad()
def test_a_share_of_the_layers_is_rounded_down_and_saved_as_a_count(tmp_path):
    members = [VIT.backbone(seed) for seed in range(2)]
    found, expected = (AutoHydra.from_pruned_members(members, trunk_layers=each) for each in (0.75, 2))
    assert torch.equal(found(**VIT.inputs()).member_logits, expected(**VIT.inputs()).member_logits)
    found.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["trunk_layers"] == 2
    loaded = VIT.hydra.from_pretrained(tmp_path)
    assert torch.equal(loaded(**VIT.inputs()).member_logits, found(**VIT.inputs()).member_logits)
    towers = AutoHydra.from_pruned_members(
        [CLIP.backbone(seed) for seed in range(2)], trunk_layers={"vision": 0.5, "text": 0.0}
    ).config
    assert (towers.vision_config.trunk_layers, towers.text_config.trunk_layers) == (1, 0)
    assert trunk_depth(0.29, 100) == 29, "not 28, although 0.29 * 100 is below 29"


def merge(trunk_layers, **options):
    return VIT.hydra.from_pruned_members(members_with_trunk(VIT), trunk_layers=trunk_layers, **options)


def merge_equal(trunk_layers):
    return VIT.hydra.from_pruned_members([VIT.backbone()] * 2, trunk_layers=trunk_layers, allow_equal=True)


HAS_TO_SHARE = "members enter a trunk as one, so shared has to name 'embeddings'"
REFUSALS = [
    (lambda: merge(3), ValueError, r"in layer 2 members\[1\] keeps the heads \[0, 1, 2, 3\], members\[0\] keeps"),
    (lambda: merge_equal(4), ValueError, "trunk_layers is 4: pass 0 to 3, so many first layers"),
    (lambda: merge_equal(-1), ValueError, "trunk_layers is -1: pass 0 to 3, so many first layers"),
    (lambda: merge(1, shared=()), ValueError, HAS_TO_SHARE),
    (lambda: merge(1, shared=("mlp", "layernorm")), ValueError, HAS_TO_SHARE),
    *(
        (lambda wrong=wrong: merge(wrong), ValueError, f"trunk_layers is {wrong}: pass a share of the layers below 1")
        for wrong in (1.0, -0.5, float("nan"), True)
    ),
    (lambda: merge({"vision": 1}), ValueError, "trunk_layers names 'vision': pass a number"),
    (
        lambda: CLIP.hydra.from_pruned_members(members_with_trunk(CLIP), trunk_layers=3),
        ValueError,
        "in layer 2 of the vision tower",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS, ids=[words for _, _, words in REFUSALS])
def test_what_cannot_be_one_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_config_says_why_it_is_refused():
    kept = [[[0], [0]], [[1], [1, 2]], [[], []]]
    assert HydraViTConfig(kept_heads=kept, trunk_layers=1, **SIZES).members_in(0) == 1
    with pytest.raises(ValueError, match="trunk_layers is 2: pass 0 to 1, so many first layers have the same heads"):
        HydraViTConfig(kept_heads=kept, trunk_layers=2, **SIZES)
    with pytest.raises(ValueError, match="shared has to name 'embeddings'"):
        HydraViTConfig(kept_heads=kept, shared=["mlp"], trunk_layers=1, **SIZES)
    assert HydraViTConfig(trunk_layers=2, **SIZES).trunk_layers == 0, "one member is all trunk"
    towers = HydraCLIPConfig(vision_config={"kept_heads": kept, "trunk_layers": 1, **SIZES})
    assert towers.vision_config.trunk_layers == 1 and towers.text_config.trunk_layers == 0


# Taken apart, saved, counted


@each_of([*OWN_LAYERS, SIGLIP])
def test_members_of_a_trunk_are_whole(family):
    members = members_with_trunk(family)
    hydra = with_and_without(family)[0]
    own = set(in_trunk(members[0], TRUNK)) | {slot.name for _, slot in slots(hydra) if slot.rows is not None}
    for index, member in enumerate(members):
        apart = hydra.member(index)
        assert apart.config.kept_heads == member.config.kept_heads and trunk_layers(apart) == {0}
        for name in own:
            torch.testing.assert_close(apart.get_parameter(name), member.get_parameter(name), atol=1e-16, rtol=1e-15)
    for parts in ([hydra.member(index) for index in range(3)], [hydra]):
        again = family.hydra.from_pruned_members(parts)
        assert trunk_layers(again) == {TRUNK}
        assert_close(again(**family.inputs()).member_logits, hydra(**family.inputs()).member_logits)


def test_another_number_of_layers_in_the_config_is_not_loaded(tmp_path):
    with_and_without(VIT)[0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"trunk_layers": 1}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        VIT.hydra.from_pretrained(tmp_path)


def test_a_trunk_is_counted_once():
    hydra, whole = with_and_without(VIT)
    attention = sum(count_parameters(layer.attention) for layer in hydra.vit.layers[:TRUNK])
    assert count_parameters(whole) - count_parameters(hydra) == 2 * attention
    layers = without_weights(type(hydra), hydra.config).vit.layers[:TRUNK]
    states = torch.empty(1, 1, VIT.tokens, SIZES["hidden_size"], device="meta", dtype=torch.float64)
    of_trunk = sum(multiply_adds_of(layer.double(), hidden_states=states) for layer in layers)
    once = count_multiply_adds(whole) - 2 * of_trunk
    # Without a trunk, the first layer's queries, keys and values read the same states, but are products of their own.
    assert count_multiply_adds(hydra) == once
