"""Reads or changes the outputs of heads, before the output projection."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydra_transformers.fusion.structure import attention_names
from hydra_transformers.pruning import prune_heads


Batches = list[dict[str, Tensor]]
# (layer, outputs) -> new outputs, or None to leave them; outputs are (rows, tokens, heads, head_dim).
Watch = Callable[[int, Tensor], Tensor | None]


def one_member(model: PreTrainedModel) -> PreTrainedModel:
    """A new one-member Hydra, at least in float32 and without gradients of weights."""
    hydra = prune_heads(model)
    hydra = hydra if hydra.dtype == torch.float64 else hydra.float()
    return hydra.eval().requires_grad_(False)


@contextmanager
def watched_heads(hydra: PreTrainedModel, watch: Watch) -> Iterator[None]:
    """Inside, `watch` is called with the head outputs of each layer of a one-member Hydra."""
    handles = []
    try:
        [names] = attention_names(hydra).values()
        for layer, name in enumerate(names):
            attention = hydra.get_submodule(name)
            if not attention.has_no_head:
                hook = partial(_changed, watch, layer, attention.head_dim)
                handles.append(attention.o_proj.register_forward_pre_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _changed(watch: Watch, layer: int, head_dim: int, _: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
    (heads,) = inputs  # (1, rows, tokens, width): the only member
    changed = watch(layer, heads[0].unflatten(-1, (-1, head_dim)))
    return None if changed is None else changed.flatten(-2).unsqueeze(0)
