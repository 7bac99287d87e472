"""What a setting says of itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hydra_transformers.training import Recipe

from .splits import Splits


RATES = ("learning_rate", "classifier_learning_rate")


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
    lora_learning_rate: of LoRA ensembles, which train as long as backbones do: adapters start at zero and take larger steps
    start: a folder or Hub name that backbones start from; None for new weights
    sampled_dropout: the probability that MC Dropout samples with; None for that which the backbone was trained with
    circuit_dtype: in which circuits are extracted on a GPU
    judged_dtype: in which methods answer on a GPU, by autocast
    groups_by_length: train on batches of texts of about the same length
    circuit_mode: "exact" or "shortlist"
    training_arguments: further `TrainingArguments`
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
    start: str | None = None
    sampled_dropout: float | None = None
    circuit_dtype: torch.dtype = torch.float32
    judged_dtype: torch.dtype = torch.float32
    groups_by_length: bool = False
    circuit_mode: str = "exact"
    training_arguments: Mapping[str, Any] = field(default_factory=dict)

    def at_rate(self, factor: float) -> "Setting":
        """The same with all learning rates multiplied, under a name that says so."""
        if factor == 1:
            return self

        def scaled(recipe: Recipe) -> Recipe:
            return recipe.with_arguments(**{name: factor * recipe.arguments[name] for name in RATES})

        return replace(
            self,
            name=f"{self.name}-rate-{factor:g}",
            backbone_recipe=scaled(self.backbone_recipe),
            member_recipe=scaled(self.member_recipe),
            lora_learning_rate=factor * self.lora_learning_rate,
        )
