"""Metrics of a data set batch by batch, and `compute_metrics` for the Hugging Face Trainer.

Trainer passes on the logits alone by default; the members come with `trainer.evaluate(ignore_keys=[])` and
`trainer.train(ignore_keys_for_eval=[])`.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._io.processes import gather
from .detectors import Detector, as_detector
from .inputs import as_labels, as_member_logits, as_tensor
from .metrics import (
    LABELLED_VALUES,
    UNCERTAINTY_VALUES,
    classification_metrics,
    diversity_metrics,
    sample_values,
    summarize_classification,
    summarize_diversity,
)


COLUMNS = (*UNCERTAINTY_VALUES, *LABELLED_VALUES, "index")


class UncertaintyAccumulator:
    """Collects the metrics of one data set over any number of batches and processes, in about 80 bytes per sample.

    The result of `compute` does not depend on how the samples were batched, ordered or spread over processes.

    Args:
        score: the OOD score to keep: a name, see `ood_score`, or a fitted `Detector`.

    Example:
        >>> accumulator = UncertaintyAccumulator()
        >>> for _ in range(3):
        ...     accumulator.update(torch.randn(8, 3, 5), labels=torch.randint(5, (8,)))
        >>> len(accumulator), sorted(accumulator.compute())
        (24, ['accuracy', 'aece', 'aurc', 'brier', 'disagreement', 'ece', 'mutual_information', 'nll'])
    """

    def __init__(self, score: str | Detector = "msp"):
        self.score = as_detector(score)
        self.num_members = 0
        self._rows: list[Tensor] = []  # each (samples, columns)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows)

    def update(self, member_logits: Any, labels: Any = None, index: Any = None, member_features: Any = None) -> None:
        """Add one batch.

        Args:
            member_logits: (batch, members, classes).
            labels: (batch,), or `None` for data that is only scored.
            index: (batch,), each sample's number in its data set. Needed if a sampler repeats samples to fill up the last
                batches, as distributed samplers do: `gather` keeps each number once.
            member_features: (batch, members, dim), if the score is a detector that reads them.
        """
        member_logits = as_member_logits(member_logits)
        self.num_members = member_logits.shape[1]
        if labels is not None:
            labels = as_labels(labels, len(member_logits), member_logits.shape[-1])
        values = sample_values(member_logits, labels, self.score, member_features)
        missing = torch.full((len(member_logits),), torch.nan, dtype=torch.float64, device="cpu")
        values["index"] = missing if index is None else torch.as_tensor(index, device="cpu").double()
        self._rows.append(torch.stack([values.get(name, missing) for name in COLUMNS], dim=1))

    def gather(self) -> "UncertaintyAccumulator":
        """The samples of all processes of `torch.distributed`, on every process; repeated samples are dropped by their index.

        Every process must call it. Without `torch.distributed` there is one process, and only repeats are dropped.
        """
        rows = torch.cat([torch.zeros(0, len(COLUMNS), dtype=torch.float64, device="cpu"), *self._rows])
        parts, members = zip(*gather((rows, self.num_members)), strict=True)
        rows = torch.cat(parts)
        index = rows[:, COLUMNS.index("index")]
        if index.isnan().any() and not index.isnan().all():
            raise ValueError(
                "some samples have no index, so repeated ones cannot be found: give every batch one, or none"
            )
        if not index.isnan().any():
            order = index.argsort(stable=True)
            is_first = index[order].diff(prepend=index.new_full((1,), -torch.inf)) != 0
            rows = rows[order[is_first]]
        gathered = UncertaintyAccumulator(self.score)
        gathered.num_members, gathered._rows = max(members), [rows]
        return gathered

    def values(self) -> Mapping[str, Tensor]:
        """The values per sample, (samples,) each, see `sample_values`; correct, brier and nll if all samples had labels."""
        columns = dict(zip(COLUMNS, torch.cat(self._rows).unbind(dim=1), strict=True))
        unlabelled = columns["correct"].isnan()
        if unlabelled.any() and not unlabelled.all():
            raise ValueError(
                f"{int(unlabelled.sum())} of {len(self)} samples have no label: give every batch labels, or none"
            )
        names = UNCERTAINTY_VALUES if unlabelled.any() else (*UNCERTAINTY_VALUES, *LABELLED_VALUES)
        return {name: columns[name] for name in names}

    def compute(self) -> dict[str, float]:
        """Diversity metrics, and classification metrics if the samples had labels."""
        values = self.values()
        classification = summarize_classification(values) if "correct" in values else {}
        return classification | summarize_diversity(values)


# For Trainer


def compute_metrics(prediction: Any) -> dict[str, float]:
    """The classification and diversity metrics of an evaluation: `Trainer(..., compute_metrics=compute_metrics)`.

    Needs the predictions (logits, member_logits, ...) of `evaluate(ignore_keys=[])`. From logits alone the diversity metrics
    are left out, with a warning.
    """
    member_logits, has_members = _member_logits(prediction.predictions)
    metrics = classification_metrics(member_logits, prediction.label_ids)
    if has_members:
        return metrics | diversity_metrics(member_logits)
    warnings.warn(
        "Trainer handed over logits without member_logits, so mutual_information and disagreement are left out: call "
        "trainer.evaluate(ignore_keys=[]) and trainer.train(ignore_keys_for_eval=[])",
        stacklevel=2,
    )
    return metrics


def _member_logits(predictions: Any) -> tuple[Tensor, bool]:
    """(samples, members, classes) among Trainer's predictions, and whether they are the members' own."""
    if not isinstance(predictions, (tuple, list)):
        logits = as_tensor(predictions)
        return (logits.unsqueeze(1), False) if logits.dim() == 2 else (logits, True)
    logits = as_tensor(predictions[0])
    others = [as_tensor(other) for other in predictions[1:] if not isinstance(other, (tuple, list))]
    # Hidden states may come along: the member logits have the logits' rows and classes.
    fitting = [x for x in others if x.dim() == 3 and (x.shape[0], x.shape[2]) == tuple(logits.shape)]
    return (fitting[0], True) if fitting else (logits.unsqueeze(1), False)
