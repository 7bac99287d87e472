"""Tiny Hydras in folders with their processors; images as requests hold them."""

import base64
import io
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    CLIPModel,
    CLIPProcessor,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hydra_transformers import AutoHydra, load_data
from hydra_transformers.serving import HydraPredictor
from tests.tiny_data import SIZES, WORDS, picture_rows, save_bert, save_clip, save_vit


PRUNED = [{0: [0]}, {1: [1, 2]}, {0: [3], 1: [0]}]


def hydra_of(backbone: nn.Module, pruned: list = PRUNED) -> nn.Module:
    """Three members that differ in the heads that they keep, and in their own weights."""
    members = [AutoHydra.from_backbone(backbone, heads) for heads in pruned]
    with torch.no_grad():
        for seed, member in enumerate(members):
            random = torch.Generator().manual_seed(seed)
            for weight in member.parameters():
                weight += 0.15 * torch.randn(weight.shape, generator=random)
    return AutoHydra.from_pruned_members(members).eval()


def text_hydra(model_class: type = BertForSequenceClassification, **settings) -> nn.Module:
    """Three members whose answers differ, for the words of `save_bert`'s tokenizer."""
    sizes = {**SIZES, "vocab_size": len(WORDS), "max_position_embeddings": 16, "initializer_range": 0.5}
    torch.manual_seed(0)
    members = [model_class(BertConfig(**sizes | settings)) for _ in range(3)]
    return AutoHydra.from_pruned_members(members, shared=()).eval()


def save_image_models(folder: Path) -> tuple[Path, Path]:
    """A calibrated Hydra that refuses half of all pictures, and its backbone."""
    single = save_vit(folder / "single-vit")
    processor = ViTImageProcessorPil.from_pretrained(single)
    hydra = hydra_of(ViTForImageClassification.from_pretrained(single))
    hydra.calibrate(load_data(picture_rows(60), processor), target={"coverage": 0.5}, alpha=0.2)
    hydra.save_pretrained(folder / "tiny-hydra")
    processor.save_pretrained(folder / "tiny-hydra")
    return folder / "tiny-hydra", single


def save_text_hydra(folder: Path) -> Path:
    backbone = save_bert(folder / "bert")
    hydra_of(BertForSequenceClassification.from_pretrained(backbone)).save_pretrained(folder / "text-hydra")
    AutoTokenizer.from_pretrained(backbone).save_pretrained(folder / "text-hydra")
    return folder / "text-hydra"


def save_clip_hydra(folder: Path) -> Path:
    backbone = save_clip(folder / "clip")
    towers = [{"vision": {0: [head]}, "text": {1: [head]}} for head in range(2)]
    hydra_of(CLIPModel.from_pretrained(backbone), towers).save_pretrained(folder / "clip-hydra")
    CLIPProcessor.from_pretrained(backbone).save_pretrained(folder / "clip-hydra")
    return folder / "clip-hydra"


def asked(folder: Path) -> HydraPredictor:
    return HydraPredictor(folder, device="cpu")


def base64_of(image: Image.Image, format: str = "PNG", **options) -> str:
    file = io.BytesIO()
    image.save(file, format, **options)
    return base64.b64encode(file.getvalue()).decode()
