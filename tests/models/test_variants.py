"""Every kind of model that a family's config describes is computed as by the backbone: dense, pruned, and back in Transformers."""

from inspect import signature

import pytest
import torch

from hydra_transformers import AutoHydra
from hydra_transformers.fusion import to_transformers
from tests.families import (
    ALBERT,
    AST,
    BEIT,
    DEBERTA,
    DECODERS,
    DINOV3,
    ELECTRA,
    GEMMA,
    GEMMA3,
    HUBERT,
    LLAMA,
    MODERNBERT,
    MPNET,
    QWEN2,
    QWEN3,
    VIT,
    WAV2VEC2,
    WAVLM,
    WHISPER,
    Family,
    images,
    padded_sounds,
    padded_texts,
)


HEADS = {0: [1], 1: [0, 2, 3]}
OWN = "use_relative_position_bias"
ONE = "use_shared_relative_position_bias"
BY_LENGTH = {"rope_type": "dynamic", "rope_theta": 20.0, "factor": 4.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
NORMS_FIRST = {"do_stable_layer_norm": True}
ALL_LAYERS = {"use_weighted_layer_sum": True}
CASES = [
    (VIT, {"qkv_bias": False}),
    (VIT, {"hidden_act": "relu"}),
    (VIT, {"num_hidden_layers": 2}),
    (ELECTRA, {"embedding_size": 32}),  # as wide as the layers, so not projected
    *((ALBERT, {"num_hidden_layers": 5, "num_hidden_groups": groups}) for groups in (1, 2, 5)),
    (MPNET, {"max_position_embeddings": 200}),
    (BEIT, {OWN: False, ONE: True}),
    (BEIT, {ONE: True}),
    (BEIT, {OWN: False, "use_absolute_position_embeddings": True}),
    (BEIT, {"use_mean_pooling": False}),
    (BEIT, {"layer_scale_init_value": 0.0}),
    (DEBERTA, {"share_att_key": False}),
    (DEBERTA, {"pos_att_type": ["c2p"]}),
    (DEBERTA, {"pos_att_type": "p2c"}),
    (DEBERTA, {"pos_att_type": ["c2p"], "share_att_key": False}),
    (DEBERTA, {"pos_att_type": ["p2c"], "share_att_key": False}),
    (DEBERTA, {"pos_att_type": None}),
    (DEBERTA, {"position_buckets": -1}),
    (DEBERTA, {"position_buckets": -1, "max_relative_positions": 3}),
    (DEBERTA, {"norm_rel_ebd": "none"}),
    (DEBERTA, {"position_biased_input": True}),
    (DEBERTA, {"relative_attention": False, "norm_rel_ebd": "none", "position_biased_input": True}),
    (DEBERTA, {"type_vocab_size": 2, "embedding_size": 24}),
    (DINOV3, {}),
    (DINOV3, {"num_register_tokens": 0}),
    (
        DINOV3,
        {"use_gated_mlp": True, "hidden_act": "silu", "proj_bias": False, "mlp_bias": False}
        | {"query_bias": False, "value_bias": False},
    ),
    (DINOV3, {"key_bias": True}),
    (MODERNBERT, {"classifier_pooling": "mean"}),
    (MODERNBERT, {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}),
    (MODERNBERT, {"local_attention": 2}),  # most tokens of the padding see nothing but padding
    (MODERNBERT, {"layer_types": ["sliding_attention"] * 3}),
    (MODERNBERT, {"layer_types": ["full_attention"] * 3}),
    (
        MODERNBERT,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50.0},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
            }
        },
    ),
    (MODERNBERT, {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), BY_LENGTH)}),
    *((family, {}) for family in DECODERS),
    (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    (LLAMA, {"num_key_value_heads": 4}),
    (LLAMA, {"layer_types": ["sliding_attention"] * 3, "sliding_window": 2}),  # which these do not read
    (GEMMA, {"layer_types": ["sliding_attention"] * 3, "sliding_window": 2}),
    (GEMMA, {"attention_bias": True, "num_key_value_heads": 2}),
    (QWEN2, WINDOWS),
    (QWEN2, {"is_causal": False}),
    (QWEN3, WINDOWS | {"attention_bias": True}),
    (GEMMA3, {"attention_bias": True, "layer_types": ["full_attention"] * 3}),
    (AST, {}),
    *((family, fields) for family in (WAV2VEC2, HUBERT, WAVLM) for fields in (NORMS_FIRST | ALL_LAYERS, {})),
    (WAV2VEC2, NORMS_FIRST | {"feat_extract_norm": "layer"}),
    (HUBERT, {"do_stable_layer_norm": False, "use_weighted_layer_sum": False}),
    (WHISPER, ALL_LAYERS),
]


