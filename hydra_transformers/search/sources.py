"""The models and the data that a search starts from, checked and divided."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.batches import batches, check_is_data, split_labels
from ..data.evaluation_data import check_label_range
from ..data.fingerprints import fingerprint_of_rows, fingerprint_of_weights, fingerprints_of_rows
from ..data.loading import ood_groups
from ..data.tags import check_tags
from ..data.tasks import ONE_CLASS, REGRESSION, SEVERAL_LABELS, TOKENS, check_task
from ..fusion import check_can_be_fused
from ..models.auto import CLASSIFIERS, TOKEN_CLASSIFIERS, check_has_no_adapters, config_of, described, load_trained
from ..reports.evaluation import place_of
from ..training.from_pretrained import with_new_classifiers
from ..uncertainty.inputs import as_multi_hot
from ..uncertainty.regression import as_targets
from .candidates import MEASURES


Model = PreTrainedModel | str | os.PathLike
Batch = dict[str, Tensor]

LEAST_ROWS = 60  # a third of them is the least that a decision can be calibrated on
LEAST_OOD_ROWS = 4
FEW_ROWS = 100  # for evaluation
MOST_SEARCH_ROWS = 1_000
MOST_CALIBRATION_ROWS = 2_000
MOST_HELD_OUT_ROWS = 3_000  # of training data


# Models


@dataclass(frozen=True)
class Source:
    """Models to make members from.

    models: the fine-tuned ones; with `pretrained` one with a new classifier, before its training
    pretrained: the model to fine-tune `num_members` times; None where models are fine-tuned
    """

    models: list[PreTrainedModel]
    pretrained: Model | None
    num_members: int

    @property
    def config(self) -> PreTrainedConfig:
        return described(self.models[0])

    def fingerprints(self) -> list[str]:
        return [fingerprint_of_weights(model) for model in self.models]


def needs_finetuning(given: Model | Sequence[Model], finetune: bool | None) -> bool:
    """Whether one model is fine-tuned first: as `finetune` says, by default where it has no classifier."""
    if isinstance(given, (list, tuple)):
        return False
    return finetune if finetune is not None else not has_classifier(given)


def has_classifier(model: Model) -> bool:
    """Whether a model has a trained classifier, by its class or its config."""
    config = model.config if isinstance(model, PreTrainedModel) else config_of(model)
    names = [type(model).__name__] if isinstance(model, PreTrainedModel) else config.architectures or ()
    heads = [found[config.model_type] for found in (CLASSIFIERS, TOKEN_CLASSIFIERS) if config.model_type in found]
    return any(head.__name__ in names for head in heads)


def read_source(
    given: Model | Sequence[Model],
    has_train_data: bool,
    finetune: bool | None,
    num_members: int,
    class_names: Sequence[str] | None,
    seed: int,
    device: str | None,
    problem_type: str | None = None,
) -> Source:
    """Checks the models, and loads those that are names."""
    if type(num_members) is not int or num_members < 2:
        raise ValueError(f"num_members is {num_members!r}: pass at least 2, one member is no ensemble")
    is_several = isinstance(given, (list, tuple))
    named = list(given) if is_several else [given]
    if not named:
        raise ValueError("model_or_models is an empty list: pass at least one model")
    names = [f"model_or_models[{place}]" if is_several else "model_or_models" for place in range(len(named))]
    for each, name in zip(named, names, strict=True):
        _check_kind(each, name)
    if finetune and len(named) > 1:
        raise ValueError(f"finetune is for one pre-trained model, and there are {len(named)} models: leave it out")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if len(named) == 1 and needs_finetuning(named[0], finetune):
        [only] = named
        is_loaded = isinstance(only, PreTrainedModel)
        if not has_train_data:
            name = f"model_or_models ({type(only).__name__})" if is_loaded else os.fspath(only)
            raise ValueError(
                f"{name} is a pre-trained model without a trained classifier, and there is no train_data to fine-tune it "
                "on: pass train_data, or fine-tuned models"
            )
        [first] = with_new_classifiers(only, 1, class_names, seed, problem_type)
        return Source([first.to(only.device if is_loaded else device)], only, num_members)
    for name, value in {"class_names are": class_names, "problem_type is": problem_type}.items():
        if value is not None:
            raise ValueError(
                f"{name} for a pre-trained model that is fine-tuned here: leave {'them' if 'are' in name else 'it'} out, or pass "
                "finetune=True"
            )
    models = [each if isinstance(each, PreTrainedModel) else load_trained(each).to(device) for each in named]
    for model, name in zip(models, names, strict=True):
        if not has_classifier(model):
            raise ValueError(
                f"{name} is a {type(model).__name__}, which has no classifier: pass fine-tuned classifiers, or one pre-trained "
                "model with train_data"
            )
        check_task(model, name, MEASURES)
    if len(models) > 1:
        check_can_be_fused(models, "model_or_models", allow_equal=False)
    return Source(models, None, len(models) if len(models) > 1 else num_members)


def _check_kind(model: Any, name: str) -> None:
    """Refuses models that no Hydra classifier is made from, before any is loaded."""
    if isinstance(model, PreTrainedModel):
        check_has_no_adapters(model, name)
        config = model.config
    elif isinstance(model, (str, os.PathLike)):
        config = config_of(model)
    else:
        raise TypeError(f"{name} is a {type(model).__name__}: pass a model, a folder or Hub name, or a list of these")
    if hasattr(config, "kept_heads") or hasattr(config, "num_members"):
        raise ValueError(f"{name} is a Hydra already: pass models of Transformers, before they are pruned or fused")
    if config.model_type not in CLASSIFIERS:
        raise ValueError(f"{name} is a {config.model_type}: pass a classifier, one of {', '.join(CLASSIFIERS)}")


# Training data


def check_training_data(train_data: Any) -> None:
    if not (hasattr(train_data, "__len__") and hasattr(train_data, "__getitem__")) or isinstance(train_data, dict):
        raise TypeError(
            f"train_data is a {type(train_data).__name__}: pass a Dataset or a list of dict rows, which Trainer can shuffle"
        )
    if len(train_data) == 0:
        raise ValueError("train_data has no rows: pass at least one")


def divided_training_data(source: Source, train_data: Any, seed: int) -> tuple[Subset, Subset]:
    """Rows to train on, and a fifth (at most 3,000) in place of the missing `data`."""
    if source.pretrained is None:
        raise ValueError(
            "data is missing: pass labelled rows that the models were not trained on, to compare candidates on"
        )
    count = len(train_data)
    size = min(MOST_HELD_OUT_ROWS, count // 5)
    if size < LEAST_ROWS:
        raise ValueError(
            f"data is missing, and a fifth of the {count} rows of train_data are too few to choose by: pass data, at least "
            f"{LEAST_ROWS} rows"
        )
    taken, others = divided(count, [size], seed)
    return Subset(train_data, others.tolist()), Subset(train_data, taken.tolist())


# Held-out data


@dataclass(frozen=True)
class HeldOut:
    """Rows that no model was trained on, in batches on the CPU; no row is in two parts.

    search: for circuits, and for choosing what members share
    calibration: for temperature and prediction sets
    evaluation: for comparing candidates
    ood_search, ood: OOD rows for circuits, all together; and those for evaluation, group -> name -> batches
    fingerprints: of all rows, by data set
    """

    search: list[Batch]
    calibration: list[Batch]
    evaluation: list[Batch]
    ood_search: list[Batch] | None = None
    ood: dict[str, dict[str, list[Batch]]] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """How the rows were divided, and whether they are few."""
        parts = [f"{rows_in(self.search):,} rows of data are for the search (circuits, what to share)"]
        parts += [f"{rows_in(self.calibration):,} for calibration", f"{rows_in(self.evaluation):,} for evaluation"]
        if self.ood_search is None:
            ood = "detection is not measured, as there is no ood_data"
        else:
            evaluation = sum(rows_in(each) for sets in self.ood.values() for each in sets.values())
            ood = f"of ood_data {rows_in(self.ood_search):,} for circuits, {evaluation:,} for evaluation"
        notes = [f"{', '.join(parts)}; {ood}."]
        if rows_in(self.evaluation) < FEW_ROWS:
            few = f"There are only {rows_in(self.evaluation)} rows for evaluation, which show only large differences"
            notes.append(f"{few}: pass more data, better 3,000 rows.")
        return notes


def held_out(
    data: Any,
    ood_data: Any,
    num_classes: int,
    batch_size: int,
    seed: int,
    classes: Sequence[str] | None = None,
    task: str = ONE_CLASS,
) -> HeldOut:
    """Reads and divides the data; the same data and seed give the same parts.

    data: a DataLoader, a list of dict batches, or a Dataset or list of dict rows, with labels
    ood_data: `{"near": {name: data}, "far": {name: data}}`, `{name: data}`, one data set, or None
    classes: the model's class names, for labels that are names
    task: see `data.tasks`; what labels have to be
    """
    if isinstance(data, Mapping) and set(data) == {"chosen", "rejected"}:
        raise ValueError(
            "data is pairs of answers, and hydrate divides rows with labels: compare reward models with evaluate_uncertainty, and "
            "fuse them with from_pruned_members"
        )
    known = _read(data, "data", batch_size, classes)
    for batch in known:
        _check_labels(batch, task, num_classes)
    count = rows_in(known)
    if count < LEAST_ROWS:
        raise ValueError(
            f"data has {count} rows: pass at least {LEAST_ROWS}, better 3,000, to choose and calibrate by"
        )
    fingerprints = {"data": _fingerprint(known)}
    sizes = [min(MOST_SEARCH_ROWS, count // 3), min(MOST_CALIBRATION_ROWS, count // 3)]
    parts = [select(known, rows, batch_size) for rows in divided(count, sizes, seed)]
    if task == SEVERAL_LABELS:
        _check_every_label(parts[1], classes)
    groups = ood_groups(ood_data)
    if not groups:
        return HeldOut(*parts, fingerprints=fingerprints)
    ood, search = {group: {} for group in groups}, []
    most = max(1, MOST_SEARCH_ROWS // sum(map(len, groups.values())))
    for group, name, each in [(group, *item) for group, sets in groups.items() for item in sets.items()]:
        place = place_of(group, name)
        found = [split_labels(batch)[0] for batch in _read(each, place, batch_size)]
        if rows_in(found) < LEAST_OOD_ROWS:
            raise ValueError(f"{place} has {rows_in(found)} rows: pass at least {LEAST_OOD_ROWS}, better 1,000")
        fingerprints[place] = _fingerprint(found)
        first, second = divided(rows_in(found), [min(most, rows_in(found) // 2)], seed)
        search += select(found, first, batch_size)
        ood[group][name] = select(found, second, batch_size)
    return HeldOut(*parts, search, ood, fingerprints)


def _check_labels(batch: Batch, task: str, num_classes: int) -> None:
    labels = batch.get("labels")
    if labels is None:
        raise ValueError("data has no labels: add a column labels (or label) with class indices")
    rows = len(labels)
    if task == REGRESSION:
        as_targets(labels, rows, num_classes)
    elif task == SEVERAL_LABELS:
        as_multi_hot(labels, rows, num_classes)
    elif task == TOKENS:
        check_tags(labels, *batch["input_ids"].shape, num_classes)
    elif labels.is_floating_point() or labels.dim() != 1:
        raise ValueError(
            f"the labels of data are {labels.dtype} of shape {tuple(labels.shape)}: pass one class index per row"
        )
    else:
        check_label_range(labels, "data", num_classes)


def _check_every_label(calibration: list[Batch], classes: Sequence[str] | None) -> None:
    """Thresholds of labels are fitted on these rows, after hours of training."""
    is_there = torch.stack([batch["labels"].bool().any(dim=0) for batch in calibration]).any(dim=0)
    missing = (~is_there).nonzero().flatten().tolist()
    if missing:
        name = missing[0] if classes is None else repr(classes[missing[0]])
        raise ValueError(
            f"none of the {rows_in(calibration):,} rows of data for calibration has the label {name}: pass more rows with it"
        )


def divided(count: int, sizes: list[int], seed: int) -> list[Tensor]:
    """The numbers 0 to count - 1 in random parts of these sizes, and the rest; each in order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")
    return [part.sort().values for part in order.split([*sizes, count - sum(sizes)])]


