"""`finetune` as users have it, with few rows, on real data: sentiment (SST-2), regression (STS-B), several labels (GoEmotions),
token classification (WikiANN).

One model, one model trained 1.5 times as long, a Hydra of three members fine-tuned in one run. Learning rates are chosen on
validation rows, by a seed that is not published. Each model is calibrated on validation rows, and judged on test rows and on
out-of-distribution rows:

    python -m experiments.tasks --data DIR --start FOLDER --output experiments/results/tasks.json

DIR holds text/NAME.jsonl.gz, FOLDER a BERT such as MiniLM. Results are written anew after each training; what the file already
has is not run again.
"""

import argparse
import gzip
import json
import multiprocessing
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from transformers.utils import logging

from benchmarks.provenance import where_it_ran
from hydra_transformers import finetune, load_data
from hydra_transformers._io.files import write_atomically
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import calibrate

from .results import rounded
from .table import cell, markdown


Rows = list[dict[str, Any]]
Job = dict[str, Any]  # task, members, epochs, learning_rate, seed
MEMBERS, EPOCHS = 3, 5.0
MOST = {"train": 2000, "validation": 1000, "test": 2000, "ood": 1000}  # rows
RATES, MOST_RATES = (1.25e-5, 2.5e-5, 5e-5), 5
SWEEP_SEED, SEEDS = 0, (1, 2, 3)
MAX_TOKENS = 64
ARGUMENTS = {"train_sampling_strategy": "group_by_length", "save_only_model": True, "bf16": True}
METHODS = {
    "One model": (1, EPOCHS),
    "One model, trained 1.5 times as long": (1, 1.5 * EPOCHS),
    "One run": (MEMBERS, EPOCHS),
}
WNUT_TYPES = {"person": "PER", "location": "LOC", "corporation": "ORG", "group": "ORG"}
FREQUENT_LABELS = 10


@dataclass(frozen=True)
class Task:
    """
    rows: (folder of the data) -> train, validation and test rows, and out-of-distribution sets by name
    best: the metric that learning rates are chosen by; with a minus, the smallest
    shown: of the table: what, a metric of the test rows or, after a slash, of an out-of-distribution set, times how much
    columns, calibration: settings of `load_data` and of `calibrate`
    """

    rows: Callable[[Path], tuple[Rows, Rows, Rows, dict[str, Rows]]]
    best: str
    shown: tuple[tuple[str, str, float], ...]
    calibration: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)

    def score(self, metrics: dict[str, float]) -> float:
        """Larger is better."""
        return -metrics[self.best[1:]] if self.best.startswith("-") else metrics[self.best]


# Data


def read(folder: Path, name: str) -> Rows:
    """In an order that does not depend on the machine, and not that of the file."""
    with gzip.open(folder / "text" / f"{name}.jsonl.gz", "rt", encoding="utf8") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(0).shuffle(rows)
    return rows


def sentiment_rows(folder: Path) -> tuple[Rows, Rows, Rows, dict[str, Rows]]:
    known, others = read(folder, "sst2_train"), {name: read(folder, name) for name in ("amazon_snippets", "trec")}
    return known[: MOST["train"]], known[MOST["train"] :], read(folder, "sst2_validation"), unlabelled(others)


def similarity_rows(folder: Path) -> tuple[Rows, Rows, Rows, dict[str, Rows]]:
    """Captions and news to learn and to judge; forums are the shift."""
    parts = [read(folder, f"stsb_{part}") for part in ("train", "dev", "test")]
    known = [[row for row in rows if row["genre"] in ("captions", "news")] for rows in parts]
    others = [row for rows in parts for row in rows if row["genre"] not in ("captions", "news")]
    return known[0], known[1], known[2], {"forums": others}


def emotion_rows(folder: Path) -> tuple[Rows, Rows, Rows, dict[str, Rows]]:
    """The most frequent emotions, and rows with no other."""
    names = json.loads((folder / "text" / "goemotions_labels.json").read_text())
    parts = [read(folder, f"goemotions_{part}") for part in ("train", "dev", "test")]
    counts = Counter(label for row in parts[0] for label in row["labels"])
    frequent = {label for label, _ in counts.most_common(FREQUENT_LABELS)}
    known = [
        [{"text": row["text"], "labels": [names[label] for label in row["labels"]]} for row in rows]
        for rows in ([row for row in rows if set(row["labels"]) <= frequent] for rows in parts)
    ]
    others = {name: read(folder, name) for name in ("amazon_snippets", "trec")}
    return known[0], known[1], known[2], unlabelled(others)


