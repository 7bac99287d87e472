"""The results of `zero_shot.py` as markdown tables."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from .table import ACCURACY, ECE, Column, Run, cell, table


METHODS = {
    "single": "Single",
    "temperature": "Temperature scaling",
    "bayesvlm": "BayesVLM",
    "bayesvlm-temperature": "BayesVLM, temperature",
    "taylor": "Taylor, vision tower",
    "circ-avg-vision": "CircAvg, vision tower",
    "circ-avg-both": "CircAvg, both towers",
    "hydra-circ-vision": "Hydra (Circ), vision tower",
    "hydra-circ-both": "**Hydra (Circ)**, both towers",
    "hydra-circ-vision-fewer": "Hydra (Circ), vision tower, half as many heads pruned",
    "hydra-circ-both-fewer": "Hydra (Circ), both towers, half as many heads pruned",
    "hydra-circ-both-temperature": "Hydra (Circ), both towers, temperature",
    "hydra-circ-both-fewer-temperature": "Hydra (Circ), both towers, half as many heads pruned, temperature",
}


def group_mean(group: str, metric: str) -> Any:
    return lambda run: 100 * mean(of_set[metric] for of_set in run["ood"]["msp"][group].values())


QUALITY: tuple[Column, ...] = (
    ("Multiply-adds", lambda run: run["multiply_adds"] / 1e9, ".2f G"),
    ACCURACY,
    ECE,
)


def detection(run: Run) -> list[Column]:
    """AUROC of each group."""
    return [(f"{group} AUROC ↑", group_mean(group, "auroc"), ".1f") for group in run["ood"]["msp"]]


FAILURE_METHODS = {name: METHODS[name] for name in ("single", "temperature", "bayesvlm")} | {
    "vilu": "ViLU",
    "hydra-circ-both": METHODS["hydra-circ-both"],
}
FAILURES: tuple[Column, ...] = (
    ("failures: AUROC ↑", lambda run: 100 * run["auroc"], ".1f"),
    ("FPR95 ↓", lambda run: 100 * run["fpr95"], ".1f"),
    ("AURC ↓", lambda run: run["aurc"], ".3f"),
    ("ECE of being right ↓", lambda run: run["ece"], ".3f"),
)


def failure_columns(run: Run) -> list[Column]:
    return [
        *FAILURES,
        *(
            (
                f"{group} AUROC ↑",
                lambda run, group=group: 100 * mean(of_set["auroc"] for of_set in run["ood"][group].values()),
                ".1f",
            )
            for group in run["ood"]
        ),
    ]


def carried_table(carried: Mapping[str, Mapping[str, Run]]) -> str:
    """The ECE: a row per label set that a temperature was fitted with, a column per label set that it was judged on."""
    sources, judged = (list(each) for each in _names(carried))
    lines = [f"| fitted with | temperature | {' | '.join(judged)} |", "|---|" + "--:|" * (len(judged) + 1)]
    for source in sources:
        runs = [of_seed[source] for of_seed in carried.values()]
        cells = [cell([run["temperature"] for run in runs], ".2f")]
        cells += [cell([run["sets"][name]["ece"] for run in runs], ".3f") for name in judged]
        lines.append(f"| {'no temperature' if source == 'none' else source} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _names(carried: Mapping[str, Mapping[str, Run]]) -> tuple[Mapping[str, Run], Mapping[str, Run]]:
    of_seed = next(iter(carried.values()))
    return of_seed, next(iter(of_seed.values()))["sets"]


def render(content: Mapping[str, Any]) -> dict[str, str]:
    """All tables by name."""
    seeds = content["seeds"]
    example = next(iter(seeds.values()))["single"]
    tables = {"quality": table(seeds, METHODS, (*QUALITY, *detection(example)))}
    if content.get("failures"):
        example = next(iter(content["failures"].values()))["single"]
        tables["failures"] = table(content["failures"], FAILURE_METHODS, failure_columns(example))
    if content.get("carried"):
        tables["carried"] = carried_table(content["carried"])
    return tables
