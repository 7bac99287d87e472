"""Fine-tuning before and after pruning, on the Hugging Face Trainer: one callback, recipes, losses, LoRA."""

from .callback import PostPruningCallback
from .default_recipe import default_recipe
from .divergence import DivergedError
from .finetune import compute_accuracy, finetune_members
from .from_pretrained import finetune_from_pretrained
from .keep_zeros import KeepZerosCallback
from .lora import lora_config
from .losses import EnsembleLoss
from .recipes import RECIPES, Recipe, recipe


__all__ = [
    "RECIPES",
    "DivergedError",
    "EnsembleLoss",
    "KeepZerosCallback",
    "PostPruningCallback",
    "Recipe",
    "compute_accuracy",
    "default_recipe",
    "finetune_from_pretrained",
    "finetune_members",
    "lora_config",
    "recipe",
]
