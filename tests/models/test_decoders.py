"""Classifiers on causal language models, against plain Transformers models."""

import pytest
import torch
from transformers import PreTrainedModel

from hydra_transformers.fast.layers import fast_layer
from hydra_transformers.fusion import to_transformers
from hydra_transformers.pruning import prune_heads
from tests.families import DECODERS, GEMMA, GEMMA3, HEAD_DIM, LLAMA, QWEN2, QWEN3, Family, for_families, padded_texts


BACKENDS = ["eager", "sdpa"]
EVERY = for_families(DECODERS)


def padded_on_the_left() -> dict[str, torch.Tensor]:
    texts = padded_texts()
    lengths = texts["attention_mask"].sum(dim=1).tolist()
    return {
        name: torch.stack([row.roll(7 - length) for row, length in zip(rows, lengths, strict=True)])
        for name, rows in texts.items()
    }


def assert_same(hydra: PreTrainedModel, backbone: PreTrainedModel, inputs: dict, atol: float = 1e-12) -> None:
    """Logits, and the states of all tokens that are no padding."""
    with torch.no_grad():
        found = hydra(**inputs, output_hidden_states=True)
        expected = backbone(**inputs, output_hidden_states=True)
    rtol = 100 * atol
    torch.testing.assert_close(found.member_logits[:, 0], expected.logits, atol=atol, rtol=rtol)
    is_text = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones(4, 7, dtype=torch.bool)
    for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[:, 0][is_text], theirs[is_text], atol=atol, rtol=rtol)


@EVERY
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dense_hydra_is_the_backbone_wherever_texts_are_padded(family, backend):
    backbone = family.backbone()
    hydra = family.hydra.from_backbone(backbone)
    for model in (backbone, hydra):
        model.set_attn_implementation(backend)
    places = {"position_ids": torch.arange(7).flip(0).expand(4, 7) + torch.arange(4).unsqueeze(1)}
    for inputs in (padded_texts(), padded_texts() | places):
        assert_same(hydra, backbone, inputs)
    assert_same(hydra, backbone, {"input_ids": padded_texts()["input_ids"]})
    embedded = backbone.get_input_embeddings()(padded_texts()["input_ids"]).detach()
    assert_same(hydra, backbone, {"inputs_embeds": embedded})
    torch.testing.assert_close(hydra.get_input_embeddings()(padded_texts()["input_ids"]), embedded)
    # Padding in front sees nothing but itself, for which the backbone's eager attention has no numbers in float64.
    dtype, atol = (torch.float32, 1e-5) if backend == "eager" else (torch.float64, 1e-12)
    assert_same(hydra.to(dtype), backbone.to(dtype), padded_on_the_left(), atol)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (LLAMA, {"attention_bias": True, "mlp_bias": True}),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
        (LLAMA, {"num_key_value_heads": 4}),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        (QWEN2, {"is_causal": False}),
        (GEMMA, {"attention_bias": True, "num_key_value_heads": 2}),
        (QWEN3, {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        (GEMMA3, {"attention_bias": True, "layer_types": ["full_attention"] * 3}),
    ],
    ids=[
        "biases",
        "scaled positions",
        "a key for each head",
        "windows",
        "tokens read those behind them",
        "biases of Gemma",
        "biases and windows of Qwen3",
        "Gemma 3 without windows",
    ],
)
def test_what_a_config_may_say_is_heeded(family: Family, fields: dict):
    backbone = family.backbone(**fields)
    hydra = family.hydra.from_backbone(backbone)
    for backend in BACKENDS:
        for model in (backbone, hydra):
            model.set_attn_implementation(backend)
        assert_same(hydra, backbone, padded_texts())
        assert_same(hydra, backbone, {"input_ids": padded_texts()["input_ids"]})
    plain = to_transformers(hydra)
    assert all(torch.equal(plain.get_parameter(name), tensor) for name, tensor in backbone.named_parameters())


