"""A markdown table of what methods reached, over seeds."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any


Run = dict[str, Any]  # what one method reached with one seed
Seeds = Mapping[str, Mapping[str, Run]]
Column = tuple[str, Callable[[Run], float | None], str]  # heading, value (None: not judged), format
NOT_JUDGED = "-"


def auroc(score: str = "msp", group: str | None = None) -> Callable[[Run], float]:
    """The AUROC of a group of sets in percent, by default the mean of near and far, or of the one that was judged."""

    def value(run: Run) -> float:
        found = run["ood"][score]
        groups = [group] if group else [name for name in ("near", "far") if name in found]
        return 100 * mean(mean(metrics["auroc"] for metrics in found[name].values()) for name in groups)

    return value


ACCURACY: Column = ("Acc ↑", lambda run: 100 * run["id"]["accuracy"], ".2f")
ECE: Column = ("ECE ↓", lambda run: run["id"]["ece"], ".3f")


def table(seeds: Seeds, methods: Mapping[str, str], columns: Sequence[Column]) -> str:
    """One row per method that was run, mean ± standard deviation over the seeds."""
    rows = {}
    for method, title in methods.items():
        runs = [methods_of_seed[method] for methods_of_seed in seeds.values() if method in methods_of_seed]
        if runs:
            some = "" if len(runs) == len(seeds) else f" ({len(runs)} of {len(seeds)} seeds)"
            rows[f"{title}{some}"] = [cell([value(run) for run in runs], form) for _, value, form in columns]
    return markdown([heading for heading, _, _ in columns], rows)


def markdown(headings: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = ["| | " + " | ".join(headings) + " |", "|---|" + "--:|" * len(headings)]
    return "\n".join([*lines, *(f"| {title} | " + " | ".join(cells) + " |" for title, cells in rows.items())])


def cell(values: Sequence[float | None], form: str) -> str:
    """The mean of what was judged, ± the standard deviation of several values."""
    judged = [value for value in values if value is not None]
    if not judged:
        return NOT_JUDGED
    form, _, unit = form.partition(" ")
    spread = stdev(judged) if len(judged) > 1 else 0.0
    text = f"{mean(judged):{form}}" + (f" ± {spread:{form}}" if spread else "")
    return f"{text} {unit}".rstrip()
