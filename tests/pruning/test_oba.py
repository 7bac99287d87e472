"""OBA is θ · (Hθ) of the whole calibration set: against a full Hessian."""

import argparse
import copy
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    GptOssConfig,
    GptOssForSequenceClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from hydra_transformers.pruning import oba_prune, oba_scores, prune_heads
from hydra_transformers.pruning.oba import _differentiable_twice, ranked_weights
from hydra_transformers.training import KeepZerosCallback, recipe
from tests.families import CLIP_CLASSIFIER
from tests.pruning.backbones import family, images, labelled, rows_in_batches
from tests.training.tiny import QUIET


def toy() -> tuple[ViTForImageClassification, dict[str, torch.Tensor]]:
    """A ViT of one layer with two heads of four dimensions, and rows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    return model, labelled(model, {"pixel_values": images(7, seed=1)}) | {"labels": torch.arange(7) % 3}


def full_hessian_term(model, rows, names: list[str]) -> dict[str, torch.Tensor]:
    """θ · (Hθ) from the whole Hessian of the mean cross-entropy in the parameters `names`."""
    parameters = {name: dict(model.named_parameters())[name].detach() for name in names}
    theta = torch.cat([value.flatten() for value in parameters.values()])

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([value.numel() for value in parameters.values()])
        given = {name: part.view_as(parameters[name]) for name, part in zip(names, parts, strict=True)}
        logits = functional_call(model, given, kwargs={"pixel_values": rows["pixel_values"]}).logits
        return torch.nn.functional.cross_entropy(logits, rows["labels"])

    with sdpa_kernel(SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(loss, theta, vectorize=True)
    flat = theta * (hessian @ theta)
    parts = flat.split([value.numel() for value in parameters.values()])
    return {name: part.view_as(parameters[name]) for name, part in zip(names, parts, strict=True)}


def test_scores_of_heads_are_those_of_the_full_hessian():
    model, rows = toy()
    place = "vit.layers.0.attention."
    inputs = [f"{place}{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")]
    terms = full_hessian_term(copy.deepcopy(model), rows, [*inputs, f"{place}o_proj.weight"])
    scores = oba_scores(model, rows_in_batches(rows, 3))
    assert list(scores) == [(0, 0), (0, 1)]
    for head in range(2):
        own = slice(4 * head, 4 * head + 4)
        total = sum(terms[name][own].sum() for name in inputs) + terms[f"{place}o_proj.weight"][:, own].sum()
        assert scores[0, head] == pytest.approx(abs(total.item()), rel=1e-9)


def test_single_weights_go_by_the_full_hessian_and_exactly_as_many_as_asked_for():
    model, rows = toy()
    names = [name for name, each in model.named_parameters() if any(each is one for one in ranked_weights(model))]
    assert "classifier.weight" not in names and "vit.embeddings.patch_embeddings.projection.weight" in names
    terms = full_hessian_term(copy.deepcopy(model), rows, names)
    scores = torch.cat([terms[name].abs().flatten() for name in names])
    pruned = oba_prune(model, rows_in_batches(rows, 4), sparsity=0.3)
    kept = torch.cat([dict(pruned.named_parameters())[name].flatten() for name in names]) != 0
    assert (~kept).sum() == round(0.3 * len(kept))
    assert scores[kept].min() >= scores[~kept].max()
    for (name, own), (_, of_copy) in zip(model.named_parameters(), pruned.named_parameters(), strict=True):
        assert torch.equal(own[of_copy != 0], of_copy[of_copy != 0])
        assert name in names or torch.equal(own, of_copy)


def test_the_score_of_the_authors_and_several_steps_choose_other_weights():
    model, rows = toy()

    def zeros(**options) -> torch.Tensor:
        pruned = oba_prune(model, rows_in_batches(rows, 4), sparsity=0.5, **options)
        return torch.cat([weight.flatten() for weight in ranked_weights(pruned)]) == 0

    plain = zeros()
    reference = zeros(score="reference")
    stepwise = zeros(steps=3)
    assert plain.sum() == reference.sum() == stepwise.sum()
    assert not torch.equal(plain, reference) and not torch.equal(plain, stepwise)


@pytest.mark.parametrize("name", ["bert", "clip"])
def test_the_batch_size_does_not_matter_and_the_model_stays_as_it_was(name):
    model, batches, _, prompts = family(name)
    rows = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    towers = ("vision", "text") if name == "clip" else None
    before = copy.deepcopy(model.state_dict())
    model.train()
    expected = oba_scores(model, [rows], class_prompts=prompts, towers=towers)
    assert oba_scores(model, batches, class_prompts=prompts, towers=towers) == pytest.approx(expected, rel=1e-8)
    assert len(expected) == {"bert": 9, "clip": 8}[name]
    assert model.training and model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_clip_loses_weights_in_both_towers_and_a_classifier_of_one_tower_keeps_its_head():
    model, batches, _, prompts = family("clip")
    pruned = oba_prune(model, batches, sparsity=0.2, class_prompts=prompts)
    assert type(pruned) is type(model) and pruned.config._attn_implementation == "sdpa"
    for tower in (pruned.vision_model, pruned.text_model):
        assert any((weight == 0).any() for weight in tower.parameters() if weight.dim() == 2)
    model = CLIP_CLASSIFIER.backbone()
    ranked = {id(weight) for weight in ranked_weights(model)}
    names = {name for name, weight in model.named_parameters() if id(weight) in ranked}
    assert "classifier.weight" not in names and "vision_model.encoder.layers.0.mlp.fc1.weight" in names


def test_zeros_are_saved_and_stay_zero_in_training(tmp_path):
    model, rows = toy()
    pruned = oba_prune(model.float(), [{**rows, "pixel_values": rows["pixel_values"].float()}], sparsity=0.4)
    pruned.save_pretrained(tmp_path / "pruned")
    loaded = ViTForImageClassification.from_pretrained(tmp_path / "pruned")
    zeros = [weight == 0 for weight in ranked_weights(loaded)]
    assert sum(each.sum() for each in zeros) == sum((weight == 0).sum() for weight in ranked_weights(pruned))
    before = copy.deepcopy(loaded.state_dict())
    data = [{"pixel_values": image.float(), "labels": label} for image, label in zip(*rows.values(), strict=True)]
    arguments = TrainingArguments(tmp_path / "run", max_steps=3, learning_rate=0.1, save_strategy="no", **QUIET)
    Trainer(loaded, arguments, train_dataset=data, callbacks=[KeepZerosCallback()]).train()
    for weight, zero in zip(ranked_weights(loaded), zeros, strict=True):
        assert torch.equal(weight == 0, zero)
    assert any(not torch.equal(value, before[key]) for key, value in loaded.state_dict().items())


def test_a_recipe_keeps_zeros():
    kept = [replace(recipe("imagenet1k"), keep_zeros=flag).callbacks() for flag in (False, True)]
    assert [any(isinstance(each, KeepZerosCallback) for each in callbacks) for callbacks in kept] == [False, True]


def test_zeros_of_a_hydra_stay_too():
    hydra = prune_heads(toy()[0])
    callback = KeepZerosCallback()
    weight = next(module.weight for name, module in hydra.named_modules() if name.endswith("qkv_proj"))
    weight.data[0] = 0
    callback.on_train_begin(argparse.Namespace(fsdp=None, deepspeed=None), None, None, model=hydra)
    weight.data += 1
    callback.on_optimizer_step(None, None, None)
    assert not weight[0].any() and weight[1].all()


def test_a_model_without_sdpa_keeps_its_own_attention():
    """GPT-OSS has sinks in its attention, which sdpa knows nothing of."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8, "vocab_size": 40}
    sizes |= {"head_dim": 4}
    model = GptOssForSequenceClassification(GptOssConfig(**sizes, **experts, num_labels=3, pad_token_id=0)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
            parameter.copy_(torch.ones_like(parameter) if "sinks" in name else spread)
    inputs = {"input_ids": torch.tensor([[2, 9, 31]])}
    with torch.no_grad():
        expected = model(**inputs).logits
        with _differentiable_twice(model):
            assert torch.equal(model(**inputs).logits, expected)
