"""What methods reach under shift, as markdown tables in the manner of the paper's tables 13 and 14."""

from collections.abc import Callable, Mapping
from statistics import mean

from .table import Column, Run, Seeds, table


NAMES = ("accuracy", "brier", "quality", "temperature", "corruptions")


def shifted(metric: str, severity: int | None = None, corruption: str | None = None) -> Callable[[Run], float | None]:
    """The mean of a metric over corruptions and severities, or over those of one severity or corruption; None where the
    method was not judged under shift."""

    def value(run: Run) -> float | None:
        if "shift" not in run:
            return None
        places = [n for n, each in enumerate(run["shift"]["severities"]) if severity in (None, each)]
        sweeps = [sweep for name, sweep in run["shift"]["corruptions"].items() if corruption in (None, name)]
        found = [sweep[metric][place] for sweep in sweeps for place in places]
        return mean(found) if found else None

    return value


def in_percent(value: Callable[[Run], float | None]) -> Callable[[Run], float | None]:
    return lambda run: None if (found := value(run)) is None else 100 * found


def tables(seeds: Seeds, rows: Mapping[str, str], tempered: Mapping[str, str]) -> dict[str, str]:
    """
    rows, tempered: {method: title}, as they are and with a temperature
    """
    judged = [run["shift"] for methods in seeds.values() for run in methods.values() if "shift" in run]
    if not judged:
        return {f"shift-{name}": "Not judged yet." for name in NAMES}
    severities, corruptions = judged[0]["severities"], judged[0]["corruptions"]

    def by_severity(metric: str, title: str, clean: Callable[[Run], float], form: str, percent: bool) -> list[Column]:
        scaled = in_percent if percent else lambda value: value
        columns: list[Column] = [(f"{title}, clean", scaled(clean), form)]
        columns += [(f"severity {each}", scaled(shifted(metric, each)), form) for each in severities]
        return [*columns, ("average", scaled(shifted(metric)), form)]

    quality: list[Column] = [
        ("NLL ↓", shifted("nll"), ".3f"),
        ("ECE ↓", shifted("ece"), ".3f"),
        ("OOD AUROC ↑", in_percent(shifted("ood_auroc")), ".1f"),
        ("AUROC against clean", in_percent(shifted("shift_auroc")), ".1f"),
    ]
    of_each: list[Column] = [
        (name.replace("_", " "), in_percent(shifted("accuracy", corruption=name)), ".1f") for name in corruptions
    ]
    accuracy = by_severity("accuracy", "Acc ↑", lambda run: run["id"]["accuracy"], ".2f", percent=True)
    brier = by_severity("brier", "Brier ↓", lambda run: run["id"]["brier"], ".3f", percent=False)
    return {
        "shift-accuracy": table(seeds, rows, accuracy),
        "shift-brier": table(seeds, rows, brier),
        "shift-quality": table(seeds, rows, quality),
        "shift-temperature": table(seeds, tempered, quality),
        "shift-corruptions": table(seeds, rows, of_each),
    }