def entity_rows(folder: Path) -> tuple[Rows, Rows, Rows, dict[str, Rows]]:
    """Wikipedia to learn and to judge; posts of social media, whose other kinds of entities are left out, are the shift."""
    posts = [
        {"tokens": row["tokens"], "tags": [renamed(tag) for tag in row["tags"]]}
        for row in read(folder, "wnut17_train")
    ]
    train, validation, test = (read(folder, f"wikiann_{part}") for part in ("train", "dev", "test"))
    return train, validation, test, {"social media": posts}


def unlabelled(sets: dict[str, Rows]) -> dict[str, Rows]:
    return {name: [{"text": row["text"]} for row in rows] for name, rows in sets.items()}


def renamed(tag: str) -> str:
    """A tag of WNUT-17 in the words of WikiANN."""
    place, _, kind = tag.partition("-")
    return f"{place}-{WNUT_TYPES[kind]}" if kind in WNUT_TYPES else "O"


TASKS = {
    "sentiment": Task(
        sentiment_rows,
        "-brier",
        (
            ("accuracy, %", "accuracy", 100),
            ("AURC x 1000", "aurc", 1000),
            ("answered, %", "answered", 100),
            ("wrong of the answered, %; promised: at most 5", "answered_risk", 100),
            ("AUROC, %: reviews of other things", "amazon_snippets/auroc", 100),
            ("AUROC, %: questions", "trec/auroc", 100),
        ),
        {"target": {"risk": 0.05}},
        {"column": "text", "label": "label"},
    ),
    "regression": Task(
        similarity_rows,
        "-rmse",
        (
            ("root mean squared error", "rmse", 1),
            ("width of the intervals", "interval_width", 1),
            ("in their interval, %; promised: at least 90", "interval_coverage", 100),
            ("... forums, OOD: nothing is promised", "forums/interval_coverage", 100),
        ),
        {"alpha": 0.1},
        {"column": ("sentence1", "sentence2"), "label": "score"},
    ),
    "multi-label": Task(
        emotion_rows,
        "map",
        (
            ("mean average precision, %", "map", 100),
            ("labels in the sets", "set_size", 1),
            ("missed labels, %; promised: at most 10", "set_missed", 100),
        ),
        {"alpha": 0.1, "target": {"coverage": 0.9}},
        {"column": "text", "label": "labels"},
    ),
    "tokens": Task(
        entity_rows,
        "entity_f1",
        (
            ("F1 of entities, %", "entity_f1", 100),
            ("answered entities, %", "answered", 100),
            ("wrong of the answered, %; the target: 10", "answered_risk", 100),
            ("... social media, OOD: nothing is promised", "social media/answered_risk", 100),
        ),
        {"target": {"risk": 0.1}, "confidence": 0},
        {"column": "tokens", "label": "tags"},
    ),
}


# One training