def test_a_key_goes_with_the_last_head_that_reads_it():
    backbone = LLAMA.backbone(num_attention_heads=8, head_dim=HEAD_DIM, num_key_value_heads=2)
    whole = LLAMA.hydra.from_backbone(backbone).model.layers[0].attention
    query, keys, values = whole.qkv_proj.weight.split([8 * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM])
    for gone, heads, kept_keys in (
        ([0, 2], [1, 3, 4, 5, 6, 7], [0, 1]),
        ([0, 1, 2, 3], [4, 5, 6, 7], [1]),
        ([1, 4, 5, 6, 7], [0, 2, 3], [0]),
        (list(range(8)), [], []),
    ):
        pruned = LLAMA.hydra.from_backbone(backbone, {0: gone}).model.layers[0].attention
        wanted = ((query, heads), (keys, kept_keys), (values, kept_keys))
        rows = [part.unflatten(0, (-1, HEAD_DIM))[kept].flatten(0, 1) for part, kept in wanted]
        assert torch.equal(pruned.qkv_proj.weight, torch.cat(rows))
        assert pruned.o_proj.weight.shape[0] == len(heads) * HEAD_DIM


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kept",
    [
        ([0, 1, 2, 3], [0, 4], [7]),  # the first two have as many rows of q, k and v together
        ([0, 1], [0, 4], [6, 7]),  # as many heads, which read one key or two
        ([0, 1, 4, 5], [2, 3, 6, 7], [0, 3, 5, 6]),  # as many heads for each key
        ([0, 1, 2, 4], [2, 4, 6, 7], []),
    ],
    ids=["as many rows", "as many heads", "alike", "ragged"],
)
def test_fused_members_of_any_heads_are_the_mean_of_the_ablated_backbones(kept, backend):
    gone = [[head for head in range(8) if head not in heads] for heads in kept]
    sizes = {"num_attention_heads": 8, "head_dim": HEAD_DIM, "num_key_value_heads": 2}
    backbones = [LLAMA.backbone(seed, **sizes) for seed in range(3)]
    members = [LLAMA.hydra.from_backbone(each, {0: own, 2: own}) for each, own in zip(backbones, gone, strict=True)]
    hydra = LLAMA.hydra.from_pruned_members(members, shared=())
    hydra.set_attn_implementation(backend)
    found = hydra(**padded_texts()).member_logits
    for index, (backbone, own) in enumerate(zip(backbones, gone, strict=True)):
        backbone.set_attn_implementation(backend)
        expected = LLAMA.ablate(backbone, {0: own, 2: own})(**padded_texts()).logits
        torch.testing.assert_close(found[:, index], expected, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(hydra.member(index)(**padded_texts()).member_logits[:, 0], expected)


@torch.no_grad()
def test_without_a_padding_token_texts_come_one_by_one():
    texts = padded_texts()
    backbone = LLAMA.backbone(pad_token_id=None)
    hydra = LLAMA.hydra.from_backbone(backbone)
    one = {name: rows[:1] for name, rows in texts.items()}
    torch.testing.assert_close(hydra(**one).member_logits[:, 0], backbone(**one).logits)
    with pytest.raises(ValueError, match="pad_token_id is None, and the batch has 4 texts: set it to the token"):
        hydra(**texts)
    assert hydra.model(**texts).pooler_output is None


@torch.no_grad()
def test_there_is_no_cache():
    hydra = LLAMA.hydra.from_backbone(LLAMA.backbone())
    expected = hydra(**padded_texts(), use_cache=False)
    assert torch.equal(hydra(**padded_texts(), use_cache=True).logits, expected.logits)
    assert "past_key_values" not in expected
    with pytest.raises(ValueError, match="keeps no cache: leave past_key_values out"):
        hydra(**padded_texts(), past_key_values=object())


@pytest.mark.parametrize("use_cache", [True, False])
def test_positions_that_start_anew_tell_of_texts_in_a_row_as_they_do_the_backbone(use_cache):
    """Which makes two texts of them where it has no cache alone."""
    backbone = LLAMA.backbone(use_cache=use_cache)
    row = {"input_ids": padded_texts(batch=4)["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]] * 4)}
    hydra = LLAMA.hydra.from_backbone(backbone)
    assert_same(hydra, backbone, row)
    assert_same(hydra, backbone, row | {"use_cache": not use_cache})


@EVERY
def test_layers_take_the_plain_way(family):
    hydra = family.hydra.from_backbone(family.backbone())
    assert all(fast_layer(layer) is None for layer in hydra.model.layers)


@EVERY
def test_16_bit_backbones_keep_their_positions_in_float32(family, tmp_path):
    """As `from_pretrained` leaves them, so that answers are those of the loaded backbone."""
    family.backbone().bfloat16().save_pretrained(tmp_path)
    backbone = type(family.backbone()).from_pretrained(tmp_path, dtype=torch.bfloat16)
    hydra = family.hydra.from_backbone(backbone)
    assert all(buffer.dtype == torch.float32 for buffer in hydra.model.rotary_emb.buffers())
    with torch.no_grad():
        found, expected = hydra(**padded_texts()).member_logits[:, 0], backbone(**padded_texts()).logits
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_a_plain_model_has_as_many_heads_for_every_key_or_zeros():
    sizes = {"num_attention_heads": 8, "head_dim": HEAD_DIM, "num_key_value_heads": 2}
    backbone, texts = LLAMA.backbone(**sizes), padded_texts()

    def same(gone: dict, heads: int, keys: int, **options) -> None:
        member = prune_heads(backbone, gone)
        plain = to_transformers(member, **options)
        assert (plain.config.num_attention_heads, plain.config.num_key_value_heads) == (heads, keys)
        torch.testing.assert_close(plain(**texts).logits, member(**texts).member_logits[:, 0])

    same({layer: [0, 3, 5, 6] for layer in range(3)}, 4, 2)
    same({layer: [0, 1, 2, 3] for layer in range(3)}, 4, 1)
    same({0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}, 8, 2, fill_up=True)
    same({0: [0, 2, 4], 1: list(range(8)), 2: [7]}, 8, 2, fill_up=True)
    with pytest.raises(ValueError, match="1 or 3 heads are left to read a key and value, and in a plain"):
        to_transformers(prune_heads(backbone, {layer: [0, 4, 5, 6] for layer in range(3)}))


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        (LLAMA, {"num_key_value_heads": 3}, "num_attention_heads is 4, num_key_value_heads 3"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0: .*, set it to None"),
        (GEMMA, {"use_bidirectional_attention": True}, r"use_bidirectional_attention is True: .*, set it to False"),
    ],
    ids=["heads", "bounds", "directions"],
)
def test_what_cannot_be_matched_is_refused(family, fields, sentence):
    config = family.backbone().config.to_dict() | fields
    with pytest.raises(Exception, match=sentence):
        family.hydra.config_class(**{name: value for name, value in config.items() if name != "model_type"})


def test_members_that_read_in_other_directions_are_not_fused():
    members = [LLAMA.backbone(), LLAMA.backbone(is_causal=False)]
    with pytest.raises(ValueError, match=r"members\[1\] has is_causal = False, members\[0\] has None"):
        LLAMA.hydra.from_pruned_members(members)
