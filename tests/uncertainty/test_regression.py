"""Regression: intervals, abstention by width, and metrics."""

import math

import pytest
import torch
from scipy import stats
from transformers import PreTrainedConfig

from hydra_transformers import AutoHydra
from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.uncertainty import calibrate
from hydra_transformers.uncertainty.regression import regression_metrics
from tests.families import bert_backbone


ROWS = 400


class SavedNumbers(torch.nn.Module):
    """A model whose members' numbers are given."""

    def __init__(self, outputs: int = 1):
        super().__init__()
        self.config = PreTrainedConfig(num_labels=outputs, problem_type="regression")
        self.head = torch.nn.Linear(1, 1)
        self.eval()

    def forward(self, numbers: torch.Tensor) -> HydraClassifierOutput:
        return HydraClassifierOutput(logits=numbers.mean(1), member_logits=numbers)


def numbers_for(seed: int, count: int = ROWS, outputs: int = 1, noise: torch.Tensor | None = None) -> list[dict]:
    """Two members whose spread is between 0 and 3, and targets that scatter as they do, or by `noise`."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(count, outputs, generator=generator)
    spread = 3 * torch.rand(count, outputs, generator=generator)
    scattered = torch.randn(count, outputs, generator=generator) * (spread if noise is None else noise)
    return [{"numbers": torch.stack([mean - spread, mean + spread], dim=1), "labels": mean + scattered}]


@torch.no_grad()
def test_members_are_the_members_apart_and_the_prediction_is_their_mean():
    models = [bert_backbone(seed, num_labels=2, problem_type="regression") for seed in range(3)]
    tokens = torch.randint(5, 38, (8, 6), generator=torch.Generator().manual_seed(0))
    apart = torch.stack([model(input_ids=tokens).logits for model in models], dim=1)
    found = AutoHydra.from_pruned_members(models, shared=()).eval()(input_ids=tokens)
    torch.testing.assert_close(found.member_logits, apart, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.logits, apart.mean(dim=1), rtol=0, atol=1e-10)


def test_intervals_hold_what_was_promised():
    """On average over calibration sets, for each output by itself."""
    [new], inside = numbers_for(99, 2000, 2), []
    for seed in range(8):
        calibration = calibrate(SavedNumbers(2), numbers_for(seed, ROWS, 2), alpha=0.2)
        found = calibration.model(numbers=new["numbers"])
        low, high = found.interval.unbind(-1)
        inside.append(((low <= new["labels"]) & (new["labels"] <= high)).float().mean(dim=0))
    assert found.interval.shape == (2000, 2, 2)
    assert ((torch.stack(inside).mean(dim=0) - 0.8).abs() < 0.025).all()
    assert torch.allclose((low + high) / 2, found.logits, atol=1e-5)
    assert not found.abstain.any() and "With probability 0.8 or more each value" in str(calibration)


def test_no_label_that_many_rows_have_is_rounded_out_of_its_interval():
    """Whole-number labels, and a model that says the same of all rows: most errors are equal, to the last digit in float64 only."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(1, 6, (100, 1), generator=generator)
        answer = 4 * torch.rand((), generator=generator)
        rows = [{"numbers": (1 + answer).expand(100, 2, 1), "labels": labels.float()}]
        model = calibrate(SavedNumbers(), rows, alpha=0.1).model
        low, high = model(numbers=rows[0]["numbers"]).interval.unbind(-1)
        assert ((low <= labels) & (labels <= high)).float().mean() >= 0.85


def test_the_factor_is_the_conformal_quantile():
    """Written out plainly, in float64: the k-th smallest of |y - mean| / (spread + floor), k = ceil((n + 1)(1 - alpha))."""
    [batch] = numbers_for(0, 100)
    numbers = batch["numbers"].double()
    labels = batch["labels"].double()
    calibration = calibrate(SavedNumbers(), [{"numbers": numbers, "labels": labels}], alpha=0.1, seed=3)
    [factor], [floor] = calibration.settings["factors"], calibration.settings["floors"]
    second = torch.randperm(100, generator=torch.Generator().manual_seed(3))[50:]
    mean = numbers[second].mean(dim=1)
    scaled = numbers[second].std(dim=1, correction=0) + floor
    scores = ((labels[second] - mean).abs() / scaled).squeeze(1)
    assert factor == pytest.approx(sorted(scores.tolist())[math.ceil(51 * 0.9) - 1], abs=1e-12)
    interval = calibration.model(numbers=numbers[second]).interval[:, 0]
    assert torch.allclose(interval, mean + scaled * factor * torch.tensor([-1.0, 1.0]), rtol=0, atol=1e-10)


