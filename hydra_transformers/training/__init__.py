"""Fine-tuning on Transformers' Trainer: one run for a whole Hydra, or pruned members one by one."""

from .callbacks import KeepZerosCallback, PostPruningCallback
from .finetune import FineTuned, finetune
from .lora import lora_config
from .losses import EnsembleLoss
from .members import compute_accuracy, finetune_members
from .recipes import RECIPES, Recipe, recipe
from .trainer import DivergedError, HydraTrainer, HydraTrainingArguments


__all__ = [
    "RECIPES",
    "DivergedError",
    "EnsembleLoss",
    "FineTuned",
    "HydraTrainer",
    "HydraTrainingArguments",
    "KeepZerosCallback",
    "PostPruningCallback",
    "Recipe",
    "compute_accuracy",
    "finetune",
    "finetune_members",
    "lora_config",
    "recipe",
]
