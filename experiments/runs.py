"""What `one_run.py` trains: the settings, and in which order learning rates are tried and chosen.

Every method has its own learning rates. `sweep` tries them with one seed; `finalists` gives the three best of one model and of one
run, and the best of each comparator, two seeds more; the best mean Brier score on validation rows decides.
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
SEEDS = (0, 100, 200)
SMALLEST_LAYERS = 6
OWN, SHARED = ("embeddings",), ("embeddings", "layernorm", "mlp")  # what members share behind the trunk


@dataclass(frozen=True)
class Run:
    """One training.

    group: the method, "one model", "one run" or the name of a comparator
    members: 1 for a plain model; learning_rate: of the first `trunk` layers, which the members of a Hydra share
    branch_rate: multiplies the learning rate of the layers behind
    start: "pretrained", or what is made of the checkpoints of this seed first
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
    comparators: the usual training of each
    layers: of the model; members: how many, of Deep Ensembles and of Hydras
    factors: of each method's usual learning rate, that `sweep` tries
    branch_rates: that `sweep` tries, of one model and of one run
    seeds: of what is published; the first one is that of the sweep
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
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    branch_rates: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0, 3.0, 6.0), (3.0, 6.0, 12.0))
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
            replace(IMAGE, group="MC Dropout", learning_rate=1e-4, loss="mean"),
        ),
        layers=layers,
    )


WIDE = (0.5, 1.0, 2.0, 4.0)
CLINC = {"factors": WIDE, "branch_rates": ((3.0, 6.0, 12.0), (3.0, 6.0, 12.0))}
SETTINGS = {
    "images": image_setting(read_tiny_imagenet, new_image_model, 256),
    "clinc150": text_setting(read_clinc("clinc150_train"), 150, 6, **CLINC),
    # test rows were seen with other seeds
    "clinc150-small": text_setting(read_clinc("clinc150_train_small"), 150, 12, seeds=(1000, 1100, 1200), **CLINC),
    "smallest": image_setting(lambda folder, start: smallest.splits(), new_smallest_model, 32, SMALLEST_LAYERS),
    "sst2": text_setting(
        read_sst2, 2, 3, learning_rate=1e-4, members=(3,), factors=WIDE, branch_rates=((1.0, 3.0), (1.0, 3.0))
    ),
}


# What is trained


def sweep(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """Learning rates of each method; of one model and of one run also how much faster the last layers learn."""
    branch_rates = [*setting.branch_rates, *((run.branch_rate,) for run in setting.comparators)]
    for usual, of_branches in zip((setting.single, setting.one_run, *setting.comparators), branch_rates, strict=True):
        for factor in setting.factors:
            for branch_rate in of_branches:
                rates = {"learning_rate": factor * usual.learning_rate, "branch_rate": branch_rate}
                yield replace(usual, seed=setting.seeds[0], **rates)


def finalists(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """The best of each sweep, with two seeds more."""
    for usual in (setting.single, setting.one_run, *setting.comparators):
        best = best_runs(usual, rows, setting.seeds[:1])
        for run in best[: 1 if usual in setting.comparators else 3]:
            yield from (replace(run, seed=seed) for seed in setting.seeds)


def best_runs(usual: Run, rows: Sequence[Row], seeds: Sequence[int]) -> list[Run]:
    """Those that differ from `usual` by learning rates alone, best first; those with all seeds before those with one."""
    scores: dict[Run, dict[int, float]] = {}
    for row in rows:
        if row["name"] == usual.group and "run" in row:
            run = Run(**row["run"] | {"shared": tuple(row["run"]["shared"])})
            rates = {"learning_rate": usual.learning_rate, "branch_rate": usual.branch_rate}
            if run.seed in seeds and replace(run, seed=usual.seed, **rates) == usual:
                scores.setdefault(replace(run, seed=usual.seed), {})[run.seed] = row["validation"]["brier"]
    return sorted(scores, key=lambda run: (-len(scores[run]), mean(scores[run].values())))


def variants(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """Other trunks, shares, losses and lengths."""
    usual = replace(setting.one_run, seed=setting.seeds[0])
    for branches, epochs in ((2, 10), (4, 8), (6, 7)):
        yield replace(usual, trunk=setting.layers - branches, epochs=round(usual.epochs * epochs / 9))
    for epochs in (6, 12):
        yield replace(usual, epochs=round(usual.epochs * epochs / 9))
    yield replace(usual, shared=SHARED)
    yield replace(usual, loss="ensemble")


def chosen(setting: Setting, rows: Sequence[Row]) -> Setting:
    """The setting with the learning rates that were best on validation rows, of those that were tried."""
    best = {kind: best_runs(getattr(setting, kind), rows, setting.seeds) for kind in ("single", "one_run")}
    return replace(setting, **{kind: runs[0] for kind, runs in best.items() if runs})


def seeds(setting: Setting, rows: Sequence[Row]) -> Iterator[Run]:
    """What is published: three seeds of each, with enough checkpoints for the Deep Ensembles of each seed."""
    for seed in setting.seeds:
        for member in range(max(setting.members)):
            yield replace(setting.single, seed=seed + member)
        yield replace(setting.single, epochs=round(1.5 * setting.single.epochs), seed=seed)
        usual = replace(setting.one_run, seed=seed)
        yield replace(usual, trunk=setting.layers - 1, epochs=round(4 * usual.epochs / 3))
        yield from (replace(usual, members=members) for members in setting.members)


GROUPS: dict[str, Callable[[Setting, Sequence[Row]], Iterator[Run]]] = {
    "sweep": sweep,
    "finalists": finalists,
    "seeds": seeds,
    "variants": variants,
}
