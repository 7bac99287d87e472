"""What `one_run.py` trains: the settings, and in which order learning rates are tried and chosen.

Every method has its own learning rates. `sweep` tries them with one seed, `edges` one more where the best is the smallest or the
largest; `finalists` gives the three best of one model and of one run two seeds more, and `edges` looks again; the best mean Brier
score on validation rows decides. All these are published with seeds that chose nothing. What is made of checkpoints is different:
`tuned` and `tuned edges` try its rates with the published seeds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from . import smallest
from .local_files import read_strings, tokenized
from .pretrained import new_dinov2, read_sst2, read_tiny_imagenet
from .rows import TensorRows
from .splits import Splits


Row = dict[str, Any]  # of a results file
SWEEP_SEEDS = (0, 100, 200)
SEEDS = (1000, 1100, 1200)
SMALLEST_LAYERS = 6
FACTORS = (0.5, 1.0, 2.0)
SMALL_BATCH_RATES = (6.25e-6, 1.25e-5, 2.5e-5)
# Made of checkpoints, then trained for a short time
SOUP = "soup, tuned"
PRUNED_HYDRAS = ("Hydra, Taylor", "Hydra, circuits")
TUNED_FACTORS = (0.25, 0.5, 1.0)  # of one model's learning rate
OWN, SHARED = ("embeddings",), ("embeddings", "layernorm", "mlp")  # what members share behind the trunk


@dataclass(frozen=True)
class Run:
    """One training.

    group: the method, "one model", "one run" or the name of a comparator
    members: 1 for a plain model; learning_rate: of the first `trunk` layers, which the members of a Hydra share
    branch_rate: multiplies the learning rate of the layers behind
    start: "pretrained", or what is made of the checkpoints of this seed first
    batch: None for the setting's
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
    batch: int | None = None


def run_of(row: Row) -> Run:
    """That of a row in a results file."""
    return Run(**row["run"] | {"shared": tuple(row["run"]["shared"])})


@dataclass(frozen=True)
class Setting:
    """
    read: (folder, start) -> Splits; new_model: (start, seed) -> a pre-trained model with a new classifier
    single, one_run: the usual training of one model and of a Hydra; epochs of others are multiples of these
    comparators: the usual training of each
    layers: of the model; members: how many, of Deep Ensembles and of Hydras
    factors: of each method's usual learning rate, that `sweep` tries; of comparators those in `FACTORS` alone
    branch_rates: that `sweep` tries, of one model and of one run
    sweep_seeds, seeds: of what learning rates are chosen by, and of what is published
    """

    read: Callable[[Path, Path], Splits]
    new_model: Callable[[Path, int], PreTrainedModel]
    batch: int
    classifier_rate: float
    single: Run
    one_run: Run
    comparators: tuple[Run, ...] = ()
    layers: int = 12
    members: tuple[int, ...] = (3, 5)
    factors: tuple[float, ...] = FACTORS
    branch_rates: tuple[tuple[float, ...], tuple[float, ...]] = ((3.0, 6.0, 12.0), (3.0, 6.0, 12.0))
    sweep_seeds: tuple[int, ...] = SWEEP_SEEDS
    seeds: tuple[int, ...] = SEEDS


