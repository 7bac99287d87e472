"""Fits detectors in one pass over training data, batch by batch, without holding all features.

Each class takes batches in `update`, and gives the detector's tensors in `state`, members first. Sums are in float64 around
the first batch's mean, so that a mean far from 0 costs no digits; batching changes the last digits only. In between, `merge`
adds up what several processes have seen, each its own batches.
"""

import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._io.processes import gather, total
from ..models.detection import Answers
from .features import Head
from .inputs import widened


# Directions of less variance than this, relative to the largest, vary by rounding only.
LEAST_VARIANCE = 1e-10


class TemplateFit:
    """Mean probability where each class was predicted; takes members x classes² numbers."""

    def __init__(self) -> None:
        self.counts, self.sums = 0, 0

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        probabilities = widened(answers.log_probabilities).exp()
        predicted = _one_hot(probabilities.argmax(dim=-1), probabilities.shape[-1])
        self.counts = self.counts + predicted.sum(dim=0)
        self.sums = self.sums + torch.einsum("bmk,bmc->mkc", predicted, probabilities)

    def merge(self) -> None:
        self.counts, self.sums = total(self.counts), total(self.sums)

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        means = self.sums / self.counts.clamp(min=1).unsqueeze(-1)
        templates = means.clamp(min=torch.finfo(means.dtype).tiny).log()
        # A class that was never predicted gets another's template, which changes no minimum.
        predicted = self.counts > 0
        own = torch.arange(classes, device=predicted.device)
        place = torch.where(predicted, own, predicted.int().argmax(dim=-1, keepdim=True))
        return {"log_templates": templates.gather(1, place.unsqueeze(-1).expand_as(templates))}


class PatternFit:
    """Each member's mean feature of each class, over the rows it gets right."""

    def __init__(self) -> None:
        self.counts, self.sums = 0, 0

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        features = widened(answers.features)
        log_probabilities = answers.log_probabilities.to(features.device)
        labels = labels.to(features.device).unsqueeze(1)
        is_right = (log_probabilities.argmax(dim=-1) == labels).unsqueeze(-1)
        right = _one_hot(labels, log_probabilities.shape[-1]) * is_right  # (batch, members, classes)
        self.counts = self.counts + right.sum(dim=0)
        self.sums = self.sums + torch.einsum("bmc,bmd->mcd", right, features)

    def merge(self) -> None:
        self.counts, self.sums = total(self.counts), total(self.sums)

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        empty = (self.counts == 0).any(dim=0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"some member gets no row of class {empty[0]} right ({len(empty)} of {classes} classes), and she compares with "
                "the mean of such rows: pass more rows, or take another detector"
            )
        return {"patterns": self.sums / self.counts.unsqueeze(-1)}


class Reservoir:
    """A uniform sample of at most `size` rows of a stream; the same rows however the stream is batched or divided."""

    def __init__(self, size: int, seed: int):
        self.size, self.random, self.seen = size, random.Random(seed), 0
        self.keys, self.places, self.rows = None, None, None

    def skip(self, count: int) -> None:
        """Leaves out rows of the stream that another process has."""
        self._draw(count)

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        """A random key for each of the next rows, and their places in the stream."""
        places = torch.arange(self.seen, self.seen + count, device="cpu")
        self.seen += count
        return torch.tensor([self.random.random() for _ in range(count)], dtype=torch.float64, device="cpu"), places

    def update(self, rows: Tensor) -> None:
        """Keeps the rows with the smallest of random keys."""
        keys, places = self._draw(len(rows))
        if self.keys is not None and len(self.keys) == self.size:
            chosen = (keys < self.keys.max()).nonzero().flatten()  # of a long stream hardly any
            keys, places, rows = keys[chosen], places[chosen], rows[chosen.to(rows.device)]
        if self.keys is not None and len(keys):
            keys, places = torch.cat([self.keys, keys]), torch.cat([self.places, places])
            rows = torch.cat([self.rows, rows])
        if len(keys):
            self._keep(keys, places, rows)

    def _keep(self, keys: Tensor, places: Tensor, rows: Tensor) -> None:
        """Those of the smallest keys, in the order of the stream."""
        if len(keys) > self.size or not (places.diff() > 0).all():
            kept = keys.argsort(stable=True)[: self.size]
            kept = kept[places[kept].argsort()]
            keys, places, rows = keys[kept], places[kept], rows[kept.to(rows.device)]
        self.keys, self.places, self.rows = keys, places, rows

    def merge(self) -> None:
        of_all = gather(self.keys)
        if len(of_all) == 1:
            return
        limit = torch.cat([keys for keys in of_all if keys is not None]).sort().values[: self.size].max()
        own = None
        if self.keys is not None:  # only rows that stay are sent
            chosen = self.keys <= limit
            own = self.keys[chosen], self.places[chosen], self.rows.cpu()[chosen]
        self._keep(*map(torch.cat, zip(*filter(None, gather(own)), strict=True)))


