"""Which heads see what, and how many can go, on fine-tuned pre-trained models: the paper's sections 3 and B.1 to B.3.

    python -m experiments.analysis --setting images --data DIR --start FOLDER
    python -m experiments.analysis --setting sst2 --data DIR --start FOLDER
    python -m experiments.analysis --smallest                                        # does it run? made-up data

Fine-tunes the setting's model, extracts circuits, and writes for each setting a folder with `report.md`, `results.json`
and a picture; `python -m experiments --tables` fills docs/results/analysis.md from them. Heads are chosen on the rows
that the setting has for circuits, and judged on test rows.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import where_it_ran
from hydra_transformers._io.files import write_atomically
from hydra_transformers.pruning import Circuit, extract_circuit, prune_heads, taylor_prune, taylor_scores
from hydra_transformers.pruning.heads import Head, heads_of

from .analysis_table import BY_LAYER, CIRC_AVG, FOLDER, TAYLOR
from .heads.outputs import Batches
from .heads.overlap import compare_head_sets
from .heads.proposition import pruning_under_noise, with_noise
from .heads.separation import head_separation
from .heads.sweep import PICTURE, sweep_budgets
from .one_run import train
from .results import in_lines
from .rows import TensorRows
from .runs import SETTINGS


JUDGED_ROWS, OOD_ROWS = 2_000, 500  # of the test rows, and of each OOD set
NOISE_ROWS = 1_000  # of the test rows, for second derivatives
BATCH = 250
STEPS = 6  # budgets up to half of the heads; head sets are compared at a third
RANDOM_ORDERS = 3
CIRCUITS = {"acc": "CircAcc", "ood": "CircOOD", "avg": CIRC_AVG}
REPORT = "report.md"
RESULTS = "results.json"


def plain(value: Any) -> Any:
    """For JSON: dataclasses as dicts, and heads or pairs of names that are keys as lists."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict) and any(isinstance(key, tuple) for key in value):
        return [[*key, plain(one)] for key, one in value.items()]
    if isinstance(value, list):
        return [plain(one) for one in value]
    return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def drawn(rows: TensorRows, count: int | None = None) -> Batches:
    """Batches of at most `count` rows, drawn at random; texts of about the same length come together."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count].sort().values
    some = rows.part(order.to(next(iter(rows.tensors.values())).device))
    return (some.sorted_by_length() if "attention_mask" in some.tensors else some).batches(BATCH)


class Study:
    """A setting's data on a device, and what is measured with it."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        setting = SETTINGS[args.setting]
        self.splits = setting.read(args.data, args.start).to(args.device)
        self.known, self.unknown = drawn(self.splits.circuit_id), drawn(self.splits.circuit_ood)
        self.model = setting.new_model(args.start, 0).to(args.device)
        train(self.model, setting.single, setting, self.splits.train, args.device)
        self.heads = heads_of(prune_heads(self.model))
        self.budget = len(self.heads) // 3
        steps = (max(1, len(self.heads) * step // (2 * STEPS)) for step in range(1, STEPS + 1))
        self.budgets = sorted({self.budget, *steps})

    def circuit(self, objective: str) -> Circuit:
        on_gpu = self.args.device == "cuda"
        options = {"budget": max(self.budgets), "mode": "shortlist"}
        model = prune_heads(self.model).to(torch.bfloat16) if on_gpu else self.model
        return extract_circuit(model, self.known, self.unknown, objective, **options)

    def taylor_by_layer(self) -> list[Head]:
        """Return the heads that go where every layer loses a third of its own."""
        heads_per_layer = max(Counter(layer for layer, _ in self.heads).values())
        keep = heads_per_layer - heads_per_layer // 3
        pruned = taylor_prune(self.model, self.known, heads_per_layer=keep).heads_to_prune
        return [(layer, head) for layer, heads in pruned.items() for head in heads]

    def run(self) -> dict[str, Any]:
        """The result of each part."""
        circuits = {objective: self.circuit(objective) for objective in CIRCUITS}
        scores = taylor_scores(self.model, self.known)
        orders = {TAYLOR: [sorted(scores, key=scores.__getitem__)]}
        orders |= {name: [circuits[objective].ranking] for objective, name in CIRCUITS.items()}
        orders["random"] = [random.Random(seed).sample(self.heads, len(self.heads)) for seed in range(RANDOM_ORDERS)]
        judged = drawn(self.splits.test, JUDGED_ROWS)
        ood = {name: drawn(rows, OOD_ROWS) for sets in self.splits.ood.values() for name, rows in sets.items()}
        sets = {name: draws[0][: self.budget] for name, draws in orders.items()}
        sets[BY_LAYER] = self.taylor_by_layer()
        clean = drawn(self.splits.test, NOISE_ROWS)
        return {
            "sweep": sweep_budgets(self.model, judged, ood, orders, self.budgets),
            "comparison": compare_head_sets(self.heads, sets),
            "separation": head_separation(self.model, judged, ood, {CIRCUITS["ood"]: sets[CIRCUITS["ood"]]}),
            "proposition": pruning_under_noise(self.model, clean, with_noise(clean), sets),
        }


def write(study: Study, folder: Path) -> str:
    """Runs a study, writes its folder and returns the report."""
    results = study.run()
    results["sweep"].plot(folder)
    about = f"Setting: {study.args.setting}. At most {JUDGED_ROWS:,} test rows and {OOD_ROWS} of each OOD set."
    parts = ["# Heads", about, f"![]({PICTURE})"]
    for result in results.values():
        for label, text in result.tables().items():
            parts += [f"## {label}", text]
    content = where_it_ran(study.args.device) | {"budget": study.budget}
    content |= {name: plain(result) for name, result in results.items()}
    write_atomically(folder / RESULTS, in_lines(content, depth=2) + "\n")
    report = "\n\n".join(parts) + "\n"
    write_atomically(folder / REPORT, report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(SETTINGS), help="which model and data")
    parser.add_argument("--data", type=Path, help="a folder of plain files")
    parser.add_argument("--start", type=Path, help="the folder of the pre-trained model")
    parser.add_argument("--results", type=Path, default=FOLDER, help="gets a folder for each setting")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smallest", action="store_true", help="a tiny model on made-up data: the report is printed")
    args = parser.parse_args()
    if args.smallest:
        args.setting = "smallest"
        with tempfile.TemporaryDirectory() as folder:
            print(write(Study(args), Path(folder)))
        return
    if args.setting is None:
        parser.error("--setting is missing: pass what to study")
    folder = args.results / args.setting
    if (folder / RESULTS).exists():
        sys.exit(f"{folder} holds results: remove it, or pass another --results")
    write(Study(args), folder)


if __name__ == "__main__":
    main()
