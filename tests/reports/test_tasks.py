"""One contract for the reports of all tasks: numbers, intervals, tables, JSON."""

import re

import pytest

from hydra_transformers import compare_fusions, evaluate_uncertainty
from hydra_transformers.reports import Report
from hydra_transformers.reports.report_plots import report_figures
from hydra_transformers.uncertainty import ood_metrics
from hydra_transformers.uncertainty.tasks import task_fit_of
from tests.reports.tasks import CASES


pytestmark = pytest.mark.filterwarnings("ignore:.*no better than always", "ignore:.*exactly as data")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def evaluated(case):
    hydra = case.hydra()
    models = {"One": hydra.member(0).eval(), "Hydra": hydra}
    ood = None if case.ood is None else {"near": {"other": case.ood}}
    return hydra, evaluate_uncertainty(models, case.data, ood, batch_size=7)


def test_metrics_are_those_of_the_task(case, evaluated):
    hydra, report = evaluated
    task = task_fit_of(hydra)
    answers, labels = task.collect(hydra, case.data, 32)
    expected = task.measure(answers, labels)
    metrics = report.models["Hydra"]["data"]
    assert report.task == case.name and case.first in expected and next(iter(task.metrics)) == case.first
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6, nan_ok=True)
    assert report.num_members == {"One": 1, "Hydra": 3} and metrics["num_samples"] == len(answers)
    if case.ood is not None:
        ood, _ = task.collect(hydra, case.ood, 32)
        detection = ood_metrics(task.scores(answers), task.scores(ood))
        measured = report.models["Hydra"]["other (near)"]
        assert {name: measured[name] for name in detection} == pytest.approx(detection, abs=1e-6)


def test_intervals_hold_the_difference_of_the_metrics(case, evaluated):
    _, report = evaluated
    gain = report.gains("Hydra", "One")[case.first]
    values = [report.models[name]["data"][case.first] for name in ("One", "Hydra")]
    assert gain.change.difference == pytest.approx(values[1] - values[0], abs=1e-5)
    assert gain.change.low <= gain.change.difference <= gain.change.high and gain.change.high < float("inf")
    against_itself = report.gains("Hydra", "Hydra")[case.first]
    assert against_itself.verdict == "no difference" and against_itself.change.difference == 0
    assert gain.verdict != ("better" if (values[1] < values[0]) == gain.higher_is_better else "worse")


def test_every_form_shows_the_metrics_and_json_gives_the_report_back(case, evaluated, tmp_path):
    hydra, report = evaluated
    title, better = task_fit_of(hydra).metrics[case.first]
    arrow = "↑" if better == "high" else "↓"
    for form in (str(report), repr(report), report.to_markdown(), report._repr_html_(), report.to_html(pictures=[])):
        assert title in form and arrow in form and "Hydra against One: " in form
    first_table = report.to_markdown().split("\n\n")[1]
    assert re.search(r"^\| Model \| Members \| " + re.escape(title), first_table) and "| Hydra | 3 |" in first_table
    report.to_json(tmp_path / "results" / "report.json")
    loaded = Report.from_json(tmp_path / "results" / "report.json")
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["report.json"]
    assert loaded.to_json() == report.to_json() and loaded.to_markdown() == report.to_markdown()
    frame = report.to_pandas()
    assert len(frame) == 2 * len(report.groups) and set(frame.group) == {group for group, *_ in report.groups.values()}
    assert frame[(frame.model == "Hydra") & (frame.group == "id")][case.first].item() == pytest.approx(
        report.models["Hydra"]["data"][case.first]
    )
    result = report.to_eval_results("D", model="Hydra", task_type="x")[0]
    assert (result.metric_type, result.dataset_type) == (case.first, "d")
    assert ("roc_other_near" in report_figures(report)) == (case.ood is not None)


@pytest.mark.slow
def test_members_are_compared_by_the_first_metric(case, evaluated, tmp_path):
    folders = [tmp_path / str(place) for place in range(3)]
    for member, folder in zip(case.members(), folders, strict=True):
        member.save_pretrained(folder)
    comparison = compare_fusions(folders, case.data)
    expected = evaluated[1].models["Hydra"]["data"][case.first]
    assert comparison.report.models["ensemble"]["data"][case.first] == pytest.approx(expected, abs=1e-5)
    assert comparison.best.build().num_members == 3 and comparison.report.task == case.name


def test_what_a_calibrated_model_answers_opens_the_report(case):
    hydra = case.hydra()
    data = case.data
    if case.name == "reward":  # calibrated on relevant and other texts, measured on pairs
        data = [{**case.data["chosen"][0], "labels": (case.data["chosen"][0]["input_ids"][:, 0] % 2).float()}]
    hydra.calibrate(data, target={"coverage": 0.5})
    report = evaluate_uncertainty({"Hydra": hydra}, case.data)
    assert 0 < report.models["Hydra"]["data"]["answered"] < 1
    assert "nswered (%)" in report.to_markdown().split("\n\n")[1]
