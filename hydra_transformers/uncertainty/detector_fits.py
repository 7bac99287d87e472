"""Fits detectors in one pass over training data: sums are updated batch by batch, and never all features held.

Sums are kept in float64 around the first batch's mean, so that a mean far from 0 costs no digits. How the rows are batched
changes the last digits only.
"""

import random
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.detection import Answers
from .features import Head
from .inputs import widened


class DetectorFit:
    """Takes in batches, then gives the detector's state: tensors whose first dimension is the members."""

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        raise NotImplementedError

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        raise NotImplementedError


class TemplateFit(DetectorFit):
    """Mean probability where each class was predicted; takes members x classes² numbers."""

    def __init__(self):
        self.counts, self.sums = 0, 0

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        probabilities = widened(answers.log_probabilities).exp()
        predicted = _one_hot(probabilities.argmax(dim=-1), probabilities.shape[-1])
        self.counts = self.counts + predicted.sum(dim=0)
        self.sums = self.sums + torch.einsum("bmk,bmc->mkc", predicted, probabilities)

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        means = self.sums / self.counts.clamp(min=1).unsqueeze(-1)
        templates = means.clamp(min=torch.finfo(means.dtype).tiny).log()
        # A class that was never predicted has no template: in its place another's, which changes no minimum.
        predicted = self.counts > 0
        place = torch.where(
            predicted, torch.arange(classes, device=predicted.device), predicted.int().argmax(dim=-1, keepdim=True)
        )
        return {"log_templates": templates.gather(1, place.unsqueeze(-1).expand_as(templates))}


class PatternFit(DetectorFit):
    """Each member's mean feature of each class, over the rows it gets right."""

    def __init__(self):
        self.counts, self.sums = 0, 0

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        features = widened(answers.features)
        log_probabilities = answers.log_probabilities.to(features.device)
        labels = labels.to(features.device).unsqueeze(1)
        is_right = (log_probabilities.argmax(dim=-1) == labels).unsqueeze(-1)
        right = _one_hot(labels, log_probabilities.shape[-1]) * is_right  # (batch, members, classes)
        self.counts = self.counts + right.sum(dim=0)
        self.sums = self.sums + torch.einsum("bmc,bmd->mcd", right, features)

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        empty = (self.counts == 0).any(dim=0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"some member gets no row of class {empty[0]} right ({len(empty)} of {classes} classes), and she compares with "
                "the mean of such rows: pass more rows, or take another detector"
            )
        return {"patterns": self.sums / self.counts.unsqueeze(-1)}


class Reservoir:
    """At most `size` rows of a stream, each as likely as any other; the same rows however the stream is batched."""

    def __init__(self, size: int, seed: int):
        self.size, self.random = size, random.Random(seed)
        self.keys, self.rows = None, None

    def update(self, rows: Tensor) -> None:
        """Keeps the rows with the smallest of random keys."""
        keys = torch.tensor([self.random.random() for _ in range(len(rows))], dtype=torch.float64, device="cpu")
        if self.keys is not None and len(self.keys) == self.size:
            chosen = (keys < self.keys.max()).nonzero().flatten()  # of a long stream hardly any
            keys, rows = keys[chosen], rows[chosen.to(rows.device)]
        if self.keys is not None and len(keys):
            keys, rows = torch.cat([self.keys, keys]), torch.cat([self.rows, rows])
        if len(keys) > self.size:
            kept = keys.argsort(stable=True)[: self.size].sort().values
            keys, rows = keys[kept], rows[kept.to(rows.device)]
        if len(keys):
            self.keys, self.rows = keys, rows


class BankFit(DetectorFit):
    """A sample of the training rows' features, of length 1."""

    def __init__(self, k: int, bank_size: int, seed: int):
        self.k, self.reservoir = k, Reservoir(bank_size, seed)

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        self.reservoir.update(torch.nn.functional.normalize(answers.features, dim=-1))

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        bank = self.reservoir.rows.transpose(0, 1).contiguous()
        if bank.shape[1] < self.k:
            raise ValueError(f"k is {self.k}, data has {bank.shape[1]} rows: pass more rows, or a smaller k")
        return {"bank": bank}


class Moments:
    """Counts, sums and outer products of features (batch, members, dim), of all rows and by class."""

    def __init__(self):
        self.shift, self.rows = None, 0

    def update(self, features: Tensor, one_hot: Tensor | None = None) -> None:
        """features: (batch, members, dim); one_hot: (batch, classes)"""
        features = widened(features)
        if self.shift is None:
            self.shift = features.mean(dim=0)
            self.sum, self.outer, self.class_counts, self.class_sums = 0, 0, 0, 0
        features = features - self.shift
        self.rows += len(features)
        self.sum = self.sum + features.sum(dim=0)
        self.outer = self.outer + torch.einsum("bmd,bme->mde", features, features)
        if one_hot is not None:  # a product: on a GPU, adding by index is not the same twice
            self.class_counts = self.class_counts + one_hot.sum(dim=0)
            self.class_sums = self.class_sums + torch.einsum("bc,bmd->mcd", one_hot, features)

    def mean(self) -> Tensor:
        """(members, dim)"""
        return self.shift + self.sum / self.rows

    def about(self, point: Tensor) -> Tensor:
        """Mean outer product of the features less `point` (members, dim): (members, dim, dim)"""
        mean, offset = self.sum / self.rows, self.mean() - point
        covariance = self.outer / self.rows - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return covariance + offset.unsqueeze(-1) * offset.unsqueeze(-2)


