"""The loss of an ensemble for Trainer's `compute_loss_func`, and the mixing of rows behind the trunk."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..models.modeling_hydra import at_least_float32, log_mean_probability
from ..models.tokens import rows_of_tokens


IGNORED_LABEL = -100


class EnsembleLoss:
    """Cross-entropy of a Hydra, with label smoothing: `Trainer(compute_loss_func=EnsembleLoss(...))`.

    `HydraTrainer` uses it by itself. Trainer's own `label_smoothing_factor` sees the ensemble's logits only; a model whose
    config says "members" raises then. For one member, or a plain model, both kinds are the plain cross-entropy.

    Args:
        kind (`str`, defaults to `"members"`):
            "members" for the mean of the members' cross-entropies: each member's own weights get the gradient they would have
            alone, divided by the number of members (Trainer's `max_grad_norm` clips the norm over all of them); "ensemble" for
            the negative log-likelihood of the ensemble's mean probability.
        label_smoothing (`float`, defaults to 0.0):
            The share of the target that is spread evenly over the classes.
        class_weights (`torch.Tensor`, *optional*):
            A factor for the rows of each class, `(classes,)`.
    """

    def __init__(self, kind: str = "members", label_smoothing: float = 0.0, class_weights: torch.Tensor | None = None):
        if kind not in ("members", "ensemble"):
            raise ValueError(f'kind is {kind!r}: pass "members" or "ensemble"')
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing}: pass a share from 0 to below 1")
        self.kind, self.label_smoothing, self.class_weights = kind, label_smoothing, class_weights
        self.mixing: TrunkMixing | None = None

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The loss of a batch, a scalar.

        Args:
            outputs: The model's, with `member_logits` (batch, members, classes) or, from a plain model, `logits`.
            labels: (batch,) class indices, or (batch, tokens); -100 is left out.
            num_items_in_batch: The number that the sum is divided by, by default the labels of this batch; Trainer passes that
                of all accumulated batches on all processes.
        """
        member_logits = outputs.get("member_logits")
        member_logits = outputs["logits"].unsqueeze(1) if member_logits is None else member_logits
        if labels is None:
            raise ValueError('the batch has no "labels": EnsembleLoss needs one class index per row')
        if member_logits.dim() == 4 and labels.shape == member_logits.shape[::2]:
            member_logits, labels = rows_of_tokens(member_logits), labels.flatten()  # a class for each token
        rows = member_logits.shape[0]
        if labels.is_floating_point() or labels.shape != (rows,):
            raise ValueError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}: EnsembleLoss needs {rows} class indices; for "
                "other problems leave compute_loss_func out, the model's config.ensemble_loss then decides"
            )
        if self.kind == "ensemble":
            member_logits = log_mean_probability(member_logits).unsqueeze(1)
        members = member_logits.shape[1]
        targets = labels.unsqueeze(1).expand(-1, members)
        if self.mixing is None:
            total = self._total(member_logits, targets)
        else:
            weights, partners = self.mixing.weights, self.mixing.partners
            total = self._total(member_logits, targets, weights) + self._total(
                member_logits, labels[partners].t(), 1 - weights
            )
        items = (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        return total / (members * (items.to(total.device) if isinstance(items, torch.Tensor) else items))

    def _total(
        self, member_logits: torch.Tensor, targets: torch.Tensor, member_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum of all cross-entropies; targets (batch, members), member_weights (members,)"""
        logits = at_least_float32(member_logits).transpose(1, 2)  # (batch, classes, members)
        losses = F.cross_entropy(
            logits,
            targets,
            weight=None if self.class_weights is None else self.class_weights.to(logits),
            reduction="sum" if member_weights is None else "none",
            ignore_index=IGNORED_LABEL,
            label_smoothing=self.label_smoothing,
        )
        return losses if member_weights is None else (losses * member_weights).sum()

    def __repr__(self) -> str:
        return f"EnsembleLoss(kind={self.kind!r}, label_smoothing={self.label_smoothing})"


class TrunkMixing:
    """Mixes rows behind the trunk in training, with partners and a weight of its own for each member (manifold mixup, Verma et
    al., 2019): `states = weight * states + (1 - weight) * states[partners]`. `EnsembleLoss` mixes the labels alike.

    Padded texts mix with the padding of longer ones: meant for images.

    Args:
        model (`PreTrainedModel`): A Hydra with at least one layer behind its trunk.
        alpha (`float`): Of the Beta distribution that weights are drawn from.
    """

    def __init__(self, model: nn.Module, alpha: float):
        trunk, layers = model.config.trunk_layers, model.base_model.layers
        if trunk >= len(layers) or model.config.layer_runs[trunk] > 1:
            raise ValueError(f"mixing needs a layer behind the trunk that runs once, of {len(layers)}: leave it out")
        self.members, self.beta = model.num_members, torch.distributions.Beta(alpha, alpha)
        self.layer = layers[trunk]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Rows are mixed inside this block, where the model is in training mode."""
        hook = self.layer.register_forward_pre_hook(self._mix)
        try:
            yield
        finally:
            hook.remove()

    def draw(self, rows: int, device: torch.device) -> None:
        """Draws weights (members,) and partners (members, rows) for the next batch."""
        self.weights = self.beta.sample((self.members,)).to(device)
        self.partners = torch.stack([torch.randperm(rows) for _ in range(self.members)]).to(device)

    def _mix(self, layer: nn.Module, arguments: tuple) -> tuple | None:
        if not layer.training:
            return None
        states, *others = arguments
        states = states.expand(self.members, *states.shape[1:])
        mixed = torch.stack([states[member, partners] for member, partners in enumerate(self.partners)])
        return (torch.lerp(mixed, states, self.weights.to(states.dtype).view(-1, 1, 1, 1)), *others)
