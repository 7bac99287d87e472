"""The mathematics of an ensemble: the log of the members' mean probability, and entropies."""

import math
from functools import reduce

import torch


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Cast to float32 what is narrower; float64 stays."""
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.float()


def log_mean_of_exponentials(logarithms: torch.Tensor) -> torch.Tensor:
    """(batch, members, ...) -> (batch, ...)"""
    if is_exporting():
        total = torch.logsumexp(logarithms, dim=1)  # every exported format has it
    else:
        # Member by member takes one kernel each, a third of what logsumexp launches.
        total = reduce(torch.logaddexp, logarithms.unbind(dim=1))
    return total - math.log(logarithms.shape[1])


def log_mean(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Return the log of the mean probability over the members: (batch, members, ...) -> (batch,
    ...)"""
    # Rounding can lift a certain prediction slightly above log 1.
    return log_mean_of_exponentials(log_probabilities).clamp(max=0)


def log_mean_probability(member_logits: torch.Tensor) -> torch.Tensor:
    """Return the log of the mean over members of softmax: (batch, members, classes) -> (batch,
    classes), at least float32."""
    dtype = torch.promote_types(member_logits.dtype, torch.float32)
    log_probabilities = torch.nn.functional.log_softmax(member_logits, dim=-1, dtype=dtype)
    return log_mean_of_exponentials(log_probabilities)


def pool_then_scale(member_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return member logits whose mean probability is the ensemble's prediction with a temperature:
    (batch, members, classes).

    With p the members' mean probability, the prediction is q = softmax(log p / T). Each member is
    first divided by T alone; then its probability of a class is multiplied by what is missing from
    the mean of all to q, the same factor for all members. A member whose probabilities now sum to
    more than 1 is reduced to 1, and what it loses goes, class by class, to those below 1: every
    member sums to 1 again, and the mean stays q. Each member keeps its log Σ exp z / T.
    """
    scaled = member_logits / temperature
    if member_logits.shape[1] == 1 or temperature == 1:
        return scaled
    smallest = torch.finfo(scaled.dtype).tiny  # keeps logarithms, and their gradients, finite

    # Every member divided by T, and the factor that is missing from their mean to q.
    sums = scaled.logsumexp(dim=-1, keepdim=True)
    log_members = scaled - sums
    log_mean = log_mean_of_exponentials(log_members)
    log_prediction = (log_mean_probability(member_logits) / temperature).log_softmax(dim=-1)
    factor = log_prediction - log_mean
    factor = factor.masked_fill(log_mean == -math.inf, 0.0)  # a class that no member allows

    # What members have above 1 goes to those below.
    log_members = log_members + factor.unsqueeze(1)
    log_total = log_members.logsumexp(dim=-1, keepdim=True)  # near 0
    surplus = -torch.expm1(-log_total.clamp(min=0))  # as a share of what the member has
    lack = -torch.expm1(log_total.clamp(max=0))
    lost = (log_members + surplus.clamp(min=smallest).log()).logsumexp(dim=1, keepdim=True)
    shares = lack / lack.sum(dim=1, keepdim=True).clamp(min=smallest)
    received = lost + shares.clamp(min=smallest).log()
    kept = log_members - log_total.clamp(min=0)
    return torch.stack([kept, received]).logsumexp(dim=0) + sums


def entropy_split(log_probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the entropy of the mean probability, the mean of the members' entropies, and their
    difference: (batch, members, ..., classes) -> (batch, ...) each"""
    total = torch.special.entr(log_mean(log_probabilities).exp()).sum(dim=-1)
    aleatoric = torch.special.entr(log_probabilities.exp()).sum(dim=-1).mean(dim=1)
    if log_probabilities.shape[1] == 1:  # a single member has nothing to differ from
        epistemic = torch.zeros_like(total)
    else:
        epistemic = (total - aleatoric).clamp(min=0)  # rounding can leave a difference just below 0
    return total, aleatoric, epistemic


def is_exporting() -> bool:
    """Whether a graph is recorded that will serve batches of every size, with gradients and
    without."""
    # torch 2.11 calls every compilation an export; this flag is set for exports alone.
    is_export = getattr(torch.compiler, "_is_exporting_flag", None)
    if is_export is None:
        is_export = torch.compiler.is_exporting()
    return is_export or torch.jit.is_tracing()
