"""Several classifiers on one backbone: the smallest Deep Ensemble."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .baseline import Baseline, check_is_classifier, check_is_count
from .layer_replacement import changed, head_name, mean_of_heads


class HeadEnsemble(Baseline):
    """A classifier with `num_members` new last linear layers in place of its own; everything else is shared.

    model: any classifier of Transformers; it is copied
    frozen: train the heads alone, each then as if it were the only one
    seed: for the new weights, drawn with the config's `initializer_range`

    All heads read the same features, so they differ little: the ensemble is free, and hardly better than one model.
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

        self.model.set_submodule(self.head, changed(self.model.get_submodule(self.head), new))

    def member_logits(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits.unflatten(-1, (self.num_members, -1))

    def plain_model(self) -> PreTrainedModel:
        """The model with one head, the mean of all: its logits are the mean of the members'."""
        model = copy.deepcopy(self.model)
        model.set_submodule(self.head, mean_of_heads(model.get_submodule(self.head), self.num_members))
        return model

    def own_weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if name.startswith(f"model.{self.head}.")}
