"""ViLU: a second opinion on whether a frozen CLIP's answer is right."""

import copy
import doctest

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hydra_transformers.baselines import ViLU, collect_confidences, failure_metrics
from hydra_transformers.baselines import vilu as module
from hydra_transformers.baselines.vilu import FailurePredictor, failure_loss
from hydra_transformers.data.prediction import predict
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from tests.families import CLIP, images, padded_texts


PROMPTS = padded_texts(seed=9)


def test_the_predictor_reads_expected_and_predicted_classes_and_their_order_leaves_no_trace():
    generator = torch.Generator().manual_seed(0)
    features, classes = (nn.functional.normalize(torch.randn(n, 12, generator=generator), dim=-1) for n in (6, 4))
    logits = 20 * features @ classes.t()
    predictor = FailurePredictor(12)
    order = torch.tensor([2, 0, 3, 1])
    found = predictor(features, classes, logits)
    read = torch.cat([features, logits.softmax(-1) @ classes, classes[logits.argmax(-1)]], dim=-1)
    torch.testing.assert_close(found, predictor.mlp(read)[:, 0])
    torch.testing.assert_close(predictor(features, classes[order], logits[:, order]), found)


def test_wrong_answers_weigh_more_where_they_are_few_and_batches_of_one_kind_weigh_1():
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0])
    is_right = torch.tensor([True, True, True, False])
    losses = nn.functional.binary_cross_entropy_with_logits(logits, is_right.float(), reduction="none")
    weights = torch.tensor([1.0, 1.0, 1.0, torch.log(torch.tensor(1 + 0.75 / 0.25))])
    torch.testing.assert_close(failure_loss(logits, is_right), (weights * losses).mean())
    for kind in (torch.ones(4), torch.zeros(4)):
        plain = nn.functional.binary_cross_entropy_with_logits(logits, kind)
        torch.testing.assert_close(failure_loss(logits, kind.bool()), plain)


def backbone():
    return CLIP.backbone().float()


def rows(count: int = 96) -> list[dict]:
    """Rows with the labels that the model answers; every second one is bright, and has another label."""
    classifier = ZeroShotClassifier(backbone(), PROMPTS)
    data = []
    is_second = torch.arange(4) % 2 == 1
    for seed in range(count // 4):
        inputs = {"pixel_values": images(seed=seed).float() + 2 * is_second.view(-1, 1, 1, 1)}
        answers = predict(classifier, inputs)[:, 0].argmax(-1)
        data.append({**inputs, "labels": torch.where(is_second, (answers + 1) % 3, answers)})
    return data


@pytest.mark.slow
def test_trained_it_tells_failures_better_than_the_probability_and_leaves_the_answers_alone():
    model = backbone()
    data = rows()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    vilu = ViLU(model).fit(data, PROMPTS, batch_size=16).zero_shot(PROMPTS)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    plain = ZeroShotClassifier(model, PROMPTS)
    torch.testing.assert_close(predict(vilu, data[0]), predict(plain, data[0]))
    (confidence, is_right), (probability, _) = collect_confidences(vilu, data), collect_confidences(plain, data)
    found = failure_metrics(confidence, is_right)["auroc"]
    assert found > max(0.9, failure_metrics(probability, is_right)["auroc"])


def test_the_same_seed_gives_the_same_predictor():
    data = rows(32)
    one, same, other = (
        ViLU(backbone()).fit(data, PROMPTS, epochs=2, batch_size=4, seed=seed).predictor.state_dict()
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not torch.equal(one["mlp.0.weight"], other["mlp.0.weight"])


def test_it_is_saved_and_only_its_predictor_ever_trains(tmp_path):
    vilu = ViLU(backbone()).fit(rows(16), PROMPTS, epochs=1)
    vilu.save_pretrained(tmp_path)
    batch = {**rows(4)[0], **PROMPTS}
    loaded = ViLU(backbone())
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    expected = vilu(**batch)
    output = loaded(**batch)
    assert torch.equal(output.logits, expected.logits) and torch.equal(output.detector_score, expected.detector_score)
    # Its loss is divided by the rows of all batches of a step.
    torch.testing.assert_close(vilu(**batch, num_items_in_batch=16).loss, output.loss / 4)
    vilu.train()
    assert vilu.predictor.training and not vilu.model.training
    vilu(**batch).loss.backward()
    assert all(parameter.grad is None for parameter in vilu.model.parameters())
    assert all(parameter.grad is not None for parameter in vilu.predictor.parameters())


def test_failure_metrics_by_hand_and_the_docstrings_example():
    found = failure_metrics(torch.tensor([0.9, 0.9, 0.9, 0.1]), torch.tensor([True, True, False, False]))
    assert found["base_rate"] == 0.5 and found["auroc"] == 0.75
    assert found["ece"] == pytest.approx(0.75 * abs(2 / 3 - 0.9) + 0.25 * 0.1)
    results = doctest.testmod(module)
    assert results.attempted == 1 and results.failed == 0


def labelled(labels) -> list[dict]:
    return [{"pixel_values": images().float(), **({} if labels is None else {"labels": labels})}]


def answers() -> torch.Tensor:
    return predict(ZeroShotClassifier(backbone(), PROMPTS), labelled(None)[0])[:, 0].argmax(-1)


REFUSALS = [
    (lambda vilu: vilu.fit(labelled(None), PROMPTS), "data has no labels, so right and wrong are unknown"),
    (lambda vilu: vilu.fit(labelled(answers()), None), "class_prompts has no input_ids"),
    (lambda vilu: vilu.fit([], PROMPTS), "data has no samples"),
    (lambda vilu: vilu.fit(labelled(answers()), PROMPTS), "the model answers all of the 4 rows rightly"),
    (
        lambda vilu: vilu.fit(labelled(torch.tensor([1, 2, 3, 5])), PROMPTS),
        "data has the label 5: the classes are 0 to 3",
    ),
    (lambda vilu: vilu.fit(rows(4), PROMPTS, epochs=0), "epochs is 0: pass at least 1"),
    (lambda vilu: vilu(**PROMPTS), "the batch has no pixel_values"),
    (lambda vilu: failure_metrics([0.5, 0.6], [True, True]), "is_right is the same for all samples"),
    (lambda vilu: failure_metrics([0.5], [True, False]), r"confidence has shape \(1,\), is_right \(2,\)"),
]


@pytest.mark.parametrize(("call", "words"), REFUSALS, ids=[words[:30] for _, words in REFUSALS])
def test_what_cannot_be_right_is_refused_and_leaves_an_earlier_fit_as_it_was(call, words):
    vilu = ViLU(backbone()).fit(labelled(torch.where(torch.arange(4) < 2, answers(), -1)), PROMPTS, epochs=1)
    before = copy.deepcopy(vilu.predictor.state_dict())
    with pytest.raises(ValueError, match=words):
        call(vilu)
    torch.testing.assert_close(vilu.predictor.state_dict(), before, rtol=0, atol=0)


def test_a_training_that_comes_to_nothing_is_told():
    with pytest.raises(ValueError, match=r"are not finite after training \(learning_rate is inf\)"):
        ViLU(backbone()).fit(rows(16), PROMPTS, learning_rate=float("inf"), epochs=1)
