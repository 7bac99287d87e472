"""Answers of three members, as data sets have them."""

import torch


def saved(samples: int, strength: float, seed: int) -> list[dict[str, torch.Tensor]]:
    """Logits for `SavedLogits`, right the more often the greater `strength` is, and their labels among four classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    logits = torch.randn(samples, 3, 4, generator=generator)
    logits[torch.arange(samples), :, labels] += strength
    return [{"member_logits": logits, "labels": labels}]
