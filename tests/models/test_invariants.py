"""The promises every Hydra keeps, against plain Transformers models."""

import copy

import pytest
import torch

from hydra_transformers.fusion.structure import slots
from tests.families import (
    BERT,
    CLIP,
    DISTINCT,
    FAMILIES,
    FEW,
    SIGLIP,
    VIT,
    WAV2VEC2,
    WAVLM,
    Family,
    each_of,
    images,
    padded_texts,
    randomise,
)


ALL_SHARED = ("embeddings", "layernorm", "mlp")
# Texts and sounds that are padded. SigLIP reads the last token, whatever it is.
PADDED = [family for family in DISTINCT if "attention_mask" in family.inputs() and family is not SIGLIP]


def one_or_all(names: str, cases: list[tuple]) -> pytest.MarkDecorator:
    """The first of these cases for every family, all of them for the few."""
    rows = [
        pytest.param(family, *case, id=f"{family.name}-{case}")
        for family in DISTINCT
        for case in (cases if family in FEW else cases[:1])
    ]
    return pytest.mark.parametrize(f"family, {names}", rows)


def mean_probability(family: Family, models, inputs) -> torch.Tensor:
    return torch.stack([family.probabilities(family.logits(model, **inputs)) for model in models]).mean(0)


def ablated_backbones(family: Family):
    return [family.ablate(family.backbone(seed), heads) for seed, heads in enumerate(family.heads_to_prune)]


@torch.no_grad()
def test_fused_probabilities_are_the_mean_of_the_members(family):
    references = ablated_backbones(family)
    hydra = family.fused(shared=())
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        inputs = family.inputs_in(dtype)
        for backend in ("eager", "sdpa"):
            for model in (hydra, *references):
                model.to(dtype).set_attn_implementation(backend)
            found = family.probabilities(family.ensemble_logits(hydra(**inputs)))
            expected = mean_probability(family, references, inputs)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0, check_dtype=False)


def with_shared_parts_averaged(family: Family, backbones, shared):
    """The backbones with the parts named in `shared` replaced by their mean, in plain Transformers terms."""

    def part(name: str) -> str | None:
        lowered = name.lower()
        is_first_norm = "encoder.layer_norm." in lowered and not getattr(
            averaged[0].config, "do_stable_layer_norm", True
        )
        if "relative_attention_bias" in lowered or "encoder.layernorm." in lowered or is_first_norm:
            return "embeddings"
        if ".feature_" in lowered or "encoder.conv" in lowered or "rel_attn_embed" in lowered:
            return "embeddings"
        if ".head." in lowered or ".q_norm." in lowered or ".k_norm." in lowered:
            return None  # which each member has for itself
        if "embed" in lowered and "layers." not in lowered and "encoder.layer" not in lowered:
            return "embeddings"
        if lowered.startswith(("classifier.", "head.")):
            return None
        if lowered.endswith(("layer_scale2.lambda1", "lambda_2")):
            return "mlp"
        if "norm" in lowered or "layrnorm" in lowered:
            return "layernorm"
        if (
            ".mlp." in lowered
            or ".fc" in lowered
            or ".ffn" in lowered
            or ".feed_forward." in lowered
            or ".intermediate." in lowered
            or (".output.dense" in lowered and "attention" not in lowered)
        ):
            return "mlp"
        return None

    averaged = [copy.deepcopy(backbone) for backbone in backbones]
    for name, _ in averaged[0].named_parameters():
        if part(name) in shared:
            mean = torch.stack([backbone.get_parameter(name) for backbone in averaged]).mean(0)
            for model in averaged:
                model.get_parameter(name).data.copy_(mean)
    return averaged


@torch.no_grad()
@one_or_all("shared", [(ALL_SHARED,), (("mlp",),), (("layernorm",),), (("embeddings",),)])
def test_sharing_equals_the_ensemble_of_members_with_averaged_parts(family, shared):
    inputs = family.inputs()
    backbones = with_shared_parts_averaged(family, [family.backbone(seed) for seed in range(3)], shared)
    references = [family.ablate(model, heads) for model, heads in zip(backbones, family.heads_to_prune, strict=True)]

    hydra = family.fused(shared=shared)

    probabilities = family.probabilities(family.ensemble_logits(hydra(**inputs)))
    torch.testing.assert_close(probabilities, mean_probability(family, references, inputs), atol=1e-10, rtol=0)


@one_or_all("shared, heads", [(ALL_SHARED, "ragged"), ((), "ragged"), (ALL_SHARED, "uniform"), ((), "uniform")])
def test_members_never_mix(family, shared, heads):
    hydra = family.fused(heads, shared=shared)
    member_logits = hydra(**family.inputs()).member_logits
    slot_of = dict(slots(hydra))

    for i in range(3):
        hydra.zero_grad()
        member_logits[:, i].square().sum().backward(retain_graph=True)
        seen = set()
        for name, parameter in hydra.named_parameters():
            slot = slot_of[name]
            if slot.member is not None:
                assert slot.member == i or parameter.grad is None or parameter.grad.count_nonzero() == 0, name
                if not any(part in name for part in (".head.", ".attention.")) and not name.startswith("classifier."):
                    seen.add(slot.member)
            elif slot.rows is not None and len(slot.rows) == 3 and parameter.numel():
                for j, rows in enumerate(parameter.grad.split(slot.rows)):
                    assert j == i or rows.count_nonzero() == 0, f"{name}: member {i} depends on member {j}"
                    if j == i and rows.numel():
                        assert rows.count_nonzero() > 0, f"{name}: member {i} does not use its own weights"
        assert not shared or not seen


