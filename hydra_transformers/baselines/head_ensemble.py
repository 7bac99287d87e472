"""Several classifiers on one backbone: the smallest Deep Ensemble there is."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .baseline import Baseline, check_is_classifier, check_is_count
from .linear_layers import changed, head_name, mean_of_heads, replace


class HeadEnsemble(Baseline):
    """A classifier with `num_members` last linear layers in place of one, each with new weights; all else is shared.

    model: any classifier of Transformers; it stays as it is
    frozen: whether the heads alone train. Each then learns as if it were alone; otherwise they train the rest together
    seed: of the heads' weights, which are drawn as the model's config says (`initializer_range`)

    All heads read the same features, so that they can differ in little: expect an ensemble that costs nothing, and knows
    hardly more than one model.
    """

    summary = (
        "An ensemble of {members} classifiers on one backbone: their last linear layers differ, all else is shared."
    )

    def __init__(self, model: PreTrainedModel, num_members: int = 3, frozen: bool = True, seed: int = 0):
        check_is_classifier(model)
        check_is_count(num_members)
        super().__init__(copy.deepcopy(model), num_members=num_members, frozen=frozen, seed=seed)
        self.head = head_name(self.model)
        if frozen:
            self.model.requires_grad_(False)
        generator = torch.Generator("cpu").manual_seed(seed)
        std = getattr(model.config, "initializer_range", 0.02)

        def new(tensor: Tensor) -> Tensor:
            """(classes, ...) -> (members * classes, ...), zeros for a bias"""
            shape = (num_members * tensor.shape[0], *tensor.shape[1:])
            drawn = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64)
            return (std * drawn if tensor.dim() > 1 else torch.zeros_like(drawn)).to(tensor)

        self._replace_head(self.model, lambda head: changed(head, new))

    def member_logits(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits.unflatten(-1, (self.num_members, -1))

    def plain_model(self) -> PreTrainedModel:
        """The model with one head, the mean of all: its logits are the mean of the members'."""
        model = copy.deepcopy(self.model)
        self._replace_head(model, lambda head: mean_of_heads(head, self.num_members))
        return model

    def own_weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if name.startswith(f"model.{self.head}.")}

    def _replace_head(self, model: PreTrainedModel, make: Callable[[nn.Linear], nn.Linear]) -> None:
        replace(model, make, [model.get_submodule(self.head)])
