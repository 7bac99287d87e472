"""Member logits, labels and scores as tensors, checked, and log-probabilities in float64."""

from typing import Any

import torch
from torch import Tensor


def as_tensor(values: Any) -> Tensor:
    """A tensor as it is, anything else as a tensor on the CPU, also under another default device."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def as_member_logits(member_logits: Any, least_classes: int = 2) -> Tensor:
    """Member logits (batch, members, classes) as a tensor of floats, from a tensor, an array or nested lists."""
    if hasattr(member_logits, "logits"):
        raise TypeError("member_logits is a model's output: pass outputs.member_logits")
    member_logits = as_tensor(member_logits)
    shape = tuple(member_logits.shape)
    if member_logits.dim() != 3 or shape[1] < 1 or shape[2] < least_classes:
        raise ValueError(
            f"member_logits has shape {shape}: pass (batch, members, classes) with at least {least_classes} classes, for a "
            "single model logits.unsqueeze(1)"
        )
    return member_logits if member_logits.is_floating_point() else member_logits.float()


def as_labels(labels: Any, rows: int, classes: int) -> Tensor:
    """Class indices (batch,) as a tensor of integers, one per row of member_logits, each below `classes`."""
    labels = as_tensor(labels)
    if labels.shape != (rows,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels is {labels.dtype} of shape {tuple(labels.shape)}: pass class indices, ({rows},)")
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise ValueError(f"labels has {int(outside[0])}: pass class indices from 0 to {classes - 1}")
    return labels.long()


def as_multi_hot(labels: Any, rows: int, num_labels: int) -> Tensor:
    """Labels (batch, labels), 1 where a row has the label and 0 where not, as booleans."""
    labels = as_tensor(labels)
    if labels.shape != (rows, num_labels) or not ((labels == 0) | (labels == 1)).all():
        raise ValueError(f"labels has shape {tuple(labels.shape)}: pass a 0 or 1 for each, ({rows}, {num_labels})")
    return labels.bool()


def in_float64(scores: Any) -> Tensor:
    """A tensor as it is, anything else in float64: in float32, 0.7 would lie below a threshold of 0.7."""
    return scores if isinstance(scores, Tensor) else torch.as_tensor(scores, dtype=torch.float64, device="cpu")


def as_scores(scores: Any, name: str) -> Tensor:
    """Per-sample scores (samples,) as float64 on the CPU; not empty and free of NaN."""
    scores = in_float64(scores).detach().cpu().double()
    if scores.dim() != 1 or len(scores) == 0 or scores.isnan().any():
        raise ValueError(f"{name} has shape {tuple(scores.shape)}: pass a number, not NaN, for each sample (samples,)")
    return scores


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float64; on the CPU if its device has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def check_predictions(member_logits: Tensor, have_softmax: bool = True) -> None:
    """Raise for NaN, and where logits have a softmax for +inf and rows with every class at -inf."""
    if have_softmax:
        bad = ~member_logits.amax(dim=-1).isfinite()
    else:
        bad = member_logits.isnan().any(dim=-1)
    if bad.any():
        row, member = bad.nonzero()[0].tolist()
        raise ValueError(f"member_logits[{row}, {member}] is not a prediction (NaN, +inf, or every class at -inf)")


def wide_log_softmax(member_logits: Tensor) -> Tensor:
    """Each member's log-probabilities in float64, checked."""
    check_predictions(member_logits)
    return torch.log_softmax(widened(member_logits), dim=-1)
