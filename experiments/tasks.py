"""Other tasks on real data: regression (STS-B), multi-label classification (GoEmotions), token classification (WikiANN).

One model, one model trained 1.5 times as long, a Hydra fine-tuned in one run; of three fine-tunings a Deep Ensemble, a soup and
Hydras. Learning rates of one model and of one run are chosen on validation rows. Each method is calibrated on validation rows,
and judged on test rows and on out-of-distribution rows:

    python -m experiments.tasks --data DIR --start FOLDER --output experiments/results/tasks.json

DIR holds text/NAME.jsonl.gz, FOLDER a BERT such as gte-small. Results are written anew after each seed of each task; what the
file already has is not run again.
"""

import argparse
import gzip
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from benchmarks.provenance import where_it_ran
from hydra_transformers import AutoHydra, load_data
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import soup
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import calibrate

from .one_run import train
from .results import rounded
from .rows import rounded_up
from .runs import Run
from .table import cell, markdown


Batch = dict[str, Tensor]
MEMBERS = 3
ROWS_PER_BATCH = 256  # where nothing is trained
MAX_TOKENS = 64
FACTORS = (0.5, 1.0, 2.0)  # of a task's learning rate, tried on validation rows
WNUT_TYPES = {"person": "PER", "location": "LOC", "corporation": "ORG", "group": "ORG"}
TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]


@dataclass(frozen=True)
class Task:
    """
    start: (folder, seed, members) -> a pre-trained model with a new head, or a Hydra of it with new heads
    rows: (folder of the data) -> rows by part: train, validation, test, and ood those of other sets
    best: the metric that learning rates are chosen by; with a minus, the smallest
    columns, calibration: settings of `load_data` and of `calibrate`
    """

    start: Callable[[str, int, int], PreTrainedModel]
    rows: Callable[[Path], dict[str, Any]]
    batch: int
    single: Run
    best: str
    columns: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)

    @property
    def classifier_rate(self) -> float:
        return 10 * self.single.learning_rate

    @property
    def one_run(self) -> Run:
        """Nine eighths of the epochs, as for images."""
        return replace(
            self.single, group="one run", members=MEMBERS, branch_rate=3.0, epochs=round(1.125 * self.single.epochs)
        )


# Data


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(folder / "text" / f"{name}.jsonl.gz", "rt", encoding="utf8") as lines:
        return [json.loads(line) for line in lines]


def similarity_rows(folder: Path) -> dict[str, Any]:
    """Captions and news to learn and to judge; forums are the shift."""
    parts = {part: read(folder, f"stsb_{part}") for part in ("train", "dev", "test")}
    known = {part: [row for row in rows if row["genre"] in ("captions", "news")] for part, rows in parts.items()}
    forums = [row for rows in parts.values() for row in rows if row["genre"] not in ("captions", "news")]
    return {
        "train": known["train"],
        "validation": known["dev"],
        "test": known["test"],
        "ood": {"forums": forums},
    }


def emotion_rows(folder: Path) -> dict[str, Any]:
    """The first 20,000 rows to learn."""
    parts = {"train": "train", "validation": "dev", "test": "test"}
    found = {part: read(folder, f"goemotions_{name}")[:20_000] for part, name in parts.items()}
    others = {name: [{"text": row["text"]} for row in read(folder, name)] for name in ("amazon_snippets", "trec")}
    return found | {"ood": others}


def entity_rows(folder: Path) -> dict[str, Any]:
    """Wikipedia to learn and to judge; posts of social media, whose other kinds of entities are left out, are the shift."""
    posts = [
        {"tokens": row["tokens"], "tags": [renamed(tag) for tag in row["tags"]]}
        for row in read(folder, "wnut17_train")
    ]
    known = {"train": "wikiann_train", "validation": "wikiann_dev", "test": "wikiann_test"}
    found = {part: read(folder, name) for part, name in known.items()}
    return {part: rows if part == "train" else rows[:4_000] for part, rows in found.items()} | {
        "ood": {"social media": posts}
    }


