"""ModernBERT: windows, rotary positions of two kinds, both ways of pooling, layers with and without biases, each time against
the plain Transformers model in float64."""

import pytest
import torch
from transformers.models.modernbert import modeling_modernbert

from hydra_transformers.fast import layers as fast_inference
from hydra_transformers.models import modeling_hydra
from hydra_transformers.pruning import prune_heads, to_transformers
from hydra_transformers.pruning.ablation import ablation_of
from hydra_transformers.training import lora_config
from tests.families import MODERNBERT, padded_texts


BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
# Most tokens of the padding see nothing but padding.
NARROW = {"local_attention": 2}
SCALED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 50.0},
        "sliding_attention": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
    }
}
LOCAL, EVERYWHERE = {"layer_types": ["sliding_attention"] * 3}, {"layer_types": ["full_attention"] * 3}
VARIANTS = {
    "mean": {"classifier_pooling": "mean"},
    "biases": BIASES,
    "narrow": NARROW,
    "scaled": SCALED,
    "local": LOCAL,
    "everywhere": EVERYWHERE,
}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_dense_hydra_is_the_backbone(fields):
    backbone, inputs = MODERNBERT.backbone(**fields), MODERNBERT.inputs()
    hydra = MODERNBERT.hydra.from_backbone(backbone)
    close(hydra(**inputs).member_logits[:, 0], backbone(**inputs).logits)
    del inputs["attention_mask"]
    close(hydra(**inputs).member_logits[:, 0], backbone(**inputs).logits)
    close(hydra.model(**inputs).last_hidden_state, backbone.model(**inputs).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, VARIANTS["mean"], BIASES], ids=["cls", "mean", "biases"])
@pytest.mark.parametrize("shared", [(), ("embeddings", "layernorm", "mlp")], ids=["apart", "shared"])
def test_members_of_one_backbone_answer_as_ablated_ones(fields, shared):
    backbone, inputs = MODERNBERT.backbone(**fields), MODERNBERT.inputs()
    members = [MODERNBERT.hydra.from_backbone(backbone, heads) for heads in MODERNBERT.heads_to_prune]
    found = MODERNBERT.hydra.from_pruned_members(members, shared=shared)(**inputs).member_logits
    for member, heads in enumerate(MODERNBERT.heads_to_prune):
        close(found[:, member], MODERNBERT.ablate(backbone, heads)(**inputs).logits)


@torch.no_grad()
def test_positions_of_each_row_and_embedded_words_are_read_as_by_the_backbone():
    backbone, inputs = MODERNBERT.backbone(), MODERNBERT.inputs()
    positions = torch.stack([torch.arange(7) * step for step in (1, 2, 3, 1)])
    members = [MODERNBERT.hydra.from_backbone(backbone, heads) for heads in ({0: [1]}, {0: [2]})]
    for hydra in (MODERNBERT.hydra.from_pruned_members(members), *members):  # members on the batch axis, and one alone
        expected = [
            MODERNBERT.ablate(backbone, {0: [head]})(**inputs, position_ids=positions).logits for head in (1, 2)
        ]
        found = hydra(**inputs, position_ids=positions).member_logits
        chosen = expected if hydra.num_members == 2 else [expected[members.index(hydra)]]
        close(found, torch.stack(chosen, dim=1))
    words = backbone.get_input_embeddings()(inputs.pop("input_ids"))
    hydra = MODERNBERT.hydra.from_backbone(backbone)
    assert hydra.get_input_embeddings().weight.equal(backbone.get_input_embeddings().weight)
    close(hydra(inputs_embeds=words, **inputs).member_logits[:, 0], backbone(inputs_embeds=words, **inputs).logits)
    with pytest.raises(ValueError, match="pass input_ids or inputs_embeds, and not both"):
        hydra(**inputs)


@torch.no_grad()
def test_positions_scaled_by_the_length_of_a_text_are_those_of_the_backbone():
    by_length = {"rope_type": "dynamic", "rope_theta": 20.0, "factor": 4.0}
    kinds = ("full_attention", "sliding_attention")
    backbone = MODERNBERT.backbone(rope_parameters={kind: dict(by_length) for kind in kinds})
    hydra = MODERNBERT.hydra.from_backbone(backbone)
    for inputs in (padded_texts(tokens=24), padded_texts()):  # longer than those of the training, and not
        close(hydra(**inputs).member_logits[:, 0], backbone(**inputs).logits)


@torch.no_grad()
def test_hidden_states_and_attentions_are_those_of_the_backbone():
    backbone, inputs = MODERNBERT.backbone(), MODERNBERT.inputs()
    backbone.set_attn_implementation("eager")
    hydra = MODERNBERT.hydra.from_backbone(backbone)
    asked = {"output_hidden_states": True, "output_attentions": True}
    found, expected = hydra(**inputs, **asked), backbone(**inputs, **asked)
    for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        close(mine[:, 0], theirs)
    for mine, theirs in zip(found.attentions, expected.attentions, strict=True):
        close(mine, theirs)
    assert expected.attentions[0][0, 0, 0, 5] > 0 and expected.attentions[1][0, 0, 0, 5] == 0  # outside of the window


