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
from .structure import attention_names, slots, tower_configs, without_weights


# "classifier" is all that follows the encoder. Fusing leaves it and the attention to each member.
PARTS = (*SHARED_PARTS, "attention", "classifier")

Weights = dict[str, list[Tensor]]  # name of a parameter -> its tensor in each member


@contextmanager
def moved(weights: Iterable[Weights], t: float = 1.0) -> Iterator[None]:
    """Members' weights at (1 - t) · own + t · mean for a while; then they are again what they were, bit for bit.

    With t = 1 a Hydra that shares nothing answers as one that shares these parts.

    weights: as `weights_of` gives them
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


def check_equal_neurons(hydra: PreTrainedModel) -> None:
    """Refuses members that keep different neurons: their MLPs have no mean."""
    for config in tower_configs(hydra.config).values():
        for layer, masks in enumerate(config.kept_neurons or []):
            if len(set(masks)) > 1:
                raise ValueError(
                    f"members keep different neurons in layer {layer}, so their MLPs have no mean: pass members that keep the "
                    "same ones"
                )


def weights_of(hydra: PreTrainedModel, part: str) -> Weights:
    """The members' weights of one part in a Hydra that shares nothing, as views.

    There is no attention where members keep different heads; members with different neurons are refused.
    """
    if part == "mlp":
        check_equal_neurons(hydra)
    own = _names_in(hydra, part)
    attentions = tuple(f"{name}." for of_tower in attention_names(hydra).values() for name in of_tower)
    weights: Weights = {}
    for name, slot in slots(hydra):
        tensor = hydra.get_parameter(name).detach()
        if slot.member is not None and slot.name in own:
            weights.setdefault(slot.name, []).append(tensor)
        elif slot.rows is not None and part == ("attention" if name.startswith(attentions) else "classifier"):
            weights[name] = list(tensor.split(slot.rows))
    return weights if part != "attention" or has_equal_heads(hydra) else {}


def _names_in(hydra: PreTrainedModel, part: str) -> set[str]:
    """The parameters of a part that members have in modules of their own: those that they would have in common if they shared
    it, and of the classifier those that they never share."""
    if part == "attention":
        return set()
    config = copy.deepcopy(hydra.config)
    config.shared = [part] if part in SHARED_PARTS else list(SHARED_PARTS)
    found = [slot for _, slot in slots(without_weights(type(hydra), config))]
    if part in SHARED_PARTS:
        return {slot.name for slot in found if slot.member is None and slot.rows is None}
    return {slot.name for slot in found if slot.member is not None}


def weight_cosines(hydra: PreTrainedModel) -> dict[str, dict[str, float | None]]:
    """part -> pair of members ("0-1") -> cosine between their weights; None where one has nothing but zeros."""
    return {part: _cosines(weights, hydra.num_members) for part, weights in _encoder_weights(hydra).items()}


def difference_cosines(hydra: PreTrainedModel, pretrained: PreTrainedModel) -> dict[str, dict[str, float | None]]:
    """As `weight_cosines`, between what each member has learned since: its weights less the pre-trained ones."""
    start = _read_pretrained(hydra, pretrained)
    known, prefix = dict(start.named_parameters()), f"{hydra.base_model_prefix}."
    cosines = {}
    for part, weights in _encoder_weights(hydra).items():
        if part == "attention" and start.config.kept_heads != [[layer[0]] for layer in hydra.config.kept_heads]:
            continue
        learned = {
            name: _learned(name, of_members, known.get(name.removeprefix(prefix)))
            for name, of_members in weights.items()
        }
        cosines[part] = _cosines(learned, hydra.num_members)
    return cosines


def _encoder_weights(hydra: PreTrainedModel) -> dict[str, Weights]:
    weights = {part: weights_of(hydra, part) for part in PARTS if part != "classifier"}
    return {part: of_part for part, of_part in weights.items() if of_part}


def _read_pretrained(hydra: PreTrainedModel, pretrained: PreTrainedModel) -> PreTrainedModel:
    """The pre-trained encoder, with or without a head, as a one-member Hydra."""
    try:
        return type(hydra.base_model).from_backbone(pretrained)
    except (TypeError, ValueError) as error:
        raise type(error)(f"pretrained is not what these members were fine-tuned from: {error}") from error


def _learned(name: str, of_members: list[Tensor], start: Tensor | None) -> list[Tensor]:
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


def _cosines(weights: Weights, num_members: int) -> dict[str, float | None]:
    products = torch.zeros(num_members, num_members, dtype=torch.float64, device="cpu")
    for of_members in weights.values():
        rows = torch.stack([tensor.flatten().float() for tensor in of_members])
        products += (rows @ rows.t()).cpu()
    cosines = {}
    for a, b in itertools.combinations(range(num_members), 2):
        lengths = math.sqrt(products[a, a] * products[b, b])
        cosines[f"{a}-{b}"] = float(products[a, b]) / lengths if lengths else None
    return cosines
