"""Checks member logits, labels and scores, and computes log-probabilities in float64."""

from typing import Any

import torch
from torch import Tensor


def as_tensor(values: Any) -> Tensor:
    """A tensor as it is, anything else as a tensor on the CPU, also under another default device."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def as_member_logits(member_logits: Any, least_classes: int = 2) -> Tensor:
    """Member logits (batch, members, classes) as a tensor of floats, from a tensor, an array or nested lists."""
    if hasattr(member_logits, "logits") or isinstance(member_logits, torch.nn.Module):
        raise TypeError(
            f"member_logits is a {type(member_logits).__name__}: pass outputs.member_logits, for a single model "
            "outputs.logits.unsqueeze(1)"
        )
    member_logits = as_tensor(member_logits)
    shape = tuple(member_logits.shape)
    if member_logits.dim() != 3:
        raise ValueError(
            f"member_logits has shape {shape}: pass (batch, members, classes), for a single model logits.unsqueeze(1)"
        )
    if shape[1] < 1:
        raise ValueError(f"member_logits has shape {shape}: it needs at least one member")
    if shape[2] < least_classes:
        raise ValueError(
            f"member_logits has {shape[2]} class: a softmax over it is always certain, pass logits of two classes or more "
            '(decompose takes a single output with problem_type="multi_label_classification")'
        )
    return member_logits if member_logits.is_floating_point() else member_logits.float()


def as_labels(labels: Any, rows: int, classes: int) -> Tensor:
    """Class indices (batch,) as a tensor of integers, one per row of member_logits, each below `classes`."""
    labels = as_tensor(labels)
    if labels.dim() != 1:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}: pass one class index per sample, shape (batch,); multi-label targets "
            "have no such metrics"
        )
    if len(labels) != rows:
        raise ValueError(
            f"labels has {len(labels)} rows, member_logits has {rows}: pass one label per row of member_logits"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels is of type {labels.dtype}: pass integer class indices")
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"labels[{row}] is {int(labels[row])}, member_logits has {classes} classes: pass labels from 0 to {classes - 1}"
        )
    return labels.long()


def as_multi_hot(labels: Any, rows: int, num_labels: int) -> Tensor:
    """Labels (batch, labels), 1 where a row has the label and 0 where not, as booleans."""
    labels = as_tensor(labels)
    if labels.dim() != 2:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}: a model of several labels takes a 0 or 1 for each of its {num_labels} "
            "labels, shape (batch, labels), not one class index per row"
        )
    if tuple(labels.shape) != (rows, num_labels):
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}, the logits are of {rows} rows and {num_labels} labels: pass a 0 or 1 for "
            "each"
        )
    odd = (labels != 0) & (labels != 1)
    if odd.any():
        row, label = odd.nonzero()[0].tolist()
        raise ValueError(
            f"labels[{row}, {label}] is {labels[row, label].item()}: pass 1 where a row has the label, else 0"
        )
    return labels.bool()


def as_scores(scores: Any, name: str) -> Tensor:
    """Per-sample scores (samples,) as float64 on the CPU; not empty and free of NaN."""
    scores = as_tensor(scores).detach().cpu().double()
    if scores.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(scores.shape)}: pass one score per sample, shape (samples,)")
    if len(scores) == 0:
        raise ValueError(f"{name} is empty: pass at least one sample")
    if scores.isnan().any():
        row = int(scores.isnan().nonzero()[0])
        raise ValueError(f"{name}[{row}] is NaN: check the model's output for that sample")
    return scores


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float64; on the CPU if its device has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def check_predictions(member_logits: Tensor, multi_label: bool = False) -> None:
    """Refuses NaN, and unless `multi_label` +inf and rows with every class at -inf, which have no softmax."""
    bad = member_logits.isnan().any(dim=-1) if multi_label else ~member_logits.amax(dim=-1).isfinite()
    if bad.any():
        row, member = bad.nonzero()[0].tolist()
        found = "has NaN" if multi_label else "is not a prediction (NaN, +inf, or every class at -inf)"
        raise ValueError(
            f"member_logits[{row}, {member}] {found}: check the model's weights and input, or compute in a wider dtype"
        )


def wide_log_softmax(member_logits: Tensor) -> Tensor:
    """Each member's log-probabilities in float64, checked."""
    check_predictions(member_logits)
    return torch.log_softmax(widened(member_logits), dim=-1)


def wide_log_sigmoid(member_logits: Tensor) -> Tensor:
    """Each member's log-probabilities of no and yes, label by label, in float64, checked.

    (batch, members, labels) -> (batch, members, labels, 2)
    """
    check_predictions(member_logits, multi_label=True)
    wide = widened(member_logits)
    return torch.nn.functional.logsigmoid(torch.stack([-wide, wide], dim=-1))


def as_two_classes(member_logits: Tensor) -> Tensor:
    """Each label of each row as a row with the classes no and yes: (batch, members, labels) -> (batch * labels, members, 2)"""
    yes = member_logits.transpose(1, 2).flatten(0, 1)
    return torch.stack([torch.zeros_like(yes), yes], dim=-1)
