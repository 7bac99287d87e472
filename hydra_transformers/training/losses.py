"""Losses of an ensemble for Trainer's `compute_loss_func`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..data.fingerprints import fingerprint_of_weights
from ..data.prediction import accepted_inputs, check_chooses_one_class, classes_of, device_of, member_logits_of
from ..models.modeling_hydra import at_least_float32, log_mean_probability
from ..models.pipeline_hydra import evaluation_mode
from ..models.tokens import rows_of_tokens


IGNORED_LABEL = -100


class EnsembleLoss:
    """Cross-entropy of a fused Hydra, with label smoothing: `Trainer(compute_loss_func=EnsembleLoss(...))`.

    Trainer's own `label_smoothing_factor` sees the ensemble's logits only, so it trains the ensemble's answer; a model whose
    config says "members" refuses it. For one member, or a plain model, both kinds are the plain cross-entropy.

    Args:
        kind: "members" for the mean of the members' cross-entropies: each member's own weights get the gradient they would
            have alone, divided by the number of members (Trainer's `max_grad_norm` clips the norm over all of them);
            "ensemble" for the negative log-likelihood of the ensemble's mean probability.
        label_smoothing: the share of the target that is spread evenly over the classes.
    """

    def __init__(self, kind: str = "members", label_smoothing: float = 0.0):
        if kind not in ("members", "ensemble"):
            raise ValueError(f'kind is {kind!r}: pass "members" or "ensemble"')
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing}: pass a share from 0 to below 1")
        self.kind = kind
        self.label_smoothing = label_smoothing

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The loss of a batch, a scalar.

        outputs: the model's, with `member_logits` (batch, members, classes) or, from a plain model, `logits`
        labels: (batch,) class indices; -100 is left out
        num_items_in_batch: the number that the sum is divided by, by default the labels of this batch; Trainer passes that of
            all accumulated batches on all processes
        """
        member_logits = _member_logits(outputs)
        if member_logits.dim() == 4 and labels is not None and labels.shape == member_logits.shape[::2]:
            member_logits, labels = rows_of_tokens(member_logits), labels.flatten()  # a class for each token
        rows = member_logits.shape[0]
        if labels is None:
            raise ValueError('the batch has no "labels": EnsembleLoss needs one class index per row')
        if labels.is_floating_point() or labels.shape != (rows,):
            raise ValueError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}: EnsembleLoss needs {rows} class indices; for "
                "other problems leave compute_loss_func out, the model's config.ensemble_loss then decides"
            )
        if self.kind == "ensemble":
            member_logits = log_mean_probability(member_logits).unsqueeze(1)
        logits = at_least_float32(member_logits).transpose(1, 2)  # (batch, classes, members)
        members = logits.shape[2]
        total = F.cross_entropy(
            logits,
            labels.unsqueeze(1).expand(-1, members),
            reduction="sum",
            ignore_index=IGNORED_LABEL,
            label_smoothing=self.label_smoothing,
        )
        return total / (members * _items(labels, num_items_in_batch))

    def __repr__(self) -> str:
        return f"EnsembleLoss(kind={self.kind!r}, label_smoothing={self.label_smoothing})"


class Teacher:
    """A model from whose answers others learn, beside the labels (Hinton et al., 2015): `finetune_members(..., teacher=...)`.

    Each member's loss is `label_share * CE(labels) + (1 - label_share) * T^2 * CE(teacher)`. The teacher's target is the mean of
    its members' probabilities at temperature T, the member answers at the same temperature.

    Args:
        model: any classifier for the same classes: a Hydra, a Deep Ensemble, a model of Transformers. It stays as it is.
        temperature: T; above 1 shows more of what the teacher holds possible.
        label_share: how much the labels count, from 0 to 1.
    """

    def __init__(self, model: nn.Module, temperature: float = 2.0, label_share: float = 0.25):
        if not isinstance(model, nn.Module):
            raise TypeError(f"teacher is a {type(model).__name__}: pass a model")
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}: pass a finite number above 0")
        if not 0 <= label_share <= 1:
            raise ValueError(f"label_share is {label_share}: pass a share from 0 to 1")
        check_chooses_one_class(model, "the teacher")
        self.model, self.temperature, self.label_share = model, temperature, label_share

    def check_teaches(self, student: nn.Module) -> None:
        """Refuses a student for other classes, or for the same in another order."""
        check_chooses_one_class(student, "the model that learns from a teacher")
        own, others = classes_of(self.model), classes_of(student)
        if own is not None and others is not None and own != others:
            raise ValueError(
                f"teacher has the classes {_some(own)} and the model {_some(others)}: pass a teacher for the same classes in the "
                "same order"
            )

    def identity(self) -> dict[str, Any]:
        """What a training with this teacher depends on."""
        weights = fingerprint_of_weights(self.model)
        return {"weights": weights, "temperature": self.temperature, "label_share": self.label_share}

    @contextmanager
    def moved_to(self, device: torch.device) -> Iterator[None]:
        """A teacher on the CPU is on `device` inside, where the training is."""
        is_moved = device_of(self.model).type == "cpu"
        if is_moved:
            self.model.to(device)
        try:
            yield
        finally:
            if is_moved:
                self.model.to("cpu")

    @torch.no_grad()
    def probabilities(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The target (batch, classes) of a batch without labels."""
        device = device_of(self.model)
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }
        with evaluation_mode(self.model):
            member_logits = member_logits_of(self.model(**accepted_inputs(self.model, moved)), "the teacher")
        return log_mean_probability(at_least_float32(member_logits) / self.temperature).exp()


class TeacherLoss:
    """`Trainer`'s loss with a `Teacher`: set `target` before a training batch. Without one, as in validation, the labels alone count."""

    def __init__(self, teacher: Teacher, label_smoothing: float = 0.0):
        self.teacher, self.of_labels = teacher, EnsembleLoss("members", label_smoothing)
        self.target: torch.Tensor | None = None

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The loss of a batch, a scalar; arguments as for `EnsembleLoss`."""
        from_labels, target, self.target = self.of_labels(outputs, labels, num_items_in_batch), self.target, None
        if target is None:
            return from_labels
        share, temperature = self.teacher.label_share, self.teacher.temperature
        logits = at_least_float32(_member_logits(outputs)) / temperature  # (batch, members, classes)
        each = -(target.to(logits).unsqueeze(1) * logits.log_softmax(dim=-1)).sum(dim=-1).mean(dim=1)
        counted = torch.where(labels == IGNORED_LABEL, 0.0, each).sum()
        from_teacher = temperature**2 * counted / _items(labels, num_items_in_batch)
        return share * from_labels + (1 - share) * from_teacher


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names)})" if len(names) > 5 else "")


def _member_logits(outputs: Any) -> torch.Tensor:
    """(batch, members, classes); a plain model has one member."""
    member_logits = outputs.get("member_logits")
    return outputs["logits"].unsqueeze(1) if member_logits is None else member_logits


def _items(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    """The number of labels that a sum is divided by."""
    if num_items_in_batch is None:
        return (labels != IGNORED_LABEL).sum()
    return num_items_in_batch.to(labels.device) if isinstance(num_items_in_batch, torch.Tensor) else num_items_in_batch
