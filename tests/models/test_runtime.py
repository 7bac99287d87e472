"""Running a Hydra like any Transformers model: compiled, exported, checkpointed, in every dtype, spread over devices."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTConfig, ViTForImageClassification

from hydra_transformers import HydraViTConfig, HydraViTForImageClassification
from hydra_transformers.models import modeling_hydra
from hydra_transformers.models.images import as_patch_projection
from hydra_transformers.models.modeling_hydra import GroupedLinear, GroupedOutput, is_exporting
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
    randomise,
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
def test_loads_with_dtype_and_device_map(family, tmp_path):
    hydra = family.fused()
    hydra.save_pretrained(tmp_path)
    loaded = family.hydra.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert loaded.dtype == torch.bfloat16
    for name, parameter in hydra.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.to(torch.bfloat16)), name


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


@for_families(OWN_LAYERS)
@torch.no_grad()
def test_runs_on_the_meta_device(family):
    hydra = family.fused().to("meta")
    inputs = {key: value.to("meta") for key, value in family.inputs().items() if key != "attention_mask"}
    outputs = hydra(**inputs)
    assert outputs.member_logits.shape[:2] == (4, 3)


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


# Grouped layers


@pytest.mark.parametrize("rows_for_one_product_per_member", [0, 10**9], ids=["one product per member", "batched"])
@pytest.mark.parametrize("widths", [[6, 6, 6], [6, 0, 3]])
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linears_equal_one_linear_per_member(monkeypatch, widths, bias, rows_for_one_product_per_member):
    monkeypatch.setattr(modeling_hydra, "ROWS_FOR_ONE_PRODUCT_PER_MEMBER", rows_for_one_product_per_member)
    linear = randomise(GroupedLinear(5, widths, bias=bias).double(), 0)
    inputs = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    biases = linear.bias.split(widths) if bias else [None] * 3
    expected = [
        torch.nn.functional.linear(inputs[m], weight, biases[m])
        for m, weight in enumerate(linear.weight.split(widths))
    ]
    same = torch.nn.functional.linear(inputs[0], linear.weight, linear.bias).split(widths, -1)
    if linear.is_uniform:
        torch.testing.assert_close(linear(inputs), torch.stack(expected))
        torch.testing.assert_close(linear(inputs[:1]), torch.stack(same))
        torch.testing.assert_close(linear(inputs, [slice(2, 5)] * 3), torch.stack(expected)[..., 2:5])
    else:  # the member without rows is left out
        torch.testing.assert_close(linear(inputs), (expected[0], expected[2]))
        torch.testing.assert_close(linear(inputs[:1]), (same[0], same[2]))
        parts = linear(inputs, [slice(2, 4), slice(0, 0), slice(1, 2)])
        torch.testing.assert_close(parts, (expected[0][..., 2:4], expected[2][..., 1:2]))


@pytest.mark.parametrize("rows_for_one_product_per_member", [0, 10**9], ids=["one product per member", "batched"])
@pytest.mark.parametrize("widths", [[6, 6, 6], [6, 0, 3]])
def test_grouped_outputs_equal_one_linear_per_member(monkeypatch, widths, rows_for_one_product_per_member):
    monkeypatch.setattr(modeling_hydra, "ROWS_FOR_ONE_PRODUCT_PER_MEMBER", rows_for_one_product_per_member)
    output = randomise(GroupedOutput(widths, 5).double(), 0)
    packed = torch.randn(2, 4, sum(widths), dtype=torch.float64)
    expected = torch.stack(
        [
            part @ weight + output.bias[m]
            for m, (part, weight) in enumerate(zip(packed.split(widths, -1), output.weight.split(widths), strict=True))
        ]
    )
    given = torch.stack(packed.split(widths, -1)) if output.is_uniform else packed
    torch.testing.assert_close(output(given), expected)


def test_a_grouped_output_without_heads_gives_its_biases():
    output = randomise(GroupedOutput([0, 0, 0], 5).double(), 0)
    given = output(torch.zeros(3, 2, 4, 0, dtype=torch.float64))
    torch.testing.assert_close(given, output.bias[:, None, None].expand(3, 2, 4, 5))


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


def test_a_dense_member_has_the_size_of_the_backbone():
    with torch.device("meta"):
        backbone = ViTForImageClassification(ViTConfig(num_labels=1000)).eval()
    hydra = vit_b16([list(range(12))])
    assert sum(p.numel() for p in hydra.parameters()) == sum(p.numel() for p in backbone.parameters()) == 86_567_656
    assert multiply_adds(hydra, output_hidden_states=True) == pytest.approx(multiply_adds(backbone), rel=1e-6)


def test_ragged_heads_are_not_padded_in_the_checkpoint():
    hydra = VIT.fused()
    for layer, kept in zip(hydra.vit.layers, hydra.config.kept_heads, strict=True):
        heads = sum(len(member) for member in kept)
        assert layer.attention.qkv_proj.weight.shape == (3 * heads * 8, 32)
        assert layer.attention.o_proj.weight.shape == (heads * 8, 32)


def test_a_compilation_is_no_export():
    """Older compilers say of every compilation that it is one; what an export must not choose by size, they may."""
    found = []

    def function(tensor):
        found.append(is_exporting())
        return tensor + 1

    torch.compile(function, backend="eager")(torch.ones(2))
    torch.compiler.reset()

    class Module(torch.nn.Module):
        def forward(self, tensor):
            return function(tensor)

    torch.export.export(Module(), (torch.ones(2),))
    torch.jit.trace(Module(), torch.ones(2), check_trace=False)
    assert found[0] is False and True in found[1:] and not is_exporting()


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_the_patch_product_is_the_convolution(bias):
    convolution = nn.Conv2d(3, 8, kernel_size=4, stride=4, bias=bias).double()
    projection = as_patch_projection(convolution).double()
    projection.load_state_dict(convolution.state_dict())
    pixel_values = torch.randn(2, 3, 18, 12, dtype=torch.float64)  # a height that is no multiple of the patch
    torch.testing.assert_close(projection(pixel_values), convolution(pixel_values))
