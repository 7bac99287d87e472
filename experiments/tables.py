"""The results as markdown tables, and the pages that show them."""

import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from hydra_transformers._io.files import write_atomically

from . import monitoring, one_run_table, tasks, zero_shot_tables
from .figures import ROOT, table_of_figures
from .methods import TITLES, with_temperature
from .results import RESULTS, read_results
from .table import ACCURACY, ECE, Column, Run, Seeds, auroc, table


QUALITY: tuple[Column, ...] = (
    ("work", lambda run: run["multiply_adds"] / run["single"]["multiply_adds"], ".2f"),
    ACCURACY,
    ("NLL ↓", lambda run: run["id"]["nll"], ".3f"),
    ECE,
    ("ECE, temperature ↓", lambda run: run["tempered"]["id"]["ece"], ".3f"),
    ("near AUROC ↑", auroc(group="near"), ".1f"),
    ("… by energy", auroc("energy", "near"), ".1f"),
    ("far AUROC ↑", auroc(group="far"), ".1f"),
    ("… by energy", auroc("energy", "far"), ".1f"),
    ("validation Acc", lambda run: 100 * run["validation"]["id"]["accuracy"], ".2f"),
)


def shifted(metric: str, severity: int | None = None, times: float = 100.0) -> Callable[[Run], float | None]:
    """The mean of a metric over corruptions and severities, or over one severity; None without results under shift."""

    def value(run: Run) -> float | None:
        if "shift" not in run:
            return None
        places = [n for n, one in enumerate(run["shift"]["severities"]) if severity in (None, one)]
        found = [sweep[metric][place] for sweep in run["shift"]["corruptions"].values() for place in places]
        return times * mean(found) if found else None

    return value


def shift_columns(example: Run) -> list[Column]:
    """Accuracy by severity, then averages over corruptions and severities (the paper's tables 13 and 14)."""
    severities = example["shift"]["severities"]
    return [
        ("Acc ↑, clean", *ACCURACY[1:]),
        *((f"severity {severity}", shifted("accuracy", severity), ".2f") for severity in severities),
        ("average", shifted("accuracy"), ".2f"),
        ("ECE ↓", shifted("ece", times=1), ".3f"),
        ("… with a temperature", lambda run: shifted("ece", times=1)(run["tempered"]), ".3f"),
        ("AUROC ↑", shifted("ood_auroc"), ".1f"),
    ]


def comparison_tables(seeds: Seeds) -> dict[str, str]:
    """Of a setting of `comparison.py`: what columns need beside a run is one model, and the same method with a temperature."""
    beside = {
        seed: {
            name: run | {"single": methods["single"], "tempered": methods.get(with_temperature(name), run)}
            for name, run in methods.items()
        }
        for seed, methods in seeds.items()
    }
    example = next(iter(beside.values()))["single"]
    tables = {"quality": table(beside, TITLES, QUALITY)}
    return tables | ({"shift": table(beside, TITLES, shift_columns(example))} if "shift" in example else {})


def render(results: dict[str, Any]) -> dict[str, str]:
    """All tables by name, `setting/table`."""
    tables = {}
    for name, content in results.items():
        if "cases" in content:
            tables[name] = monitoring.render(content)
            continue
        if "tasks" in content:
            tables |= tasks.render(content)
            continue
        if "rows" in content:
            if "setting" in content:
                tables |= {f"{name}{part}": text for part, text in one_run_table.render(content).items()}
            continue
        about = ", ".join(content[part] for part in ("machine", "versions", "date"))
        tables[f"{name}/machine"] = f"{about}, {len(content['seeds'])} seeds."
        found = zero_shot_tables.render(content) if "carried" in content else comparison_tables(content["seeds"])
        tables |= {f"{name}/{label}": text for label, text in found.items()}
    return tables


MARKED = re.compile(r"<!-- table: (?P<name>[^ ]+) -->\n(?P<text>.*?)\n?<!-- end -->", re.DOTALL)


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with the text between its marks renewed."""

    def renewed(found: re.Match) -> str:
        if found["name"] not in tables:
            raise ValueError(f"the page asks for the table {found['name']!r}: there are {', '.join(tables)}")
        return f"<!-- table: {found['name']} -->\n{tables[found['name']]}\n<!-- end -->"

    return MARKED.sub(renewed, page)


def pages() -> list[Path]:
    """The pages that show a table."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in candidates if MARKED.search(page.read_text())]


def all_tables() -> dict[str, str]:
    return render(read_results(RESULTS)) | {"figures": table_of_figures()}


def write_pages() -> None:
    tables = all_tables()
    for page in pages():
        write_atomically(page, with_tables(page.read_text(), tables))


def print_tables(results: Path) -> None:
    print("\n\n".join(f"{name}\n{text}" for name, text in render(read_results(results)).items()))
