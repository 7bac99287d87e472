"""Running a Hydra like any Transformers model: compiled, exported, checkpointed, in every dtype, spread over devices."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hydra_transformers import HydraViTConfig, HydraViTForImageClassification
from hydra_transformers.models import modeling_hydra
from hydra_transformers.pruning import prune_heads
from tests.families import (
    BEIT,
    BERT,
    CLIP,
    DEBERTA,
    LLAMA,
    MODERNBERT,
    OWN_LAYERS,
    VIT,
    for_families,
    keep_first_layers,
)


# How many heads members keep is decided in the attention, which all families share.
COMPILED = [(VIT, "all"), *((family, "ragged") for family in (VIT, CLIP, BEIT, DEBERTA, MODERNBERT, LLAMA))]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family, heads", COMPILED, ids=[f"{family.name}-{heads}" for family, heads in COMPILED])
def test_compiles_as_one_graph(family, heads):
    """A backend gets the graph of the whole model. What it makes of it is torch's: test_exports has all operations."""
    hydra, inputs = family.fused(heads), family.inputs()
    if family not in (VIT, MODERNBERT):  # whose layers are the common ones, and not all alike
        keep_first_layers(hydra)
    compiled = torch.compile(hydra, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs).member_logits, hydra(**inputs).member_logits)
    torch.compiler.reset()


@pytest.mark.slow
@torch.no_grad()
def test_compiled_attention_has_no_mask_where_none_was_given():
    """Some versions of Transformers make one that masks nothing, and flash attention takes none."""
    hydra = BERT.fused()
    inputs = {"input_ids": BERT.inputs()["input_ids"]}
    graphs = []
    torch.compile(hydra, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)(**inputs)
    torch.compiler.reset()
    attention = torch.nn.functional.scaled_dot_product_attention
    calls = [node for graph in graphs for node in graph.graph.nodes if node.target is attention]
    assert calls and all(call.kwargs["attn_mask"] is None for call in calls)


def test_gradient_checkpointing_gives_the_same_gradients(family):
    hydra = family.fused().train()
    for module in hydra.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = module.position_dropout = 0.0

    def gradients():
        hydra.zero_grad()
        hydra(**family.inputs()).member_logits.square().sum().backward()
        return {name: p.grad.clone() for name, p in hydra.named_parameters() if p.grad is not None}

    expected = gradients()
    hydra.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name])


@for_families(OWN_LAYERS)
def test_dropout_is_active_in_training_only(family):
    backbone = family.backbone(0, **({} if family.has_towers else family.dropout))
    if family.has_towers:
        backbone.config.vision_config.attention_dropout = 0.3
    hydra = family.hydra.from_pruned_members([backbone, backbone], shared=(), allow_equal=True)
    inputs = family.inputs()
    assert torch.equal(hydra(**inputs).member_logits, hydra(**inputs).member_logits)
    hydra.train()
    assert not torch.equal(hydra(**inputs).member_logits, hydra(**inputs).member_logits)
    torch.manual_seed(0)
    member_logits = hydra(**inputs).member_logits
    assert not torch.equal(member_logits[:, 0], member_logits[:, 1])  # equal members, each with its own dropout


@torch.no_grad()
@for_families([VIT, CLIP])
def test_position_encodings_are_interpolated_for_larger_images(family):
    backbones = [family.backbone(seed) for seed in range(2)]
    hydra = family.hydra.from_pruned_members(backbones, shared=())
    larger = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    inputs = {**family.inputs(), "pixel_values": larger, "interpolate_pos_encoding": True}
    expected = torch.stack([family.logits(backbone, **inputs) for backbone in backbones], dim=1)
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    with pytest.raises(ValueError, match="doesn't match model"):
        hydra(**{**inputs, "interpolate_pos_encoding": False})


@for_families([VIT, CLIP])
@torch.no_grad()
def test_runs_with_parts_offloaded_to_disk(family, tmp_path):
    hydra = family.fused().float()
    hydra.save_pretrained(tmp_path / "model")
    device_map = {name: "cpu" for name, _ in hydra.named_children()}
    device_map.update({name: "cpu" for name, _ in hydra.named_parameters(recurse=False)})
    layers = next(name for name, _ in hydra.named_modules() if name.endswith("layers"))
    parent = layers.rpartition(".")[0]
    del device_map[parent.split(".")[0]]
    device_map.update({f"{parent}.{name}": "cpu" for name, _ in hydra.get_submodule(parent).named_children()})
    device_map[layers] = "disk"
    inputs = family.inputs_in(torch.float32)
    expected = hydra(**inputs).member_logits
    loaded = family.hydra.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(loaded(**inputs).member_logits, expected)


@for_families([VIT, LLAMA])
@torch.no_grad()
def test_autocast_is_respected(family):
    hydra = family.fused("all").float()
    inputs = family.inputs_in(torch.float32)
    expected = hydra(**inputs).member_logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        member_logits = hydra(**inputs).member_logits
    assert not torch.equal(member_logits.float(), expected)
    torch.testing.assert_close(member_logits.float(), expected, atol=0.3, rtol=0.3)


@torch.no_grad()
@for_families([VIT, BERT])
def test_large_batches_are_one_product_per_member_with_the_same_answers(family, monkeypatch):
    for heads in ("ragged", "all"):
        hydra, inputs = family.fused(heads), family.inputs()
        expected = hydra(**inputs).member_logits
        with monkeypatch.context() as patch:
            patch.setattr(modeling_hydra, "ROWS_FOR_ONE_PRODUCT_PER_MEMBER", 0)
            torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)


# `torch.set_default_device` and `with torch.device(...)` are for new models; what exists is computed where it lies. Nothing can
# be computed on this one, so that any tensor which strays there is noticed, as on a GPU beside the CPU's.
ELSEWHERE = torch.device("meta")


@for_families([VIT, CLIP])
def test_fusing_and_taking_apart_leaves_weights_where_they_are(family):
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
def test_inference_is_where_the_model_is(family):
    hydra, inputs = family.fused(), family.inputs()
    expected = hydra(**inputs).member_logits
    with ELSEWHERE:
        assert torch.equal(hydra(**inputs).member_logits, expected)


# The paper's numbers


def vit_b16(kept: list[list[int]]) -> HydraViTForImageClassification:
    with torch.device("meta"):
        return HydraViTForImageClassification(HydraViTConfig(num_labels=1000, kept_heads=[kept] * 12)).eval()


def multiply_adds(model, **kwargs) -> float:
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 224, 224, device="meta"), **kwargs)
    return counter.get_total_flops() / 2


def test_three_members_of_eight_heads_have_the_papers_size():
    hydra = vit_b16([list(range(8)), list(range(2, 10)), list(range(4, 12))])
    assert sum(parameter.numel() for parameter in hydra.parameters()) == 116_463_288
    everything = multiply_adds(hydra, output_hidden_states=True)
    assert everything == pytest.approx(46.19e9, rel=0.01)
    assert multiply_adds(hydra) < 0.94 * everything