def renamed(tag: str) -> str:
    """A tag of WNUT-17 in the words of WikiANN."""
    place, _, kind = tag.partition("-")
    return f"{place}-{WNUT_TYPES[kind]}" if kind in WNUT_TYPES else "O"


class Rows:
    """Rows of tokens on a device; a batch is as long as its longest row."""

    def __init__(self, rows: Sequence[dict[str, Any]], device: str):
        self.lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        self.tensors: Batch = {}
        self.per_token = {
            name
            for name, first in rows[0].items()
            if isinstance(first, (list, tuple)) and all(len(row[name]) == len(row["input_ids"]) for row in rows)
        }
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name in self.per_token:
                filler = -100 if name == "labels" else 0
                values = [[*value, *[filler] * (int(self.lengths.max()) - len(value))] for value in values]
            self.tensors[name] = torch.tensor(values, device=device)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, places: Tensor) -> Batch:
        longest = rounded_up(int(self.lengths[places].max()))
        places = places.to(self.tensors["input_ids"].device)
        found = {name: tensor[places] for name, tensor in self.tensors.items()}
        return {
            name: tensor[:, :longest].contiguous() if name in self.per_token else tensor
            for name, tensor in found.items()
        }

    def __getitems__(self, places: list[int]) -> Batch:
        return self.batch(torch.tensor(places))

    def batches(self) -> list[Batch]:
        return [self.batch(places) for places in torch.arange(len(self)).split(ROWS_PER_BATCH)]


def prepared(rows: Any, model: PreTrainedModel, tokenizer: Any, device: str, **columns: Any) -> Rows:
    found = load_data(rows, model, processor=tokenizer, max_length=MAX_TOKENS, **columns)
    return Rows([found[place] for place in range(len(found))], device)


# The tasks


def sequence_start(folder: str, seed: int, members: int, **settings: Any) -> PreTrainedModel:
    return AutoHydra.from_backbone(folder, num_members=members, seed=seed, **settings)


def token_start(folder: str, seed: int, members: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    names = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: place for place, tag in enumerate(TAGS)}}
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32, **names)
    options = {"class_names": TAGS, "problem_type": "token_classification", "seed": seed}
    return model if members == 1 else AutoHydra.from_backbone(model, num_members=members, **options)


def tasks(data: Path) -> dict[str, Task]:
    emotions = json.loads((data / "text" / "goemotions_labels.json").read_text())
    single = Run("one model", 1, 5e-5, 1.0)
    return {
        "regression": Task(
            partial(sequence_start, problem_type="regression"),
            similarity_rows,
            64,
            replace(single, epochs=6),
            "-rmse",
            {"column": ("sentence1", "sentence2"), "label": "score"},
            {"alpha": 0.1},
        ),
        "multi-label": Task(
            partial(sequence_start, class_names=emotions, problem_type="multi_label_classification"),
            emotion_rows,
            128,
            replace(single, learning_rate=1e-4, epochs=4),
            "map",
            {"column": "text"},
            {"alpha": 0.1, "target": {"coverage": 0.9}},
        ),
        "tokens": Task(
            token_start,
            entity_rows,
            128,
            replace(single, epochs=4),
            "entity_f1",
            {},
            {"target": {"risk": 0.1}, "confidence": 0},
        ),
    }


