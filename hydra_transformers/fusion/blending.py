"""Moves members' weights towards their mean, as fusing does, and compares them."""

import copy
import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.configuration_hydra import SHARED_PARTS
from .structure import attention_names, slots, without_weights


# "classifier" is all that follows the encoder. Fusing leaves it and the attention to each member.
PARTS = (*SHARED_PARTS, "attention", "classifier")

Weights = dict[str, list[Tensor]]  # name of a parameter -> its tensor in each member


@contextmanager
def moved(weights: Iterable[Weights], t: float = 1.0) -> Iterator[None]:
    """Sets members' weights to (1 - t) · own + t · mean inside the block, and restores them bit for bit.

    With t = 1 a Hydra that shares nothing answers as one that shares these parts.

    weights: as `weights_of` returns them
    """
    moving = [of_members for of_part in weights for of_members in of_part.values()]
    own = [[tensor.clone() for tensor in of_members] for of_members in moving]
    with torch.no_grad():
        for of_members in moving:
            wide = [(tensor.cpu() if tensor.device.type == "mps" else tensor).double() for tensor in of_members]
            mean = sum(wide) / len(wide)
            for tensor, each in zip(of_members, wide, strict=True):
                tensor.copy_(torch.lerp(each, mean, t))
    try:
        yield
    finally:
        with torch.no_grad():
            for of_members, before in zip(moving, own, strict=True):
                for tensor, was in zip(of_members, before, strict=True):
                    tensor.copy_(was)


def has_equal_heads(hydra: PreTrainedModel) -> bool:
    """Whether all members keep the same heads, so that their attention has a mean."""
    return all(heads == layer[0] for layer in hydra.config.kept_heads for heads in layer)


def weights_of(hydra: PreTrainedModel, part: str) -> Weights:
    """The members' weights of one part in a Hydra that shares nothing, as views.

    Empty for the attention of members with different heads.
    """
    if part == "attention" and not has_equal_heads(hydra):
        return {}
    own = _names_in(hydra, part)
    attentions = tuple(f"{name}." for of_tower in attention_names(hydra).values() for name in of_tower)
    weights: Weights = {}
    for name, slot in slots(hydra):
        tensor = hydra.get_parameter(name).detach()
        if slot.member is not None and slot.name in own:
            weights.setdefault(slot.name, []).append(tensor)
        elif slot.rows is not None and part == ("attention" if name.startswith(attentions) else "classifier"):
            weights[name] = list(tensor.split(slot.rows))
    return weights


def _names_in(hydra: PreTrainedModel, part: str) -> set[str]:
    """The parameters of a part that each member has in a module of its own: those that would be shared if the part were, and
    for the classifier those that are never shared."""
    if part == "attention":
        return set()
    config = copy.deepcopy(hydra.config)
    config.shared = [part] if part in SHARED_PARTS else list(SHARED_PARTS)
    found = [slot for _, slot in slots(without_weights(type(hydra), config))]
    if part in SHARED_PARTS:
        return {slot.name for slot in found if slot.is_shared}
    return {slot.name for slot in found if slot.member is not None}


Cosines = dict[str, float | None]  # pair of members ("0-1") -> cosine; None where one has only zeros


def weight_cosines(hydra: PreTrainedModel) -> dict[str, Cosines]:
    """By part, the cosines between the members' weights."""
    return {part: cosines(weights) for part, weights in _encoder_weights(hydra).items()}


def difference_cosines(hydra: PreTrainedModel, pretrained: PreTrainedModel) -> dict[str, Cosines]:
    """By part, the cosines between what members have learned: their weights less the pre-trained ones."""
    try:
        start = type(hydra.base_model).from_backbone(pretrained)
    except (TypeError, ValueError) as error:
        raise type(error)(f"pretrained is not what these members were fine-tuned from: {error}") from error
    known, prefix = dict(start.named_parameters()), f"{hydra.base_model_prefix}."
    found = {}
    for part, weights in _encoder_weights(hydra).items():
        if part == "attention" and start.config.kept_heads != [[layer[0]] for layer in hydra.config.kept_heads]:
            continue
        found[part] = cosines(
            {name: _differences(name, each, known.get(name.removeprefix(prefix))) for name, each in weights.items()}
        )
    return found


def _encoder_weights(hydra: PreTrainedModel) -> dict[str, Weights]:
    weights = {part: weights_of(hydra, part) for part in PARTS if part != "classifier"}
    return {part: of_part for part, of_part in weights.items() if of_part}


def _differences(name: str, of_members: list[Tensor], start: Tensor | None) -> list[Tensor]:
    """The members' tensors less the pre-trained one."""
    shape = of_members[0].shape
    if start is None or start.shape != shape:
        found = "is missing" if start is None else f"has the shape {tuple(start.shape)}"
        raise ValueError(
            f"{name} {found} in pretrained, in the members it has {tuple(shape)}: pass the model that they were "
            "fine-tuned from, or leave pretrained out"
        )
    start = start.detach().float()
    return [tensor.float() - start.to(tensor.device) for tensor in of_members]


def cosines(weights: Weights) -> Cosines:
    """The cosine between all weights of each pair of models."""
    products = 0.0
    for tensors in weights.values():
        rows = torch.stack([tensor.detach().flatten().float().to(tensors[0].device) for tensor in tensors])
        products = products + (rows @ rows.t()).cpu().double()
    found = {}
    for a, b in itertools.combinations(range(len(products) if weights else 0), 2):
        lengths = math.sqrt(products[a, a] * products[b, b])
        found[f"{a}-{b}"] = float(products[a, b]) / lengths if lengths else None
    return found