def test_intervals_follow_a_spread_that_tells_errors_and_ignore_one_that_does_not():
    told, untold = (
        calibrate(SavedNumbers(), numbers_for(0, 2000, noise=noise)).settings["floors"][0] for noise in (None, 1.0)
    )
    assert told < 0.5 and untold > 10


def test_a_coverage_and_a_risk_are_kept_on_the_fitting_rows():
    rows = numbers_for(0, 1000)
    by_coverage = calibrate(SavedNumbers(), rows, target={"coverage": 0.7}, confidence=0.9)
    out = by_coverage.model(numbers=rows[0]["numbers"])
    assert (~out.abstain).float().mean().item() == pytest.approx(0.73, abs=0.05)
    assert torch.equal(out.abstain, out.interval.diff(dim=-1).squeeze() > by_coverage.abstention.threshold)
    assert by_coverage.abstention.risk < by_coverage.abstention.risk_without
    assert "With 90 % confidence at least 70 % of the rows are answered" in str(by_coverage)
    aim = by_coverage.abstention.risk_without * 0.6
    by_risk = calibrate(SavedNumbers(), rows, target={"risk": aim})
    answered = ~by_risk.model(numbers=rows[0]["numbers"]).abstain
    errors = (rows[0]["numbers"].mean(1) - rows[0]["labels"]).abs().squeeze(1)
    assert by_risk.abstention.risk <= aim and errors[answered].mean() == pytest.approx(aim, rel=0.1)


def test_few_rows_say_how_far_intervals_and_errors_may_be_off():
    few, many = (calibrate(SavedNumbers(), numbers_for(0, count), target={"risk": 1.0}) for count in (400, 2000))
    note = "200 rows are few: in 9 of 10 calibrations 86.4 to 93.3 % of new values lie in their intervals"
    assert note in str(few) and "answered rows are few: the mean absolute error of new ones may be up to" in str(few)
    assert "few" not in str(many)
    assert "the mean absolute error of new" not in str(calibrate(SavedNumbers(), numbers_for(0), alpha=0.2))


def test_rows_of_equal_width_are_answered_where_the_threshold_is_theirs():
    """In bfloat16 many rows have the same spread, and the model's float32 rounds their width to one side of float64."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        labels = 3 + torch.randn(400, 1, generator=generator)
        numbers = labels[:, None] + 0.05 * torch.randn(400, 3, 1, generator=generator)
        rows = [{"numbers": numbers.bfloat16(), "labels": labels}]
        others = [{"numbers": numbers.bfloat16()}]
        second = torch.randperm(400, generator=torch.Generator().manual_seed(0))[200:]
        for target in ({"coverage": 0.8}, {"tpr": 0.8}):
            ood = others if "tpr" in target else None
            model = calibrate(SavedNumbers(), rows, ood, target=target).model
            abstain = model(numbers=numbers.bfloat16()).abstain.double()
            assert (abstain.mean() if "tpr" in target else 1 - abstain[second].mean()) >= 0.8 - 1e-9


def test_metrics_are_those_of_scipy():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, 3, 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(50, 2, generator=generator, dtype=torch.float64).round(decimals=1)  # with equal numbers
    mean = outputs.mean(1)
    found = regression_metrics(outputs, targets)
    pairs = list(zip(mean.T.numpy(), targets.T.numpy(), strict=True))
    assert found["pearson"] == pytest.approx(sum(stats.pearsonr(*pair)[0] for pair in pairs) / 2, abs=1e-10)
    assert found["spearman"] == pytest.approx(sum(stats.spearmanr(*pair)[0] for pair in pairs) / 2, abs=1e-10)
    rmse = (mean - targets).square().mean(0).sqrt().mean()
    assert found["rmse"] == pytest.approx(rmse.item(), abs=1e-10)


@pytest.mark.parametrize("rows", [3, 1000])  # 0.1 is not the mean of so many of it
def test_metrics_of_constant_numbers_are_not_a_number(rows):
    generator = torch.Generator().manual_seed(0)
    constant = torch.full((rows, 1), 0.1, dtype=torch.float64)
    numbers = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    found = regression_metrics(numbers[:, None], constant)
    assert all(math.isnan(found[name]) for name in ("r2", "pearson", "spearman"))
    found = regression_metrics(constant[:, None], numbers)
    assert math.isnan(found["pearson"]) and math.isnan(found["spearman"]) and math.isfinite(found["r2"])
