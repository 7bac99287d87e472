"""What is compared on what: backbones, data, recipes and budgets of each setting.

"tinyimagenet-dinov2" and "sst2-gte" fine-tune real pre-trained models (`pretrained.py`), by files or from the Hub.
"cifar10-vit" and "sst2-minilm" are smaller, read plain files (`local_files.py`) and fit a few GPU minutes. "imagenet1k",
"cifar100" and "sst2" are the paper's own settings, from the Hub (`hub_sets.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from hydra_transformers.training import recipe

from . import augmentation, hub_sets
from .from_scratch import Schedule, train_from_scratch
from .initial_weights import mimic_trained_attention
from .local_files import read_images, read_texts
from .pretrained import SST2_GTE, TINYIMAGENET_DINOV2
from .rows import PrepareImages, TensorRows, as_it_is
from .setting import ALL_PARTS, Setting, finetuned
from .splits import CIRCUIT_ROWS, LIKE_CIRCUITS, Splits


# CIFAR-10, a ViT from scratch

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR10_SCHEDULE = Schedule(epochs=100)
# The paper's ImageNet-1K recipe, shortened: pruned members recover within a few passes. By AdamW, and like these backbones
# without label smoothing.
CIFAR10_MEMBER = replace(
    recipe("imagenet1k"),
    name="cifar10",
    optimizer="adamw",
    learning_rate=2e-4,
    learning_rate_grid=(),
    weight_decay=0.05,
    max_grad_norm=1.0,
    warmup_steps=0.1,
    max_steps=None,
    epochs=4,
    label_smoothing=0.0,
    dropout=None,
    train_transforms=(),
)


def new_cifar10_vit(start: str | None = None) -> PreTrainedModel:
    """7 layers of 12 heads on patches of 4 x 4 pixels: 2.6 M parameters."""
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=7,
        num_attention_heads=12,
        hidden_dropout_prob=0.1,
        id2label=dict(enumerate(CIFAR10_CLASSES)),
        label2id={name: index for index, name in enumerate(CIFAR10_CLASSES)},
    )
    model = ViTForImageClassification(config)
    mimic_trained_attention(model)
    return model


def train_cifar10_vits(
    comparison: Any, models: Sequence[PreTrainedModel], folders: Sequence[Path], seeds: Sequence[int]
) -> list[PreTrainedModel]:
    train, validation = comparison.splits.train, comparison.splits.validation
    return train_from_scratch(models, train, validation, CIFAR10_SCHEDULE, folders, seeds[0])


def changed_images(train: TensorRows, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorRows:
    """Training images, changed at random by `change` (of `augmentation`) every time they are read."""
    return train.prepared_by(PrepareImages(CIFAR10_MEAN, CIFAR10_STD, change))


def read_cifar10(folder: Path | None, start: str | None) -> Splits:
    """Every tenth training image is held out: 1,000 of them for circuits, 4,000 for validation."""
    if folder is None:
        raise ValueError("this setting reads files: pass their folder as --data")

    def read(name: str, count: int | None = None) -> TensorRows:
        return read_images(folder, name, PrepareImages(CIFAR10_MEAN, CIFAR10_STD), count)

    train = read("cifar10_train")
    held_out = torch.arange(len(train)) % 10 == 0
    kept_back = train.part(held_out)
    objects = read("tinyimagenet_objects", 5_000)
    order = torch.randperm(len(objects), generator=torch.Generator().manual_seed(0))
    return Splits(
        train=changed_images(train.part(~held_out), augmentation.strong),
        validation=kept_back.part(slice(CIRCUIT_ROWS, None)),
        circuit_id=kept_back.part(slice(CIRCUIT_ROWS)),
        circuit_ood=objects.part(order[:CIRCUIT_ROWS]),
        test=read("cifar10_test"),
        ood={
            "far": {"mnist": read("mnist", 5_000), "textures": read("textures", 1_200)},
            LIKE_CIRCUITS: {"tinyimagenet_objects": objects.part(order[CIRCUIT_ROWS:])},
        },
        data_collator=as_it_is,
    )


# SST-2

# Appendix C.2, which names no batch size: its learning rate of 8e-6 taken for 32 rows, and four times that for 128.
SST2_BACKBONE = replace(recipe("sst2"), name="sst2-backbone", learning_rate=4 * 8e-6, trainable=ALL_PARTS)
SST2_BATCH = 128
VALIDATION_ROWS = 3_000


def new_text_classifier(start: str | None) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(start, num_labels=2, dtype=torch.float32)


def read_sst2(folder: Path | None, start: str | None) -> Splits:
    """The first 3,000 training rows are held out (C.2): 1,000 of them for circuits, 2,000 for validation."""
    if folder is None:
        raise ValueError("this setting reads files: pass their folder as --data")
    tokenizer = AutoTokenizer.from_pretrained(start)

    def read(name: str) -> TensorRows:
        return read_texts(folder, name, tokenizer)

    train, news = read("sst2_train"), read("agnews")
    return Splits(
        train=train.part(slice(VALIDATION_ROWS, None)),
        validation=train.part(slice(CIRCUIT_ROWS, VALIDATION_ROWS)),
        circuit_id=train.part(slice(CIRCUIT_ROWS)).sorted_by_length(),
        circuit_ood=news.part(slice(CIRCUIT_ROWS)).sorted_by_length(),
        test=read("sst2_validation").sorted_by_length(),
        ood={
            "near": {"amazon": read("amazon_snippets").sorted_by_length()},
            "far": {"trec": read("trec").sorted_by_length(), "rte": read("rte").sorted_by_length()},
            LIKE_CIRCUITS: {"agnews": news.part(slice(CIRCUIT_ROWS, None)).sorted_by_length()},
        },
        data_collator=as_it_is,
    )


# The paper's own settings

VIT_START = "google/vit-base-patch16-224-in21k"
# C.1.2 and C.1.3: all of the model trains, without dropout and label smoothing, behind a new classifier.
IMAGENET1K_BACKBONE = replace(
    recipe("imagenet1k"),
    name="imagenet1k-backbone",
    warmup_steps=500,
    max_steps=20_000,
    label_smoothing=0.0,
    dropout=0.0,
    trainable=ALL_PARTS,
)
CIFAR100_BACKBONE = replace(
    recipe("cifar100"),
    name="cifar100-backbone",
    label_smoothing=0.0,
    last_n_layers=None,
    reset_classifier=False,
    trainable=ALL_PARTS,
)
PAPER_SST2_BACKBONE = replace(SST2_BACKBONE, learning_rate=8e-6)
LOADING = {"dataloader_num_workers": 8, "dataloader_pin_memory": True}


def new_image_classifier(num_labels: int) -> Callable[[str | None], PreTrainedModel]:
    return lambda start: AutoModelForImageClassification.from_pretrained(
        start, num_labels=num_labels, ignore_mismatched_sizes=True, dtype=torch.float32
    )


PAPER_GROUPS = ("untuned", "tuned", "five", "sources", "budgets")
SMALL_GROUPS = ("untuned", "tuned", "five", "sources", "budgets", "baselines")

SETTINGS = {
    each.name: each
    for each in (
        TINYIMAGENET_DINOV2,
        SST2_GTE,
        Setting(
            name="cifar10-vit",
            title="CIFAR-10, ViT (7 layers of 12 heads)",
            new_backbone=new_cifar10_vit,
            train_backbones=train_cifar10_vits,
            backbones_together=True,
            groups=SMALL_GROUPS,
            read=read_cifar10,
            member_recipe=CIFAR10_MEMBER,
            heads_to_prune=28,
            heads_per_layer=8,
            heads_to_rank=56,
            budgets=(8, 16),
            member_batch=512,
            lora_learning_rate=1e-3,
            packed_alpha=2.0,
            circuit_dtype=torch.bfloat16,
            training_arguments={"eval_strategy": "no", "save_strategy": "no"},  # it takes seconds
        ),
        Setting(
            name="sst2-minilm",
            title="SST-2, MiniLM-L6 (6 layers of 12 heads)",
            new_backbone=new_text_classifier,
            train_backbones=finetuned(SST2_BACKBONE, SST2_BATCH),
            read=read_sst2,
            member_recipe=replace(
                recipe("sst2"), learning_rate=6e-5, epochs=2, early_stopping_patience=None, keep_best=False
            ),
            heads_to_prune=36,
            heads_per_layer=6,
            heads_to_rank=54,
            budgets=(12, 24),
            member_batch=256,
            lora_learning_rate=5e-4,
            start="sentence-transformers/all-MiniLM-L6-v2",
            groups=SMALL_GROUPS,
            groups_by_length=True,
            training_arguments={"bf16": False},  # bound by launching kernels, of which autocast needs more
        ),
        Setting(
            name="imagenet1k",
            title="ImageNet-1K, ViT-B/16",
            new_backbone=new_image_classifier(1000),
            train_backbones=finetuned(IMAGENET1K_BACKBONE, 512),
            read=hub_sets.reader(hub_sets.IMAGENET1K, recipe("imagenet1k")),
            member_recipe=recipe("imagenet1k"),
            heads_to_prune=48,
            heads_per_layer=8,
            heads_to_rank=100,
            budgets=(12, 24),
            member_batch=512,
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
            train_backbones=finetuned(CIFAR100_BACKBONE, 512),
            read=hub_sets.reader(hub_sets.CIFAR100, recipe("cifar100")),
            member_recipe=recipe("cifar100"),
            heads_to_prune=24,
            heads_per_layer=10,
            heads_to_rank=50,
            budgets=(12,),
            member_batch=512,
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
            train_backbones=finetuned(PAPER_SST2_BACKBONE, 32),
            read=hub_sets.reader(hub_sets.SST2, recipe("sst2")),
            member_recipe=recipe("sst2"),
            heads_to_prune=72,
            heads_per_layer=6,
            heads_to_rank=108,
            budgets=(24, 48),
            member_batch=32,
            lora_learning_rate=5e-4,
            groups=PAPER_GROUPS,
            start="google-bert/bert-base-uncased",
        ),
    )
}
