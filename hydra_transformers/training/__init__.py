"""Fine-tuning after pruning, on the Hugging Face Trainer: one callback, the paper's recipes, losses, LoRA."""

from .callback import PostPruningCallback
from .divergence import DivergedError
from .finetune import compute_accuracy, finetune_members
from .lora import lora_config
from .losses import EnsembleLoss
from .recipes import RECIPES, Recipe, recipe


__all__ = [
    "RECIPES",
    "DivergedError",
    "EnsembleLoss",
    "PostPruningCallback",
    "Recipe",
    "compute_accuracy",
    "finetune_members",
    "lora_config",
    "recipe",
]
