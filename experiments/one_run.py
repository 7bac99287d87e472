"""How to fine-tune a Hydra in one run: learning rates, trunks, mixing, members. Choices are made on validation rows.

    python -m experiments.one_run --data DIR --start FOLDER --output results/one-run-images.json
    python -m experiments.one_run --data DIR --start FOLDER --output OUT.json --only "seeds" --workers 8
    python -m experiments.one_run --smallest --output OUT.json                        # does it run? made-up data, seconds

Every row is one training by plain torch on the package's models, or an ensemble or average of such trainings. "validation" and
"validation_ood" are what choices may be made on; "test", "near" and "far" are for the table of what was chosen.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.provenance import where_it_ran
from hydra_transformers import AutoHydra
from hydra_transformers._io.files import write_atomically
from hydra_transformers.uncertainty import classification_metrics, diversity_metrics, ood_metrics, ood_score
from hydra_transformers.uncertainty.metrics import risk_coverage_curve, sample_values

from .pretrained import new_dinov2, read_tiny_imagenet
from .rows import TensorRows
from .splits import Splits


BATCH, EVALUATION_BATCH = 256, 500
CLASSIFIER_RATE, WEIGHT_DECAY, WARM_UP = 1e-3, 0.05, 0.1


@dataclass(frozen=True)
class Run:
    """One training.

    members: 1 for a plain model, which then has no trunk; branch_rate multiplies the learning rate of the layers behind the trunk
    mixing: of the Beta distribution that states behind the trunk are mixed with; 0 for none
    """

    group: str
    members: int = 3
    learning_rate: float = 2.5e-5
    branch_rate: float = 3.0
    trunk: int = 9
    mixing: float = 0.0
    shared: tuple[str, ...] = ("embeddings",)
    epochs: int = 9
    loss: str = "members"
    seed: int = 0

    @property
    def name(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def learning_rates() -> Iterator[Run]:
    """Of one model, each with the last three layers as fast as the others or three times as fast, as long and longer."""
    for rate in (1.25e-5, 2.5e-5, 5e-5):
        yield Run("one model", 1, rate, 1.0, epochs=8)
    for factor in (3.0, 6.0):
        yield Run("one model", 1, branch_rate=factor, epochs=8)
    for factor in (1.0, 3.0):
        yield Run("one model", 1, branch_rate=factor, epochs=12)


def variants() -> Iterator[Run]:
    usual = Run("one run")
    for factor in (1.0, 3.0, 6.0, 10.0):
        for mixing in (0.0, 0.4):
            yield replace(usual, branch_rate=factor, mixing=mixing)
    for factor in (3.0, 6.0):
        yield replace(usual, branch_rate=factor, shared=("embeddings", "layernorm", "mlp"))
    for rate in (1.25e-5, 5e-5):
        yield replace(usual, learning_rate=rate, branch_rate=6.0)
    for trunk, epochs in ((11, 12), (10, 10), (8, 8), (6, 7)):
        yield replace(usual, trunk=trunk, epochs=epochs, branch_rate=6.0)
    for epochs in (6, 12):
        yield replace(usual, epochs=epochs, branch_rate=6.0)
    yield replace(usual, members=5, epochs=8, branch_rate=6.0)
    yield replace(usual, loss="ensemble", branch_rate=6.0)


GROUPS: dict[str, Callable[[], Iterator[Run]]] = {"learning-rates": learning_rates, "variants": variants}


def build(run: Run, start: Path, device: str) -> PreTrainedModel:
    """The model before its training; classifiers are drawn with seeds of their own."""
    heads = []
    for member in range(run.members):
        torch.manual_seed(1_000 * run.seed + member)
        heads.append(new_dinov2(start))
    if run.members == 1:
        return heads[0].to(device)
    hydra = AutoHydra.from_pruned_members(heads, shared=run.shared, trunk_layers=run.trunk)
    hydra.config.ensemble_loss = run.loss
    return hydra.to(device)


def parameter_groups(model: nn.Module, run: Run) -> list[dict[str, Any]]:
    """Trunk and embeddings, branches, and classifiers, each with its learning rate."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if name.startswith("classifier"):
            rate = CLASSIFIER_RATE
        else:
            layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
            behind = (layer is not None and layer >= run.trunk) or name in (
                "vit.layernorm.weight",
                "vit.layernorm.bias",
            )
            rate = run.learning_rate * (run.branch_rate if behind else 1)
        groups.setdefault(rate, []).append(parameter)
    return [{"params": parameters, "lr": rate, "max_lr": rate} for rate, parameters in groups.items()]