def new_image_model(start: Path, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return new_dinov2(str(start))


def new_smallest_model(start: Path, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return smallest.new_backbone(layers=SMALLEST_LAYERS)


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


TEXT = Run("one model", 1, 2.5e-5, 3.0)
IMAGE = Run("one model", 1, 2.5e-5, 3.0, epochs=8)


def text_setting(
    read: Callable[[Path, Path], Splits], classes: int, epochs: int, learning_rate: float = 2.5e-5, **options: Any
) -> Setting:
    single = replace(TEXT, epochs=epochs, learning_rate=learning_rate)
    one_run = replace(single, group="one run", members=3)
    return Setting(read, new_text_model(classes), 128, 5e-4, single, one_run, **options)


def image_setting(
    read: Callable[[Path, Path], Splits],
    new_model: Callable[[Path, int], PreTrainedModel],
    batch: int,
    layers: int = 12,
    **options: Any,
) -> Setting:
    return Setting(
        read,
        new_model,
        batch,
        1e-3,
        replace(IMAGE, trunk=3 * layers // 4),
        Run("one run", trunk=3 * layers // 4),
        (
            replace(IMAGE, group="LoRA ensemble", learning_rate=2e-3, branch_rate=1.0, loss="mean"),
            replace(IMAGE, group="BatchEnsemble", members=3, loss="mean"),
            replace(IMAGE, group="MIMO", members=3, loss="mean"),
            replace(IMAGE, group="MC Dropout", learning_rate=5e-5, loss="mean"),
        ),
        layers=layers,
        **options,
    )


IMAGES = {"branch_rates": ((1.0, 3.0, 6.0), (3.0, 6.0, 12.0))}
# Test rows were seen with other seeds.
SMALL = {"factors": (0.5, 1.0, 2.0, 4.0), "sweep_seeds": SEEDS, "seeds": (2000, 2100, 2200)}
SST2 = {"members": (3,), "branch_rates": ((1.0, 3.0, 6.0), (1.0, 3.0, 6.0))}
SETTINGS = {
    "images": image_setting(read_tiny_imagenet, new_image_model, 256, **IMAGES),
    "clinc150": text_setting(read_clinc("clinc150_train"), 150, 6),
    "clinc150-small": text_setting(read_clinc("clinc150_train_small"), 150, 12, **SMALL),
    "smallest": image_setting(lambda folder, start: smallest.splits(), new_smallest_model, 32, SMALLEST_LAYERS),
    "sst2": text_setting(read_sst2, 2, 3, learning_rate=5e-5, **SST2),
}


# What is trained


def sweep(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """Learning rates of each method; of one model and of one run also how much faster the last layers learn."""
    branch_rates = [*setting.branch_rates, *((run.branch_rate,) for run in setting.comparators)]
    for usual, of_branches in zip((setting.single, setting.one_run, *setting.comparators), branch_rates, strict=True):
        for factor in setting.factors:
            for branch_rate in of_branches if usual.group in ("one model", "one run") or factor in FACTORS else ():
                rates = {"learning_rate": factor * usual.learning_rate, "branch_rate": branch_rate}
                yield replace(usual, seed=setting.sweep_seeds[0], **rates)


def edges(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """Where the best lies at the edge of what was tried, the next value, half or twice as large, with as many seeds as the best."""
    for usual in (setting.single, setting.one_run, *setting.comparators):
        yield from beyond_edges(usual, rows, setting.sweep_seeds)


def beyond_edges(usual: Run, rows: Sequence[Row], seeds: Sequence[int]) -> Iterator[Run]:
    tried = best_runs(usual, rows, seeds)
    runs = [run_of(row) for row in rows if "run" in row]
    seeds_of_best = [run.seed for run in runs if replace(run, seed=usual.seed) in tried[:1]]
    for name in ("learning_rate", "branch_rate"):
        values = sorted({getattr(run, name) for run in tried})
        if len(values) > 1:
            best = getattr(tried[0], name)
            beyond = [factor * best for factor, edge in ((0.5, values[0]), (2.0, values[-1])) if best == edge]
            for seed in sorted({*seeds_of_best} & {*seeds}):
                yield from (replace(tried[0], seed=seed, **{name: value}) for value in beyond)


def small_batches(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """One run with the batches and the branches' rate that `finetune` has by default, and learning rates around its own."""
    for learning_rate in SMALL_BATCH_RATES:
        rates = {"learning_rate": learning_rate, "branch_rate": 6.0}
        yield replace(setting.one_run, seed=setting.sweep_seeds[0], batch=32, **rates)


def finalists(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """The best of two sweeps, with two seeds more."""
    for usual in (setting.single, setting.one_run):
        for run in best_runs(usual, rows, setting.sweep_seeds[:1])[:3]:
            yield from (replace(run, seed=seed) for seed in setting.sweep_seeds)


def best_runs(usual: Run, rows: Sequence[Row], seeds: Sequence[int]) -> list[Run]:
    """Those that differ from `usual` by learning rates alone, best first; those with all seeds before those with one."""
    scores: dict[Run, dict[int, float]] = {}
    for row in rows:
        if row["name"] == usual.group and "run" in row:
            run = run_of(row)
            rates = {"learning_rate": usual.learning_rate, "branch_rate": usual.branch_rate}
            if run.seed in seeds and replace(run, seed=usual.seed, **rates) == usual:
                scores.setdefault(replace(run, seed=usual.seed), {})[run.seed] = row["validation"]["brier"]
    return sorted(scores, key=lambda run: (-len(scores[run]), mean(scores[run].values())))


def variants(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """Other trunks, shares, losses and lengths."""
    usual = replace(setting.one_run, seed=setting.sweep_seeds[0])
    for branches, epochs in ((2, 10), (4, 8), (6, 7)):
        yield replace(usual, trunk=setting.layers - branches, epochs=round(usual.epochs * epochs / 9))
    for epochs in (6, 12):
        yield replace(usual, epochs=round(usual.epochs * epochs / 9))
    yield replace(usual, shared=SHARED)
    yield replace(usual, loss="ensemble")


def chosen(setting: Setting, rows: Sequence[Row]) -> Setting:
    """The setting with the learning rates that were best on validation rows, of those that were tried."""

    def best(usual: Run) -> Run:
        return next(iter(best_runs(usual, rows, setting.sweep_seeds)), usual)

    comparators = tuple(map(best, setting.comparators))
    return replace(setting, single=best(setting.single), one_run=best(setting.one_run), comparators=comparators)


def seeds(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """What is published: three seeds of each, with enough checkpoints for the Deep Ensembles of each seed."""
    first = min(setting.members)
    last = max(setting.members)
    for seed in setting.seeds:
        usual = replace(setting.one_run, seed=seed)
        yield replace(usual, members=first)
        yield from (replace(setting.single, seed=seed + member) for member in range(first))
        for factor in (1, 0.5):  # longer training may want a lower rate
            rates = {"learning_rate": factor * setting.single.learning_rate}
            yield replace(setting.single, epochs=round(1.5 * setting.single.epochs), seed=seed, **rates)
        yield replace(usual, trunk=setting.layers - 1, epochs=round(4 * usual.epochs / 3))
    for seed in setting.seeds:
        yield from (replace(setting.single, seed=seed + member) for member in range(first, last))
        yield from (replace(setting.one_run, seed=seed, members=members) for members in setting.members[1:])


def comparators(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """The others that are published."""
    for usual in setting.comparators:
        yield from (replace(usual, seed=seed) for seed in setting.seeds)


def short_runs(setting: Setting) -> list[Run]:
    """Of what is made of checkpoints: three eighths of one model's epochs."""
    short = replace(setting.single, epochs=max(1, round(3 * setting.single.epochs / 8)))
    soup = replace(short, group=SOUP, start=SOUP)
    pruned = [replace(short, group=name, start=name, members=3) for name in PRUNED_HYDRAS]
    return [soup, *pruned] if setting.comparators else [soup]


def tuned(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """With all seeds, as it is cheap."""
    for usual in short_runs(setting):
        for factor in TUNED_FACTORS:
            learning_rate = factor * setting.single.learning_rate
            yield from (replace(usual, learning_rate=learning_rate, seed=seed) for seed in setting.seeds)


def tuned_edges(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """The same as `edges`, with all seeds."""
    for usual in short_runs(setting):
        for run in best_runs(usual, rows, setting.seeds):  # a seed that failed is run again
            yield from (replace(run, seed=seed) for seed in setting.seeds)
        yield from beyond_edges(usual, rows, setting.seeds)


GROUPS: dict[str, Callable[[Setting, Sequence[Row]], Iterator[Run]]] = {
    "sweep": sweep,
    "edges": edges,
    "finalists": finalists,
    "small batches": small_batches,
    "seeds": seeds,
    "comparators": comparators,
    "variants": variants,
    "tuned": tuned,
    "tuned edges": tuned_edges,
}