def select(data: list[Batch], rows: Tensor, batch_size: int) -> list[Batch]:
    """The rows of these numbers, which are in order, in batches; neighbours of one shape fill a batch up."""
    found: list[Batch] = []
    start = 0
    for batch in data:
        inside = rows[(rows >= start) & (rows < start + rows_in([batch]))] - start
        start += rows_in([batch])
        if found and _shapes(found[-1]) == _shapes(batch):
            room = max(0, batch_size - rows_in(found[-1:]))
            found[-1] = {name: torch.cat([found[-1][name], batch[name][inside[:room]]]) for name in batch}
            inside = inside[room:]
        if len(inside):
            found.append({name: tensor[inside] for name, tensor in batch.items()})
    return found


def rows_in(data: list[Batch]) -> int:
    return sum(len(next(iter(batch.values()))) for batch in data)


def rows_of(data: list[Batch]) -> Iterator[Batch]:
    """One by one."""
    for batch in data:
        for row in range(rows_in([batch])):
            yield {name: tensor[row] for name, tensor in batch.items()}


def _shapes(batch: Batch) -> dict[str, tuple]:
    return {name: (tensor.dtype, *tensor.shape[1:]) for name, tensor in batch.items()}


def _read(data: Any, name: str, batch_size: int, classes: Sequence[str] | None = None) -> list[Batch]:
    check_is_data(data, name)
    found = []
    for batch in batches(data, batch_size, "cpu", classes=classes):
        inputs, labels = split_labels(batch)
        found.append(inputs if labels is None else {**inputs, "labels": labels})
    if not found:
        raise ValueError(f"{name} is empty: pass at least one sample")
    return found


def _fingerprint(data: list[Batch]) -> str:
    return fingerprint_of_rows([digest for batch in data for digest in fingerprints_of_rows(batch)])
