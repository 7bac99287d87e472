"""Which recipe to fine-tune a transformer by, and what it makes of one model, of one run of several members, and of several
fine-tunings fused: DINOv2-S on 100 classes of Tiny ImageNet and on 5,000 rows of CIFAR-10, gte-small on CLINC150 and SST-2.

    python -m experiments.recipe --setting tiny-imagenet --data DIR --start FOLDER --output OUT.json --groups rates
    python -m experiments.recipe --smallest                                                 # does it run? made-up data

Beside OUT.json, OUT.npz holds what a plot of errors and coverage needs of the rows of the table of budgets, by the row's number
in OUT.json: see `judging.arrays_of`.

Validation rows choose. Every row of OUT.json is one model: a training, or what several of them make without training (an
ensemble, a fused Hydra, a soup). What the file already has is not run again.
"""

import argparse
import io
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from benchmarks.provenance import where_it_ran
from hydra_transformers import AutoHydra
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import soup
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.fusion.plain_models import to_transformers

from . import smallest
from .augmentation import changed_colours, resized_crop_and_flip
from .judging import arrays_of, judge, predictions, sets_of
from .pretrained import IMAGE_SIZE, IMAGENET_MEAN, IMAGENET_STD, read_sst2, read_tiny_imagenet
from .recipe_settings import new_dinov2_reading_cls, read_cifar10
from .recipe_table import is_of_budgets
from .recorded_steps import RecordedSteps
from .results import rounded
from .rows import PrepareImages, TensorRows
from .runs import read_clinc
from .splits import Splits


Row = dict[str, Any]  # of a results file
ARRAYS = "arrays"  # of a row, until it is written


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    learning_rate: of the last layer; layer_decay: multiplies it from each layer to the one before
    mixing: the share of the steps with mixup or cutmix, the first ones
    crop: the least share of an image's area in a random crop; colour: how much brightness, contrast and saturation change
    dropout: in the layers of a text model; r_drop: the weight of a loss by which two passes with different dropout agree
    """

    learning_rate: float = 1e-4
    layer_decay: float = 0.85
    mixing: float = 0.75
    epochs: int = 12
    batch_size: int = 256
    classifier_rate: float = 1e-3
    drop_path: float = 0.0
    crop: float = 0.7
    colour: float = 0.0
    dropout: float = 0.1
    r_drop: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Trainings that differ by their seeds alone: `seed`, `seed + 1`, ...; several are also fused, averaged and ensembled.

    members: of each training, with `trunk` shared layers; 1 for a plain model
    """

    recipe: Recipe = Recipe()
    members: int = 1
    trunk: int = 0
    runs: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Setting:
    """
    read: (folder, start) -> Splits; new_model: (start) -> a pre-trained model without a classifier of its own
    usual: the recipe from which the groups start
    epochs_of_one_training: of one model, the unit in which trainings are counted
    """

    read: Callable[[Path | None, Path | None], Splits]
    new_model: Callable[[Path | None], PreTrainedModel]
    classes: int
    kind: str = "image"
    layers: int = 12
    usual: Recipe = Recipe()
    epochs_of_one_training: int = 8


def new_text_encoder(start: Path | None) -> PreTrainedModel:
    """The pooler, which the checkpoint does not have, starts from the same weights in all trainings."""
    torch.manual_seed(0)
    return AutoModel.from_pretrained(start, dtype=torch.float32)


def with_classifier(setting: Setting, start: Path | None) -> PreTrainedModel:
    """Return the model of Transformers that the others are compared with."""
    hydra = AutoHydra.from_backbone(
        setting.new_model(start), num_members=1, trunk_layers=0, num_labels=setting.classes
    )
    return to_transformers(hydra)


TEXT = Recipe(mixing=0.0, batch_size=128, layer_decay=0.9)
SETTINGS = {
    "tiny-imagenet": Setting(read_tiny_imagenet, new_dinov2_reading_cls, 100),
    "cifar10": Setting(read_cifar10, new_dinov2_reading_cls, 10, usual=Recipe(classifier_rate=3e-3)),
    "clinc150-small": Setting(
        read_clinc("clinc150_train_small"), new_text_encoder, 150, "text", usual=TEXT, epochs_of_one_training=8
    ),
    "sst2": Setting(read_sst2, new_text_encoder, 2, "text", usual=replace(TEXT, epochs=3), epochs_of_one_training=3),
    "smallest": Setting(
        lambda folder, start: smallest.splits(), lambda start: smallest.new_backbone(layers=4), 3, "made up", 4
    ),
}


# What is trained


