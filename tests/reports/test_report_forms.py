"""A report printed, as a data frame and as one page."""

import re
from html.parser import HTMLParser

import pytest
import torch

from hydra_transformers.cost import Cost
from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.reports.report import UncertaintyReport
from hydra_transformers.uncertainty import Abstention, ConformalSets
from tests.uncertainty.answers import saved


class OneMember(torch.nn.Module):
    def forward(self, member_logits):
        return HydraClassifierOutput(member_logits=member_logits[:, :1])


MODELS = {"Single": OneMember(), "Hydra": SavedLogits()}
FAR = {"far": {"B": saved(30, 0, 3), "C": saved(30, 0.5, 4)}}


@pytest.fixture(scope="module")
def report():
    """Single and Hydra, with near and far data and one corruption, a threshold and sets."""
    [calibration] = saved(50, 2.5, 7)
    return evaluate_uncertainty(
        MODELS,
        saved(60, 2.5, 0),
        {"near": {"A": saved(30, 1, 2)}} | FAR,
        corruptions={"blur": {1: saved(30, 2, 5), 2: saved(30, 1, 6)}},
        abstention=Abstention.fit([0.1, 0.3, 0.6], coverage=0.6),
        conformal=ConformalSets.fit(calibration["member_logits"], calibration["labels"]),
    )


def test_a_printed_report_has_straight_columns_and_a_star_at_the_best(report):
    text = str(report)
    [first] = re.findall(r"In distribution\n(Model.*?)\n\n", text, flags=re.DOTALL)
    heading, rule, single, hydra = first.splitlines()
    assert set(rule) == {"-"} and len(rule) == max(map(len, first.splitlines()))
    for line in (single, hydra):  # numbers end where their headings end, a star one further
        ends = {match.end() for match in re.finditer(r"\d(?=[ *]|$)", line)}
        assert {match.end() for match in re.finditer(r"[↑↓]|Members", heading)} <= ends
    accuracies = [100 * report.models[name].id["accuracy"] for name in MODELS]
    assert accuracies[0] < accuracies[1]
    assert f"{accuracies[1]:.2f}*" in hydra and f"{accuracies[0]:.2f}*" not in single
    for part in ("A (near) ↑", "B (far) ↑", "average FPR95 ↓", "Hydra: at the threshold, "):
        assert part in text
    assert "|" not in text and "**" not in text and "<u>" not in text


def test_a_page_begins_with_a_sentence_and_explains_its_words(report):
    page = report.to_html(pictures=[])
    words = re.sub(r"<[^>]*>", "\n", page.split("</h1>")[1])
    first = next(line for line in words.splitlines() if line)
    assert first.startswith("2 models on 60 rows and 3 sets of foreign data; right answers: Single ")
    assert "Hydra against Single: " in first
    for short in ("aECE", "AURC", "MI", "DI", "OOD"):
        assert re.search(f"<td>{short}</td><td[^>]*>[A-Z][^<]{{30}}", page), short
    for heading in ("Accuracy (%) ↑", "Brier score ↓", "ID Mutual information (MI) ↑", "ID Disagreement (DI) ↑"):
        assert f"<th>{heading}</th>" in page.replace("\N{NO-BREAK SPACE}", " ")
    alone = UncertaintyReport(report.score, {"Hydra": report.models["Hydra"]}).to_html(pictures=[])
    assert re.search(r"<p>Hydra answers [\d.]+% of 60 rows right, and tells 3 sets of foreign data from known", alone)


def test_captions_are_words(report, tmp_path):
    (tmp_path / "roc_svhn_near.png").write_bytes(b"")
    (tmp_path / "reliability_diagram.png").write_bytes(b"")
    page = report.to_html(pictures=sorted(tmp_path.iterdir()))
    assert re.findall("<figcaption>(.*?)</figcaption>", page) == ["Reliability diagram", "ROC curve, svhn near"]


