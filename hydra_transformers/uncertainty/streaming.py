"""Judge a data set batch by batch: a few numbers per sample are kept, the logits are not."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._io.processes import rank_and_world_size
from .inputs import as_labels, as_member_logits
from .metrics import (
    LABELLED_VALUES,
    NUM_BINS,
    UNCERTAINTY_VALUES,
    sample_values,
    summarize_classification,
    summarize_diversity,
)
from .ood import check_score


if TYPE_CHECKING:
    from .detectors import Detector


COLUMNS = (*UNCERTAINTY_VALUES, *LABELLED_VALUES, "index")


class UncertaintyAccumulator:
    """Collects the metrics of one data set over any number of batches and processes.

    About 80 bytes per sample are kept, whatever the number of members and classes, and what `compute` returns does not
    depend on how the samples were batched, ordered or spread over processes.

    Args:
        score: the OOD score to keep: a name, see `ood_score`, or a fitted `Detector`.
        num_bins: bins of the calibration errors.

    Example:
        >>> import torch
        >>> accumulator = UncertaintyAccumulator()
        >>> for _ in range(3):
        ...     accumulator.update(torch.randn(8, 3, 5), labels=torch.randint(5, (8,)))
        >>> len(accumulator), sorted(accumulator.compute())
        (24, ['accuracy', 'aece', 'aurc', 'brier', 'disagreement', 'ece', 'mutual_information', 'nll'])
    """

    def __init__(self, score: "str | Detector" = "msp", num_bins: int = NUM_BINS):
        check_score(score)
        self.score = score
        self.num_bins = num_bins
        self.num_members = 0
        self._rows: list[Tensor] = []  # each (samples, columns)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows)

    def update(self, member_logits: Any, labels: Any = None, index: Any = None, member_features: Any = None) -> None:
        """Take in one batch.

        Args:
            member_logits: (batch, members, classes).
            labels: (batch,), or `None` for data that is only scored.
            index: (batch,), each sample's number in its data set. Needed where a sampler repeats samples to fill up the
                last batches, as distributed samplers do: `gather` keeps each number once.
            member_features: (batch, members, dim), where the score is a detector that reads them.
        """
        member_logits = as_member_logits(member_logits)
        self._check_members(member_logits.shape[1])
        if labels is not None:
            labels = as_labels(labels, len(member_logits), member_logits.shape[-1])
        values = sample_values(member_logits, labels, self.score, member_features)
        if index is not None:
            values["index"] = torch.as_tensor(index, device="cpu").double()
            if values["index"].shape != (len(member_logits),):
                raise ValueError(
                    f"index has shape {tuple(values['index'].shape)}, member_logits has {len(member_logits)} rows: "
                    "pass one number per row"
                )
        missing = torch.full((len(member_logits),), torch.nan, dtype=torch.float64, device="cpu")
        self._rows.append(torch.stack([values.get(name, missing) for name in COLUMNS], dim=1))

    def _check_members(self, members: int) -> None:
        if self.num_members not in (0, members):
            raise ValueError(
                f"member_logits has {members} members, earlier batches had {self.num_members}: "
                "use one accumulator per model"
            )
        self.num_members = members

    def gather(self) -> "UncertaintyAccumulator":
        """The samples of all processes of `torch.distributed`, on every process; repeated samples are dropped by their index.

        Every process must call it. Without `torch.distributed` there is one process, and only repeats are dropped.
        """
        rows = torch.cat([torch.zeros(0, len(COLUMNS), dtype=torch.float64, device="cpu"), *self._rows])
        members = self.num_members
        if rank_and_world_size()[1] > 1:
            rows, members = _gather_rows(rows, members)
        index = rows[:, COLUMNS.index("index")]
        unnumbered = int(index.isnan().sum())
        if 0 < unnumbered < len(index):
            raise ValueError(
                f"{unnumbered} of {len(index)} samples have no index, so that nobody can tell which are repeated: give every "
                "batch an index, or none"
            )
        if len(index) and not unnumbered:
            rows = rows[_first_occurrences(index)]
        gathered = UncertaintyAccumulator(self.score, self.num_bins)
        gathered.num_members = members
        gathered._rows = [rows]
        return gathered

    def values(self) -> Mapping[str, Tensor]:
        """What is kept per sample, (samples,) each: see `sample_values`; correct, brier and nll where all had labels."""
        if len(self) == 0:
            raise ValueError("there are no samples: call update with at least one batch")
        columns = dict(zip(COLUMNS, torch.cat(self._rows).unbind(dim=1), strict=True))
        del columns["index"]
        unlabelled = columns["correct"].isnan()
        if unlabelled.any():
            if not unlabelled.all():
                raise ValueError(
                    f"{int(unlabelled.sum())} of {len(self)} samples have no label: give every batch labels, or none"
                )
            for name in LABELLED_VALUES:
                del columns[name]
        return columns

    def compute(self) -> dict[str, float]:
        """Diversity metrics, and classification metrics where the samples had labels."""
        values = self.values()
        classification = summarize_classification(values, self.num_bins) if "correct" in values else {}
        return classification | summarize_diversity(values)


def _gather_rows(rows: Tensor, members: int) -> tuple[Tensor, int]:
    """All processes' rows, padded to one length for the exchange and cut again after it."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    header = torch.tensor([len(rows), members], device=device)
    headers = [torch.zeros_like(header) for _ in range(dist.get_world_size())]
    dist.all_gather(headers, header)
    lengths = [int(other[0]) for other in headers]
    padded = rows.new_zeros(max(lengths), rows.shape[1], device=device)
    padded[: len(rows)] = rows
    gathered = [torch.zeros_like(padded) for _ in headers]
    dist.all_gather(gathered, padded)
    everything = [part[:length].cpu() for part, length in zip(gathered, lengths, strict=True)]
    return torch.cat(everything), max(int(other[1]) for other in headers)


def _first_occurrences(index: Tensor) -> Tensor:
    order = index.argsort(stable=True)
    ordered = index[order]
    return order[torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])]
