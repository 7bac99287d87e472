"""How the comparison fine-tunes pre-trained models, and members after pruning. The paper's own recipes are in the package.

The learning rate of images is the best of three on validation rows (`one_run.py`); `--rate` multiplies all of them."""

from dataclasses import replace

from hydra_transformers.training import Recipe
from hydra_transformers.training.parameter_groups import PARTS


FINETUNE_IMAGES = Recipe(
    "finetune-images",
    {
        "learning_rate": 2.5e-5,
        "classifier_learning_rate": 1e-3,
        "weight_decay": 0.05,
        "max_grad_norm": 1.0,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 8,
    },
    trainable=PARTS,
)
TUNE_IMAGES = replace(
    FINETUNE_IMAGES.with_arguments(learning_rate=1.25e-5, classifier_learning_rate=5e-4, num_train_epochs=3),
    name="tune-images",
)
FINETUNE_TEXTS = replace(
    FINETUNE_IMAGES.with_arguments(
        learning_rate=5e-5,
        classifier_learning_rate=5e-4,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        num_train_epochs=2,
    ),
    name="finetune-texts",
)
TUNE_TEXTS = replace(
    FINETUNE_TEXTS.with_arguments(learning_rate=3e-5, classifier_learning_rate=3e-4, num_train_epochs=1),
    name="tune-texts",
)
