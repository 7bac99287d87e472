"""The results of `one_run.py` as markdown tables, and the intervals of differences between methods.

python -m experiments.one_run_table experiments/results/one-run-images.json      # adds the intervals to the file
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from hydra_transformers._io.files import write_atomically

from .comparators import MEMBERS, MIMO_ROWS, SAMPLES
from .runs import SEEDS, Row
from .table import NOT_JUDGED, cell, markdown


HEADINGS = (
    *("work", "trainings", "accuracy", "AURC x 1000", "answered at 5 % errors", "… with near rows"),
    "calibrated to 5 %: answered / wrong",
    *("near AUROC, msp / energy", "far AUROC, msp / energy", "NLL", "ECE, temperature"),
)
TITLES = {
    "LoRA ensemble": f"LoRA ensemble of {MEMBERS}",
    "BatchEnsemble": f"BatchEnsemble of {MEMBERS}",
    "MIMO": f"MIMO of {MEMBERS}",
    "MC Dropout": f"MC Dropout, {SAMPLES} passes",
    "Laplace": "Laplace on the last layer",
    "Hydra, Taylor": "Hydra pruned from one model, Taylor",
    "Hydra, circuits": "Hydra pruned from one model, circuits",
}
# In the order of the table; a method that has no place here comes last.
ORDER = ("One model", "One run", "Three checkpoints", "Soup", "Deep Ensemble", "Hydra pruned", *TITLES.values())
LONGER = "One model, trained"
COMPARED = ("One model", LONGER, "Deep Ensemble of 3")  # or what begins so
SHOWN_DIFFERENCES = ("One model,", "One run", "Soup of three,", "Deep Ensemble")  # the file has all
DRAWS = 1_000  # of the bootstrap


def render(content: Mapping[str, Any]) -> dict[str, str]:
    """ "": a row per method with all seeds; "/differences": to those of `COMPARED`"""
    published = chosen_rows(content)
    epochs = epochs_of(content["rows"])
    one_model = published["One model"][0]["work"]
    columns = zip(HEADINGS, *(cells(rows, one_model, epochs) for rows in published.values()), strict=True)
    headings, *shown = zip(*(column for column in columns if set(column[1:]) != {NOT_JUDGED}), strict=True)
    tables = {"": markdown(headings, dict(zip(published, shown, strict=True)))}
    if "differences" in content:
        compared = compared_of(content["differences"]["One model"])
        headings = [
            f"{what}, to {other}" for other in compared for what in ("accuracy", "AURC x 1000", "near AUROC, msp")
        ]
        rows = {
            title: [interval(to[other], what) for other in compared for what in ("accuracy", "aurc", "near")]
            for title, to in content["differences"].items()
            if title.startswith(SHOWN_DIFFERENCES)
        }
        tables["/differences"] = markdown(headings, rows)
    return tables


def chosen_rows(content: Mapping[str, Any]) -> dict[str, list[Row]]:
    """By title, in the order of the table, the row of each seed; of several learning rates those with the best mean Brier score on
    validation rows. A method without all published seeds is left out."""
    variants: dict[str, dict[tuple, list[Row]]] = {}
    rows = content["rows"]
    seeds = content.get("seeds", SEEDS)
    epochs = epochs_of(rows)
    for row in rows:
        if "error" not in row and row["run"]["seed"] in seeds:
            rates = tuple(
                str(row["run"].get(name)) for name in ("learning_rate", "branch_rate", "loss", "shared", "batch")
            )
            variants.setdefault(title_of(row, epochs), {}).setdefault(rates, []).append(row)
    chosen = {}
    for title, by_rate in variants.items():
        finished = [runs for runs in by_rate.values() if len(runs) == len(seeds)]
        if finished:
            chosen[title] = sorted(min(finished, key=validation_brier), key=lambda row: row["run"]["seed"])
    places = {title: next(n for n, start in enumerate((*ORDER, "")) if title.startswith(start)) for title in chosen}
    return {title: chosen[title] for title in sorted(chosen, key=places.__getitem__)}


def compared_of(titles: Iterable[str]) -> list[str]:
    """Those of `COMPARED`, in their order."""
    found = [[title for title in titles if title == start or title.startswith(f"{start} ")] for start in COMPARED]
    return [title for of_start in found for title in of_start[:1]]


def epochs_of(rows: Sequence[Row]) -> int:
    """Of the usual training of one model."""
    return min(row["run"]["epochs"] for row in rows if row["name"] == "one model")


def validation_brier(rows: list[Row]) -> float:
    return mean(row["validation"]["brier"] for row in rows)


def title_of(row: Row, epochs: int) -> str:
    name = row["name"]
    run = row["run"]
    if name == "one model":
        longer = run["epochs"] / epochs
        return "One model" if longer == 1 else f"{LONGER} {longer:.3g} times as long"
    if name == "one run":
        members = "" if run["members"] == 3 else f"{run['members']} members, "
        return f"One run, {members}{run['trunk']} layers shared, {run['epochs']} epochs"
    if name.startswith("fused"):
        return f"Three checkpoints fused, {run['trunk'] or 'no'} layers merged"
    if name.startswith("soup"):
        plural = "" if run["epochs"] == 1 else "s"
        return f"Soup of three, tuned {run['epochs']} epoch{plural}" if "tuned" in name else "Soup of three"
    return TITLES.get(name, name)


def cells(rows: list[Row], one_model: int, epochs: int) -> list[str]:
    work, trainings = cost_of(rows[0], one_model, epochs)

    is_calibrated = all("calibrated_answered" in row["test"] for row in rows)

    def percent(metric: str) -> str:
        return cell([100 * row["test"][metric] for row in rows], ".1f").partition(" ")[0]

    def average(metric: str) -> str:
        judged = [row["test"][metric] for row in rows if metric in row["test"]]
        return f"{mean(judged):.3f}" if judged else NOT_JUDGED

    return [
        f"{work:.2f}",
        f"{trainings:.2f}",
        cell([100 * row["test"]["accuracy"] for row in rows], ".2f %"),
        f"{1000 * mean(row['test']['aurc'] for row in rows):.1f}",
        f"{percent('answered_at_5')} %",
        f"{percent('answered_at_5_with_near')} %",
        f"{percent('calibrated_answered')} / {percent('calibrated_errors')} %" if is_calibrated else NOT_JUDGED,
        *(f"{percent(f'{group}_msp')} / {percent(f'{group}_energy')}" for group in ("near", "far")),
        average("nll"),
        average("ece_with_temperature"),
    ]


def cost_of(row: Row, one_model: int, epochs: int) -> tuple[float, float]:
    """Multiply-adds, those of one model being 1; and training, one fine-tuning of one model being 1."""
    name = row["name"]
    run = row["run"]
    if name.startswith("Deep Ensemble"):
        count = int(name.split()[-1])
        return float(count), float(count)
    work = row["work"] / one_model
    passes = run["epochs"] / epochs
    if name.startswith(("fused", "soup")):
        return work, 3 + (passes if "tuned" in name else 0)
    if name.startswith("Hydra"):
        return work, 1 + work * passes
    by_name = {"LoRA ensemble": MEMBERS, "BatchEnsemble": MEMBERS, "MIMO": MIMO_ROWS["repetitions"]}
    return work, passes * (by_name.get(name, 1) if name in TITLES else work)


# Differences


def interval(values: Mapping[str, Sequence[float]], what: str) -> str:
    """A difference with its interval, accuracy and AUROC in points; a dash for a method to itself."""
    if not any(values[what]):
        return "-"
    times, form = {"accuracy": (100, "+.2f"), "aurc": (1000, "+.1f"), "near": (100, "+.1f")}[what]
    middle, low, high = (f"{times * value:{form}}" for value in values[what])
    return f"{middle} ({low} to {high})"


def differences(content: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """{title: {other title: {metric: [difference, low, high]}}}: 95 % intervals of paired bootstraps over rows and seeds."""
    seeds = content.get("seeds", SEEDS)
    places = {id(row): place for place, row in enumerate(content["rows"])}
    published = {title: [places[id(row)] for row in of_title] for title, of_title in chosen_rows(content).items()}
    first = published["One model"][0]
    random = np.random.default_rng(0)

    def draw(name: str) -> np.ndarray:
        count = len(values[f"{first}/{name}"])
        drawn = random.multinomial(count, np.full(count, 1 / count), DRAWS)
        return np.vstack([np.ones(count), drawn]).astype("float32")  # the first draw is the data as they are

    weights = draw("sure")
    drawn = np.vstack([np.arange(len(seeds)), random.integers(len(seeds), size=(DRAWS, len(seeds)))])
    near_weights = draw("near")
    measured = {}
    for title, of_seeds in published.items():
        by_seed = [drawn_metrics(values, place, weights, near_weights) for place in of_seeds]  # (draws,) each
        measured[title] = {name: np.stack([metrics[name] for metrics in by_seed]) for name in by_seed[0]}
    found: dict[str, Any] = {}
    one_run = next(title for title in published if title.startswith("One run"))
    for title in published:
        for other in [*compared_of(published), one_run]:
            for name, ours in measured[title].items():
                gains = np.take_along_axis(ours - measured[other][name], drawn.T, axis=0).mean(axis=0)
                three = [gains[0], *np.quantile(gains[1:], (0.025, 0.975))]
                found.setdefault(title, {}).setdefault(other, {})[name] = [float(f"{value:.4g}") for value in three]
    return found


def drawn_metrics(
    values: Mapping[str, np.ndarray], place: int, weights: np.ndarray, near_weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Accuracy, AURC, and the AUROC of all near rows by the maximum probability, (draws,) each.

    weights, near_weights: (draws, rows) how often each row was drawn
    """
    sure, right, near = (values[f"{place}/{name}"] for name in ("sure", "right", "near"))
    wrong = 1.0 - np.unpackbits(right, count=len(sure))
    order = np.argsort(-sure.astype("float32"), kind="stable")
    weights = weights[:, order]
    wrong = wrong[order].astype("float32")
    # rows that are equally sure come in no order: each has their mean error
    starts = np.unique(-sure[order].astype("float32"), return_index=True)[1]
    tied = np.add.reduceat(weights * wrong, starts, axis=1) / np.maximum(np.add.reduceat(weights, starts, axis=1), 1)
    wrong = np.repeat(tied, np.diff([*starts, len(sure)]), axis=1)
    covered = weights.cumsum(axis=1)
    errors = (weights * wrong).cumsum(axis=1)
    risks = (weights * errors / np.maximum(covered, 1)).sum(axis=1) / len(sure)
    # how many rows are surer than each near row, ties counted half
    surer = [
        np.searchsorted(-sure[order].astype("float32"), -near.astype("float32"), side) for side in ("left", "right")
    ]
    covered = np.pad(covered, ((0, 0), (1, 0)))
    detected = (covered[:, surer[0]] + covered[:, surer[1]]) * near_weights / 2
    auroc = detected.sum(axis=1) / len(sure) / len(near)
    return {"accuracy": 1 - errors[:, -1] / len(sure), "aurc": risks, "near": auroc}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the results file; its .npz lies beside it")
    path = parser.parse_args(words).file
    content = json.loads(path.read_text())
    content["differences"] = differences(content, dict(np.load(path.with_suffix(".npz"))))
    write_atomically(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
