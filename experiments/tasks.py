"""`finetune` as users have it, with few rows, on real data: sentiment (SST-2), regression (STS-B), multi-label classification
(GoEmotions), token classification (WikiANN).

Two questions. Is the rule by which `finetune` chooses its settings near the best of a sweep? A plain model, with a seed that is not
published. And what do several members, runs and models give with these settings? Each model is calibrated on validation rows, and
judged on test rows and on out-of-distribution rows:

    python -m experiments.tasks --data DIR --start FOLDER --output experiments/results/tasks.json

DIR holds text/NAME.jsonl.gz, FOLDER a BERT such as gte-small. Results are written anew after each job; what the file already has is
not run again.
"""

import argparse
import gzip
import json
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.provenance import where_it_ran
from hydra_transformers import AutoHydra, finetune, load_data
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import DeepEnsemble, soup
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.fusion.plain_models import to_transformers
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.training import HydraTrainingArguments, defaults
from hydra_transformers.training.finetune import FineTuned
from hydra_transformers.uncertainty import calibrate

from .results import rounded
from .table import cell, markdown


Rows = list[dict[str, Any]]
Settings = dict[str, Any]  # arguments of `finetune`
MOST = {"validation": 1000, "test": 2000, "ood": 1000}  # rows
BATCH_SIZE = 32  # the default of `finetune`
BATCH_SIZE_OF_EVALUATION = 256
MAX_TOKENS = 64
ARGUMENTS = {"save_only_model": True, "bf16": True, "per_device_eval_batch_size": BATCH_SIZE_OF_EVALUATION}
WNUT_TYPES = {"person": "PER", "location": "LOC", "corporation": "ORG", "group": "ORG"}
FREQUENT_LABELS = 10


# What is trained


@dataclass(frozen=True)
class Plan:
    """What `finetune` is asked for; None leaves its default.

    rate, epochs: times the rule's
    other_classifier_rate: whether classifiers learn at the rate that the rule has for the other tasks
    models: how many are trained, which differ by their seeds; several are also averaged and ensembled
    """

    runs: int | None = 1
    members: int | None = 1
    rate: float = 1.0
    epochs: float = 1.0
    layer_decay: float | None = None
    other_classifier_rate: bool = False
    models: int = 1

    @property
    def length(self) -> float:
        """Return about how long it trains; one model by the rule trains for 1."""
        runs = defaults.RUNS if self.runs is None else self.runs
        of_a_run = 1.0 if self.members == 1 else 1.5
        return self.models * runs * self.epochs * of_a_run


RULE = "The rule"
SWEEP_SEED = 0
SEEDS = (1, 2, 3)
SWEEP = {
    RULE: Plan(),
    "Half the rate": Plan(rate=0.5),
    "Twice the rate": Plan(rate=2),
    "Half the rate, the same in all layers": Plan(rate=0.5, layer_decay=1.0),
    "Twice the rate, 0.75 a layer": Plan(rate=2, layer_decay=0.75),
    "Half the epochs": Plan(epochs=0.5),
    "Twice the epochs": Plan(epochs=2),
    "The other rate of classifiers": Plan(other_classifier_rate=True),
}
ONE_MODEL = "One model"
SOUP = "Soup of three models"
DEEP_ENSEMBLE = "Deep Ensemble of three models"
THREE_MODELS = "Three models"  # makes these three
LONGER = "One model, three times as long"
ONE_RUN = "One run of three"
TWO_RUNS = "Two runs, fused: the default"
TRAININGS = {
    THREE_MODELS: Plan(models=3),
    LONGER: Plan(epochs=3),
    ONE_RUN: Plan(members=defaults.MEMBERS),
    TWO_RUNS: Plan(runs=None, members=None),
}
METHODS = (ONE_MODEL, LONGER, ONE_RUN, TWO_RUNS, SOUP, DEEP_ENSEMBLE)
PLANS = SWEEP | TRAININGS


@dataclass(frozen=True)
class Job:
    """A plan for a task with a seed: what one process does at a time, and what the results file has or has not.

    plan: of `PLANS`
    """

    task: str
    plan: str
    seed: int


