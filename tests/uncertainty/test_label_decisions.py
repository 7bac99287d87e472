"""Multi-label models, from fusing to decisions."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from hydra_transformers import AutoHydra
from hydra_transformers.uncertainty import calibrate, decompose
from hydra_transformers.uncertainty.multi_label import label_sets, log_odds, lowered_cuts, missed_shares
from tests.families import BERT, VIT, padded_texts


LABELS = 3


def members_of(family=BERT, count=3, dtype=torch.float64):
    fields = {"num_labels": LABELS, "problem_type": "multi_label_classification"}
    return [family.backbone(seed, **fields).to(dtype).eval() for seed in range(count)]


def sure_members(dtype=torch.float64):
    """Members that mostly agree, with log-odds around 0."""
    [backbone] = members_of(count=1, dtype=dtype)
    members = [copy.deepcopy(backbone) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for member in members:
            for parameter in member.bert.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
            logits = member(**padded_texts(300)).logits
            factor = 4 / logits.std(dim=0)
            member.classifier.bias.sub_(logits.mean(dim=0)).mul_(factor)
            member.classifier.weight.mul_(factor.unsqueeze(1))
    return members


@pytest.fixture(scope="module")
def fused():
    return AutoHydra.from_pruned_members(sure_members(), shared=()).float().eval()


@pytest.fixture
def hydra(fused):
    return copy.deepcopy(fused)


def texts_for(model, count=300, seed=0):
    """A batch with labels that are drawn by the model's probabilities, sharpened."""
    inputs = padded_texts(count, seed=seed)
    with torch.no_grad():
        odds = model(**inputs).logits * 2
    labels = torch.rand(odds.shape, generator=torch.Generator().manual_seed(seed)) < odds.sigmoid()
    return {**inputs, "labels": labels.float()}


def without_labels(batch):
    return {name: each for name, each in batch.items() if name != "labels"}


@pytest.mark.parametrize("family", [BERT, VIT], ids=["texts", "images"])
def test_unshared_members_answer_with_the_mean_of_their_sigmoids(family):
    members = members_of(family)
    hydra = AutoHydra.from_pruned_members(members, shared=())
    inputs = family.inputs()
    inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    expected = torch.stack([member(**inputs).logits.sigmoid() for member in members]).mean(dim=0)
    torch.testing.assert_close(hydra(**inputs).logits.sigmoid(), expected, rtol=0, atol=1e-10)
    alone = hydra.member(1)
    assert alone.config.problem_type == "multi_label_classification"
    torch.testing.assert_close(alone(**inputs).logits, members[1](**inputs).logits, rtol=0, atol=1e-10)


def test_a_calibrated_model_names_labels_and_keeps_its_promises_on_new_rows(hydra):
    new = texts_for(hydra, 600, seed=1)
    calibration = calibrate(hydra, [texts_for(hydra, 600)], alpha=0.2, target={"risk": 0.4}, confidence=0.9)
    labels = new["labels"].bool()
    outputs = hydra(**without_labels(new))
    settings = hydra.config.decision
    assert outputs.prediction_set.shape == (600, LABELS) and outputs.abstain.shape == (600,)
    assert float(missed_shares(outputs.prediction_set, labels).mean()) < 0.25
    answer = outputs.logits.double() >= torch.tensor(settings["log_odds"], dtype=torch.float64)
    right = (answer == labels).all(dim=1)[~outputs.abstain]
    assert 0 < len(right) < 600 and float(right.double().mean()) > 0.55
    parts = decompose(outputs.member_logits, "multi_label_classification")
    torch.testing.assert_close(outputs.detector_score.double(), parts.total.sum(dim=1), rtol=0, atol=1e-5)
    assert "at most 20 % of a row's labels are missing from its set" in str(calibration)
    assert "With 90 % confidence at most 40 % of the answered rows are wrong" in str(calibration)
    with hydra.uncalibrated():
        plain = hydra(**without_labels(new)).member_logits
    torch.testing.assert_close(outputs.member_logits, plain / settings["temperature"])


def test_sets_in_the_model_are_those_of_the_mathematics(hydra):
    batch = texts_for(hydra, 200)
    calibration = calibrate(hydra, [batch], alpha=0.15)
    second = torch.randperm(200, generator=torch.Generator().manual_seed(0))[100:]
    outputs = hydra(**without_labels(batch))
    cuts = torch.tensor(calibration.settings["log_odds"], dtype=torch.float64)
    odds = log_odds(outputs.member_logits)
    labels = batch["labels"].bool()
    expected = label_sets(odds, lowered_cuts(odds[second], labels[second], 0.15, cuts))
    assert torch.equal(outputs.prediction_set, expected)
    assert missed_shares(expected, labels)[second].mean() <= 0.15 and not outputs.prediction_set.all()


def test_a_decision_for_another_number_of_labels_is_refused(hydra):
    """One number would silently serve all labels."""
    calibrate(hydra, [texts_for(hydra, 60)])
    hydra.decision.settings = replace(hydra.decision.settings, log_odds=(0.5,), set_log_odds=(0.1,))
    with pytest.raises(ValueError, match=r"decision.log_odds has 1 values, and the model has \d outputs: call"):
        hydra(input_ids=texts_for(hydra, 2)["input_ids"])


def test_answers_that_are_not_numbers_may_be_every_label_and_are_abstained_from(hydra):
    calibrate(hydra, [texts_for(hydra, 60)], target={"coverage": 0.9})
    decided = hydra.decision(torch.full((2, 3, LABELS), math.nan))
    assert decided.prediction_set.all() and decided.abstain.all() and not decided.chosen_labels.any()
