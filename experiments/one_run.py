"""How to fine-tune a Hydra in one run, and what stands beside it: one model, Deep Ensembles, soups, fused checkpoints.

    python -m experiments.one_run --setting images --data DIR --start FOLDER --output results/one-run-images.json
    python -m experiments.one_run --setting clinc150-small --only seeds composed --data DIR --start FOLDER --output OUT.json
    python -m experiments.one_run --rows 64 --workers 1 ...                           # does it run? few rows of each set

Every training is plain torch on the package's models, with AdamW, a cosine schedule with warm-up and the same batches for all
methods. Every method has its own learning rates: `sweep` tries them with one seed, `finalists` the three best with two seeds more, and
the best mean Brier score on validation rows decides (of soups, `composed`). "validation" is what choices are made on; "test", with near
and far out-of-distribution sets, is for the table of what was chosen. What the results file already has is not run again.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from benchmarks.provenance import where_it_ran
from hydra_transformers import AutoHydra
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import soup
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.uncertainty import classification_metrics, ood_metrics, ood_score
from hydra_transformers.uncertainty.metrics import diversity_metrics, error_coverage_curve, sample_values

from .local_files import read_strings, tokenized
from .pretrained import new_dinov2, read_sst2, read_tiny_imagenet
from .rows import TensorRows
from .splits import Splits


Row = dict[str, Any]  # of a results file
SEEDS = (0, 100, 200)
EVALUATION_BATCH = 500
WEIGHT_DECAY, WARM_UP = 0.05, 0.1
OWN, SHARED = ("embeddings",), ("embeddings", "layernorm", "mlp")  # what members share behind the trunk


@dataclass(frozen=True)
class Run:
    """One training.

    members: 1 for a plain model; learning_rate: of the first `trunk` layers, which the members of a Hydra share
    branch_rate: multiplies the learning rate of the layers behind
    start: "pretrained", or "soup" to tune the average of the checkpoints of this seed
    """

    group: str
    members: int = 3
    learning_rate: float = 2.5e-5
    branch_rate: float = 6.0
    trunk: int = 9
    shared: tuple[str, ...] = OWN
    epochs: int = 9
    loss: str = "members"
    seed: int = 0
    start: str = "pretrained"


@dataclass(frozen=True)
class Setting:
    """
    read: (folder, start) -> Splits; new_model: (start, seed) -> a pre-trained model with a new classifier
    single, one_run: the usual training of one model and of a Hydra; epochs of others are multiples of these
    members: how many, of Deep Ensembles and of Hydras
    branch_rates: that `sweep` tries
    """

    read: Callable[[Path, Path], Splits]
    new_model: Callable[[Path, int], PreTrainedModel]
    batch: int
    classifier_rate: float
    single: Run
    one_run: Run
    members: tuple[int, ...] = (3, 5)
    branch_rates: tuple[float, ...] = (1.0, 3.0, 6.0)


def new_image_model(start: Path, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return new_dinov2(str(start))


def new_text_model(classes: int) -> Callable[[Path, int], PreTrainedModel]:
    """The pooler, which the checkpoint does not have, starts from the same weights for all seeds."""

    def new_model(start: Path, seed: int) -> PreTrainedModel:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=classes, dtype=torch.float32)
        torch.manual_seed(seed)
        nn.init.normal_(model.classifier.weight, std=model.config.initializer_range)
        return model

    return new_model


def read_clinc(training: str) -> Callable[[Path, Path], Splits]:
    """150 intents; out of scope as near, questions and news sentences as far out-of-distribution sets."""

    def read(folder: Path, start: Path) -> Splits:
        tokenizer = AutoTokenizer.from_pretrained(start)
        names = sorted(set(read_strings(folder, "clinc150_train")[1]))

        def rows(name: str, labelled: bool = True) -> TensorRows:
            texts, labels = read_strings(folder, name)
            indices = [names.index(label) for label in labels] if labelled else [None] * len(texts)
            found = tokenized(texts, indices, tokenizer, max_length=32)
            return found if name.startswith("clinc150_train") else found.sorted_by_length()

        validation = rows("clinc150_val")
        return Splits(
            train=rows(training),
            validation=validation,
            circuit_id=validation,
            circuit_ood=rows("clinc150_oos_val", False),
            validation_ood=rows("clinc150_oos_val", False),
            test=rows("clinc150_test"),
            ood={
                "near": {"out of scope": rows("clinc150_oos_test", False)},
                "far": {"trec": rows("trec", False), "rte": rows("rte", False)},
            },
        )

    return read


TEXT = Run("one model", 1, 5e-5, 1.0, epochs=12)
SETTINGS = {
    "images": Setting(
        read_tiny_imagenet,
        new_image_model,
        256,
        1e-3,
        Run("one model", 1, 2.5e-5, 3.0, epochs=8),
        Run("one run"),
    ),
    "clinc150": Setting(
        read_clinc("clinc150_train"),
        new_text_model(150),
        128,
        5e-4,
        TEXT,
        replace(TEXT, group="one run", members=3, branch_rate=3.0),
    ),
    "clinc150-small": Setting(
        read_clinc("clinc150_train_small"),
        new_text_model(150),
        128,
        5e-4,
        TEXT,
        replace(TEXT, group="one run", members=3, branch_rate=3.0),
    ),
    "sst2": Setting(
        read_sst2,
        new_text_model(2),
        128,
        5e-4,
        replace(TEXT, epochs=2),
        replace(TEXT, group="one run", members=3, branch_rate=3.0, epochs=2),
        members=(3,),
        branch_rates=(1.0, 3.0),
    ),
}


# What is trained


def sweep(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """Learning rates of one model and of one run, and of how much faster the last layers learn."""
    for usual in (setting.single, setting.one_run):
        for factor in (0.5, 1.0, 2.0):
            for branch_rate in setting.branch_rates:
                yield replace(usual, learning_rate=factor * usual.learning_rate, branch_rate=branch_rate)


def finalists(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """The three best of each sweep, with two seeds more."""
    for usual in (setting.single, setting.one_run):
        first_seed = [row for row in rows if row.get("run", {}).get("seed") == usual.seed]
        for run in best_runs(usual, first_seed)[:3]:
            yield from (replace(run, seed=seed) for seed in SEEDS)


def best_runs(usual: Run, rows: Sequence[Row]) -> list[Run]:
    """Those that differ from `usual` by learning rates alone, best first; those with all seeds before those with one."""
    scores: dict[Run, dict[int, float]] = {}
    for row in rows:
        if row["name"] == usual.group and "run" in row:
            run = Run(**row["run"] | {"shared": tuple(row["run"]["shared"])})
            rates = {"learning_rate": usual.learning_rate, "branch_rate": usual.branch_rate}
            if run.seed in SEEDS and replace(run, seed=usual.seed, **rates) == usual:
                scores.setdefault(replace(run, seed=usual.seed), {})[run.seed] = row["validation"]["brier"]
    return sorted(scores, key=lambda run: (-len(scores[run]), mean(scores[run].values())))


def variants(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """Other trunks, shares, losses, lengths and numbers of members."""
    usual = setting.one_run
    for trunk, epochs in ((11, 12), (10, 10), (8, 8), (6, 7)):
        yield replace(usual, trunk=trunk, epochs=round(usual.epochs * epochs / 9))
    for epochs in (6, 12):
        yield replace(usual, epochs=round(usual.epochs * epochs / 9))
    yield replace(usual, branch_rate=10.0)
    yield replace(usual, shared=SHARED)
    yield replace(usual, members=5)
    yield replace(usual, loss="ensemble")


def chosen(setting: Setting, rows: Sequence[Row]) -> Setting:
    """The setting with the learning rates that were best on validation rows, of those that were tried."""
    best = {kind: best_runs(getattr(setting, kind), rows) for kind in ("single", "one_run")}
    return replace(setting, **{kind: runs[0] for kind, runs in best.items() if runs})


def seeds(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """What is published: three seeds of each, with enough checkpoints for the Deep Ensembles of each seed."""
    for seed in SEEDS:
        for member in range(max(setting.members)):
            yield replace(setting.single, seed=seed + member)
        yield replace(setting.single, epochs=round(1.5 * setting.single.epochs), seed=seed)
        usual = replace(setting.one_run, seed=seed)
        yield replace(usual, trunk=11, epochs=round(4 * usual.epochs / 3))
        yield from (replace(usual, members=members) for members in setting.members)


GROUPS: dict[str, Callable[[Setting, Sequence[Row]], Iterator[Run]]] = {
    "sweep": sweep,
    "finalists": finalists,
    "variants": variants,
    "seeds": seeds,
}
COMPOSED = "composed"  # Deep Ensembles, soups and fused checkpoints of the models that `seeds` kept


# Training


def build(run: Run, setting: Setting, args: argparse.Namespace) -> PreTrainedModel:
    if run.start == "soup":
        return soup([load_single(args, setting, run.seed + member) for member in range(3)])
    model = setting.new_model(args.start, run.seed)
    if run.members == 1:
        return model
    options = {"trunk_layers": run.trunk, "shared": run.shared, "seed": run.seed}
    hydra = AutoHydra.from_backbone(model, num_members=run.members, num_labels=model.config.num_labels, **options)
    hydra.config.ensemble_loss = run.loss
    return hydra


def parameter_groups(model: nn.Module, run: Run, classifier_rate: float) -> list[dict[str, Any]]:
    """Trunk and embeddings, branches, and what follows the layers, each with its learning rate."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = next((int(part) for before, part in pairwise(parts) if before in ("layer", "layers")), None)
        if layer is not None:
            rate = run.learning_rate * (run.branch_rate if layer >= run.trunk else 1)
        elif "embeddings" in parts:
            rate = run.learning_rate
        else:
            rate = run.learning_rate * run.branch_rate if "layernorm" in parts else classifier_rate
        groups.setdefault(rate, []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]