@dataclass(frozen=True)
class Task:
    """
    rows: (folder of the data) -> train, validation and test rows, and out-of-distribution sets by name
    main: what settings are compared by, a metric, with a minus if the smallest is best, times how much
    shown: of the table: what, a metric of the test rows or, after a slash, of an out-of-distribution set, times how much
    problem: the name of the task in the package
    kind: of its inputs, as `PreparedData` has it
    columns, calibration: settings of `load_data` and of `calibrate`
    """

    rows: Callable[[Path], tuple[Rows, Rows, Rows, dict[str, Rows]]]
    main: tuple[str, str, float]
    shown: tuple[tuple[str, str, float], ...]
    calibration: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    problem: str = "single_label_classification"
    kind: str = "text"

    @property
    def metric(self) -> str:
        return self.main[1].removeprefix("-")

    def score(self, metrics: dict[str, float]) -> float:
        """Return the main metric, such that larger is better."""
        if self.main[1].startswith("-"):
            return -metrics[self.metric]
        return metrics[self.metric]


# Data


def read(folder: Path, name: str) -> Rows:
    """In an order that does not depend on the machine, and not that of the file."""
    with gzip.open(folder / "text" / f"{name}.jsonl.gz", "rt", encoding="utf8") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(0).shuffle(rows)
    return rows


def sentiment_rows(folder: Path) -> tuple[Rows, Rows, Rows, dict[str, Rows]]:
    """Validation rows are phrases, as the training rows are; those of the published split are the test rows."""
    known = read(folder, "sst2_train")
    validation = known[: MOST["validation"]]
    train = known[MOST["validation"] :]
    others = {name: read(folder, name) for name in ("amazon_snippets", "trec")}
    return train, validation, read(folder, "sst2_validation"), unlabelled(others)


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
        ("Brier score x 1000", "-brier", 1000),
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
        ("root mean squared error", "-rmse", 1),
        (
            ("root mean squared error", "rmse", 1),
            ("width of the intervals", "interval_width", 1),
            ("in their interval, %; promised: at least 90", "interval_coverage", 100),
            ("... forums, OOD: nothing is promised", "forums/interval_coverage", 100),
        ),
        {"alpha": 0.1},
        {"column": ("sentence1", "sentence2"), "label": "score"},
        problem="regression",
    ),
    "multi-label": Task(
        emotion_rows,
        ("mean average precision, %", "map", 100),
        (
            ("mean average precision, %", "map", 100),
            ("labels in the sets", "set_size", 1),
            ("missed labels, %; promised: at most 10", "set_missed", 100),
        ),
        {"alpha": 0.1, "target": {"coverage": 0.9}},
        {"column": "text", "label": "labels"},
        problem="multi_label_classification",
    ),
    "tokens": Task(
        entity_rows,
        ("F1 of entities, %", "entity_f1", 100),
        (
            ("F1 of entities, %", "entity_f1", 100),
            ("answered entities, %", "answered", 100),
            ("wrong of the answered, %; the target: 10", "answered_risk", 100),
            ("... social media, OOD: nothing is promised", "social media/answered_risk", 100),
        ),
        {"target": {"risk": 0.1}, "confidence": 0},
        {"column": "tokens", "label": "tags"},
        problem="token_classification",
        kind="words",
    ),
}


@cache  # once in each process
def read_task(name: str, folder: Path, most_rows: int) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """Return the splits of a task, at most so many training rows, and its out-of-distribution sets."""
    *parts, others = TASKS[name].rows(folder)
    most = MOST | {"train": most_rows}
    splits = {}
    for split, rows in zip(("train", "validation", "test"), parts, strict=True):
        splits[split] = rows[: most[split]]
    return splits, {other: rows[: MOST["ood"]] for other, rows in others.items()}


# What `finetune` chooses, and what is passed instead


@dataclass(frozen=True)
class TrainingRows:
    """What the rule asks of a training set."""

    count: int
    kind: str

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class TrainingLength:
    """What the rule asks of training arguments, those of one process."""

    num_train_epochs: float
    train_batch_size: int = BATCH_SIZE
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    max_steps: int = -1


