"""The CLIP and the data of `zero_shot.py`: a small CLIP, trained here on Tiny ImageNet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Dinov2Model, PreTrainedModel

from . import smallest
from .captions import prompts_for, read_class_names
from .clip_training import SMALLEST_NAMES, SMALLEST_SCHEDULE, Schedule, smallest_dinov2, trained_clip
from .pretrained import IMAGE_SIZE, read_tiny_imagenet
from .rows import TensorRows
from .splits import Splits


@dataclass(frozen=True)
class LabelSet:
    """Classes by their names (each by one or more, the usual one first), and labelled rows."""

    names: Sequence[Sequence[str]]
    test: TensorRows
    validation: TensorRows

    @property
    def prompts(self) -> list[str]:
        return prompts_for(names[0] for names in self.names)

    def to(self, device: torch.device | str) -> "LabelSet":
        return replace(self, test=self.test.to(device), validation=self.validation.to(device))


@dataclass(frozen=True)
class ZeroShotSetting:
    """
    name, title: in commands and in tables
    read: (folder, start) -> the data, and label sets, that of the data first; the others are to carry a temperature to
    clip: (start, splits, label sets, folder, seed, device) -> the model, trained and kept in `folder` where it is not ready, and
        its tokenizer
    pairs: of the data, the labelled rows that BayesVLM is fitted on, each with its class's prompt
    views: of the data, the labelled rows that ViLU is trained on, augmented, and num_views: how often it sees each
    heads_to_prune: how many a circuit removes in all, fewer_heads: and how many of these in a second look (the "-6 heads"
        of the paper are six heads more that are removed)
    heads_per_layer: how many heads Taylor pruning keeps in each layer of the vision tower
    start: a folder or Hub name, of the CLIP or of what its vision tower starts from
    circuit_mode: "exact" or "shortlist"
    judged_dtype: in which methods answer on a GPU: similarities have few digits in half precision
    """

    name: str
    title: str
    read: Callable[[Path | None, str], tuple[Splits, Mapping[str, LabelSet]]]
    clip: Callable[..., tuple[PreTrainedModel, Any]]
    pairs: Callable[[Splits], Any]
    views: Callable[[Splits], Any]
    num_views: int
    heads_to_prune: int
    fewer_heads: int
    heads_per_layer: int
    start: str | None = None
    circuit_mode: str = "shortlist"
    judged_dtype: torch.dtype = torch.float32


# Tiny ImageNet


def halves(splits: Splits, names: Sequence[Sequence[str]]) -> dict[str, LabelSet]:
    """All classes; the first half of them alone, and the second half alone (of an odd number, with one in both)."""
    count = len(names)
    sets = {"all classes": LabelSet(names, splits.test, splits.validation)}
    for title, part in (("the first half", range((count + 1) // 2)), ("the second half", range(count // 2, count))):
        test, validation = (rows_of(rows, part) for rows in (splits.test, splits.validation))
        sets[title] = LabelSet([names[label] for label in part], test, validation)
    return sets


def rows_of(rows: TensorRows, labels: range) -> TensorRows:
    """The rows of some classes, which are counted from 0."""
    own = (rows.tensors["labels"] >= labels.start) & (rows.tensors["labels"] < labels.stop)
    part = rows.part(own)
    part.tensors["labels"] = part.tensors["labels"] - labels.start
    return part


def read_with_names(folder: Path, start: str | None) -> tuple[Splits, dict[str, LabelSet]]:
    splits = replace(read_tiny_imagenet(folder, None), validation_ood=None)  # nothing is chosen here
    return splits, halves(splits, read_class_names(folder))


def training_rows(splits: Splits) -> TensorRows:
    """As they are, not augmented."""
    return splits.train.prepared_by(splits.test.prepare)


def held_out_rows(splits: Splits) -> TensorRows:
    """All that no model was trained on and that is not for tests, augmented as training rows are."""
    parts = (splits.validation, splits.circuit_id)
    tensors = {name: torch.cat([rows.tensors[name] for rows in parts]) for name in parts[0].tensors}
    return TensorRows(tensors, splits.train.prepare)


def clip_of_dinov2(
    start: str, splits: Splits, label_sets: Mapping[str, LabelSet], folder: Path, seed: int, device: str
):
    names = next(iter(label_sets.values())).names
    dinov2 = Dinov2Model.from_pretrained(start, dtype=torch.float32)
    return trained_clip(splits, names, dinov2, IMAGE_SIZE, Schedule(), seed, device, folder)


CLIP_TINYIMAGENET = ZeroShotSetting(
    name="clip-tinyimagenet",
    title="100 classes of Tiny ImageNet, a CLIP of DINOv2-S (12 layers of 6 heads) and a text tower of 4 layers of 4 heads",
    read=read_with_names,
    clip=clip_of_dinov2,
    pairs=training_rows,
    views=held_out_rows,
    num_views=20,
    heads_to_prune=12,
    fewer_heads=6,
    heads_per_layer=5,
    start="facebook/dinov2-small",
)


# The smallest


def read_made_up(folder: Path | None, start: str | None) -> tuple[Splits, dict[str, LabelSet]]:
    splits = replace(smallest.splits(), validation_ood=None)
    return splits, halves(splits, SMALLEST_NAMES)


def smallest_clip(
    start: str | None, splits: Splits, label_sets: Mapping[str, LabelSet], folder: Path, seed: int, device: str
):
    return trained_clip(splits, SMALLEST_NAMES, smallest_dinov2(), 8, SMALLEST_SCHEDULE, seed, device, folder)


# In place of the CLIP on Tiny ImageNet, whose name it keeps.
SMALLEST = replace(
    CLIP_TINYIMAGENET,
    read=read_made_up,
    clip=smallest_clip,
    heads_to_prune=2,
    fewer_heads=1,
    heads_per_layer=1,
    num_views=1,
)
