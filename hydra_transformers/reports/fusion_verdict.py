"""The verdict on fusing members, by the rule that `fusion_report` documents, and its sentence."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..models.configuration_hydra import SHARED_PARTS
from ..uncertainty.paired import Change


if TYPE_CHECKING:
    from .fusion_report import Fused, FusionReport

LEAST_ROWS = 100
NLL_TOLERANCE = 0.05  # as a share of the NLL not fused
LEAST_NLL_TOLERANCE = 0.01  # nats
ACCURACY_TOLERANCE = 0.02
MEMBER_TOLERANCE = 0.05
AUROC_TOLERANCE = 0.02
ECE_TOLERANCE = 0.02


def decide(report: "FusionReport") -> tuple[str, str, tuple[str, ...]]:
    """The verdict, its sentence, and the parts to share."""
    if report.num_rows < LEAST_ROWS:
        return _unsure(f"{report.num_rows} rows are too few, pass {LEAST_ROWS} or more")
    losses = list(sure_losses(report, report.fused))
    if losses:
        found = _repaired(report)
        if found is None:
            return "do not fuse", f"Do not fuse: {_listed(losses)}. Keep the members apart, shared=().", ()
        left_out = next(part for part in SHARED_PARTS if part not in found.shared)
        verdict = f"fuse without {left_out}"
        reasons = f"with all parts shared {_listed(losses)}; without {left_out} {_nll(report, found)}"
        return verdict, _ended(f"{verdict.capitalize()}: {reasons}", report, found), found.shared
    guesses = [index for index, beats in enumerate(report.beats_guessing) if not beats]
    if guesses:
        why = "so that it has nothing to lose on these rows"
        return _unsure(f"alone, member {guesses[0]} is not surely better than guessing, {why}")
    if not _keeps_nll(report, report.fused):
        return _unsure(f"{_nll(report, report.fused)}, and {_rows_that_tell(report)} would tell")
    return "fuse", _ended(f"Fuse: {_nll(report, report.fused)}", report, report.fused), report.fused.shared


def safe_trunk(report: "FusionReport", verdict: str) -> tuple[int, str]:
    """The most of the tried first layers that can be merged whole without a loss, and a sentence on it."""
    if verdict != "fuse" or not report.trunks:
        return 0, ""
    safe = [fused for fused in report.trunks if _keeps_nll(report, fused) and not any(sure_losses(report, fused))]
    if not safe:
        fewest = report.trunks[0]
        layers, losses = f"{fewest.trunk_layers} of {report.num_layers}", list(sure_losses(report, fewest))
        if losses:
            return 0, f"Merge no layers whole: with {layers} {_listed(losses)}."
        return 0, f"Whether layers can be merged whole, these rows do not tell: with {layers} {_nll(report, fewest)}."
    deepest = max(safe, key=lambda fused: fused.trunk_layers)
    before, after = report.not_fused, deepest.ensemble
    kept = [f"accuracy ({before.accuracy:.1%} → {after.accuracy:.1%})"]
    kept += [
        f"the AUROC on {_words(group)} data ({before.mean_auroc(group):.1%} → {after.mean_auroc(group):.1%})"
        for group in report.num_ood_rows
    ]
    return (
        deepest.trunk_layers,
        f"Merging {deepest.trunk_layers} of {report.num_layers} layers keeps {_listed(kept)}: they run once for all members.",
    )


def _unsure(reason: str) -> tuple[str, str, tuple[str, ...]]:
    return "cannot tell", f"Cannot tell: {reason}.", ()


def _repaired(report: "FusionReport") -> "Fused | None":
    """The Hydra with one part left out that loses nothing; of several the one with the lowest NLL."""
    if not all(report.beats_guessing):
        return None
    all_but_one = [fused for fused in report.parts if len(fused.shared) == len(SHARED_PARTS) - 1]
    kept = [fused for fused in all_but_one if _keeps_nll(report, fused) and not any(sure_losses(report, fused))]
    return min(kept, key=lambda fused: fused.ensemble.nll, default=None)


def sure_losses(report: "FusionReport", fused: "Fused") -> Iterator[str]:
    """The sure losses from sharing these parts, each as a clause."""
    before, after = report.not_fused, fused.ensemble
    if fused.nll.low > nll_tolerance(report):
        yield f"the ensemble's NLL rises from {before.nll:.3f} to {after.nll:.3f} ({_interval(fused.nll, '{:+.3f}')})"
    if fused.accuracy.high < -ACCURACY_TOLERANCE:
        yield f"its accuracy falls from {before.accuracy:.1%} to {after.accuracy:.1%} (guessing: {report.guessing['accuracy']:.1%})"
    fallen = [index for index, change in enumerate(fused.member_accuracies) if change.high < -MEMBER_TOLERANCE]
    if fallen:
        worst = min(fallen, key=lambda index: fused.member_accuracies[index].difference)
        alone, inside = report.alone[worst].accuracy, fused.members[worst].accuracy
        others = f", the worst of {len(fallen)} that do" if len(fallen) > 1 else ""
        yield f"member {worst} falls from {alone:.1%} to {inside:.1%} inside{others}"
    for group, change in fused.auroc.items():
        if has_enough_rows(report, group) and change.high < -AUROC_TOLERANCE:
            falls = f"falls from {before.mean_auroc(group):.1%} to {after.mean_auroc(group):.1%}"
            yield f"the AUROC on {_words(group)} data {falls} ({_interval(change, '{:+.1%}')})"


def nll_tolerance(report: "FusionReport") -> float:
    return max(NLL_TOLERANCE * report.not_fused.nll, LEAST_NLL_TOLERANCE)


def has_enough_rows(report: "FusionReport", group: str) -> bool:
    return min(report.num_ood_rows[group].values()) >= LEAST_ROWS


def _keeps_nll(report: "FusionReport", fused: "Fused") -> bool:
    return fused.nll.high <= nll_tolerance(report)


def _nll(report: "FusionReport", fused: "Fused") -> str:
    nll, before = fused.ensemble.nll, report.not_fused.nll
    change = _interval(fused.nll, "{:+.3f}")
    return f"the ensemble's NLL is {nll:.3f} fused and {before:.3f} not fused on {report.num_rows:,} rows ({change})"


def _rows_that_tell(report: "FusionReport") -> str:
    """The number of rows that would shrink the interval to one side of the tolerance."""
    change = report.fused.nll
    gap = abs(nll_tolerance(report) - change.difference)
    needed = report.num_rows * (change.half_width / gap) ** 2 if gap else math.inf
    if not needed < 100 * report.num_rows:
        return f"no less than {100 * report.num_rows:,} rows"
    digits = max(len(str(int(needed))) - 2, 0)
    return f"about {math.ceil(needed / 10**digits) * 10**digits:,} rows"


def _ended(sentence: str, report: "FusionReport", fused: "Fused") -> str:
    """Adds the losses that do not change the verdict, and what was not measured."""
    notes = []
    before, after = report.not_fused.ece, fused.ensemble.ece
    if after - before > ECE_TOLERANCE:
        notes.append(f"the ECE rises from {before:.3f} to {after:.3f}, fit a temperature")
    for group, changes in fused.auroc_by_set.items():
        if not has_enough_rows(report, group):
            few = f"with fewer than {LEAST_ROWS} rows in a set"
            notes.append(f"detection of {_words(group)} data is not judged, {few}")
            continue
        worse = [name for name, change in changes.items() if change.high < -AUROC_TOLERANCE]
        if worse:
            notes.append(f"{', '.join(worse)} {'is' if len(worse) == 1 else 'are'} detected worse")
    if not report.num_ood_rows:
        notes.append("detection of foreign data was not measured (ood_data)")
    return f"{sentence}; but {_listed(notes)}." if notes else f"{sentence}."


def _words(group: str) -> str:
    return "foreign" if group == "OOD" else f"{group}-OOD"


def _interval(change: Change, form: str) -> str:
    low, difference, high = (form.format(value) for value in (change.low, change.difference, change.high))
    return f"{difference}, 95 % interval {low} to {high}"


def _listed(clauses: list[str]) -> str:
    return clauses[0] if len(clauses) == 1 else f"{', '.join(clauses[:-1])}, and {clauses[-1]}"
