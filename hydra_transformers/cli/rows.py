"""Checks and prompts of rows that several commands read."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..data.loading import PreparedData
from ..models.auto import HYDRA_CLASSES, head_of, is_zero_shot


def check_can_be_learnt_from(data: PreparedData, name: str, purpose: str, by_classes: bool = True) -> None:
    """Refuses rows among which nothing can be told apart."""
    if len(data) < 2:
        raise ValueError(f"{name} gives 1 row, too few {purpose}: read more of it")
    if by_classes and len(set(data.labels)) < 2:
        raise ValueError(
            f"all {len(data):,} rows of {name} have the same label, so there is nothing {purpose}: where the rows are "
            "sorted by class, read all of them and draw with --limit"
        )


def overlap(split: str | None, other: str | None) -> bool:
    """Whether two splits surely have rows in common: they are the same, or one is a part of the other."""
    if split is None or other is None:  # the only one
        return split == other
    is_of_same = split.partition("[")[0] == other.partition("[")[0]
    return is_of_same and (split == other or "[" not in split or "[" not in other)


def class_prompts(config: PreTrainedConfig, processor: Any, data: PreparedData) -> dict | None:
    """For two towers the tokenized prompts of the data's classes; for classifiers nothing."""
    if not is_zero_shot(config):
        return None
    return prompts_for(config, processor, data.class_names)


def prompts_for(config: PreTrainedConfig, processor: Any, class_names: Sequence[str]) -> dict:
    """The tokenized prompts of classes, for a model of two towers."""
    prompts = [f"A photo of a {name}." for name in class_names]
    head = head_of(config)
    length = {"padding": True}
    if HYDRA_CLASSES.get(head, head).reads_padding:
        length = {"padding": "max_length", "max_length": config.text_config.max_position_embeddings}
    return dict(processor(text=prompts, truncation=True, return_tensors="pt", **length))
