"""Which part of a model a parameter belongs to, for every supported model and its Hydras."""

import math
import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import logging

from ..fusion.reading import backbone_names, backbone_source, projection_names
from ..fusion.structure import hydra_class_of, isinstance_by_name, outline, slots, without_weights
from ..model_info import is_baseline, is_peft_model, without_adapters
from ..models.auto import AutoHydra, closest, hydra_classes, is_hydra_class
from ..models.modeling_hydra import HydraAttention


logger = logging.get_logger(f"transformers.{__name__}")

# By the names of a Hydra's parameters; the first pattern that matches decides. BERT's LayerNorm of
# the embeddings is part of them, the LayerNorms of a head are part of the classifier, and so is
# everything else outside the layers.
PART_PATTERNS = {
    "embeddings": r"(^|\.)(embeddings|distance_embeddings|relative_attention_bias)\.",
    "attention": r"(^|\.)layers\.\d+\.attention(_scale)?\.",
    "mlp": r"(^|\.)layers\.\d+\.mlp(_scale)?\.",
    "layernorm": r"^(?!classifier\.|(.*\.)?head\.).*norm(\.|$)",
    "classifier": r"",
}
PARTS = tuple(PART_PATTERNS)

# What PEFT writes into the name of a parameter, beside the "base_model.model." in front of it.
ADAPTER_PARTS = re.compile(r"\.base_layer|\.modules_to_save\.\w+|\.original_module|\.lora_\w+(\.\w+)?(?=\.weight)")
LAYER = re.compile(r"(?P<tower>^|.*?\.)layers\.(?P<layer>\d+)\.")


@dataclass(frozen=True)
class Place:
    """Where a parameter lies.

    part: one of `PARTS`; "classifier" is all that follows the encoder: the classifier, BERT's
        pooler, CLIP's projections and its logit scale
    layers_to_end: layers to the end of the tower: 1 in the last layer, 0 behind it, infinite before
        the first
    layers_before: layers before this one: 0 in the first layer, infinite behind the last, -1 before
        the first
    depth: how many layers the tower has
    """

    part: str
    layers_to_end: float
    layers_before: float
    depth: int = 0


def places(model: nn.Module) -> dict[str, Place]:
    """Return, by name, the place of every parameter of `model`."""
    names = hydra_parameter_names(model)
    depths: dict[str, int] = {}  # by tower
    for ours in names.values():
        match = LAYER.match(ours)
        if match:
            tower = match["tower"]
            depths[tower] = max(depths.get(tower, 0), int(match["layer"]) + 1)
    return {name: _place(ours, depths) for name, ours in names.items()}


def hydra_parameter_names(model: nn.Module) -> dict[str, str]:
    """Return, by name, what each parameter of a model is called in a Hydra.

    model: a Hydra, a supported backbone, one with adapters, or a baseline around one
    """
    if is_peft_model(model):
        return _names_around_adapters(model)
    if is_baseline(model):
        return _names_around_baseline(model)
    names = [name for name, _ in model.named_parameters()]
    if is_hydra_class(type(model)):
        return {name: name for name in names}

    # A plain model: by the rules that read it into a Hydra
    hydra_class = hydra_class_of(model)
    known = {}
    if hydra_class is not None:
        for ours, of_backbone in backbone_names(hydra_class, model).items():
            known |= dict.fromkeys(of_backbone, ours)
        unused = [name for name in names if name not in known and name.startswith(hydra_class.unused_prefixes)]
        known |= {name: name for name in unused}
    for name in names:
        if name not in known:
            raise ValueError(
                f"{name} of {type(model).__name__} belongs to no part that is known here: pass a Hydra or one of "
                f"AutoHydra.supported(), such as {closest(type(model).__name__, AutoHydra.supported())}"
            )
    return {name: known[name] for name in names}


