"""What a million rows cost: one model, three models and a Hydra, from files and texts to answers, on a GPU or a CPU.

    python benchmarks/cost_per_million.py --processes 16 --limit 85 --output results   # on a GPU
    python benchmarks/cost_per_million.py --device cpu --output results
    python benchmarks/cost_per_million.py --smallest                                   # does it run? tiny models, seconds

ViT-B/16 reads JPEG files of 500 x 375 pixels, BERT-base texts of 128 tokens; weights and inputs are random, bfloat16 on a GPU and
float32 on a CPU. Three times are taken, in turns so that all methods meet the same machine: the model's forward on tensors that
are ready; reading and preparing the rows, which is the same work for every model; and the whole of `HydraPredictor`, which
does one after the other. On a CPU they are CPU time of one thread, which counts alike on a machine that others use.
`--processes N` then lets N processes with a predictor each share the device: they read and prepare on N cores.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import BertTokenizer, PreTrainedConfig, ViTImageProcessorPil


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inference_cost import FAMILIES, IN_SEQUENCE, SINGLE, THREE_QUARTERS, WHOLE, SavedModels, time_in_turns

from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.reports.table import Table
from hydra_transformers.serving import HydraPredictor
from provenance import where_it_ran


METHODS = {SINGLE: "one model", IN_SEQUENCE: "three models", WHOLE: "Hydra, nothing merged"}
METHODS[THREE_QUARTERS] = "Hydra, three quarters merged"
NAMES = {"vit": "ViT-B/16, images", "bert": "BERT-base, texts"}
FILE_SIZE = (500, 375)
MILLION, BILLION = 10**6, 10**9
CONTEXT = multiprocessing.get_context("spawn")


@dataclass
class Row:
    """
    forward, whole: rows per second of one process, by the model alone and from files or texts to answers
    shared: of all processes that share the device; None if that was not measured
    """

    family: str
    method: str
    batch: int
    forward: float
    whole: float
    shared: float | None = None


# Rows and models


def raw_rows(family: str, config: PreTrainedConfig, count: int, seed: int = 0) -> dict[str, list[Any]]:
    """JPEG files as bytes, or texts that fill the model's length."""
    if family == "bert":
        draw, words = random.Random(seed), min(128, config.max_position_embeddings) - 2
        return {"text": [" ".join(f"w{draw.randrange(1000)}" for _ in range(words)) for _ in range(count)]}
    draw, files = np.random.default_rng(seed), []
    for _ in range(count):  # coarse noise, enlarged: a photo's file is about as large, and takes as long to decode
        coarse = Image.fromarray(draw.integers(0, 256, (48, 64, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize(FILE_SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return {"image": files}


def processor_of(family: str, config: PreTrainedConfig) -> Any:
    if family == "vit":
        return ViTImageProcessorPil(size={"height": config.image_size, "width": config.image_size})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(1000))]
    # A tiny model has fewer words: the others are unknown to it.
    vocab = {word: index for index, word in enumerate(words[: config.vocab_size])}
    return BertTokenizer(vocab=vocab, model_max_length=config.max_position_embeddings)


def load(saved: SavedModels, method: str, device: str) -> nn.Module:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded = saved.load(method, dtype, device)
    return DeepEnsemble(loaded.models).eval() if method == IN_SEQUENCE else loaded


def predictor_of(saved: SavedModels, family: str, method: str, device: str, batch: int) -> HydraPredictor:
    model, processor = load(saved, method, device), processor_of(family, saved.config)
    return HydraPredictor(model, processor, name=method, batch_size=batch)


def prepared(predictor: HydraPredictor, columns: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    """What the model reads, on the CPU."""
    values = [predictor._read(value) for value in predictor.values_in(columns)]
    options = {"padding": True, "truncation": True} if predictor.kind == "text" else {}
    return dict(predictor.processor(values, return_tensors="pt", **options))


# One process


@torch.no_grad()
def measure(saved: SavedModels, family: str, batch: int, args: argparse.Namespace) -> tuple[list[Row], float]:
    """Rows per second of each method; and of reading and preparing, on one core."""
    predictors = {method: predictor_of(saved, family, method, args.device, batch) for method in METHODS}
    one = predictors[SINGLE]
    pool = []
    for columns in [raw_rows(family, saved.config, batch, seed) for seed in range(2)]:
        ready = {name: value.to(args.device) for name, value in prepared(one, columns).items()}
        ready = {n: v.to(one.model.dtype) if v.is_floating_point() else v for n, v in ready.items()}
        pool.append({"columns": columns, "ready": ready})
    runs: dict[tuple[str, str], Callable] = {("prepare", ""): lambda columns, ready: prepared(one, columns)}
    for method, each in predictors.items():
        runs["forward", method] = lambda columns, ready, each=each: each.model(**ready)
        runs["whole", method] = lambda columns, ready, each=each: each(columns)
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    times = time_in_turns(runs, pool, args.device, args.seconds, 2 if args.smallest else 3, clock)
    rates = {run: 1000 * batch / statistics.median(values) for run, values in times.items()}
    rows = [Row(family, method, batch, rates["forward", method], rates["whole", method]) for method in METHODS]
    return rows, rates["prepare", ""]


# Several processes on one device


def start_worker(barrier: Any) -> None:
    global together
    together = barrier
    torch.set_num_threads(1)


def work(task: tuple) -> float:
    """Rows per second of one of the processes, while all are at work."""
    folder, family, method, batch, device, seconds, smallest, seed = task
    saved = saved_models(family, Path(folder), smallest)
    predictor = predictor_of(saved, family, method, device, batch)
    columns, rows = raw_rows(family, saved.config, batch, seed), 0
    predictor(columns)
    together.wait(120)
    start = time.perf_counter()
    while not rows or time.perf_counter() - start < seconds:
        predictor(columns)
        rows += batch
    rate = rows / (time.perf_counter() - start)
    together.wait(120)  # none leaves while another is still measured
    return rate


def saved_models(family: str, folder: Path, smallest: bool) -> SavedModels:
    found = FAMILIES[family]
    return SavedModels(found, found.smallest if smallest else found.config, folder / family)


# Results


def hours(rows: int, rate: float, devices: int = 1) -> str:
    return f"{rows / rate / devices / 3600:.3g}"


def to_markdown(report: dict[str, Any]) -> str:
    """Machine, rows per second, hours per million rows, and hours of a billion rows on 100 such machines."""
    count = report["processes"]
    lines = [f"{name}: {value}  " for name, value in report["machine"].items()]
    tables = []
    for family, rate in report["prepare"].items():
        rows = [Row(**row) for row in report["rows"] if row["family"] == family]
        name = NAMES[family]
        columns = ["rows a second: forward alone", "one process", f"{count} processes"]
        columns += ["hours per million rows: forward alone", "one process", f"{count} processes"]
        columns += ["a billion rows on 100 of them, hours"]
        cells = []
        for row in rows:
            rates = [row.forward, row.whole, *([row.shared] if count > 1 else [])]
            numbers = [f"{each:,.0f}" if each and each >= 10 else f"{each:.2f}" if each else "-" for each in rates]
            numbers += [hours(MILLION, each) if each else "-" for each in rates]
            cells.append([METHODS[row.method], *numbers, hours(BILLION, row.shared or row.whole, 100)])
        if count == 1:
            columns = [each for each in columns if "1 processes" not in each]
        tables.append(Table([f"{name}, batches of {rows[0].batch}", *columns], cells).markdown())
        tables.append(f"Reading and preparing alone: {rate:,.0f} rows a second on one core.")
    return "\n\n".join(["\n".join(lines), *tables]) + "\n"


def page_lines(report: dict[str, Any]) -> list[str]:
    """The lines of docs/scaling.md: hours per million rows, a column for each method."""
    device = report["machine"]["machine"].removeprefix("NVIDIA ")
    device = "CPU core" if device.startswith("CPU") else device
    measures = {"forward": "the model alone", "whole": "one process", "shared": f"{report['processes']} processes"}
    lines = []
    for family, (measure, name) in product(report["prepare"], measures.items()):
        rates = [row[measure] for row in report["rows"] if row["family"] == family]
        if any(rates):
            cells = [hours(MILLION, rate) if rate else "-" for rate in rates]
            lines.append(f"| {device}, {NAMES[family]}: {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--batch", type=int, help="rows per pass: 64 on a GPU and 8 on a CPU, if not given")
    parser.add_argument("--processes", type=int, default=1, help="that share the device, measured last")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each group of measurements, at least")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--output", type=Path, help="folder for cost_per_million.md and cost_per_million.json")
    parser.add_argument("--smallest", action="store_true", help="tiny models: shows that it runs")
    args = parser.parse_args()
    started, batch = time.perf_counter(), args.batch or (64 if args.device == "cuda" else 8)
    if args.smallest:
        args.seconds, batch = 0.0, 2
    if args.device != "cuda":
        torch.set_num_threads(1)
    machine = where_it_ran(args.device) | {"CPU cores": str(os.cpu_count())}
    report: dict[str, Any] = {"machine": machine, "processes": args.processes, "prepare": {}, "rows": []}
    with tempfile.TemporaryDirectory() as temporary:
        # Started first, so that the processes import while the models are built; they wait until they are asked.
        barrier = CONTEXT.Barrier(args.processes)
        pool = CONTEXT.Pool(args.processes, start_worker, (barrier,)) if args.processes > 1 else None
        try:
            for family in args.families:
                saved = saved_models(family, Path(temporary), args.smallest)
                rows, prepare = measure(saved, family, batch, args)
                report["prepare"][family] = prepare
                report["rows"] += [asdict(row) for row in rows]
                write(report, args.output, started)
            for row in report["rows"] if pool else ():
                if time.perf_counter() - started > args.limit:
                    print(f"{args.limit:g} seconds are over: {row['family']}, {row['method']} is left out", flush=True)
                    continue
                told = (temporary, row["family"], row["method"], batch, args.device, args.seconds, args.smallest)
                tasks = [(*told, seed) for seed in range(args.processes)]
                row["shared"] = sum(pool.map_async(work, tasks, chunksize=1).get(240))
                write(report, args.output, started)
        finally:
            if pool is not None:
                pool.terminate()
                pool.join()
    print(to_markdown(report))


def write(report: dict[str, Any], folder: Path | None, started: float) -> None:
    done = sum(1 + (row["shared"] is not None) for row in report["rows"])
    print(f"{done} measured after {time.perf_counter() - started:.0f} seconds", flush=True)
    if folder is not None:
        write_atomically(folder / "cost_per_million.md", to_markdown(report))
        write_atomically(folder / "cost_per_million.json", json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
