"""The prompts by which CLIP and SigLIP choose among classes."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..models.auto import HYDRA_CLASSES, head_of, is_zero_shot


def class_prompts(config: PreTrainedConfig, processor: Any, class_names: Sequence[str] | None) -> dict | None:
    """The tokenized prompts of classes for a model of two towers; None for a classifier, which has classes of its own."""
    if not is_zero_shot(config):
        return None
    prompts = [f"A photo of a {name}." for name in class_names]
    head = head_of(config)
    length = {"padding": True}
    if HYDRA_CLASSES.get(head, head).reads_padding:
        length = {"padding": "max_length", "max_length": config.text_config.max_position_embeddings}
    return dict(processor(text=prompts, truncation=True, return_tensors="pt", **length))
