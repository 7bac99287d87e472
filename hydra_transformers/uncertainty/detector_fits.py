"""Fit detectors in one pass over training data, batch by batch, without holding all features.

Each class takes batches in `update`, and gives the detector's tensors in `state`, members first.
Sums are in float64 around the first batch's mean, so that a mean far from 0 costs no digits;
batching changes the last digits only.
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


BANK_SIZE = 10_000  # the rows that are kept at most
SEED = 0  # of their draw
# Directions of less variance than this, relative to the largest, vary by rounding only.
LEAST_VARIANCE = 1e-10


class BankFit:
    """Keeps a uniform sample of at most `bank_size` of the training rows' features, of length 1;
    the same however they are batched.

    k: of the detector, which needs as many rows
    """

    def __init__(self, k: int, bank_size: int = BANK_SIZE, seed: int = SEED):
        self.k = k
        self.size = bank_size
        self.random = random.Random(seed)
        self.keys: Tensor | None = None  # a random number for each row that is kept
        self.rows: Tensor | None = None

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        """Keep the rows with the smallest of random keys, in the order of the stream."""
        rows = torch.nn.functional.normalize(answers.features, dim=-1)
        drawn = [self.random.random() for _ in range(len(rows))]
        keys = torch.tensor(drawn, dtype=torch.float64, device="cpu")
        if self.keys is not None:
            keys = torch.cat([self.keys, keys])
            rows = torch.cat([self.rows, rows])
        kept = keys.argsort(stable=True)[: self.size].sort().values
        self.keys = keys[kept]
        self.rows = rows[kept.to(rows.device)]

    def state(self, classes: int) -> dict[str, Tensor]:
        bank = self.rows.transpose(0, 1).contiguous()
        if not 1 <= self.k <= bank.shape[1]:
            raise ValueError(f"k is {self.k}, data has {bank.shape[1]} rows: pass a k from 1 on, or more rows")
        return {"bank": bank}


class GaussianFit:
    """Fits a Gaussian per class with one covariance, and for the relative distance another of all
    rows."""

    def __init__(self, relative: bool = False):
        self.relative = relative
        self.shift: Tensor | None = None  # (members, dim), about which everything is summed
        self.rows = 0
        # Of the features: their sum (members, dim) and that of their products (members, dim, dim).
        self.sum: Tensor | int = 0
        self.outer: Tensor | int = 0
        # Of each class: its rows (classes,) and the sum of their features (members, classes, dim).
        self.class_counts: Tensor | int = 0
        self.class_sums: Tensor | int = 0

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
                f"data has no rows of class {missing[0]} ({len(missing)} of {classes} classes): the detector will "
                "call what looks like it out-of-distribution",
                stacklevel=4,
            )
        mean = self.sum / self.rows
        center = self.shift + mean
        counts = self.class_counts[present]

        # The means of the classes about the centre, (members, classes, dim).
        means = self.class_sums[:, present] / counts.unsqueeze(-1) - (center - self.shift).unsqueeze(1)

        # The covariance of all rows, and what is left of it within the classes.
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
    """Return the symmetric W with W W = Σ⁻¹, of covariances Σ (members, dim, dim) of `rows` rows
    about the means of `groups`.

    With fewer than dim + groups rows Σ is shrunk, (1 - s) Σ + s tr(Σ)/dim I, by the "oracle
    approximating shrinkage" s of Chen et al. (2010). Directions in which features never vary (a
    LayerNorm leaves one, ReLUs may leave many) are left out, as by a pseudo-inverse.
    """
    dim = covariance.shape[-1]
    mean_variance = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)  # (members,)
    if not (mean_variance > 0).all():
        raise ValueError("the features do not vary within classes: pass more rows")

    # How much Σ is shrunk: s, (members,).
    shrunk = torch.zeros_like(mean_variance)
    if rows < dim + groups:
        mean_square = covariance.square().mean(dim=(-2, -1))
        distance = mean_square - mean_variance.square() / dim
        shrunk = ((mean_square + mean_variance.square()) / ((rows + 1) * distance)).clamp(max=1)

    # The inverse root, direction by direction.
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
    eigenvalues = (1 - shrunk).unsqueeze(-1) * eigenvalues + (shrunk * mean_variance).unsqueeze(-1)
    varies = eigenvalues > LEAST_VARIANCE * eigenvalues.amax(dim=-1, keepdim=True)
    scale = torch.where(varies, eigenvalues, torch.inf).rsqrt()
    return (eigenvectors * scale.unsqueeze(-2)) @ eigenvectors.transpose(-2, -1)