@torch.no_grad()
def test_a_pruned_member_gives_the_logits_of_the_ablated_backbone(family):
    inputs = family.inputs()
    for member, reference in zip(family.members(), ablated_backbones(family), strict=True):
        torch.testing.assert_close(
            member(**inputs).member_logits[:, 0], family.logits(reference, **inputs), atol=1e-12, rtol=1e-10
        )


@each_of(FAMILIES)
@torch.no_grad()
def test_a_dense_one_member_hydra_is_the_backbone(family):
    inputs = family.inputs()
    backbone = family.backbone()
    hydra = family.hydra.from_backbone(backbone)
    expected = family.logits(backbone, **inputs)
    torch.testing.assert_close(hydra(**inputs).member_logits[:, 0], expected, atol=1e-12, rtol=1e-10)
    found = family.probabilities(family.ensemble_logits(hydra(**inputs)))
    torch.testing.assert_close(found, family.probabilities(expected), atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_member_of_a_sharing_hydra_gives_that_members_logits(family):
    hydra = family.fused()
    inputs = family.inputs()
    member_logits = hydra(**inputs).member_logits
    for i in (0, 1, -1):
        torch.testing.assert_close(hydra.member(i)(**inputs).member_logits[:, 0], member_logits[:, i])


@torch.no_grad()
def test_the_loss_is_the_mean_of_the_backbones_losses(family):
    backbones = [family.backbone(seed) for seed in range(2)]
    inputs = family.inputs() | {"labels": torch.tensor([0, 2, 1, 1])}
    if family.has_towers:
        inputs = {"pixel_values": images(3), **padded_texts(3), "return_loss": True}
    found = family.hydra.from_pruned_members(backbones, shared=())(**inputs).loss
    expected = torch.stack([model(**inputs).loss for model in backbones]).mean()
    torch.testing.assert_close(found, expected, check_dtype=False)  # DeBERTa computes its own in float32


@each_of(PADDED)
@torch.no_grad()
def test_padding_changes_no_answer(family):
    # Without a norm over each sound's samples, which sees the padding, too.
    fields = {"feat_extract_norm": "layer"} if family in (WAV2VEC2, WAVLM) else {}
    hydra = family.hydra.from_backbone(family.backbone(**fields), family.heads_to_prune[0])
    inputs = family.inputs()
    together = hydra(**inputs).member_logits
    for row, length in enumerate(inputs["attention_mask"].sum(dim=1).tolist()):
        alone = {
            name: value if name == "pixel_values" else value[row : row + 1, :length] for name, value in inputs.items()
        }
        expected = together[..., row : row + 1] if family.has_towers else together[row : row + 1]
        torch.testing.assert_close(hydra(**alone).member_logits, expected, atol=family.gradient_tolerance, rtol=1e-10)


@torch.no_grad()
def test_every_dtype_agrees_with_float64(family):
    expected = family.fused()(**family.inputs()).member_logits
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 0.03), (torch.bfloat16, 0.3)):
        member_logits = family.fused().to(dtype)(**family.inputs_in(dtype)).member_logits
        assert member_logits.dtype == dtype
        torch.testing.assert_close(member_logits.double(), expected, atol=tolerance, rtol=tolerance)


@each_of([BERT, CLIP])
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_stand_for_mean_probabilities_in_float32(family, dtype):
    inputs = family.inputs_in(dtype)
    outputs = family.fused().to(dtype)(**inputs)
    logits = family.ensemble_logits(outputs)
    assert logits.dtype == torch.float32
    assert outputs.member_logits.dtype == dtype
    expected = family.probabilities(outputs.member_logits.float()).mean(1)
    torch.testing.assert_close(family.probabilities(logits), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_clip_that_differs_in_the_vision_tower_only_has_one_text_tower():
    inputs = CLIP.inputs()
    backbone = CLIP.backbone()
    prunings = [{"vision": {0: [head], 2: [3]}} for head in range(3)]
    hydra = CLIP.hydra.from_pruned_members([CLIP.hydra.from_backbone(backbone, heads) for heads in prunings])

    assert hydra.config.text_config.num_members == 1
    assert hydra.num_members == hydra.config.vision_config.num_members == 3
    references = [CLIP.ablate(backbone, heads) for heads in prunings]
    probabilities = hydra(**inputs).logits_per_image.softmax(-1)
    torch.testing.assert_close(probabilities, mean_probability(CLIP, references, inputs), atol=1e-10, rtol=0)
    torch.testing.assert_close(
        hydra.member(1)(**inputs).member_logits[:, 0], CLIP.logits(references[1], **inputs), atol=1e-12, rtol=1e-10
    )


@torch.no_grad()
@each_of([VIT, BERT])
def test_computing_the_last_layer_for_the_first_token_alone_changes_nothing(family):
    hydra = family.fused()
    inputs = family.inputs()
    for backend in ("eager", "sdpa"):
        hydra.set_attn_implementation(backend)
        everything = hydra(**inputs, output_hidden_states=True)
        assert everything.hidden_states[-1].shape[2] > 1
        shortcut = hydra(**inputs).member_logits
        torch.testing.assert_close(shortcut, everything.member_logits, atol=1e-12, rtol=1e-10)


def test_randomised_backbones_differ():
    """The comparisons above mean nothing between equal models."""
    first = VIT.backbone(0)
    second = VIT.backbone(1)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)
    assert torch.equal(randomise(first, 1).classifier.weight, second.classifier.weight)
