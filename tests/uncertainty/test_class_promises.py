"""Promises for each predicted class, and for the true rows of one."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from experiments.class_promises import CASES, summarize
from hydra_transformers import evaluate_uncertainty
from hydra_transformers.reports import Report
from hydra_transformers.serving.answers import to_table
from hydra_transformers.uncertainty import CalibratedClassifier, Monitor, calibrate
from hydra_transformers.uncertainty.class_promises import (
    ClassTarget,
    fit_groups,
    lost_rows_allowed,
    pool_classes,
)
from hydra_transformers.uncertainty.recalibration import recalibrate
from hydra_transformers.uncertainty.tasks import task_fit_of
from tests import tiny_tags
from tests.uncertainty.test_tasks import batch_of, data_of, hydra_of, plain_model


NAME = "single_label_classification"
CLASSES = ["merge", "keep", "ask"]


def calibrated_by(target, by=None, model=None, rows=600, **options):
    options = {"confidence": 0.6, "alpha": None, **options}
    return calibrate(model or hydra_of(NAME), data_of(NAME, rows), target=target, by=by, **options)


@pytest.mark.parametrize(
    ("target", "by", "sentence"),
    [
        ({"risk": 0.05}, "column", "by is 'column': pass 'prediction'"),
        ({"coverage": 0.05}, "prediction", "by is for a risk, and target is"),
        (None, "prediction", "by is for a risk, and target is None"),
        ({"risk": {"merge": 0.01}}, None, "names no risk of the other labels: add '\\*'"),
        ({"risk": {"merge": 0.01, "*": 0.1}}, "prediction", "by itself, without by"),
        (
            {"risk": {"marge": 0.01, "*": 0.1}},
            None,
            "names the label 'marge', and the model's labels are merge, keep, ask",
        ),
        ({"risk": {"merge": 3, "*": 0.1}}, None, "risk of 'merge' is 3: pass a share"),
        ({"missed": 0.1}, None, "pass {'missed': 0.01, 'label': 'fraud'}"),
        ({"missed": 0.1, "label": "merge", "risk": 0.1}, None, "by itself"),
        ({"missed": 2, "label": "merge"}, None, "missed is 2: pass a share"),
    ],
    ids=str,
)
def test_targets_by_class_are_checked(target, by, sentence):
    with pytest.raises(ValueError, match=sentence):
        ClassTarget.of(target, by, CLASSES)


def test_targets_by_class_are_read():
    assert ClassTarget.of({"risk": 0.05}, None, CLASSES) is None and ClassTarget.of(None, None, CLASSES) is None
    assert ClassTarget.of({"risk": 0.05}, "prediction", CLASSES) == ClassTarget(risks=(0.05,))
    found = ClassTarget.of({"risk": {"ask": 0.01, "*": 0.1}}, None, CLASSES)
    assert found.risks == (0.01, 0.1) and found.groups == ((2,), (0, 1))
    assert ClassTarget.of({"missed": 0.1, "label": "keep"}, None, CLASSES) == ClassTarget(missed=0.1, label=1)


def test_classes_with_few_rows_are_pooled_with_those_of_similar_error_rates():
    random = np.random.default_rng(0)
    shares = np.array([0.5, 0.3] + [0.025] * 8)
    rates = np.array([0.1, 0.1] + [0.0, 0.4] * 4)
    predictions = torch.tensor(random.choice(10, 3000, p=shares))
    wrong = torch.tensor(random.random(3000)) < torch.tensor(rates)[predictions]
    groups = pool_classes(predictions, wrong, 10, risk=0.05, confidence=0.9)
    assert groups[:2] == ((0,), (1,)) and sorted(place for group in groups for place in group) == list(range(10))
    assert 2 <= len(groups[2:]) < 8 and all(len({place % 2 for place in pool}) == 1 for pool in groups[2:])
    assert len(pool_classes(predictions[:20], wrong[:20], 10, 0.05, 0.9)) == 1


def test_a_group_without_a_proof_is_never_answered():
    scores = torch.linspace(0, 1, 300)
    predictions = torch.arange(300) % 3
    correct = (predictions != 2) | (torch.arange(300) % 2 == 0)
    first, second, third = fit_groups([(0,), (1,), (2,)], [0.1, 0.1, 0.1], 0.9, scores, predictions, correct, CLASSES)
    assert first.threshold >= scores[-3] and first.answered == first.rows == 100 and first.wrong == 0
    assert third.threshold == -math.inf and third.answered == 0 and second.name == "keep"


def test_the_number_of_lost_rows_that_are_allowed_is_binomial():
    assert lost_rows_allowed(229, 0.01, 0.9) is None and lost_rows_allowed(230, 0.01, 0.9) == 0
    assert lost_rows_allowed(1000, 0.05, 0.9) == 40 and lost_rows_allowed(100, 0.05, None) == 5


def test_each_predicted_class_has_its_threshold_everywhere(tmp_path):
    calibration = calibrated_by({"risk": 0.55}, "prediction")
    hydra = calibration.model.eval()
    thresholds = torch.tensor(hydra.decision.settings.thresholds)
    abstention = calibration.abstention
    assert len(set(thresholds.tolist())) == 3 and hydra.decision.settings.threshold == thresholds.max()
    with torch.no_grad():
        output = hydra(**batch_of(NAME))
    assert torch.equal(output.abstain, output.detector_score > thresholds[output.logits.argmax(-1)])
    assert output.abstain.any() and not output.abstain.all()
    assert "With 60 % confidence for all groups of predictions together" in str(calibration)
    for group in abstention.groups:
        assert f"  {group.name}: " in str(calibration) and group.wrong <= 0.55 * group.answered
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch_of(NAME)).abstain, output.abstain)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["decision"]["thresholds"][0] = "inf"
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="changed since"):
        type(hydra).from_pretrained(tmp_path)

    texts = [" ".join(tiny_tags.PIECES[5 + (row + place) % 8] for place in range(4)) for row in range(30)]
    rows = hydra.predict(texts, tiny_tags.tokenizer())
    by_label = dict(zip(hydra.config.id2label.values(), thresholds.tolist(), strict=True))
    assert all(row["threshold"] == by_label[row["label"]] for row in rows)
    assert all(row["abstain"] == (row["detector_score"] > row["threshold"]) for row in rows)
    assert any("of this prediction." in row["reason"] for row in rows if row["abstain"])
    monitor = Monitor.of(hydra)
    monitor.update(rows)
    assert monitor.state()["answered"].rows == 30


def test_packages_that_know_no_promise_by_class_refuse_a_model_with_one(warned, tmp_path):
    hydra = calibrated_by({"risk": 0.55}, "prediction").model
    assert hydra.config.decision["version"] == 3
    assert calibrated_by({"risk": 0.55}).model.config.decision["version"] == 2
    # Before this version such models were saved with 2, and their promises hold as well.
    settings = dataclasses.replace(hydra.decision.settings, version=2)
    digests = dataclasses.replace(settings.digests, settings=settings.digest())
    hydra.config.decision = dataclasses.replace(settings, digests=digests).to_dict()
    hydra.decision.settings = dataclasses.replace(settings, digests=digests)
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path).eval()
    assert loaded.config.decision["version"] == 2
    with torch.no_grad():
        assert torch.equal(loaded(**batch_of(NAME)).abstain, hydra.eval()(**batch_of(NAME)).abstain)
    assert not warned.text
    # Of versions that are not known yet nothing is decided.
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["decision"]["version"] = 4
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert type(hydra).from_pretrained(tmp_path).decision is None and "another version" in warned.text


def test_a_group_that_is_never_answered_says_why():
    hydra = calibrated_by({"risk": {"LABEL_0": 0.001, "*": 0.7}}).model.eval()
    assert hydra.decision.settings.thresholds[0] == -math.inf
    with torch.no_grad():
        output = hydra(**batch_of(NAME))
    assert output.abstain[output.logits.argmax(-1) == 0].all()
    texts = [" ".join(tiny_tags.PIECES[5 + (row + place) % 8] for place in range(4)) for row in range(30)]
    rows = [row for row in hydra.predict(texts, tiny_tags.tokenizer()) if row["label"] == "LABEL_0"]
    assert rows and all(row["reason"].startswith("Nothing can be promised of this prediction") for row in rows)
    assert {row["threshold"] for row in rows} == {"-inf"}
    columns = task_fit_of(hydra).columns | {"truncated": "bool"}
    assert to_table(rows, columns)["threshold"].to_pylist() == [-math.inf] * len(rows)


def test_few_true_rows_of_a_class_are_answered_as_another(tmp_path):
    plain = plain_model(NAME)
    model = calibrated_by({"missed": 0.1, "label": "LABEL_1"}, model=plain).model.eval()
    rows = data_of(NAME, 600)
    second = torch.randperm(600, generator=torch.Generator().manual_seed(0))[300:].tolist()
    with torch.no_grad():
        output = model(
            **{key: torch.stack([rows[place][key] for place in second]) for key in ("input_ids", "attention_mask")}
        )
    labels = torch.stack([rows[place]["labels"] for place in second])
    is_true = labels == 1
    lost = is_true & ~output.abstain & (output.logits.argmax(-1) != 1)
    assert int(lost.sum()) == lost_rows_allowed(int(is_true.sum()), 0.1, 0.6)
    assert not output.abstain[output.logits.argmax(-1) == 1].any() and output.abstain.any()
    monitor = Monitor.of(model)
    monitor.update(output, labels)
    state = monitor.state()["lost"]
    assert state.rows == int(is_true.sum()) and state.rate == lost.sum() / is_true.sum()
    assert "Lost rows of LABEL_1" in state.sentence
    monitor.update(output, labels, chosen="answered")
    assert monitor.state()["lost"].rows == state.rows
    model.save(tmp_path)
    with torch.no_grad():
        again = CalibratedClassifier.load(plain, tmp_path).eval()(**batch_of(NAME))
        assert torch.equal(again.abstain, model(**batch_of(NAME)).abstain)


def test_a_monitor_counts_each_prediction_by_itself(tmp_path):
    hydra = calibrated_by({"risk": 0.55}, "prediction").model.eval()
    monitor = Monitor.of(hydra)
    labels = torch.stack([row["labels"] for row in data_of(NAME, seed=1)])
    with torch.no_grad():
        output = hydra(**batch_of(NAME))
    monitor.update(output, labels)
    answered = ~output.abstain
    predictions = output.logits.argmax(-1)
    for place in range(3):
        state = monitor.state()[f"risk of LABEL_{place}"]
        places = answered & (predictions == place)
        assert state.rows == places.sum() and "at most 55 % promised" in state.sentence
        assert state.rate == pytest.approx(float((predictions != labels)[places].double().mean()))
    assert monitor.state()["risk"].rows == answered.sum()
    monitor.save(tmp_path / "monitor.json")
    assert str(Monitor.read(tmp_path / "monitor.json")) == str(monitor)
    saved = json.loads((tmp_path / "monitor.json").read_text())
    saved["settings"]["validation"]["groups"][0]["wrong"] = [5, 3]
    (tmp_path / "monitor.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="is damaged: validation has the promise"):
        Monitor.read(tmp_path / "monitor.json")


def test_a_report_shows_every_promise(tmp_path):
    rows = data_of(NAME, 200, seed=7)
    by_prediction = calibrated_by({"risk": 0.55}, "prediction").model.eval()
    missed = calibrated_by({"missed": 0.1, "label": "LABEL_1"}, model=plain_model(NAME)).model.eval()
    report = evaluate_uncertainty({"each": by_prediction, "missed": missed}, rows)
    with torch.no_grad():
        output = by_prediction(
            **{key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}
        )
    labels = torch.stack([row["labels"] for row in rows])
    predictions = output.logits.argmax(-1)
    for place, promise in enumerate(sorted(report.promises["each"], key=lambda promise: promise["name"])):
        places = predictions == place
        answered = places & ~output.abstain
        assert promise["name"] == f"wrong, predicted LABEL_{place}" and promise["share"] == 0.55
        assert (promise["rows"], promise["counted"]) == (places.sum(), answered.sum())
        assert promise["losses"] == (predictions != labels)[answered].sum()
    [lost] = report.promises["missed"]
    assert lost["name"] == "lost rows of LABEL_1" and lost["rows"] == lost["counted"] == (labels == 1).sum()
    assert "Promises by class" in str(report) and "lost rows of LABEL" in report.to_markdown()
    report.to_json(tmp_path / "report.json")
    assert str(Report.from_json(tmp_path / "report.json")) == str(report)
    plain = evaluate_uncertainty({"all": calibrated_by({"coverage": 0.5}).model}, rows)
    assert not plain.promises and "Promises by class" not in plain.to_markdown()


def test_what_keeps_no_promise_by_class_is_refused():
    with pytest.raises(ValueError, match="are for single-label classification, this is regression"):
        calibrate(hydra_of("regression"), data_of("regression"), target={"coverage": 0.5}, by="prediction")
    with pytest.raises(ValueError, match="no risk can be promised by class on these 30 rows"):
        calibrated_by({"risk": 0.001}, "prediction", rows=60)
    with pytest.raises(ValueError, match=r"missed=0.001 cannot be guaranteed with 60 % confidence on"):
        calibrated_by({"missed": 0.001, "label": "LABEL_0"}, rows=60)
    with pytest.raises(ValueError, match="ood_data has no effect on promises by class"):
        calibrated_by({"risk": 0.5}, "prediction", ood_data=data_of(NAME, 60))
    hydra = calibrated_by({"risk": 0.55}, "prediction").model
    with pytest.raises(ValueError, match="keeps a promise for each class"):
        recalibrate(hydra, "reviewed.csv", risk=0.5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_promises_by_class_hold_all_together_as_often_as_they_say(case):
    found = summarize(case, draws=60)
    assert found["broken"] <= 0.17, found  # with a confidence of 90 %, of 60 draws
