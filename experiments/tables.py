"""The results as markdown tables, and the pages that show them."""

import re
from pathlib import Path
from typing import Any

from hydra_transformers._io.files import write_atomically

from . import (
    analysis_table,
    cascades,
    checked_rows,
    class_promises,
    costs,
    monitoring,
    one_run_table,
    recalibration,
    recipe_table,
    tasks,
    zero_shot_tables,
)
from .figures import ROOT, table_of_figures
from .paper.summary import summaries
from .results import RESULTS, read_results


# By what a results file says that it is.
SIMULATIONS = {
    "cascades": cascades,
    "checked rows": checked_rows,
    "class promises": class_promises,
    "costs": costs,
    "recalibration": recalibration,
}


def render(results: dict[str, Any]) -> dict[str, str]:
    """All tables by name, `setting/table`."""
    tables = {}
    for name, content in results.items():
        if content.get("what") == "recipe":
            tables |= {f"{name}/{part}": text for part, text in recipe_table.render(content).items()}
            continue
        if content.get("what") in SIMULATIONS:
            tables[name] = SIMULATIONS[content["what"]].render(content)
            continue
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
        tables |= {f"{name}/{label}": text for label, text in zero_shot_tables.render(content).items()}
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
    of_paper = summaries() | {"analysis": analysis_table.render()}
    return render(read_results(RESULTS)) | of_paper | {"figures": table_of_figures()}


def write_pages() -> None:
    tables = all_tables()
    for page in pages():
        write_atomically(page, with_tables(page.read_text(), tables))


def print_tables(results: Path) -> None:
    print("\n\n".join(f"{name}\n{text}" for name, text in render(read_results(results)).items()))
