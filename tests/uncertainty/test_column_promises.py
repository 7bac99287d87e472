"""Promises for each group of a column that is known when predicting."""

import json
import math
from functools import cache

import pytest
import torch

from hydra_transformers import evaluate_uncertainty
from hydra_transformers.models.decision_settings import GroupSettings
from hydra_transformers.uncertainty import CalibratedClassifier, Monitor, calibrate
from hydra_transformers.uncertainty.audits import AUDIT_ID, calibration_id, count_reviews, read_reviews
from hydra_transformers.uncertainty.class_promises import ClassTarget, GroupedRows, fit_group_abstention
from hydra_transformers.uncertainty.recalibration import recalibrate
from tests import tiny_tags
from tests.uncertainty.test_audits import reviewed
from tests.uncertainty.test_tasks import data_of, hydra_of, plain_model


SINGLE = "single_label_classification"
TASKS = {SINGLE: 0.55, "multi_label_classification": 0.78, "reward": 0.6}
SITES = ["north", "south", "east"]


@cache
def rows_of(name, count=600, seed=0):
    rows = data_of(name, count, seed)
    return [{**row, "site": SITES[place % 3] if place % 40 else "west"} for place, row in enumerate(rows)]


def batch_with_groups(name, count=90, seed=3):
    rows = rows_of(name, count, seed)
    inputs = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}
    return inputs, torch.stack([row["labels"] for row in rows]), [row["site"] for row in rows]


def calibrated_by_site(name, model=None, target=None, **options):
    target = target or {"risk": TASKS[name]}
    options = {"confidence": 0.6, "alpha": None, **options}
    return calibrate(model or hydra_of(name), rows_of(name), target=target, by="site", **options)


@pytest.mark.parametrize("name", TASKS)
def test_each_group_has_its_threshold_wherever_the_model_is_loaded(name, tmp_path):
    calibration = calibrated_by_site(name)
    hydra = calibration.model.eval()
    by_group = hydra.decision.settings.by_group
    assert by_group.column == "site" and by_group.names == ("east", "north", "south", "west")
    assert hydra.config.decision["version"] == 3 and len(set(by_group.thresholds)) > 1
    assert hydra.decision.settings.threshold == max(by_group.thresholds)
    assert "for all groups by site together" in str(calibration) and "  north: " in str(calibration)
    inputs, _, sites = batch_with_groups(name)
    group = by_group.indices(sites)
    with torch.no_grad():
        output = hydra(**inputs, group=group)
        scores = output.detector_score
        assert torch.equal(output.abstain, ~(scores <= torch.tensor(by_group.thresholds)[group]))
        assert output.abstain.any() and not output.abstain.all()
        # Without a group, or with an unknown one, nothing is answered.
        assert hydra(**inputs).abstain.all()
        assert hydra(**inputs, group=torch.full_like(group, -1)).abstain.all()
        assert hydra(**inputs, group=torch.full_like(group, 4)).abstain.all()
        hydra.save_pretrained(tmp_path)
        loaded = type(hydra).from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(**inputs, group=group).abstain, output.abstain)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "abstain_below" not in saved  # a client that knows scores alone cannot tell
    saved["decision"]["by_group"]["thresholds"][0] = "inf"
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="changed since"):
        type(hydra).from_pretrained(tmp_path)


def test_a_plain_classifier_takes_the_group_as_well(tmp_path):
    plain = plain_model(SINGLE)
    model = calibrated_by_site(SINGLE, plain, {"risk": 0.7}).model.eval()
    inputs, _, sites = batch_with_groups(SINGLE)
    by_group = model.decision.settings.by_group
    group = by_group.indices(sites)
    model.save(tmp_path)
    again = CalibratedClassifier.load(plain, tmp_path).eval()
    with torch.no_grad():
        output = model(**inputs, group=group)
        assert torch.equal(output.abstain, ~(output.detector_score <= torch.tensor(by_group.thresholds)[group]))
        assert not output.abstain.all() and model(**inputs).abstain.all()
        assert torch.equal(again(**inputs, group=group).abstain, output.abstain)


