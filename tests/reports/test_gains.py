"""A gain is claimed only where the rows can show it."""

import pytest
import torch

from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.reports import UncertaintyReport, evaluate_uncertainty, gain_sentence, gains
from hydra_transformers.reports.gains import NO_DIFFERENCE
from tests.uncertainty.answers import saved


class Wrong(torch.nn.Module):
    """Right as SavedLogits but for the first rows of the first batch."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, member_logits):
        changed = member_logits.clone()
        changed[: self.rows] = changed[: self.rows].roll(1, dims=-1)
        return HydraClassifierOutput(member_logits=changed)


OOD = {"near": {"A": saved(80, 0.5, 2)}, "far": {"B": saved(80, 0, 3), "C": saved(60, 0, 4)}}


def judged(rows, ood=OOD):
    return evaluate_uncertainty({"Single": Wrong(rows), "Hydra": SavedLogits()}, saved(200, 4, 0), ood)


def test_one_row_of_two_hundred_is_no_gain():
    report = judged(1)
    difference = report.models["Hydra"].id["accuracy"] - report.models["Single"].id["accuracy"]
    assert difference == pytest.approx(0.005)
    found = report.gains("Hydra", "Single")
    assert found["accuracy"].change.difference == pytest.approx(0.005)
    assert {gain.verdict for gain in found.values()} == {"no difference"}
    [sentence] = report.gain_sentences()
    assert sentence == f"Hydra against Single: {NO_DIFFERENCE} in accuracy, NLL, near AUROC, far AUROC."
    for form in (str(report), report.to_markdown()):
        assert sentence in form


def test_many_rows_are_a_gain_whatever_the_direction():
    report = judged(60)
    found = report.gains("Hydra", "Single")
    assert found["accuracy"].verdict == found["NLL"].verdict == found["quality"].verdict == "better"
    assert found["accuracy"].change.low > 0 > found["NLL"].change.high
    assert {gain.verdict for gain in report.gains("Single", "Hydra").values()} >= {"worse"}
    assert "better in accuracy (+" in gain_sentence("Hydra", "Single", found)
    assert "worse in accuracy (-" in gain_sentence("Single", "Hydra", report.gains("Single", "Hydra"))


def test_changes_are_those_of_the_reported_metrics():
    report = judged(60)
    single, hydra = report.models["Single"], report.models["Hydra"]
    found = gains(hydra, single)
    detection = [
        sum(result.ood_average(group)["auroc"] for group in OOD) / 2 + result.id["accuracy"]
        for result in (single, hydra)
    ]
    assert found["quality"].change.difference == pytest.approx((detection[1] - detection[0]) / 2, abs=1e-6)
    assert found["NLL"].change.difference == pytest.approx(hydra.id["nll"] - single.id["nll"], abs=1e-6)
    for group in OOD:
        change = hydra.ood_average(group)["auroc"] - single.ood_average(group)["auroc"]
        assert found[f"{group} AUROC"].change.difference == pytest.approx(change, abs=1e-6)


def test_rows_survive_json_and_are_few_bytes(tmp_path):
    report = judged(60)
    report.to_json(tmp_path / "report.json")
    read = UncertaintyReport.from_json(tmp_path / "report.json")
    assert read.gain_sentences() == report.gain_sentences()
    assert sum(len(text) for text in report.models["Hydra"].rows.values() if isinstance(text, str)) <= 17 * 200


@pytest.mark.parametrize("nll", ["?", "AAA=", 3])
def test_broken_rows_are_found_when_a_report_is_read(nll, tmp_path):
    report = judged(1)
    report.models["Hydra"].rows["nll"] = nll
    report.to_json(tmp_path / "report.json")
    with pytest.raises(ValueError, match="is not an uncertainty report"):
        UncertaintyReport.from_json(tmp_path / "report.json")


def test_an_infinite_nll_shows_nothing():
    data = saved(50, 4, 0)
    data[0]["member_logits"][0] = torch.tensor([0.0, float("-inf"), float("-inf"), float("-inf")])
    data[0]["labels"][0] = 1
    report = evaluate_uncertainty({"a": Wrong(0), "b": SavedLogits()}, data)
    assert report.gains("b", "a")["NLL"].verdict == "no difference"


def test_other_rows_are_refused():
    with pytest.raises(ValueError, match="on the same data"):
        gains(judged(1).models["Hydra"], evaluate_uncertainty(SavedLogits(), saved(100, 4, 0)).models["SavedLogits"])
