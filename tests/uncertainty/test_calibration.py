"""Calibration of single-label classifiers: what is fitted on what, and how it is applied, saved and loaded."""

import copy
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.models.task import prediction_sets
from hydra_transformers.uncertainty import CalibratedClassifier, Detector, TemperatureScaling, calibrate, decompose
from hydra_transformers.uncertainty.conformal import fit_sets
from hydra_transformers.uncertainty.features import collect_answers
from tests.families import FAMILIES


# One for each kind of head: on a token, on a pooler, of two maps in one module or two, on tokens and their mean.
CLASSIFIERS = [family for family in FAMILIES if family.name in ("vit", "bert", "roberta", "distilbert", "dinov2")]
BY_NAME = {family.name: family for family in FAMILIES}
ROWS = 48


@cache
def _built(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    family = BY_NAME[name]
    backbone = family.backbone().float().eval()
    members = [AutoHydra.from_backbone(backbone, heads) for heads in family.heads_to_prune]
    return backbone, AutoHydra.from_pruned_members(members).eval()


def backbone_of(name: str) -> torch.nn.Module:
    return copy.deepcopy(_built(name)[0])


def hydra_of(name: str) -> torch.nn.Module:
    return copy.deepcopy(_built(name)[1])


def rows_for(name: str, seed: int = 0, labelled: bool = True, count: int = ROWS) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    family = BY_NAME[name]
    batch = {}
    for key, value in family.inputs().items():
        if key == "pixel_values":
            batch[key] = torch.randn(count, *value.shape[1:], generator=generator)
        elif key == "input_ids":
            batch[key] = torch.randint(5, 30, (count, value.shape[1]), generator=generator)
    labels = torch.randint(0, _built(name)[0].config.num_labels, (count,), generator=generator)
    return [batch | ({"labels": labels} if labelled else {})]


def test_rows_that_are_all_answered_rightly_fit_no_temperature():
    """The smallest temperature would be best, at which every answer is sure: no score could tell answers apart."""
    hydra = hydra_of("vit")
    [batch] = rows_for("vit")
    with torch.no_grad():
        batch["labels"] = hydra(batch["pixel_values"]).logits.argmax(dim=1)
    with pytest.warns(UserWarning, match="the validation logits are all right"):
        calibration = hydra.calibrate([batch], target={"coverage": 0.75})
    assert calibration.settings["temperature"] == 1.0


def test_everything_is_fitted_on_rows_of_its_own():
    hydra = hydra_of("vit")
    data = rows_for("vit")
    logits, _, labels = collect_answers(hydra, data)
    calibration = hydra.calibrate(data, target={"coverage": 0.75}, alpha=0.2, seed=3)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    first = order[: ROWS // 2]
    second = order[ROWS // 2 :]
    scaling = TemperatureScaling.fit(logits[first], labels[first])
    assert calibration.settings["temperature"] == pytest.approx(scaling.temperature)
    threshold = fit_sets(scaling(logits[second]), labels[second], 0.2)
    assert calibration.settings["sets"]["threshold"] == pytest.approx(threshold)
    assert calibration.abstention.rows == ROWS // 2 and calibration.abstention.coverage >= 0.75
    assert hydra.config.decision["threshold"] == calibration.abstention.threshold
    assert "a random half (24) was used for this, and the other half (24) for what follows" in str(calibration)
    assert (
        "The ensemble's prediction has the temperature" in str(calibration)
        and hydra.config.decision["sentences"] == calibration.sentences
    )


def test_a_risk_is_a_bound_for_new_rows_unless_told_otherwise():
    hydra = hydra_of("vit")
    data = rows_for("vit", count=200)
    by_default = hydra.calibrate(data, target={"risk": 0.74})
    assert "With 90 % confidence at most 74 % of the answered rows are wrong" in str(by_default)
    assert by_default.abstention == hydra.calibrate(data, target={"risk": 0.74}, confidence=0.9).abstention
    on_these_rows = hydra.calibrate(data, target={"risk": 0.74}, confidence=0).abstention
    assert on_these_rows.confidence is None and on_these_rows.coverage > by_default.abstention.coverage
    assert hydra.calibrate(data, target={"coverage": 0.5}).abstention.confidence is None
    with pytest.raises(ValueError, match=r"risk=0.01 cannot be guaranteed .* the lowest that can be is \d+ %"):
        hydra.calibrate(data, target={"risk": 0.01})


def test_it_is_applied_to_answers_and_can_be_left_out():
    hydra = hydra_of("vit")
    [batch] = rows_for("vit", seed=1, labelled=False)
    with torch.no_grad():
        raw = hydra(**batch)
    calibration = hydra.train().calibrate(rows_for("vit"), target={"coverage": 0.5})  # it is in eval mode then
    with torch.no_grad():
        out = hydra(**batch)
    # The ensemble's answer has the temperature, and it still is the mean of the members.
    answer = (raw.logits / calibration.settings["temperature"]).softmax(dim=-1)
    torch.testing.assert_close(out.logits.exp(), answer)
    torch.testing.assert_close(out.member_logits.softmax(dim=-1).mean(dim=1), answer)
    parts = decompose(out.member_logits)
    torch.testing.assert_close(parts.total, torch.special.entr(answer.double()).sum(dim=-1), check_dtype=False)
    confidence = out.logits.softmax(dim=-1).amax(dim=-1)
    torch.testing.assert_close(out.detector_score, 1 - confidence)
    assert torch.equal(out.abstain, out.detector_score > calibration.abstention.threshold)
    assert torch.equal(out.prediction_set, prediction_sets(answer, calibration.settings["sets"]["threshold"]))
    assert 0 < out.abstain.sum() < len(out.abstain)
    with torch.no_grad(), hydra.uncalibrated():
        before = hydra(**batch)
    assert torch.equal(before.member_logits, raw.member_logits) and before.abstain is None
    assert hydra.train()(**batch).abstain is None  # training is about the model


@pytest.mark.parametrize("family", CLASSIFIERS, ids=lambda family: family.name)
def test_saved_is_loaded_with_features_of_every_head(family, tmp_path):
    hydra = hydra_of(family.name)
    hydra.calibrate(rows_for(family.name), target={"coverage": 0.5}, detector="mahalanobis")
    [batch] = rows_for(family.name, seed=1, labelled=False)
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = hydra(**batch)
        theirs = loaded(**batch)
    for name in ("logits", "member_logits", "detector_score", "abstain", "prediction_set"):
        assert torch.equal(ours[name], theirs[name]), name
    # the features are those that a detector by itself reads
    detector = Detector("mahalanobis")
    with hydra.uncalibrated():
        logits, features, _ = collect_answers(hydra, [batch])
    state = {name: getattr(hydra.decision, name) for name in hydra.config.decision["state"]}
    detector.state = state
    detector.fitted_on = {}
    torch.testing.assert_close(ours.detector_score.double(), detector(logits, features), rtol=1e-4, atol=1e-4)


def test_half_precision_keeps_what_was_fitted(tmp_path, warned):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector="relative_mahalanobis")
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for cast in (loaded, copy.deepcopy(hydra).to(torch.bfloat16)):
        assert cast.dtype == torch.bfloat16 and cast.decision.center.dtype == torch.float32
        assert torch.equal(cast.decision.center, hydra.decision.center) and cast.is_calibrated
    assert "calibrated in float32 and runs in bfloat16" in warned.text
    assert not cast.float().is_calibrated  # its weights are not what they were


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_float64_model_keeps_its_decision_also_in_float32(dtype, tmp_path):
    hydra = hydra_of("vit").double()
    data = [{name: each.double() if each.is_floating_point() else each for name, each in rows_for("vit")[0].items()}]
    hydra.calibrate(data, target={"coverage": 0.5}).model.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path, dtype=dtype).eval()
    [batch] = rows_for("vit", seed=1, labelled=False)
    with torch.no_grad():
        expected, found = (model(batch["pixel_values"].to(model.dtype)) for model in (hydra.eval(), loaded))
    assert loaded.is_calibrated and torch.equal(found.abstain, expected.abstain) and expected.abstain.any()
    torch.testing.assert_close(found.detector_score.double(), expected.detector_score, rtol=0, atol=1e-5)


def test_what_is_refused_of_equal_scores_is_refused_by_the_model_too():
    """Scores are float32, in which a threshold just below one of them must not be that score."""
    hydra = hydra_of("vit")
    ood = rows_for("vit", seed=1, labelled=False)
    calibration = hydra.calibrate(rows_for("vit"), ood, target={"tpr": 0.5}, detector="disagreement")
    with torch.no_grad():
        refused = hydra(**ood[0]).abstain
    assert refused.double().mean().item() == calibration.abstention.tpr >= 0.5


def test_threads_that_share_a_classifier_get_their_own_answers():
    """Features are read while a model predicts, and those of another thread are of other rows."""
    members = DeepEnsemble([backbone_of("vit") for _ in range(2)])
    fitted = calibrate(members, rows_for("vit"), target={"coverage": 0.5}, detector="mahalanobis").model.eval()
    asked = [rows_for("vit", seed=seed, labelled=False, count=4)[0] for seed in range(6)]
    expected = [fitted(**batch).detector_score for batch in asked]
    with ThreadPoolExecutor(6) as threads:
        for scores, found in zip(expected, threads.map(lambda batch: fitted(**batch), asked), strict=True):
            assert torch.equal(scores, found.detector_score)
    fitted.to("meta")
    assert all(buffer.is_meta for buffer in fitted.reader[0].model.buffers())  # goes where the model goes


@pytest.mark.parametrize("saved", ["nothing", "another calibration"])
def test_settings_beside_the_state_of_another_calibration_are_refused(saved, tmp_path):
    """As a save leaves them that was stopped after config.json."""
    hydra = hydra_of("vit")
    if saved == "another calibration":
        hydra.calibrate(rows_for("vit", seed=1), target={"coverage": 0.5}, detector="mahalanobis")
    hydra.save_pretrained(tmp_path)
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector="mahalanobis")
    config = json.loads((tmp_path / "config.json").read_text()) | {"decision": hydra.config.decision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"decision\.state is not what was saved with these settings"):
        type(hydra).from_pretrained(tmp_path)