def test_some_groups_have_a_risk_of_their_own_and_the_others_keep_theirs_each():
    names = ["a", "b", "c", "rare", "rarer"]
    groups = torch.cat([torch.arange(3).repeat(100), torch.full((8,), 3), torch.full((2,), 4)])
    rows = GroupedRows(torch.linspace(0, 1, len(groups)), groups, torch.ones(len(groups), dtype=torch.bool))
    target = ClassTarget.by_column({"risk": {"b": 0.2, "*": 0.1}}, names)
    fitted = fit_group_abstention(target, 0.6, rows, rows, names, "site")
    found = {group.name: group.risk for group in fitted.groups}
    assert found == {"b": 0.2, "a": 0.1, "c": 0.1, "rare, rarer": 0.1}
    together = ClassTarget.of({"risk": {"b": 0.2, "*": 0.1}}, None, names)
    assert len(fit_group_abstention(together, 0.6, rows, rows, names).groups) == 2
    every = ClassTarget.by_column({"risk": dict.fromkeys(names, 0.2)}, names)
    assert len(fit_group_abstention(every, 0.6, rows, rows, names, "site").groups) == 5
    with pytest.raises(ValueError, match="target names the group 'd', and those of the data are a, b, c, rare, rarer"):
        ClassTarget.by_column({"risk": {"d": 0.2, "*": 0.1}}, names)
    with pytest.raises(ValueError, match="names no risk of the other groups"):
        ClassTarget.by_column({"risk": {"a": 0.2}}, names)
    with pytest.raises(ValueError, match=r"by is for a risk, and target is \{.coverage.: 0.5\}"):
        ClassTarget.by_column({"coverage": 0.5}, names)


def test_predictions_of_raw_inputs_name_the_group():
    hydra = calibrated_by_site(SINGLE).model.eval()
    by_group = hydra.decision.settings.by_group
    texts = [" ".join(tiny_tags.PIECES[5 + (row + place) % 8] for place in range(4)) for row in range(30)] + [""]
    groups = ["north", "east", "mars"] * 10 + ["north"]
    tokenizer = tiny_tags.tokenizer()
    rows = hydra.predict(texts, tokenizer, groups=groups)
    highest = dict(zip(by_group.names, by_group.thresholds, strict=True))
    for row, site in zip(rows[:-1], groups, strict=False):
        assert row["threshold"] == highest.get(site, "-inf")
        assert row["abstain"] == (not row["detector_score"] <= highest.get(site, -math.inf))
    assert {row["abstain"] for row in rows[:-1]} == {True, False}
    unsure = next(row for row, site in zip(rows, groups, strict=True) if row["abstain"] and site in highest)
    assert unsure["reason"].startswith("msp (1 - the largest probability) is") and "of the site '" in unsure["reason"]
    assert rows[2]["reason"] == "Nothing can be promised of the site 'mars': no validation row has it."
    assert rows[-1]["abstain"] and rows[-1]["reason"] == "The text is empty."
    without = hydra.predict(texts, tokenizer)
    assert all(row["abstain"] for row in without) and without[-1]["reason"] == "The text is empty."
    assert without[0]["reason"] == "It answers by the site, which is not given." and without[0]["threshold"] is None
    monitor = Monitor.of(hydra)
    monitor.update(rows)
    monitor.update(without)
    assert monitor.state()["answered"].rows == 62
    with pytest.raises(ValueError, match="groups has 2, and there are 31 inputs: pass the site of each"):
        hydra.predict(texts, tokenizer, groups=["north", "south"])
    other = calibrate(hydra_of(SINGLE), data_of(SINGLE), target={"coverage": 0.5}).model
    with pytest.raises(ValueError, match="groups is for a model that was calibrated with by=column: leave it out"):
        other.predict(texts[:1], tokenizer, groups=["north"])
    with pytest.raises(ValueError, match="groups is for a model that was calibrated"):
        hydra_of(SINGLE).predict(texts[:1], tokenizer, groups=["north"])


def test_a_group_of_which_nothing_can_be_promised_says_so():
    hydra = calibrated_by_site(SINGLE, target={"risk": {"north": 0.001, "*": 0.6}}).model
    assert (
        dict(zip(hydra.decision.settings.by_group.names, hydra.decision.settings.by_group.thresholds, strict=True))[
            "north"
        ]
        == -math.inf
    )
    [row] = hydra.predict([tiny_tags.PIECES[5]], tiny_tags.tokenizer(), groups=["north"])
    assert row["abstain"] and row["threshold"] == "-inf"
    assert row["reason"].startswith("Nothing can be promised of the site 'north': it had too few validation rows")


