"""Regression: its metrics, and intervals that hold the right value with a promised probability."""

import math
from typing import Any, ClassVar

import pandas
import torch
from torch import Generator, Tensor

from ..models.ensembling import at_least_float32
from ..models.task import DecisionOutput
from ..models.task_regression import spread
from .abstention import Abstention, exact
from .conformal import conformal_quantile
from .few_rows import note_on_error, note_on_share
from .inputs import as_tensor, check_predictions, widened
from .metrics import error_coverage_curve, exact_mean
from .task import CLASS_COLUMNS, Fitted, Metrics, Outcomes, Settings, TaskFit, ValidationRows, draw_one


# Shares of the mean spread that are tried as the floor below the spread.
FLOORS = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0)


# Metrics


def as_targets(targets: Any, rows: int, outputs: int, name: str = "labels") -> Tensor:
    """Return targets (rows, outputs) in float64; raise for other shapes and for what is not
    finite."""
    targets = widened(as_tensor(targets).detach()).cpu()
    if targets.numel() != rows * outputs or len(targets) != rows or not targets.isfinite().all():
        raise ValueError(f"{name} has shape {tuple(targets.shape)}: pass finite values, ({rows}, {outputs})")
    return targets.reshape(rows, outputs)


def regression_metrics(member_outputs: Any, targets: Any, interval: Any = None) -> dict[str, float]:
    r"""Measure how good the predictions of an ensemble are. With several outputs each metric is the
    mean over them.

    With the members' mean `μ`, the target `y` and the rows i:

        rmse      sqrt(mean_i (y_i - μ_i)²)
        mae       mean_i |y_i - μ_i|
        r2        1 - Σ_i (y_i - μ_i)² / Σ_i (y_i - ȳ)², the explained share of the targets'
                  variance; NaN where they are constant
        pearson   the correlation of y and μ; NaN where one of them is constant
        spearman  the correlation of their ranks, equal numbers sharing the mean of theirs
        spread    mean_i of the standard deviation between members
        aurc      the area under risk (mae of the answered rows) against coverage, the least spread
                  first
        interval_coverage   share of the targets inside of their interval
        interval_width      the intervals' mean width

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
    targets = as_targets(targets, rows, width, "targets")
    mean = outputs.mean(dim=1)
    errors = (targets - mean).abs()
    scatter = (targets - targets.mean(dim=0)).square().sum(dim=0)
    explained = 1 - errors.square().sum(dim=0) / scatter

    # Each of them for every output, (outputs,).
    metrics = {
        "rmse": errors.square().mean(dim=0).sqrt(),
        "mae": errors.mean(dim=0),
        "r2": torch.where(_varies(targets), explained, math.nan),
        "pearson": correlation(mean, targets),
        "spearman": correlation(ranks(mean), ranks(targets)),
        "spread": spread(outputs).mean(dim=0),
    }
    if interval is not None:
        low, high = widened(as_tensor(interval).detach()).cpu().unbind(dim=-1)
        is_inside = (low <= targets) & (targets <= high)
        metrics["interval_coverage"] = is_inside.double().mean(dim=0)
        metrics["interval_width"] = (high - low).mean(dim=0)
    means = {name: float(values.mean()) for name, values in metrics.items()}

    _, risks = error_coverage_curve(-spread(outputs).mean(dim=1), errors.mean(dim=1))
    means["aurc"] = exact_mean(risks)
    return means


def _varies(values: Tensor) -> Tensor:
    """Whether a column has different numbers: (rows, outputs) -> (outputs,)

    The mean of equal ones may be rounded off them, so variances do not say it.
    """
    return (values != values[:1]).any(dim=0)


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlation, column by column: (rows, outputs) twice -> (outputs,); NaN
    where a column is constant."""
    varies = _varies(first) & _varies(second)
    first = first - first.mean(dim=0)
    second = second - second.mean(dim=0)
    product_of_scatters = first.square().sum(dim=0) * second.square().sum(dim=0)
    values = (first * second).sum(dim=0) / product_of_scatters.sqrt()
    return torch.where(varies, values, math.nan)


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each number in its column, equal numbers sharing the mean of theirs:
    (rows, outputs) -> (rows, outputs)"""
    columns = pandas.DataFrame(values.numpy())
    return torch.tensor(columns.rank().to_numpy())


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
        labels = labels.double()
        deviations = labels - labels.mean(dim=0)
        return float(deviations.square().mean(dim=0).sqrt().mean())

    def measure(self, answers: Tensor, labels: Tensor | None, decided: DecisionOutput | None = None) -> Metrics:
        """Return `regression_metrics`, and what a calibrated model's intervals and threshold
        bring."""
        interval = None
        if decided is not None:
            interval = decided.interval
        if labels is not None:
            metrics = regression_metrics(answers, labels, interval)
        else:
            metrics = {"spread": float(self.scores(answers).mean())}
            if interval is not None:
                widths = interval[..., 1] - interval[..., 0]
                metrics["interval_width"] = float(widths.double().mean())

        if decided is not None:
            answered = ~decided.abstain
            metrics["answered"] = float(answered.double().mean())
            if labels is not None and answered.any():
                metrics["answered_mae"] = regression_metrics(answers[answered], labels[answered])["mae"]
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        """Return the spread between members, the mean over outputs."""
        return spread(widened(answers)).mean(dim=-1)

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        outcomes = super().outcomes(output, labels, settings, random)
        if labels is None:
            return outcomes
        low, high = output.interval.unbind(dim=-1)
        targets = as_targets(labels, *low.shape)
        outside = ~((targets >= low) & (targets <= high))  # also where they are not numbers
        drawn = draw_one(torch.ones_like(outside), random).unsqueeze(1)
        return outcomes._replace(missed=outside.gather(1, drawn).squeeze(1))

    # Calibration

    def fit(self, rows: ValidationRows) -> Fitted:
        """Fit split-conformal intervals scaled by the members' spread, and the width above which
        nothing is answered.

        With the members' mean μ and standard deviation σ, the interval is μ ± factor · (σ + floor),
        output by output. The first half of the rows chooses the floor that explains their errors
        best; a high one makes intervals equally wide, where the spread says little. The factor is
        the ceil((n + 1)(1 - alpha))-th smallest |y - μ| / (σ + floor) of the n rows of the second
        half, so that a new row's value lies inside with probability at least 1 - alpha, for each
        output by itself.
        """
        self._check(rows)
        second_answers = rows.second.answers
        outputs = widened(second_answers)
        targets = as_targets(rows.second.labels, *outputs.shape[::2])
        mean = outputs.mean(dim=1)
        errors = (targets - mean).abs()

        # The floors, from the first half.
        first_outputs = widened(rows.first.answers)
        floors = _likeliest_floors(first_outputs, as_targets(rows.first.labels, *first_outputs.shape[::2]))

        # The factors, from the second half. Errors hold what the model rounds away, or a label that
        # many rows have would fall out of their intervals.
        rounding = 8 * torch.finfo(at_least_float32(second_answers).dtype).eps
        ratios = (errors + rounding * (targets.abs() + mean.abs())) / (spread(outputs) + floors)
        quantiles = [conformal_quantile(ratio, rows.alpha) for ratio in ratios.unbind(dim=1)]
        factors = torch.tensor(quantiles, dtype=ratios.dtype)
        if factors.isinf().any():
            raise ValueError(
                f"alpha={rows.alpha:g} cannot be promised on {len(outputs)} rows, half of data: pass at least "
                f"{2 * math.ceil(1 / rows.alpha)} rows, or a larger alpha"
            )
        factors = factors.clamp(min=1e-12)  # intervals have a width even if all predictions are right
        settings = {
            "detector": {"name": "width"},
            "alpha": rows.alpha,
            "floors": floors.tolist(),
            "factors": factors.tolist(),
        }

        # What they promise. The decision computes in the model's dtype: rounded otherwise, rows of
        # equal width would fall on the other side of the threshold.
        decision = self.decision(settings)
        output = decision(second_answers)
        metrics = regression_metrics(outputs, targets, output.interval)
        values = "value" if outputs.shape[-1] == 1 else "each value"
        sentences = [
            f"With probability {1 - rows.alpha:g} or more {values} lies in its interval, if new rows are "
            f"independent and of the same distribution as the {len(outputs)} fitting rows; there intervals are "
            f"{metrics['interval_width']:.3g} wide on average, and the mean absolute error is {metrics['mae']:.3g}."
        ]
        inside = math.ceil((len(ratios) + 1) * (1 - exact(rows.alpha)))
        note = note_on_share(inside, len(ratios), "of new values lie in their intervals")
        if note:
            sentences[0] += f" {note}"

        # The threshold.
        abstention = None
        if rows.target is not None:
            ood_scores = rows.ood_scores(decision)
            row_errors = errors.mean(dim=1)
            abstention = rows.fit_abstention(output.detector_score, None, ood_scores, errors=row_errors)
            answered = row_errors[output.detector_score <= abstention.threshold]
            note = ""
            if abstention.target == "risk" and len(answered) > 1:
                note = note_on_error(float(answered.mean()), float(answered.std()), len(answered))
            sentences.append(f"{_sentence(abstention)} {note}".rstrip())
        return Fitted(settings, sentences, abstention)

    def _check(self, rows: ValidationRows) -> None:
        """Raise for options without a meaning for regression, and for what is not a prediction."""
        members = rows.first.answers.shape[1]
        if rows.alpha is None:
            raise ValueError("alpha is None: a regression model abstains by the width of its intervals, pass a share")
        if rows.confidence is not None and "risk" in rows.target:
            raise ValueError("errors have no upper bound: leave confidence out, or target a coverage")
        if rows.target is not None and members == 1:
            raise ValueError("model has one member, so that all intervals are equally wide: leave out target")
        check_predictions(torch.cat([rows.first.answers, rows.second.answers]))


def _likeliest_floors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the floor of each output (outputs,) under which these errors are likeliest, if they
    scatter as the spread with the floor says (Laplace's distribution).

    Spread that says nothing about errors gets a high floor.
    """
    deviations = spread(outputs)
    errors = (targets - outputs.mean(dim=1)).abs()
    scale = deviations.mean(dim=0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # members that agree: any floor will do
    floors = torch.stack([share * scale for share in FLOORS])  # (floors, outputs)
    scaled = deviations + floors.unsqueeze(1)  # (floors, rows, outputs)
    unlikeliness = scaled.log().mean(dim=1) + (errors / scaled).mean(dim=1).log()
    return floors.gather(0, unlikeliness.argmin(dim=0, keepdim=True)).squeeze(0)


def _sentence(abstention: Abstention) -> str:
    after = ""
    if abstention.risk is not None:
        after = f", with a mean absolute error of {abstention.risk:.3g}"
    refused = ""
    if abstention.tpr is not None:
        refused = f"; {100 * abstention.tpr:.3g} % of the out-of-distribution rows are not"
    return (
        f"Intervals wider than {abstention.threshold:.3g} are not answered: on the fitting rows "
        f"{100 * abstention.coverage:.3g} % are answered{after} (all of them: {abstention.risk_without:.3g})"
        f"{refused}. {abstention.guarantee}"
    )
