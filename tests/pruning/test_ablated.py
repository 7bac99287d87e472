"""Heads that are turned off for a while: the model answers as if they were cut out, and is then as it was."""

import copy

import pytest
import torch
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    SiglipConfig,
    SiglipModel,
    SwinConfig,
    SwinModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from hydra_transformers.pruning import ablated, prune_heads
from tests.families import (
    BERT,
    CLIP,
    FAMILIES,
    SIZES,
    VIT,
    WAVLM,
    Family,
    for_families,
    images,
    padded_texts,
    randomise,
)


HEADS = {0: [1], 2: [0, 3], 1: [0, 1, 2, 3]}


def heads_for(family: Family) -> dict:
    return {"vision": HEADS, "text": {2: [2]}} if family.has_towers else HEADS


def logits(family: Family, model) -> torch.Tensor:
    with torch.no_grad():
        return family.logits(model, **family.inputs())


@for_families([family for family in FAMILIES if family is not WAVLM])
def test_an_ablated_model_answers_as_one_with_zeroed_slices_and_as_a_pruned_one(family):
    model, heads = family.backbone(), heads_for(family)
    before = logits(family, model)
    expected = logits(family, family.ablate(model, heads))
    assert (expected - before).abs().max() > 1e-3
    with ablated(model, heads) as same:
        assert same is model
        assert torch.equal(logits(family, model), expected)
    assert torch.equal(logits(family, model), before)
    hydra = family.hydra.from_backbone(model)
    with ablated(hydra, heads), torch.no_grad():
        answers = family.ensemble_logits(hydra(**family.inputs()))
    pruned = prune_heads(model, heads)
    with torch.no_grad():
        torch.testing.assert_close(answers, family.ensemble_logits(pruned(**family.inputs())), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_backend_is_ablated_alike(backend):
    model = BERT.backbone().float()
    expected = logits(BERT, BERT.ablate(model, HEADS))
    model.set_attn_implementation(backend)
    with ablated(model, HEADS):
        torch.testing.assert_close(logits(BERT, model), expected, rtol=0, atol=1e-5)


def test_a_pruned_model_is_ablated_by_the_numbers_of_its_backbone():
    model = prune_heads(VIT.backbone(), {0: [0, 2]})
    with ablated(model, {0: [3]}):
        answers = logits(VIT, model)
    torch.testing.assert_close(answers, logits(VIT, prune_heads(model, {0: [3]})), rtol=0, atol=1e-12)
    with (
        pytest.raises(ValueError, match=r"heads_to_prune\[0\] names head 2: the model has the heads \[1, 3\]"),
        ablated(model, {0: [2]}),
    ):
        pass


def test_blocks_can_be_nested_and_end_with_an_exception():
    model = VIT.backbone()
    before, both = logits(VIT, model), logits(VIT, VIT.ablate(model, {0: [1], 1: [2]}))
    with ablated(model, {0: [1]}):
        one = logits(VIT, model)
        with pytest.raises(RuntimeError, match="stop"), ablated(model, {0: [1], 1: [2]}):
            assert torch.equal(logits(VIT, model), both)
            raise RuntimeError("stop")
        assert torch.equal(logits(VIT, model), one)
    assert torch.equal(logits(VIT, model), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_gradients_are_those_of_the_ablated_model_and_none_reach_the_heads():
    model = VIT.backbone()
    with ablated(model, {0: [1]}):
        VIT.logits(model, **VIT.inputs()).sum().backward()
    reference = VIT.ablate(VIT.backbone(), {0: [1]})
    VIT.logits(reference, **VIT.inputs()).sum().backward()
    values = model.vit.layers[0].attention.v_proj.weight.grad
    assert torch.equal(values, reference.vit.layers[0].attention.v_proj.weight.grad)
    assert values[8:16].abs().max() == 0 and values[:8].abs().max() > 0


def others() -> dict:
    text = {"vocab_size": 40, **SIZES}
    return {
        "deberta": (
            DebertaV2ForSequenceClassification(DebertaV2Config(**text, relative_attention=True, pos_att_type=["p2c"])),
            padded_texts(),
            "deberta.encoder.layer.{}.attention.output.dense",
        ),
        "t5": (
            T5EncoderModel(T5Config(vocab_size=40, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_heads=4)),
            padded_texts(),
            "encoder.block.{}.layer.0.SelfAttention.o",
        ),
        "wav2vec2": (
            Wav2Vec2Model(
                Wav2Vec2Config(
                    **SIZES, conv_dim=(8,), conv_kernel=(4,), conv_stride=(4,), num_conv_pos_embeddings=4,
                    num_conv_pos_embedding_groups=2, num_feat_extract_layers=1,
                )
            ),
            {"input_values": torch.randn(2, 40, dtype=torch.float64)},
            "encoder.layers.{}.attention.out_proj",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["deberta", "t5", "wav2vec2"])
def test_encoders_that_do_not_become_hydras_are_ablated_too(name):
    model, inputs, output = others()[name]
    model = randomise(model.double(), 0)
    reference = copy.deepcopy(model)
    for layer, heads in HEADS.items():
        weight = reference.get_submodule(output.format(layer)).weight
        for head in heads:
            weight.data[:, 8 * head : 8 * head + 8] = 0
    with torch.no_grad():
        before, expected = model(**inputs)[0], reference(**inputs)[0]
        with ablated(model, HEADS):
            answers = model(**inputs)[0]
    assert (before - expected).abs().max() > 1e-3
    torch.testing.assert_close(answers, expected, rtol=0, atol=1e-12)


def test_two_towers_of_another_family_are_ablated_by_tower():
    sizes = {"text_config": {"vocab_size": 40, "max_position_embeddings": 16, **SIZES}}
    config = SiglipConfig(**sizes, vision_config={"image_size": 8, "patch_size": 4, **SIZES})
    model = randomise(SiglipModel(config).double(), 0)
    inputs = {"pixel_values": images(), **padded_texts(3)}
    with torch.no_grad():
        before = model(**inputs)
        with ablated(model, {"text": {0: [1]}}):
            after = model(**inputs)
    assert torch.equal(before.image_embeds, after.image_embeds)
    assert (before.text_embeds - after.text_embeds).abs().max() > 1e-3


def swin() -> SwinModel:
    return SwinModel(SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2]))


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (swin, "SwinModel: its heads cannot be told apart"),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
            ),
            "is an encoder and a decoder, which number their layers alike: pass model.get_encoder()",
        ),
        (lambda: VIT.fused(), "model has 3 members, which keep different heads: pass model.member"),
        (lambda: torch.nn.Linear(2, 2), "model is a Linear: pass a model of Transformers"),
    ],
)
def test_other_models_are_refused(model, problem):
    with (
        pytest.raises((TypeError, ValueError), match=problem.replace("(", r"\(").replace(")", r"\)")),
        ablated(model(), {0: [0]}),
    ):
        pass


def test_a_compiled_model_is_refused_as_it_would_not_see_the_change():
    model = VIT.backbone()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="model is compiled"), ablated(model, {0: [0]}):
        pass


def test_a_model_that_was_sliced_by_hand_is_refused():
    model = VIT.backbone()
    attention = model.vit.layers[0].attention
    attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight[:, :24])
    attention.o_proj.in_features = 24
    with (
        pytest.raises(ValueError, match="layer 0 reads 24 numbers and the config names 4 heads of 8"),
        ablated(model, {0: [0]}),
    ):
        pass


def test_heads_of_towers_are_named_by_tower():
    with (
        pytest.raises(ValueError, match=r"heads_to_prune is \{0: .*: pass \{'vision'"),
        ablated(CLIP.backbone(), {0: [1]}),
    ):
        pass
