"""The report of single-label models: numbers, averages, forms, refusals."""

import copy
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from sklearn.metrics import roc_auc_score

from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.uncertainty import classification_metrics, ood_metrics, ood_score
from hydra_transformers.uncertainty.metrics import diversity_metrics
from tests.families import VIT
from tests.uncertainty.answers import saved


ID = [*saved(40, 2.5, 0), *saved(25, 2.5, 1)]
OOD = {"near": {"A": saved(30, 1, 2)}, "far": {"B": saved(20, 0, 3), "C": saved(35, 0.5, 4)}}
CORRUPTIONS = {
    "blur": {severity: saved(30, 4 - severity / 2, 10 + severity) for severity in (1, 2, 3)},
    "noise": {severity: saved(30, 3 - severity / 2, 20 + severity) for severity in (1, 2, 3)},
}
LOGITS, LABELS = (torch.cat([part[name] for part in ID]) for name in ("member_logits", "labels"))


class FirstMembers(torch.nn.Module):
    """The saved logits of the first members only."""

    def __init__(self, members):
        super().__init__()
        self.members = members

    def forward(self, member_logits):
        return HydraClassifierOutput(member_logits=member_logits[:, : self.members])


@pytest.fixture(scope="module")
def report():
    models = {"Single": FirstMembers(1), "Hydra": FirstMembers(3)}
    return evaluate_uncertainty(models, ID, OOD, corruptions=CORRUPTIONS)


def test_the_report_holds_what_the_functions_give_and_every_model_is_measured_by_the_energy_too(report):
    both = report
    report = evaluate_uncertainty(SavedLogits(), ID, OOD, score="entropy")
    results = report.models["SavedLogits"]
    expected = classification_metrics(LOGITS, LABELS) | diversity_metrics(LOGITS)
    assert {name: results["data"][name] for name in expected} == expected
    assert results["data"]["num_samples"] == 65 and report.score == "entropy"
    far = OOD["far"]["B"][0]["member_logits"]
    detection = ood_metrics(ood_score(LOGITS, "entropy"), ood_score(far, "entropy"))
    assert {name: results["B (far)"][name] for name in detection} == detection
    scores = torch.cat([ood_score(LOGITS, "entropy"), ood_score(far, "entropy")])
    assert results["B (far)"]["auroc"] == pytest.approx(roc_auc_score([0] * 65 + [1] * 20, scores))

    for name, members in (("Single", 1), ("Hydra", 3)):
        scores = (ood_score(logits[:, :members], "energy") for logits in (LOGITS, far))
        assert both.models[name]["B (far)"]["energy_auroc"] == pytest.approx(ood_metrics(*scores)["auroc"])
    assert "AUROC by energy" in both.to_markdown()
    same = evaluate_uncertainty(SavedLogits(), ID, OOD, score="energy")  # the report's own score: once is enough
    assert "energy_auroc" not in same.average("SavedLogits")


def test_averages_count_every_data_set_the_same(report):
    near, b, c = (report.models["Hydra"][name]["auroc"] for name in ("A (near)", "B (far)", "C (far)"))
    assert report.average("Hydra", "near")["auroc"] == near
    assert report.average("Hydra", "far")["auroc"] == pytest.approx((b + c) / 2)
    assert report.average("Hydra")["auroc"] == pytest.approx((near + b + c) / 3)
    severities = report.severities("Hydra")
    assert list(severities) == ["1", "2", "3", "average"]
    both = [report.models["Hydra"][f"{name}, severity 2"]["brier"] for name in ("blur", "noise")]
    assert severities["2"]["brier"] == pytest.approx(sum(both) / 2)
    [alone] = CORRUPTIONS["blur"][2]
    assert both[0] == classification_metrics(alone["member_logits"], alone["labels"])["brier"]
    assert severities["average"]["nll"] == pytest.approx(sum(severities[s]["nll"] for s in "123") / 3)


def cells(markdown, heading):
    """The cells of the column called `heading` of the first table that has it."""
    for table in (part for part in markdown.split("\n\n") if part.startswith("| Model")):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        if heading in rows[0]:
            return [row[rows[0].index(heading)] for row in rows[2:]]
    raise AssertionError(f"no column {heading} in {markdown}")


def test_the_first_table_has_accuracy_and_detection_and_the_others_the_rest(report):
    markdown = report.to_markdown()
    single, hydra = (report.models[name]["data"] for name in ("Single", "Hydra"))
    assert cells(markdown, "Accuracy (%) ↑") == [f"{100 * each['accuracy']:.2f}" for each in (single, hydra)]
    near = [f"{100 * report.average(name, 'near')['auroc']:.2f}" for name in ("Single", "Hydra")]
    assert cells(markdown, "near-OOD AUROC (%) ↑") == near and cells(markdown, "Members") == ["1", "3"]
    assert cells(markdown, "Brier ↓") == [f"{each['brier']:.4g}" for each in (single, hydra)]
    assert len(cells(markdown, "FPR95 (%) ↓")) == 2 * (3 + 2)  # three data sets, and far and all on average
    assert "severity 3" in markdown and "Hydra against Single: " in markdown
    assert "|" not in str(report) and max(map(len, str(report).splitlines())) < 250


