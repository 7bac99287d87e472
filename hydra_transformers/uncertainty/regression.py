"""Regression: its metrics, and intervals that hold the right value with a promised probability."""

import math
from typing import Any, ClassVar

import pandas
import torch
from torch import Generator, Tensor

from ..models.ensembling import at_least_float32
from ..models.task import DecisionOutput
from ..models.task_regression import spread
from .abstention import Abstention
from .conformal import conformal_quantile
from .inputs import as_tensor, check_predictions, widened
from .metrics import error_coverage_curve, exact_mean
from .task import CLASS_COLUMNS, Fitted, Metrics, Outcomes, Settings, TaskFit, ValidationRows, draw_one


# Shares of the mean spread that are tried as the floor below the spread.
FLOORS = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0)


# Metrics


def as_targets(targets: Any, rows: int, outputs: int, name: str = "labels") -> Tensor:
    """Targets (rows, outputs) in float64; raises an error for other shapes and for what is not finite."""
    targets = widened(as_tensor(targets).detach()).cpu()
    if targets.numel() != rows * outputs or len(targets) != rows or not targets.isfinite().all():
        raise ValueError(f"{name} has shape {tuple(targets.shape)}: pass finite values, ({rows}, {outputs})")
    return targets.reshape(rows, outputs)


def regression_metrics(member_outputs: Any, targets: Any, interval: Any = None) -> dict[str, float]:
    r"""How good the predictions of an ensemble are. With several outputs each metric is the mean over them.

    With the members' mean `μ`, the target `y` and the rows i:

        rmse      sqrt(mean_i (y_i - μ_i)²)
        mae       mean_i |y_i - μ_i|
        r2        1 - Σ_i (y_i - μ_i)² / Σ_i (y_i - ȳ)², the explained share of the targets' variance; NaN where they are constant
        pearson   the correlation of y and μ; NaN where one of them is constant
        spearman  the correlation of their ranks, equal numbers sharing the mean of theirs
        spread    mean_i of the standard deviation between members
        aurc      the area under risk (mae of the answered rows) against coverage, the least spread first
        interval_coverage, interval_width   share of the targets inside of their interval, and its mean width

    Args:
        member_outputs: (rows, members, outputs), `outputs.member_logits` of a model.
        targets: (rows,) or (rows, outputs).
        interval: (rows, outputs, 2), from a calibrated model, if any.

    Example:
        >>> metrics = regression_metrics([[[1.0], [3.0]], [[4.0], [4.0]]], [2.0, 5.0])
        >>> metrics["mae"], metrics["spread"]
        (0.5, 0.5)
    """
    outputs = widened(as_tensor(member_outputs).detach()).cpu()
    rows, _, width = outputs.shape
    targets, mean = as_targets(targets, rows, width, "targets"), outputs.mean(dim=1)
    errors, scatter = (targets - mean).abs(), (targets - targets.mean(dim=0)).square().sum(dim=0)
    metrics = {
        "rmse": errors.square().mean(dim=0).sqrt(),
        "mae": errors.mean(dim=0),
        "r2": torch.where(_varies(targets), 1 - errors.square().sum(dim=0) / scatter, math.nan),
        "pearson": correlation(mean, targets),
        "spearman": correlation(ranks(mean), ranks(targets)),
        "spread": spread(outputs).mean(dim=0),
    }
    if interval is not None:
        low, high = widened(as_tensor(interval).detach()).cpu().unbind(dim=-1)
        metrics["interval_coverage"] = ((low <= targets) & (targets <= high)).double().mean(dim=0)
        metrics["interval_width"] = (high - low).mean(dim=0)
    curve = error_coverage_curve(-spread(outputs).mean(dim=1), errors.mean(dim=1))
    return {name: float(values.mean()) for name, values in metrics.items()} | {"aurc": exact_mean(curve[1])}


def _varies(values: Tensor) -> Tensor:
    """Whether a column has different numbers: (rows, outputs) -> (outputs,). The mean of equal ones may be rounded off them."""
    return (values != values[:1]).any(dim=0)


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's, column by column: (rows, outputs) twice -> (outputs,); NaN where a column is constant."""
    varies = _varies(first) & _varies(second)
    first, second = (part - part.mean(dim=0) for part in (first, second))
    values = (first * second).sum(dim=0) / (first.square().sum(dim=0) * second.square().sum(dim=0)).sqrt()
    return torch.where(varies, values, math.nan)


def ranks(values: Tensor) -> Tensor:
    """The rank of each number in its column, equal numbers sharing the mean of theirs: (rows, outputs) -> (rows, outputs)"""
    return torch.tensor(pandas.DataFrame(values.numpy()).rank().to_numpy())


