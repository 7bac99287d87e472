"""The Trainer callback that keeps pruned weights at zero."""

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..fusion.structure import is_a
from ..models.modeling_hydra import Grouped


class KeepZerosCallback(TrainerCallback):
    """Weights that are exactly zero when training begins are zero after every step: `Trainer(callbacks=[KeepZerosCallback()])`.

    For models that `oba_prune` made, and Hydras of them. It looks at the weights of linear and convolutional layers; biases, of
    which new models have zeros that shall train, are free.
    """

    def __init__(self):
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    def on_train_begin(self, args, state, control, model: nn.Module | None = None, **kwargs):
        if args.fsdp or args.deepspeed:
            raise ValueError(
                "KeepZerosCallback needs whole weights on every process: train without FSDP and DeepSpeed"
            )
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
        weights = [module.weight for module in model.modules() if isinstance(module, kinds) or is_a(module, Grouped)]
        self._kept = [(weight, weight.detach() == 0) for weight in weights if weight.requires_grad]

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, **kwargs):
        for weight, zeros in self._kept:
            weight.masked_fill_(zeros, 0)
