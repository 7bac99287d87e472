"""Scores of how far out of distribution an input looks, from the members' logits and features; higher is further out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .modeling_hydra import at_least_float32, log_mean_of_exponentials


@dataclass(frozen=True)
class Answers:
    """What scores are made of.

    logits: (batch, members, classes); None for the mean of the members, which counts as one member
    log_probabilities: (batch, members, classes); of a multi-label model (batch, members, labels, 2), of no and of yes
    features: (batch, members, dim), what the classifier's last linear map reads
    state: the tensors of a fit by name, with the members as the first dimension
    """

    logits: Tensor | None = None
    log_probabilities: Tensor | None = None
    features: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def mean(self) -> "Answers":
        log_probabilities = None if self.log_probabilities is None else log_mean(self.log_probabilities).unsqueeze(1)
        features = None if self.features is None else self.features.mean(dim=1, keepdim=True)
        return Answers(None, log_probabilities, features, self.state)


def answers_of(
    member_logits: Tensor | None,
    member_features: Tensor | None = None,
    state: Mapping[str, Tensor] | None = None,
    by: str = "members",
    multi_label: bool = False,
) -> Answers:
    """member_logits (batch, members, classes) and member_features (batch, members, dim), made ready for a score."""
    logits = None if member_logits is None else at_least_float32(member_logits)
    features = None if member_features is None else at_least_float32(member_features)
    log_probabilities = None
    if logits is not None and multi_label:
        log_probabilities = nn.functional.logsigmoid(torch.stack([-logits, logits], dim=-1))
    elif logits is not None:
        log_probabilities = logits.log_softmax(dim=-1)
    answers = Answers(logits, log_probabilities, features, state or {})
    return answers.mean() if by == "mean" else answers


def log_mean(log_probabilities: Tensor) -> Tensor:
    """Log of the mean probability over the members: (batch, members, ...) -> (batch, ...)"""
    # Rounding can lift a certain prediction a hair above log 1.
    return log_mean_of_exponentials(log_probabilities).clamp(max=0)


def entropy_split(log_probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy of the mean probability, mean of the members' entropies, and their difference:
    (batch, members, ..., classes) -> (batch, ...) each"""
    total = torch.special.entr(log_mean(log_probabilities).exp()).sum(dim=-1)
    aleatoric = torch.special.entr(log_probabilities.exp()).sum(dim=-1).mean(dim=1)
    # Rounding can leave a difference just below 0; a single member has nothing to differ from.
    epistemic = (total - aleatoric).clamp(min=0) if log_probabilities.shape[1] > 1 else torch.zeros_like(total)
    return total, aleatoric, epistemic


def differing_pairs(log_probabilities: Tensor) -> Tensor:
    """Share of the pairs of members that predict different classes; 0 for one member:
    (batch, members, ..., classes) -> (batch, ...)"""
    votes, members = log_probabilities.argmax(dim=-1), log_probabilities.shape[1]
    differing = (votes.unsqueeze(2) != votes.unsqueeze(1)).sum(dim=(1, 2))
    return differing.to(log_probabilities.dtype) / max(1, members * (members - 1))


def _product(equation: str, first: Tensor, second: Tensor) -> Tensor:
    """An einsum of all digits: autocast would round both to 16 bits, and most distances would be equal."""
    if first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return torch.einsum(equation, first, second)
    with torch.autocast(first.device.type, enabled=False):
        return torch.einsum(equation, first, second)


# Of the logits. Each function gives (batch, members), or (batch, 1) where it compares members.


def msp(answers: Answers) -> Tensor:
    """1 - the maximum softmax probability (Hendrycks and Gimpel, 2017)."""
    return 1 - answers.log_probabilities.exp().amax(dim=-1)


def max_sigmoid(answers: Answers) -> Tensor:
    """1 - the largest probability that any label has."""
    return 1 - answers.log_probabilities[..., 1].exp().amax(dim=-1)


def max_logit(answers: Answers) -> Tensor:
    """- the largest logit (Hendrycks et al., 2022)."""
    return -answers.logits.amax(dim=-1)


def energy(answers: Answers) -> Tensor:
    """-log Σ exp z_c (Liu et al., 2020)."""
    return -answers.logits.logsumexp(dim=-1)