class Judge:
    """A task's data on a device, and what is trained and measured with it. most: rows of each set"""

    def __init__(self, task: Task, data: Path, start: str, device: str, most: int | None):
        self.task, self.start, self.device = task, start, device
        tokenizer, first = AutoTokenizer.from_pretrained(start), task.start(start, 0, 1)
        read_rows = partial(prepared, model=first, tokenizer=tokenizer, device=device)
        rows = task.rows(data)
        self.train_rows = read_rows(rows["train"][:most], **task.columns)
        parts = [read_rows(rows[part][:most], **task.columns) for part in ("validation", "test")]
        self.validation, self.test = (part.batches() for part in parts)
        self.ood = {}
        for name, others in rows["ood"].items():
            is_labelled = set(others[0]) == set(rows["test"][0])
            columns = task.columns if is_labelled else {"column": "text", "labelled": False}
            self.ood[name] = read_rows(others[:most], **columns).batches()

    def trained(self, run: Run, head: int | None = None) -> PreTrainedModel:
        """head: the seed that the new head is drawn with, by default the run's"""
        model = self.task.start(self.start, run.seed if head is None else head, run.members).to(self.device)
        train(model, run, self.task, self.train_rows, self.device)
        return model

    def reached(self, run: Run) -> float | None:
        """What a training reaches on validation rows, by the task's metric; nothing if it diverges."""
        model = self.trained(run)
        if not all(parameter.isfinite().all() for parameter in model.parameters()):
            return None
        return self.metrics(as_hydra(model), self.validation)[self.task.best.lstrip("-")]

    def metrics(self, model: PreTrainedModel, rows: list[Batch]) -> dict[str, float]:
        return evaluate_uncertainty({"model": model.eval()}, rows).models["model"]["data"]

    def methods(self, single: Run, one_run: Run, seed: int) -> Iterator[tuple[str, PreTrainedModel]]:
        member_seeds = range(seed * MEMBERS, (seed + 1) * MEMBERS)
        # A soup needs members that begin with the same new head.
        members = [self.trained(replace(single, seed=member_seed), member_seeds[0]) for member_seed in member_seeds]
        yield "One model", as_hydra(members[0])
        longer = replace(single, epochs=round(1.5 * single.epochs), seed=member_seeds[0])
        yield "One model, trained 1.5 times as long", as_hydra(self.trained(longer))
        yield "One run", self.trained(replace(one_run, seed=member_seeds[0]))
        yield "Three checkpoints fused, nothing merged", AutoHydra.from_pruned_members(members)
        yield (
            "Three checkpoints fused, three quarters merged",
            AutoHydra.from_pruned_members(members, trunk_layers=0.75),
        )
        yield "Soup of 3", as_hydra(soup(members))
        yield "Deep Ensemble of 3", AutoHydra.from_pruned_members(members, shared=())

    def judged(self, model: PreTrainedModel) -> dict[str, Any]:
        model = model.to(self.device).eval()
        try:
            sentences = calibrate(model, self.validation, **self.task.calibration).sentences
        except ValueError as error:  # a target that cannot be reached
            sentences = [str(error)]
            print(error, flush=True)
        report = evaluate_uncertainty({"model": model}, self.test, self.ood)
        sets = report.models["model"]
        ood = {name: sets[name] for name in report.data_sets()}
        return {"work": count_multiply_adds(model), "metrics": sets["data"], "ood": ood, "promises": sentences}


JUDGES: dict[str, Judge] = {}  # of this process, by task


def judge_of(name: str, options: argparse.Namespace) -> Judge:
    if name not in JUDGES:
        logging.set_verbosity_error()
        task = tasks(options.data)[name]
        JUDGES[name] = Judge(task, options.data, options.start, options.device, options.rows)
    return JUDGES[name]


def try_rate(name: str, run: Run, options: argparse.Namespace) -> float | None:
    return judge_of(name, options).reached(run)


