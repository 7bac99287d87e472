"""The loss of an ensemble for Trainer's `compute_loss_func`."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..fusion.structure import has_two_towers
from ..model_info import without_adapters
from ..models.ensembling import at_least_float32, log_mean_probability
from ..models.task_tokens import rows_of_tokens
from .mixing import MixedLabels


IGNORED_LABEL = -100
ONE_OF_SEVERAL = ("single_label_classification", "token_classification")  # tasks that have an accuracy


def learns_from_pairs(model: nn.Module) -> bool:
    """Whether a model learns which image and text belong together, as CLIP and SigLIP do.

    A classifier on one tower does not.
    """
    inner = without_adapters(model)
    return isinstance(inner, PreTrainedModel) and has_two_towers(inner)


class EnsembleLoss:
    """Cross-entropy of a Hydra: `Trainer(compute_loss_func=EnsembleLoss(...))`.

    `HydraTrainer` uses it by itself. Trainer's own `label_smoothing_factor` sees the ensemble's
    logits only; a model whose config says "members" raises then. For one member, or a plain model,
    both kinds are the plain cross-entropy.

    Args:
        kind (`str`, defaults to `"members"`):
            "members" for the mean of the members' cross-entropies: each member's own weights get
            the gradient they would have alone, divided by the number of members (Trainer's
            `max_grad_norm` clips the norm over all of them); "ensemble" for the negative
            log-likelihood of the ensemble's mean probability.
        label_smoothing (`float`, defaults to 0.0):
            The share of the target that is spread evenly over the classes.
        class_weights (`torch.Tensor`, *optional*):
            A factor for the rows of each class, `(classes,)`.
    """

    takes_mixed_labels = True

    def __init__(self, kind: str = "members", label_smoothing: float = 0.0, class_weights: torch.Tensor | None = None):
        if kind not in ("members", "ensemble"):
            raise ValueError(f'kind is {kind!r}: pass "members" or "ensemble"')
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing}: pass a share from 0 to below 1")
        self.kind = kind
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights

    def __call__(
        self, outputs: Any, labels: torch.Tensor | MixedLabels, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            outputs: The model's, with `member_logits` (batch, members, classes) or, from a plain
                model, `logits`.
            labels: (batch,) class indices, or (batch, tokens); -100 is left out. Of mixed inputs
                the `MixedLabels`.
            num_items_in_batch: The number that the sum is divided by, by default the labels of this
                batch; Trainer passes that of all accumulated batches on all processes.
        """
        if isinstance(labels, MixedLabels):
            first = self(outputs, labels.first, num_items_in_batch)
            second = self(outputs, labels.second, num_items_in_batch)
            return labels.share * first + (1 - labels.share) * second
        member_logits = outputs.get("member_logits")
        if member_logits is None:
            member_logits = outputs["logits"].unsqueeze(1)
        if member_logits.dim() == 4 and labels.shape == member_logits.shape[::2]:  # a class for each token
            member_logits = rows_of_tokens(member_logits)
            labels = labels.flatten()
        rows = member_logits.shape[0]
        if labels.is_floating_point() or labels.shape != (rows,):
            raise ValueError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}: EnsembleLoss needs {rows} class indices; "
                "for other problems leave compute_loss_func out, the model's config.ensemble_loss then decides"
            )
        if self.kind == "ensemble":
            member_logits = log_mean_probability(member_logits).unsqueeze(1)
        members = member_logits.shape[1]
        logits = at_least_float32(member_logits).transpose(1, 2)  # (batch, classes, members)
        weights = self.class_weights
        if weights is not None:
            weights = weights.to(logits)
        total = F.cross_entropy(
            logits,
            labels.unsqueeze(1).expand(-1, members),
            weight=weights,
            reduction="sum",
            ignore_index=IGNORED_LABEL,
            label_smoothing=self.label_smoothing,
        )

        # The sum becomes a mean over the labels of this batch, or of all that are accumulated.
        items = num_items_in_batch
        if items is None:
            items = (labels != IGNORED_LABEL).sum()
        if isinstance(items, torch.Tensor):
            items = items.to(total.device)
        return total / (members * items)
