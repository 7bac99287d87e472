"""The results as markdown tables, and the page that shows them."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from hydra_transformers._io.files import write_atomically

from . import fine_tuning_tables, overview, task_tables, zero_shot_tables
from .figures import table_of_figures
from .pretrained import PRETRAINED
from .results import read_results
from .setting import Setting
from .settings import SETTINGS
from .table import Column, Run, set_columns, table


COMPARED = {
    "single": "Single",
    "single-tuned": "Single, tuned on",
    "temperature": "Temperature scaling",
    "deep-ensembles": "Deep Ensembles",
    "deep-ensembles-temperature": "Deep Ensembles, temperature",
    "mc-dropout": "MC Dropout",
    "lora-ensembles": "LoRA Ensembles",
    "last-layer-laplace": "Laplace, last layer",
    "oba-tuned": "OBA",
    "taylor-0-tuned": "Taylor",
    "circ-acc-tuned": "CircAcc",
    "circ-ood-tuned": "CircOOD",
    "circ-avg-tuned": "CircAvg",
    "hydra-taylor": "Hydra (Taylor)",
    "hydra-circ": "**Hydra (Circ)**",
    "hydra-circ-temperature": "Hydra (Circ), temperature",
}
ZERO_SHOT = {
    "single": "Single",
    "oba-zero-shot": "OBA",
    "taylor-0-zero-shot": "Taylor",
    "circ-acc-zero-shot": "CircAcc",
    "circ-ood-zero-shot": "CircOOD",
    "circ-avg-zero-shot": "CircAvg",
    "hydra-taylor-zero-shot": "Hydra (Taylor)",
    "hydra-circ-zero-shot": "**Hydra (Circ)**",
}
MEMBERS = {
    "single": "Single",
    "deep-ensembles": "Deep Ensembles (3)",
    "hydra-circ": "Hydra (Circ), 3 members",
    "hydra-circ-5": "Hydra (Circ), 5 members",
}
FUSION = {
    "hydra-circ": "Hydra (Circ), fused",
    "hydra-circ-not-fused": "Hydra (Circ), not fused",
    "hydra-taylor": "Hydra (Taylor), fused",
    "hydra-taylor-not-fused": "Hydra (Taylor), not fused",
}
DIVERSITY = {
    "deep-ensembles": "Deep Ensembles",
    "lora-ensembles": "LoRA Ensembles",
    "hydra-taylor": "Hydra (Taylor)",
    "hydra-circ": "Hydra (Circ)",
    "varied-heads": "one circuit: heads",
    "varied-order": "one circuit: batch order",
    "varied-noise": "one circuit: training noise",
    "varied-order-noise": "one circuit: batch order, noise",
    "varied-heads-order-noise": "one circuit: heads, batch order, noise",
    "varied-nothing": "one circuit: nothing",
}


def ood_mean(name: str) -> Callable[[Run], float]:
    return lambda run: mean(of_set[name] for sets in run["ood"]["msp"].values() for of_set in sets.values())


QUALITY: tuple[Column, ...] = (
    ("Acc ↑", lambda run: 100 * run["id"]["accuracy"], ".2f"),
    ("Brier ↓", lambda run: run["id"]["brier"], ".3f"),
    ("NLL ↓", lambda run: run["id"]["nll"], ".3f"),
    ("ECE ↓", lambda run: run["id"]["ece"], ".3f"),
    ("aECE ↓", lambda run: run["id"]["aece"], ".3f"),
    ("AUROC ↑", lambda run: 100 * ood_mean("auroc")(run), ".1f"),
    ("FPR95 ↓", lambda run: 100 * ood_mean("fpr95")(run), ".1f"),
    ("AUPR ↑", lambda run: 100 * ood_mean("aupr")(run), ".1f"),
)
COST: Column = ("Multiply-adds", lambda run: run["multiply_adds"] / 1e9, ".2f G")
DIVERSITY_COLUMNS: tuple[Column, ...] = (
    ("ID MI", lambda run: run["id"]["mutual_information"], ".3f"),
    ("ID disagreement", lambda run: run["id"]["disagreement"], ".3f"),
    ("OOD MI", lambda run: ood_mean("mutual_information")(run), ".3f"),
    ("OOD disagreement", lambda run: ood_mean("disagreement")(run), ".3f"),
)


def by_budget(setting: Setting) -> dict[str, str]:
    """Hydra (Circ) with more and more heads pruned, zero-shot and fine-tuned."""
    rows = {"single": "0 heads pruned"}
    for budget in setting.budgets:
        rows[f"hydra-circ-zero-shot-{budget}"] = f"{budget} heads pruned, zero-shot"
        rows[f"hydra-circ-{budget}-heads"] = f"{budget} heads pruned"
    rows["hydra-circ-zero-shot"] = f"{setting.heads_to_prune} heads pruned, zero-shot"
    return rows | {"hydra-circ": f"{setting.heads_to_prune} heads pruned"}


def render(results: dict[str, Any], settings: Mapping[str, Setting] = SETTINGS) -> dict[str, str]:
    """All tables by name, `setting/table`."""
    tables = task_tables.render(results.get("tasks", task_tables.NOT_RUN)) if settings is SETTINGS else {}
    for name, content in results.items():
        if "tasks" in content:
            continue
        seeds = content["seeds"]
        tables[f"{name}/machine"] = (
            f"{content['machine']}, {content['versions']}, {content['date']}, {len(seeds)} seeds."
        )
        if "carried" in content:  # a comparison on CLIP
            tables |= zero_shot_tables.render(name, content)
            continue
        setting = settings[name]
        if name in PRETRAINED:
            tables |= fine_tuning_tables.render(name, content, setting)
            continue
        trade_offs = (QUALITY[0], QUALITY[3], QUALITY[5], *set_columns(seeds), *DIVERSITY_COLUMNS[2:])
        for label, methods, columns in (
            ("quality", COMPARED, QUALITY),
            ("zero-shot", ZERO_SHOT, QUALITY),
            ("diversity", DIVERSITY, (*DIVERSITY_COLUMNS, QUALITY[0], QUALITY[5])),
            ("members", MEMBERS, (*QUALITY, COST)),
            ("fusion", FUSION, (*QUALITY, *DIVERSITY_COLUMNS[2:])),
            ("budgets", by_budget(setting), trade_offs),
        ):
            tables[f"{name}/{label}"] = table(seeds, methods, columns)
    if of_fine_tunings := pretrained_only(results):
        tables["overview"] = overview.table_of_all(of_fine_tunings, settings)
        tables["times"] = overview.table_of_times()
        tables["figures"] = table_of_figures()
        for name in overview.FAMILIES.keys() & of_fine_tunings.keys():
            seeds, family = of_fine_tunings[name]["seeds"], overview.FAMILIES[name]
            tables[f"{name}/first"] = overview.first_table(seeds, family)
    return tables


def pretrained_only(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results of the settings with several fine-tunings, in their order."""
    return {name: results[name] for name in PRETRAINED if name in results}


MARKED = re.compile(r"<!-- table: (?P<name>[^ ]+) -->\n(?P<text>.*?)\n?<!-- end -->", re.DOTALL)


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with the text between its marks renewed."""

    def renewed(found: re.Match) -> str:
        if found["name"] not in tables:
            raise ValueError(f"the page asks for the table {found['name']!r}: there are {', '.join(tables)}")
        return f"<!-- table: {found['name']} -->\n{tables[found['name']]}\n<!-- end -->"

    return MARKED.sub(renewed, page)


def write_tables(
    results: Path, pages: Sequence[Path], settings: Mapping[str, Setting] = SETTINGS, pictures: Path | None = None
) -> None:
    """Renews the tables of the pages, or prints all of them where there are none; draws the picture into a folder."""
    found = read_results(results)
    tables = render(found, settings)
    if pictures and (of_fine_tunings := pretrained_only(found)):
        overview.draw(of_fine_tunings, settings, pictures)
    if not pages:
        print("\n\n".join(f"{name}\n{text}" for name, text in tables.items()))
    for page in pages:
        write_atomically(page, with_tables(page.read_text(), tables))
