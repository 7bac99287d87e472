"""Compares ways to fuse members: quality, intervals against their ensemble, and work."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from transformers import PreTrainedModel

from .._io.progress import progress_bar
from ..cost import count_multiply_adds
from ..data.loading import load_if_named
from ..fusion.soup import soup
from ..fusion.trunk import trunk_depth
from ..models.auto import AutoHydra, load_trained
from ..uncertainty.tasks import task_fit_of
from .evaluation import evaluate_uncertainty
from .report import Report
from .table import DATA, NO_VALUE, Section, to_html, to_markdown, to_text


ENSEMBLE = "ensemble"
SOUP = "soup"
MERGED_SHARES = (0.5, 0.75)  # of the layers


@dataclass(frozen=True)
class Fusion:
    """One way to fuse the members.

    Attributes:
        name (`str`): its row in the table.
        trunk_layers (`int` or `None`): layers merged whole; None for the ensemble, which shares
            nothing.
        build (`Callable`): makes the Hydra.
    """

    name: str
    trunk_layers: int | None
    build: Callable[[], PreTrainedModel]


@dataclass(frozen=True, repr=False)
class FusionComparison:
    """The result of `compare_fusions`.

    Printed: the table, with intervals of the first metric, and which row is best.

    Attributes:
        report (`Report`): all rows: each member, their ensemble, the soup, and the members fused.
        work (`dict`): row -> multiply-adds, the first member's being 1.
        best (`Fusion`): the cheapest way that is not surely worse than the ensemble; `best.build()`
            makes the Hydra.
    """

    report: Report
    work: dict[str, float]
    best: Fusion

    @property
    def sentence(self) -> str:
        """Which row is best, and why."""
        best = self.best.name
        if best == ENSEMBLE:
            return f"Best: the {ENSEMBLE}: no way to fuse the members keeps its quality for sure, so do not fuse them."
        metrics = self.report._task.metrics
        metric = next(iter(metrics))
        title, _ = metrics[metric]
        value = self.report.models[best][DATA][metric]
        value_of_ensemble = self.report.models[ENSEMBLE][DATA][metric]
        return (
            f"Best: {best}, with {self.work[best]:.2f} of one member's work: {title} {value:.4g}, not surely worse "
            f"than the {ENSEMBLE}'s {value_of_ensemble:.4g} with {self.work[ENSEMBLE]:.2f}."
        )

    def _sections(self) -> list[Section]:
        """Return the report's first table with two more columns, and the sentence."""
        title, (table, *_) = self.report._sections()[0]
        header, rows = table
        header = [*header, f"Against the {ENSEMBLE} (95 %)", "Work"]
        rows = [[*row, self._interval(row[0]), f"{self.work[row[0]]:.2f}"] for row in rows]
        return [(title, [(header, rows), self.sentence])]

    def _interval(self, name: str) -> str:
        """Return the difference of the first metric and its interval."""
        if name == ENSEMBLE:
            return NO_VALUE
        gain = next(iter(self.report.gains(name, ENSEMBLE).values()))
        difference, low, high = gain.numbers
        return f"{difference} ({low} to {high})"

    def __str__(self) -> str:
        return to_text(self._sections())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(self._sections())

    def to_markdown(self) -> str:
        """Return the table and the sentence as markdown."""
        return to_markdown(self._sections())