def judge_seed(name: str, runs: dict[str, Run], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    judge = judge_of(name, options)
    return {
        title: rounded(judge.judged(model)) for title, model in judge.methods(runs["single"], runs["one_run"], seed)
    }


def as_hydra(model: PreTrainedModel) -> PreTrainedModel:
    return model if hasattr(model.config, "num_members") else AutoHydra.from_backbone(model)


# Results

SHOWN = {
    "regression": ("rmse", "pearson", "aurc", "interval_coverage", "interval_width"),
    "multi-label": ("map", "f1_micro", "ece", "set_missed", "set_size", "answered_right"),
    "tokens": ("entity_f1", "entity_aurc", "ece", "answered", "answered_risk"),
}


def render(content: dict[str, Any]) -> dict[str, str]:
    """A table for each task and each out-of-distribution set: mean ± standard deviation over the seeds."""
    tables = {}
    for name, found in content["tasks"].items():
        runs = list(found["seeds"].values())
        shown = SHOWN[name]
        first = runs[0]["One model"]
        work = {title: f"{method['work'] / first['work']:.2f}" for title, method in runs[0].items()}
        rows = {
            title: [
                work[title],
                *(cell([run[title]["metrics"].get(metric) for run in runs], ".3f") for metric in shown),
            ]
            for title in runs[0]
        }
        tables[f"tasks/{name}"] = markdown(["work", *shown], rows)
        for other in first["ood"]:
            of_set = [metric for metric in (*shown, "auroc") if metric in first["ood"][other]]
            rows = {
                title: [cell([run[title]["ood"][other].get(metric) for run in runs], ".3f") for metric in of_set]
                for title in runs[0]
            }
            tables[f"tasks/{name}/{other.replace(' ', '-')}"] = markdown(of_set, rows)
    return tables


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with text/")
    parser.add_argument("--start", required=True, help="the folder of the pre-trained model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["regression", "multi-label", "tokens"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="0 chooses learning rates")
    parser.add_argument("--rows", type=int, help="at most so many rows of each set, to see whether it runs")
    parser.add_argument("--workers", type=int, default=1, help="processes; each trains one model at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(words)
    began, known = time.monotonic(), tasks(options.data)
    content: dict[str, Any] = {"machine": where_it_ran(options.device), "tasks": {}}
    if options.output.exists():
        content["tasks"] = json.loads(options.output.read_text())["tasks"]
    found = {name: content["tasks"].setdefault(name, {"seeds": {}}) for name in options.tasks}
    runs = {name: {"single": known[name].single, "one_run": known[name].one_run} for name in options.tasks}

    def write() -> None:
        write_atomically(options.output, json.dumps(content, indent=1) + "\n")

    context = multiprocessing.get_context("spawn")
    several = partial(ProcessPoolExecutor, options.workers, mp_context=context)
    with several() if options.workers > 1 else ThreadPoolExecutor(1) as workers:
        rates = {
            workers.submit(try_rate, name, replace(run, learning_rate=rate), options): (name, kind, f"{rate:g}")
            for name in options.tasks
            for kind, run in runs[name].items()
            for rate in (factor * run.learning_rate for factor in FACTORS)
            if f"{rate:g}" not in found[name].get(kind, {}).get("reached", {})
        }
        for done in as_completed(rates):
            name, kind, rate = rates[done]
            found[name].setdefault(kind, {"reached": {}})["reached"][rate] = done.result()
            write()
        for name, kind in product(options.tasks, ("single", "one_run")):
            values = {float(rate): value for rate, value in found[name][kind]["reached"].items() if value is not None}
            best = (min if known[name].best.startswith("-") else max)(values, key=values.__getitem__)
            found[name][kind]["learning_rate"] = best
        write()
        for name in options.tasks:
            for kind, run in runs[name].items():
                runs[name][kind] = replace(run, learning_rate=found[name][kind]["learning_rate"])
        judged = {
            workers.submit(judge_seed, name, runs[name], seed, options): (name, seed)
            for seed in options.seeds
            for name in options.tasks
            if str(seed) not in found[name]["seeds"]
        }
        for done in as_completed(judged):
            name, seed = judged[done]
            found[name]["seeds"][str(seed)] = done.result()
            write()
            print(f"{name}, seed {seed}: done after {time.monotonic() - began:.0f} s", flush=True)
    print("\n\n".join(f"{name}\n{text}" for name, text in render(content).items()))


if __name__ == "__main__":
    main()
