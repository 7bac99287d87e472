"""What the page of a report says of single classes and rows."""

import pytest
import torch

from hydra_transformers import AutoHydra, load_data
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.reports.promises import landed_table
from hydra_transformers.serving.saved_models import load_model
from tests.tiny_data import CLASSES, picture_rows, save_bert, save_vit


EVIL = "<script>joy</script> nan"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A classifier of colours, its data, and each row's probabilities."""
    folder = str(save_vit(tmp_path_factory.mktemp("vit")))
    model = load_model(folder)
    data = load_data(picture_rows(60), folder)
    with torch.no_grad():
        pixels = torch.stack([data[row]["pixel_values"] for row in range(60)])
        probabilities = model(pixels).logits.double().softmax(-1)
    return model, data, probabilities


@pytest.mark.filterwarnings("ignore:.*is no better than")
def test_confusions_classes_and_examples_are_those_of_the_predictions(images):
    model, data, probabilities = images
    labels, (confidence, prediction) = torch.tensor(data.labels), probabilities.max(-1)
    details = evaluate_uncertainty({"vit": model}, data).details["vit"]

    for row in details["classes"]:
        of_class = labels == CLASSES.index(row["class"])
        assert row["rows"] == of_class.sum() and row["answered"] is None
        assert row["recall"] == pytest.approx((prediction == labels)[of_class].double().mean().item())
    assert [row["recall"] for row in details["classes"]] == sorted(row["recall"] for row in details["classes"])

    counted = {(pair["label"], pair["prediction"]): pair["rows"] for pair in details["confusions"]}
    for (label, taken_for), rows in counted.items():
        is_pair = (labels == CLASSES.index(label)) & (prediction == CLASSES.index(taken_for))
        assert label != taken_for and rows == is_pair.sum()
    assert (
        sum(counted.values()) == (prediction != labels).sum()
        and list(counted.values()) == sorted(counted.values())[::-1]
    )

    wrong = torch.nonzero(prediction != labels).flatten()
    surest = wrong[confidence[wrong].argsort(descending=True)][:12].tolist()
    assert [example["row"] for example in details["surest_wrong"]] == surest
    assert [example["row"] for example in details["least_sure"]] == confidence.argsort()[:12].tolist()


@pytest.mark.filterwarnings("ignore:.*is no better than")
def test_a_page_shows_images_bins_with_counts_data_date_and_model_and_is_read_back(images, tmp_path):
    model, data, _ = images
    report = evaluate_uncertainty({"vit": model}, data)
    report.about["data"] = "colours, split test"
    page = report.to_html(pictures=[])
    shown = len(report.details["vit"]["surest_wrong"]) + len(report.details["vit"]["least_sure"])
    assert page.count('src="data:image/jpeg;base64,/9j/') == shown > 12
    assert (
        "Data: colours, split test, 60 rows. Evaluated on 20" in page
        and "vit: ViTForImageClassification, from" in page
    )
    shares = report.curves["vit"]["reliability"]["share"]
    for share in shares:  # also of bins that have too few rows to be drawn
        assert share == 0 or f"<td>{round(60 * share)}</td>" in page
    assert "too few rows to tell" in page
    report.to_json(tmp_path / "report.json")
    assert Report.from_json(tmp_path / "report.json").to_html(pictures=[]) == page


@pytest.mark.filterwarnings("ignore:.*is no better than")
def test_texts_are_quoted_never_run_and_a_text_called_nan_stays_one(tmp_path):
    folder = str(save_bert(tmp_path / "bert"))
    rows = [{"text": text, "label": row % 2} for row, text in enumerate(["nan", EVIL, "a bad film", "joy " * 200] * 3)]
    report = evaluate_uncertainty({"bert": load_model(folder)}, load_data(rows, folder))
    report.to_json(tmp_path / "report.json")
    page = Report.from_json(tmp_path / "report.json").to_html(pictures=[])
    assert "<blockquote>nan</blockquote>" in page and "&lt;script&gt;joy&lt;/script&gt; nan" in page
    assert "<script" not in page and f"<blockquote>{('joy ' * 75)}...</blockquote>" in page


@pytest.mark.filterwarnings("ignore:.*is no better than")
def test_a_promise_is_told_with_where_it_landed(images):
    model, data, _ = images
    hydra = AutoHydra.from_pruned_members([model, model], allow_equal=True).eval()
    hydra.calibrate(data, target={"coverage": 0.8})
    report = evaluate_uncertainty({"Hydra": hydra}, data)
    page = report.to_html(pictures=[])
    answered = report.models["Hydra"]["data"]["answered"]
    assert "What was promised, and where it landed" in page and "The calibration said: " in page
    assert f"On these 60 rows: answered {100 * answered:.1f} %" in page and "Answered (%)" in page
    # The table has the sets, which hold the right class in 90 % of the rows, and no share of answers.
    assert "<td>at least 90 %</td>" in page and "<td>at most" not in page and "Promised: " not in page


@pytest.mark.filterwarnings("ignore:.*is no better than")
def test_what_was_asked_for_has_a_table_that_says_whether_it_was_kept(images):
    model, data, _ = images
    hydra = AutoHydra.from_pruned_members([model, model], allow_equal=True).eval()
    hydra.calibrate(data, target={"risk": 0.9}, alpha=0.2)
    report = evaluate_uncertainty({"Hydra": hydra}, data)
    page = report.to_html(pictures=[])
    metrics = report.models["Hydra"]["data"]
    cells = [f"<td>{text}</td>" for text in ("at most 90 %", f"{100 * metrics['answered_risk']:.1f} %", "yes")]
    assert all(cell in page for cell in cells) and "<td>at least 80 %</td>" in page


def test_a_share_beyond_the_promised_one_is_broken_where_chance_does_not_explain_it():
    asked = [{"metrics": ["answered_risk"], "share": 0.05, "is_highest": True}]
    titles = {"answered_risk": "Wrong of answered", "set_coverage": "In set"}

    def kept(found: float, rows: int) -> str:
        metrics = {"answered_risk": found, "answered": 0.5, "num_samples": 2 * rows}
        return landed_table(asked, metrics, titles)[1][0][-1]

    assert kept(0.05, 100) == "yes"
    assert kept(0.06, 100) == "not on these rows, by no more than chance"
    assert kept(0.06, 5_000) == "no"
    coverage = [{"metrics": ["set_coverage"], "share": 0.9, "is_highest": False}]
    _, [row] = landed_table(coverage, {"set_coverage": 0.8, "num_samples": 500}, titles)
    assert row == ["In set", "at least 90 %", "80.0 %", "500", "no"]
    assert landed_table(coverage, {"num_samples": 500}, titles) is None


def test_a_broken_page_of_a_report_is_refused_when_it_is_read(images, tmp_path):
    model, data, _ = images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        report = evaluate_uncertainty({"vit": model}, data)
    report.details["vit"]["classes"] = [{"class": "red"}]
    report.to_json(tmp_path / "report.json")
    with pytest.raises(ValueError, match="is not a report"):
        Report.from_json(tmp_path / "report.json")
