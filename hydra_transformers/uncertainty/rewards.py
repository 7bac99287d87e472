"""Reward models and rerankers: metrics of preferences, and a score below which nothing is
relevant."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from ..data.loading import PreparedData, load_data, load_if_named
from ..models.decision import Decision
from ..models.task import DecisionOutput
from ..models.task_regression import aggregated, spread
from .class_promises import with_settings
from .costs import PricedRows, fit_costs
from .inputs import as_multi_hot, as_tensor, widened
from .metrics import ood_metrics
from .task import CLASS_COLUMNS, Fitted, Metrics, Outcomes, Settings, TaskFit, ValidationRows


NO_PAIRS = 'data has no pairs, by which a reward model is measured: pass {"chosen": data, "rejected": data}'
NO_PAIRS += ", or texts in columns of these names"


def preference_metrics(chosen: Any, rejected: Any, aggregate: str = "mean") -> dict[str, float]:
    r"""Measure how well members tell the better of two answers.

        pair_accuracy      share of the pairs whose chosen answer scores higher; a tie counts as
                           half
        wrong_pairs_auroc  how well the spread of the members' margins tells wrong pairs from right
                           ones, 0.5 for chance; NaN where all pairs are right, or all wrong
        margin             the mean of score(chosen) - score(rejected)
        spread             the mean of the members' standard deviation of it

    Args:
        chosen, rejected: (pairs, members) or (pairs, members, 1), the members' scores.
        aggregate: how they become one score: "mean", "min" or "mean-2std", as in a config.

    Example:
        >>> preference_metrics([[1.0, 2.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]])["pair_accuracy"]
        0.5
    """
    chosen = _member_scores(chosen)
    rejected = _member_scores(rejected)
    if chosen.shape != rejected.shape or not (chosen.isfinite().all() and rejected.isfinite().all()):
        raise ValueError("chosen and rejected are not finite numbers of one shape: pass (pairs, members) for both")
    margin = aggregated(chosen, aggregate).squeeze(1) - aggregated(rejected, aggregate).squeeze(1)
    spreads = spread(chosen - rejected).squeeze(1)
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    is_wrong = margin <= 0
    auroc = math.nan
    if is_wrong.any() and not is_wrong.all():
        auroc = ood_metrics(spreads[~is_wrong], spreads[is_wrong])["auroc"]
    return {
        "pair_accuracy": float(right.mean()),
        "wrong_pairs_auroc": auroc,
        "margin": float(margin.mean()),
        "spread": float(spreads.mean()),
    }


def _member_scores(scores: Any) -> Tensor:
    """Return (pairs, members, 1) in float64 on the CPU, of scores with or without the last axis."""
    scores = widened(as_tensor(scores).detach()).cpu()
    return scores.reshape(*scores.shape[:2], 1)


def pairs_of(read: Callable[[str], PreparedData]) -> dict[str, PreparedData]:
    """Read the pairs of a set with columns "chosen" and "rejected".

    read: loads the texts of a column
    """
    pairs = {column: read(column) for column in ("chosen", "rejected")}
    if any(rows.columns != (column,) for column, rows in pairs.items()):  # another one was found in place of it
        raise ValueError(NO_PAIRS)
    return pairs


class RewardFit(TaskFit):
    name = "reward"
    metrics: ClassVar = {
        "pair_accuracy": ("Pair accuracy", "high"),
        "wrong_pairs_auroc": ("AUROC of wrong pairs", "high"),
        "margin": ("Margin", ""),
        "spread": ("Spread", ""),
        "answered": ("Chosen answered", ""),
    }
    columns = CLASS_COLUMNS | {"interval": "intervals"}

    def constant_metric(self, labels: Tensor) -> float:
        return 0.5

    def load(self, data: Any, model: nn.Module) -> Any:
        """Return {"chosen": data, "rejected": data}, also of a set with two columns of texts of
        these names."""
        if hasattr(data, "columns"):  # a DataFrame
            data = data.to_dict("records")
        if isinstance(data, (str, os.PathLike)) or _has_rows_of_pairs(data):
            return pairs_of(lambda column: load_data(data, model, column=column, labelled=False))
        if not isinstance(data, Mapping):
            raise TypeError(NO_PAIRS)
        return load_if_named(data, model, labelled=False)

    def collect(self, model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
        """Return the members' scores (rows, members, 1) and labels; of {"chosen": data, "rejected":
        data} those of pairs (pairs, members, 2), the chosen first, and 0, the place of the better
        one."""
        if not isinstance(data, Mapping):
            return super().collect(model, data, batch_size)
        chosen, _ = super().collect(model, data["chosen"], batch_size)
        rejected, _ = super().collect(model, data["rejected"], batch_size)
        return torch.cat([chosen, rejected], dim=-1), torch.zeros(len(chosen), dtype=torch.long)

    def decide(self, decision: Decision, answers: Tensor, group: Tensor | None = None) -> DecisionOutput:
        return decision(answers[..., :1], group=group)  # of pairs those of the chosen

    def measure(self, answers: Tensor, labels: Tensor | None, decided: DecisionOutput | None = None) -> Metrics:
        """Measure answers to pairs, (pairs, members, 2)."""
        if answers.shape[-1] != 2:
            raise TypeError(NO_PAIRS)
        metrics = preference_metrics(*answers.unbind(dim=-1), self.aggregate or "mean")
        if decided is not None:
            metrics["answered"] = float((~decided.abstain).double().mean())
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        """Return minus the score; of pairs that of the chosen."""
        return -aggregated(answers[..., :1], self.aggregate).squeeze(1)

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        outcomes = super().outcomes(output, labels, settings, random)
        if labels is None:
            return outcomes
        relevant = as_multi_hot(labels.reshape(-1, 1), len(outcomes.answered), 1).squeeze(1)
        return outcomes._replace(wrong=~relevant[outcomes.answered])

    def fit(self, rows: ValidationRows) -> Fitted:
        """Fit the score below which a row counts as not relevant, from rows labelled 1 (relevant)
        and 0 (not).

        A risk is the share of rows that are not relevant among those answered; a coverage the share
        of the relevant rows that are answered; a tpr the share of out-of-distribution rows that are
        not.
        """
        if rows.target is None:
            raise ValueError('target is missing: pass one, such as {"coverage": 0.95}')
        # Nothing but the threshold is fitted, so that all rows may serve it.
        answers = torch.cat([rows.first.answers, rows.second.answers])
        labels = torch.cat([rows.first.labels, rows.second.labels]).reshape(len(answers), -1)
        relevant = labels[:, 0] == 1
        are_ones_and_zeros = bool(((labels == 0) | (labels == 1)).all())
        if labels.shape[1] != 1 or not are_ones_and_zeros or relevant.all() or not relevant.any():
            raise ValueError("labels are not 1 for relevant rows and 0 for others: pass both, one label per row")

        # The threshold: of costs and a risk it is about all rows, of a coverage about the relevant
        # ones.
        scores = self.scores(answers)  # higher is less relevant
        if rows.costs is not None:
            # An answer counts as relevant, and is wrong where the row is not.
            priced = PricedRows(scores, rows.costs.of_errors(~relevant), ~relevant)
            middle = len(rows.first.answers)
            chosen_by = PricedRows(*(part[:middle] for part in priced))
            measured_by = PricedRows(*(part[middle:] for part in priced))
            abstention = fit_costs(rows.costs, rows.confidence, chosen_by, measured_by)
            sentences = [
                f"Scores below {-abstention.threshold:.3g} count as nothing relevant; a random half of {len(scores)} "
                "rows chose it.",
                abstention.sentence,
            ]
            return Fitted({"detector": {"name": "low score"}}, sentences, abstention)
        if rows.by_column is not None:
            middle = len(rows.first.answers)
            abstention = rows.fit_by_column(scores[middle:], relevant[middle:], relevant[:middle])
            settings = {"detector": {"name": "low score"}, **with_settings(abstention, 1)}
            sentences = [
                "A low score counts as nothing relevant, by a threshold for each group.",
                f"An answer is wrong if its row is not relevant. {abstention.sentence}",
            ]
            return Fitted(settings, sentences, abstention)

        ood_scores = None
        if rows.ood is not None:
            ood_scores = self.scores(rows.ood.answers)
        if "risk" in rows.target:
            abstention = rows.fit_abstention(scores, relevant, ood_scores, "rows", others=scores)
        else:
            abstention = rows.fit_abstention(scores[relevant], None, ood_scores, "relevant rows", others=scores)

        answered = scores <= abstention.threshold
        sentence = (
            f"Scores below {-abstention.threshold:.3g} count as nothing relevant: of {len(scores)} rows, "
            f"{_percent(answered[relevant])} of the relevant ones are answered and {_percent(answered[~relevant])} of "
            f"the others. {abstention.guarantee.replace('rows are wrong', 'rows are not relevant')}"
        )
        return Fitted({"detector": {"name": "low score"}}, [sentence], abstention)


def _has_rows_of_pairs(data: Any) -> bool:
    """Whether data is a sequence of rows with a text in the column "chosen"."""
    if isinstance(data, Mapping) or not hasattr(data, "__getitem__") or len(data) == 0:
        return False
    first = data[0]
    return isinstance(first, Mapping) and isinstance(first.get("chosen"), str)


def _percent(rows: Tensor) -> str:
    """Return the share of rows that are true: "12.5 %"."""
    return f"{100 * rows.double().mean().item():.3g} %"
