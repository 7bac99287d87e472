"""What forward returns: shapes, losses, and logits that any consumer reads as the ensemble's answer."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, pipeline

from hydra_transformers.models.ensembling import log_mean_probability
from hydra_transformers.models.task_multi_label import logit_of_mean_probability
from tests.families import (
    ALBERT,
    BERT,
    CLIP,
    GEMMA3,
    LLAMA,
    OWN_LAYERS,
    VIT,
    bert_backbone,
    clip_backbone,
    each_of,
    images,
    padded_texts,
    vit_backbone,
)
from tests.models.test_hub import bert_tokenizer


def hydra_bert(**fields):
    return BERT.hydra.from_pruned_members([bert_backbone(seed, **fields) for seed in range(3)])


@each_of(OWN_LAYERS)
def test_outputs_have_the_documented_shapes(family):
    hydra = family.fused()
    hydra.set_attn_implementation("eager")
    inputs = family.inputs()
    outputs = hydra(**inputs, output_hidden_states=True, output_attentions=True)
    classes = family.num_classes
    hidden = 16 if family is GEMMA3 else 32
    assert outputs.member_logits.shape == (4, 3, classes)
    assert family.ensemble_logits(outputs).shape == (4, classes)
    for side, tokens in (
        ((outputs.vision_model_output, family.tokens), (outputs.text_model_output, 7))
        if family.has_towers
        else ((outputs, family.tokens),)
    ):
        batch = 3 if side is getattr(outputs, "text_model_output", None) else 4
        towers = hydra.config.kept_heads if not family.has_towers else hydra.config.kept_heads["vision"]
        if family.has_towers and batch == 3:
            towers = hydra.config.kept_heads["text"]
        order = [0, 0, 1, 1, 2, 2] if family is ALBERT else range(3)
        assert [states.shape for states in side.hidden_states] == [(batch, 3, tokens, hidden)] * (1 + len(order))
        heads = [sum(map(len, towers[layer])) for layer in order]
        assert [weights.shape for weights in side.attentions] == [(batch, count, tokens, tokens) for count in heads]


@torch.no_grad()
def test_hidden_states_and_attentions_are_those_of_the_members():
    backbones = [vit_backbone(seed) for seed in range(3)]
    hydra = VIT.hydra.from_pruned_members(backbones, shared=())
    hydra.set_attn_implementation("eager")
    outputs = hydra(images(), output_hidden_states=True, output_attentions=True)
    for m, backbone in enumerate(backbones):
        backbone.set_attn_implementation("eager")
        expected = backbone(images(), output_hidden_states=True, output_attentions=True)
        for mine, theirs in zip(outputs.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(mine[:, m], theirs, atol=1e-12, rtol=1e-10)
        for mine, theirs in zip(outputs.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(mine[:, 4 * m : 4 * m + 4], theirs, atol=1e-12, rtol=1e-10)


@each_of([CLIP, LLAMA])
@pytest.mark.parametrize("heads", ["ragged", "all"])
def test_hidden_states_and_attentions_have_gradients_and_change_no_logits(family, heads):
    """They are what the next layer reads, not copies of it."""
    hydra = family.fused(heads)
    hydra.set_attn_implementation("eager")
    inputs = family.inputs()
    outputs = hydra(**inputs, output_hidden_states=True, output_attentions=True)
    sides = (outputs.vision_model_output, outputs.text_model_output) if family.has_towers else (outputs,)
    shown = [states for side in sides for states in (*side.hidden_states, *side.attentions) if states.numel()]
    gradients = torch.autograd.grad(outputs.member_logits.square().sum(), shown)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    torch.testing.assert_close(outputs.member_logits, hydra(**inputs).member_logits)


@each_of([VIT, CLIP])
def test_tuples_by_the_config_or_where_asked_for(family):
    hydra = family.fused()
    expected = family.ensemble_logits(hydra(**family.inputs()))
    as_tuple = hydra(**family.inputs(), return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], expected)
    hydra.config.return_dict = False
    torch.testing.assert_close(hydra(**family.inputs())[0], expected)


INDICES = torch.tensor([0, 2, 1, 1])
SEVERAL = torch.rand(4, 3).round().double()
NUMBERS = torch.randn(4, 3).double()


def log_loss(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.nll_loss(probabilities.log(), labels)


@pytest.mark.parametrize(
    "problem_type, labels, loss_of, probabilities, loss_of_probabilities",
    [
        ("single_label_classification", INDICES, F.cross_entropy, lambda z: z.softmax(-1), log_loss),
        (None, INDICES, F.cross_entropy, lambda z: z.softmax(-1), log_loss),
        (
            "multi_label_classification",
            SEVERAL,
            F.binary_cross_entropy_with_logits,
            torch.sigmoid,
            F.binary_cross_entropy,
        ),
        ("regression", NUMBERS, F.mse_loss, lambda z: z, F.mse_loss),
    ],
)
def test_logits_are_the_ensembles_prediction_and_the_loss_is_the_mean_of_the_members_or_that_of_the_ensemble(
    problem_type, labels, loss_of, probabilities, loss_of_probabilities
):
    hydra = hydra_bert(problem_type=problem_type)
    outputs = hydra(**padded_texts(), labels=labels)
    losses = [loss_of(outputs.member_logits[:, m], labels) for m in range(3)]
    torch.testing.assert_close(outputs.loss, torch.stack(losses).mean())
    mean = probabilities(outputs.member_logits).mean(1)
    torch.testing.assert_close(probabilities(outputs.logits), mean, atol=1e-10, rtol=0)
    hydra.config.ensemble_loss = "ensemble"
    expected = loss_of_probabilities(mean, labels)
    torch.testing.assert_close(hydra(**padded_texts(), labels=labels).loss, expected)


def test_a_single_output_is_a_number_unless_the_config_says_probability():
    """As Transformers' loss takes it; before and after a loss the answer is the same."""
    number = hydra_bert(num_labels=1)
    probability = hydra_bert(num_labels=1, problem_type="multi_label_classification")
    assert number.config.problem_type == "regression"
    outputs = number(**padded_texts())
    torch.testing.assert_close(outputs.logits, outputs.member_logits.mean(1))
    outputs = probability(**padded_texts())
    torch.testing.assert_close(outputs.logits.sigmoid(), outputs.member_logits.sigmoid().mean(1))


