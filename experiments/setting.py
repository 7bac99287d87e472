"""What a setting says of itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hydra_transformers.training import Recipe

from .splits import Splits


TrainBackbones = Callable[[Any, Sequence[PreTrainedModel], Sequence[Path], Sequence[int]], list[PreTrainedModel]]
ALL_PARTS = ("embeddings", "attention", "mlp", "layernorm", "classifier")


@dataclass(frozen=True)
class Setting:
    """
    name, title: in commands and in tables
    new_backbone: (start) -> the model that a backbone's training starts from; called after seeding
    train_backbones: (comparison, models, folders, seeds) -> the trained backbones, each saved to its folder
    read: (folder of local files or None, start) -> Splits
    member_recipe: training after pruning
    heads_to_prune: how many a circuit removes in all; heads_per_layer: how many Taylor pruning keeps
    heads_to_rank: how many the average's circuit ranks, from which members are sampled; budgets: other numbers to look at
    member_batch: rows per training step
    lora_learning_rate: of LoRA ensembles, trained as members are but with AdamW: adapters start at zero and take larger steps
    groups: what is compared, of `units.GROUPS`
    start: a folder or Hub name that backbones start from; None for new weights
    sampled_dropout: the probability that MC Dropout samples with; None for that which the backbone was trained with
    circuit_dtype: in which circuits are extracted on a GPU
    judged_dtype: in which methods answer on a GPU, by autocast
    groups_by_length: train on batches of texts of about the same length
    backbones_together: train all backbones side by side in one process
    lora_from_start: whether LoRA ensembles start from what backbones start from, in place of a trained backbone, and
        lora_epochs: how long they then train
    circuit_mode: "exact" or "shortlist"
    training_arguments: further `TrainingArguments`
    backbone_recipe: how backbones are fine-tuned, where they start from a pre-trained model; baselines that start there, too,
        train by it, the others as members do
    packed_alpha: the width of a Packed-Ensemble; None where new weights would learn nothing that is worth comparing
    deep_trunks: how many layers are merged where most of them are
    above_single: of a setting with several fine-tunings, by how much their Hydra was to detect better than a single model
    """

    name: str
    title: str
    new_backbone: Callable[[str | None], PreTrainedModel]
    train_backbones: TrainBackbones
    read: Callable[[Path | None, str | None], Splits]
    member_recipe: Recipe
    heads_to_prune: int
    heads_per_layer: int
    heads_to_rank: int
    budgets: tuple[int, ...]
    member_batch: int
    lora_learning_rate: float
    groups: tuple[str, ...]
    start: str | None = None
    sampled_dropout: float | None = None
    circuit_dtype: torch.dtype = torch.float32
    judged_dtype: torch.dtype = torch.float32
    groups_by_length: bool = False
    backbones_together: bool = False
    lora_from_start: bool = False
    lora_epochs: float | None = None
    circuit_mode: str = "exact"
    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    backbone_recipe: Recipe | None = None
    packed_alpha: float | None = None
    above_single: float | None = None
    deep_trunks: tuple[int, ...] = (9, 11)

    @property
    def fewest_heads(self) -> int:
        """The smallest number of heads that members are pruned by."""
        return min(self.budgets)


def finetuned(backbone_recipe: Recipe, batch: int) -> TrainBackbones:
    """Backbones that are fine-tuned by a recipe, one after the other."""
    return lambda comparison, models, folders, seeds: [
        comparison.finetune(model, folder, backbone_recipe, batch, seed)
        for model, folder, seed in zip(models, folders, seeds, strict=True)
    ]