@pytest.mark.filterwarnings("ignore:all labels", "ignore:.*no better than")
def test_an_infinite_nll_survives_json_that_any_reader_takes(tmp_path):
    logits = torch.zeros(20, 1, 2)
    logits[:, :, 1] = -torch.inf
    data = [{"member_logits": logits, "labels": torch.ones(20, dtype=torch.long)}]
    with pytest.warns(UserWarning, match="nll is infinite"):
        report = evaluate_uncertainty(SavedLogits(), data)
    text = report.to_json(tmp_path / "report.json")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert Report.from_json(tmp_path / "report.json").models["SavedLogits"]["data"]["nll"] == math.inf
    assert "nll" not in {result.metric_type for result in report.to_eval_results("D")}


def test_a_file_that_is_not_a_report_is_named(report, tmp_path):
    broken = json.loads(report.to_json())
    assert broken["num_members"] == {"Single": 1, "Hydra": 3}
    broken["rows"]["Hydra"]["nll"] = "?"
    for content in (b'{"models": 3}', b"\x80\xff\x00", b"[" * 100_000, json.dumps(broken).encode()):
        (tmp_path / "other.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"other\.json is not a report"):
            Report.from_json(tmp_path / "other.json")


def errors_by_confidence(logits, labels):
    """Whether the ensemble is wrong, the surest row first."""
    probabilities = logits.double().softmax(-1).mean(1)
    return (probabilities.argmax(1) != labels)[probabilities.amax(1).argsort(descending=True)]


def test_a_calibrated_model_is_measured_by_its_own_threshold_and_sets():
    hydra = VIT.fused().float().eval()
    generator = torch.Generator().manual_seed(0)
    data = [{"pixel_values": torch.randn(60, 3, 8, 8, generator=generator), "labels": torch.arange(60) % 5}]
    far = [{"pixel_values": 3 * torch.randn(30, 3, 8, 8, generator=generator)}]
    hydra.calibrate(data, target={"coverage": 0.5}, alpha=0.2)
    report = evaluate_uncertainty({"Hydra": hydra}, data, far)
    metrics = report.models["Hydra"]["data"]
    with torch.no_grad():
        outputs = hydra(pixel_values=data[0]["pixel_values"])
        foreign = hydra(**far[0])
    answered = ~outputs.abstain
    right = outputs.logits.argmax(-1) == data[0]["labels"]
    assert metrics["answered"] == answered.double().mean() and 0 < metrics["answered"] < 1
    assert metrics["answered_risk"] == pytest.approx(1 - right[answered].double().mean().item())
    assert report.models["Hydra"]["ood_data"]["answered"] == pytest.approx((~foreign.abstain).double().mean().item())
    assert metrics["set_size"] == pytest.approx(outputs.prediction_set.sum(1).double().mean().item())
    held = outputs.prediction_set[torch.arange(60), data[0]["labels"]]
    assert metrics["set_coverage"] == pytest.approx(held.double().mean().item())
    assert cells(report.to_markdown(), "Answered (%)") == [f"{100 * metrics['answered']:.2f}"]


def test_errors_of_models_that_abstain_are_compared_at_equal_coverage(report):
    def with_answered(shares):
        models = copy.deepcopy(report.models)
        for name, share in shares.items():
            models[name]["data"] |= {} if share is None else {"answered": share}
        return replace(report, models=models).to_markdown()

    for shares in ({"Single": 0.6, "Hydra": 0.8}, {"Single": None, "Hydra": 0.6}):
        wrong = [errors_by_confidence(LOGITS[:, :members], LABELS)[:39] for members in (1, 3)]  # 39 of 65 rows
        expected = [f"{100 * errors.double().mean():.2f}" for errors in wrong]
        assert cells(with_answered(shares), "Wrong at 60 % answered ↓") == expected
    for shares in (dict.fromkeys(report.models), dict.fromkeys(report.models, 0.5), {"Single": 0.0, "Hydra": None}):
        assert "% answered" not in with_answered(shares)


REGRESSION = VIT.backbone(num_labels=1, problem_type="regression")
REFUSALS = [
    ({"data": []}, ValueError, "data is empty: pass at least one sample"),
    ({"data": [{"member_logits": LOGITS}]}, ValueError, "data has no labels: add a column labels"),
    ({"ood_data": {"near": {"A": []}}}, ValueError, r"A \(near\) is empty"),
    ({"ood_data": {"near": {"A": ID}, "B": ID}}, TypeError, "ood_data has data sets beside groups"),
    ({"ood_data": {"data": saved(30, 0, 3)}}, ValueError, r"two data sets have one name \(data, data\)"),
    ({"ood_data": {"id": {"A": saved(30, 0, 3)}}}, ValueError, "ood_data has a group called 'id'"),
    ({"corruptions": {"blur": ID}}, TypeError, "corruptions is not"),
    ({"score": "odin"}, ValueError, "unknown detector"),
    ({"models": {}}, ValueError, "models is empty"),
    ({"models": [SavedLogits()]}, TypeError, "list is not a model: pass one model, or several as {name: model}"),
    ({"models": {"a": SavedLogits(), "b": REGRESSION}}, ValueError, "b is for regression, the first for s"),
    ({"models": REGRESSION, "score": "energy"}, ValueError, "score and class_prompts are for single-label models"),
    ({"models": {"a": SavedLogits(), "b": SavedLogits()}, "data": iter(ID)}, TypeError, "data is an iterator"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), REFUSALS, ids=[words for *_, words in REFUSALS])
def test_refusals(arguments, error, words):
    with pytest.raises(error, match=words):
        evaluate_uncertainty(**{"models": SavedLogits(), "data": ID, **arguments})


def test_ood_data_need_no_groups():
    assert evaluate_uncertainty(SavedLogits(), ID, {}).groups == evaluate_uncertainty(SavedLogits(), ID).groups
    foreign = saved(30, 0, 3)
    grouped = evaluate_uncertainty(SavedLogits(), ID, {"far": {"B": foreign}}).models["SavedLogits"]["B (far)"]
    for ood_data, name in (({"B": foreign}, "B"), (foreign, "ood_data")):
        report = evaluate_uncertainty(SavedLogits(), ID, ood_data)
        assert report.models["SavedLogits"][name] == grouped and "OOD AUROC (%) ↑" in report.to_markdown()
        assert "OOD-OOD" not in report.to_markdown()


def test_results_that_say_nothing_are_warned_of(recwarn):
    evaluate_uncertainty(SavedLogits(), ID, OOD)
    assert not recwarn.list  # usual data gets no warning
    one_class = [{"member_logits": LOGITS, "labels": torch.full_like(LABELS, 2)}]
    with pytest.warns(UserWarning, match="all labels of data are of one class"):
        evaluate_uncertainty(SavedLogits(), one_class)
    again = [{"member_logits": LOGITS.flip(0), "labels": LABELS}]
    with pytest.warns(UserWarning, match=r"SavedLogits predicts B \(far\) exactly as data: are they the same data"):
        evaluate_uncertainty(SavedLogits(), ID, {"far": {"B": again}})
    always = torch.zeros(65, 1, 4)
    always[..., int(LABELS.mode().values)] = 1.0
    with pytest.warns(UserWarning, match="constant is no better than always predicting the same .* learned nothing"):
        evaluate_uncertainty({"constant": SavedLogits()}, [{"member_logits": always, "labels": LABELS}])


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text outside of its style."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.words = []
        self.opened = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.opened.append(tag)

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        if self.opened[-1:] != ["style"]:
            self.words.append(data)


EVIL = '<script>alert("1")</script>&'


@pytest.mark.slow
def test_a_page_needs_no_other_file_and_takes_no_name_as_code(tmp_path):
    report = evaluate_uncertainty({EVIL: FirstMembers(1), "Hydra": SavedLogits()}, ID, {EVIL: saved(30, 0, 3)})
    text = report.to_html(tmp_path / "pages" / "report.html")
    assert (tmp_path / "pages" / "report.html").read_text(encoding="utf-8") == text
    page = Page(text)
    assert not page.opened and EVIL in page.words
    names = {tag for tag, _ in page.tags}
    assert names.isdisjoint({"script", "link", "iframe", "object", "a"}) and "url(" not in text
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 4 and pictures[0]["alt"] == "Risk coverage"
    assert [tag for tag, _ in page.tags if tag in ("table", "img", "h2")][:4] == ["h2", "table", "img", "h2"]
    assert all(each["src"].startswith("data:image/png;base64,iVBORw0KGgo") for each in pictures)
    assert "http" not in re.sub(r'src="[^"]*"', "", text)


def test_a_page_has_every_number_of_the_markdown_and_pictures_that_are_there(report, tmp_path):
    (tmp_path / "roc_svhn.png").write_bytes(b"\x89PNG")
    page = report.to_html(pictures=[tmp_path / "roc_svhn.png"])
    assert '<img alt="ROC curve, svhn" src="data:image/png;base64,iVBORw==">' in page
    words = " ".join(Page(page).words)
    numbers = set(re.findall(r"\d+\.\d+", report.to_markdown()))
    assert len(numbers) > 100 and all(number in words for number in numbers)
