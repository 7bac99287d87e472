"""Adds noise to images, spectrograms and texts."""

from typing import Any

import torch
from torch import Tensor

from hydra_transformers.data.batches import AUDIO_INPUTS, batches


PIXEL_NOISE = 0.5  # standard deviation, in the model's units
TOKEN_NOISE = 0.2  # share of tokens


def with_noise(
    data: Any, *, pixels: float = PIXEL_NOISE, tokens: float = TOKEN_NOISE, seed: int = 0, batch_size: int = 32
) -> list[dict]:
    """Data with Gaussian noise on `pixel_values` or spectrograms, or replaced `input_ids`, as dict batches.

    data: a DataLoader, a list of dict batches, or a Dataset or list of dict rows
    pixels: the standard deviation of the noise, in the units that the model reads
    tokens: the share of tokens replaced by others of the same batch; the first and the last of a text stay
    seed: the same batches get the same noise
    """
    generator, noisy = torch.Generator().manual_seed(seed), []
    for batch in batches(data, batch_size):
        name = next((each for each in ("pixel_values", *AUDIO_INPUTS, "input_ids") if each in batch), None)
        if name is None:
            raise ValueError(
                f"data has no pixel_values, input_values or input_ids (its entries: {', '.join(batch)}): add noise yourself"
            )
        if name == "input_ids":
            values = _replaced(batch[name], batch.get("attention_mask"), tokens, generator)
        else:
            noise = torch.randn(batch[name].shape, generator=generator).to(batch[name].device, batch[name].dtype)
            values = batch[name] + pixels * noise
        noisy.append(batch | {name: values})
    return noisy


def _replaced(input_ids: Tensor, mask: Tensor | None, share: float, generator: torch.Generator) -> Tensor:
    mask = torch.ones_like(input_ids) if mask is None else mask
    mask, rows = mask.bool().cpu(), torch.arange(len(input_ids))
    inner = mask.clone()
    inner[rows, mask.int().argmax(dim=1)] = False
    inner[rows, mask.shape[1] - 1 - mask.int().flip(1).argmax(dim=1)] = False
    words = input_ids.cpu()[inner]
    chosen = inner & (torch.rand(inner.shape, generator=generator) < share)
    drawn = torch.randint(max(1, len(words)), (int(chosen.sum()),), generator=generator)
    replaced = input_ids.cpu().clone()
    replaced[chosen] = words[drawn]
    return replaced.to(input_ids.device)
