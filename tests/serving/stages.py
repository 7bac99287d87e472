"""Stages of cascades: two tiny models of images of every contrast, the second one trained for longer, and functions."""

from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import ViTForImageClassification, ViTImageProcessorPil

from tests.tiny_data import CLASSES, save_vit


def hard_pictures(count: int, seed: int) -> tuple[list[Image.Image], list[int]]:
    """Pictures, and their classes, which are hard to tell where the contrast is low."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, count)
    pixels = random.integers(0, 120, (count, 8, 8, 3))
    contrasts = random.integers(0, 90, count) * random.integers(0, 3, count).clip(max=1)
    pixels[np.arange(count), :, :, labels] += contrasts[:, None, None]
    return [Image.fromarray(image.astype(np.uint8)) for image in pixels], labels.tolist()


def hard_rows(count: int, seed: int) -> datasets.Dataset:
    images, labels = hard_pictures(count, seed)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


def save_stages(folder: Path) -> tuple[Path, Path]:
    """A model after few steps, and one after more."""
    untrained = save_vit(folder / "untrained")
    processor = ViTImageProcessorPil.from_pretrained(untrained)
    images, labels = hard_pictures(600, seed=1)
    pixel_values = processor(images=images, return_tensors="pt")["pixel_values"]
    saved = []
    for name, steps in (("small", 8), ("large", 60)):
        model = ViTForImageClassification.from_pretrained(untrained).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            model(pixel_values=pixel_values, labels=torch.tensor(labels)).loss.backward()
            optimizer.step()
        model.eval().save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
        saved.append(folder / name)
    return saved[0], saved[1]