def joint_energy(answers: Answers) -> Tensor:
    """-Σ log(1 + exp z_l) over the labels (Wang et al., 2021)."""
    return -nn.functional.softplus(answers.logits).sum(dim=-1)


def entropy(answers: Answers) -> Tensor:
    return torch.special.entr(answers.log_probabilities.exp()).sum(dim=-1)


def mutual_information(answers: Answers) -> Tensor:
    """Entropy of the mean probability less the mean of the members' entropies."""
    return entropy_split(answers.log_probabilities)[2].unsqueeze(1)


def disagreement(answers: Answers) -> Tensor:
    return differing_pairs(answers.log_probabilities).unsqueeze(1)


def gen(answers: Answers, gamma: float = 0.1, top_classes: int = 100) -> Tensor:
    """Generalised entropy Σ p_c^γ (1 - p_c)^γ over the most probable classes (Liu et al., 2023)."""
    probabilities = answers.log_probabilities.exp().sort(dim=-1, descending=True).values
    others = probabilities[..., 1:]
    # 1 - p of a sure answer would be a difference of equal numbers: the sum of the others is exact.
    rest = torch.cat([others.sum(dim=-1, keepdim=True), 1 - others], dim=-1)
    return (probabilities * rest)[..., :top_classes].pow(gamma).sum(dim=-1)


def kl_matching(answers: Answers) -> Tensor:
    """min_k KL(p ‖ d_k), d_k the mean probability where k was predicted (Hendrycks et al., 2022)."""
    probabilities = answers.log_probabilities.exp()
    templates = answers.state["log_templates"].to(probabilities)  # (members, templates, classes)
    cross_entropies = -_product("bmc,mkc->bmk", probabilities, templates)
    return (cross_entropies.amin(dim=-1) - entropy(answers)).clamp(min=0)


# Of the features.


def she(answers: Answers) -> Tensor:
    """- the inner product with the mean feature of the predicted class (Zhang et al., 2023)."""
    patterns = answers.state["patterns"].to(answers.features)  # (members, classes, dim)
    predicted = answers.log_probabilities.argmax(dim=-1)
    of_predicted = patterns[torch.arange(len(patterns), device=patterns.device), predicted]
    return -(answers.features * of_predicted).sum(dim=-1)


def knn(answers: Answers, k: int = 50) -> Tensor:
    """Distance of the unit feature to the k-th nearest of a bank of training features (Sun et al., 2022)."""
    bank = answers.state["bank"].to(answers.features)  # (members, rows, dim), of length 1
    cosines = _product("bmd,mnd->bmn", nn.functional.normalize(answers.features, dim=-1), bank)
    return (2 - 2 * cosines.topk(k, dim=-1).values[..., -1]).clamp(min=0).sqrt()


def mahalanobis(answers: Answers) -> Tensor:
    """min_c (f - μ_c)ᵀ Σ⁻¹ (f - μ_c), Σ the covariance within classes (Lee et al., 2018)."""
    return _to_nearest_class(answers).to(answers.features.dtype)


def relative_mahalanobis(answers: Answers) -> Tensor:
    """`mahalanobis` less the distance to all training data, (f - μ)ᵀ Σ₀⁻¹ (f - μ) (Ren et al., 2021)."""
    to_all = _whitened(answers, "background_whitening").square().sum(dim=-1)
    return (_to_nearest_class(answers) - to_all).to(answers.features.dtype)


def _to_nearest_class(answers: Answers) -> Tensor:
    features = _whitened(answers, "whitening")
    means = answers.state["class_means"].to(features)  # (members, classes, dim), centred and whitened as well
    products = _product("bmd,mcd->bmc", features, means)
    nearest = (means.square().sum(dim=-1) - 2 * products).argmin(dim=-1)
    # Not |f|² + |μ|² - 2 fμ: far from the centre, that is a small difference of large numbers.
    of_nearest = means[torch.arange(len(means), device=means.device), nearest]
    return (features - of_nearest).square().sum(dim=-1)


def _whitened(answers: Answers, whitening: str) -> Tensor:
    """In float64, where the device has it: what is rounded here grows where features hardly vary, and would differ between
    batches of different sizes."""
    features = answers.features if answers.features.device.type == "mps" else answers.features.double()
    centred = features - answers.state["center"].to(features)
    return _product("bmd,mde->bme", centred, answers.state[whitening].to(centred))


