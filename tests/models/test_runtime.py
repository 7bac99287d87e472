"""Running a Hydra like any Transformers model: compiled, exported, checkpointed, in every dtype, spread over devices."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, CLIPTextModel, CLIPVisionModel

from hydra_transformers import HydraCLIPTextModel, HydraCLIPVisionModel, HydraViTConfig, HydraViTForImageClassification
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
    bert_backbone,
    clip_backbone,
    each_of,
    images,
    keep_layers,
    padded_texts,
)


# How many heads members keep is decided in the attention, which all families share.
COMPILED = [(VIT, "all"), *((family, "ragged") for family in (VIT, CLIP, BEIT, DEBERTA, MODERNBERT, LLAMA))]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family, heads", COMPILED, ids=[f"{family.name}-{heads}" for family, heads in COMPILED])
def test_compiles_as_one_graph(family, heads):
    """A backend gets the graph of the whole model. What it makes of it is torch's: test_exports has all operations."""
    hydra = family.fused(heads)
    inputs = family.inputs()
    if family is not VIT:  # whose layers are the common ones; those of ModernBERT are of two kinds
        keep_layers(hydra, *((0, 2) if family is MODERNBERT else (2,)))
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


@each_of(OWN_LAYERS)
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
@each_of([VIT, CLIP])
def test_position_encodings_are_interpolated_for_larger_images(family):
    backbones = [family.backbone(seed) for seed in range(2)]
    hydra = family.hydra.from_pruned_members(backbones, shared=())
    larger = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    inputs = {**family.inputs(), "pixel_values": larger, "interpolate_pos_encoding": True}
    expected = torch.stack([family.logits(backbone, **inputs) for backbone in backbones], dim=1)
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    with pytest.raises(ValueError, match="doesn't match model"):
        hydra(**{**inputs, "interpolate_pos_encoding": False})


@each_of([VIT, CLIP])
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
    loaded = family.hydra.from_pretrained(tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "off")
    torch.testing.assert_close(loaded(**inputs).member_logits, expected)


@each_of([VIT, LLAMA])
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
@each_of([VIT, BERT])
def test_large_batches_are_one_product_per_member_with_the_same_answers(family, monkeypatch):
    for heads in ("ragged", "all"):
        hydra = family.fused(heads)
        inputs = family.inputs()
        expected = hydra(**inputs).member_logits
        with monkeypatch.context() as patch:
            patch.setattr(modeling_hydra, "ROWS_FOR_ONE_PRODUCT_PER_MEMBER", 0)
            torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)


# `torch.set_default_device` and `with torch.device(...)` are for new models; what exists is computed where it lies. Nothing can
# be computed on this one, so that any tensor which strays there is noticed, as on a GPU beside the CPU's.
ELSEWHERE = torch.device("meta")


@each_of([VIT, CLIP])
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


@each_of(OWN_LAYERS)
@torch.no_grad()
def test_inference_is_where_the_model_is(family):
    hydra = family.fused()
    inputs = family.inputs()
    expected = hydra(**inputs).member_logits
    with ELSEWHERE:
        assert torch.equal(hydra(**inputs).member_logits, expected)


# Corners of real use: odd configs, masks, dropout for sampling, towers alone, replicas


def fused(family, **fields):
    """Three members that keep all heads."""
    return family.hydra.from_pruned_members([family.backbone(seed, **fields) for seed in range(3)])


@torch.no_grad()
def test_a_mask_that_broadcasts_over_the_batch():
    texts = padded_texts()
    hydra = fused(BERT)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    mask[..., 5:] = False
    one_each = hydra(input_ids=texts["input_ids"], attention_mask=mask.expand(4, 1, 7, 7)).member_logits
    broadcast = hydra(input_ids=texts["input_ids"], attention_mask=mask).member_logits
    torch.testing.assert_close(broadcast, one_each)
    with pytest.raises(ValueError, match="attention_mask has 4 heads: members have other heads each"):
        hydra(input_ids=texts["input_ids"], attention_mask=mask.expand(4, 4, 7, 7))


