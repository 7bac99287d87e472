"""Where every published figure comes from: the command, the results file, and the commit and the state of the
package that the file names."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import package


ROOT = Path(__file__).parents[1]
# States of the package whose figures hold for this one: what was changed since changes none of them.
ALIKE = {
    "69406638": "how `finetune` and `build` set the task of a model for tags, and how an unknown problem type is refused"
}


class Figure(NamedTuple):
    """
    shown: the pages that show it, as links of docs/figures.md
    command: what makes the results file
    file: the results file, from the repository's root
    """

    shown: str
    command: str
    file: str


def _compared(setting: str) -> tuple[str, str]:
    return f"python -m experiments --settings {setting} --backbones 18", f"experiments/results/{setting}.json"


def _analysed(setting: str) -> tuple[str, str]:
    file = f"experiments/results/analysis/{setting}/results.json"
    return f"python -m experiments.analysis --setting {setting} --results OUT", file


def _measured(command: str, name: str) -> tuple[str, str]:
    return f"python {command}", f"benchmarks/results/{name}.json"


TIMES = "benchmarks/inference_cost.py --families vit bert --dtypes bfloat16 --modes eager compiled --no-masks"
FIGURES = (
    Figure(
        "[README](../README.md), [Results](results.md), [Tiny ImageNet](results/tinyimagenet-dinov2.md), [shift](results/shift.md)",
        *_compared("tinyimagenet-dinov2"),
    ),
    Figure("[Results](results.md), [SST-2](results/sst2-gte.md), [shift](results/shift.md)", *_compared("sst2-gte")),
    Figure(
        "[Other tasks](results/tasks.md)",
        "python -m experiments.tasks --data DIR --start GTE_SMALL --output OUT",
        "experiments/results/tasks.json",
    ),
    Figure(
        "[CLIP](results/clip-tinyimagenet.md)",
        "python -m experiments.zero_shot --data DIR --start DINOV2",
        "experiments/results/clip-tinyimagenet.json",
    ),
    Figure("[What heads do](analysis.md), images", *_analysed("tinyimagenet-dinov2")),
    Figure("[What heads do](analysis.md), texts", *_analysed("sst2-gte")),
    Figure(
        "[README](../README.md), [How long it takes](results.md#how-long-it-takes)",
        *_measured(TIMES, "inference_cost_h200"),
    ),
    Figure(
        "[How long it takes](results.md#how-long-it-takes), on a CPU",
        *_measured(
            "benchmarks/inference_cost.py --device cpu --families vit --dtypes float32 --batches 4",
            "inference_cost_cpu",
        ),
    ),
    Figure(
        "[Circuits' times](which-do-i-need.md#what-it-takes)",
        *_measured("benchmarks/circuit_extraction.py --preset vit-b16", "circuit_extraction_h200"),
    ),
    Figure("the same on a CPU", *_measured("benchmarks/circuit_extraction.py --preset cpu", "circuit_extraction_cpu")),
    Figure("[Many GPUs](scaling.md#how-far-it-goes)", *_measured("benchmarks/scaling.py", "scaling_h200")),
    Figure("[A million rows](scaling.md)", *_measured("benchmarks/cost_per_million.py", "cost_per_million_h200")),
    Figure(
        "the same on a CPU",
        *_measured("benchmarks/cost_per_million.py --device cpu --batch 2", "cost_per_million_cpu"),
    ),
    Figure(
        "[Workers](scaling.md)",
        *_measured("benchmarks/predict_workers.py --rows 480 --rounds 1", "predict_workers_cpu"),
    ),
    Figure("[The server](serving.md#under-load)", *_measured("benchmarks/serving_load.py", "serving_load_cpu")),
    Figure("[Short lists](pruning.md)", *_measured("-m benchmarks.circuit_shortlist", "circuit_shortlist_h200")),
    Figure("[Scores of heads](head-pruning.md)", *_measured("-m benchmarks.head_scores", "head_scores_h200")),
    Figure("[Detectors](uncertainty.md)", *_measured("benchmarks/detectors.py --rounds 15", "detectors_h200")),
    Figure(
        "[Exports](export.md)", *_measured("benchmarks/export_speed.py --batches 1 --rounds 3", "export_speed_cpu")
    ),
    Figure(
        "[Language models](how-it-works.md#classifiers-on-language-models), counted",
        *_measured("benchmarks/llm_classifiers.py", "llm_classifiers"),
    ),
    Figure(
        "[Language models](how-it-works.md#classifiers-on-language-models), run",
        *_measured("benchmarks/llm_classifiers.py --preset medium", "llm_classifiers_medium"),
    ),
)


def table_of_figures() -> str:
    lines = ["| where | command | results file | commit | package |", "|---|---|---|---|---|"]
    for shown, command, file in FIGURES:
        link = f"[{Path(file).name if 'analysis' not in file else '/'.join(Path(file).parts[2:])}](../{file})"
        content = json.loads((ROOT / file).read_text())
        found = (", ".join(recorded(key, content)) or "not recorded" for key in ("commit", "package"))
        lines.append(f"| {shown} | `{command}` | {link} | {' | '.join(found)} |")
    lines += [
        f"\nFigures of {state} hold for {package()}. Changed since: {change}." for state, change in ALIKE.items()
    ]
    return "\n".join(lines)


def of_other_states() -> list[str]:
    """The commands whose results were made neither by the package as it is now nor by one that is alike."""
    states = {command: set(recorded("package", json.loads((ROOT / file).read_text()))) for _, command, file in FIGURES}
    return [command for command, made in states.items() if not made or made - {package(), *ALIKE}]


def recorded(key: str, content: Any) -> list[str]:
    """The commits, or the states of the package, that a results file names; groups that were added to a comparison have
    their own."""
    places = [content, content.get("machine"), *content.get("added", {}).values()]
    places += [run.get("machine") for run in content.get("runs", [])]
    found = [place[key] for place in places if isinstance(place, dict) and key in place]
    return list(dict.fromkeys(each if " " in each else each[:8] for each in found))