class BankFit:
    """A sample of the training rows' features, of length 1."""

    def __init__(self, k: int, bank_size: int, seed: int):
        self.k, self.reservoir = k, Reservoir(bank_size, seed)

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        self.reservoir.update(torch.nn.functional.normalize(answers.features, dim=-1))

    def merge(self) -> None:
        self.reservoir.merge()

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        bank = self.reservoir.rows.transpose(0, 1).contiguous()
        if bank.shape[1] < self.k:
            raise ValueError(f"k is {self.k}, data has {bank.shape[1]} rows: pass more rows, or a smaller k")
        return {"bank": bank}


class Moments:
    """Counts, sums and outer products of features (batch, members, dim), of all rows and by class."""

    def __init__(self) -> None:
        self.shift, self.rows = None, 0
        self.sum, self.outer, self.class_counts, self.class_sums = 0, 0, 0, 0

    def update(self, features: Tensor, one_hot: Tensor | None = None) -> None:
        """features: (batch, members, dim); one_hot: (batch, classes)"""
        features = widened(features)
        if self.shift is None:
            self.shift = features.mean(dim=0)
        features = features - self.shift
        self.rows += len(features)
        self.sum = self.sum + features.sum(dim=0)
        self.outer = self.outer + torch.einsum("bmd,bme->mde", features, features)
        if one_hot is not None:  # a product: adding by index is not deterministic on a GPU
            self.class_counts = self.class_counts + one_hot.sum(dim=0)
            self.class_sums = self.class_sums + torch.einsum("bc,bmd->mcd", one_hot, features)

    def merge(self) -> None:
        shift = next(
            (each for each in gather(None if self.shift is None else self.shift.cpu()) if each is not None), None
        )
        if self.shift is not None:
            shift = shift.to(self.shift.device)
            moved = self.shift - shift  # of all features, which then are about the common point
            both = moved.unsqueeze(-1) * self.sum.unsqueeze(-2)
            self.outer = self.outer + both + both.mT + self.rows * moved.unsqueeze(-1) * moved.unsqueeze(-2)
            self.sum = self.sum + self.rows * moved
            if not isinstance(self.class_counts, int):
                self.class_sums = self.class_sums + self.class_counts.unsqueeze(-1) * moved.unsqueeze(1)
        self.shift = shift
        for name in ("rows", "sum", "outer", "class_counts", "class_sums"):
            setattr(self, name, total(getattr(self, name)))

    def mean(self) -> Tensor:
        """(members, dim)"""
        return self.shift + self.sum / self.rows

    def about(self, point: Tensor) -> Tensor:
        """Mean outer product of the features less `point` (members, dim): (members, dim, dim)"""
        mean, offset = self.sum / self.rows, self.mean() - point
        covariance = self.outer / self.rows - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return covariance + offset.unsqueeze(-1) * offset.unsqueeze(-2)


class GaussianFit:
    """A Gaussian per class with one covariance, and for the relative distance another of all rows."""

    def __init__(self, shrinkage: float | None, relative: bool = False):
        self.shrinkage, self.relative, self.moments = shrinkage, relative, Moments()

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        self.moments.update(answers.features, _one_hot(labels, answers.log_probabilities.shape[-1]))

    def merge(self) -> None:
        self.moments.merge()

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        moments = self.moments
        present = moments.class_counts > 0
        if not present.all():
            missing = (~present).nonzero().flatten().tolist()
            warnings.warn(
                f"data has no rows of class {missing[0]} ({len(missing)} of {classes} classes): the detector takes what "
                "looks like it for foreign",
                stacklevel=5,
            )
        counts, center = moments.class_counts[present], moments.mean()
        # (members, classes, dim), about the centre
        means = moments.class_sums[:, present] / counts.unsqueeze(-1) - (center - moments.shift).unsqueeze(1)
        total = moments.about(center)
        between = torch.einsum("c,mcd,mce->mde", counts / moments.rows, means, means)
        whitening = whitening_of(total - between, moments.rows, len(counts), self.shrinkage)
        state = {"center": center, "whitening": whitening, "class_means": means @ whitening}
        if self.relative:
            state["background_whitening"] = whitening_of(total, moments.rows, 1, self.shrinkage)
        return state


