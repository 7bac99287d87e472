"""What every Hydra model has: where its weights lie in a backbone, and its constructors."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from transformers import PreTrainedModel

from .checkpoints import CheckpointMixin
from .configuration_hydra import SHARED_PARTS


@dataclass(frozen=True)
class Rule:
    """Where parameters of a one-member Hydra are found in a backbone.

    ours, theirs: names with `*` for what both have in their places, the number of the layer for example. Of several of
        theirs, `transform` makes one tensor
    transform: from theirs to ours; by default they are the same
    """

    ours: str
    theirs: str | tuple[str, ...]
    transform: Callable[..., torch.Tensor] = lambda tensor: tensor


def attention_rules(theirs: str, projections: Sequence[str], scale: str | None = None) -> tuple[Rule, ...]:
    """The rules for a layer's attention.

    theirs: the name of one of its projections, with `*` for the number of the layer and `{}` for
    projections: the four names of query, key, value and output
    scale: the name of the factor on the attention's result, where a family has one: it becomes part of the output
    """
    query, key, value, output = (theirs.format(projection) for projection in projections)
    factor = () if scale is None else (scale,)
    return (
        Rule("layers.*.attention.qkv_proj.*", (f"{query}.*", f"{key}.*", f"{value}.*"), lambda *qkv: torch.cat(qkv)),
        Rule("layers.*.attention.o_proj.weight", (f"{output}.weight", *factor), lambda *weight: scaled(*weight).t()),
        Rule("layers.*.attention.o_proj.bias", (f"{output}.bias", *factor), lambda *bias: scaled(*bias).unsqueeze(0)),
    )


def scaled(tensor: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """A linear map's weight or bias with a factor on each of its outputs."""
    if scale is None:
        return tensor
    return tensor * (scale.unsqueeze(1) if tensor.dim() == 2 else scale)


class HydraModelMixin(CheckpointMixin):
    """`from_backbone`, `from_pruned_members` and `member` for every Hydra model.

    A model family sets
    - `backbone_types`: the `model_type` of the Transformers models it is built from, and `backbone_classes` their classes,
    - `backbone_rules`: where parameters are found whose names or shapes differ from the backbone's; of several rules for
      one parameter, the first whose names the backbone has,
    - `architecture`: its name, as people call it,
    - `per_member_parameters`: bare parameters with one row per member,
    - `is_base_model`: on the class without a head, which then takes what it needs from a model with one.
    """

    backbone_types: tuple[str, ...] = ()
    backbone_classes: tuple[type, ...] = ()
    backbone_rules: tuple[Rule, ...] = ()
    per_member_parameters: tuple[str, ...] = ()
    is_base_model: bool = False

    @property
    def num_members(self) -> int:
        return self.config.num_members

    @classmethod
    def from_backbone(cls, model: PreTrainedModel, heads_to_prune: dict | None = None) -> PreTrainedModel:
        """A one-member Hydra from a Transformers model, with `heads_to_prune` cut out.

        model: the backbone, or a one-member Hydra to prune further; it is left as it is
        heads_to_prune: `{layer: [heads]}`; for CLIP `{"vision": {layer: [heads]}, "text": {layer: [heads]}}`
        """
        return fusion().from_backbone(cls, model, heads_to_prune)

    @classmethod
    def from_pruned_members(
        cls, members: Sequence[PreTrainedModel], shared: Sequence[str] = SHARED_PARTS
    ) -> PreTrainedModel:
        """Fuses members into one Hydra.

        members: one-member Hydras, Hydras (their members are taken apart), or Transformers models, whole or with
            their q, k, v and output projections sliced; all from one backbone. They are left as they are
        shared: the parts that become the mean over the members, of "embeddings", "layernorm" and "mlp"; with `()`
            nothing is merged and the Hydra is exactly the ensemble of the members
        """
        return fusion().from_pruned_members(cls, members, shared)

    def member(self, index: int) -> PreTrainedModel:
        """Member `index` as a one-member Hydra of its own; shared parts are copied into it."""
        return fusion().member(self, index)


def fusion() -> ModuleType:
    """What builds models, in the installed package: running a model does not need it, so it is not shipped."""
    try:
        return importlib.import_module("hydra_transformers.fusion")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "hydra_transformers":
            raise
        raise ImportError(
            "building a Hydra or taking one apart needs the package hydra_transformers, which is not installed here or "
            "too old: pip install --upgrade hydra_transformers"
        ) from error
