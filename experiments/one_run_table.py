"""The results of `one_run.py` as a markdown table."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from .one_run import SEEDS, Row
from .table import cell, markdown


HEADINGS = (
    *("work", "trainings", "accuracy", "AURC x 1000", "answered at 5 % errors", "… with near rows"),
    *("near AUROC, msp / energy", "far AUROC, msp / energy"),
)
# In the order of the table; a method that has no place here comes last.
ORDER = ("One model", "One run", "Three checkpoints", "Soup", "Deep Ensemble")


def render(content: Mapping[str, Any]) -> str:
    """A row per method with all seeds; of several learning rates, that with the best mean Brier score on validation rows."""
    variants: dict[str, dict[tuple, list[Row]]] = {}
    rows = [row for row in content["rows"] if "error" not in row]
    epochs = min(row["run"]["epochs"] for row in rows if row["name"] == "one model")
    for row in rows:
        rates = tuple(str(row["run"].get(name)) for name in ("learning_rate", "branch_rate", "loss", "shared"))
        variants.setdefault(title_of(row, epochs), {}).setdefault(rates, []).append(row)
    finished = {
        title: [runs for runs in by_rate.values() if len(judged(runs)) == len(SEEDS)]
        for title, by_rate in variants.items()
    }
    chosen = {title: min(by_rate, key=validation_brier) for title, by_rate in finished.items() if by_rate}
    one_model = chosen["One model"][0]["work"]
    order = sorted(
        chosen, key=lambda title: next(n for n, start in enumerate((*ORDER, "")) if title.startswith(start))
    )
    return markdown(HEADINGS, {title: cells(chosen[title], one_model, epochs) for title in order})


def judged(rows: list[Row]) -> list[Row]:
    """Those that learning rates are chosen by; of one model there are more, for Deep Ensembles."""
    return [row for row in rows if row["run"]["seed"] in SEEDS]


def validation_brier(rows: list[Row]) -> float:
    return mean(row["validation"]["brier"] for row in judged(rows))


def title_of(row: Row, epochs: int) -> str:
    name, run = row["name"], row["run"]
    if name == "one model":
        longer = run["epochs"] / epochs
        return "One model" if longer == 1 else f"One model, trained {longer:g} times as long"
    if name == "one run":
        members = "" if run["members"] == 3 else f"{run['members']} members, "
        return f"One run, {members}{run['trunk']} layers shared, {run['epochs']} epochs"
    if name.startswith("fused"):
        return f"Three checkpoints fused, {run['trunk'] or 'no'} layers merged"
    if name.startswith("soup"):
        return f"Soup of three, tuned {run['epochs']} epochs" if "tuned" in name else "Soup of three"
    return name


def cells(rows: list[Row], one_model: int, epochs: int) -> list[str]:
    work, trainings = cost_of(rows[0], one_model, epochs)

    def percent(metric: str) -> str:
        return cell([100 * row["test"][metric] for row in rows], ".1f").partition(" ")[0]

    return [
        f"{work:.2f}",
        f"{trainings:.2f}",
        cell([100 * row["test"]["accuracy"] for row in rows], ".2f %"),
        f"{1000 * mean(row['test']['aurc'] for row in rows):.1f}",
        f"{percent('answered_at_5')} %",
        f"{percent('answered_at_5_with_near')} %",
        *(f"{percent(f'{group}_msp')} / {percent(f'{group}_energy')}" for group in ("near", "far")),
    ]


def cost_of(row: Row, one_model: int, epochs: int) -> tuple[float, float]:
    """Multiply-adds, those of one model being 1; and training, one fine-tuning of one model being 1."""
    name, run = row["name"], row["run"]
    if name.startswith("Deep Ensemble"):
        count = int(name.split()[-1])
        return float(count), float(count)
    work, passes = row["work"] / one_model, run["epochs"] / epochs
    if name.startswith(("fused", "soup")):
        return work, 3 + (passes if "tuned" in name else 0)
    return work, work * passes
