"""Scores of how far out of distribution an input looks, from the members' logits and features;
higher is further out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .ensembling import at_least_float32, entropy_split, log_mean


@dataclass(frozen=True)
class Answers:
    """What scores are made of.

    logits: (batch, members, classes); None for the mean of the members, which counts as one member
    log_probabilities: (batch, members, classes)
    features: (batch, members, dim), what the classifier's last linear map reads
    state: the tensors of a fit by name, with the members as the first dimension
    """

    logits: Tensor | None = None
    log_probabilities: Tensor | None = None
    features: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def mean(self) -> "Answers":
        """Return the mean over the members, as one member."""
        log_probabilities = None
        if self.log_probabilities is not None:
            log_probabilities = log_mean(self.log_probabilities).unsqueeze(1)
        features = None
        if self.features is not None:
            features = self.features.mean(dim=1, keepdim=True)
        return Answers(None, log_probabilities, features, self.state)


def answers_of(
    member_logits: Tensor, member_features: Tensor | None, state: Mapping[str, Tensor] | None = None
) -> Answers:
    """Make member_logits (batch, members, classes) and member_features (batch, members, dim) ready
    for a score."""
    logits = at_least_float32(member_logits)
    features = None
    if member_features is not None:
        features = at_least_float32(member_features)
    return Answers(logits, logits.log_softmax(dim=-1), features, state or {})


def differing_pairs(log_probabilities: Tensor) -> Tensor:
    """Return the share of the pairs of members that predict different classes; 0 for one member:
    (batch, members, ..., classes) -> (batch, ...)"""
    members = log_probabilities.shape[1]
    votes = log_probabilities.argmax(dim=-1)
    differing = (votes.unsqueeze(2) != votes.unsqueeze(1)).sum(dim=(1, 2))
    return differing.to(log_probabilities.dtype) / max(1, members * (members - 1))


def _product(equation: str, first: Tensor, second: Tensor) -> Tensor:
    """Compute an einsum with all digits: autocast would round both to 16 bits, and most distances
    would be equal."""
    if first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return torch.einsum(equation, first, second)
    with torch.autocast(first.device.type, enabled=False):
        return torch.einsum(equation, first, second)


# Scores of the logits. Each function gives (batch, members), or (batch, 1) where it compares
# members.


def msp(answers: Answers) -> Tensor:
    """Return 1 - the maximum softmax probability (Hendrycks and Gimpel, 2017)."""
    return 1 - answers.log_probabilities.exp().amax(dim=-1)


def max_logit(answers: Answers) -> Tensor:
    """Return minus the largest logit (Hendrycks et al., 2022)."""
    return -answers.logits.amax(dim=-1)


def energy(answers: Answers) -> Tensor:
    """Return -log Σ exp z_c (Liu et al., 2020)."""
    return -answers.logits.logsumexp(dim=-1)


def entropy(answers: Answers) -> Tensor:
    """Return the entropy of the probabilities."""
    return torch.special.entr(answers.log_probabilities.exp()).sum(dim=-1)


def mutual_information(answers: Answers) -> Tensor:
    """Return the entropy of the mean probability less the mean of the members' entropies."""
    _, _, epistemic = entropy_split(answers.log_probabilities)
    return epistemic.unsqueeze(1)


def disagreement(answers: Answers) -> Tensor:
    """Return the share of the pairs of members that predict different classes."""
    return differing_pairs(answers.log_probabilities).unsqueeze(1)


def gen(answers: Answers, gamma: float = 0.1, top_classes: int = 100) -> Tensor:
    """Return the generalised entropy Σ p_c^γ (1 - p_c)^γ over the most probable classes (Liu et
    al., 2023)."""
    probabilities = answers.log_probabilities.exp().sort(dim=-1, descending=True).values
    others = probabilities[..., 1:]
    # 1 - p of a sure prediction would be a difference of equal numbers: the sum of the others is
    # exact.
    rest = torch.cat([others.sum(dim=-1, keepdim=True), 1 - others], dim=-1)
    return (probabilities * rest)[..., :top_classes].pow(gamma).sum(dim=-1)


# Scores of the features.


