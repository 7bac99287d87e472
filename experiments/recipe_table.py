"""The tables of `recipe.py`'s results: rates, ingredients, and what a budget of trainings buys."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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


HEADLINES: tuple[Column, ...] = (
    ("accuracy", test("accuracy", 100), ".1f %"),
    ("AURC x 1000", test("aurc", 1000), ".1f"),
    ("NLL", test("nll_with_temperature"), ".3f"),
)
SHARED_LAYERS = 11  # of a run's twelve, on the front pages
FRONT = ("trained", "the default", "Deep Ensemble")  # the three methods that README shows


def render(content: dict[str, Any]) -> dict[str, str]:
    """All tables of a results file by name."""
    rows = [row for row in content["rows"] if row["kind"] != "error"]
    usual = content["usual"]
    tables = {
        "rates": table_of_rates(rows, usual),
        "small": table_of_batches(rows, usual),
        "ingredients": table_of_ingredients(rows, usual),
        "dial": table_of_budgets(content),
        "summary": table_of_headliners(content),
        "front": table_of_headliners(content, FRONT),
        "fusing": table_of_fusing(content),
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


@dataclass(frozen=True)
class Budget:
    """What a method costs and reaches.

    kind: of its rows: "training", "ensemble", "fused", "fused apart" or "soup"
    members, trunk: of each training
    epochs: of each training
    count: of the trainings that it is made of; 0 for one
    merged: the layers that fusing merged
    trainings: what it costs to train, one model's usual training being 1
    work: its multiply-adds, one model's being 1
    rows: of each seed
    """

    kind: str
    members: int
    trunk: int
    epochs: int
    count: int
    merged: int
    trainings: float
    work: float
    rows: Sequence[Row]

    @property
    def name(self) -> str:
        return name_of(self.kind, self.members, self.trunk, self.epochs, self.count, self.merged)


def is_of_budgets(row: Row, content: dict[str, Any]) -> bool:
    """Whether a row has the recipe of the table of budgets, but perhaps another number of epochs."""
    return differences(row["plan"]["recipe"], content["recipe_of_budgets"]) <= {"epochs"}


def budgets(content: dict[str, Any]) -> list[Budget]:
    """Return the methods of a results file, the cheapest training first."""
    rows = [row for row in content["rows"] if row["kind"] != "error"]
    by_method: dict[tuple, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if is_of_budgets(row, content):
            seed = row.get("seed", row["plan"]["seed"])
            by_method[method_of(row)][seed] = row

    work_of_runs = {
        row_shape(row): row["work"] / content["work_of_one_model"] for row in rows if row["kind"] == "training"
    }
    found = []
    for method, by_seed in by_method.items():
        of_method = list(by_seed.values())
        kind, members, trunk, epochs, count, _ = method
        # A plain model is run by Transformers, whose last layer computes every token.
        work_of_run = 1.0 if members == 1 else work_of_runs[members, trunk]
        trainings = max(1, count) * epochs / content["epochs_of_one_training"] * work_of_run
        work = work_of_run
        if kind.startswith("fused"):
            work = mean(row["work"] for row in of_method) / content["work_of_one_model"]
        elif kind == "ensemble":
            work = count * work_of_run
        found.append(Budget(*method, trainings, work, of_method))
    return sorted(found, key=lambda budget: (round(budget.trainings, 1), round(budget.work, 2)))


def table_of_budgets(content: dict[str, Any]) -> str:
    """What methods reach, by the trainings that they cost: means over seeds, with deviations."""
    lines = {}
    for budget in budgets(content):
        cells = [cell([value(row) for row in budget.rows], form) for _, value, form in JUDGED]
        lines[budget.name] = [f"{budget.trainings:.1f}", f"{budget.work:.2f}", str(len(budget.rows)), *cells]
    return markdown(["trainings", "work", "seeds", *(heading for heading, *_ in JUDGED)], lines)


# The few methods that a front page shows


def headliners(content: dict[str, Any]) -> dict[str, Budget]:
    """Return six methods by their names on the front pages, as far as the file has them."""
    epochs = content["epochs_of_one_training"]
    longer = content["recipe_of_budgets"]["epochs"]
    wanted = {
        "One model": ("training", 1, epochs, 0),
        "One model, trained three times as long": ("training", 1, 3 * epochs, 0),
        "Hydra: one run of three members, `finetune(runs=1)`": ("training", 3, longer, 0),
        "**Hydra: two runs of three, fused: the default**": ("fused apart", 3, longer, 2),
        "The mean of two models' weights (a soup)": ("soup", 1, longer, 2),
        "Deep Ensemble of three": ("ensemble", 1, epochs, 3),
    }
    by_method = {}
    for budget in budgets(content):
        # Of runs, those that share most of their layers.
        if budget.members == 1 or budget.trunk == SHARED_LAYERS:
            by_method[budget.kind, budget.members, budget.epochs, budget.count] = budget
    return {name: by_method[method] for name, method in wanted.items() if method in by_method}


def table_of_headliners(content: dict[str, Any], names: Sequence[str] | None = None) -> str:
    """What a front page shows of the methods: cost, accuracy, ranking and NLL."""
    lines = {}
    for name, budget in headliners(content).items():
        if names is not None and not any(part in name for part in names):
            continue
        cells = [cell([value(row) for row in budget.rows], form) for _, value, form in HEADLINES]
        lines[name] = [f"{budget.trainings:.1f}", f"{budget.work:.2f}", *cells]
    return markdown(["trainings", "work", *(heading for heading, *_ in HEADLINES)], lines)


def ways_to_fuse(content: dict[str, Any]) -> dict[int, Budget]:
    """Return three models run apart (0), and fused with so many layers merged and their MLPs apart, as far as the file has them."""
    found = {}
    for budget in budgets(content):
        is_of_three = budget.count == 3 and budget.members == 1 and budget.epochs == content["epochs_of_one_training"]
        if is_of_three and budget.kind in ("ensemble", "fused apart"):
            found[budget.merged] = budget
    return dict(sorted(found.items()))


def table_of_fusing(content: dict[str, Any]) -> str:
    """What merging layers of three models saves, and what becomes of them."""
    lines = {}
    for merged, budget in ways_to_fuse(content).items():
        cells = [cell([value(row) for row in budget.rows], form) for _, value, form in HEADLINES]
        name = f"{merged} merged" if merged else "none: three models run apart"
        lines[name] = [f"{budget.work:.2f}", *cells]
    return markdown(["work", *(heading for heading, *_ in HEADLINES)], lines)


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
