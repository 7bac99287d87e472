"""A Laplace approximation of the last layer (Daxberger et al., 2021; Kristiadi et al., 2020)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._io.threads import copy_sharing_weights
from ..data.batches import batches, split_labels
from ..data.prediction import accepted_inputs
from ..model_info import check_chooses_one_class
from ..models.ensembling import at_least_float32
from ..models.inputs import evaluation_mode
from .baseline import Baseline, check_is_count
from .kronecker import Factors, KroneckerPosterior, probit_logits, second_derivatives_of_softmax, without_autocast
from .layer_replacement import head_name


class LastLayerLaplace(Baseline):
    """A classifier whose last linear layer has a normal distribution around its trained weights.

    `fit` finds the distribution; until then the answers are the model's. It costs little more than
    one forward.

    Args:
        model (`PreTrainedModel`): a Transformers classifier whose logits are the outputs of an
            `nn.Linear`; it is copied.
        num_samples (`int`, defaults to 0): 0 for one member with analytic logits, damped where they
            are uncertain (the probit approximation); otherwise the number of members, whose last
            layers `fit` draws from the distribution.
    """

    def __init__(self, model: PreTrainedModel, num_samples: int = 0):
        check_is_count(num_samples, "num_samples", 0)
        super().__init__(model, num_samples=num_samples)
        check_chooses_one_class(model, "model")
        self._head_name = head_name(model)
        if model.config.num_labels == 1:
            raise ValueError("model has 1 output: pass a classifier with several classes")

        # `model` computes the features that its last layer, `head`, turns into logits.
        self.model = copy.deepcopy(model)
        self.head = self.model.get_submodule(self._head_name)
        self.model.set_submodule(self._head_name, nn.Identity())

        # The distribution of the head's weights.
        weight = at_least_float32(self._weight().detach())
        num_outputs, num_inputs = weight.shape
        self.posterior = KroneckerPosterior(num_inputs, num_outputs).to(weight)
        if num_samples:
            self.register_buffer("samples", weight.new_zeros(num_samples, *weight.shape))

    @property
    def num_members(self) -> int:
        return self.arguments["num_samples"] or 1

    @torch.no_grad()
    def fit(
        self, data: Any, batch_size: int = 32, prior_precision: float | None = None, seed: int = 0
    ) -> "LastLayerLaplace":
        """Find the distribution in one pass over the model's training data; return itself.

        Args:
            data: as `evaluate_uncertainty` takes it; the curvature of the cross-entropy needs no
                labels.
            batch_size (`int`, defaults to 32): rows per batch, for a Dataset of rows.
            prior_precision (`float`, *optional*): λ; None for the one with the highest evidence,
                see `posterior.prior_precision`.
            seed (`int`, defaults to 0): for the members that are drawn.
        """
        # The curvature of the loss on all rows.
        weight = self._weight()
        num_outputs, num_inputs = weight.shape
        factors = Factors(num_inputs, num_outputs, self.device)
        with evaluation_mode(self):
            for batch in batches(data, batch_size, self.device):
                inputs, _ = split_labels(batch)
                inputs = accepted_inputs(self.model, inputs)
                if not factors.rows:
                    self._check_is_head(inputs)
                features, logits = self._apply_head(self.model(**inputs).logits)
                factors.add(features, second_derivatives_of_softmax(logits))
        if not factors.rows:
            raise ValueError("data has no samples: pass at least one batch")

        # The distribution, and members drawn from it.
        input_factor, output_factor = factors.scaled()
        self.posterior.set(self.posterior.fit(input_factor, output_factor, weight, prior_precision))
        num_samples = self.arguments["num_samples"]
        if num_samples:
            self.samples.copy_(self.posterior.sample(num_samples, seed))
        return self

    def _check_is_head(self, inputs: dict[str, Tensor]) -> None:
        """Raise for a classifier that does more with its features than apply the head."""
        model = copy_sharing_weights(self.model)
        model.set_submodule(self._head_name, self.head)
        try:
            logits = self.head(self.model(**inputs).logits)
            is_head = torch.allclose(model.eval()(**inputs).logits, logits, rtol=1e-3, atol=1e-5)
        except RuntimeError:  # another layer follows, and the features do not fit into it
            is_head = False
        if not is_head:
            raise ValueError(
                f"the logits of {type(model).__name__} are not the outputs of its {self._head_name}: pass a "
                "classifier that ends in one linear layer"
            )

    def _weight(self) -> Tensor:
        """Return the head's weight, with its bias as the last column."""
        if self.head.bias is None:
            return self.head.weight
        return torch.cat([self.head.weight, self.head.bias.unsqueeze(1)], dim=1)

    def _apply_head(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's inputs, with a 1 for its bias, and logits (batch, classes).

        Both are at least in float32.
        """
        features = at_least_float32(features)
        weight = at_least_float32(self._weight())
        if self.head.bias is not None:
            features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
        return features, features @ weight.t()

    def member_logits(self, **inputs: Tensor) -> Tensor:
        features = self.model(**inputs).logits
        with without_autocast(features.device):
            features, logits = self._apply_head(features)
            if not self.arguments["num_samples"]:
                variances = self.posterior.output_variance(features)
                return probit_logits(logits, variances).unsqueeze(1)
            deviations = torch.einsum("bi,mci->bmc", features, at_least_float32(self.samples))
            return logits.unsqueeze(1) + deviations