def rule_for(task: Task, rows: int, epochs: float | None = None) -> Settings:
    """Return what `finetune` chooses for so many training rows, and where they are passed, so many epochs."""
    if epochs is None:
        epochs = defaults.epochs_for(rows, task.kind)
    return {
        "runs": defaults.RUNS,
        "num_members": defaults.MEMBERS,
        "learning_rate": defaults.learning_rate_for(TrainingLength(epochs), TrainingRows(rows, task.kind)),
        "epochs": epochs,
        "layer_decay": HydraTrainingArguments.layer_decay,
        "classifier_learning_rate": defaults.classifier_rate_for(task.problem),
    }


def passed_settings(plan: Plan, task: Task, rows: int) -> Settings:
    """Return what a plan passes to `finetune`: only what differs from its defaults."""
    rule = rule_for(task, rows)
    passed: Settings = {"runs": plan.runs, "num_members": plan.members, "layer_decay": plan.layer_decay}
    if plan.rate != 1:
        passed["learning_rate"] = plan.rate * rule["learning_rate"]
    if plan.epochs != 1:  # the rule has a lower rate for more steps
        passed["epochs"] = plan.epochs * rule["epochs"]
    if plan.other_classifier_rate:
        rates = {defaults.RATE_OF_CLASSIFIERS, defaults.RATE_OF_OTHER_HEADS}
        [passed["classifier_learning_rate"]] = rates - {rule["classifier_learning_rate"]}
    return {name: value for name, value in passed.items() if value is not None}


# One job


