"""How to fine-tune a Hydra in one run, and what stands beside it: one model, Deep Ensembles, soups, fused checkpoints, and the
comparators of the paper.

    python -m experiments.one_run --setting images --data DIR --start FOLDER --output results/one-run-images.json
    python -m experiments.one_run --setting clinc150-small --only sweep finalists --data DIR --start FOLDER --output OUT.json
    python -m experiments.one_run --smallest                                          # does it run? made-up data

Every training is plain torch on the package's models, with AdamW, a cosine schedule with warm-up and the same batches for all
methods; `runs.py` says which, and how learning rates are chosen. "validation" is what choices are made on; "test", with near and far
out-of-distribution sets, is for the table of what was chosen. Beside OUT.json, OUT.npz holds what every row of a table got for each
test row, for paired intervals. What the results file already has is not run again.
"""

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from filelock import FileLock
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.provenance import where_it_ran
from hydra_transformers import AutoHydra
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import soup
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.uncertainty import (
    Abstention,
    TemperatureScaling,
    classification_metrics,
    ood_metrics,
    ood_score,
)
from hydra_transformers.uncertainty.metrics import diversity_metrics, error_coverage_curve, sample_values

from . import comparators
from .gradients import Gradients
from .rows import Batch, TensorRows, as_it_is
from .runs import GROUPS, SETTINGS, SOUP, Row, Run, Setting, chosen, run_of
from .splits import Splits


EVALUATION_BATCH = 500
WEIGHT_DECAY = 0.05
WARM_UP = 0.1
COMPOSED = "composed"  # what the checkpoints that `seeds` kept make without training, a task for each kind and seed
KINDS = ("ensembles", "soup", "Laplace")
STAGES = (
    ("sweep",),
    ("edges",),
    ("finalists",),
    ("edges",),
    ("small batches", "seeds"),
    (COMPOSED, "tuned", "comparators", "variants"),
    ("tuned edges",),
    ("tuned edges",),
)  # each needs those before it
RISK, CONFIDENCE = 0.05, 0.9  # what a threshold from validation rows promises


# Training


