"""What methods reach under shift, as a markdown table in the manner of the paper's tables 13 and 14."""

from collections.abc import Callable, Mapping
from statistics import mean

from .table import ACCURACY, Column, Run, Seeds, table


def shifted(metric: str, severity: int | None = None) -> Callable[[Run], float | None]:
    """The mean of a metric over corruptions and severities, or over one severity; None where the method was not judged
    under shift."""

    def value(run: Run) -> float | None:
        if "shift" not in run:
            return None
        places = [n for n, each in enumerate(run["shift"]["severities"]) if severity in (None, each)]
        found = [sweep[metric][place] for sweep in run["shift"]["corruptions"].values() for place in places]
        return mean(found) if found else None

    return value


def in_percent(value: Callable[[Run], float | None]) -> Callable[[Run], float | None]:
    return lambda run: None if (found := value(run)) is None else 100 * found


def shift_table(seeds: Seeds, rows: Mapping[str, str]) -> str:
    """Accuracy by severity, then averages over corruptions and severities.

    seeds: with each run's twin under "tempered", which has a temperature
    """
    judged = [run["shift"] for methods in seeds.values() for run in methods.values() if "shift" in run]
    if not judged:
        return "Not judged yet."
    columns: list[Column] = [("Acc ↑, clean", *ACCURACY[1:])]
    columns += [(f"severity {each}", in_percent(shifted("accuracy", each)), ".2f") for each in judged[0]["severities"]]
    columns += [
        ("average", in_percent(shifted("accuracy")), ".2f"),
        ("ECE ↓", shifted("ece"), ".3f"),
        ("… with a temperature", lambda run: shifted("ece")(run.get("tempered") or {}), ".3f"),
        ("AUROC ↑", in_percent(shifted("ood_auroc")), ".1f"),
    ]
    return table(seeds, rows, columns)
