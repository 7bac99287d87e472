"""Several classifiers on one backbone: the smallest Deep Ensemble."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .baseline import Baseline, check_is_classifier, check_is_count
from .layer_replacement import changed, head_name


class HeadEnsemble(Baseline):
    """A classifier with `num_members` new last linear layers in place of its own; everything else is shared.

    All heads read the same features, so they differ little: the ensemble is free, and hardly better than one model.

    Args:
        model (`PreTrainedModel`): any classifier of Transformers; it is copied.
        num_members (`int`, defaults to 3): how many heads.
        frozen (`bool`, defaults to `True`): train the heads alone, each then as if it were the only one.
        seed (`int`, defaults to 0): for the new weights, drawn with the config's `initializer_range`.
    """

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