def parameter_groups(model: nn.Module, run: Run, classifier_rate: float) -> list[dict[str, Any]]:
    """Trunk and embeddings, branches, and what follows the layers, each with its learning rate."""
    groups: dict[float, list[nn.Parameter]] = {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
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


def train(
    model: nn.Module,
    run: Run,
    setting: Setting,
    rows: TensorRows,
    device: str,
    collate: Callable[[Batch], Batch] = as_it_is,
) -> None:
    """The loss is the sum of the members' losses, or with another `run.loss` what the model says."""
    torch.manual_seed(run.seed)
    batch_size = min(run.batch or setting.batch, len(rows))
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
    compute_gradients = Gradients(model, run.members if run.loss == "members" else 1, device)
    for _ in range(run.epochs):
        for indices in torch.randperm(len(rows)).split(batch_size):
            if len(indices) == batch_size:
                compute_gradients(collate(rows.__getitems__(indices.tolist())))
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


# Judging


def data_sets(splits: Splits) -> dict[str, TensorRows]:
    sets = {"validation": splits.validation, "validation_ood": splits.validation_ood, "test": splits.test}
    return sets | {f"{group}/{name}": rows for group, named in splits.ood.items() for name, rows in named.items()}


def answered_at(errors: float, confidence: Tensor, correct: Tensor) -> float:
    """The largest share of rows, the most confident first, of which at most so many are wrong."""
    coverage, risk = error_coverage_curve(confidence, 1 - correct)
    within = (risk <= errors).nonzero()
    return float(coverage[within[-1, 0]]) if len(within) else 0.0


def answered_as_calibrated(validation: dict[str, Tensor], test: dict[str, Tensor]) -> dict[str, float]:
    """With a threshold from validation rows for at most so many wrong answers: the share of test rows that are answered, and
    how many of the answers are wrong."""
    try:
        rule = Abstention.fit(1 - validation["confidence"], validation["correct"], risk=RISK, confidence=CONFIDENCE)
    except ValueError:  # nothing can be promised
        return {"calibrated_answered": 0.0, "calibrated_errors": 0.0}
    answered = ~rule.abstain(1 - test["confidence"]).to(test["correct"].device)
    wrong = (1 - test["correct"].double())[answered]
    return {"calibrated_answered": float(answered.double().mean()), "calibrated_errors": float(wrong.mean())}


def metrics(logits: dict[str, Tensor], labels: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Of validation and test rows, each with the detection of its out-of-distribution sets."""
    found: dict[str, dict[str, float]] = {}
    scaling = TemperatureScaling.fit(logits["validation"], labels["validation"])
    on_validation = sample_values(logits["validation"], labels["validation"])
    for place in ("validation", "test"):
        known = logits[place]
        values = sample_values(known, labels[place])
        row = classification_metrics(known, labels[place]) | diversity_metrics(known)
        row["answered_at_5"] = answered_at(RISK, values["confidence"], values["correct"])
        if place == "test":
            row |= answered_as_calibrated(on_validation, values)
        tempered = classification_metrics(scaling(known), labels[place])
        row |= {f"{name}_with_temperature": tempered[name] for name in ("ece", "nll")}
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
            row[f"answered_at_5_with_{group}"] = answered_at(RISK, torch.cat([values["confidence"], *others]), correct)
        found[place] = row
    return found


def per_row(logits: dict[str, Tensor], labels: Tensor) -> dict[str, np.ndarray]:
    """Of each test row how sure the model is and whether it is right; of each near row how sure it is. As log odds."""

    def log_odds(confidence: Tensor) -> np.ndarray:
        return torch.special.logit(confidence.double(), eps=1e-9).half().cpu().numpy()

    values = sample_values(logits["test"], labels)
    near = torch.cat([rows for name, rows in logits.items() if name.startswith("near/")])
    return {
        "sure": log_odds(values["confidence"]),
        "right": np.packbits(values["correct"].bool().cpu().numpy()),
        "near": log_odds(sample_values(near)["confidence"]),
    }


class Judge:
    """A setting's data on a device, and what is trained and measured with it."""

    def __init__(self, args: argparse.Namespace, setting: Setting):
        self.args = args
        self.setting = setting
        self.splits: Splits = self.setting.read(args.data, args.start).to(args.device)
        self.train_rows, self.sets = self.splits.train, data_sets(self.splits)
        self.labels = {name: self.sets[name].tensors["labels"] for name in ("validation", "test")}

    # Training

    def new_model(self, seed: int) -> PreTrainedModel:
        return self.setting.new_model(self.args.start, seed)

    def train(self, model: nn.Module, run: Run, collate: Callable[[Batch], Batch] = as_it_is) -> nn.Module:
        train(model.to(self.args.device), run, self.setting, self.train_rows, self.args.device, collate)
        return model

    def built(self, run: Run) -> nn.Module:
        """A model that was trained."""
        if run.group in comparators.TRAINED:
            return comparators.TRAINED[run.group](self, run)
        if run.start != "pretrained":
            return self.trained_on(run)
        model = self.new_model(run.seed)
        if run.members > 1:
            options = {"trunk_layers": run.trunk, "shared": run.shared, "seed": run.seed}
            classes = model.config.num_labels
            model = AutoHydra.from_backbone(model, num_members=run.members, num_labels=classes, **options)
            model.config.ensemble_loss = run.loss
        return self.train(model, run)

    def trained(self, run: Run) -> tuple[Row, dict[str, np.ndarray]]:
        began = time.perf_counter()
        model = self.built(run).eval()
        seconds = time.perf_counter() - began
        logits = self.logits(model)
        if run.group == self.setting.single.group:
            content = io.BytesIO()
            torch.save({"logits": logits, "weights": model.state_dict()}, content)
            write_atomically(self.kept_file(run), content.getvalue())
        row, values = self.row(run.group, run, logits, model)
        return row | {"seconds": round(seconds, 1)}, values

    # Judging

    def batches(self, rows: TensorRows) -> list[Batch]:
        return rows.batches(EVALUATION_BATCH)

    def logits(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: predictions(model, rows, self.args.device) for name, rows in self.sets.items()}

    def row(
        self, name: str, run: Run, logits: dict[str, Tensor], model: nn.Module | None
    ) -> tuple[Row, dict[str, np.ndarray]]:
        size = {} if model is None else {"parameters": count_parameters(model), "work": count_multiply_adds(model)}
        row = {"name": name, "run": asdict(run), **size, **metrics(logits, self.labels)}
        return row, per_row(logits, self.labels["test"])

    # What checkpoints make

    def kept_file(self, run: Run) -> Path:
        return self.args.runs / f"{run.learning_rate:g}-{run.branch_rate:g}-{run.epochs}-{run.seed}.pt"

    def kept(self, seed: int) -> dict[str, Any]:
        """Logits and weights of one model, which is trained if its file is gone, by one process."""
        path = self.kept_file(replace(self.setting.single, seed=seed))
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                self.trained(replace(self.setting.single, seed=seed))
        return torch.load(path)

    def checkpoint(self, seed: int) -> PreTrainedModel:
        model = self.new_model(0)
        model.load_state_dict(self.kept(seed)["weights"])
        return model.to(self.args.device).eval()

    def composed(self, kind: str, seed: int) -> Iterator[tuple[Row, dict[str, np.ndarray]]]:
        """What the kept checkpoints of a seed make without training."""
        single = replace(self.setting.single, seed=seed)
        if kind == "ensembles":
            for count in self.setting.members:
                kept = [self.kept(seed + member)["logits"] for member in range(count)]
                logits = {name: torch.cat([one[name] for one in kept], dim=1) for name in self.sets}
                yield self.row(f"Deep Ensemble of {count}", single, logits, None)
            checkpoints = [self.checkpoint(seed + member) for member in range(3)]
            for trunk in (0, single.trunk, self.setting.layers - 1):
                hydra = AutoHydra.from_pruned_members(checkpoints, trunk_layers=trunk).to(self.args.device).eval()
                run = replace(single, trunk=trunk)
                yield self.row(f"fused, {trunk} layers merged", run, self.logits(hydra), hydra)
        else:
            model = self.soup(seed) if kind == "soup" else comparators.laplace(self, self.checkpoint(seed))
            yield self.row(kind, single, self.logits(model), model)

    def soup(self, seed: int) -> PreTrainedModel:
        return soup([self.checkpoint(seed + member) for member in range(3)]).to(self.args.device).eval()

    def trained_on(self, run: Run) -> PreTrainedModel:
        """What is made of checkpoints, trained on and fused if it is several models."""
        if run.start == SOUP:
            return self.train(self.soup(run.seed), run)
        members = comparators.PRUNERS[run.start](self, self.checkpoint(run.seed), run.seed)
        for place, member in enumerate(members):
            self.train(member, replace(run, members=1, seed=run.seed + place))
        return AutoHydra.from_pruned_members(members, allow_equal=True).to(self.args.device)


# All tasks, a few at a time


def work(queue: Any, results: Any, args: argparse.Namespace) -> None:
    judge = Judge(args, SETTINGS[args.setting])
    while (item := queue.get()) is not None:
        task, single, one_run = item
        judge.setting = replace(judge.setting, single=single, one_run=one_run)
        try:
            if isinstance(task, Run):
                results.put([judge.trained(task)])
            else:  # written whole or not at all
                name = "-".join(map(str, task))
                results.put([(row | {"task": name}, values) for row, values in judge.composed(*task)])
        except Exception as error:  # one that fails loses no other
            results.put([({"name": str(task), "error": repr(error)}, {})])
        torch.cuda.empty_cache()


def tasks_of(group: str, setting: Setting, rows: list[Row]) -> list[Run | tuple[str, int]]:
    """What of a group the results file has not yet."""
    done = {run_of(row) for row in rows if "run" in row and row["name"] == row["run"]["group"]}
    composed = {row.get("task") for row in rows}
    if group != COMPOSED:
        runs = dict.fromkeys(GROUPS[group](setting, rows))
        return [run for run in runs if run not in done]
    kinds = KINDS if setting.comparators else KINDS[:-1]
    return [(kind, seed) for kind in kinds for seed in setting.seeds if f"{kind}-{seed}" not in composed]


def write(path: Path, content: dict[str, Any], values: dict[str, np.ndarray]) -> None:
    arrays = io.BytesIO()
    np.savez_compressed(arrays, **values)
    write_atomically(path.with_suffix(".npz"), arrays.getvalue())
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = list(dict.fromkeys(group for stage in STAGES for group in stage))
    parser.add_argument("--setting", choices=SETTINGS, default="images")
    parser.add_argument("--data", type=Path, help="the folder with vision64/, vision/ or text/")
    parser.add_argument("--start", type=Path, help="the pre-trained model's folder")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=groups, default=groups)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="keeps single models, for `composed`")
    parser.add_argument("--pool", type=Path, help="gets the scores of the chosen one run, for `monitoring`")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smallest", action="store_true", help="the sweep of a tiny model on made-up data")
    args = parser.parse_args(words)
    if args.smallest:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--output", f"{folder}/results.json", "--runs", folder, "--device", args.device]
            return main([*["--setting", "smallest", "--only", "sweep", "--workers", "1"], *options])
    if args.output is None or (args.setting != "smallest" and None in (args.data, args.start)):
        parser.error(
            "--data, --start or --output is missing: pass the data, the pre-trained model and the results file"
        )
    args.runs = args.runs / args.setting
    begun = json.loads(args.output.read_text()) if args.output.exists() else {"rows": []}
    rows: list[Row] = begun["rows"]
    arrays = args.output.with_suffix(".npz")
    values = dict(np.load(arrays)) if arrays.exists() else {}
    seeds = SETTINGS[args.setting].seeds
    machine = where_it_ran(args.device)
    earlier = begun.get("earlier", [])
    if rows and begun["machine"]["commit"] != machine["commit"]:
        earlier.append({"rows": len(rows), **begun["machine"]})  # the first rows are of another state
    content = {"machine": machine, "earlier": earlier, "setting": args.setting, "seeds": seeds, "rows": rows}
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    results = context.Queue()
    workers = [context.Process(target=work, args=(queue, results, args), daemon=True) for _ in range(args.workers)]
    for worker in workers:
        worker.start()
    for stage in STAGES:
        usual = SETTINGS[args.setting]
        setting = usual if stage in STAGES[:4] else chosen(usual, rows)
        tasks = [task for group in stage if group in args.only for task in tasks_of(group, setting, rows)]
        for task in tasks:
            queue.put((task, setting.single, setting.one_run))
        for _ in tasks:
            for row, per_test_row in results.get():
                if row.get("run", {}).get("seed") in seeds:
                    values |= {f"{len(rows)}/{name}": array for name, array in per_test_row.items()}
                rows.append(row)
                judged = row.get("validation", {})
                shown = {name: round(judged[name], 4) for name in ("accuracy", "aurc", "brier") if name in judged}
                print(len(rows), row["name"], shown or row, row.get("run"), row.get("seconds"), flush=True)
            write(args.output, content, values)
    for _ in workers:
        queue.put(None)
    for worker in workers:
        worker.join()
    if args.pool:
        write_pool(args.pool, SETTINGS[args.setting], rows, values)
    return None


def write_pool(path: Path, setting: Setting, rows: list[Row], values: dict[str, np.ndarray]) -> None:
    """Scores of test rows, whether they are wrong, and scores of near rows: what `monitoring` draws from."""
    run = replace(chosen(setting, rows).one_run, seed=setting.seeds[0])
    place = next(n for n, row in enumerate(rows) if "run" in row and run_of(row) == run)
    known, near, right = (values[f"{place}/{name}"] for name in ("sure", "near", "right"))

    def scores(log_odds: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(log_odds.astype(np.float64)))

    wrong = np.unpackbits(right, count=len(known)) == 0
    np.savez_compressed(path, test_scores=scores(known), test_wrong=wrong, ood_scores=scores(near))


if __name__ == "__main__":
    main()