@pytest.mark.parametrize("name", TASKS)
def test_a_monitor_and_audits_count_each_group_by_itself(name, tmp_path):
    hydra = calibrated_by_site(name).model.eval()
    inputs, labels, sites = batch_with_groups(name)
    with torch.no_grad():
        output = hydra(**inputs, group=hydra.decision.settings.by_group.indices(sites))
    monitor = Monitor.of(hydra)
    monitor.update(output, labels, groups=sites)
    monitor.update(output)
    answered = torch.tensor([site == "south" for site in sites]) & ~output.abstain
    state = monitor.state()["risk of south"]
    assert state.rows == answered.sum() and state.sentence.startswith("Wrong answers, site south:")
    everywhere = monitor.task.outcomes(output, labels, monitor.decision_settings, torch.Generator())
    is_wrong = torch.zeros_like(answered)
    is_wrong[~output.abstain] = everywhere.wrong
    assert state.rate == pytest.approx(float(is_wrong[answered].double().mean()))
    with pytest.raises(ValueError, match="groups is missing: pass the site of each of 90 rows"):
        monitor.update(output, labels)
    monitor.save(tmp_path / "monitor.json")
    assert str(Monitor.read(tmp_path / "monitor.json")) == str(monitor)

    # Audited answers.
    watched = Monitor.read(tmp_path / "monitor.json")
    monitor = Monitor(watched.settings, watched.level)
    assert monitor.column == "site"
    audit = f"{calibration_id(monitor.settings)}-job-0"
    table = reviewed(["1", "0", "1"], audit, predictions=["1", "1", "1"]).assign(site=["south", "south", "mars"])
    count_reviews(monitor, read_reviews(table, name, "site"))
    assert monitor.state()["risk"].rows == 3
    assert monitor.state()["risk of south"].rows == 2 and monitor.state()["risk of south"].rate == 0.5
    with pytest.raises(ValueError, match="has no column 'site': pass the file that predict --audit wrote"):
        read_reviews(table.drop(columns="site"), name, "site")
    assert AUDIT_ID in table.columns


@pytest.mark.parametrize("name", [SINGLE, "multi_label_classification"])
def test_a_report_shows_the_promise_of_each_group(name):
    hydra = calibrated_by_site(name).model.eval()
    rows = rows_of(name, 120, 5)
    report = evaluate_uncertainty({"by site": hydra}, rows, ood_data=[dict(row) for row in data_of(name, 30, 9)])
    promises = {promise["name"]: promise for promise in report.promises["by site"]}
    inputs, labels, sites = batch_with_groups(name, 120, 5)
    with torch.no_grad():
        output = hydra(**inputs, group=hydra.decision.settings.by_group.indices(sites))
    is_south = torch.tensor([site == "south" for site in sites])
    south = promises["wrong, site south"]
    assert (south["rows"], south["counted"]) == (int(is_south.sum()), int((is_south & ~output.abstain).sum()))
    outcomes = Monitor.of(hydra).task.outcomes(output, labels, hydra.decision.settings.to_dict(), torch.Generator())
    assert south["losses"] == int(outcomes.wrong[is_south[~output.abstain]].sum())
    share = 1 - float(output.abstain.double().mean())
    assert report.models["by site"]["data"]["answered"] == pytest.approx(share)
    with pytest.raises(ValueError, match="data has no column 'site', by which promises are made"):
        evaluate_uncertainty({"by site": hydra}, data_of(name, 60))


def test_what_keeps_no_promise_by_column_is_refused():
    for name, title in (("regression", "regression"), ("token_classification", "token classification")):
        with pytest.raises(ValueError, match=f"by is for rows that are right or wrong as a whole, this is {title}"):
            calibrate(hydra_of(name), data_of(name), target={"risk": 0.5}, by="site")
    with pytest.raises(ValueError, match="data has no column 'camera', by which promises are made"):
        calibrate(hydra_of(SINGLE), rows_of(SINGLE), target={"risk": 0.5}, by="camera")
    with pytest.raises(ValueError, match=r"by is for a risk, and target is \{.cost."):
        calibrate(hydra_of(SINGLE), rows_of(SINGLE), target={"cost": {"wrong": 2, "review": 1}}, by="site")
    with pytest.raises(TypeError, match="by is a list: pass 'prediction', or the name of a column"):
        calibrate(hydra_of(SINGLE), rows_of(SINGLE), target={"risk": 0.5}, by=["site"])
    with pytest.raises(ValueError, match="no risk can be promised by site on these 300 rows"):
        calibrated_by_site(SINGLE, target={"risk": 0.0001})
    with pytest.raises(ValueError, match="keeps a promise for each group"):
        recalibrate(calibrated_by_site(SINGLE).model, "reviewed.csv", risk=0.5)
    with pytest.raises(ValueError, match="has 1 names and 2 thresholds"):
        GroupSettings.read({"column": "site", "names": ["a"], "thresholds": [0.1, "inf"]})