def test_a_decision_that_was_saved_halfway_is_the_one_before(tmp_path, monkeypatch):
    """Settings and tensors are one file, which is replaced as a whole."""
    backbone = backbone_of("vit")
    first, second = (
        calibrate(backbone, rows_for("vit", seed=seed), target={"coverage": 0.5}, detector="mahalanobis").model.eval()
        for seed in (0, 1)
    )
    first.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["decision.safetensors"]
    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        second.save(tmp_path)
    loaded = CalibratedClassifier.load(backbone, tmp_path)
    assert loaded.decision.settings == first.decision.settings
    for name, tensor in first.decision.named_buffers():
        assert torch.equal(tensor, loaded.decision.get_buffer(name))


def stopped(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("detector", ["msp", "disagreement", "mahalanobis", None])
def test_answers_that_are_no_numbers_abstain_and_may_be_any_class(detector):
    hydra = hydra_of("vit")
    # also without a threshold
    target = {} if detector is None else {"target": {"coverage": 0.9}, "detector": detector}
    hydra.calibrate(rows_for("vit"), **target, alpha=0.7)
    [batch] = rows_for("vit", seed=1, labelled=False, count=3)
    batch["pixel_values"][1] = math.nan
    with torch.no_grad():
        out = hydra(**batch)
    assert out.abstain[1] and not out.abstain[[0, 2]].all()
    assert out.prediction_set[1].all() and not out.prediction_set[[0, 2]].all()


def stops_midway(rows: list[dict], error: BaseException):
    yield from rows
    raise error


@pytest.mark.parametrize(
    "data, options, error",
    [
        (lambda: stops_midway(rows_for("vit"), OSError("the disk is gone")), {}, OSError),
        (lambda: stops_midway(rows_for("vit"), KeyboardInterrupt()), {}, KeyboardInterrupt),
        (lambda: rows_for("vit"), {"target": {"recall": 0.9}}, ValueError),
        (lambda: rows_for("vit"), {"target": {"risk": 0.001}, "confidence": 0.999}, ValueError),  # fails at the end
        (
            lambda: rows_for("vit"),
            {"target": {"tpr": 0.5}, "ood_data": stops_midway(rows_for("vit", 2), OSError("the disk is gone"))},
            OSError,
        ),
    ],
    ids=["data", "interrupted", "target", "out of reach", "ood"],
)
def test_a_calibration_that_fails_leaves_the_earlier_one(data, options, error):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    decision = hydra.decision
    settings = hydra.config.decision
    [batch] = rows_for("vit", seed=1, labelled=False)
    with torch.no_grad():
        before = hydra(**batch)
    with pytest.raises(error):
        hydra.calibrate(data(), **options)
    assert hydra.decision is decision and hydra.config.decision is settings and hydra.is_calibrated
    with torch.no_grad():
        after = hydra(**batch)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.abstain, after.abstain)


