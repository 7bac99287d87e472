"""What a setting says of itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hydra_transformers.training import Recipe

from .splits import Splits


ALL_PARTS = ("embeddings", "attention", "mlp", "layernorm", "classifier")


@dataclass(frozen=True)
class Setting:
    """
    name, title: in commands and in tables
    new_backbone: (start) -> the model that a backbone's training starts from; called after seeding
    backbone_recipe: how backbones are fine-tuned, and baselines that start where they do
    read: (folder of local files or None, start) -> Splits
    member_recipe: training after pruning
    heads_to_prune: how many a circuit removes in all; heads_per_layer: how many Taylor pruning keeps
    batch_size: rows per training step
    lora_learning_rate: of LoRA ensembles, trained as members are but with AdamW: adapters start at zero and take larger steps
    groups: what is compared, of `units.GROUPS`
    start: a folder or Hub name that backbones start from; None for new weights
    sampled_dropout: the probability that MC Dropout samples with; None for that which the backbone was trained with
    circuit_dtype: in which circuits are extracted on a GPU
    judged_dtype: in which methods answer on a GPU, by autocast
    groups_by_length: train on batches of texts of about the same length
    lora_from_start: whether LoRA ensembles start from what backbones start from, in place of a trained backbone, and
        lora_epochs: how long they then train
    circuit_mode: "exact" or "shortlist"
    training_arguments: further `TrainingArguments`
    heads_to_rank: how many the average's circuit ranks, where members are sampled from it; budgets: other numbers of heads to
        prune
    deep_trunks: how many layers are merged where most of them are
    """

    name: str
    title: str
    new_backbone: Callable[[str | None], PreTrainedModel]
    backbone_recipe: Recipe
    read: Callable[[Path | None, str | None], Splits]
    member_recipe: Recipe
    heads_to_prune: int
    heads_per_layer: int
    batch_size: int
    lora_learning_rate: float
    groups: tuple[str, ...]
    start: str | None = None
    sampled_dropout: float | None = None
    circuit_dtype: torch.dtype = torch.float32
    judged_dtype: torch.dtype = torch.float32
    groups_by_length: bool = False
    lora_from_start: bool = False
    lora_epochs: float | None = None
    circuit_mode: str = "exact"
    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    heads_to_rank: int = 0
    budgets: tuple[int, ...] = ()
    deep_trunks: tuple[int, ...] = (9, 11)