def rates(usual: Plan) -> Iterator[Plan]:
    """How high the learning rate is, and how fast it falls from layer to layer."""
    for layer_decay in (0.75, 0.85, 0.92, 1.0):
        for learning_rate in (5e-5, 1e-4, 2e-4):
            yield with_recipe(usual, layer_decay=layer_decay, learning_rate=learning_rate)
    yield with_recipe(usual, layer_decay=0.7, learning_rate=4e-4)
    yield with_recipe(usual, layer_decay=1.0, learning_rate=2.5e-5)


def ingredients(usual: Plan) -> Iterator[Plan]:
    """Everything else, one at a time."""
    for mixing in (0.0, 0.5, 1.0):
        yield with_recipe(usual, mixing=mixing)
    for epochs in (8, 16, 24):
        yield with_recipe(usual, epochs=epochs)
    for classifier_rate in (3e-4, 3e-3):
        yield with_recipe(usual, classifier_rate=classifier_rate)
    yield with_recipe(usual, drop_path=0.1)
    yield with_recipe(usual, crop=0.35)
    yield with_recipe(usual, colour=0.4)


def text_rates(usual: Plan) -> Iterator[Plan]:
    """How high the learning rate of a text model is, and how fast it falls from layer to layer."""
    for layer_decay in (0.8, 0.9, 1.0):
        for learning_rate in (5e-5, 1e-4, 2e-4):
            yield with_recipe(usual, layer_decay=layer_decay, learning_rate=learning_rate)
    yield with_recipe(usual, layer_decay=0.8, learning_rate=4e-4)


def text_ingredients(usual: Plan) -> Iterator[Plan]:
    """Everything else for texts, one at a time; mixing is of the embeddings of words."""
    epochs = usual.recipe.epochs
    for factor in (2 / 3, 4 / 3, 2):
        yield with_recipe(usual, epochs=round(epochs * factor))
    for dropout in (0.0, 0.2):
        yield with_recipe(usual, dropout=dropout)
    for mixing in (0.5, 1.0):
        yield with_recipe(usual, mixing=mixing)
    yield with_recipe(usual, r_drop=1.0)
    for classifier_rate in (3e-4, 3e-3):
        yield with_recipe(usual, classifier_rate=classifier_rate)


def text_members(usual: Plan) -> Iterator[Plan]:
    for trunk in (6, 9, 11):
        yield replace(usual, members=3, trunk=trunk)


def small_batches(usual: Plan) -> Iterator[Plan]:
    """Batches of 32, which `finetune` has by default."""
    for learning_rate in (2.5e-5, 5e-5, 1e-4):
        yield with_recipe(usual, batch_size=32, learning_rate=learning_rate)


def members(usual: Plan) -> Iterator[Plan]:
    """One run of several members: how many, and how many layers they share."""
    for trunk in (9, 10, 11):
        yield replace(usual, members=3, trunk=trunk)
    for count in (2, 5):
        yield replace(usual, members=count, trunk=11)
    for learning_rate in (5e-5, 2e-4):
        yield with_recipe(replace(usual, members=3, trunk=11), learning_rate=learning_rate)


def runs(usual: Plan) -> Iterator[Plan]:
    """Several fine-tunings, fused, beside one model that is trained as long: what 3 and 4.5 trainings buy.

    One training is two thirds of the usual epochs.
    """
    epochs = round(2 / 3 * usual.recipe.epochs)
    yield replace(usual, runs=3)
    yield replace(usual, members=3, trunk=11, runs=2)
    yield with_recipe(replace(usual, runs=3), epochs=epochs)
    yield with_recipe(usual, epochs=3 * epochs)


def five_runs(usual: Plan) -> Iterator[Plan]:
    """Five trainings: a large Deep Ensemble, and what becomes of it when it is fused."""
    yield with_recipe(replace(usual, runs=5), epochs=round(2 / 3 * usual.recipe.epochs))


def with_recipe(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, recipe=replace(plan.recipe, **changes))


GROUPS = {
    "text rates": text_rates,
    "text ingredients": text_ingredients,
    "text members": text_members,
    "rates": rates,
    "ingredients": ingredients,
    "small batches": small_batches,
    "members": members,
    "runs": runs,
    "five runs": five_runs,
}


# Training and judging


