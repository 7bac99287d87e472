"""Noise for data that has no noisy version of its own."""

from typing import Any

import torch
from torch import Tensor

from ..data.batches import batches


PIXEL_NOISE = 0.5  # standard deviation, of pixels as the model reads them
TOKEN_NOISE = 0.2  # share of tokens


def with_noise(
    data: Any, *, pixels: float = PIXEL_NOISE, tokens: float = TOKEN_NOISE, seed: int = 0, batch_size: int = 32
) -> list[dict]:
    """A noisy version of data, as dict batches: Gaussian noise on `pixel_values` or on spectrograms (`input_values`), or tokens
    replaced in `input_ids`.

    Args:
        data: a DataLoader, a list of dict batches, or a Dataset or list of dict rows.
        pixels: the standard deviation of the noise, in the units that the model reads.
        tokens: the share of tokens that become others, drawn from the same batch; the first and the last of a text stay.
        seed: the same gives the same noise, for the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_with_noise(batch, pixels, tokens, generator) for batch in batches(data, batch_size)]


def _with_noise(
    batch: dict[str, Tensor], pixels: float, tokens: float, generator: torch.Generator
) -> dict[str, Tensor]:
    name = next((each for each in ("pixel_values", "input_values") if each in batch), None)
    if name is not None:
        values = batch[name]
        noise = torch.randn(values.shape, generator=generator).to(values.device, values.dtype)
        return batch | {name: values + pixels * noise}
    if "input_ids" not in batch:
        raise ValueError(
            f"data has no pixel_values, input_values or input_ids (its entries: {', '.join(batch)}): add noise yourself"
        )
    return batch | {"input_ids": _replaced(batch["input_ids"], batch.get("attention_mask"), tokens, generator)}


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
