"""What is compared on what: backbones, data, recipes and budgets of each setting.

"tinyimagenet-dinov2" and "sst2-gte" fine-tune real pre-trained models (`pretrained.py`), by files or from the Hub.
"imagenet1k", "cifar100" and "sst2" are the paper's own settings, from the Hub (`hub_sets.py`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import AutoModelForImageClassification, PreTrainedModel

from hydra_transformers.training import recipe

from . import hub_sets
from .pretrained import SST2_GTE, TINYIMAGENET_DINOV2, new_text_classifier
from .setting import ALL_PARTS, Setting


VIT_START = "google/vit-base-patch16-224-in21k"
# C.1.2 and C.1.3: all of the model trains, without dropout and label smoothing, behind a new classifier.
IMAGENET1K_BACKBONE = replace(
    recipe("imagenet1k").with_arguments(warmup_steps=500, max_steps=20_000, label_smoothing_factor=0.0),
    name="imagenet1k-backbone",
    dropout=0.0,
    trainable=ALL_PARTS,
)
CIFAR100_BACKBONE = replace(
    recipe("cifar100").with_arguments(label_smoothing_factor=0.0),
    name="cifar100-backbone",
    last_n_layers=None,
    reset_classifier=False,
    trainable=ALL_PARTS,
)
# C.2, which names no batch size: taken for 32 rows.
SST2_BACKBONE = replace(recipe("sst2").with_arguments(learning_rate=8e-6), name="sst2-backbone", trainable=ALL_PARTS)
LOADING = {"dataloader_num_workers": 8, "dataloader_pin_memory": True}


def new_image_classifier(num_labels: int) -> Callable[[str | None], PreTrainedModel]:
    return lambda start: AutoModelForImageClassification.from_pretrained(
        start, num_labels=num_labels, ignore_mismatched_sizes=True, dtype=torch.float32
    )


PAPER_GROUPS = ("untuned", "zero-shot", "tuned", "members", "five", "sources", "budgets")

SETTINGS = {
    each.name: each
    for each in (
        TINYIMAGENET_DINOV2,
        SST2_GTE,
        Setting(
            name="imagenet1k",
            title="ImageNet-1K, ViT-B/16",
            new_backbone=new_image_classifier(1000),
            backbone_recipe=IMAGENET1K_BACKBONE,
            read=hub_sets.reader(hub_sets.IMAGENET1K, recipe("imagenet1k")),
            member_recipe=recipe("imagenet1k"),
            heads_to_prune=48,
            heads_per_layer=8,
            heads_to_rank=100,
            budgets=(12, 24),
            batch_size=512,
            lora_learning_rate=1e-3,
            groups=PAPER_GROUPS,
            start=VIT_START,
            sampled_dropout=0.1,
            training_arguments=LOADING,
        ),
        Setting(
            name="cifar100",
            title="CIFAR-100, ViT-B/16",
            new_backbone=new_image_classifier(100),
            backbone_recipe=CIFAR100_BACKBONE,
            read=hub_sets.reader(hub_sets.CIFAR100, recipe("cifar100")),
            member_recipe=recipe("cifar100"),
            heads_to_prune=24,
            heads_per_layer=10,
            heads_to_rank=50,
            budgets=(12,),
            batch_size=512,
            lora_learning_rate=1e-3,
            groups=PAPER_GROUPS,
            start=VIT_START,
            sampled_dropout=0.1,
            training_arguments=LOADING,
        ),
        Setting(
            name="sst2",
            title="SST-2, BERT-base",
            new_backbone=new_text_classifier,
            backbone_recipe=SST2_BACKBONE,
            read=hub_sets.reader(hub_sets.SST2, recipe("sst2")),
            member_recipe=recipe("sst2"),
            heads_to_prune=72,
            heads_per_layer=6,
            heads_to_rank=108,
            budgets=(24, 48),
            batch_size=32,
            lora_learning_rate=5e-4,
            groups=PAPER_GROUPS,
            start="google-bert/bert-base-uncased",
        ),
    )
}
