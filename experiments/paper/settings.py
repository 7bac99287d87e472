"""What each table is made of: pre-trained models, recipes, budgets of heads.

`imagenet1k`, `cifar100`, `sst2` and `clip-vit-b32` are the paper's (C.1 to C.3, D.1 to D.3).
`sst2-gte` and `tinyimagenet-dinov2` stand in for `sst2` and `cifar100` with a small model and little data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageClassification, PreTrainedModel

from hydra_transformers.data.image_changes import CropAndFlip
from hydra_transformers.training import Recipe, recipe

from ..pretrained import new_dinov2
from ..runs import new_text_model
from ..splits import Splits
from . import data


ALL_PARTS = ("embeddings", "attention", "mlp", "layernorm", "classifier")


@dataclass(frozen=True)
class Setting:
    """A pre-trained model and data, and how methods are trained on them.

    name, title: in commands and in tables
    task: "images", "texts" or "clip"
    start: the Hub name of the pre-trained model; a folder of its last part below DIR/weights goes first
    read: (folder of the data or None, start) -> the data
    new_backbone: (start, seed) -> the pre-trained model with a new classifier
    backbone_recipe, member_recipe, lora_recipe: before pruning, after pruning, and of LoRA adapters; those with
        `learning_rates` are tried at each of them with the first seed, and validation data choose
    backbone_batch, batch_size: rows per training step of the backbone, and of all else
    layers, heads: of the model
    heads_to_prune: how many a circuit removes in all; heads_per_layer: how many Taylor pruning keeps
    heads_to_rank: how many a circuit ranks to sample members from (B.5)
    removed_per_layer: the numbers of heads of figures 5 and 6
    sampled_dropout: the probability of MC Dropout; None for the model's own
    circuit_mode: as in `extract_circuit`
    mimo: the options of `MIMOCollator`
    shift: (folder, start) -> the corrupted test data, {corruption: {severity: data}}
    training_arguments: further arguments of every training
    paper: the setting whose numbers in the paper stand beside this one's
    also_compared: further settings of the paper, whose differences between methods are compared with this one's
    left_out: methods that cannot be had with this model
    about: what it needs, and in what it differs from the paper
    """

    name: str
    title: str
    task: str
    start: str
    read: Callable[[Path | None, str], Splits]
    new_backbone: Callable[[str, int], PreTrainedModel]
    backbone_recipe: Recipe
    member_recipe: Recipe
    lora_recipe: Recipe
    batch_size: int
    heads_to_prune: int
    heads_per_layer: int
    heads_to_rank: int
    removed_per_layer: tuple[int, ...]
    backbone_batch: int | None = None
    layers: int = 12
    heads: int = 12
    sampled_dropout: float | None = None
    circuit_mode: str = "exact"
    mimo: Mapping[str, Any] = field(default_factory=lambda: {"rho": 0.5, "repetitions": 4})
    shift: Callable[[Path | None, str], Any] | None = None
    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    paper: str = ""
    also_compared: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    about: str = ""


def with_adam(member_recipe: Recipe, learning_rate: float, **arguments: Any) -> Recipe:
    """Return the recipe for LoRA adapters, which start at zero and take larger steps (C.1.4 names none)."""
    tried = replace(member_recipe, learning_rates=())
    return tried.with_arguments(optim="adamw_torch", optim_args=None, learning_rate=learning_rate, **arguments)


def new_image_model(num_labels: int) -> Callable[[str, int], PreTrainedModel]:
    def new_model(start: str, seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        return AutoModelForImageClassification.from_pretrained(
            start, num_labels=num_labels, ignore_mismatched_sizes=True, dtype=torch.float32
        )

    return new_model


def new_small_dinov2(start: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return new_dinov2(start, data.TINY_SIZE)


# The paper's own


VIT = "google/vit-base-patch16-224-in21k"
# Of C.1.1 and C.1.4; docs/paper.md says what differs.
NOT_PRETRAINED = (
    "Google's ViT of ImageNet-21k is the start of every member, of MIMO and of Batch Ensembles, and Packed-Ensembles starts "
    "from new weights; the paper pre-trains three ViTs, MIMO and Packed-Ensembles itself."
)
LOADING = {"dataloader_num_workers": 8, "dataloader_pin_memory": True}
# C.1.2 and C.1.3: all of the model trains, on crops and flips, without dropout and without label smoothing.
IMAGENET1K_BACKBONE = replace(
    recipe("imagenet1k").with_arguments(warmup_steps=500, max_steps=20_000, label_smoothing_factor=0.0),
    name="imagenet1k-backbone",
    image_change=CropAndFlip(least_share=0.08),
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
# C.2
SST2_BACKBONE = replace(recipe("sst2").with_arguments(learning_rate=8e-6), name="sst2-backbone", trainable=ALL_PARTS)

IMAGENET1K = Setting(
    name="imagenet1k",
    title="ImageNet-1K, ViT-B/16",
    task="images",
    start=VIT,
    read=data.reader(data.IMAGENET1K),
    new_backbone=new_image_model(1000),
    backbone_recipe=IMAGENET1K_BACKBONE,
    member_recipe=recipe("imagenet1k"),
    lora_recipe=with_adam(recipe("imagenet1k"), 1e-3),
    batch_size=512,
    heads_to_prune=48,
    heads_per_layer=8,
    heads_to_rank=100,
    removed_per_layer=(2, 4, 6, 8),
    sampled_dropout=0.1,
    shift=data.imagenet_c,
    training_arguments=LOADING,
    paper="imagenet1k",
    about="ImageNet-1K from the Hub, OpenOOD's folders (benchmark_imglist, images_largescale, images_classic) and "
    "imagenet-c/CORRUPTION/SEVERITY/ (tables 13, 14; else from the Hub) in --data; one GPU for days. "
    + NOT_PRETRAINED,
)

CIFAR100 = Setting(
    name="cifar100",
    title="CIFAR-100, ViT-B/16",
    task="images",
    start=VIT,
    read=data.reader(data.CIFAR100),
    new_backbone=new_image_model(100),
    backbone_recipe=CIFAR100_BACKBONE,
    member_recipe=recipe("cifar100"),
    lora_recipe=with_adam(recipe("cifar100"), 1e-3),
    batch_size=512,
    heads_to_prune=24,
    heads_per_layer=10,
    heads_to_rank=50,
    removed_per_layer=(2, 4, 6, 8),
    sampled_dropout=0.1,
    training_arguments=LOADING,
    paper="cifar100",
    about="CIFAR-100 and its OOD sets from the Hub, Places365 by OpenOOD's list in --data; one GPU for a day. "
    + NOT_PRETRAINED,
)

SST2 = Setting(
    name="sst2",
    title="SST-2, BERT-base",
    task="texts",
    start="google-bert/bert-base-uncased",
    read=data.reader(data.SST2),
    new_backbone=new_text_model(2),
    backbone_recipe=SST2_BACKBONE,
    member_recipe=recipe("sst2"),
    lora_recipe=with_adam(recipe("sst2"), 5e-4),
    batch_size=32,
    heads_to_prune=72,
    heads_per_layer=6,
    heads_to_rank=108,
    removed_per_layer=(2, 4, 6, 8),
    paper="sst2",
    about="SST-2 and its OOD sets from the Hub; one GPU for hours.",
)


# With a small model and little data


QUICK = {"eval_strategy": "no", "save_strategy": "no"}  # a training takes a minute
DINOV2_BACKBONE = Recipe(
    name="dinov2-backbone",
    arguments={
        "optim": "adamw_torch",
        "learning_rate": 2.5e-5,
        "classifier_learning_rate": 1e-3,
        "weight_decay": 0.05,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "num_train_epochs": 8,
    },
    trainable=ALL_PARTS,
)
# A tenth of the paper's steps, warm-up included.
TINY_MEMBER = recipe("cifar100").with_arguments(warmup_steps=50, max_steps=1_000)
TINYIMAGENET_DINOV2 = Setting(
    name="tinyimagenet-dinov2",
    title="100 classes of Tiny ImageNet, DINOv2-S",
    task="images",
    start="facebook/dinov2-small",
    read=data.read_tiny_imagenet,
    new_backbone=new_small_dinov2,
    backbone_recipe=DINOV2_BACKBONE,
    member_recipe=TINY_MEMBER,
    lora_recipe=with_adam(TINY_MEMBER, 1e-3),
    backbone_batch=256,
    batch_size=128,
    heads=6,
    heads_to_prune=24,
    heads_per_layer=4,
    heads_to_rank=48,
    removed_per_layer=(1, 2, 3, 4),
    sampled_dropout=0.1,
    circuit_mode="shortlist",
    mimo={"rho": 0.7, "repetitions": 2},
    training_arguments=QUICK,
    paper="cifar100",
    also_compared=("imagenet1k",),
    left_out=("packed",),  # they would start from new weights
    about="vision64/ and vision/ in DIR/data, dinov2-small in DIR/weights (or both from the Hub); minutes on one H200. "
    "Images of 84 pixels; 4 of 6 heads stay, as 8 of 12 do on ImageNet; D.2's recipe of CIFAR-100 with a tenth of its "
    "steps, batches of 128; the backbone by AdamW, as DINOv2 is fine-tuned; circuits by short list, on 500 rows of each "
    "kind; far OOD sets are MNIST and textures.",
)

GTE_BACKBONE = SST2_BACKBONE.with_arguments(learning_rate=5e-5, classifier_learning_rate=5e-4, num_train_epochs=3)
# The paper has one learning rate for BERT-base, the lowest of these; a smaller model asks for more.
GTE_MEMBER = replace(recipe("sst2"), learning_rates=(1e-5, 2e-5, 5e-5))
SST2_GTE = Setting(
    name="sst2-gte",
    title="20,000 rows of SST-2, gte-small",
    task="texts",
    start="thenlper/gte-small",
    read=data.read_small_sst2,
    new_backbone=new_text_model(2),
    backbone_recipe=GTE_BACKBONE,
    member_recipe=GTE_MEMBER,
    lora_recipe=with_adam(recipe("sst2"), 5e-4, num_train_epochs=3),
    batch_size=64,
    heads_to_prune=72,
    heads_per_layer=6,
    heads_to_rank=108,
    removed_per_layer=(2, 4, 6, 8),
    circuit_mode="shortlist",
    paper="sst2",
    about="text/ in DIR/data, gte-small in DIR/weights (or both from the Hub); minutes on one H200. gte-small in place of "
    "BERT-base, 20,000 training rows; the backbone at 5e-5; members at a learning rate that validation data choose from "
    "1e-5 (the paper's), 2e-5 and 5e-5, batches of 64; circuits by short list, on 500 rows of each kind; OOD sets are Amazon (near), "
    "TREC and RTE (far).",
)

SETTINGS = {setting.name: setting for setting in (IMAGENET1K, CIFAR100, SST2, SST2_GTE, TINYIMAGENET_DINOV2)}


# The smallest, which show that every table can be made


FEW_STEPS = {"max_steps": 2, "warmup_steps": 1, "num_train_epochs": 1}


def smallest_of(setting: Setting) -> Setting:
    """Return a setting of the same task and recipes with a tiny model, made-up data and two steps of training."""
    read, new_backbone = data.MADE_UP[setting.task]
    few = {"heads_to_prune": 4, "heads_per_layer": 4, "heads_to_rank": 6, "removed_per_layer": (1, 2)}
    recipes = {}
    for name in ("backbone_recipe", "member_recipe", "lora_recipe"):
        usual = getattr(setting, name)
        # One learning rate of several is enough to see that they are tried.
        rates = usual.learning_rates[:2]
        last_layers = usual.last_n_layers and 1
        short = replace(usual, learning_rates=rates, last_n_layers=last_layers).with_arguments(**FEW_STEPS)
        if usual.arguments.get("load_best_model_at_end"):
            short = short.with_arguments(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
        recipes[name] = short
    shift = data.made_up_shift if setting.task == "images" else None
    arguments = {} if setting.task == "texts" else QUICK
    return replace(
        setting,
        read=read,
        new_backbone=new_backbone,
        batch_size=16,
        backbone_batch=None,
        layers=2,
        heads=6,
        circuit_mode="exact",
        sampled_dropout=None,
        shift=shift,
        training_arguments=arguments,
        **few,
        **recipes,
    )
