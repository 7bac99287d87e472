"""The settings of `recipe.py` that no other study has: DINOv2-S with its LayerScale, and 5,000 rows of CIFAR-10."""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate
from transformers import Dinov2Model, PreTrainedModel

from hydra_transformers import HydraDinov2Model
from hydra_transformers.fusion.plain_models import to_transformers
from hydra_transformers.models.configuration_hydra_beit import HydraBeitConfig
from hydra_transformers.models.modeling_hydra_beit import HydraBeitForImageClassification

from .local_files import read_images
from .pretrained import CLASSES, IMAGE_SIZE, IMAGENET_MEAN, IMAGENET_STD
from .rows import PrepareImages, TensorRows, as_it_is
from .splits import CIRCUIT_ROWS, Splits


def new_dinov2_reading_cls(start: Path | str | None) -> PreTrainedModel:
    """Return DINOv2-S for images of 112 pixels a side with a new classifier that reads the [CLS] token alone.

    Of the models of Transformers with LayerScale, BEiT has such a classifier. It computes the same: positions are interpolated
    once, and BEiT's keys have no bias, which changes no attention.
    """
    dinov2 = Dinov2Model.from_pretrained(start, dtype=torch.float32)
    encoder = HydraDinov2Model.from_backbone(dinov2)
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "layer_norm_eps", "hidden_act")
    config = HydraBeitConfig(
        **{name: getattr(dinov2.config, name) for name in same},
        intermediate_size=dinov2.config.hidden_size * dinov2.config.mlp_ratio,
        image_size=IMAGE_SIZE,
        layer_scale_init_value=1.0,
        use_mean_pooling=False,
        use_absolute_position_embeddings=True,
        use_mask_token=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=CLASSES,
    )
    model = HydraBeitForImageClassification(config)
    patches = (IMAGE_SIZE // config.patch_size) ** 2
    with torch.no_grad():
        blank = torch.zeros(1, patches + 1, config.hidden_size)
        positions = dinov2.embeddings.interpolate_pos_encoding(blank, IMAGE_SIZE, IMAGE_SIZE)
    tensors = {name: tensor for name, tensor in encoder.state_dict().items() if not name.startswith("embeddings.")}
    for layer in range(config.num_hidden_layers):
        bias = tensors[f"layers.{layer}.attention.qkv_proj.bias"]
        query, _, value = bias.chunk(3)
        tensors[f"layers.{layer}.attention.qkv_proj.bias"] = torch.cat([query, torch.zeros_like(query), value])
    for name, tensor in dinov2.embeddings.patch_embeddings.state_dict().items():
        tensors[f"embeddings.patch_embeddings.{name}"] = tensor
    tensors["embeddings.cls_token"] = dinov2.embeddings.cls_token
    tensors["embeddings.position_embeddings"] = positions
    model.beit.load_state_dict(tensors)
    return to_transformers(model)


# CIFAR-10: 5,000 rows to learn from, every tenth image for validation; Tiny ImageNet's classes as near OOD.

CIFAR_SHEETS = ("cifar10_train_0", "cifar10_train_1", "cifar10_train_2")  # 10,000 images each
CIFAR_TRAINING_ROWS = 5_000


def read_cifar10(folder: Path, start: Path | None = None) -> Splits:
    """Images of 32 pixels, enlarged to those of the model; out of distribution ones are of 32 pixels, too."""
    prepare = PrepareImages(IMAGENET_MEAN, IMAGENET_STD, size=IMAGE_SIZE)
    labels = torch.from_numpy(np.load(folder / "vision" / "cifar10_train_labels.npy").astype("int64"))
    pixels = torch.cat([read_images(folder, sheet, as_it_is).tensors["pixel_values"] for sheet in CIFAR_SHEETS])
    known = TensorRows({"pixel_values": pixels, "labels": labels[: len(pixels)]}, prepare)
    numbers = torch.arange(len(pixels))
    held = known.part(numbers[numbers % 10 == 0])
    others = numbers[numbers % 10 != 0]

    def unlabelled(name: str, count: int | None = None, side: int = 32) -> TensorRows:
        images = read_images(folder, name, as_it_is, count, side).tensors["pixel_values"]
        if side != 32:
            images = interpolate(images.float(), size=(32, 32), mode="bilinear", antialias=True).round().byte()
        return TensorRows({"pixel_values": images}, prepare)

    return Splits(
        train=known.part(others[:CIFAR_TRAINING_ROWS]),
        validation=held.part(slice(CIRCUIT_ROWS, None)),
        circuit_id=held.part(slice(CIRCUIT_ROWS)),
        circuit_ood=unlabelled("circuit_ood", side=64),
        validation_ood=unlabelled("circuit_ood", side=64),
        test=read_images(folder, "cifar10_test", prepare),
        ood={
            "near": {"Tiny ImageNet": unlabelled("near", side=64)},
            "far": {"mnist": unlabelled("mnist", 2_000), "textures": unlabelled("textures", 1_200)},
        },
    )
