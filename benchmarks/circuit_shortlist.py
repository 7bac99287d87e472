"""How well does mode="shortlist" of `extract_circuit` follow mode="exact", and how much sooner is it done? On two real models.

    python -m benchmarks.circuit_shortlist --output benchmarks/results/circuit_shortlist
    python -m benchmarks.circuit_shortlist --data DIR --start sst2-gte=FOLDER --start tinyimagenet-dinov2=FOLDER --runs RUNS
    python -m benchmarks.circuit_shortlist --smallest                                 # does it run? made-up data, seconds

The models and rows are those of `benchmarks/head_scores.py`. Each circuit ranks a third of the heads for accuracy. "Agreement" is
the share of the exact circuit's heads that the other has too, after a twelfth, a sixth and a third of the heads; "score" is
what the circuit reached there, on the rows that it was extracted on.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.head_scores import NAMES, Task, real_task, smallest_task, synchronised
from benchmarks.provenance import where_it_ran
from hydra_transformers._io.files import write_atomically
from hydra_transformers.pruning import Circuit, extract_circuit


# (one head in so many is on the short list, all heads are evaluated every so many removals)
SHORTLISTS = ((5, 8), (10, 8), (10, 12), (20, 12))


@dataclass
class Row:
    """
    agreement, scores: by number of heads removed
    held: in how many of the removals at which all heads were evaluated the short list held the exact choice, and of how many
    """

    task: str
    way: str
    seconds: float
    speed_up: float
    agreement: dict[int, float]
    scores: dict[int, float]
    held: tuple[int, int] | None = None


def measure(task: Task, device: str) -> Iterator[Row]:
    budgets = sorted({max(1, budget) for budget in task.budgets})
    exact, seconds = timed(task, device, max(budgets))
    yield row(task, "exact", exact, exact, seconds, seconds, budgets)
    for share, every in SHORTLISTS:
        shortlist = max(1, task.num_heads // share)
        circuit, own_seconds = timed(
            task, device, max(budgets), mode="shortlist", shortlist=shortlist, check_every=every
        )
        way = f"{shortlist} heads, all every {every} removals"
        yield row(task, way, circuit, exact, own_seconds, seconds, budgets)


def timed(task: Task, device: str, budget: int, **options) -> tuple[Circuit, float]:
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else None
    start = synchronised(device)
    circuit = extract_circuit(
        task.model, task.calibration, objective="acc", budget=budget, dtype=dtype, progress=False, **options
    )
    return circuit, synchronised(device) - start


def row(task: Task, way: str, circuit: Circuit, exact: Circuit, seconds: float, exact_seconds: float, budgets) -> Row:
    common = {n: len(set(circuit.ranking[:n]) & set(exact.ranking[:n])) / n for n in budgets}
    scores = {n: circuit.scores[n - 1] for n in budgets}
    held = (
        (sum(is_held for _, is_held in circuit.checks), len(circuit.checks)) if circuit.mode == "shortlist" else None
    )
    return Row(task.title, way, seconds, exact_seconds / seconds, common, scores, held)


def to_markdown(rows: list[Row], machine: dict) -> str:
    lines = ["# Circuits by a short list", "", *(__doc__ or "").strip().split("\n\n")[2:], ""]
    lines += [f"{key}: {value}  " for key, value in machine.items()]
    for title in dict.fromkeys(each.task for each in rows):
        of_task = [each for each in rows if each.task == title]
        budgets = list(of_task[0].agreement)
        lines += ["", f"## {title}", ""]
        named = " | ".join(f"agreement, score at {n}" for n in budgets)
        lines += [f"| way | seconds | times as fast | {named} | held |", "|---" * (len(budgets) + 4) + "|"]
        for each in of_task:
            cells = " | ".join(f"{each.agreement[n]:.2f}, {each.scores[n]:.4f}" for n in budgets)
            held = "" if each.held is None else f"{each.held[0]} of {each.held[1]}"
            lines.append(f"| {each.way} | {each.seconds:.1f} | {each.speed_up:.1f} | {cells} | {held} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--data", type=Path, help="folder of plain files (experiments/local_files.py); else the Hub")
    parser.add_argument("--start", action="append", default=[], metavar="SETTING=FOLDER", help="pre-trained weights")
    parser.add_argument("--models", action="append", default=[], metavar="SETTING=FOLDER", help="fine-tuned already")
    parser.add_argument("--runs", type=Path, help="folder for the fine-tuned models; a temporary one otherwise")
    parser.add_argument("--output", type=Path, help="path of the .md and .json to write, without the ending")
    parser.add_argument("--smallest", action="store_true", help="a tiny model on made-up data: shows that it runs")
    args = parser.parse_args()
    machine, rows = where_it_ran(args.device), []
    with tempfile.TemporaryDirectory() as temporary:
        args.runs = args.runs or Path(temporary)
        tasks = [smallest_task(args)] if args.smallest else (real_task(name, args) for name in args.settings)
        for task in tasks:
            for each in measure(task, args.device):
                rows.append(each)
                print(each, flush=True)
                if args.output is not None:
                    args.output.parent.mkdir(parents=True, exist_ok=True)
                    report = {"machine": machine, "rows": [asdict(done) for done in rows]}
                    write_atomically(args.output.with_suffix(".json"), json.dumps(report, indent=1))
                    write_atomically(args.output.with_suffix(".md"), to_markdown(rows, machine))


if __name__ == "__main__":
    main()
