"""How many rows a second `predict` answers with one worker and with two, plain and by Ray.

    python benchmarks/predict_workers.py --output results   # on a machine that nobody else uses; Ray if it is installed
    python benchmarks/predict_workers.py --smallest         # does it run? a tiny model, plain processes

A table of JPEG files is answered by a Hydra of three members. Plain workers are processes of `predict_data`, each with its share of
the table; Ray's are those of `--engine ray --workers N`. Each has one thread. One worker and two take turns. A rate is that of
the time in which all workers answer, without their start; the seconds until the first part is written are beside it. The last
line is what one process can write, all that is left to do for the one that Ray's workers send their answers to.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import ViTConfig


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cost_per_million import raw_rows
from serving_load import LARGE, SMALLEST, save_models

from hydra_transformers._io.files import write_atomically
from hydra_transformers.reports.table import Table
from hydra_transformers.serving import jobs
from provenance import where_it_ran


CONTEXT = multiprocessing.get_context("spawn")
PLAIN, RAY = "plain", "Ray"
Written = list[tuple[float, int]]  # when a part was written, and its rows


@dataclass
class Run:
    """rate: rows per second; start: seconds until the first part was written"""

    engine: str
    workers: int
    rate: float
    start: float


together = None  # in a plain worker, the barrier of all


def start_worker(barrier: Any) -> None:
    global together
    together = barrier


def save_rows(config: ViTConfig, folder: Path, rows: int) -> list[str]:
    """Paths of JPEG files."""
    paths = [str(folder / f"{number}.jpg") for number in range(rows)]
    for path, content in zip(paths, raw_rows("vit", config, rows)["image"], strict=True):
        Path(path).write_bytes(content)
    return paths


def answer(folder: str, paths: list[str], output: str, rows_per_part: int, **engine: Any) -> Written:
    """Answers a table of these paths; returns what was written when. Runs in a process of its own for plain workers."""
    torch.set_num_threads(1)
    table, written, write = Path(output).with_suffix(".paths.jsonl"), [], jobs.PartWriter.write

    def noted(self: Any, part: int, answers: Any) -> None:
        write(self, part, answers)
        if together is not None and not written:
            together.wait(600)  # until every worker has its model and its first part
        written.append((time.time(), answers.num_rows))

    table.write_text("".join(json.dumps({"file": path}) + "\n" for path in paths))
    with mock.patch.object(jobs.PartWriter, "write", noted), mock.patch.object(jobs, "ROWS_PER_PART", rows_per_part):
        jobs.predict_data(f"{folder}/hydra", table, output, image="file", device="cpu", processor=folder, **engine)
    return written


def run(engine: str, workers: int, folder: str, paths: list[str], rows_per_part: int) -> Run:
    begin = time.time()
    with tempfile.TemporaryDirectory() as temporary:
        if engine == RAY:
            given = {"engine": "ray", "workers": workers}
            written = answer(folder, paths, f"{temporary}/answers.parquet", rows_per_part, **given)
            first, last = written[workers - 1][0], written[-1][0]
        else:
            tasks = [
                (folder, paths[worker::workers], f"{temporary}/{worker}.parquet", rows_per_part)
                for worker in range(workers)
            ]
            with CONTEXT.Pool(workers, start_worker, (CONTEXT.Barrier(workers),)) as pool:
                of_workers = pool.starmap(answer, tasks, chunksize=1)
            first, last = max(each[0][0] for each in of_workers), min(each[-1][0] for each in of_workers)
            written = sorted(part for each in of_workers for part in each)
    rows = sum(count for moment, count in written if first < moment <= last)
    return Run(engine, workers, rows / (last - first), written[0][0] - begin)


def writing_rate(folder: str, paths: list[str], rows: int) -> float:
    """Rows per second that one process checks, writes and joins, in CPU time."""
    with tempfile.TemporaryDirectory() as temporary:
        table = Path(temporary, "paths.jsonl")
        table.write_text("".join(json.dumps({"file": path}) + "\n" for path in paths * (rows // len(paths))))
        settings = {"device": "cpu", "processor": folder}
        source = jobs.DataSource(str(table), image="file")
        reader = jobs.PartReader(f"{folder}/hydra", source, settings, len(paths))
        writer, answers = jobs.PartWriter(Path(temporary, "answers.parquet"), reader, strict=False), reader.answered(0)
        parts, start = range(rows // len(paths)), time.process_time()
        for part in parts:
            numbered = answers.set_column(0, answers.schema.field(0), [list(reader.places(part))])
            writer.write(part, numbered)
        writer.join(parts)
        return len(parts) * len(paths) / (time.process_time() - start)


def to_markdown(report: dict[str, Any]) -> str:
    lines = [f"{name}: {value}  " for name, value in report["machine"].items()]
    rows = []
    for engine in (PLAIN, RAY):
        found = [Run(**each) for each in report["runs"] if each["engine"] == engine]
        rates = {count: [each.rate for each in found if each.workers == count] for count in (1, 2)}
        for count, values in rates.items():
            if values:
                ratio = statistics.median(values) / statistics.median(rates[1])
                start = statistics.median(each.start for each in found if each.workers == count)
                rows.append([engine, str(count), f"{statistics.median(values):.1f}", f"{ratio:.2f}", f"{start:.0f}"])
    columns = ["engine", "workers", "rows a second", "x one worker", "seconds until the first part"]
    tables = [Table(columns, rows).markdown()] if rows else []
    written = f"One process writes {report['written']:,.0f} rows a second of CPU time."
    return "\n\n".join(["\n".join(lines), *tables, written]) + "\n"


def write(report: dict[str, Any], folder: Path | None) -> None:
    if folder is not None:
        write_atomically(folder / "predict_workers.md", to_markdown(report))
        write_atomically(folder / "predict_workers.json", json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=2, help="of each engine and number of workers; 0: writing alone")
    parser.add_argument("--output", type=Path, help="folder for predict_workers.md and predict_workers.json")
    parser.add_argument("--smallest", action="store_true", help="a tiny model and few rows: shows that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    config, rows, rounds, rows_per_part = LARGE, args.rows, args.rounds, 24
    if args.smallest:
        config, rows, rounds, rows_per_part = SMALLEST, 16, 1, 2
    machine = where_it_ran("cpu") | {"CPU cores": str(os.cpu_count())}
    machine["measured"] = (
        f"ViT of {config.num_hidden_layers} layers, {config.image_size} pixels, three members, {rows} rows"
    )
    machine["processes that wanted a core at the start"] = f"{os.getloadavg()[0]:.1f}"
    has_ray = importlib.util.find_spec("ray") is not None and not args.smallest
    report: dict[str, Any] = {"machine": machine, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        save_models(config, Path(folder))
        paths = save_rows(config, Path(folder), rows)
        report["written"] = writing_rate(folder, paths[: min(rows, jobs.ROWS_PER_PART)], 20 * rows)
        write(report, args.output)
        for _ in range(rounds):
            for engine in [PLAIN, *([RAY] if has_ray else [])]:
                for workers in (1, 2):
                    found = run(engine, workers, folder, paths, rows_per_part)
                    print(found, flush=True)
                    report["runs"].append(asdict(found))
                    write(report, args.output)


if __name__ == "__main__":
    main()