def rows_of(job: Job, options: argparse.Namespace) -> Rows:
    """Train what a job says, and return a row of the results file for each model that comes of it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    task = TASKS[job.task]
    plan = PLANS[job.plan]
    data, others = read_task(job.task, options.data, options.rows)
    passed = passed_settings(plan, task, len(data["train"]))
    began = time.perf_counter()

    # Each run of a model has a seed of its own, and no two models share one.
    seeds = [10 * job.seed + index for index in range(plan.models)]
    results = [train(seed, job.task, data, passed, options) for seed in seeds]
    models = name_models(job, [result.model for result in results])

    # What it cost, in models that are trained by the rule
    settings = rule_for(task, len(data["train"]), passed.get("epochs")) | passed
    plain = multiply_adds_of(new_run(1, task, results[0], options))
    work_of_run = multiply_adds_of(new_run(settings["num_members"], task, results[0], options)) / plain
    trainings = settings["runs"] * plan.epochs * work_of_run

    rows = []
    for method, model in models.items():
        trained = 1 if method == ONE_MODEL else plan.models
        row = {"task": job.task, "plan": job.plan, "method": method, "seed": job.seed, "settings": settings}
        row |= {"trainings": trained * trainings, "work": multiply_adds_of(model) / plain}
        rows.append(row | judge(model, results[0], job, others))
    seconds = round(time.perf_counter() - began)
    return [rounded(row | {"seconds": seconds}) for row in rows]


def train(seed: int, name: str, data: dict[str, Rows], passed: Settings, options: argparse.Namespace) -> FineTuned:
    with tempfile.TemporaryDirectory() as folder:
        return finetune(
            options.start,
            data,
            Path(folder) / "model",
            seed=seed,
            regression=TASKS[name].problem == "regression",
            max_length=MAX_TOKENS,
            batch_size=BATCH_SIZE,
            progress=False,
            use_cpu=options.device == "cpu",
            **TASKS[name].columns,
            **ARGUMENTS,
            **passed,
        )


def name_models(job: Job, models: Sequence[PreTrainedModel]) -> dict[str, nn.Module]:
    """Return the models of a job by method, also those that are made of several without training."""
    if len(models) == 1:
        return {job.plan: models[0]}
    # The single model is judged last: calibrating changes it, and the ensemble runs it.
    return {SOUP: soup(models), DEEP_ENSEMBLE: DeepEnsemble(models), ONE_MODEL: models[0]}


def new_run(members: int, task: Task, result: FineTuned, options: argparse.Namespace) -> PreTrainedModel:
    """Return the model that a run of `finetune` trains for these classes, before its training."""
    config = result.model.config
    problem_type = None
    if task.problem != "single_label_classification":
        problem_type = task.problem
    return AutoHydra.from_backbone(
        options.start,
        num_members=members,
        trunk_layers=defaults.TRUNK,
        class_names=[config.id2label[index] for index in range(config.num_labels)],
        problem_type=problem_type,
    )


def multiply_adds_of(model: nn.Module) -> int:
    """Count multiply-adds of inference; Hydras of one member count as the plain models that they stand for."""
    if isinstance(model, DeepEnsemble):
        return sum(map(multiply_adds_of, model.models))
    if model.num_members == 1:
        model = to_transformers(model)
    return count_multiply_adds(model)


def judge(model: nn.Module, result: FineTuned, job: Job, others: dict[str, Rows]) -> dict[str, Any]:
    """Return the metrics of the validation and test rows; of what is published also promises and those of other sets."""

    def measure(model: nn.Module, data: Any, ood: Any = None) -> Any:
        return evaluate_uncertainty({"model": model}, data, ood, batch_size=BATCH_SIZE_OF_EVALUATION)

    validation = {"validation": measure(model, result.validation).models["model"]["data"]}
    if job.seed == SWEEP_SEED:
        return validation | {"test": measure(model, result.test).models["model"]["data"]}

    task = TASKS[job.task]
    try:
        calibration = calibrate(model, result.validation, batch_size=BATCH_SIZE_OF_EVALUATION, **task.calibration)
        promises = calibration.sentences
        model = calibration.model
    except ValueError as error:  # a target that cannot be reached
        promises = [str(error)]

    ood = {}
    for name, rows in others.items():
        columns = {"column": "text", "labelled": False}
        if result.test.label in rows[0]:
            columns = task.columns
        ood[name] = load_data(rows, result.model, processor=result.processor, max_length=MAX_TOKENS, **columns)
    found = measure(model, result.test, ood)
    metrics = found.models["model"]
    shifted = {name: metrics[name] for name in found.data_sets()}
    return validation | {"test": metrics["data"], "ood": shifted, "promises": promises}


# All jobs


def jobs_left(options: argparse.Namespace, rows: Rows) -> list[Job]:
    """Return the jobs that the results file does not have, the longest first, so that none runs alone at the end."""
    jobs = []
    for task in options.tasks:
        for seed in options.seeds:
            plans = SWEEP if seed == SWEEP_SEED else TRAININGS
            jobs += [Job(task, plan, seed) for plan in plans]
    done = {Job(row["task"], row["plan"], row["seed"]) for row in rows}
    left = [job for job in jobs if job not in done]
    return sorted(left, key=lambda job: -PLANS[job.plan].length)


def is_final(row: dict[str, Any]) -> bool:
    """Whether a row stays: one that diverged would diverge again, other errors may not come back."""
    return "error" not in row or row["error"].startswith("DivergedError")


def finished_jobs(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[tuple[Job, Future]]:
    """Run jobs, and yield each with what became of it."""
    if options.workers > 1:
        pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
    else:
        pool = ThreadPoolExecutor(1)
    began = time.perf_counter()
    waiting = list(jobs)
    running: dict[Future, Job] = {}
    with pool:
        while True:
            while waiting and len(running) < options.workers and time.perf_counter() - began < options.seconds:
                job = waiting.pop(0)
                running[pool.submit(rows_of, job, options)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with text/")
    parser.add_argument("--start", required=True, help="the folder of the pre-trained model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[SWEEP_SEED, *SEEDS], help="0 is the sweep")
    parser.add_argument("--rows", type=int, default=2000, help="of training, at most")
    parser.add_argument("--workers", type=int, default=1, help="processes; each trains one model at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(words)

    machine = where_it_ran(options.device)
    content = {"what": "tasks", "start": "/".join(Path(options.start).parts[-2:]), "rows": options.rows}
    content |= {"machine": machine, "tasks": []}
    if options.output.exists():
        begun = json.loads(options.output.read_text())
        same = [begun.get(key) == content[key] for key in ("what", "start", "rows")]
        if not all(same) or begun["machine"]["package"] != machine["package"]:
            parser.error(f"{options.output} is of other rows, another model or another package: pass another file")
        content["tasks"] = [row for row in begun["tasks"] if is_final(row)]
    rows = content["tasks"]

    began = time.perf_counter()
    for job, future in finished_jobs(jobs_left(options, rows), options):
        error = future.exception()  # one that fails loses no other
        found = [asdict(job) | {"error": repr(error)}] if error is not None else future.result()
        rows += found
        write_atomically(options.output, json.dumps(content, indent=1) + "\n")
        outcome = found[0].get("error", f"{found[0].get('seconds')} s")
        print(f"{time.perf_counter() - began:.0f} s: {job.task}, {job.plan}, seed {job.seed}: {outcome}", flush=True)
    print("\n\n".join(f"{name}\n{text}" for name, text in render(content).items()))


# Tables


def render(content: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the methods and of the rule, as far as there are results."""
    if content.get("what") != "tasks":  # by an earlier recipe
        return {}
    rows = [row for row in content["tasks"] if "error" not in row]
    tables = {}
    methods = table_of_methods(rows)
    if methods:
        tables["tasks"] = markdown(METHODS, methods)
    rule = table_of_rule(rows)
    if rule:
        headings = ("by", "the rule", "best of the sweep", "validation: the rule", "the best is better by")
        tables["tasks/rule"] = markdown([*headings, "test: the rule", "the best is better by"], rule)
    return tables


