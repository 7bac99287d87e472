"""A tiny calibrated Hydra of images, and one of texts, in folders with their processors; images as requests hold them."""

import base64
import io
import warnings
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPProcessor, ViTImageProcessorPil

from hydra_transformers import AutoHydra
from hydra_transformers.models.auto import load_trained
from tests.tiny_data import pictures, save_bert, save_clip, save_vit


def save_hydra(folder: Path, kind: str) -> Path:
    """kind: "vit", calibrated, "bert" or "clip" """
    save = {"vit": save_vit, "bert": save_bert, "clip": save_clip}[kind]
    backbone = load_trained(save(folder / "backbone"))
    cut = [{0: [head]} if kind != "clip" else {"vision": {0: [head]}} for head in range(2)]
    hydra = AutoHydra.from_pruned_members([AutoHydra.from_backbone(backbone, heads) for heads in cut])
    reader = {"vit": ViTImageProcessorPil, "bert": AutoTokenizer, "clip": CLIPProcessor}[kind]
    processor = reader.from_pretrained(folder / "backbone")
    if kind == "vit":
        labels = [index % 3 for index in range(60)]
        pixel_values = processor(pictures(labels), return_tensors="pt")["pixel_values"]
        data = [{"pixel_values": pixel_values, "labels": torch.tensor(labels)}]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing was learnt, so the temperature is at an end of its range
            hydra.calibrate(data, target={"coverage": 0.5}, alpha=0.3)
    hydra.save_pretrained(folder / "hydra")
    processor.save_pretrained(folder / "hydra")
    return folder / "hydra"


def base64_of(image: Image.Image, format: str = "PNG", **options) -> str:
    file = io.BytesIO()
    image.save(file, format, **options)
    return base64.b64encode(file.getvalue()).decode()
