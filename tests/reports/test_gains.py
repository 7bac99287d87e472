"""A gain is claimed only where the rows can show it."""

import math

import pytest
import torch

from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.reports.gains import NO_DIFFERENCE, jackknife_change, jackknife_values
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


def measured(rows, data=None, ood=OOD):
    return evaluate_uncertainty({"Single": Wrong(rows), "Hydra": SavedLogits()}, data or saved(200, 4, 0), ood)


def test_one_row_of_two_hundred_is_not_a_gain():
    report = measured(1)
    gains = report.gains("Hydra", "Single")
    assert gains["accuracy"].change.difference == pytest.approx(0.005)
    assert {gain.verdict for gain in gains.values()} == {"no difference"}
    sentence = f"Hydra against Single: {NO_DIFFERENCE} in Accuracy, NLL, near AUROC, far AUROC."
    assert sentence in str(report) and sentence in report.to_markdown()


def test_many_rows_are_a_gain_of_the_reported_metrics_whatever_the_direction():
    report = measured(60)
    gains = report.gains("Hydra", "Single")
    assert gains["accuracy"].verdict == gains["nll"].verdict == "better"
    assert gains["accuracy"].change.low > 0 > gains["nll"].change.high
    assert report.gains("Single", "Hydra")["accuracy"].verdict == "worse"
    assert "Hydra against Single: better in Accuracy (+" in str(report)

    single, hydra = (report.models[name] for name in ("Single", "Hydra"))
    assert gains["nll"].change.difference == pytest.approx(hydra["data"]["nll"] - single["data"]["nll"], abs=1e-6)
    for group in OOD:
        change = report.average("Hydra", group)["auroc"] - report.average("Single", group)["auroc"]
        assert gains[f"{group} AUROC"].change.difference == pytest.approx(change, abs=1e-6)
    assert sum(len(text) for text in report.rows["Hydra"].values() if isinstance(text, str)) <= 17 * 200


def test_an_infinite_nll_shows_nothing_and_other_rows_are_not_compared():
    data = saved(50, 4, 0)
    data[0]["member_logits"][0] = torch.tensor([0.0, float("-inf"), float("-inf"), float("-inf")])
    data[0]["labels"][0] = 1
    report = measured(0, data, None)
    assert report.gains("Hydra", "Single")["nll"].verdict == "no difference"
    other = evaluate_uncertainty({"Other": SavedLogits()}, saved(100, 4, 0))
    with pytest.raises(ValueError, match="on the same data"):
        report.joined(other).gains("Hydra", "Other")


def test_the_jackknifes_interval_of_a_mean_is_students():
    """Of a mean the groups' jackknife is the interval of the groups' means, and nearly that of the rows."""
    rows = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means = jackknife_values(lambda chosen: float(rows[chosen].mean()), 4000)
    change = jackknife_change(jackknife_values(lambda _: 0.0, 4000), means)
    assert change.difference == pytest.approx(rows.mean().item())
    assert (change.high - change.low) / 2 == pytest.approx(2.093 * rows.std().item() / math.sqrt(4000), rel=0.35)
    few = jackknife_values(lambda chosen: float(rows[chosen].mean()), 10)
    assert jackknife_change(few, few).high == math.inf  # too few rows to tell