@torch.no_grad()
@pytest.mark.parametrize("where", ["output_dropout", "mlp_dropout", "attention"])
def test_single_dropouts_can_be_switched_on_to_sample(where):
    hydra = fused(BERT, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    texts = padded_texts()
    assert torch.equal(hydra(**texts).member_logits, hydra(**texts).member_logits)
    for layer in hydra.bert.layers:
        layer.get_submodule(where).train()
    assert not torch.equal(hydra(**texts).member_logits, hydra(**texts).member_logits)


@torch.no_grad()
def test_replicas_of_data_parallel_run():
    """What `nn.DataParallel` makes on several GPUs: copies of the modules with parameters as plain attributes."""
    hydra = fused(CLIP)
    inputs = CLIP.inputs()
    expected = hydra(**inputs).member_logits
    copies = {module: module._replicate_for_data_parallel() for module in hydra.modules()}
    for module, copy in copies.items():
        for name, parameter in module._parameters.items():
            copy._parameters.pop(name, None)
            setattr(copy, name, None if parameter is None else parameter.detach())
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copies[child]
    torch.testing.assert_close(copies[hydra](**inputs).member_logits, expected)


def test_word_embeddings_of_their_own_are_not_resized_in_the_fused_model(tmp_path):
    own = BERT.hydra.from_pruned_members([bert_backbone(seed) for seed in range(2)], shared=())
    with pytest.raises(ValueError, match="each member has word embeddings of its own"):
        own.resize_token_embeddings(50)
    own.save_pretrained(tmp_path)  # nothing was resized
    loaded = BERT.hydra.from_pretrained(tmp_path).to(own.dtype)
    assert all(map(torch.equal, loaded.state_dict().values(), own.state_dict().values()))
    shared = fused(BERT)
    shared.resize_token_embeddings(50)
    assert shared.get_input_embeddings().weight.shape[0] == 50


@pytest.mark.slow
@torch.no_grad()
def test_clip_towers_stand_alone(tmp_path):
    hydra = CLIP.fused()
    hydra.save_pretrained(tmp_path / "clip")
    inputs = CLIP.inputs()
    texts = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    for name, tower_class, arguments in (
        ("text", HydraCLIPTextModel, texts),
        ("vision", HydraCLIPVisionModel, {"pixel_values": inputs["pixel_values"]}),
    ):
        expected = getattr(hydra, f"{name}_model")(**arguments).pooler_output
        from_whole = tower_class.from_pretrained(tmp_path / "clip")
        torch.testing.assert_close(from_whole(**arguments).pooler_output, expected)
        from_whole.save_pretrained(tmp_path / name)
        again = AutoModel.from_pretrained(tmp_path / name)
        assert type(again) is tower_class
        torch.testing.assert_close(again(**arguments).pooler_output, expected)


@torch.no_grad()
def test_clip_towers_come_from_clip_towers():
    whole = clip_backbone()
    vision = whole.vision_model
    text = whole.text_model
    assert isinstance(vision, CLIPVisionModel) and isinstance(text, CLIPTextModel)
    member = HydraCLIPVisionModel.from_backbone(vision, {0: [1]})
    assert member.config.kept_heads[0] == [[0, 2, 3]]
    dense = HydraCLIPVisionModel.from_backbone(vision)
    torch.testing.assert_close(dense(images()).pooler_output, vision(images()).pooler_output, atol=1e-12, rtol=1e-10)
    texts = padded_texts(3)
    torch.testing.assert_close(
        HydraCLIPTextModel.from_backbone(text)(**texts).pooler_output,
        text(**texts).pooler_output,
        atol=1e-12,
        rtol=1e-10,
    )
    with pytest.raises(ValueError, match=r"CLIPModel \(clip\): HydraCLIPVisionModel takes clip_vision_model"):
        HydraCLIPVisionModel.from_backbone(whole)


def test_what_a_hydra_has_no_part_for_is_refused():
    with pytest.raises(ValueError, match="bool_masked_pos is for masked image modelling"):
        VIT.members()[0].vit(images(), bool_masked_pos=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="flex_attention"):
        BERT.fused().set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="num_hidden_layers is 0"):
        HydraViTConfig(num_hidden_layers=0)


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