def _names_around_adapters(model: nn.Module) -> dict[str, str]:
    """Return the same for a `PeftModel`: adapters go by the module that they change."""
    inner = model.get_base_model()
    keys = {}
    for name, _ in model.named_parameters():
        keys[name] = ADAPTER_PARTS.sub("", name).removeprefix("base_model.model.")
    return _names_by_module(keys, without_weights(type(inner), inner.config))


def _names_around_baseline(model: nn.Module) -> dict[str, str]:
    """Return the same for a baseline: weights of its own go by the module that they belong to."""
    keys = {name: name.removeprefix("model.") for name, _ in model.named_parameters()}
    return _names_by_module(keys, without_weights(type(model.model), model.config))


def _names_by_module(keys: dict[str, str], inner: nn.Module) -> dict[str, str]:
    """Return the names in a Hydra of parameters around a model.

    A parameter that the model inside does not have goes by its module, and else by its own name.

    keys: the names of the parameters, and what they would be called in `inner`
    """
    known = hydra_parameter_names(inner)
    by_module = {name.rpartition(".")[0]: ours for name, ours in known.items()}
    names = {}
    for name, key in keys.items():
        module = key.rpartition(".")[0]
        names[name] = known.get(key) or by_module.get(module) or key
    return names


def _place(ours: str, depths: dict[str, int]) -> Place:
    """Return the place of a parameter by its name in a Hydra.

    depths: how many layers each tower has
    """
    part = _part_of(ours)
    match = LAYER.match(ours)
    if match:
        layer = int(match["layer"])
        depth = depths[match["tower"]]
        return Place(part, depth - layer, layer, depth)

    # Before or behind the layers. CLIP's vision tower also has a LayerNorm in front of its first.
    depth = _depth_of(ours, depths)
    is_before = part == "embeddings" or re.search(r"(^|\.)pre_layernorm", ours)
    if is_before:
        return Place(part, math.inf, -1, depth)
    return Place(part, 0, math.inf, depth)


def _part_of(ours: str) -> str:
    """Return the part that a parameter belongs to, one of `PARTS`."""
    matching = [part for part, pattern in PART_PATTERNS.items() if re.search(pattern, ours)]
    return matching[0]  # the last pattern matches all


def _depth_of(ours: str, depths: dict[str, int]) -> int:
    """Return how many layers the tower of a parameter outside them has, or the deepest tower."""
    for tower, depth in depths.items():
        if ours.startswith(tower):
            return depth
    return max(depths.values(), default=0)


def set_rates(
    optimizer: torch.optim.Optimizer, model: nn.Module, layer_decay: float, classifier_rate: float | None
) -> None:
    """Give layers and classifier their learning rates, in groups of their own; call it before any
    step.

    Args:
        layer_decay: What multiplies the rate from one layer to the one before it.
        classifier_rate: The rate of what follows the encoder, None for that of the last layer.
    """
    factors = {}
    if layer_decay != 1:
        try:
            factors = layer_factors(model, layer_decay)
        except ValueError as error:
            logger.warning(f"all layers get the same learning rate: {error}")
    classifier = set()
    if classifier_rate is not None:
        classifier = classifier_parameters(model)
    factor_of = {id(parameter): factors.get(name, 1.0) for name, parameter in model.named_parameters()}

    # Each group, which has a weight decay of its own, is split by the rates of its parameters.
    groups = []
    for group in optimizer.param_groups:
        by_rate: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            rate = group["lr"] * factor_of.get(id(parameter), 1.0)
            if id(parameter) in classifier:
                rate = classifier_rate
            by_rate.setdefault(rate, []).append(parameter)
        for rate, parameters in by_rate.items():
            groups.append({**group, "params": parameters, "lr": rate})
    optimizer.param_groups.clear()
    for group in groups:
        optimizer.add_param_group(group)


