"""Settings on pre-trained models: DINOv2-S on Tiny ImageNet, gte-small on SST-2.

Data come from plain files (`local_files.py`) where a folder is given, else from the Hub.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Dinov2Model, PreTrainedModel, ViTConfig, ViTForImageClassification
from transformers.models.vit import modeling_vit

from hydra_transformers import HydraDinov2Model
from hydra_transformers.data.rows import DataSource, load_rows

from .augmentation import resized_crop_and_flip
from .local_files import read_images, read_strings, tokenized
from .made_up_sets import drawings, mixed_words, noise, spliced
from .rows import PrepareImages, TensorRows, as_it_is
from .splits import CIRCUIT_ROWS, Splits


# Tiny ImageNet: 100 of its classes to learn, 50 for circuits and the choice between recipes, 50 as near OOD.

IMAGE_SIZE = 112
CLASSES = 100
HELD_OF_EACH = 30  # training images of a class
FAR_COUNT = 1_000  # of each made-up set
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def new_dinov2(start: str | None, size: int = IMAGE_SIZE) -> PreTrainedModel:
    """DINOv2-S for images of `size` pixels a side, as a ViT with a new classifier that reads the [CLS] token alone.

    Positions are interpolated once. What DINOv2 has beyond a ViT, a factor on each branch of a layer, becomes part of the
    weights in front of it, so that the encoder computes the same.
    """
    dinov2 = Dinov2Model.from_pretrained(start, dtype=torch.float32)
    hydra = with_folded_factors(dinov2)
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "layer_norm_eps", "hidden_act")
    config = ViTConfig(
        **{name: getattr(dinov2.config, name) for name in same},
        intermediate_size=dinov2.config.hidden_size * dinov2.config.mlp_ratio,
        image_size=size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    if hasattr(modeling_vit, "create_bidirectional_mask"):
        # Before 5.22 a step that is recorded makes a mask that masks nothing, which rules out the fastest kernels.
        modeling_vit.create_bidirectional_mask = no_mask
    model = ViTForImageClassification(config)
    patches = (size // config.patch_size) ** 2
    weights = {
        "layernorm": hydra.layernorm.state_dict(),
        "embeddings.patch_embeddings": dinov2.embeddings.patch_embeddings.state_dict(),
    }
    for index, layer in enumerate(hydra.layers):
        place = f"layers.{index}"
        attention = layer.attention
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", getattr(attention.qkv_proj, kind).chunk(3), strict=True):
                weights.setdefault(f"{place}.attention.{name}_proj", {})[kind] = part
        output = attention.o_proj
        weights[f"{place}.attention.o_proj"] = {"weight": output.weight.t(), "bias": output.bias[0]}
        weights[f"{place}.layernorm_before"] = layer.attention_norm.state_dict()
        weights[f"{place}.layernorm_after"] = layer.mlp_norm.state_dict()
        weights[f"{place}.mlp"] = layer.mlp.state_dict()
    with torch.no_grad():
        blank = torch.zeros(1, patches + 1, config.hidden_size)
        positions = dinov2.embeddings.interpolate_pos_encoding(blank, size, size)
    tensors = {f"{place}.{name}": tensor for place, part in weights.items() for name, tensor in part.items()}
    tensors |= {"embeddings.cls_token": dinov2.embeddings.cls_token, "embeddings.position_embeddings": positions}
    model.vit.load_state_dict(tensors)
    return model


@torch.no_grad()
def with_folded_factors(dinov2: Dinov2Model) -> PreTrainedModel:
    """Return a Hydra that computes the same, with the factors on each branch of a layer (LayerScale) made part of the weights in
    front of them."""
    hydra = HydraDinov2Model.from_backbone(dinov2)
    for layer in hydra.layers:
        # (1, hidden) each
        of_attention = layer.attention_scale.weight
        of_mlp = layer.mlp_scale.weight
        layer.attention.o_proj.weight.mul_(of_attention)
        layer.attention.o_proj.bias.mul_(of_attention)
        layer.mlp.fc2.weight.mul_(of_mlp.t())
        layer.mlp.fc2.bias.mul_(of_mlp[0])
        of_attention.fill_(1.0)
        of_mlp.fill_(1.0)
    return hydra


def no_mask(*_: Any, **__: Any) -> None:
    return None


@dataclass(frozen=True)
class Images:
    """Images by name: uint8 (rows, 3, side, side), and labels or None."""

    folder: Path | None

    def __call__(self, name: str) -> tuple[Tensor, Tensor | None]:
        if self.folder is None:
            return HUB_IMAGES[name]()
        count, side = {"mnist": (2_000, 32), "textures": (1_200, 32)}.get(name, (None, 64))
        rows = read_images(self.folder, name, as_it_is, count, side).tensors
        return rows["pixel_values"], rows.get("labels")


def hub_images(source: DataSource, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Images of the classes from `first` to before `last`, 64 x 64; labels where these are the first classes."""
    import numpy as np

    rows = load_rows(source).rows
    label = source.label or "label"
    image = source.column or "image"
    if last is not None:
        rows = rows.filter(lambda value: first <= value < last, input_columns=label)
    pixels = [torch.from_numpy(np.array(row.convert("RGB").resize((64, 64)))) for row in rows[image]]
    labels = torch.tensor(rows[label]) if last is not None and first == 0 else None
    return torch.stack(pixels).permute(0, 3, 1, 2).contiguous(), labels


def hub_training_images(is_held: bool) -> tuple[Tensor, Tensor]:
    """Of the training images, the first of every class are held out."""
    images, labels = hub_images(TINY_TRAIN, last=CLASSES)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        held[(labels == label).nonzero().flatten()[:HELD_OF_EACH]] = True
    chosen = held if is_held else ~held
    return images[chosen], labels[chosen]


