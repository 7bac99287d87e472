"""Fine-tuning on Transformers' Trainer: one run for a whole Hydra, or pruned members one by one."""

from .callbacks import KeepZerosCallback, PostPruningCallback
from .finetune import finetune
from .lora import lora_config
from .losses import EnsembleLoss
from .members import compute_accuracy, finetune_members
from .recipes import Recipe, recipe
from .trainer import DivergedError, HydraTrainer, HydraTrainingArguments


__all__ = [
    "DivergedError",
    "EnsembleLoss",
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