def trained_and_judged(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the results file."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    task = TASKS[job["task"]]
    *parts, others = task.rows(options.data)
    names = ("train", "validation", "test")
    data = DatasetDict({name: Dataset.from_list(rows[: MOST[name]]) for name, rows in zip(names, parts, strict=True)})
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = finetune(
            options.start,
            data,
            Path(folder) / "model",
            num_members=job["members"],
            epochs=job["epochs"],
            learning_rate=job["learning_rate"],
            seed=job["seed"],
            regression=job["task"] == "regression",
            max_length=MAX_TOKENS,
            progress=False,
            use_cpu=options.device == "cpu",
            **task.columns,
            **ARGUMENTS,
        )
    seconds, model = time.perf_counter() - began, result.model
    validation = evaluate_uncertainty({"model": model}, result.validation).models["model"]["data"]
    row = job | {"seconds": round(seconds), "work": count_multiply_adds(model), "validation": rounded(validation)}
    if job["seed"] == SWEEP_SEED:
        return row
    try:
        promises = calibrate(model, result.validation, **task.calibration).sentences
    except ValueError as error:  # a target that cannot be reached
        promises = [str(error)]
    ood = {}
    for name, rows in others.items():
        columns = task.columns if set(rows[0]) == set(parts[-1][0]) else {"column": "text", "labelled": False}
        options_of_rows = {"processor": result.processor, "max_length": MAX_TOKENS}
        ood[name] = load_data(rows[: MOST["ood"]], model, **options_of_rows, **columns)
    found = evaluate_uncertainty({"model": model}, result.test, ood)
    sets = found.models["model"]
    shifted = {name: sets[name] for name in found.data_sets()}
    return row | rounded({"test": sets["data"], "ood": shifted}) | {"promises": promises}


# All trainings


def scores_by_rate(name: str, members: int, rows: Sequence[dict[str, Any]]) -> dict[float, float]:
    """Of the sweep of learning rates; one that diverges is worse than all others."""
    return {
        row["learning_rate"]: -float("inf") if "error" in row else TASKS[name].score(row["validation"])
        for row in rows
        if (row["task"], row["members"], row["seed"]) == (name, members, SWEEP_SEED)
    }


def next_jobs(name: str, rows: Sequence[dict[str, Any]]) -> list[Job]:
    """What a task still needs, as far as can be said: learning rates, then their neighbours where the best lies at the edge, then
    what is published."""
    done = [{key: row[key] for key in ("task", "members", "epochs", "learning_rate", "seed")} for row in rows]
    rates = {}
    wanted = []
    for members in (1, MEMBERS):
        swept = sorted(scores_by_rate(name, members, rows).items())
        if len(swept) < len(RATES):
            tried = list(RATES)
        else:
            rates[members] = best = max(swept, key=lambda pair: pair[1])[0]
            beyond = [factor * best for factor, edge in ((0.5, swept[0]), (2.0, swept[-1])) if best == edge[0]]
            tried = beyond if len(swept) < MOST_RATES else []
        job = {"task": name, "members": members, "epochs": EPOCHS, "seed": SWEEP_SEED}
        wanted += [job | {"learning_rate": rate} for rate in tried]
    if not wanted:
        wanted = [
            {"task": name, "members": members, "epochs": epochs, "seed": seed, "learning_rate": rates[members]}
            for seed in SEEDS
            for members, epochs in METHODS.values()
        ]
    return [job for job in wanted if job not in done]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with text/")
    parser.add_argument("--start", required=True, help="the folder of the pre-trained model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--workers", type=int, default=1, help="processes; each trains one model at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(words)
    begun = json.loads(options.output.read_text()) if options.output.exists() else {}
    content = {"machine": where_it_ran(options.device), "start": "/".join(Path(options.start).parts[-2:])}
    if begun and [begun["start"], begun["machine"]["commit"]] != [content["start"], content["machine"]["commit"]]:
        parser.error(f"{options.output} is of another model or commit: pass another file")
    rows = content["tasks"] = begun.get("tasks", [])
    changing = threading.Lock()

    def keep(job: Job, done: Future) -> None:
        error = done.exception()  # one that fails loses no other
        with changing:
            rows.append(done.result() if error is None else job | {"error": repr(error), "seconds": None})
            write_atomically(options.output, json.dumps(content, indent=1) + "\n")
            print(len(rows), {key: rows[-1][key] for key in (*jobs_keys, "seconds")}, flush=True)

    jobs_keys = ("task", "members", "epochs", "learning_rate", "seed")
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.workers, mp_context=context) if options.workers > 1 else ThreadPoolExecutor(1)

    def run(name: str) -> None:
        while jobs := next_jobs(name, rows):
            begun = {pool.submit(trained_and_judged, job, options): job for job in jobs}
            for done in as_completed(begun):
                keep(begun[done], done)

    with pool, ThreadPoolExecutor(len(options.tasks)) as drivers:
        list(drivers.map(run, options.tasks))
    print("\n\n".join(f"{name}\n{text}" for name, text in render(content).items()))


# Tables


def render(content: dict[str, Any]) -> dict[str, str]:
    """One table: mean ± standard deviation over the seeds, of the tasks that were run whole; each at its chosen learning rate."""
    lines: dict[str, list[str]] = {}
    for name, task in TASKS.items():
        methods = []
        for members, epochs in METHODS.values():
            scores = scores_by_rate(name, members, content["tasks"])
            job = {"task": name, "members": members, "epochs": epochs}
            job["learning_rate"] = max(scores, key=scores.__getitem__, default=None)
            methods.append([row for row in content["tasks"] if job.items() <= row.items() and "test" in row])
        if any({row["seed"] for row in runs} != {*SEEDS} for runs in methods):
            continue
        for title, place, factor in task.shown:
            *others, metric = place.split("/")
            digits = ".3f" if factor == 1 else ".1f"
            found = [[run["ood"][others[0]] if others else run["test"] for run in runs] for runs in methods]
            values = [[factor * metrics[metric] for metrics in of_seeds if metric in metrics] for of_seeds in found]
            lines[f"{name}: {title}"] = [  # a target that could not be reached decides nothing
                cell(judged, digits) + (f" ({len(judged)} of {len(SEEDS)} seeds)" if len(judged) < len(SEEDS) else "")
                for judged in values
            ]
    return {"tasks": markdown(list(METHODS), lines)} if lines else {}


if __name__ == "__main__":
    main()