@pytest.mark.parametrize(
    "fields, labels",
    [
        ({}, torch.tensor([0, 2, 1, 1])),
        ({"num_labels": 1}, torch.randn(4).double()),
        ({"problem_type": "multi_label_classification"}, torch.rand(4, 3).round().double()),
    ],
)
def test_logits_do_not_depend_on_a_loss_before(fields, labels, tmp_path):
    hydra = hydra_bert(**fields)
    before = hydra(**padded_texts()).logits
    hydra(**padded_texts(), labels=labels)
    assert torch.equal(hydra(**padded_texts()).logits, before)
    hydra.config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["problem_type"]
    assert saved == hydra.config.problem_type == hydra_bert(**fields).config.problem_type


@pytest.mark.parametrize(
    "chosen, num_labels, expected",
    [
        (None, 1, "regression"),
        (None, 2, "single_label_classification"),
        ("multi_label_classification", 1, "multi_label_classification"),
        ("regression", 2, "regression"),
    ],
)
def test_with_other_labels_a_problem_type_that_nobody_chose_is_found_anew(chosen, num_labels, expected, tmp_path):
    hydra_bert(problem_type=chosen).save_pretrained(tmp_path)
    loaded = BERT.hydra.from_pretrained(tmp_path, num_labels=num_labels, ignore_mismatched_sizes=True)
    assert loaded.config.problem_type == expected
    labels = {"regression": torch.randn(4, num_labels), "multi_label_classification": torch.ones(4, num_labels)}
    loss = loaded(**padded_texts(), labels=labels.get(expected, torch.tensor([0, 1, 1, 0]))).loss
    assert loss > 0
    with pytest.raises(ValueError, match=r"single_label_classification.*num_labels"):
        BERT.hydra.from_pretrained(
            tmp_path, num_labels=1, problem_type="single_label_classification", ignore_mismatched_sizes=True
        )(**padded_texts())


@pytest.mark.parametrize(
    "problem_type, labels, wanted",
    [
        (None, torch.rand(4, 3).round().double(), "one class index per row"),
        (None, torch.tensor([0.0, 1.0, 2.0, 1.0]), "one class index per row"),
        (None, torch.eye(4, 3, dtype=torch.long), "one class index per row"),
        ("multi_label_classification", torch.tensor([0, 2, 1, 1]), "a float per row and class"),
        ("multi_label_classification", torch.ones(4, 3, dtype=torch.long), "a float per row and class"),
        ("regression", torch.randn(4).double(), "a number per row and output"),
    ],
)
def test_labels_of_another_kind_are_refused_and_change_nothing(problem_type, labels, wanted):
    hydra = hydra_bert(problem_type=problem_type)
    settled = hydra.config.problem_type
    with pytest.raises(ValueError, match=f"labels are .*config.problem_type is '{settled}', which takes {wanted}"):
        hydra(**padded_texts(), labels=labels)
    assert hydra.config.problem_type == settled


