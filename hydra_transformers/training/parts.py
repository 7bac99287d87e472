"""Which part of a transformer a parameter belongs to, for ViT, BERT and CLIP and their Hydras alike."""

import math
import re
from dataclasses import dataclass

from torch import nn


# The first pattern that matches a parameter's name decides; BERT's LayerNorm of the embeddings is part of them.
PART_PATTERNS = {
    "embeddings": r"(^|\.)embeddings\.",
    "layernorm": r"(?i:layer_?norm|layrnorm)",
    "attention": r"(^|\.)layers?\.\d+\.(attention|self_attn)\.",
    "mlp": r"(^|\.)layers?\.\d+\.(mlp|intermediate|output)\.",
    "classifier": r"(^|\.)(classifier|pooler|visual_projection|text_projection|logit_scale)(\.|$)",
}
PARTS = tuple(PART_PATTERNS)

LAYER = re.compile(r"(?P<tower>^|.*?\.)layers?\.(?P<layer>\d+)\.")


@dataclass(frozen=True)
class Place:
    """
    part: one of `PARTS`; "classifier" is all that follows the encoder: the classifier, BERT's pooler, CLIP's
        projections and its logit scale
    layers_to_end: how many layers there are from here to the end of the tower, this one counted: 1 in the last layer,
        0 behind it (a final LayerNorm), infinite before the first
    """

    part: str
    layers_to_end: float


def places(model: nn.Module) -> dict[str, Place]:
    """The place of every parameter of `model`, by name."""
    names = [name for name, _ in model.named_parameters()]
    parts = {name: _part(name, model) for name in names}
    depths: dict[str, int] = {}
    for name in names:
        if found := LAYER.match(name):
            depths[found["tower"]] = max(depths.get(found["tower"], 0), int(found["layer"]) + 1)
    return {name: Place(parts[name], _layers_to_end(name, parts[name], depths)) for name in names}


def _part(name: str, model: nn.Module) -> str:
    for part, pattern in PART_PATTERNS.items():
        if re.search(pattern, name):
            return part
    raise ValueError(
        f"{name} of {type(model).__name__} belongs to no part that is known here: pass a ViT, BERT or CLIP model, "
        "or a Hydra made from one"
    )


def _layers_to_end(name: str, part: str, depths: dict[str, int]) -> float:
    if found := LAYER.match(name):
        return depths[found["tower"]] - int(found["layer"])
    # CLIP's vision tower also has a LayerNorm in front of its first layer.
    is_before = part == "embeddings" or re.search(r"(^|\.)pre_lay", name)
    return math.inf if is_before else 0


def without_effect(model: nn.Module) -> set[str]:
    """Names of the parameters that change nothing, where a layer has lost all heads of all members.

    They are the weights that have no elements left and the LayerNorm in front of such an attention. Trained with DDP,
    they would be waited for: they never get a gradient.
    """
    empty = {name for name, parameter in model.named_parameters() if parameter.numel() == 0}
    norms = tuple(
        name.replace(".attention.q_proj.weight", ".layernorm_before.") for name in empty if "q_proj.weight" in name
    )
    return empty | {name for name, _ in model.named_parameters() if norms and name.startswith(norms)}


def layer_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The dropouts on the outputs of attention and MLP inside the layers; not those on attention weights."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and LAYER.match(name) and ".self." not in name
    ]