class Study:
    """The data of a setting on a device, and what is trained and measured with it."""

    def __init__(self, setting: Setting, data: Path | None, start: Path | None, device: str, is_compiled: bool = True):
        self.setting = setting
        self.start = start
        self.device = device
        self.is_compiled = is_compiled
        self.splits = setting.read(data, start).to(device)
        self.sets = sets_of(self.splits)
        self.labels = {name: self.sets[name].tensors["labels"] for name in ("validation", "test")}
        self.steps: dict[tuple, RecordedSteps] = {}  # by what decides their shapes

    def steps_of(self, plan: Plan) -> RecordedSteps:
        recipe = plan.recipe
        key = plan.members, plan.trunk, recipe.drop_path, recipe.dropout, recipe.r_drop
        if key not in self.steps:
            backbone = self.setting.new_model(self.start)
            if self.setting.kind == "text":
                backbone.config.hidden_dropout_prob = recipe.dropout
            else:
                backbone.config.drop_path_rate = recipe.drop_path
            hydra = AutoHydra.from_backbone(
                backbone, num_members=plan.members, trunk_layers=plan.trunk, num_labels=self.setting.classes
            )
            # Compiling pays for shapes that many trainings have.
            is_frequent = (plan.members, plan.trunk) in ((1, 0), (3, self.setting.layers - 1)) and not recipe.drop_path
            is_compiled = self.is_compiled and is_frequent and self.setting.kind == "image"
            self.steps[key] = RecordedSteps(hydra, self.device, is_compiled, recipe.r_drop)
        return self.steps[key]

    def train(self, plan: Plan, seed: int) -> nn.Module:
        steps = self.steps_of(plan)
        recipe = plan.recipe
        torch.manual_seed(seed)
        classifier = {
            name: torch.randn_like(tensor) * steps.model.config.initializer_range
            for name, tensor in steps.start.items()
            if name == "classifier.weight"
        }
        return steps.train(
            self.training_rows(recipe),
            seed=seed,
            epochs=recipe.epochs,
            batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            layer_decay=recipe.layer_decay,
            classifier_rate=recipe.classifier_rate,
            mixing=recipe.mixing,
            start=classifier,
        )

    def training_rows(self, recipe: Recipe) -> TensorRows:
        if self.setting.kind != "image":
            return self.splits.train

        def augment(images: Tensor) -> Tensor:
            images = resized_crop_and_flip(images, IMAGE_SIZE, recipe.crop)
            return changed_colours(images, recipe.colour) if recipe.colour else images

        return self.splits.train.prepared_by(PrepareImages(IMAGENET_MEAN, IMAGENET_STD, augment, size=IMAGE_SIZE))

    def logits(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: predictions(model, rows, self.device) for name, rows in self.sets.items()}

    def rows_of(self, plan: Plan) -> Iterator[Row]:
        """Train a plan, and yield a row for each model that it makes."""
        models = []
        logits = []
        for seed in range(plan.seed, plan.seed + plan.runs):
            began = time.perf_counter()
            model = self.train(plan, seed)
            seconds = round(time.perf_counter() - began, 1)
            logits.append(self.logits(model))
            yield self.row(plan, "training", logits[-1], model, seed=seed, seconds=seconds)
            if plan.runs > 1:
                models.append(self.copy_of(model, plan))
        for count in range(2, plan.runs + 1):
            ensemble = {name: torch.cat([one[name] for one in logits[:count]], dim=1) for name in self.sets}
            yield self.row(plan, "ensemble", ensemble, None, count=count)
            yield from self.fused(plan, models[:count])
            if plan.members == 1:
                averaged = soup(models[:count]).to(self.device)
                yield self.row(plan, "soup", self.logits(averaged), averaged, count=count)

    def copy_of(self, model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
        copied = type(model)(model.config).to(self.device)
        copied.load_state_dict(model.state_dict())
        return copied.eval()

    def fused(self, plan: Plan, models: Sequence[PreTrainedModel]) -> Iterator[Row]:
        layers = self.setting.layers
        trunks = (layers - 3, layers - 2, layers - 1)
        if plan.members > 1:
            trunks = (plan.trunk,)
        for trunk in trunks:
            hydra = AutoHydra.from_pruned_members(models, trunk_layers=trunk, check=False).to(self.device).eval()
            yield self.row(plan, "fused", self.logits(hydra), hydra, count=len(models), merged=trunk)
            # With an MLP for each member behind the trunk.
            hydra = AutoHydra.from_pruned_members(models, ("embeddings",), trunk, check=False).to(self.device).eval()
            yield self.row(plan, "fused apart", self.logits(hydra), hydra, count=len(models), merged=trunk)

    def row(self, plan: Plan, kind: str, logits: dict[str, Tensor], model: nn.Module | None, **about: Any) -> Row:
        size = {} if model is None else {"parameters": count_parameters(model), "work": count_multiply_adds(model)}
        arrays = arrays_of(logits, self.labels)
        return {"kind": kind, "plan": asdict(plan), **about, **size, **judge(logits, self.labels), ARRAYS: arrays}


# All plans, a few at a time


def work(queue: Any, results: Any, args: argparse.Namespace) -> None:
    study = Study(SETTINGS[args.setting], args.data, args.start, args.device, not args.eager)
    while (plan := queue.get()) is not None:
        try:
            results.put(list(study.rows_of(plan)))
        except Exception as error:  # one that fails loses no other
            traceback.print_exc()
            results.put([{"kind": "error", "plan": asdict(plan), "error": repr(error)}])


def plan_of(row: Row) -> Plan:
    return Plan(**row["plan"] | {"recipe": Recipe(**row["plan"]["recipe"])})


def plans(args: argparse.Namespace) -> list[Plan]:
    """Return the plans of the groups with every seed, each once."""
    setting = SETTINGS[args.setting]
    found: dict[Plan, None] = {}
    for seed in args.seeds:
        usual = Plan(replace(setting.usual, **json.loads(args.usual)), seed=seed)
        for group in args.groups:
            for plan in GROUPS[group](usual):
                found[replace(plan, trunk=min(plan.trunk, setting.layers - 1))] = None
    return list(found)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="tiny-imagenet")
    parser.add_argument("--data", type=Path, help="the folder with vision64/ and vision/")
    parser.add_argument("--start", type=Path, help="the pre-trained DINOv2's folder")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--usual", default="{}", help="fields of the recipe that differ from the usual one, as JSON")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile the step")
    parser.add_argument("--smallest", action="store_true", help="a tiny model on made-up data")
    args = parser.parse_args(words)
    if args.smallest:
        with tempfile.TemporaryDirectory() as folder:
            usual = json.dumps({"epochs": 1, "batch_size": 32})
            options = ["--setting", "smallest", "--output", f"{folder}/results.json", "--device", args.device]
            main([*options, "--groups", "runs", "--usual", usual, "--workers", "1"])
        return
    if args.output is None:
        parser.error("--output is missing: pass the results file")
    run_all(args)