def train(model: PreTrainedModel, run: Run, setting: Setting, rows: TensorRows, device: str) -> None:
    """The loss is the sum of the members' losses."""
    torch.manual_seed(run.seed)
    batch_size = min(setting.batch, len(rows))
    groups = parameter_groups(model, run, setting.classifier_rate)
    optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [group["lr"] for group in groups],
        total_steps=max(2, run.epochs * (len(rows) // batch_size)),
        pct_start=WARM_UP,
        div_factor=1e3,
    )
    model.train()
    for _ in range(run.epochs):
        for indices in torch.randperm(len(rows)).split(batch_size):
            if len(indices) < batch_size:
                continue
            batch = rows.__getitems__(indices.tolist())
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(**batch).loss * (run.members if run.loss == "members" else 1)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()


@torch.inference_mode()
def predictions(model: nn.Module, rows: TensorRows, device: str) -> Tensor:
    """(rows, members, classes)"""
    found = []
    for batch in rows.batches(EVALUATION_BATCH):
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            outputs = model(**inputs)
        logits = outputs.member_logits if "member_logits" in outputs else outputs.logits.unsqueeze(1)
        found.append(logits.float())
    return torch.cat(found)


def kept_file(args: argparse.Namespace, run: Run) -> Path:
    return args.runs / f"{run.learning_rate:g}-{run.branch_rate:g}-{run.epochs}-{run.seed}.pt"


def load_single(args: argparse.Namespace, setting: Setting, seed: int) -> PreTrainedModel:
    model = setting.new_model(args.start, 0)
    model.load_state_dict(torch.load(kept_file(args, replace(setting.single, seed=seed)))["weights"])
    return model


# Judging


def data_sets(splits: Splits) -> dict[str, TensorRows]:
    sets = {"validation": splits.validation, "validation_ood": splits.validation_ood, "test": splits.test}
    return sets | {f"{group}/{name}": rows for group, named in splits.ood.items() for name, rows in named.items()}


def answered_at(errors: float, confidence: Tensor, correct: Tensor) -> float:
    """The largest share of rows, the most confident first, of which at most so many are wrong."""
    coverage, risk = error_coverage_curve(confidence, 1 - correct)
    within = (risk <= errors).nonzero()
    return float(coverage[within[-1, 0]]) if len(within) else 0.0


def metrics(logits: dict[str, Tensor], labels: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Of validation and test rows, each with the detection of its out-of-distribution sets."""
    found = {}
    for place in ("validation", "test"):
        known = logits[place]
        values = sample_values(known, labels[place])
        row = classification_metrics(known, labels[place]) | diversity_metrics(known)
        row["answered_at_5"] = answered_at(0.05, values["confidence"], values["correct"])
        groups: dict[str, list[str]] = {}
        for name in logits:
            if name not in ("validation", "test") and (name == "validation_ood") == (place == "validation"):
                groups.setdefault(name.split("/")[0], []).append(name)
        for group, names in groups.items():
            for score in ("msp", "energy"):
                scores = ood_score(known, score)
                by_set = [ood_metrics(scores, ood_score(logits[name], score))["auroc"] for name in names]
                row[f"{group}_{score}"] = sum(by_set) / len(by_set)
            # with out-of-distribution rows mixed in, all of them errors
            others = [sample_values(logits[name])["confidence"] for name in names]
            correct = torch.cat([values["correct"], *map(torch.zeros_like, others)])
            row[f"answered_at_5_with_{group}"] = answered_at(0.05, torch.cat([values["confidence"], *others]), correct)
        found[place] = row
    return found


class Judge:
    """A setting's data on a device, and what is trained and measured with it."""

    def __init__(self, args: argparse.Namespace, setting: Setting):
        self.args, self.setting = args, setting
        splits = self.setting.read(args.data, args.start).to(args.device)
        self.train_rows, self.sets = splits.train, data_sets(splits)
        if args.rows:
            some = slice(args.rows)
            self.train_rows = self.train_rows.part(some)
            self.sets = {name: rows.part(some) for name, rows in self.sets.items()}
        self.labels = {name: self.sets[name].tensors["labels"] for name in ("validation", "test")}

    def trained(self, run: Run) -> dict[str, Any]:
        began = time.perf_counter()
        model = build(run, self.setting, self.args).to(self.args.device)
        train(model, run, self.setting, self.train_rows, self.args.device)
        seconds = time.perf_counter() - began
        logits = self.logits(model)
        if self.args.runs and run.members == 1 and run.start == "pretrained":
            self.args.runs.mkdir(parents=True, exist_ok=True)
            torch.save({"logits": logits, "weights": model.state_dict()}, kept_file(self.args, run))
        if self.args.pool and run == self.setting.one_run:
            self.write_pool(logits)
        return self.row(run.group, run, logits, model) | {"seconds": round(seconds, 1)}

    def logits(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: predictions(model, rows, self.args.device) for name, rows in self.sets.items()}

    def write_pool(self, logits: dict[str, Tensor]) -> None:
        """Scores of test rows, whether they are wrong, and scores of near rows: what `monitoring` draws from."""
        near = torch.cat([rows for name, rows in logits.items() if name.startswith("near/")])
        correct = sample_values(logits["test"], self.labels["test"])["correct"]
        arrays = {"test_scores": ood_score(logits["test"], "msp"), "test_wrong": ~correct.bool()}
        arrays["ood_scores"] = ood_score(near, "msp")
        np.savez_compressed(self.args.pool, **{name: values.cpu().numpy() for name, values in arrays.items()})

    def row(self, name: str, run: Run, logits: dict[str, Tensor], model: nn.Module | None) -> dict[str, Any]:
        size = {} if model is None else {"parameters": count_parameters(model), "work": count_multiply_adds(model)}
        return {"name": name, "run": asdict(run), **size, **metrics(logits, self.labels)}

    def composed(self, seed: int) -> Iterator[dict[str, Any]]:
        """What the kept checkpoints of a seed make without, or with little, training."""
        single = replace(self.setting.single, seed=seed)
        kept = [
            torch.load(kept_file(self.args, replace(single, seed=seed + member)))
            for member in range(max(self.setting.members))
        ]
        for count in self.setting.members:
            logits = {name: torch.cat([one["logits"][name] for one in kept[:count]], dim=1) for name in self.sets}
            yield self.row(f"Deep Ensemble of {count}", single, logits, None)
        models = [load_single(self.args, self.setting, seed + member) for member in range(3)]
        averaged = soup(models).to(self.args.device).eval()
        yield self.row("soup", single, self.logits(averaged), averaged)
        for trunk in (0, 9, 11):
            hydra = AutoHydra.from_pruned_members(models, trunk_layers=trunk).to(self.args.device).eval()
            yield self.row(f"fused, {trunk} layers merged", replace(single, trunk=trunk), self.logits(hydra), hydra)
        tuned = replace(single, group="soup, tuned", start="soup", epochs=max(1, round(3 * single.epochs / 8)))
        for factor in (0.25, 0.5, 1.0):
            yield self.trained(replace(tuned, learning_rate=factor * single.learning_rate))


def work(queue: Any, results: Any, args: argparse.Namespace, rates: dict[str, Any]) -> None:
    setting = SETTINGS[args.setting]
    for kind, run in rates.items():
        setting = replace(setting, **{kind: run})
    judge = Judge(args, setting)
    while (task := queue.get()) is not None:
        try:
            for row in judge.composed(task) if isinstance(task, int) else [judge.trained(task)]:
                results.put(row)
        except Exception as error:  # one that fails loses no other
            results.put({"name": str(task), "error": repr(error)})
    results.put(None)


def run_all(tasks: Sequence[Run | int], args: argparse.Namespace, rows: list[Row], setting: Setting) -> None:
    """Works on all tasks, a few at a time, and writes the results after each."""
    if not tasks:
        return
    rates = {"single": setting.single, "one_run": setting.one_run}
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    for task in [*tasks, *[None] * args.workers]:
        queue.put(task)
    workers = [context.Process(target=work, args=(queue, results, args, rates)) for _ in range(args.workers)]
    for worker in workers:
        worker.start()
    ended, machine = 0, where_it_ran(args.device)
    while ended < len(workers):
        row = results.get()
        if row is None:
            ended += 1
            continue
        rows.append(row)
        if args.output:
            content = {"machine": machine, "setting": args.setting, "rows": rows}
            write_atomically(args.output, json.dumps(content, indent=1) + "\n")
        kept = row.get("validation", row)
        shown = {name: round(kept[name], 4) for name in ("accuracy", "aurc", "nll") if name in kept}
        print(len(rows), row["name"], shown or row, row.get("run"), row.get("seconds"), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="images")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="the pre-trained model's folder")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, COMPOSED], default=[*GROUPS, COMPOSED])
    parser.add_argument("--runs", type=Path, help="keeps logits and weights of single models, for `composed`")
    parser.add_argument("--pool", type=Path, help="keeps scores of the chosen one run, for `monitoring`")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rows", type=int, help="of each set, to try it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)
    is_begun = args.output is not None and args.output.exists()
    rows: list[Row] = json.loads(args.output.read_text())["rows"] if is_begun else []
    for name in args.only:
        usual = SETTINGS[args.setting]
        setting = usual if name in ("sweep", "finalists") else chosen(usual, rows)
        done = {json.dumps([row["name"], row.get("run")], sort_keys=True) for row in rows}
        if name == COMPOSED:
            keys = {seed: ["soup", asdict(replace(setting.single, seed=seed))] for seed in SEEDS}
        else:
            keys = {run: [run.group, asdict(run)] for run in GROUPS[name](setting, rows)}
        tasks = [task for task, key in keys.items() if json.dumps(key, sort_keys=True) not in done]
        run_all(tasks, args, rows, setting)


if __name__ == "__main__":
    main()