@pytest.mark.parametrize("detector", ["msp", "mahalanobis"])
def test_calibrating_again_is_as_calibrating_at_first(detector):
    """What is fitted is fitted on the answers without the earlier temperature; a detector on training data, too."""
    first = hydra_of("vit")
    again = hydra_of("vit")
    again.load_state_dict(first.state_dict())
    again.calibrate(rows_for("vit", seed=5), target={"coverage": 0.9})
    data = {"data": rows_for("vit"), "ood_data": rows_for("vit", 3, labelled=False)}
    for hydra in (first, again):
        fitted = Detector(detector).fit(hydra, rows_for("vit", 2)) if detector == "mahalanobis" else detector
        hydra.calibrate(**data, target={"tpr": 0.5}, detector=fitted)
    assert first.config.decision == again.config.decision
    for name, tensor in first.decision.state_dict().items():
        assert torch.equal(tensor, again.decision.get_buffer(name)), name


def test_a_detector_that_was_fitted_is_taken_as_it_is_and_another_is_left_unfitted():
    hydra = hydra_of("vit")
    training = rows_for("vit", seed=2)
    batches = ({key: value[start : start + 12] for key, value in training[0].items()} for start in range(0, ROWS, 12))
    detector = Detector("mahalanobis").fit(hydra, batches)  # in one pass
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector=detector)
    for key, tensor in detector.state.items():
        assert torch.equal(hydra.decision.get_buffer(key), tensor)
    with hydra.uncalibrated():
        expected = Detector("mahalanobis").fit_answers(*collect_answers(hydra, training))
    for key, tensor in expected.state.items():
        torch.testing.assert_close(hydra.decision.get_buffer(key), tensor, rtol=1e-3, atol=1e-4)
    unfitted = Detector("mahalanobis")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector=unfitted)
    assert unfitted.state is None and not torch.equal(hydra.decision.center, detector.state["center"])
    backbone = backbone_of("vit")
    for model, fitted_on in ((hydra, backbone), (backbone, hydra)):  # one member's fit would stand in for all
        other = Detector("knn", k=3).fit(fitted_on, training)
        with pytest.raises(ValueError, match="fit it on this model"):
            calibrate(model, rows_for("vit"), target={"coverage": 0.5}, detector=other)
