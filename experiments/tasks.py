"""Other tasks on real data: regression (STS-B), multi-label (GoEmotions), tokens (WikiANN) and rewards (SST-2).

One model, a Deep Ensemble, a soup and Hydras of the same three fine-tunings, which begin with the same new head, over seeds.
Each is calibrated on validation rows and judged on test rows and out-of-distribution rows:

    python -m experiments.tasks --data DIR --start FOLDER --output OUT

DIR holds text/NAME.jsonl.gz, FOLDER a BERT such as gte-small. Results are in OUT/tasks.json and OUT/tasks.md, written anew
after each seed of each task.
"""

import argparse
import gzip
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from benchmarks.provenance import where_it_ran
from hydra_transformers import AutoHydra, load_data
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import soup
from hydra_transformers.models.regression import aggregated
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import calibrate
from hydra_transformers.uncertainty.rewards import best_of_n, preference_metrics


Batch = dict[str, Tensor]
MEMBERS = 3
ROWS_PER_BATCH = 256  # where nothing is trained
MAX_TOKENS = 64
WNUT_TYPES = {"person": "PER", "location": "LOC", "corporation": "ORG", "group": "ORG"}
TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
# Rewards
PAIRS, HELD_OUT_PAIRS, FLIPPED = 2_000, 1_000, 0.25
PROMPTS, ANSWERS, COUNTS = 200, 256, (1, 2, 4, 8, 16, 32, 64, 128, 256)
AGGREGATES = ("mean", "min", "mean-2std")


@dataclass(frozen=True)
class Training:
    """AdamW with a warm-up of a tenth and a linear decay; new parameters learn ten times as fast."""

    epochs: int
    rows_per_batch: int
    rate: float = 5e-5


@dataclass(frozen=True)
class Task:
    """
    start: (folder, seed) -> a pre-trained model with a new head
    rows: (folder of the data) -> rows by part: train, validation, test, and ood those of other sets
    settings: of `load_data` and of `calibrate`
    """

    start: Callable[[str, int], PreTrainedModel]
    rows: Callable[[Path], dict[str, Any]]
    training: Training
    columns: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)


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
    parts = {"train": "train", "validation": "dev", "test": "test"}
    found = {part: read(folder, f"goemotions_{name}") for part, name in parts.items()}
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
        longest = int(self.lengths[places].max())
        places = places.to(self.tensors["input_ids"].device)
        found = {name: tensor[places] for name, tensor in self.tensors.items()}
        return {
            name: each[:, :longest].contiguous() if name in self.per_token else each for name, each in found.items()
        }

    def batches(self) -> list[Batch]:
        return [self.batch(places) for places in torch.arange(len(self)).split(ROWS_PER_BATCH)]


def prepared(rows: Any, model: PreTrainedModel, tokenizer: Any, device: str, **columns: Any) -> Rows:
    found = load_data(rows, model, processor=tokenizer, max_length=MAX_TOKENS, **columns)
    return Rows([found[place] for place in range(len(found))], device)


# Training


def finetune(
    model: PreTrainedModel,
    rows: Rows,
    training: Training,
    seed: int,
    loss_of: Callable[[Any, Batch], Tensor] | None = None,
) -> PreTrainedModel:
    """Trains the model itself. loss_of: (model, batch) -> loss; by default the model's own"""
    device = rows.tensors["input_ids"].device
    model, generator = model.to(device).train(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    is_new = {name: not name.startswith("bert.") or ".pooler." in name for name, _ in model.named_parameters()}
    groups = [
        {
            "params": [each for name, each in model.named_parameters() if is_new[name] == new],
            "lr": training.rate * (1 + 9 * new),
        }
        for new in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=device.type == "cuda")
    steps = training.epochs * math.ceil(len(rows) / training.rows_per_batch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1.0)
    )
    for _ in range(training.epochs):
        for places in torch.randperm(len(rows), generator=generator).split(training.rows_per_batch):
            batch = rows.batch(places)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(**batch).loss if loss_of is None else loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return model.eval()


def methods(members: list[PreTrainedModel]) -> Iterator[tuple[str, Callable[[], PreTrainedModel]]]:
    yield "One model", partial(AutoHydra.from_backbone, members[0])
    yield "Deep Ensemble of 3", partial(AutoHydra.from_pruned_members, members, shared=())
    yield "Soup of 3", lambda: AutoHydra.from_backbone(soup(members))
    yield "Hydra of 3", partial(AutoHydra.from_pruned_members, members)
    yield "Hydra, half of the layers merged", partial(AutoHydra.from_pruned_members, members, trunk_layers=0.5)
    yield "Hydra, three quarters merged", partial(AutoHydra.from_pruned_members, members, trunk_layers=0.75)


# The tasks


def sequence_start(folder: str, seed: int, **settings: Any) -> PreTrainedModel:
    return AutoHydra.from_backbone(folder, seed=seed, **settings)


def token_start(folder: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    names = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: place for place, tag in enumerate(TAGS)}}
    return AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32, **names)


