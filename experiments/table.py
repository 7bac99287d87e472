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
        return 100 * mean(mean(each["auroc"] for each in found[name].values()) for name in groups)

    return value


def cost_of(single: Run) -> Column:
    """Multiply-adds, one model's being 1."""
    return ("work", lambda run: run["multiply_adds"] / single["multiply_adds"], ".2f")


ACCURACY: Column = ("Acc ↑", lambda run: 100 * run["id"]["accuracy"], ".2f")
ECE: Column = ("ECE ↓", lambda run: run["id"]["ece"], ".3f")
TEMPERED_ECE: Column = ("ECE, temperature ↓", lambda run: run["tempered"] and ECE[1](run["tempered"]), ".3f")
BOTH: Column = ("AUROC ↑", auroc(), ".1f")
BY_ENERGY: Column = ("AUROC by energy ↑", auroc("energy"), ".1f")


def table(seeds: Seeds, methods: Mapping[str, str], columns: Sequence[Column]) -> str:
    """One row per method that was run, mean ± standard deviation over the seeds."""
    lines = ["| | " + " | ".join(heading for heading, _, _ in columns) + " |", "|---|" + "--:|" * len(columns)]
    for method, title in methods.items():
        runs = [methods_of_seed[method] for methods_of_seed in seeds.values() if method in methods_of_seed]
        if runs:
            found = [[each for run in runs if (each := value(run)) is not None] for _, value, _ in columns]
            cells = [
                cell(values, form) if values else NOT_JUDGED
                for values, (_, _, form) in zip(found, columns, strict=True)
            ]
            some = "" if len(runs) == len(seeds) else f" ({len(runs)} of {len(seeds)} seeds)"
            lines.append(f"| {title}{some} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(values: list[float], form: str) -> str:
    form, _, unit = form.partition(" ")
    spread = stdev(values) if len(values) > 1 else 0.0
    text = f"{mean(values):{form}}" + (f" ± {spread:{form}}" if spread else "")
    return f"{text} {unit}".rstrip()


def set_columns(seeds: Seeds) -> list[Column]:
    """AUROC on each data set."""
    example = next(iter(next(iter(seeds.values())).values()))
    return [
        (
            f"{name} ({group})",
            lambda run, group=group, name=name: 100 * run["ood"]["msp"][group][name]["auroc"],
            ".1f",
        )
        for group, sets in example["ood"]["msp"].items()
        for name in sets
    ]