def run_all(args: argparse.Namespace) -> None:
    setting = SETTINGS[args.setting]
    content: dict[str, Any] = {"what": "recipe", "setting": args.setting, "rows": []}
    if args.output.exists():
        content = json.loads(args.output.read_text())
    arrays: dict[str, np.ndarray] = {}
    if args.output.with_suffix(".npz").exists():
        arrays = dict(np.load(args.output.with_suffix(".npz")))
    content["machine"] = where_it_ran(args.device)
    content["usual"] = asdict(setting.usual)
    content["epochs_of_one_training"] = setting.epochs_of_one_training
    content["recipe_of_budgets"] = asdict(setting.usual) | json.loads(args.usual)
    content["work_of_one_model"] = count_multiply_adds(with_classifier(setting, args.start))
    done = {plan_of(row) for row in content["rows"] if row["kind"] != "error"}
    todo = [plan for plan in plans(args) if plan not in done]
    if not todo:
        return

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    results = context.Queue()
    workers = [context.Process(target=work, args=(queue, results, args), daemon=True) for _ in range(args.workers)]
    for worker in workers:
        worker.start()
    began = time.perf_counter()
    waiting = list(todo)
    running = 0
    while waiting or running:
        while waiting and running < args.workers and time.perf_counter() - began < args.seconds:
            queue.put(waiting.pop(0))
            running += 1
        if not running:
            break
        rows = results.get()
        running -= 1
        for row in rows:
            kept = row.pop(ARRAYS, {})
            if kept and is_of_budgets(row, content):
                arrays |= {f"{len(content['rows'])}/{name}": values for name, values in kept.items()}
            content["rows"] += rounded([row])
        write_results(args.output, content, arrays)
        for row in rows:
            print(f"{time.perf_counter() - began:.0f} s", summary(row), flush=True)
    for _ in workers:
        queue.put(None)
    for worker in workers:
        worker.join(timeout=20)


def write_results(output: Path, content: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write the results file, and the arrays of its rows beside it."""
    compressed = io.BytesIO()
    np.savez_compressed(compressed, **arrays)
    write_atomically(output.with_suffix(".npz"), compressed.getvalue())
    write_atomically(output, json.dumps(content, indent=1) + "\n")


def summary(row: Row) -> str:
    """Return one line for the log."""
    if row["kind"] == "error":
        return f"{row['error'][:300]} {row['plan']}"
    usual = asdict(Recipe())
    changes = {name: value for name, value in row["plan"]["recipe"].items() if value != usual[name]}
    others = {name: row["plan"][name] for name in ("members", "trunk", "runs", "seed")}
    about = {name: row[name] for name in ("seed", "count", "merged", "seconds") if name in row}
    parts = []
    for place in ("validation", "test"):
        found = row[place]
        values = f"{100 * found['accuracy']:.2f} {1000 * found['aurc']:.1f} {found['nll_with_temperature']:.4f}"
        parts.append(f"{place} {values} {found['brier_with_temperature']:.4f}")
    return f"{row['kind']} {changes} {others} {about}: {'; '.join(parts)}"


if __name__ == "__main__":
    main()