@dataclass
class Mixing:
    """Mixes the states behind the trunk, each member with a partner and a weight of its own, and remembers both for the loss."""

    members: int
    parameter: float
    partners: Tensor | None = field(default=None, init=False)
    weights: Tensor | None = field(default=None, init=False)

    def __call__(self, module: nn.Module, inputs: Any, states: Tensor) -> Tensor:
        """(1, batch, tokens, hidden) -> (members, batch, tokens, hidden)"""
        if not module.training:
            return states
        batch = states.shape[1]
        self.partners = torch.stack([torch.randperm(batch, device=states.device) for _ in range(self.members)])
        beta = torch.distributions.Beta(self.parameter, self.parameter)
        self.weights = beta.sample((self.members,)).to(states.device)
        weights = self.weights.view(-1, 1, 1, 1).to(states.dtype)
        return weights * states + (1 - weights) * states[0][self.partners]

    def loss(self, member_logits: Tensor, labels: Tensor) -> Tensor:
        """member_logits: (batch, members, classes)"""
        losses = [
            weight * nn.functional.cross_entropy(logits, labels)
            + (1 - weight) * nn.functional.cross_entropy(logits, labels[partners])
            for logits, weight, partners in zip(member_logits.unbind(1), self.weights, self.partners, strict=True)
        ]
        return torch.stack(losses).sum()


def train(model: PreTrainedModel, run: Run, rows: TensorRows, device: str) -> None:
    """The loss is the sum of the members' losses."""
    torch.manual_seed(run.seed)
    steps = run.epochs * (len(rows) // BATCH)
    groups = parameter_groups(model, run)
    optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=steps, pct_start=WARM_UP, div_factor=1e3
    )
    mixing = Mixing(run.members, run.mixing) if run.mixing else None
    if mixing is not None:
        model.base_model.layers[run.trunk - 1].register_forward_hook(mixing)
    model.train()
    for _ in range(run.epochs):
        for indices in torch.randperm(len(rows)).split(BATCH):
            if len(indices) < BATCH:
                continue
            batch = rows.__getitems__(indices.tolist())
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                if mixing is not None:
                    loss = mixing.loss(
                        model(pixel_values=batch["pixel_values"]).member_logits.float(), batch["labels"]
                    )
                else:
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
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            outputs = model(pixel_values=batch["pixel_values"])
        logits = outputs.member_logits if "member_logits" in outputs else outputs.logits.unsqueeze(1)
        found.append(logits.float())
    return torch.cat(found)


def data_sets(splits: Splits) -> dict[str, TensorRows]:
    sets = {"validation": splits.validation, "validation_ood": splits.validation_ood, "test": splits.test}
    return sets | {f"{group}/{name}": rows for group, named in splits.ood.items() for name, rows in named.items()}


def answered_at(errors: float, confidence: Tensor, correct: Tensor) -> float:
    """The largest share of rows, the most confident first, of which at most so many are wrong."""
    coverage, risk = risk_coverage_curve(confidence, correct)
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
                found_by = [ood_metrics(scores, ood_score(logits[name], score))["auroc"] for name in names]
                row[f"{group}_{score}"] = sum(found_by) / len(found_by)
        found[place] = row
    return found


def judged(
    name: str, run: Run, logits: dict[str, Tensor], labels: dict[str, Tensor], seconds: float
) -> dict[str, Any]:
    return {"name": name, "run": asdict(run), "seconds": round(seconds, 1), **metrics(logits, labels)}


def work(queue: Any, results: Any, args: argparse.Namespace) -> None:
    splits = read_tiny_imagenet(args.data, args.start).to(args.device)
    train_rows, sets = splits.train, data_sets(splits)
    if args.rows:
        some = slice(args.rows)
        train_rows, sets = train_rows.part(some), {name: rows.part(some) for name, rows in sets.items()}
    labels = {name: rows.tensors["labels"] for name, rows in sets.items() if name in ("validation", "test")}
    while (run := queue.get()) is not None:
        try:
            began = time.perf_counter()
            model = build(run, args.start, args.device)
            train(model, run, train_rows, args.device)
            seconds = time.perf_counter() - began
            logits = {name: predictions(model, rows, args.device) for name, rows in sets.items()}
            if args.runs and run.members == 1:
                folder = args.runs
                folder.mkdir(parents=True, exist_ok=True)
                name = f"{run.learning_rate:g}-{run.branch_rate:g}-{run.epochs}-{run.seed}.pt"
                torch.save({"logits": logits, "weights": model.state_dict()}, folder / name)
            results.put(judged(run.group, run, logits, labels, seconds))
        except Exception as error:  # one run that fails loses no other
            results.put({"name": run.group, "run": asdict(run), "error": repr(error)})
    results.put(None)


def run_all(runs: Sequence[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains all of them, a few at a time, and writes the results after each."""
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    for run in [*runs, *[None] * args.workers]:
        queue.put(run)
    workers = [context.Process(target=work, args=(queue, results, args)) for _ in range(args.workers)]
    for worker in workers:
        worker.start()
    rows, ended, machine = [], 0, where_it_ran(args.device)
    while ended < len(workers):
        row = results.get()
        if row is None:
            ended += 1
            continue
        rows.append(row)
        if args.output:
            write_atomically(args.output, json.dumps({"machine": machine, "rows": rows}, indent=1))
        kept = row.get("validation", row)
        shown = {name: round(kept[name], 4) for name in ("accuracy", "aurc", "nll") if name in kept}
        print(len(rows), row["run"], shown or row, row.get("seconds"), flush=True)
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="the pre-trained model's folder")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--runs", type=Path, help="keeps logits and weights of single models")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rows", type=int, help="of each set, to try it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)
    runs = [run for name in args.only for run in GROUPS[name]()]
    run_all(runs, args)


if __name__ == "__main__":
    main()