def test_backends_that_know_windows_get_that_of_the_backbone(monkeypatch):
    def watched(module, given: list):
        original = module.eager_attention_forward

        def forward(*args, **kwargs):
            given.append((kwargs.get("sliding_window"), kwargs.get("deterministic")))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, "eager_attention_forward", forward)
        return given

    backbone = MODERNBERT.backbone(deterministic_flash_attn=True)
    backbone.set_attn_implementation("eager")
    hydra = MODERNBERT.hydra.from_backbone(backbone)  # first: building one compares answers
    mine, theirs = watched(modeling_hydra, []), watched(modeling_modernbert, [])
    backbone(**MODERNBERT.inputs())
    hydra(**MODERNBERT.inputs())
    assert mine == theirs == [(None, True), (4, True), (4, True)]


@torch.no_grad()
def test_layers_are_called_as_modules_in_inference_too(monkeypatch):
    def never(*_):
        raise AssertionError("a layer ran fast")

    hydra, inputs = MODERNBERT.fused("uniform"), MODERNBERT.inputs()
    for name in ("norm_first_layer", "norm_last_layer"):
        monkeypatch.setattr(fast_inference, name, never)
    found = hydra(**inputs).member_logits
    hydra.config.fast_inference = False
    assert torch.equal(found, hydra(**inputs).member_logits)
    # Each of its peculiarities alone is reason enough.
    layers, (states, masks, for_layers) = hydra.model.layers, hydra.model.embed_inputs(**inputs)
    hydra.config.fast_inference = True
    assert not fast_inference.can_run_fast(layers, states, masks, {})
    assert not fast_inference.can_run_fast(layers, states, None, for_layers)
    assert fast_inference.can_run_fast(layers, states, None, {})
    assert all(fast_inference.fast_layer(layer) is None for layer in layers)


# The mean of the tokens


@torch.no_grad()
def test_pooled_is_the_mean_of_the_tokens_that_are_no_padding():
    hydra, inputs = MODERNBERT.hydra.from_backbone(MODERNBERT.backbone(classifier_pooling="mean")), padded_texts(2)
    outputs = hydra.model(**inputs)
    lengths = inputs["attention_mask"].sum(dim=1)
    for row, length in enumerate(lengths):
        close(outputs.pooler_output[row], outputs.last_hidden_state[row, :length].mean(dim=0))
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"classifier_pooling is 'mean'.*pass a mask of shape \(batch, tokens\)"):
        hydra(input_ids=inputs["input_ids"], attention_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_heads_turned_off_together_answer_as_one_by_one(pooling):
    backbone, inputs = MODERNBERT.backbone(classifier_pooling=pooling), MODERNBERT.inputs()
    inputs["position_ids"] = torch.stack([torch.arange(7) * step for step in (1, 2, 3, 1)])
    engine = ablation_of(MODERNBERT.hydra.from_backbone(backbone))
    found = torch.cat(list(engine.over(engine.heads)(inputs)))
    expected = [MODERNBERT.ablate(backbone, {layer: [head]})(**inputs).logits for layer, head in engine.heads]
    close(found, torch.stack([*expected, backbone(**inputs).logits]))


# What goes by the names of q, k and v


def test_adapters_of_the_backbone_sit_on_the_joint_map():
    backbone = MODERNBERT.backbone()
    assert lora_config(backbone).target_modules == {"attn.Wqkv"}
    assert lora_config(backbone, targets=("q", "k", "v", "o")).target_modules == {"attn.Wqkv", "attn.Wo"}
    with pytest.raises(
        ValueError, match=r"targets has \['q', 'v'\]: queries, keys and values of a ModernBertFor.* one weight"
    ):
        lora_config(backbone, targets=("q", "v"))


def test_fewer_heads_do_not_make_a_plain_model():
    backbone = MODERNBERT.backbone()
    with pytest.raises(ValueError, match="cannot have these heads"):
        to_transformers(prune_heads(backbone, {layer: [1] for layer in range(3)}))


# Training


def test_members_draw_their_own_dropout_from_shared_embeddings():
    backbone = MODERNBERT.backbone(embedding_dropout=0.5)
    members = [MODERNBERT.hydra.from_backbone(backbone) for _ in range(2)]
    hydra = MODERNBERT.hydra.from_pruned_members(members, trunk_layers=0, allow_equal=True).train()
    states, _, _ = hydra.model.embed_inputs(**MODERNBERT.inputs())
    assert states.shape[0] == 2 and not torch.equal(states[0], states[1])


def test_new_weights_spread_as_those_of_the_backbone():
    config = MODERNBERT.fused().config
    torch.manual_seed(0)
    hydra = MODERNBERT.hydra(config)
    assert hydra.head.norm.weight.unique().tolist() == [1.0]
    for kind in ("full_attention", "sliding_attention"):
        theirs = getattr(modeling_modernbert.ModernBertRotaryEmbedding(config), f"{kind}_inv_freq")
        assert torch.equal(getattr(hydra.model.rotary_emb, f"{kind}_inv_freq"), theirs)
    stds = [hydra.model.layers[0].attention.o_proj.weight.std(), hydra.classifier.weight.std()]
    torch.testing.assert_close(torch.stack(stds), torch.tensor([0.02 / 6**0.5, 32**-0.5]), rtol=0.15, atol=0)