class GaussianFit(DetectorFit):
    """A Gaussian per class with one covariance, and for the relative distance another of all rows."""

    def __init__(self, shrinkage: float | None, relative: bool = False):
        self.shrinkage, self.relative, self.moments = shrinkage, relative, Moments()

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        self.moments.update(answers.features, _one_hot(labels, answers.log_probabilities.shape[-1]))

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


class ViMFit(DetectorFit):
    """The principal space about the origin at which the head's logits are equal, and the scale of what lies outside."""

    def __init__(self, principal_dim: int | None, sample_size: int, seed: int):
        self.principal_dim = principal_dim
        self.moments, self.reservoir, self.max_logits = Moments(), Reservoir(sample_size, seed), 0

    def update(self, answers: Answers, labels: Tensor | None) -> None:
        self.moments.update(answers.features)
        self.reservoir.update(answers.features)
        self.max_logits = self.max_logits + widened(answers.logits).amax(dim=-1).sum(dim=0)

    def state(self, heads: Sequence[Head], classes: int) -> dict[str, Tensor]:
        origin = torch.stack([_origin(head) for head in heads]).to(self.moments.shift.device)
        dim = origin.shape[-1]
        principal_dim = _usual_principal_dim(dim) if self.principal_dim is None else self.principal_dim
        if not 0 < principal_dim < dim:
            raise ValueError(f"principal_dim is {principal_dim}, features have {dim} dimensions: pass 1 to {dim - 1}")
        eigenvectors = torch.linalg.eigh(self.moments.about(origin)).eigenvectors  # of growing eigenvalues
        residual_space = eigenvectors[..., : dim - principal_dim]
        sample = widened(self.reservoir.rows) - origin
        residual = torch.einsum("bmd,mdr->bmr", sample, residual_space).norm(dim=-1).mean(dim=0)
        max_logits = self.max_logits / self.moments.rows
        if (residual <= 0).any() or (max_logits <= 0).any():
            raise ValueError(
                "vim weighs what lies outside the principal space by the mean of the largest logits, and here one of them is "
                "not positive: pass more rows, a smaller principal_dim, or take another detector"
            )
        return {"origin": origin, "residual_space": residual_space, "alpha": max_logits / residual}


def _usual_principal_dim(dim: int) -> int:
    """As the paper has it; for features that are smaller than the paper's, half of them."""
    if dim > 1500:
        return 1000
    return 512 if dim >= 768 else dim // 2


def _origin(head: Head) -> Tensor:
    """-W⁺ b, (dim,)"""
    weight = widened(head.weight.detach())
    if head.bias is None:
        return torch.zeros_like(weight[0])
    return -torch.linalg.pinv(weight) @ widened(head.bias.detach())


# Directions of less variance, next to the largest, are those in which features never vary but for rounding.
LEAST_VARIANCE = 1e-10


def whitening_of(covariance: Tensor, rows: int, groups: int, shrinkage: float | None = None) -> Tensor:
    """The symmetric W with W W = Σ⁻¹, of covariances Σ (members, dim, dim) of `rows` rows about the means of `groups`.

    shrinkage: s in (1 - s) Σ + s tr(Σ)/dim I. By default none where there are rows enough to know Σ, at least dim + groups;
        directions in which features never vary (a LayerNorm leaves one, ReLUs may leave many) do not count then, as with a
        pseudo-inverse. With fewer rows, that of Chen et al. (2010), "oracle approximating shrinkage".
    """
    dim = covariance.shape[-1]
    mean_variance = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)  # (members,)
    if not (mean_variance > 0).all():
        raise ValueError("the features do not vary within classes: pass more rows")
    if shrinkage is None and rows < dim + groups:
        shrunk = _oracle_shrinkage(covariance, mean_variance, rows)
    else:
        shrunk = torch.full_like(mean_variance, shrinkage or 0.0)
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
    eigenvalues = (1 - shrunk).unsqueeze(-1) * eigenvalues + (shrunk * mean_variance).unsqueeze(-1)
    varies = eigenvalues > LEAST_VARIANCE * eigenvalues.amax(dim=-1, keepdim=True)
    scale = torch.where(varies, eigenvalues, torch.inf).rsqrt()
    return (eigenvectors * scale.unsqueeze(-2)) @ eigenvectors.transpose(-2, -1)


def _oracle_shrinkage(covariance: Tensor, mean_variance: Tensor, rows: int) -> Tensor:
    mean_square = covariance.square().mean(dim=(-2, -1))
    distance = mean_square - mean_variance.square() / covariance.shape[-1]
    return ((mean_square + mean_variance.square()) / ((rows + 1) * distance)).clamp(max=1)


def _one_hot(classes: Tensor, count: int) -> Tensor:
    return widened(torch.nn.functional.one_hot(classes, count))
