"""Compares ways to fuse members on validation data: quality, intervals against their ensemble, and work."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .._io.progress import progress_bar
from ..cost import count_multiply_adds
from ..data.loading import load_if_named
from ..fusion.soup import soup
from ..fusion.trunk import trunk_depth
from ..models.auto import AutoHydra, load_trained
from ..uncertainty.tasks import task_of
from .evaluation import evaluate_uncertainty
from .report import Report
from .table import DATA, NO_VALUE, Section, to_html, to_markdown, to_text


ENSEMBLE, SOUP = "ensemble", "soup"
MERGED_SHARES = (0.5, 0.75)  # of the layers


@dataclass(frozen=True)
class Fusion:
    """One way to fuse the members.

    Attributes:
        name (`str`): its row in the table.
        trunk_layers (`int` or `None`): layers merged whole; None for the ensemble, which shares nothing.
        build (`Callable`): makes the Hydra.
    """

    name: str
    trunk_layers: int | None
    build: Callable[[], PreTrainedModel]


@dataclass(frozen=True, repr=False)
class FusionComparison:
    """The result of `compare_fusions`. Printed: the table, with intervals of the first metric, and which row is best.

    Attributes:
        report (`Report`): all rows: each member, their ensemble, the soup, and the members fused.
        work (`dict`): row -> multiply-adds, the first member's being 1.
        best (`Fusion`): the cheapest way that is not surely worse than the ensemble; `best.build()` makes the Hydra.
    """

    report: Report
    work: dict[str, float]
    best: Fusion

    @property
    def sentence(self) -> str:
        """Which row is best, and why."""
        (metric, (title, _)), work = next(iter(self.report._task.metrics.items())), self.work
        values = [self.report.models[name][DATA][metric] for name in (self.best.name, ENSEMBLE)]
        if self.best.name == ENSEMBLE:
            return f"Best: the {ENSEMBLE}: no way to fuse the members keeps its quality for sure, so do not fuse them."
        return (
            f"Best: {self.best.name}, with {work[self.best.name]:.2f} of one member's work: {title} {values[0]:.4g}, not surely "
            f"worse than the {ENSEMBLE}'s {values[1]:.4g} with {work[ENSEMBLE]:.2f}."
        )

    def _sections(self) -> list[Section]:
        title, ((header, rows), *_) = self.report._sections()[0]
        rows = [[*row, self._interval(row[0]), f"{self.work[row[0]]:.2f}"] for row in rows]
        return [(title, [([*header, f"Against the {ENSEMBLE} (95 %)", "Work"], rows), self.sentence])]

    def _interval(self, name: str) -> str:
        """The difference of the first metric and its interval."""
        difference, low, high = next(iter(self.report.gains(name, ENSEMBLE).values())).numbers
        return NO_VALUE if name == ENSEMBLE else f"{difference} ({low} to {high})"

    def __str__(self) -> str:
        return to_text(self._sections())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(self._sections())

    def to_markdown(self) -> str:
        """The table and the sentence as markdown."""
        return to_markdown(self._sections())


def compare_fusions(
    members: Sequence[PreTrainedModel | str | os.PathLike], data: Any, ood_data: Any = None, *, batch_size: int = 32
) -> FusionComparison:
    """Compares each member, their ensemble, their soup, and the members fused with no layer, half, three quarters and all but
    one of the layers merged.

    Args:
        members (`Sequence`): two or more models of one task and architecture,
            fine-tuned from one pre-trained model: supported models of Transformers or Hydras, left unchanged; or their
            folders or names on the Hub.
        data (`DataLoader`, `Dataset` or `list`): labelled validation data that no member was trained on, as
            `evaluate_uncertainty` takes it, in the same order each time it is read.
        ood_data (*optional*): as for `evaluate_uncertainty`; then detection counts for `best` as well.
        batch_size (`int`, defaults to 32): rows per batch, where data comes in rows.

    Returns:
        `FusionComparison`: `best` is the cheapest way to fuse whose first metric (accuracy) is not surely worse than the
        ensemble's: the 95 % interval of the paired difference does not lie below 0. Without such a way it is the ensemble.

    Example:
        >>> comparison = compare_fusions(["run/member-0", "run/member-1", "run/member-2"], validation)  # doctest: +SKIP
        >>> print(comparison)  # doctest: +SKIP
        >>> hydra = comparison.best.build()  # doctest: +SKIP
    """
    if isinstance(members, (str, os.PathLike, PreTrainedModel)):
        raise TypeError(f"members is a {type(members).__name__}: pass a list of members")
    members = [load_trained(member) if isinstance(member, (str, os.PathLike)) else member for member in members]
    ensemble = AutoHydra.from_pruned_members(members, shared=(), allow_equal=True).eval()
    if ensemble.num_members < 2:
        raise ValueError("members has one member: pass two or more, there is nothing to fuse")
    if not hasattr(type(ensemble), "encode_and_classify"):
        raise TypeError(f"members are {type(members[0]).__name__}s: pass models with a classification head")
    ensemble.config.aggregate = getattr(members[0].config, "aggregate", None)
    singles = [ensemble.member(index).eval() for index in range(ensemble.num_members)]
    data, ood_data = task_of(ensemble).load(data, members[0]), load_if_named(ood_data, members[0])

    def fused(depth: int) -> PreTrainedModel:
        hydra = type(ensemble).from_pruned_members(singles, trunk_layers=depth, allow_equal=True).eval()
        hydra.config.aggregate = ensemble.config.aggregate
        return hydra

    layers = len(ensemble.config.kept_heads)
    ways = [Fusion(f"fused, {n} of {layers} layers merged", n, lambda n=n: fused(n)) for n in _depths(ensemble)]
    rows: dict[str, Callable[[], PreTrainedModel]] = {
        f"member {index}": lambda member=member: member for index, member in enumerate(singles)
    }
    rows[ENSEMBLE] = lambda: ensemble
    with contextlib.suppress(ValueError):  # members of other heads or other pre-training have no soup
        averaged = soup(singles)
        rows[SOUP] = lambda: averaged
    rows |= {way.name: way.build for way in ways}
    report, work = None, {}
    with progress_bar(len(rows), "compare fusions", "model") as bar:
        for name, build in rows.items():  # one model beside the ensemble is in memory at a time
            bar.set_description(name)
            model = build()
            part = evaluate_uncertainty({name: model}, data, ood_data, batch_size=batch_size)
            report = part if report is None else report.joined(part)
            work[name] = count_multiply_adds(model)
            bar.update()
    work = {name: count / work["member 0"] for name, count in work.items()}
    kept = [way for way in ways if _keeps_quality(report, way.name)]
    best = min(kept, key=lambda way: work[way.name], default=Fusion(ENSEMBLE, None, lambda: ensemble))
    return FusionComparison(report, work, best)


def _depths(ensemble: PreTrainedModel) -> list[int]:
    """How many first layers to merge, as far as members keep the same heads."""
    kept = ensemble.config.kept_heads
    layers = len(kept)
    same = next((place for place, heads in enumerate(kept) if any(part != heads[0] for part in heads)), layers)
    depths = {0, layers - 1, *(trunk_depth(share, layers) for share in MERGED_SHARES)}
    return sorted(depth for depth in depths if depth <= same)


def _keeps_quality(report: Report, name: str) -> bool:
    """Whether a model is not surely worse than the ensemble in its first metric and in detection."""
    gains = [gain for metric, gain in report.gains(name, ENSEMBLE).items() if metric != "nll"]
    return all(gain.verdict != "worse" and gain.change.low > float("-inf") for gain in gains)