def knn(answers: Answers, k: int = 50) -> Tensor:
    """Return the distance of the unit feature to the k-th nearest of a bank of training features
    (Sun et al., 2022)."""
    bank = answers.state["bank"].to(answers.features)  # (members, rows, dim), of length 1
    features = nn.functional.normalize(answers.features, dim=-1)
    cosines = _product("bmd,mnd->bmn", features, bank)
    to_nearest = cosines.topk(k, dim=-1).values[..., -1]
    return (2 - 2 * to_nearest).clamp(min=0).sqrt()


def mahalanobis(answers: Answers) -> Tensor:
    """Return min_c (f - μ_c)ᵀ Σ⁻¹ (f - μ_c), Σ the covariance within classes (Lee et al., 2018)."""
    return _to_nearest_class(answers).to(answers.features.dtype)


def relative_mahalanobis(answers: Answers) -> Tensor:
    """Return `mahalanobis` less the distance to all training data, (f - μ)ᵀ Σ₀⁻¹ (f - μ) (Ren et
    al., 2021)."""
    to_all = _whitened(answers, "background_whitening").square().sum(dim=-1)
    return (_to_nearest_class(answers) - to_all).to(answers.features.dtype)


def _to_nearest_class(answers: Answers) -> Tensor:
    """Return the squared distance to the nearest class, (batch, members)."""
    features = _whitened(answers, "whitening")
    means = answers.state["class_means"].to(features)  # (members, classes, dim), centred and whitened as well
    products = _product("bmd,mcd->bmc", features, means)
    nearest = (means.square().sum(dim=-1) - 2 * products).argmin(dim=-1)
    # Not |f|² + |μ|² - 2 fμ: far from the centre, that is a small difference of large numbers.
    members = torch.arange(len(means), device=means.device)
    of_nearest = means[members, nearest]
    return (features - of_nearest).square().sum(dim=-1)


def _whitened(answers: Answers, whitening: str) -> Tensor:
    """Return features about their centre, whitened; in float64, where the device has it.

    What is rounded here grows where features hardly vary, and would differ between batches of
    different sizes.
    """
    features = answers.features
    if features.device.type != "mps":
        features = features.double()
    centred = features - answers.state["center"].to(features)
    return _product("bmd,mde->bme", centred, answers.state[whitening].to(centred))


@dataclass(frozen=True)
class Method:
    """How a score is computed.

    score: of answers, (batch, members)
    by: "members" (the mean over the members of their scores) or "mean" (the score of their mean),
        the usual one first
    state: the tensors of a fit, whose first dimension is the members; those with a state read
        features, the others logits
    settings: the defaults of what can be set
    """

    score: Callable[..., Tensor]
    by: tuple[str, ...]
    state: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


EITHER = ("members", "mean")
MEMBERS = ("members",)
MEAN_FIRST = ("mean", "members")
GAUSSIAN = ("center", "whitening", "class_means")
DETECTORS = {
    "msp": Method(msp, MEAN_FIRST),
    # The logits of the mean are log-probabilities: their energy is always 0, their largest says
    # what msp says.
    "max_logit": Method(max_logit, MEMBERS),
    "energy": Method(energy, MEMBERS),
    "entropy": Method(entropy, MEAN_FIRST),
    "mutual_information": Method(mutual_information, MEMBERS),
    "disagreement": Method(disagreement, MEMBERS),
    "gen": Method(gen, MEAN_FIRST, settings={"gamma": 0.1, "top_classes": 100}),
    "knn": Method(knn, EITHER, ("bank",), {"k": 50}),
    "mahalanobis": Method(mahalanobis, EITHER, GAUSSIAN),
    "relative_mahalanobis": Method(relative_mahalanobis, EITHER, (*GAUSSIAN, "background_whitening")),
}


def score(name: str, answers: Answers, by: str | None = None, **settings: float) -> Tensor:
    """Return the score of `DETECTORS[name]`, (batch,)."""
    method = DETECTORS[name]
    if by is None:
        by = method.by[0]
    if by == "mean":
        answers = answers.mean()
    return method.score(answers, **settings).mean(dim=1)
