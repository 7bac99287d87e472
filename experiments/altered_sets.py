"""Other sets to extract circuits against, made of the rows of one set.

Images become more varied. Shapes and close-ups are kin to digits and textures, which methods are judged on, but none of
those is looked at. Texts lose what tells them apart by accident, their length.
"""

import torch
from torch import Tensor

from .rows import TensorRows


def altered_images(rows: TensorRows, seed: int) -> TensorRows:
    """A third of the images as they are, a third as black and white shapes, a third as close-ups of a few pixels."""
    generator = torch.Generator().manual_seed(seed)
    images = rows.tensors["pixel_values"]
    kinds = torch.arange(len(images)) % 3
    changed = images.clone()
    changed[kinds == 1] = shapes(images[kinds == 1], generator)
    changed[kinds == 2] = close_ups(images[kinds == 2], generator)
    return TensorRows({**rows.tensors, "pixel_values": changed}, rows.prepare)


def shapes(images: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 (rows, 3, height, width): white where an image is brighter than most of it, or darker, black elsewhere."""
    grey = images.float().mean(dim=1, keepdim=True)
    dark, bright = (grey.flatten(1).quantile(share, dim=1).view(-1, 1, 1, 1) for share in (0.2, 0.8))
    of_the_dark = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    white = torch.where(of_the_dark, grey < dark, grey > bright)
    return (white.expand_as(images) * 255).to(torch.uint8)


def close_ups(images: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 (rows, 3, height, width): a square of a quarter of each image's height, enlarged to its size."""
    count, _, height, width = images.shape
    side = height // 4
    top = torch.randint(0, height - side + 1, (count,), generator=generator).tolist()
    left = torch.randint(0, width - side + 1, (count,), generator=generator).tolist()
    cut = torch.stack([image[:, y : y + side, x : x + side] for image, y, x in zip(images, top, left, strict=True)])
    enlarged = torch.nn.functional.interpolate(cut.float(), size=(height, width), mode="bicubic")
    return enlarged.round().clamp(0, 255).to(torch.uint8)


def cut_to_lengths(rows: TensorRows, like: TensorRows, last_token: int) -> TensorRows:
    """Texts cut to the lengths of the texts of `like`, so that length alone does not tell them apart."""
    mask = rows.tensors["attention_mask"]
    lengths = torch.minimum(mask.sum(dim=1), like.tensors["attention_mask"].sum(dim=1)[: len(rows)])
    places = torch.arange(mask.shape[1])
    kept = places < lengths.unsqueeze(1)
    ids = torch.where(places == lengths.unsqueeze(1) - 1, last_token, rows.tensors["input_ids"]) * kept
    return TensorRows({**rows.tensors, "input_ids": ids, "attention_mask": kept.to(mask.dtype)}, rows.prepare)