def compare_fusions(
    members: Sequence[PreTrainedModel | str | os.PathLike], data: Any, ood_data: Any = None, *, batch_size: int = 32
) -> FusionComparison:
    """Compare each member, their ensemble, their soup, and the members fused in several ways.

    Fused with no layer, half, three quarters and all but one of the layers merged.

    Args:
        members (`Sequence`): two or more models of one task and architecture, fine-tuned from one
            pre-trained model: supported models of Transformers or Hydras, left unchanged; or their
            folders or names on the Hub.
        data (`DataLoader`, `Dataset` or `list`): labelled validation data that no member was
            trained on, as `evaluate_uncertainty` takes it, in the same order each time it is read.
        ood_data (*optional*): as for `evaluate_uncertainty`; then detection counts for `best` as
            well.
        batch_size (`int`, defaults to 32): rows per batch, where data comes in rows.

    Returns:
        `FusionComparison`: `best` is the cheapest way to fuse whose first metric (accuracy) is not
        surely worse than the ensemble's: the 95 % interval of the paired difference does not lie
        below 0. Without such a way it is the ensemble.

    Example:
        >>> members = ["run/member-0", "run/member-1", "run/member-2"]
        >>> comparison = compare_fusions(members, validation)  # doctest: +SKIP
        >>> print(comparison)  # doctest: +SKIP
        >>> hydra = comparison.best.build()  # doctest: +SKIP
    """
    ensemble, members = _ensemble_of(members)
    singles = [ensemble.member(index).eval() for index in range(ensemble.num_members)]
    data = task_fit_of(ensemble).load(data, members[0])
    ood_data = load_if_named(ood_data, members[0])

    def fused(trunk_layers: int) -> PreTrainedModel:
        hydra = type(ensemble).from_pruned_members(singles, trunk_layers=trunk_layers, allow_equal=True).eval()
        hydra.config.aggregate = ensemble.config.aggregate
        return hydra

    # What is compared: name -> a function that makes the model.
    layers = len(ensemble.config.kept_heads)
    ways = []
    for depth in _depths(ensemble):
        ways.append(Fusion(f"fused, {depth} of {layers} layers merged", depth, partial(fused, depth)))
    rows: dict[str, Callable[[], PreTrainedModel]] = {}
    for index, member in enumerate(singles):
        rows[f"member {index}"] = lambda member=member: member
    rows[ENSEMBLE] = lambda: ensemble
    with contextlib.suppress(ValueError):  # members of other heads or other pre-training have no soup
        averaged = soup(singles)
        rows[SOUP] = lambda: averaged
    rows |= {way.name: way.build for way in ways}

    # Evaluate them; one model beside the ensemble is in memory at a time.
    reports = []
    multiply_adds = {}
    with progress_bar(len(rows), "compare fusions", "model") as bar:
        for name, build in rows.items():
            bar.set_description(name)
            model = build()
            reports.append(evaluate_uncertainty({name: model}, data, ood_data, batch_size=batch_size))
            multiply_adds[name] = count_multiply_adds(model)
            bar.update()

    report = reduce(Report.joined, reports)

    # The cheapest of those that keep the ensemble's quality.
    work = {name: count / multiply_adds["member 0"] for name, count in multiply_adds.items()}
    kept = [way for way in ways if _keeps_quality(report, way.name)]
    best = min(kept, key=lambda way: work[way.name], default=Fusion(ENSEMBLE, None, lambda: ensemble))
    return FusionComparison(report, work, best)


def _ensemble_of(members: Any) -> tuple[Any, list[PreTrainedModel]]:
    """Return a Hydra of the members that shares nothing, and the members; raise for what has
    none."""
    if isinstance(members, (str, os.PathLike, PreTrainedModel)):
        raise TypeError(f"members is a {type(members).__name__}: pass a list of members")
    loaded = []
    for member in members:
        if isinstance(member, (str, os.PathLike)):
            member = load_trained(member)
        loaded.append(member)

    ensemble = AutoHydra.from_pruned_members(loaded, shared=(), allow_equal=True).eval()
    if ensemble.num_members < 2:
        raise ValueError("members has one member: pass two or more, there is nothing to fuse")
    if not hasattr(type(ensemble), "encode_and_classify"):
        raise TypeError(f"members are {type(loaded[0]).__name__}s: pass models with a classification head")
    ensemble.config.aggregate = getattr(loaded[0].config, "aggregate", None)
    return ensemble, loaded


def _depths(ensemble: PreTrainedModel) -> list[int]:
    """Return how many first layers to merge, as far as members keep the same heads."""
    kept_heads = ensemble.config.kept_heads
    layers = len(kept_heads)
    same_heads = _layers_with_same_heads(kept_heads)
    depths = {0, layers - 1}
    for share in MERGED_SHARES:
        depths.add(trunk_depth(share, layers))
    return sorted(depth for depth in depths if depth <= same_heads)


def _layers_with_same_heads(kept_heads: Sequence[Sequence[Sequence[int]]]) -> int:
    """Count the first layers in which all members keep the same heads; kept_heads: by layer."""
    for layer, heads_of_members in enumerate(kept_heads):
        if any(heads != heads_of_members[0] for heads in heads_of_members):
            return layer
    return len(kept_heads)


def _keeps_quality(report: Report, name: str) -> bool:
    """Whether a model is not surely worse than the ensemble, in its first metric and detection."""
    for metric, gain in report.gains(name, ENSEMBLE).items():
        if metric == "nll":
            continue
        has_interval = gain.change.low > float("-inf")  # also false for NaN
        if gain.verdict == "worse" or not has_interval:
            return False
    return True