def table_of_methods(rows: Rows) -> dict[str, list[str]]:
    """Return mean ± standard deviation over the seeds that are there, by what is measured."""
    lines: dict[str, list[str]] = {}
    for name, task in TASKS.items():
        judged = [[row for row in rows if (row["task"], row["method"]) == (name, method)] for method in METHODS]
        if not any(judged):
            continue
        for title, place, factor in task.shown:
            lines[f"{name}: {title}"] = [cell_of(of_seeds, place, factor) for of_seeds in judged]
        for title, key in (("trainings", "trainings"), ("work", "work")):
            lines[f"{name}: {title}"] = [cell([row[key] for row in of_seeds], ".2f") for of_seeds in judged]
    return lines


def cell_of(rows: Rows, place: str, factor: float) -> str:
    """Return a metric of a method over its seeds; a target that could not be reached decides nothing."""
    *others, metric = place.split("/")
    found = [row["ood"][others[0]] if others else row["test"] for row in rows]
    values = [factor * metrics[metric] for metrics in found if metric in metrics]
    text = cell(values, digits_for(factor))
    if values and len(values) < len(SEEDS):
        text += f" ({len(values)} of {len(SEEDS)} seeds)"
    return text


def digits_for(factor: float) -> str:
    return ".3f" if factor == 1 else ".1f"


def table_of_rule(rows: Rows) -> dict[str, list[str]]:
    """Return for each task what the rule reaches, and how much better the setting is that is best on the validation rows."""
    lines = {}
    for name, task in TASKS.items():
        sweep = {row["method"]: row for row in rows if (row["task"], row["seed"]) == (name, SWEEP_SEED)}
        if RULE not in sweep:
            continue
        rule = sweep[RULE]
        best = max(sweep.values(), key=lambda row: task.score(row["validation"]))
        title, _, factor = task.main
        digits = digits_for(factor)
        cells = [title, describe(rule["settings"])]
        cells.append(f"{best['method'].lower()}: {describe(best['settings'])}")
        for split in ("validation", "test"):
            gain = task.score(best[split]) - task.score(rule[split])
            cells += [f"{factor * rule[split][task.metric]:{digits}}", f"{factor * gain:+{digits}}"]
        lines[name] = cells
    return lines


def describe(settings: Settings) -> str:
    rates = f"{settings['learning_rate']:.1e}, {settings['layer_decay']:g} a layer"
    return f"{rates}, classifier {settings['classifier_learning_rate']:.0e}, {settings['epochs']:g} epochs"


if __name__ == "__main__":
    main()
