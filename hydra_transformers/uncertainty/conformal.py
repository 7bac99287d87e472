"""Conformal prediction: for each row a set of classes that holds the right one with a promised probability."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..models.decision_settings import check_sets
from ..models.detection import log_mean
from .abstention import check_share, exact
from .inputs import as_labels, as_member_logits, as_tensor, wide_log_softmax, widened


RAPS_K_REG = 5
RAPS_PENALTY = 0.01
ROWS_PER_PASS = 4096  # bounds the float64 memory, whatever the number of samples


@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes, `{c: s(x, c) <= threshold}`, that hold the right class for a share 1 - alpha of new rows. Made by `fit`.

    Attributes:
        method: "lac", "aps" or "raps".
        alpha: the share of new rows whose right class may be missing.
        thresholds: one for all classes, or one per class with `by_class`; infinite where the rows were too few.
        num_classes: of the model.
        rows: how many rows it was fitted on.
        by_class: whether the share is promised for the rows of each class.
        randomised: whether APS and RAPS count the last class in part, at random.
        seed: of `randomised`.
        k_reg, penalty: of RAPS; `None` for the others.
        allow_empty: whether a set may be empty; otherwise it holds at least the likeliest class.
    """

    method: str
    alpha: float
    thresholds: tuple[float, ...]
    num_classes: int
    rows: int
    by_class: bool = False
    randomised: bool = False
    seed: int = 0
    k_reg: int | None = None
    penalty: float | None = None
    allow_empty: bool = False

    @classmethod
    def fit(
        cls,
        member_logits: Any,
        labels: Any,
        alpha: float = 0.1,
        method: str = "lac",
        by_class: bool = False,
        seed: int = 0,
        *,
        randomised: bool = False,
        k_reg: int | None = None,
        penalty: float | None = None,
        allow_empty: bool = False,
    ) -> "ConformalSets":
        r"""Calibrate on rows that neither the model nor its temperature was fitted on.

        With the ensemble's mean probability `p̄` and classes ranked by it (rank 1 the likeliest, ties to the lower class), the
        score `s(x, c)` says how badly class c fits row x:

            lac   1 - p̄_c                                           the smallest sets on average (Sadinle et al., 2019)
            aps   Σ_{better ranked} p̄ + u p̄_c                       larger sets for harder rows (Romano et al., 2020)
            raps  aps + penalty · max(0, rank_c - k_reg)              APS without its long tails (Angelopoulos et al., 2021)

        `u` is 1, or with `randomised` uniform in [0, 1). The threshold is the `ceil((n + 1)(1 - alpha))`-th smallest of the n
        scores of the right classes. If rows are exchangeable (for example independent and of one distribution), a new row's
        set holds its class with probability at least 1 - alpha, on average over calibration sets and rows; not for every kind
        of row, not for the rows of one class, and not under distribution shift. The share that one calibration set of n rows
        reaches is distributed as Beta(k, n + 1 - k) with k as above: ± 2 % for 1000 rows and alpha 0.1.

        Args:
            member_logits: (samples, members, classes), scaled by the temperature that will be used.
            labels: (samples,), class indices.
            alpha: the share of sets that may miss the right class.
            method: "lac", "aps" or "raps".
            by_class: a threshold per class, from its own rows (Mondrian, Vovk 2012): the promise then holds for the rows of
                each class. It needs more rows, and a class with fewer than 1/alpha - 1 of them is in every set.
            seed: of `randomised`.
            randomised: for aps and raps: smaller sets. With `allow_empty` they meet the promise exactly; without it, sets that
                would be empty get the likeliest class, and coverage exceeds the promise. `u` is made from the seed and the
                row's own logits, so that equal rows get equal sets, whatever the batch.
            k_reg, penalty: for raps: ranks above `k_reg` are penalised. 5 and 0.01 by default, the usual values for many
                classes. Choose others on other rows, by `coverage_and_size`.
            allow_empty: let a set be empty if every class fits badly. By default it gets the likeliest class, which can only
                raise the coverage.

        Example:
            >>> logits = torch.tensor([[[1.0, 0.0, -1.0]]]).repeat(19, 1, 1)
            >>> sets = ConformalSets.fit(logits, [0] * 15 + [1] * 4, alpha=0.1)
            >>> sets.sets([[[2.0, 0.0, 0.0]], [[1.0, 0.9, -3.0]]]).int()
            tensor([[1, 0, 0],
                    [1, 1, 0]], dtype=torch.int32)
        """
        check_share(alpha, "alpha")
        member_logits = as_member_logits(member_logits).detach()
        if as_tensor(labels).dim() == 2:
            raise ValueError(
                "labels has two dimensions: prediction sets are for one class of several; a multi-label model decides on each "
                "label by itself, fit one set of two classes (no, yes) per label"
            )
        num_classes = member_logits.shape[-1]
        labels = as_labels(labels, len(member_logits), num_classes).to(member_logits.device)
        if len(labels) == 0:
            raise ValueError("labels is empty: pass at least one calibration row")
        k_reg, penalty = _settings(method, num_classes, randomised, k_reg, penalty)
        options = (bool(by_class), bool(randomised), int(seed), k_reg, penalty, bool(allow_empty))
        unfitted = cls(method, float(alpha), (), num_classes, len(labels), *options)
        parts = []
        for logits, targets in zip(member_logits.split(ROWS_PER_PASS), labels.split(ROWS_PER_PASS), strict=True):
            scores = unfitted._scores(logits)
            parts.append(scores.gather(1, targets.to(scores.device).unsqueeze(1)).squeeze(1).cpu())
        scores, labels = torch.cat(parts), labels.cpu()
        groups = [scores[labels == c] for c in range(num_classes)] if by_class else [scores]
        fitted = replace(unfitted, thresholds=tuple(conformal_quantile(group, alpha) for group in groups))
        if fitted._shortage:
            warnings.warn(fitted._shortage, stacklevel=2)
        return fitted

    def sets(self, member_logits: Any) -> Tensor:
        """Which classes are in each row's set: bool, (batch, classes)."""
        member_logits = as_member_logits(member_logits).detach()
        if member_logits.shape[-1] != self.num_classes:
            raise ValueError(
                f"member_logits has {member_logits.shape[-1]} classes, the sets were fitted for {self.num_classes}: "
                "pass the logits of the same model"
            )
        parts = member_logits.split(ROWS_PER_PASS) if len(member_logits) else ()
        empty = torch.zeros(0, self.num_classes, dtype=torch.bool, device=member_logits.device)
        return torch.cat([empty, *(self._sets(part).to(member_logits.device) for part in parts)])

    def coverage_and_size(self, member_logits: Any, labels: Any) -> dict[str, float]:
        """`coverage` (share of sets that hold the right class), `mean_size`, and `single_class` (share of sets of one class).

        Args:
            member_logits: (samples, members, classes).
            labels: (samples,), class indices.
        """
        return summarize_sets([self.counts(member_logits, labels)])

    def counts(self, member_logits: Any, labels: Any) -> tuple[int, int, int, int]:
        """Counts of a batch: rows, sets with the right class, classes in all sets, sets of one class; for `summarize_sets`."""
        return count_sets(self.sets(member_logits), labels)

    @property
    def guarantee(self) -> str:
        """What is promised for new rows, and under which conditions."""
        rows = "of the rows of each class" if self.by_class else "of the rows"
        return (
            f"For at least {100 * (1 - self.alpha):.6g} % {rows} the set holds the right class, on average over calibration "
            f"sets, if new rows are exchangeable with the {self.rows} calibration rows. Nothing holds under distribution shift."
        )

    @property
    def sentence(self) -> str:
        """The guarantee, and a note if there were too few rows for it."""
        return " ".join(filter(None, [self.guarantee, self._shortage]))

    @property
    def _shortage(self) -> str:
        least = math.ceil(1 / exact(self.alpha)) - 1
        needed = f"alpha={self.alpha:g} takes at least {least} calibration rows"
        few = [c for c, threshold in enumerate(self.thresholds) if threshold == math.inf]
        if not few:
            return ""
        if not self.by_class:
            return f"{needed}, there are {self.rows}: every set holds every class."
        named = ", ".join(map(str, few[:10])) + (", ..." if len(few) > 10 else "")
        return (
            f"{needed} per class, {len(few)} of {self.num_classes} classes have fewer and are in every set: {named}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and None, for JSON; an infinite threshold is written as text."""
        thresholds = [value if math.isfinite(value) else str(value) for value in self.thresholds]
        return asdict(self) | {"thresholds": thresholds}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "ConformalSets":
        """The inverse of `to_dict`."""
        try:
            read = cls(**{**content, "thresholds": tuple(float(value) for value in content["thresholds"])})
            settings = _settings(read.method, read.num_classes, read.randomised, read.k_reg, read.penalty)
            is_whole = len(read.thresholds) == (read.num_classes if read.by_class else 1)
            if settings != (read.k_reg, read.penalty) or not is_whole or any(map(math.isnan, read.thresholds)):
                raise ValueError(f"k_reg is {read.k_reg}, penalty {read.penalty}, thresholds {read.thresholds}")
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError("these are no conformal sets: pass what to_dict gave") from error
        return read

    def _sets(self, member_logits: Tensor) -> Tensor:
        scores = self._scores(member_logits)
        chosen = scores <= torch.tensor(self.thresholds, dtype=torch.float64, device=scores.device)
        if not self.allow_empty:
            likeliest = _mean_probabilities(member_logits).argmax(dim=1, keepdim=True)
            is_empty = ~chosen.any(dim=1, keepdim=True)
            chosen = chosen.scatter(1, likeliest, chosen.gather(1, likeliest) | is_empty)
        return chosen

    def _scores(self, member_logits: Tensor) -> Tensor:
        """s(x, c) of every class, (batch, classes) in float64."""
        probabilities = _mean_probabilities(member_logits)
        if self.method == "lac":
            return 1 - probabilities
        ranked, order = probabilities.sort(dim=1, descending=True, stable=True)
        u = _uniform(member_logits, self.seed) if self.randomised else 1.0
        better = ranked.cumsum(dim=1).roll(1, dims=1)
        better[:, 0] = 0
        scores = better + u * ranked
        if self.method == "raps":
            ranks = torch.arange(1, self.num_classes + 1, dtype=torch.float64, device=scores.device)
            scores = scores + self.penalty * (ranks - self.k_reg).clamp(min=0)
        return torch.empty_like(scores).scatter(1, order, scores)


def count_sets(sets: Tensor, labels: Any) -> tuple[int, int, int, int]:
    """`ConformalSets.counts` of given sets: bool, (batch, classes)."""
    labels = as_labels(labels, *sets.shape).to(sets.device)
    sizes = sets.sum(dim=1)
    return len(sets), int(sets.gather(1, labels.unsqueeze(1)).sum()), int(sizes.sum()), int((sizes == 1).sum())


def summarize_sets(counts: list[tuple[int, int, int, int]]) -> dict[str, float]:
    """`ConformalSets.coverage_and_size` from the counts of batches."""
    rows, covered, sizes, singles = (sum(column) for column in zip(*counts, strict=True))
    if rows == 0:
        raise ValueError("there are no samples: pass at least one")
    return {"coverage": covered / rows, "mean_size": sizes / rows, "single_class": singles / rows}


def check_method(method: str, num_classes: int | None) -> None:
    """Refuses an unknown method, or one whose defaults do not suit so many classes (None if unknown)."""
    _settings(method, math.inf if num_classes is None else num_classes, False, None, None)


def _settings(
    method: str, num_classes: float, randomised: bool, k_reg: int | None, penalty: float | None
) -> tuple[int | None, float | None]:
    """k_reg and penalty, checked; None unless the method has them."""
    if method == "raps":
        k_reg = RAPS_K_REG if k_reg is None else k_reg
        penalty = RAPS_PENALTY if penalty is None else penalty
    check_sets(method, k_reg, penalty, num_classes)
    if randomised and method == "lac":
        raise ValueError("lac has nothing to randomise: leave randomised out, or choose aps or raps")
    return k_reg, None if penalty is None else float(penalty)


def conformal_quantile(scores: Tensor, alpha: float) -> float:
    """The ceil((n + 1)(1 - alpha))-th smallest score; infinite if there are fewer."""
    rank = math.ceil((len(scores) + 1) * (1 - exact(alpha)))
    return float(scores.kthvalue(rank).values) if rank <= len(scores) else math.inf


def _mean_probabilities(member_logits: Tensor) -> Tensor:
    return log_mean(wide_log_softmax(member_logits)).exp()


def _uniform(member_logits: Tensor, seed: int) -> Tensor:
    """A pseudo-random number in [0, 1) per row, (batch, 1) in float64: a hash of the row's logits."""
    bits = widened(member_logits).flatten(1).contiguous().view(torch.int64)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    odd = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator, device="cpu") * 2 + 1
    mixed = (bits * odd.to(bits.device)).sum(dim=1, keepdim=True)  # modulo 2^64
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):  # splitmix64's last steps
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return ((mixed >> 11) & (2**53 - 1)).double() / 2**53