def inputs_of(family: Family, fields: dict) -> list[dict]:
    """As the family's, and in other shapes: padded on the left or not at all, longer, larger."""
    if family is DINOV3:
        return [{"pixel_values": images()}, {"pixel_values": torch.cat([images(), images(seed=1)], dim=3)}]
    if family in (WAV2VEC2, HUBERT, WAVLM):
        return [padded_sounds(), {"input_values": padded_sounds()["input_values"]}]
    if "input_ids" not in family.inputs():
        return [family.inputs()]
    texts = padded_texts()
    lengths = texts["attention_mask"].sum(dim=1).tolist()
    left = {
        name: torch.stack([row.roll(7 - length) for row, length in zip(rows, lengths, strict=True)])
        for name, rows in texts.items()
    }
    others = [padded_texts(batch=3, tokens=150)] if "max_position_embeddings" in fields else []
    if "dynamic" in str(fields):
        others = [padded_texts(tokens=24), texts]  # longer than those of the training, and not
    return [texts, left, {"input_ids": texts["input_ids"]}, *others]


def assert_close(found: torch.Tensor, expected: torch.Tensor, at: torch.Tensor | None = None) -> None:
    """at: (batch, tokens), those that are compared"""
    if at is not None:
        found = found[at]
        expected = expected[at]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"), CASES, ids=[f"{family.name} {list(fields)}" for family, fields in CASES]
)
def test_every_kind_of_backbone_is_itself_with_its_head_and_without(family, fields):
    backbone = family.backbone(**fields)
    heads = {0: [1]} if fields.get("num_hidden_groups") == 1 else HEADS
    ablated = family.ablate(backbone, heads)
    hydra = family.hydra.from_backbone(backbone)
    pruned = family.hydra.from_backbone(backbone, heads)
    plain = to_transformers(pruned, fill_up=True).double()  # DINOv3's frequencies, too
    key = "pooler_output" if family is DINOV3 else "logits"
    for backend in ("eager", "sdpa"):
        for model in (hydra, pruned, backbone, ablated, plain):
            if backend == "eager" or model._supports_sdpa:
                model.set_attn_implementation(backend)
        for inputs in inputs_of(family, fields):
            mask = inputs.get("attention_mask")
            expected, found = (model(**inputs, output_hidden_states=True) for model in (backbone, hydra))
            if backend == "eager" and mask is not None and expected[key].isnan().any():
                continue  # where padding sees nothing but itself, backbones give no numbers in float64
            assert_close(found[f"member_{key}"][:, 0], expected[key])
            assert_close(pruned(**inputs)[f"member_{key}"][:, 0], ablated(**inputs)[key])
            assert_close(plain(**inputs)[key], ablated(**inputs)[key])
            tokens = mask.bool() if mask is not None and "input_ids" in inputs and family is not DEBERTA else None
            for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
                assert_close(ours[:, 0], theirs, tokens)
    encoder = backbone if family is DINOV3 else getattr(backbone, family.hydra.base_model_prefix)
    found = AutoHydra.from_backbone(encoder)(**family.inputs())
    expected = encoder(**family.inputs())
    at = family.inputs()["attention_mask"].bool() if "input_ids" in signature(encoder.forward).parameters else None
    assert_close(found.last_hidden_state, expected.last_hidden_state, at)
    if expected.get("pooler_output") is not None:
        assert_close(found.pooler_output, expected.pooler_output)
