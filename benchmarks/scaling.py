"""How circuit extraction and `build` scale to 64 GPUs: parts that are measured here, put together by a simulation.

    python benchmarks/scaling.py --output benchmarks/results/scaling_h200   # a minute on one GPU
    python benchmarks/scaling.py --smallest --device cpu                    # does it run? a tiny model, seconds

One GPU is enough. What a process does by itself is timed on it: a training step of every batch size, one batch of a removal,
saving, loading, fusing, evaluating. What processes tell each other is timed between processes on this machine's CPU, as they do
it by gloo, and continued in a straight line to 64. Only the exchange of gradients is not measured but computed from `ASSUMED`.
All in float32, as the commands run.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from circuit_extraction import OBJECTIVE, PRESETS, Preset, build_data, load_model, save_model
from transformers import PreTrainedModel

from hydra_transformers import AutoHydra
from hydra_transformers._io.processes import gather_batches
from hydra_transformers.pruning.extraction import GreedySearch
from provenance import where_it_ran


GPUS = (1, 2, 3, 4, 8, 16, 32, 64)
MEASURED_PROCESSES = (2, 4, 8)
# Bytes per second and GPU within a machine of eight and between machines, and seconds for each message of a ring.
ASSUMED = {"within a machine": 200e9, "between machines": 40e9, "per message": 10e-6, "GPUs in a machine": 8}


@dataclass(frozen=True)
class Work:
    """A `build`: fine-tunings of a data set as large as CIFAR-100, a circuit for each, a Hydra, and its evaluation."""

    members: int = 3
    rows: int = 45_000
    epochs: int = 5
    batch: int = 64
    circuit_rows: int = 1_000  # and as many foreign ones
    circuit_batch: int = 32
    removals: int = 24  # a sixth of the heads of a ViT-B
    test_rows: int = 20_000

    @property
    def steps(self) -> int:
        return self.epochs * math.ceil(self.rows / self.batch)


@dataclass
class Parts:
    """Seconds, each measured.

    start: of a process, until the package is imported
    step: of one training step, by its rows
    gradient_bytes: what processes exchange in a step if they train one member together
    load, save: of a member; fuse: of all members, with saving
    prepare: what an extraction does once; batch: all candidates on one batch, halfway; removal: the rest of a removal
    exchange: of the values of one removal, by the number of processes
    evaluation: one batch of the fused Hydra
    """

    start: float
    step: dict[int, float]
    gradient_bytes: int
    load: float
    save: float
    fuse: float
    prepare: float
    batch: float
    removal: float
    exchange: dict[int, float]
    evaluation: float


# Measuring


def seconds(call: Callable[[], object], device: str, times: int = 1) -> float:
    """The median of several calls."""
    found = []
    for _ in range(times):
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def synchronise(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def step_seconds(model: PreTrainedModel, preset: Preset, rows: int, device: str) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    pixels = torch.randn(rows, 3, preset.image_size, preset.image_size, device=device)
    labels = torch.arange(rows, device=device) % preset.classes

    def step() -> None:
        model(pixel_values=pixels, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    seconds(step, device, 2)
    return seconds(step, device, 5)


def exchange_seconds(processes: int, work: Work, candidates: int) -> float:
    """What `extract_circuit` gathers at one removal; call it before anything runs on a GPU, as it forks."""
    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        group = [
            context.Process(target=_exchange, args=(rank, processes, folder, work, candidates, answers))
            for rank in range(processes)
        ]
        for process in group:
            process.start()
        slowest = max(answers.get() for _ in group)
        for process in group:
            process.join()
    return slowest


def _exchange(rank: int, processes: int, folder: str, work: Work, candidates: int, answers: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    count = math.ceil(work.circuit_rows / work.circuit_batch)
    of_batch = torch.zeros(candidates + 1, work.circuit_batch)

    def exchange() -> None:
        for values in (3, 1):  # of the data, and of the foreign data
            gather_batches([[of_batch] * values for _ in range(rank, count, processes)])

    exchange()
    answers.put(seconds(exchange, "cpu", 5))
    dist.destroy_process_group()


def measure(preset: Preset, work: Work, device: str) -> Parts:
    candidates = preset.layers * preset.heads
    exchange = {count: exchange_seconds(count, work, candidates) for count in MEASURED_PROCESSES}
    with tempfile.TemporaryDirectory() as folder:
        save_model(preset, Path(folder))
        model = load_model(Path(folder), torch.float32, device)
        load = seconds(lambda: load_model(Path(folder), torch.float32, device), device)
        save = seconds(lambda: model.save_pretrained(f"{folder}/saved"), device)

        def fuse() -> PreTrainedModel:
            members = [load_model(Path(folder), torch.float32, "cpu") for _ in range(work.members)]
            hydra = AutoHydra.from_pruned_members(members, allow_equal=True)
            hydra.save_pretrained(f"{folder}/hydra")
            return hydra

        fusing = seconds(fuse, device)
        hydra = fuse().to(device).eval()
        pixels = torch.randn(work.circuit_batch, 3, preset.image_size, preset.image_size, device=device)
        with torch.inference_mode():
            predict = partial(hydra, pixel_values=pixels)
            predict()
            evaluation = seconds(predict, device, 3)
        prepare, once, twice = extraction_seconds(preset, work, model)
        # With one batch of each kind and with two: what grows is the time of a batch, the rest is that of a removal.
        batch = max(0.0, twice - once) / 2
        rows = [1 << power for power in range(work.batch.bit_length())]
        step = {count: step_seconds(model, preset, count, device) for count in reversed(rows)}
        gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    words = [sys.executable, "-c", "import hydra_transformers.cli, accelerate"]
    start = seconds(lambda: subprocess.run(words, check=True), "cpu")
    return Parts(
        start,
        step,
        gradient_bytes,
        load,
        save,
        fusing,
        prepare,
        batch,
        max(0.0, once - 2 * batch),
        exchange,
        evaluation,
    )


def extraction_seconds(preset: Preset, work: Work, model: PreTrainedModel) -> tuple[float, float, float]:
    """(once, a removal with one batch of each kind, a removal with two), with half of the budget gone"""
    device, found = str(model.device), []
    for batches in (1, 2):
        sizes = replace(preset, images=batches * work.circuit_batch, batch=work.circuit_batch)
        id_batches, ood_batches = build_data(sizes, model, torch.float32)
        start = time.perf_counter()
        search = GreedySearch(model, id_batches, ood_batches, OBJECTIVE, budget=work.removals)
        prepare = time.perf_counter() - start
        for head in search.engine.heads[: work.removals // 2]:
            search.engine.remove(head)
        if batches == 1:  # to warm up
            search.evaluate(search.engine.heads[:8])
        found.append(seconds(lambda: search.evaluate(search.engine.heads), device))  # noqa: B023
    return prepare, found[0], found[1]


# Simulating


def exchange_of(parts: Parts, gpus: int) -> float:
    """Measured, or on the straight line through the last two that were."""
    if gpus == 1:
        return 0.0
    if gpus in parts.exchange:
        return parts.exchange[gpus]
    before, last = sorted(parts.exchange)[-2:]
    slope = max(0.0, parts.exchange[last] - parts.exchange[before]) / (last - before)
    return parts.exchange[last] + slope * (gpus - last) if gpus > last else parts.exchange[min(parts.exchange)]


def gradient_seconds(parts: Parts, gpus: int) -> float:
    """A ring over all GPUs, after the backward pass; in truth a part of it happens during that pass."""
    place = "within a machine" if gpus <= ASSUMED["GPUs in a machine"] else "between machines"
    return 2 * (gpus - 1) * (parts.gradient_bytes / gpus / ASSUMED[place] + ASSUMED["per message"])


def training(parts: Parts, work: Work, gpus: int, divide: str) -> float:
    """Seconds until all members are trained and saved."""
    if divide == "members":
        return math.ceil(work.members / gpus) * (work.steps * parts.step[work.batch] + parts.save)
    rows = max(1, work.batch // gpus)
    largest = max(count for count in parts.step if count <= rows)
    step = parts.step[largest] * rows / largest
    return work.members * (work.steps * (step + gradient_seconds(parts, gpus)) + parts.save)


def circuits(parts: Parts, work: Work, gpus: int) -> float:
    """Seconds for one circuit per member; the slowest process has the most batches of each kind."""
    of_process = 2 * math.ceil(math.ceil(work.circuit_rows / work.circuit_batch) / gpus)
    removal = parts.removal + of_process * parts.batch + exchange_of(parts, gpus)
    return work.members * (parts.prepare + parts.load + work.removals * removal)


def simulate(parts: Parts, work: Work, gpus: int) -> dict[str, float]:
    found = {"gpus": gpus, "circuits": circuits(parts, work, gpus)}
    evaluation = math.ceil(math.ceil(work.test_rows / work.circuit_batch) / gpus) * parts.evaluation
    rest = parts.start + (work.members + 2) * parts.load + parts.fuse + evaluation
    for divide in ("members", "batches"):
        found[divide] = training(parts, work, gpus, divide)
        found[f"build by {divide}"] = found[divide] + found["circuits"] + rest
    return found


def to_markdown(parts: Parts, work: Work, rows: list[dict[str, float]], machine: dict[str, str]) -> str:
    lines = ["# Training and circuits on several GPUs, simulated from measured parts", ""]
    lines += [f"{key}: {value}  " for key, value in machine.items()]
    lines += [
        "",
        f"Work: {asdict(work)}, {work.steps:,} steps for each member.",
        "",
        "Measured parts, in seconds:",
        "",
    ]
    for name, value in asdict(parts).items():
        shown = (
            value if not isinstance(value, dict) else ", ".join(f"{key}: {each:.4g}" for key, each in value.items())
        )
        lines.append(f"- {name}: {shown if isinstance(shown, str | int) else f'{shown:.4g}'}")
    lines += ["", f"Assumed: {ASSUMED}.", "", "Minutes, and in brackets how many times as fast as one GPU:", ""]
    columns = ("members", "batches", "circuits", "build by members", "build by batches")
    names = ("fine-tuning, by members", "fine-tuning, by batches", "circuits", *columns[3:])
    lines += [f"| GPUs | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    for row in rows:
        cells = [f"{row[name] / 60:.1f} ({rows[0][name] / row[name]:.1f})" for name in columns]
        lines.append(f"| {row['gpus']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="files to write, without .md and .json")
    parser.add_argument("--smallest", action="store_true", help="a tiny model: shows that it runs, not how it scales")
    args = parser.parse_args()
    preset, work = PRESETS["vit-b16"], Work()
    if args.smallest:
        preset = PRESETS["smallest"]
        work = Work(rows=40, batch=4, circuit_rows=20, circuit_batch=10, removals=4, test_rows=20)
    parts = measure(preset, work, args.device)
    rows = [simulate(parts, work, gpus) for gpus in GPUS]
    machine = where_it_ran(args.device)
    page = to_markdown(parts, work, rows, machine)
    print(page)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_suffix(".md").write_text(page)
        content = {"machine": machine, "work": asdict(work), "parts": asdict(parts), "assumed": ASSUMED, "rows": rows}
        args.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
