"""Where every published figure comes from: the command, the results file, and the commit and the state of the package that the
file names."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import package


ROOT = Path(__file__).parents[1]


class Figure(NamedTuple):
    """
    what: it shows
    command: makes the results file
    file: the results file, from the repository's root
    """

    what: str
    command: str
    file: str


def _one_run(options: str, name: str) -> tuple[str, str]:
    return f"python -m experiments.one_run --setting {options}", f"experiments/results/{name}.json"


def _recipe(setting: str) -> tuple[str, str]:
    return f"python -m experiments.recipe --setting {setting}", f"experiments/results/recipe-{setting}.json"


def _card(name: str) -> tuple[str, str]:
    return f"python -m experiments.cards {name}", f"experiments/results/cards/{name}/where.json"


def _measured(command: str, name: str) -> tuple[str, str]:
    return f"python benchmarks/{command}", f"benchmarks/results/{name}.json"


TIMED = "single '3 models in sequence' 'Hydra 3, nothing merged' 'Hydra 3, three quarters merged' 'Hydra 3, one run'"
FIGURES = (
    Figure("The recipe, images", *_recipe("tiny-imagenet")),
    Figure("The recipe, few images", *_recipe("cifar10")),
    Figure("The recipe, half of the texts", *_recipe("clinc150-small")),
    Figure("The recipe, SST-2", *_recipe("sst2")),
    Figure("One run, images", *_one_run("images", "one-run-images")),
    Figure("Variants, images", "at the commit, by an earlier script", "experiments/results/one-run-images-sweep.json"),
    Figure("One run, texts", *_one_run("clinc150", "one-run-clinc150")),
    Figure("One run, half of the texts", *_one_run("clinc150-small", "one-run-clinc150-small")),
    Figure("One run, SST-2", *_one_run("sst2", "one-run-sst2")),
    Figure(
        "Other tasks, few rows",
        "python -m experiments.tasks --workers 2 --device cpu",
        "experiments/results/tasks.json",
    ),
    Figure(
        "Monitoring",
        "python -m experiments.monitoring --pool CLINC150=FILE --pool 'Tiny ImageNet=FILE'",
        "experiments/results/monitoring.json",
    ),
    Figure("Promises by class", "python -m experiments.class_promises", "experiments/results/class-promises.json"),
    Figure("Costs", "python -m experiments.costs", "experiments/results/costs.json"),
    Figure("Cascades", "python -m experiments.cascades", "experiments/results/cascades.json"),
    Figure("Calibrating again", "python -m experiments.recalibration", "experiments/results/recalibration.json"),
    Figure("Which rows are checked", "python -m experiments.checked_rows", "experiments/results/checked-rows.json"),
    Figure(
        "Times",
        *_measured(
            f"inference_cost.py --families vit bert --dtypes bfloat16 --modes eager compiled --methods {TIMED} --no-masks",
            "inference_cost_h200",
        ),
    ),
    Figure(
        "Times on a CPU",
        *_measured(
            "inference_cost.py --device cpu --families vit bert --batches 1 4 --dtypes float32 --modes eager compiled "
            f"--methods {TIMED} --no-masks",
            "inference_cost_cpu",
        ),
    ),
    Figure("A card, ViT", *_card("hydra-vit-digits")),
    Figure("A card, BERT", *_card("hydra-bert-intents")),
    Figure("A card, CLIP", *_card("hydra-clip-digits")),
    Figure("Circuits' times", *_measured("circuit_extraction.py --preset cpu", "circuit_extraction_cpu")),
)


def table_of_figures() -> str:
    lines = ["| what | command | results file | commit | package |", "|---|---|---|---|---|"]
    for what, command, file in FIGURES:
        link = f"[{Path(file).name}](../{file})"
        content = json.loads((ROOT / file).read_text())
        found = [recorded(key, content) or "not recorded" for key in ("commit", "package")]
        for part in content.get("earlier", ()):  # rows of another state, which come first
            found[0] += f"; the first {part['rows']} rows: {part['commit']}"
            found[1] += f"; {part['package']}"
        shown = f"`{command}`" if command.startswith("python") else command
        lines.append(f"| {what} | {shown} | {link} | {' | '.join(found)} |")
    return "\n".join(lines)


def of_other_states() -> list[str]:
    """The commands whose results were not made by the package as it is now."""
    state = package()
    return [
        figure.command
        for figure in FIGURES
        if recorded("package", json.loads((ROOT / figure.file).read_text())) != state
    ]


def recorded(key: str, content: Any) -> str:
    """The commit, or the state of the package, that a results file names."""
    places = [content, content.get("machine")]
    found = next((place[key] for place in places if isinstance(place, dict) and key in place), "")
    return found if " " in found else found[:8]
