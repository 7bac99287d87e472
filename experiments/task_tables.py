"""The results of `tasks.py` as markdown tables."""

import math
from collections.abc import Mapping
from typing import Any

from .table import NOT_JUDGED, Column, Run, Seeds, cell, table


NOT_RUN: dict[str, Any] = {"tasks": {}}
COUNTS = ("1", "4", "16", "64", "256")  # of the best of n


def value(run: Run, metric: str, times: float = 1.0, elsewhere: str | None = None) -> float | None:
    """A metric on the test rows, or on those of a set from elsewhere; None where there is none."""
    found = (run["metrics"] if elsewhere is None else run.get("ood", {}).get(elsewhere, {})).get(metric)
    return None if found is None or math.isnan(found) else times * found


def column(title: str, metric: str, form: str = ".3f", times: float = 1.0, elsewhere: str | None = None) -> Column:
    return title, lambda run: value(run, metric, times, elsewhere), form


NUMBERS = [
    ("RMSE ↓", "rmse"),
    ("Pearson ↑", "pearson"),
    ("Spearman ↑", "spearman"),
    ("AURC ↓", "aurc"),
    ("width of intervals ↓", "interval_width", ".2f"),
]
LABELS = [
    ("mAP ↑", "map"),
    ("F1 micro ↑", "f1_micro"),
    ("F1 macro ↑", "f1_macro"),
    ("ECE ↓", "ece", ".4f"),
    ("size of sets ↓", "set_size", ".2f"),
    ("all right, of answered ↑", "answered_right", ".1f %", 100),
]
TOKENS = [
    ("entity F1 ↑", "entity_f1"),
    ("entity AURC ↓", "entity_aurc"),
    ("word ECE ↓", "ece", ".4f"),
    ("word NLL ↓", "nll"),
    ("entities answered ↑", "answered", ".1f %", 100),
]
REWARDS = [
    ("pair accuracy ↑", "pair_accuracy", ".1f %", 100),
    ("AUROC of wrong pairs ↑", "wrong_pairs_auroc"),
]
# Of each promise: its words, the task, the metric that shows whether it was kept, and the set from elsewhere if it is one.
PROMISES = [
    ("numbers: at least 90 % in their interval", "numbers", "interval_coverage", None),
    ("… forums, where nothing is promised", "numbers", "interval_coverage", "forums"),
    ("several labels: at most 10 % of a row's labels missed", "several labels", "set_missed", None),
    ("several labels: at least 90 % of the rows answered", "several labels", "answered", None),
    ("tokens: at most 10 % of the answered entities wrong", "tokens", "answered_risk", None),
    ("… social media, where nothing is promised", "tokens", "answered_risk", "social media"),
]


def render(content: Mapping[str, Any]) -> dict[str, str]:
    """All tables by name, `tasks/table`; empty ones of tasks that were not run."""
    tasks = content["tasks"]
    seeds = max((len(each) for each in tasks.values()), default=0)
    about = ", ".join(str(content.get(name)) for name in ("machine", "versions", "date"))
    best_of: list[Column] = [
        (f"best of {n} ↑", lambda run, n=n: run["metrics"]["best_of"].get(n), ".2f") for n in COUNTS
    ]
    foreign = [column(f"AUROC, {name} ↑", "auroc", elsewhere=name) for name in ("amazon_snippets", "trec")]
    return {
        "tasks/machine": f"{about}, {seeds} seeds." if seeds else "Not run yet.",
        "tasks/promises": promises_table(tasks),
        "tasks/numbers": _table(tasks, "numbers", [column(*each) for each in NUMBERS]),
        "tasks/numbers-elsewhere": _table(tasks, "numbers", _elsewhere(NUMBERS, "forums")),
        "tasks/labels": _table(tasks, "several labels", [*(column(*each) for each in LABELS), *foreign]),
        "tasks/tokens": _table(tasks, "tokens", [column(*each) for each in TOKENS]),
        "tasks/tokens-elsewhere": _table(tasks, "tokens", _elsewhere(TOKENS, "social media")),
        "tasks/rewards": _table(tasks, "rewards", [*(column(*each) for each in REWARDS), *best_of]),
    }


def _elsewhere(columns: list[tuple], name: str) -> list[Column]:
    return [column(*each, elsewhere=name) for each in [*columns, ("AUROC ↑", "auroc")]]


def _table(tasks: Mapping[str, Seeds], task: str, columns: list[Column]) -> str:
    seeds = tasks.get(task, {})
    return table(seeds, {title: title for run in seeds.values() for title in run}, columns)


def promises_table(tasks: Mapping[str, Seeds]) -> str:
    """A row per promise, a column per method: the share that shows whether it was kept, in %."""
    promised = {task: seeds for task, seeds in tasks.items() if task != "rewards"}
    methods = list(dict.fromkeys(title for seeds in promised.values() for run in seeds.values() for title in run))
    lines = [f"| asked for | {' | '.join(methods)} |", "|---|" + "--:|" * len(methods)]
    for words, task, metric, elsewhere in PROMISES:
        cells = []
        for method in methods:
            runs = [run[method] for run in promised.get(task, {}).values() if method in run]
            found = [each for run in runs if (each := value(run, metric, 100, elsewhere)) is not None]
            cells.append(cell(found, ".1f") if found else NOT_JUDGED)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)
