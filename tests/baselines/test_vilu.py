"""ViLU: a second opinion on whether a frozen model's answer is right."""

import copy
import doctest

import pytest
import torch
from torch import nn

from hydra_transformers.baselines import Baseline, ViLU, collect_confidences, failure_metrics
from hydra_transformers.baselines import vilu as module
from hydra_transformers.baselines.vilu import FailurePredictor, Features, failure_loss
from hydra_transformers.cost import compare_costs, count_multiply_adds
from hydra_transformers.data.prediction import ZeroShotClassifier, predict
from tests.families import BERT, CLIP, VIT, bert_backbone, images, padded_texts


def seen(rows: int = 6, classes: int = 4, dim: int = 12) -> Features:
    generator = torch.Generator().manual_seed(0)
    features, texts = (
        nn.functional.normalize(torch.randn(count, dim, generator=generator), dim=-1) for count in (rows, classes)
    )
    return Features(features, texts, torch.tensor(20.0), None)


def test_at_the_start_the_attention_is_the_models_own_probability():
    given = seen()
    learned, fixed = FailurePredictor(12, True), FailurePredictor(12, False)
    torch.testing.assert_close(learned(given), fixed(given))
    expected = given.logits().softmax(-1) @ given.classes
    predicted = given.classes[given.logits().argmax(-1)]
    by_hand = fixed.mlp(torch.cat([given.features, expected, predicted], dim=-1))[:, 0]
    torch.testing.assert_close(fixed(given), by_hand)


def test_the_order_and_the_number_of_the_classes_leave_no_trace():
    given, predictor = seen(), FailurePredictor(12, True)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(predictor(given._replace(classes=given.classes[order])), predictor(given))
    more = torch.cat([given.classes, -given.features.mean(0, keepdim=True) * 50])  # one that is never likely
    assert predictor(given._replace(classes=more)).shape == (6,)


def test_wrong_answers_weigh_more_where_they_are_few_and_batches_of_one_kind_weigh_1():
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0])
    is_right = torch.tensor([True, True, True, False])
    losses = nn.functional.binary_cross_entropy_with_logits(logits, is_right.float(), reduction="none")
    weights = torch.tensor([1.0, 1.0, 1.0, torch.log(torch.tensor(1 + 0.75 / 0.25))])
    torch.testing.assert_close(failure_loss(logits, is_right), (weights * losses).mean())
    for kind in (torch.ones(4), torch.zeros(4)):
        plain = nn.functional.binary_cross_entropy_with_logits(logits, kind)
        torch.testing.assert_close(failure_loss(logits, kind.bool()), plain)


PROMPTS = padded_texts(seed=9)


def backbone(family):
    return family.backbone().float()


