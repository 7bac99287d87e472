"""Fine-tuning before and after pruning, on the Hugging Face Trainer: one callback, recipes, losses, LoRA."""

from .callbacks import EndAfter, KeepZerosCallback, PostPruningCallback
from .finetune import compute_accuracy, finetune_members
from .from_pretrained import finetune_from_pretrained, with_variance
from .joint import hydra_from_pretrained, tune_jointly
from .lora import lora_config
from .losses import EnsembleLoss, Teacher
from .recipes import RECIPES, Recipe, default_recipe, recipe
from .trainer import DivergedError


__all__ = [
    "RECIPES",
    "DivergedError",
    "EndAfter",
    "EnsembleLoss",
    "KeepZerosCallback",
    "PostPruningCallback",
    "Recipe",
    "Teacher",
    "compute_accuracy",
    "default_recipe",
    "finetune_from_pretrained",
    "finetune_members",
    "hydra_from_pretrained",
    "lora_config",
    "recipe",
    "tune_jointly",
    "with_variance",
]