def layer_factors(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Return, by name, what multiplies the learning rate of each parameter.

    It is 1 in the last layer and behind it, `layer_decay` in the layer before, its square before
    that, and so on; least in the embeddings. Towers count their layers each by itself.
    """
    factors = {}
    for name, place in places(model).items():
        steps = max(place.layers_to_end - 1, 0)
        if math.isinf(place.layers_to_end):
            steps = place.depth
        factors[name] = layer_decay**steps
    return factors


def classifier_parameters(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter that follows the encoder. A pooler inside the encoder is a
    part of it."""
    inner = without_adapters(model)
    if is_baseline(model):
        inner = model.model
    model_class = type(inner)
    if not is_hydra_class(model_class):
        model_class = hydra_class_of(inner) or type(inner)
    prefix = getattr(model_class, "base_model_prefix", "")
    encoder = getattr(inner, prefix, None)
    if not isinstance(encoder, nn.Module):
        return set()
    inside = set(map(id, encoder.parameters()))
    return {id(parameter) for parameter in inner.parameters() if id(parameter) not in inside}


def decayed_by_another_name(hydra: nn.Module) -> list[str]:
    """Return the names of the weights that Trainer would spare from weight decay for a "bias" in
    their name here alone.

    Transformers' models call them otherwise, and they decay there: WavLM's table and gates of
    relative positions.
    """
    names = []
    for name, slot in slots(hydra):
        is_spared = "bias" in name and not name.endswith("bias")
        theirs, _ = backbone_source(type(hydra), slot.name, ())
        if is_spared and not any("bias" in their_name for their_name in theirs):
            names.append(name)
    return names


def kept_by_class(model: nn.Module) -> set[str]:
    """Return the names of parameters that a model's own class never trains: Whisper's positions."""
    made = outline(type(model), model.config)
    return {name for name, parameter in made.named_parameters() if not parameter.requires_grad}


def unused_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that no output depends on.

    They are those that no head reads, and in a layer without heads the empty weights and the norms
    of what the attention reads. They never get a gradient, and DDP would wait for it.
    """
    names = [name for name, _ in model.named_parameters()]
    empty = {name for name, parameter in model.named_parameters() if parameter.numel() == 0}

    norms = []
    for name in empty:
        layer = name.removesuffix(".attention.qkv_proj.weight")
        if layer != name and model.get_submodule(layer).norm_first:
            norms.append(f"{layer}.attention_norm.")
    idle = (*norms, *_parts_without_heads(model), *getattr(model, "unused_prefixes", ()))
    return empty | {name for name in names if name.startswith(idle)}


def _parts_without_heads(model: nn.Module) -> list[str]:
    """Return the names of the norms and maps of heads whose member keeps none in the layer."""
    names = []
    for name, attention in model.named_modules():
        if not isinstance_by_name(attention, HydraAttention):
            continue
        for member, width in enumerate(attention.widths):
            if width > 0:
                continue
            for part in ("query_norm", "key_norm", "bias_gate.maps"):
                # Where there is one member, its parts have no number.
                is_alone = len(attention.widths) == 1
                names.append(f"{name}.{part}." if is_alone else f"{name}.{part}.{member}.")
    return names


def layer_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """Return the dropouts on the outputs of attention and MLP inside the layers.

    Those on attention weights are not among them.
    """
    modules = dict(model.named_modules())
    queries = _names_of_queries()
    dropouts = []
    for name, module in modules.items():
        if not isinstance(module, nn.Dropout) or not re.search(r"(^|[._])layers?\.\d+\.", name):
            continue
        # In a module with queries it is on the attention weights, unless its name says otherwise.
        owner = modules[name.rpartition(".")[0]]
        is_by_queries = any(hasattr(owner, query) for query in queries)
        if not is_by_queries or name.endswith((".out_drop", ".output_dropout")):
            dropouts.append(module)
    return dropouts


def _names_of_queries() -> set[str]:
    """Return what the map of the queries is called, in its module, in all supported models."""
    names = set()
    for hydra_class in hydra_classes().values():
        for projections in projection_names(hydra_class):
            names.add(projections[0].rpartition(".")[2])
    return names