class ViMFit:
    """The principal space about the origin at which the head's logits are equal, and the scale of the residual."""

    def __init__(self, principal_dim: int | None, sample_size: int, seed: int):
        self.principal_dim = principal_dim
        self.moments, self.reservoir, self.max_logits = Moments(), Reservoir(sample_size, seed), 0

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        self.moments.update(answers.features)
        self.reservoir.update(answers.features)
        self.max_logits = self.max_logits + widened(answers.logits).amax(dim=-1).sum(dim=0)

    def merge(self) -> None:
        self.moments.merge()
        self.reservoir.merge()
        self.max_logits = total(self.max_logits)

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        origin = torch.stack([_origin(head) for head in heads]).to(self.moments.shift.device)
        dim, principal_dim = origin.shape[-1], self.principal_dim
        if principal_dim is None:  # the paper's, and half of smaller features
            principal_dim = 1000 if dim > 1500 else 512 if dim >= 768 else dim // 2
        if not 0 < principal_dim < dim:
            raise ValueError(f"principal_dim is {principal_dim}, features have {dim} dimensions: pass 1 to {dim - 1}")
        eigenvectors = torch.linalg.eigh(self.moments.about(origin)).eigenvectors  # of growing eigenvalues
        residual_space = eigenvectors[..., : dim - principal_dim]
        sample = widened(self.reservoir.rows).to(origin.device) - origin
        residual = torch.einsum("bmd,mdr->bmr", sample, residual_space).norm(dim=-1).mean(dim=0)
        max_logits = self.max_logits / self.moments.rows
        if (residual <= 0).any() or (max_logits <= 0).any():
            raise ValueError(
                "vim weighs what lies outside the principal space by the mean of the largest logits, and here one of them is "
                "not positive: pass more rows, a smaller principal_dim, or take another detector"
            )
        return {"origin": origin, "residual_space": residual_space, "alpha": max_logits / residual}


FITS: dict[str, Callable[..., Any]] = {
    "kl_matching": TemplateFit,
    "she": PatternFit,
    "knn": BankFit,
    "mahalanobis": GaussianFit,
    "relative_mahalanobis": partial(GaussianFit, relative=True),
    "vim": ViMFit,
}


def whitening_of(covariance: Tensor, rows: int, groups: int, shrinkage: float | None = None) -> Tensor:
    """The symmetric W with W W = Σ⁻¹, of covariances Σ (members, dim, dim) of `rows` rows about the means of `groups`.

    shrinkage: s in (1 - s) Σ + s tr(Σ)/dim I. By default 0 with at least dim + groups rows; directions in which features
        never vary (a LayerNorm leaves one, ReLUs may leave many) are then left out, as by a pseudo-inverse. With fewer rows,
        the "oracle approximating shrinkage" of Chen et al. (2010).
    """
    dim = covariance.shape[-1]
    mean_variance = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)  # (members,)
    if not (mean_variance > 0).all():
        raise ValueError("the features do not vary within classes: pass more rows")
    shrunk = torch.full_like(mean_variance, shrinkage or 0.0)
    if shrinkage is None and rows < dim + groups:
        mean_square = covariance.square().mean(dim=(-2, -1))
        distance = mean_square - mean_variance.square() / dim
        shrunk = ((mean_square + mean_variance.square()) / ((rows + 1) * distance)).clamp(max=1)
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
    eigenvalues = (1 - shrunk).unsqueeze(-1) * eigenvalues + (shrunk * mean_variance).unsqueeze(-1)
    varies = eigenvalues > LEAST_VARIANCE * eigenvalues.amax(dim=-1, keepdim=True)
    scale = torch.where(varies, eigenvalues, torch.inf).rsqrt()
    return (eigenvectors * scale.unsqueeze(-2)) @ eigenvectors.transpose(-2, -1)


def _origin(head: Head) -> Tensor:
    """-W⁺ b, (dim,)"""
    weight = widened(head.weight.detach())
    if head.bias is None:
        return torch.zeros_like(weight[0])
    return -torch.linalg.pinv(weight) @ widened(head.bias.detach())


def _one_hot(classes: Tensor, count: int) -> Tensor:
    return widened(torch.nn.functional.one_hot(classes, count))
