"""Fits detectors in one pass over training data, batch by batch, without holding all features.

Each class takes batches in `update`, and gives the detector's tensors in `state`, members first. Sums are in float64 around
the first batch's mean, so that a mean far from 0 costs no digits; batching changes the last digits only.
"""

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.detection import Answers
from .inputs import widened


BANK_SIZE, SEED = 10_000, 0  # the rows that are kept at most, and of their draw
# Directions of less variance than this, relative to the largest, vary by rounding only.
LEAST_VARIANCE = 1e-10


class BankFit:
    """A uniform sample of at most `bank_size` of the training rows' features, of length 1; the same however they are batched."""

    def __init__(self, k: int, bank_size: int = BANK_SIZE, seed: int = SEED):
        self.k, self.size, self.random = k, bank_size, random.Random(seed)
        self.keys, self.rows = None, None

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        """Keeps the rows with the smallest of random keys, in the order of the stream."""
        rows = torch.nn.functional.normalize(answers.features, dim=-1)
        keys = torch.tensor([self.random.random() for _ in range(len(rows))], dtype=torch.float64, device="cpu")
        if self.keys is not None:
            keys, rows = torch.cat([self.keys, keys]), torch.cat([self.rows, rows])
        kept = keys.argsort(stable=True)[: self.size].sort().values
        self.keys, self.rows = keys[kept], rows[kept.to(rows.device)]

    def state(self, classes: int) -> dict[str, Tensor]:
        bank = self.rows.transpose(0, 1).contiguous()
        if not 1 <= self.k <= bank.shape[1]:
            raise ValueError(f"k is {self.k}, data has {bank.shape[1]} rows: pass a k from 1 on, or more rows")
        return {"bank": bank}


class GaussianFit:
    """A Gaussian per class with one covariance, and for the relative distance another of all rows."""

    def __init__(self, relative: bool = False):
        self.relative, self.shift, self.rows = relative, None, 0
        self.sum, self.outer, self.class_counts, self.class_sums = 0, 0, 0, 0

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        features = widened(answers.features)  # (batch, members, dim)
        one_hot = widened(torch.nn.functional.one_hot(labels, answers.log_probabilities.shape[-1]))
        if self.shift is None:
            self.shift = features.mean(dim=0)
        features = features - self.shift
        self.rows += len(features)
        self.sum = self.sum + features.sum(dim=0)
        self.outer = self.outer + torch.einsum("bmd,bme->mde", features, features)
        # A product: adding by index is not deterministic on a GPU.
        self.class_counts = self.class_counts + one_hot.sum(dim=0)
        self.class_sums = self.class_sums + torch.einsum("bc,bmd->mcd", one_hot, features)

    def state(self, classes: int) -> dict[str, Tensor]:
        present = self.class_counts > 0
        if not present.all():
            missing = (~present).nonzero().flatten().tolist()
            warnings.warn(
                f"data has no rows of class {missing[0]} ({len(missing)} of {classes} classes): the detector will call what "
                "looks like it out-of-distribution",
                stacklevel=4,
            )
        mean = self.sum / self.rows
        center, counts = self.shift + mean, self.class_counts[present]
        # (members, classes, dim), about the centre
        means = self.class_sums[:, present] / counts.unsqueeze(-1) - (center - self.shift).unsqueeze(1)
        total = self.outer / self.rows - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        between = torch.einsum("c,mcd,mce->mde", counts / self.rows, means, means)
        whitening = whitening_of(total - between, self.rows, len(counts))
        state = {"center": center, "whitening": whitening, "class_means": means @ whitening}
        if self.relative:
            state["background_whitening"] = whitening_of(total, self.rows, 1)
        return state


FITS: dict[str, Callable[..., Any]] = {
    "knn": BankFit,
    "mahalanobis": GaussianFit,
    "relative_mahalanobis": partial(GaussianFit, relative=True),
}


def whitening_of(covariance: Tensor, rows: int, groups: int) -> Tensor:
    """The symmetric W with W W = Σ⁻¹, of covariances Σ (members, dim, dim) of `rows` rows about the means of `groups`.

    With fewer than dim + groups rows Σ is shrunk, (1 - s) Σ + s tr(Σ)/dim I, by the "oracle approximating shrinkage" s of Chen
    et al. (2010). Directions in which features never vary (a LayerNorm leaves one, ReLUs may leave many) are left out, as by a
    pseudo-inverse.
    """
    dim = covariance.shape[-1]
    mean_variance = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)  # (members,)
    if not (mean_variance > 0).all():
        raise ValueError("the features do not vary within classes: pass more rows")
    shrunk = torch.zeros_like(mean_variance)
    if rows < dim + groups:
        mean_square = covariance.square().mean(dim=(-2, -1))
        distance = mean_square - mean_variance.square() / dim
        shrunk = ((mean_square + mean_variance.square()) / ((rows + 1) * distance)).clamp(max=1)
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
    eigenvalues = (1 - shrunk).unsqueeze(-1) * eigenvalues + (shrunk * mean_variance).unsqueeze(-1)
    varies = eigenvalues > LEAST_VARIANCE * eigenvalues.amax(dim=-1, keepdim=True)
    scale = torch.where(varies, eigenvalues, torch.inf).rsqrt()
    return (eigenvectors * scale.unsqueeze(-2)) @ eigenvectors.transpose(-2, -1)