TINY_TRAIN = DataSource("zh-plus/tiny-imagenet", "train")
TINY_TEST = DataSource("zh-plus/tiny-imagenet", "valid")
HUB_IMAGES: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {
    "train": partial(hub_training_images, False),
    "held": partial(hub_training_images, True),
    "test": partial(hub_images, TINY_TEST, last=CLASSES),
    "circuit_ood": partial(hub_images, TINY_TEST, CLASSES, CLASSES + 50),
    "near": partial(hub_images, TINY_TEST, CLASSES + 50, CLASSES + 100),
    "mnist": partial(hub_images, DataSource("ylecun/mnist", "test", limit=2_000)),
    "textures": partial(hub_images, DataSource("tanganke/dtd", "test")),
}


def read_tiny_imagenet(folder: Path | None, start: str | None, size: int = IMAGE_SIZE) -> Splits:
    """Of the images that are held out, 1,000 are for circuits and 2,000 for validation. The out-of-distribution images for
    circuits and for the choice between recipes are of different classes."""
    images = Images(folder)
    prepare = PrepareImages(IMAGENET_MEAN, IMAGENET_STD, size=size)
    changed = PrepareImages(IMAGENET_MEAN, IMAGENET_STD, partial(resized_crop_and_flip, size=size))

    def rows(name: str, preparation: PrepareImages = prepare) -> TensorRows:
        pixels, labels = images(name)
        return TensorRows({"pixel_values": pixels} | ({} if labels is None else {"labels": labels}), preparation)

    def made(pixels: Tensor) -> TensorRows:
        return TensorRows({"pixel_values": pixels}, prepare)

    train = rows("train", changed)
    held = rows("held")
    foreign = rows("circuit_ood")
    order = torch.randperm(len(held), generator=torch.Generator().manual_seed(0))
    for_circuits = 3 * len(foreign) // 5  # class by class: the other two fifths are of other classes
    return Splits(
        train=train,
        validation=held.part(order[CIRCUIT_ROWS:]),
        circuit_id=held.part(order[:CIRCUIT_ROWS]),
        circuit_ood=foreign.part(slice(for_circuits)),
        validation_ood=foreign.part(slice(for_circuits, None)),
        test=rows("test"),
        ood={
            "near": {"other classes": rows("near")},
            "far": {
                "mnist": rows("mnist"),
                "textures": rows("textures"),
                "noise": made(noise(FAR_COUNT, 64, seed=0)),
                "drawings": made(drawings(FAR_COUNT, 64, seed=0)),
            },
        },
    )


# SST-2

HELD_ROWS = 3_000
TRAINING_ROWS = 20_000
TEXT_CIRCUIT_ROWS = 500
HUB_TEXTS = {
    "sst2_train": DataSource("nyu-mll/glue:sst2", "train", column="sentence"),
    "sst2_validation": DataSource("nyu-mll/glue:sst2", "validation", column="sentence"),
    "agnews": DataSource("fancyzhx/ag_news", "test", limit=HELD_ROWS, column="text"),
    "amazon_snippets": DataSource("fancyzhx/amazon_polarity", "test", limit=4_000, column="title"),
    "trec": DataSource("SetFit/TREC-QC", "train", limit=3_000, column="text"),
    "rte": DataSource("nyu-mll/glue:rte", "train", column="sentence1"),
}


def read_strings_of(folder: Path | None, name: str) -> tuple[list[str], list[int | None]]:
    if folder is not None:
        return read_strings(folder, name)
    source = HUB_TEXTS[name]
    rows = load_rows(source).rows
    labels = rows["label"] if name.startswith("sst2") else [None] * len(rows)
    return list(rows[source.column]), list(labels)


def read_sst2(folder: Path | None, start: str | None) -> Splits:
    """The first 3,000 training rows are held out: 500 of them for circuits, 2,000 for validation. The next 20,000 are for training.
    Of the news, other rows are for circuits than for the choice between recipes."""
    tokenizer = AutoTokenizer.from_pretrained(start)

    def rows(texts: list[str], labels: list[int | None] | None = None) -> TensorRows:
        return tokenized(texts, labels or [None] * len(texts), tokenizer, max_length=128)

    train, labels = read_strings_of(folder, "sst2_train")
    test, test_labels = read_strings_of(folder, "sst2_validation")
    news = rows(read_strings_of(folder, "agnews")[0])
    held = rows(train[:HELD_ROWS], labels[:HELD_ROWS])

    def other(name: str) -> TensorRows:
        return rows(read_strings_of(folder, name)[0]).sorted_by_length()

    return Splits(
        train=rows(train[HELD_ROWS:][:TRAINING_ROWS], labels[HELD_ROWS:][:TRAINING_ROWS]),
        validation=held.part(slice(CIRCUIT_ROWS, None)),
        circuit_id=held.part(slice(TEXT_CIRCUIT_ROWS)).sorted_by_length(),
        circuit_ood=news.part(slice(TEXT_CIRCUIT_ROWS)).sorted_by_length(),
        validation_ood=news.part(slice(CIRCUIT_ROWS, None)).sorted_by_length(),
        test=rows(test, test_labels).sorted_by_length(),
        ood={
            "near": {"amazon": other("amazon_snippets"), "spliced": rows(spliced(test, seed=0)).sorted_by_length()},
            "far": {
                "trec": other("trec"),
                "rte": other("rte"),
                "mixed words": rows(mixed_words(test, seed=0)).sorted_by_length(),
            },
        },
    )