class RegressionFit(TaskFit):
    name = "regression"
    metrics: ClassVar = {
        "rmse": ("RMSE", "low"),
        "mae": ("MAE", "low"),
        "r2": ("R²", "high"),
        "pearson": ("Pearson", "high"),
        "spearman": ("Spearman", "high"),
        "aurc": ("AURC", "low"),
        "spread": ("Spread", ""),
        "interval_coverage": ("In interval", ""),
        "interval_width": ("Width", "low"),
        "answered": ("Answered", ""),
        "answered_mae": ("MAE of answered", "low"),
    }
    columns = CLASS_COLUMNS | {"interval": "intervals"}
    guarantees_risk = False
    judges_rows = False

    def constant_metric(self, labels: Tensor) -> float:
        return float((labels.double() - labels.double().mean(dim=0)).square().mean(dim=0).sqrt().mean())

    def measure(self, answers: Tensor, labels: Tensor | None, decided: DecisionOutput | None = None) -> Metrics:
        """`regression_metrics`, and what a calibrated model's intervals and threshold bring."""
        interval = None if decided is None else decided.interval
        if labels is None:
            metrics = {"spread": float(self.scores(answers).mean())}
            if interval is not None:
                metrics["interval_width"] = float((interval[..., 1] - interval[..., 0]).double().mean())
        else:
            metrics = regression_metrics(answers, labels, interval)
        if decided is not None:
            answered = ~decided.abstain
            metrics["answered"] = float(answered.double().mean())
            if labels is not None and answered.any():
                metrics["answered_mae"] = regression_metrics(answers[answered], labels[answered])["mae"]
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        """The spread between members, the mean over outputs."""
        return spread(widened(answers)).mean(dim=-1)

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        outcomes, interval = super().outcomes(output, labels, settings, random), output.interval
        if labels is None:
            return outcomes
        targets = as_targets(labels, *interval.shape[:2])
        outside = ~((targets >= interval[..., 0]) & (targets <= interval[..., 1]))  # also where they are not numbers
        drawn = draw_one(torch.ones_like(outside), random).unsqueeze(1)
        return outcomes._replace(missed=outside.gather(1, drawn).squeeze(1))

    # Calibration

    def fit(self, rows: ValidationRows) -> Fitted:
        """Split-conformal intervals scaled by the members' spread, and the width above which nothing is answered.

        With the members' mean μ and standard deviation σ, the interval is μ ± factor · (σ + floor), output by output. The first
        half of the rows chooses the floor that explains their errors best; a high one makes intervals equally wide, where the
        spread says little. The factor is the ceil((n + 1)(1 - alpha))-th smallest |y - μ| / (σ + floor) of the n rows of the
        second half, so that a new row's value lies inside with probability at least 1 - alpha, for each output by itself.
        """
        members, outputs = rows.first.answers.shape[1:]
        if rows.alpha is None:
            raise ValueError("alpha is None: a regression model abstains by the width of its intervals, pass a share")
        if rows.confidence is not None and "risk" in rows.target:
            raise ValueError("errors have no upper bound: leave confidence out, or target a coverage")
        if rows.target is not None and members == 1:
            raise ValueError("model has one member, so that all intervals are equally wide: leave out target")
        check_predictions(torch.cat([rows.first.answers, rows.second.answers]))
        first, second = (
            (widened(half.answers), as_targets(half.labels, len(half.answers), outputs))
            for half in (rows.first, rows.second)
        )
        floors = _likeliest_floors(*first)
        mean, rounding = second[0].mean(dim=1), 8 * torch.finfo(at_least_float32(rows.second.answers).dtype).eps
        # With what the model rounds away, or a label that many rows have would fall out of their intervals.
        errors = (second[1] - mean).abs() + rounding * (second[1].abs() + mean.abs())
        ratios = errors / (spread(second[0]) + floors)
        quantiles = [conformal_quantile(ratio, rows.alpha) for ratio in ratios.unbind(dim=1)]
        factors = torch.tensor(quantiles, dtype=ratios.dtype)
        if factors.isinf().any():
            raise ValueError(
                f"alpha={rows.alpha:g} cannot be promised on {len(second[0])} rows, half of data: pass at least "
                f"{2 * math.ceil(1 / rows.alpha)} rows, or a larger alpha"
            )
        factors = factors.clamp(min=1e-12)  # intervals have a width even if all predictions are right
        settings = {"detector": {"name": "width"}, "alpha": rows.alpha}
        settings |= {"floors": floors.tolist(), "factors": factors.tolist()}
        decision = self.decision(settings)
        # In the model's dtype: rounded otherwise, rows of equal width would fall on the other side of the threshold.
        output = decision(rows.second.answers)
        metrics = regression_metrics(*second, output.interval)
        sentences = [
            f"With probability {1 - rows.alpha:g} or more{' each' * (outputs > 1)} value lies in its interval, if new rows are "
            f"independent and of the same distribution as the {len(second[0])} fitting rows; there intervals are "
            f"{metrics['interval_width']:.3g} wide on average, and the mean absolute error is {metrics['mae']:.3g}."
        ]
        abstention = None
        if rows.target is not None:
            errors = (second[1] - mean).abs().mean(dim=1)
            abstention = rows.fit_abstention(output.detector_score, None, rows.ood_scores(decision), errors=errors)
            sentences.append(_sentence(abstention))
        return Fitted(settings, sentences, abstention)


def _likeliest_floors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each output (outputs,), the floor under which these errors are likeliest, if they scatter as the spread with the
    floor says (Laplace's distribution). Spread that says nothing about errors gets a high floor."""
    deviations, errors = spread(outputs), (targets - outputs.mean(dim=1)).abs()
    scale = deviations.mean(dim=0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # members that agree: any floor will do
    floors = torch.stack([share * scale for share in FLOORS])  # (floors, outputs)
    scaled = deviations + floors.unsqueeze(1)  # (floors, rows, outputs)
    unlikeliness = scaled.log().mean(dim=1) + (errors / scaled).mean(dim=1).log()
    return floors.gather(0, unlikeliness.argmin(dim=0, keepdim=True)).squeeze(0)


def _sentence(abstention: Abstention) -> str:
    after = "" if abstention.risk is None else f", with a mean absolute error of {abstention.risk:.3g}"
    refused = ""
    if abstention.tpr is not None:
        refused = f"; {100 * abstention.tpr:.3g} % of the out-of-distribution rows are not"
    return (
        f"Intervals wider than {abstention.threshold:.3g} are not answered: on the fitting rows "
        f"{100 * abstention.coverage:.3g} % are answered{after} (all of them: {abstention.risk_without:.3g}){refused}. "
        f"{abstention.guarantee}"
    )