def vim(answers: Answers) -> Tensor:
    """α ‖residual of f outside the principal space‖ - log Σ exp z_c (Wang et al., 2022)."""
    centred = answers.features - answers.state["origin"].to(answers.features)
    residual = _product("bmd,mdr->bmr", centred, answers.state["residual_space"].to(centred)).norm(dim=-1)
    return answers.state["alpha"].to(centred) * residual + energy(answers)


@dataclass(frozen=True)
class Method:
    """
    score: of answers to one class of several, (batch, members)
    by: "members" (the mean over the members of their scores) or "mean" (the score of their mean), the usual one first
    reads: "logits", "features"
    state: the tensors that it needs, whose first dimension is the members
    needs_labels: whether these are made of labelled data
    multi_label: the score of answers to each of several labels, where there is one
    bounds: between which scores lie
    settings, fit_settings: the defaults of what can be set, of the score and of the fit
    """

    score: Callable[..., Tensor]
    by: tuple[str, ...]
    reads: tuple[str, ...] = ("logits",)
    state: tuple[str, ...] = ()
    needs_labels: bool = False
    multi_label: Callable[..., Tensor] | None = None
    bounds: tuple[float, float] = (0.0, math.inf)
    settings: Mapping[str, Any] = field(default_factory=dict)
    fit_settings: Mapping[str, Any] = field(default_factory=dict)


EITHER, MEMBERS, MEAN_FIRST = ("members", "mean"), ("members",), ("mean", "members")
FEATURES, BOTH = ("features",), ("logits", "features")
GAUSSIAN = ("center", "whitening", "class_means")
SIGNED, SHARE = (-math.inf, math.inf), (0.0, 1.0)
DETECTORS = {
    "msp": Method(msp, MEAN_FIRST, multi_label=max_sigmoid, bounds=SHARE),
    # The logits of the mean are log-probabilities: their energy is always 0, their largest says what msp says.
    "max_logit": Method(max_logit, MEMBERS, multi_label=max_logit, bounds=SIGNED),
    "energy": Method(energy, MEMBERS, multi_label=joint_energy, bounds=SIGNED),
    "entropy": Method(entropy, MEAN_FIRST, multi_label=lambda answers: entropy(answers).sum(dim=-1)),
    "mutual_information": Method(
        mutual_information, MEMBERS, multi_label=lambda answers: mutual_information(answers).sum(dim=-1)
    ),
    "disagreement": Method(
        disagreement, MEMBERS, multi_label=lambda answers: disagreement(answers).mean(dim=-1), bounds=SHARE
    ),
    "gen": Method(gen, MEAN_FIRST, settings={"gamma": 0.1, "top_classes": 100}),
    "kl_matching": Method(kl_matching, MEAN_FIRST, state=("log_templates",)),
    "she": Method(she, EITHER, BOTH, ("patterns",), needs_labels=True, bounds=SIGNED),
    "knn": Method(
        knn,
        EITHER,
        FEATURES,
        ("bank",),
        multi_label=knn,
        settings={"k": 50},
        fit_settings={"bank_size": 10_000, "seed": 0},
    ),
    "mahalanobis": Method(
        mahalanobis, EITHER, FEATURES, GAUSSIAN, needs_labels=True, fit_settings={"shrinkage": None}
    ),
    "relative_mahalanobis": Method(
        relative_mahalanobis,
        EITHER,
        FEATURES,
        (*GAUSSIAN, "background_whitening"),
        needs_labels=True,
        bounds=SIGNED,
        fit_settings={"shrinkage": None},
    ),
    "vim": Method(
        vim,
        MEMBERS,
        BOTH,
        ("origin", "residual_space", "alpha"),
        bounds=SIGNED,
        fit_settings={"principal_dim": None, "sample_size": 10_000, "seed": 0},
    ),
}
COMPARE_MEMBERS = ("mutual_information", "disagreement")  # nothing to tell of a single model


def score(name: str, answers: Answers, by: str | None = None, multi_label: bool = False, **settings: float) -> Tensor:
    """The score of `DETECTORS[name]`, (batch,)"""
    method = DETECTORS[name]
    function = method.multi_label if multi_label else method.score
    return function(answers.mean() if (by or method.by[0]) == "mean" else answers, **settings).mean(dim=1)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