def tasks(data: Path) -> dict[str, Task]:
    emotions = json.loads((data / "text" / "goemotions_labels.json").read_text())
    several = {"class_names": emotions, "problem_type": "multi_label_classification"}
    return {
        "regression": Task(
            partial(sequence_start, problem_type="regression"),
            similarity_rows,
            Training(epochs=6, rows_per_batch=64),
            {"column": ("sentence1", "sentence2"), "label": "score"},
        ),
        "multi-label": Task(
            partial(sequence_start, **several),
            emotion_rows,
            Training(epochs=4, rows_per_batch=128, rate=1e-4),
            {"column": "text"},
            {"target": {"coverage": 0.9}},
        ),
        "tokens": Task(
            token_start,
            entity_rows,
            Training(epochs=3, rows_per_batch=128),
            {},
            {"target": {"risk": 0.1}, "confidence": 0},
        ),
    }


def run_task(task: Task, data: Path, start: str, seed: int, device: str, most: int | None) -> dict[str, Any]:
    """What each method reached with one seed: method -> results."""
    tokenizer, first = AutoTokenizer.from_pretrained(start), task.start(start, 0)
    rows, ood = task.rows(data), {}
    read_rows = partial(prepared, model=first, tokenizer=tokenizer, device=device)
    train = read_rows(rows["train"][:most], **task.columns)
    validation, test = (read_rows(rows[part][:most], **task.columns).batches() for part in ("validation", "test"))
    for name, each in rows["ood"].items():
        columns = task.columns if set(each[0]) == set(rows["test"][0]) else {"column": "text", "labelled": False}
        ood[name] = read_rows(each[:most], **columns).batches()
    own_seeds = range(seed * MEMBERS, (seed + 1) * MEMBERS)
    members = [finetune(task.start(start, own_seeds[0]), train, task.training, own) for own in own_seeds]
    found = {}
    for name, build in methods(members):
        model = build().to(device).eval()
        try:
            sentences = calibrate(model, validation, alpha=0.1, **task.calibration).sentences
        except ValueError as error:
            sentences = [str(error)]
        report = evaluate_uncertainty({name: model}, test, ood)
        found[name] = {
            "rows": report.models[name]["data"]["num_samples"],
            "num_members": report.num_members[name],
            "metrics": report.models[name]["data"],
            "ood": {each: report.models[name][each] for each in report.data_sets()},
            "promises": sentences,
        }
    return found


# Rewards


def run_rewards(data: Path, start: str, seed: int, device: str, most: int | None) -> dict[str, Any]:
    """Proxies learn from pairs that a gold model prefers one of, a quarter of them the wrong one; best of n by their scores."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    reviews = read(data, "sst2_train")[:most]
    gold = sequence_start(start, 100, class_names=["negative", "positive"])
    all_rows = prepared(reviews, gold, tokenizer, device, column="text", label="label")
    gold = finetune(gold, all_rows, Training(epochs=2, rows_per_batch=256), 100)
    generator = torch.Generator().manual_seed(seed)
    long = torch.tensor([place for place, row in enumerate(reviews) if len(row["text"].split()) >= 4])
    order = long[torch.randperm(len(long), generator=generator)]
    pairs = min(PAIRS, len(order) // 6)
    held_out = min(HELD_OUT_PAIRS, len(order) // 12)
    used, judged = order[: 2 * pairs], order[2 * pairs : 2 * (pairs + held_out)]
    others = order[2 * (pairs + held_out) :]
    gold_scores = member_scores(gold, all_rows, order, 2).cpu()  # (rows, 1, 2)
    value = torch.full((len(reviews),), math.nan)
    value[order] = (gold_scores[:, 0, 1] - gold_scores[:, 0, 0]).float()
    chosen, rejected = ordered_pairs(used.view(-1, 2), value)
    flip = torch.rand(pairs, generator=generator) < FLIPPED
    chosen, rejected = torch.where(flip, rejected, chosen), torch.where(flip, chosen, rejected)
    places = Rows([{"input_ids": [0, 0]}] * pairs, device)  # the loop draws numbers of pairs
    places.tensors["pair"] = torch.arange(pairs, device=device)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        own = batch["pair"].cpu()
        texts = without_labels(all_rows.batch(torch.cat([chosen[own], rejected[own]])))
        scores = model(**texts).logits.squeeze(-1).float()
        return -nn.functional.logsigmoid(scores[: len(own)] - scores[len(own) :]).mean()

    own_seeds = range(seed * MEMBERS, (seed + 1) * MEMBERS)
    training = Training(epochs=4, rows_per_batch=64)
    members = [
        finetune(sequence_start(start, own_seeds[0], problem_type="regression"), places, training, own, loss_of)
        for own in own_seeds
    ]
    answers = min(ANSWERS, len(others))
    groups = torch.stack([others[torch.randperm(len(others), generator=generator)[:answers]] for _ in range(PROMPTS)])
    counts = [count for count in COUNTS if count <= answers]
    better, worse = ordered_pairs(judged.view(-1, 2), value)
    found = {}
    for name, build in methods(members):
        model = build().to(device).eval()
        scores = torch.full((len(reviews), model.config.num_members, 1), math.nan, dtype=torch.float64)
        scores[order] = member_scores(model, all_rows, order, 1).double().cpu()
        for aggregate in AGGREGATES if model.config.num_members > 1 else AGGREGATES[:1]:
            title = name if aggregate == "mean" else f"{name}, {aggregate}"
            metrics = preference_metrics(scores[better], scores[worse], aggregate)
            of_pool = aggregated(scores, aggregate).squeeze(-1)
            metrics["best_of"] = best_of_n(of_pool[groups], value[groups], counts)
            found[title] = {"metrics": metrics}
    return found


def without_labels(batch: Batch) -> Batch:
    return {name: each for name, each in batch.items() if name != "labels"}


def ordered_pairs(pairs: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The row of higher value of each pair (pairs, 2), and the other."""
    is_first = value[pairs[:, 0]] >= value[pairs[:, 1]]
    first, second = pairs.unbind(dim=1)
    return torch.where(is_first, first, second), torch.where(is_first, second, first)