def test_extreme_logits_give_finite_answers():
    member_logits = torch.tensor([[[1e4, -1e4], [-1e4, 1e4]], [[1e4, -1e4], [1e4, -1e4]]])
    logits = log_mean_probability(member_logits)
    torch.testing.assert_close(logits.softmax(-1), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    assert logits[0].isfinite().all()
    torch.testing.assert_close(
        logit_of_mean_probability(member_logits).sigmoid(), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    )


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression"])
def test_the_loss_counts_items_over_accumulated_batches(problem):
    """Trainer passes num_items_in_batch with gradient accumulation: two half batches must add up to the whole one."""
    hydra = VIT.fused()
    hydra.config.problem_type = problem
    pixel_values = images()
    labels = torch.tensor([0, 1, 2, 3])
    if problem != "single_label_classification":
        labels = torch.nn.functional.one_hot(labels, hydra.config.num_labels).to(hydra.dtype)
    whole = hydra(pixel_values, labels=labels).loss
    halves = [
        hydra(pixel_values[half], labels=labels[half], num_items_in_batch=torch.tensor(labels.numel())).loss
        for half in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(halves), whole)


@pytest.mark.parametrize("kind", ["members", "ensemble"])
def test_the_contrastive_loss(kind):
    hydra = CLIP.fused()
    hydra.config.ensemble_loss = kind
    inputs = {"pixel_values": images(3), **padded_texts(batch=3)}
    outputs = hydra(**inputs, return_loss=True)
    target = torch.arange(3)
    if kind == "members":
        members = outputs.member_logits.transpose(0, 1)
        expected = torch.stack(
            [(F.cross_entropy(z, target) + F.cross_entropy(z.t(), target)) / 2 for z in members]
        ).mean()
    else:
        per_image = outputs.member_logits.softmax(2).mean(1)
        per_text = outputs.member_logits.softmax(0).mean(1)
        expected = -(per_image.diagonal().log().mean() + per_text.diagonal().log().mean()) / 2
    torch.testing.assert_close(outputs.loss, expected)
    with pytest.raises(ValueError, match="return_loss got 4 images and 3 texts"):
        hydra(**CLIP.inputs(), return_loss=True)


@torch.no_grad()
def test_clip_features_are_those_of_the_members():
    inputs = CLIP.inputs()
    texts = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    backbones = [CLIP.backbone(seed) for seed in range(2)]
    hydra = CLIP.hydra.from_pruned_members(backbones, shared=())
    found = hydra.get_image_features(pixel_values=inputs["pixel_values"]), hydra.get_text_features(**texts)
    for features, name in zip(found, ("image_embeds", "text_embeds"), strict=True):
        torch.testing.assert_close(features.pooler_output, features.member_pooler_output.mean(dim=1))
        for m, backbone in enumerate(backbones):
            normalised = F.normalize(features.member_pooler_output[:, m], dim=-1)
            torch.testing.assert_close(normalised, backbone(**inputs)[name], atol=1e-12, rtol=1e-10)
    states = hydra.text_model(**texts)
    torch.testing.assert_close(states.last_hidden_state, states.member_last_hidden_state.mean(1))
    outputs = hydra(**inputs)
    assert outputs.image_embeds.shape == (4, 2, 12)
    assert outputs.text_embeds.shape == (3, 2, 12)


def test_missing_inputs_are_named():
    with pytest.raises(ValueError, match="pixel_values is missing"):
        VIT.members()[0](labels=torch.tensor([1]))
    with pytest.raises(ValueError, match="pass input_ids or inputs_embeds"):
        BERT.members()[0]()
    with pytest.raises(ValueError, match="input_ids is missing"):
        CLIP.members()[0](pixel_values=images())


# What encoders return is not misread by tools that know nothing of members: means in the usual places.


def tight(tensor, expected):
    torch.testing.assert_close(tensor, expected, atol=1e-10, rtol=1e-10)


@torch.no_grad()
@each_of([VIT, BERT])
def test_states_are_means_with_each_members_beside_them(family):
    hydra = family.fused().base_model
    outputs = hydra(**family.inputs())
    tokens = 5 if family is VIT else 7
    assert outputs.last_hidden_state.shape == (4, tokens, 32)
    assert outputs.member_last_hidden_state.shape == (4, 3, tokens, 32)
    tight(outputs.last_hidden_state, outputs.member_last_hidden_state.mean(1))
    if outputs.pooler_output is not None:
        assert outputs.pooler_output.shape == (4, 32) and outputs.member_pooler_output.shape == (4, 3, 32)
        tight(outputs.pooler_output, outputs.member_pooler_output.mean(1))
    assert torch.equal(hydra(**family.inputs(), return_dict=False)[0], outputs.last_hidden_state)


@torch.no_grad()
def test_the_feature_extraction_pipeline_gives_a_vector_per_token(tmp_path):
    backbones = [bert_backbone(seed).float() for seed in range(3)]
    BERT.hydra.from_pruned_members(backbones, shared=()).save_pretrained(tmp_path)
    tokenizer = bert_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    features = pipeline("feature-extraction", model=model, tokenizer=tokenizer)("a good film", return_tensors=True)
    tokens = tokenizer("a good film", return_tensors="pt")
    expected = torch.stack([backbone.bert(**tokens).last_hidden_state for backbone in backbones]).mean(0)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_similarity_of_clip_is_that_of_the_pair_alone():
    backbones = [clip_backbone(seed) for seed in range(3)]
    hydra = CLIP.hydra.from_pruned_members(backbones, shared=())
    inputs = CLIP.inputs()
    outputs = hydra(**inputs)
    tight(outputs.similarity, torch.stack([backbone(**inputs).logits_per_image for backbone in backbones]).mean(0))
    for image in range(4):
        for text in range(3):
            pair = {name: value[text : text + 1] for name, value in inputs.items() if name != "pixel_values"}
            alone = hydra(pixel_values=images()[image : image + 1], **pair)
            tight(alone.similarity[0, 0], outputs.similarity[image, text])
            assert abs(alone.logits_per_image.item()) < 1e-12  # the only text of the call has probability 1
