"""The tables of `recipe.py`'s results: rates, ingredients, and what a budget of trainings buys."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any

from .table import NOT_JUDGED, cell, markdown


Row = dict[str, Any]  # of a results file
Column = tuple[str, Callable[[Row], float], str]  # heading, value, format

NAMES = {
    "epochs": "{} epochs",
    "mixing": "mixing in {:.0%} of the steps",
    "classifier_rate": "classifier at {:g}",
    "drop_path": "drop path {}",
    "crop": "crops from {:.0%} of the area",
    "colour": "colours changed by up to {:.0%}",
    "dropout": "dropout {}",
    "r_drop": "R-Drop",
    "batch_size": "batches of {}",
}


def test(name: str, factor: float = 1.0) -> Callable[[Row], float]:
    return lambda row: factor * row["test"][name]


def detection(group: str) -> Callable[[Row], float]:
    """The mean of the AUROCs by msp and by energy, in percent."""
    names = (f"{group}_msp_auroc", f"{group}_energy_auroc")
    return lambda row: 100 * mean(row["test"][name] for name in names)


JUDGED: tuple[Column, ...] = (
    ("accuracy", test("accuracy", 100), ".1f"),
    ("AURC x 1000", test("aurc", 1000), ".1f"),
    ("NLL", test("nll_with_temperature"), ".3f"),
    ("near", detection("near"), ".1f"),
    ("far", detection("far"), ".1f"),
    ("answered at 5 %", test("calibrated_answered", 100), ".1f"),
)


def render(content: dict[str, Any]) -> dict[str, str]:
    """All tables of a results file by name."""
    rows = [row for row in content["rows"] if row["kind"] != "error"]
    usual = content["usual"]
    tables = {
        "rates": table_of_rates(rows, usual),
        "small": table_of_batches(rows, usual),
        "ingredients": table_of_ingredients(rows, usual),
        "dial": table_of_budgets(rows, content),
    }
    about = ", ".join(content["machine"][part] for part in ("machine", "versions", "date"))
    return tables | {"machine": f"{about}."}


def table_of_rates(rows: Sequence[Row], usual: dict[str, Any]) -> str:
    """Validation accuracy and NLL by learning rate and by how fast it falls."""
    found = {}
    for row in single_models(rows):
        recipe = row["plan"]["recipe"]
        if differences(recipe, usual) <= {"learning_rate", "layer_decay"} and row["plan"]["seed"] == 0:
            found[recipe["layer_decay"], recipe["learning_rate"]] = row["validation"]
    rates = sorted({rate for _, rate in found})
    lines = {}
    for decay in sorted({decay for decay, _ in found}):
        lines[f"{decay:g}"] = [accuracy_and_nll(found.get((decay, rate))) for rate in rates]
    return markdown([f"{rate:g}" for rate in rates], lines)


def table_of_batches(rows: Sequence[Row], usual: dict[str, Any]) -> str:
    """Validation accuracy and NLL by learning rate and by the rows of a batch."""
    found = {}
    for row in single_models(rows):
        recipe = row["plan"]["recipe"]
        if differences(recipe, usual) <= {"learning_rate", "batch_size"} and row["plan"]["seed"] == 0:
            found[recipe["batch_size"], recipe["learning_rate"]] = row["validation"]
    rates = sorted({rate for _, rate in found})
    lines = {}
    for batch_size in sorted({batch_size for batch_size, _ in found}):
        cells = [accuracy_and_nll(found.get((batch_size, rate))) for rate in rates]
        lines[f"batches of {batch_size}"] = cells
    return markdown([f"{rate:g}" for rate in rates], lines)


def accuracy_and_nll(values: dict[str, float] | None) -> str:
    if values is None:
        return NOT_JUDGED
    return f"{100 * values['accuracy']:.1f} / {values['nll_with_temperature']:.3f}"


def table_of_ingredients(rows: Sequence[Row], usual: dict[str, Any]) -> str:
    """One change of the usual recipe at a time: validation and test rows."""
    lines = {}
    for row in single_models(rows):
        recipe = row["plan"]["recipe"]
        changed = differences(recipe, usual)
        is_change = len(changed) <= 1 and not changed & {"learning_rate", "layer_decay"}
        if not is_change or row["plan"]["seed"] != 0:
            continue
        name = "the usual recipe"
        for field in changed:
            name = NAMES[field].format(recipe[field])
        lines[name] = [
            f"{100 * row[part][metric] * scale:.{digits}f}"
            for metric, scale, digits in (
                ("accuracy", 1, 1),
                ("aurc", 10, 1),
                ("nll_with_temperature", 0.01, 3),
            )
            for part in ("validation", "test")
        ]
    headings = ["accuracy", "... test", "AURC x 1000", "... test", "NLL", "... test"]
    return markdown(headings, dict(sorted(lines.items(), key=lambda line: line[0] != "the usual recipe")))


def table_of_budgets(rows: Sequence[Row], content: dict[str, Any]) -> str:
    """What methods reach, by the trainings that they cost: means over seeds, with deviations."""
    by_method: dict[tuple, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if differences(row["plan"]["recipe"], content["recipe_of_budgets"]) <= {"epochs"}:
            seed = row.get("seed", row["plan"]["seed"])
            by_method[method_of(row)][seed] = row

    work_of_runs = {
        row_shape(row): row["work"] / content["work_of_one_model"] for row in rows if row["kind"] == "training"
    }
    lines = {}
    for method, by_seed in by_method.items():
        found = list(by_seed.values())
        kind, members, trunk, epochs, count, _ = method
        # A plain model is run by Transformers, whose last layer computes every token.
        work_of_run = 1.0 if members == 1 else work_of_runs[members, trunk]
        trainings = max(1, count) * epochs / content["epochs_of_one_training"] * work_of_run
        work = work_of_run
        if kind.startswith("fused"):
            work = mean(row["work"] for row in found) / content["work_of_one_model"]
        elif kind == "ensemble":
            work = count * work_of_run
        cells = [cell([value(row) for row in found], form) for _, value, form in JUDGED]
        lines[name_of(*method)] = [f"{trainings:.1f}", f"{work:.2f}", str(len(found)), *cells]
    ordered = dict(sorted(lines.items(), key=lambda line: (float(line[1][0]), float(line[1][1]))))
    return markdown(["trainings", "work", "seeds", *(heading for heading, *_ in JUDGED)], ordered)


def method_of(row: Row) -> tuple[str, int, int, int, int, int]:
    members, trunk = row_shape(row)
    return row["kind"], members, trunk, row["plan"]["recipe"]["epochs"], row.get("count", 0), row.get("merged", 0)


def row_shape(row: Row) -> tuple[int, int]:
    """Return how many members a run has, and how many layers they share."""
    return row["plan"]["members"], row["plan"]["trunk"]


def name_of(kind: str, members: int, trunk: int, epochs: int, count: int, merged: int) -> str:
    """Return a method in words."""
    what = "models" if members == 1 else f"runs of {members} members, {trunk} layers shared"
    if kind == "training" and members == 1:
        return f"One model, {epochs} epochs"
    if kind == "training":
        return f"One run of {members} members, {trunk} layers shared, {epochs} epochs"
    if kind.startswith("fused"):
        layers = f", {merged} layers merged" if members == 1 else ""
        layers += ", MLPs apart" if kind == "fused apart" else ""
        return f"**{count} {what}, {epochs} epochs each, fused{layers}**"
    if kind == "soup":
        return f"Soup of {count} models, {epochs} epochs each"
    return f"Deep Ensemble of {count} {what}, {epochs} epochs each"


def single_models(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of plain models that were trained once."""
    return [row for row in rows if row["kind"] == "training" and row["plan"]["members"] == 1]


def differences(recipe: dict[str, Any], usual: dict[str, Any]) -> set[str]:
    return {name for name, value in recipe.items() if usual[name] != value}