def test_a_printed_table_that_is_too_wide_goes_on_below():
    many = {"far": {f"data set {number}": saved(20, 0, number) for number in range(12)}}
    text = str(evaluate_uncertainty(MODELS, saved(60, 2.5, 0), many))
    assert max(map(len, text.splitlines())) <= 120
    assert all(f"data set {number} (far) ↑" in text for number in range(12))
    assert len(re.findall("^Model", text, flags=re.MULTILINE)) > 2


def test_a_data_frame_has_a_row_for_each_model_and_data_set(report):
    frame = report.to_pandas()
    assert len(frame) == 2 * (1 + 3 + 2)
    assert list(frame.columns[:5]) == ["model", "members", "group", "data_set", "severity"]
    hydra, found = frame[frame.model == "Hydra"], report.models["Hydra"]
    known, far = hydra[hydra.group == "id"].iloc[0], hydra[hydra.group == "far"].set_index("data_set")
    assert known.accuracy == found.id["accuracy"] and known.members == 3
    assert known.abstaining_coverage == found.abstaining["coverage"] and known.sets_alpha == 0.1
    assert far.auroc.to_dict() == {name: found.ood["far"][name]["auroc"] for name in "BC"}
    assert far.accuracy.isna().all()
    blurred = hydra[hydra.group == "corruption"].set_index("severity")
    assert blurred.loc["2", "nll"] == found.corruptions["blur"]["2"]["nll"]


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text outside of its style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.opened = [], [], []
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
    report = evaluate_uncertainty({EVIL: OneMember(), "Hydra": SavedLogits()}, saved(60, 2.5, 0))
    costs = {EVIL: Cost(100, 1000, {8: 2.0}), "Hydra": Cost(200, 2000, {8: 3.0})}
    text = report.to_html(tmp_path / "pages" / "report.html", costs)
    assert (tmp_path / "pages" / "report.html").read_text(encoding="utf-8") == text
    page = Page(text)
    assert not page.opened
    names = {tag for tag, _ in page.tags}
    assert (
        names.isdisjoint({"script", "link", "iframe", "object", "a"}) and "@import" not in text and "url(" not in text
    )
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [each["alt"] for each in pictures] == [
        *("Reliability diagram", "Risk coverage", "Uncertainty split", "Quality against cost")
    ]
    assert all(each["src"].startswith("data:image/png;base64,iVBORw0KGgo") for each in pictures)
    assert "http" not in re.sub(r'src="[^"]*"', "", text)
    assert EVIL in page.words and "1.50x" in " ".join(page.words)


def test_a_page_has_every_number_of_the_markdown(report, monkeypatch):
    monkeypatch.setattr("hydra_transformers.reports.report_plots.report_pngs", lambda *_: {})
    words = set(" ".join(Page(report.to_html()).words).split())
    numbers = re.findall(r"\d+\.\d+", report.to_markdown())
    assert len(numbers) > 100 and all(any(number in word for word in words) for number in set(numbers))


def test_a_notebook_shows_the_printed_tables(report):
    shown, printed = " ".join(Page(report._repr_html_()).words), str(report)
    assert set(re.findall(r"\d+\.\d+", shown)) == set(re.findall(r"\d+\.\d+", printed))
    assert "<b>" in report._repr_html_()


def test_a_console_shows_the_printed_tables_and_no_curves(report):
    assert repr(report) == str(report) and "curves" not in repr(report.models["Hydra"])


def test_costs_of_other_models_are_refused(tmp_path):
    report = UncertaintyReport("msp", evaluate_uncertainty(SavedLogits(), saved(20, 2, 0)).models)
    with pytest.raises(ValueError, match="costs has no 'SavedLogits': pass what compare_costs gives for the models"):
        report.plot(tmp_path, {"Other": Cost(1, 1, {})})
    assert not list(tmp_path.iterdir())


def test_pictures_that_are_there_already_are_not_drawn_again(report, tmp_path, monkeypatch):
    monkeypatch.delattr("hydra_transformers.reports.report_plots.report_pngs")
    (tmp_path / "one.png").write_bytes(b"\x89PNG")
    assert '<img alt="One" src="data:image/png;base64,iVBORw==">' in report.to_html(pictures=[tmp_path / "one.png"])