@torch.inference_mode()
def member_scores(model: nn.Module, rows: Rows, places: Tensor, outputs: int) -> Tensor:
    """(places, members, outputs)"""
    found = []
    for own in places.split(ROWS_PER_BATCH):
        output = model(**without_labels(rows.batch(own)))
        logits = output.get("member_logits", output.logits)
        found.append(logits if logits.dim() == 3 else logits.view(len(own), 1, outputs))
    return torch.cat(found)


# Results

COLUMNS = {
    "regression": ("rmse", "pearson", "spearman", "aurc", "interval_coverage", "interval_width"),
    "multi-label": (
        "map",
        "f1_micro",
        "f1_macro",
        "ece",
        "exact_match",
        "set_missed",
        "set_size",
        "answered_right",
    ),
    "tokens": (),  # those that the report has
    "rewards": ("pair_accuracy", "wrong_pairs_auroc"),
}


def tables(results: dict[str, Any]) -> str:
    """A table for each task and each set: mean ± standard deviation over the seeds."""
    parts = []
    for task, seeds in results["tasks"].items():
        parts.append(f"## {task}\n")
        runs = list(seeds.values())
        parts.append(table(runs, lambda run: run["metrics"], COLUMNS[task]))
        for name in dict.fromkeys(name for run in runs for each in run.values() for name in each.get("ood", {})):
            parts += [
                f"### Out of distribution: {name}\n",
                table(
                    runs, lambda run, name=name: run["ood"][name], (*COLUMNS[task], "auroc") if COLUMNS[task] else ()
                ),
            ]
        if task == "rewards":
            best = [{title: {"metrics": each["metrics"]["best_of"]} for title, each in run.items()} for run in runs]
            parts += ["### Gold score of the best of n\n", table(best, lambda run: run["metrics"], ())]
    return "\n".join(parts)


def table(runs: list[dict[str, Any]], metrics_of: Callable[[dict[str, Any]], dict], columns: Sequence[str]) -> str:
    titles = list(dict.fromkeys(title for run in runs for title in run))
    found = {title: [metrics_of(run[title]) for run in runs if title in run] for title in titles}
    names = list(dict.fromkeys(str(name) for each in found.values() for metrics in each for name in metrics))
    names = [name for name in columns or names if name in names and name not in ("best_of",)]
    lines = [f"| | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for title, each in found.items():
        by_name = [{str(name): value for name, value in metrics.items()} for metrics in each]
        lines.append(
            f"| {title} | " + " | ".join(cell([m[name] for m in by_name if name in m]) for name in names) + " |"
        )
    return "\n".join(lines) + "\n"


def cell(values: list[float]) -> str:
    values = [value for value in values if value is not None and not math.isnan(value)]
    if not values:
        return "-"
    return f"{mean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with text/")
    parser.add_argument("--start", required=True, help="the folder of the pre-trained model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["multi-label", "regression", "tokens", "rewards"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, help="at most so many rows of each set, to see whether it runs")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds, after which no seed is begun")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    logging.set_verbosity_error()
    began, results = time.monotonic(), where_it_ran(options.device) | {"tasks": {}}
    known = tasks(options.data)
    options.output.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:  # all tasks have a seed before any has two
        for name in options.tasks:
            if time.monotonic() - began > options.stop_after:
                return
            settings = (options.data, options.start, seed, options.device, options.rows)
            found = run_rewards(*settings) if name == "rewards" else run_task(known[name], *settings)
            results["tasks"].setdefault(name, {})[str(seed)] = found
            write_atomically(options.output / "tasks.json", json.dumps(results, indent=1) + "\n")
            write_atomically(options.output / "tasks.md", tables(results))
            print(f"{name}, seed {seed}: done after {time.monotonic() - began:.0f} s", flush=True)
    print(tables(results))


if __name__ == "__main__":
    main()