def rows_of(family, count: int = 96) -> list[dict]:
    """Rows with the labels that the model answers; every second one is bright, and has another label."""
    vilu, data = ViLU(backbone(family)), []
    texts, is_second = PROMPTS if family is CLIP else {}, torch.arange(4) % 2 == 1
    for seed in range(count // 4):
        pictures = {"pixel_values": images(seed=seed).float() + 2 * is_second.view(-1, 1, 1, 1)}
        inputs = pictures if family.reads_images else padded_texts(seed=seed)
        answers = vilu(**inputs, **texts).logits.argmax(-1)
        data.append({**inputs, "labels": torch.where(is_second, (answers + 1) % 3, answers)})
    return data


@pytest.mark.slow
@pytest.mark.parametrize("family", [VIT, CLIP], ids=lambda family: family.name)
def test_trained_it_tells_failures_better_than_the_probability_and_leaves_the_answers_alone(family):
    model, data = backbone(family), rows_of(family)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    prompts = {"class_prompts": PROMPTS} if family is CLIP else {}
    vilu = ViLU(model).fit(data, **prompts, batch_size=16)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    if family is CLIP:
        vilu, model = vilu.zero_shot(PROMPTS), ZeroShotClassifier(model, PROMPTS)
    torch.testing.assert_close(predict(vilu, data[0]), predict(model, data[0]))
    confidence, is_right = collect_confidences(vilu, data)
    plain, _ = collect_confidences(model, data)
    assert failure_metrics(confidence, is_right)["auroc"] > max(0.9, failure_metrics(plain, is_right)["auroc"])


def test_a_classifier_gets_the_same_answers_in_any_size_of_its_features():
    model, data = backbone(BERT), rows_of(BERT, 16)
    vilu = ViLU(model).fit(data, epochs=1)
    assert vilu.sizes.min() > 0 and not torch.equal(vilu.sizes, torch.ones(2))
    torch.testing.assert_close(predict(vilu, data[0]), predict(model, data[0]))
    features = vilu.features(**{name: value for name, value in data[0].items() if name != "labels"})
    assert 0.5 < features.square().sum(-1).mean().sqrt() < 2
    output = vilu(**data[0])
    assert output.detector_score.shape == (4,) and output.loss.requires_grad
    output.loss.backward()
    assert all(parameter.grad is None for parameter in vilu.model.parameters())
    assert all(parameter.grad is not None for parameter in vilu.predictor.parameters())


def test_the_same_seed_gives_the_same_predictor_and_the_attention_trains(monkeypatch):
    data = rows_of(CLIP, 32)

    def fitted(**options) -> ViLU:
        return ViLU(backbone(CLIP), learned_attention=True).fit(data, PROMPTS, epochs=2, batch_size=4, **options)

    monkeypatch.setattr(module, "ATTENTION_STEPS", 3)
    one, same, other = fitted(), fitted(), fitted(seed=1)
    weights = [vilu.predictor.state_dict() for vilu in (one, same, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not torch.equal(weights[0]["mlp.0.weight"], weights[2]["mlp.0.weight"])
    assert not torch.equal(weights[0]["of_features.weight"], torch.eye(12))


@pytest.mark.parametrize("family", [VIT, CLIP], ids=lambda family: family.name)
def test_saved_and_loaded_it_answers_the_same(family, tmp_path):
    prompts = {"class_prompts": PROMPTS} if family is CLIP else {}
    vilu = ViLU(backbone(family)).fit(rows_of(family, 16), **prompts, epochs=1)
    vilu.save_pretrained(tmp_path)
    loaded = Baseline.from_pretrained(tmp_path)
    given = {**rows_of(family, 4)[0], **(PROMPTS if family is CLIP else {})}
    expected, found = vilu(**given), loaded(**given)
    assert type(loaded) is ViLU
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.detector_score, expected.detector_score)


def test_failure_metrics_by_hand_and_the_docstrings_example():
    found = failure_metrics(torch.tensor([0.9, 0.9, 0.9, 0.1]), torch.tensor([True, True, False, False]))
    assert found["base_rate"] == 0.5 and found["auroc"] == 0.75
    assert found["ece"] == pytest.approx(0.75 * abs(2 / 3 - 0.9) + 0.25 * 0.1)
    results = doctest.testmod(module)
    assert results.attempted == 1 and results.failed == 0


def test_bad_input_gets_one_sentence():
    data = rows_of(VIT, 16)
    with pytest.raises(ValueError, match="class_prompts is for CLIP and SigLIP, model is a ViTForImageClassification"):
        ViLU(VIT.backbone()).fit(data, PROMPTS)
    with pytest.raises(ValueError, match="class_prompts has no input_ids"):
        ViLU(CLIP.backbone()).fit(data)
    with pytest.raises(ValueError, match="data has no labels, so right and wrong are unknown"):
        ViLU(VIT.backbone()).fit([{"pixel_values": images()}])
    with pytest.raises(ValueError, match="data has no samples"):
        ViLU(VIT.backbone()).fit([])
    right = {"pixel_values": images(), "labels": VIT.backbone()(pixel_values=images()).logits.argmax(-1)}
    with pytest.raises(ValueError, match="the model answers all of the 4 rows rightly"):
        ViLU(VIT.backbone()).fit([right])
    with pytest.raises(TypeError, match="this ViLU is of a ViTForImageClassification, which has its own classes"):
        ViLU(VIT.backbone()).zero_shot(PROMPTS)
    with pytest.raises(ValueError, match="is_right is the same for all samples"):
        failure_metrics([0.5, 0.6], [True, True])
    with pytest.raises(ValueError, match=r"confidence has shape \(1,\), is_right \(2,\)"):
        failure_metrics([0.5], [True, False])


def test_its_loss_is_divided_by_the_rows_of_all_batches_of_a_step():
    """Trainer does not divide it again: with as many more batches, each counts for its part."""
    vilu = ViLU(VIT.backbone())
    batch = VIT.inputs() | {"labels": torch.tensor([0, 1, 2, 0])}
    torch.testing.assert_close(vilu(**batch, num_items_in_batch=16).loss, vilu(**batch).loss / 4)


def test_its_zero_shot_classifier_has_a_cost():
    """An image, its products with the classes (for the answer, for the predictor and for their mean), and the predictor."""
    clip = CLIP.backbone()
    vilu = ViLU(clip)
    classifier = vilu.zero_shot(PROMPTS)
    predictor = sum(each.numel() for name, each in vilu.predictor.named_parameters() if name.endswith("weight"))
    plain = count_multiply_adds(ZeroShotClassifier(clip, PROMPTS))
    products = len(PROMPTS["input_ids"]) * clip.config.projection_dim
    assert compare_costs({"ViLU": classifier})["ViLU"].multiply_adds == plain + 2 * products + predictor


def test_a_batch_without_images_or_texts_is_refused():
    vilu = ViLU(CLIP.backbone())
    with pytest.raises(ValueError, match="the batch has no pixel_values"):
        vilu(**PROMPTS)
    with pytest.raises(ValueError, match="the batch has no input_ids"):
        vilu(pixel_values=images())


def test_a_fit_that_is_refused_leaves_an_earlier_one_as_it_was():
    model = VIT.backbone()
    vilu = ViLU(model)
    answers = model(**VIT.inputs()).logits.argmax(dim=-1)
    vilu.fit([VIT.inputs() | {"labels": torch.where(torch.arange(4) < 2, answers, -1)}], epochs=1)
    expected = vilu(**VIT.inputs()).detector_score
    for labels, message in (({}, "data has no labels"), ({"labels": answers}, "answers all of the 4 rows")):
        with pytest.raises(ValueError, match=message):
            vilu.fit([VIT.inputs() | labels])
        assert torch.equal(vilu(**VIT.inputs()).detector_score, expected)


def test_the_model_itself_is_never_in_training():
    vilu = ViLU(bert_backbone(hidden_dropout_prob=0.5)).train()
    assert vilu.predictor.training and torch.equal(vilu(**BERT.inputs()).logits, vilu(**BERT.inputs()).logits)


def test_a_training_that_comes_to_nothing_is_told():
    labels = torch.where(torch.arange(4) < 2, VIT.backbone()(**VIT.inputs()).logits.argmax(dim=-1), -1)
    with pytest.raises(ValueError, match=r"are not finite after training \(learning_rate is inf\)"):
        ViLU(VIT.backbone()).fit([VIT.inputs() | {"labels": labels}], learning_rate=float("inf"), epochs=1)


def test_a_label_that_no_class_has_is_refused():
    with pytest.raises(ValueError, match="data has the label 5: the classes are 0 to 4"):
        ViLU(VIT.backbone()).fit([VIT.inputs() | {"labels": torch.tensor([1, 2, 3, 5])}])
