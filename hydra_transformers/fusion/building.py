"""Members with fewer heads, and models that hold members."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ..models.configuration_hydra import SHARED_PARTS, KeptNeurons, mask_of_neurons, neurons_in
from ..models.modeling_hydra import HydraAttention
from .packed_heads import heads_at, qkv_rows
from .reading import Member
from .structure import Slot, attention_names, hydra_config, neurons_of_member, outline, slots, tower_configs


def prune(cls: type, member: Member, heads_to_prune: dict | None) -> Member:
    """The member with heads cut out: q, k, v and o lose the heads' rows, the config their numbers."""
    tensors, kept = dict(member.tensors), {}
    empty = outline(cls, member.config)
    before = {
        tower: [layer[0] for layer in config.kept_heads] for tower, config in tower_configs(member.config).items()
    }
    after = remaining_heads(before, heads_to_prune)
    for tower, names in attention_names(empty).items():
        kept[tower] = [[heads] for heads in after[tower]]
        for layer, name in enumerate(names):
            heads = before[tower][layer]
            if after[tower][layer] != heads:
                _keep_heads(tensors, name, heads, after[tower][layer], empty.get_submodule(name))
    neurons = neurons_of_member(member.config, 0)
    config = hydra_config(cls.config_class, member.config, kept, SHARED_PARTS, neurons=neurons)
    return Member(member.name, config, tensors)


def prune_neurons(cls: type, member: Member, neurons_to_prune: dict) -> Member:
    """The member with neurons of its MLPs cut out: the first map loses their rows (the gate's too), the second their columns."""
    tensors, empty = dict(member.tensors), outline(cls, member.config)
    kept_heads, before = {}, {}
    for tower, config in tower_configs(member.config).items():
        kept_heads[tower] = config.kept_heads
        masks = config.kept_neurons or [[mask_of_neurons(list(range(config.layer_spec.inner_size)))]] * len(
            config.kept_heads
        )
        before[tower] = [neurons_in(mask) for [mask] in masks]
    after = remaining_heads(before, neurons_to_prune, "neuron")
    for tower, names in attention_names(empty).items():
        for layer, name in enumerate(names):
            places = {neuron: place for place, neuron in enumerate(before[tower][layer])}
            if not after[tower][layer]:
                raise ValueError(f"neurons_to_prune[{layer}] names all neurons of the layer: leave at least one")
            if len(after[tower][layer]) < len(places):
                mlp = f"{name.removesuffix('attention')}mlp"
                _keep_neurons(
                    tensors, mlp, [places[neuron] for neuron in after[tower][layer]], empty.get_submodule(mlp)
                )
    neurons = {tower: [[mask_of_neurons(of_layer)] for of_layer in layers] for tower, layers in after.items()}
    config = hydra_config(cls.config_class, member.config, kept_heads, SHARED_PARTS, neurons=neurons)
    return Member(member.name, config, tensors)


def _keep_neurons(tensors: dict[str, torch.Tensor], mlp: str, positions: list[int], module: nn.Module) -> None:
    """Leaves only the neurons at `positions` of one MLP's tensors."""
    for parameter in ("fc1.weight", "fc1.bias"):
        parts = 2 if module.has_gate else 1
        if f"{mlp}.{parameter}" in tensors:
            tensors[f"{mlp}.{parameter}"] = heads_at(tensors[f"{mlp}.{parameter}"], positions, 1, parts)
    tensors[f"{mlp}.fc2.weight"] = heads_at(tensors[f"{mlp}.fc2.weight"].t(), positions, 1).t()


def remaining_heads(
    kept: dict[str, list[list[int]]], heads_to_prune: dict | None, what: str = "head"
) -> dict[str, list[list[int]]]:
    """Heads (or neurons) that are left per tower and layer once `heads_to_prune` (`{layer: [heads]}`, of two towers by tower)
    are gone from `kept`; `{"": ...}` where there are no towers."""
    by_tower = _by_tower(list(kept), heads_to_prune or {}, what)
    return {tower: keep_after_pruning(layers, by_tower.get(tower), what) for tower, layers in kept.items()}


def _by_tower(towers: list[str], heads_to_prune: dict, what: str) -> dict[str, dict]:
    if towers == [""]:
        return {"": heads_to_prune}
    if not isinstance(heads_to_prune, dict):
        raise TypeError(
            f"{what}s_to_prune is a {type(heads_to_prune).__name__}: pass {{'vision': {{...}}, 'text': {{...}}}}"
        )
    for tower in heads_to_prune:
        if tower not in towers:
            raise ValueError(f"{what}s_to_prune names {tower!r}: pass {{'vision': {{...}}, 'text': {{...}}}}")
    return heads_to_prune


def keep_after_pruning(
    kept: list[list[int]], heads_to_prune: dict[int, list[int]] | None, what: str = "head"
) -> list[list[int]]:
    """Heads (or neurons) that one member keeps per layer once `heads_to_prune` (`{layer: [heads]}`) are gone from `kept`."""
    if not isinstance(heads_to_prune, dict | None):
        raise TypeError(
            f"{what}s_to_prune is a {type(heads_to_prune).__name__}: pass one member's, {{layer: [{what}s]}}"
        )
    for layer, heads in (heads_to_prune or {}).items():
        if not str(layer).lstrip("-").isdigit():
            raise ValueError(f"{what}s_to_prune names {layer!r}: pass {{layer: [{what}s]}}, layers by their numbers")
        if isinstance(heads, (int, str)):
            raise ValueError(f"{what}s_to_prune[{layer}] is {heads!r}: pass a list of {what}s")
    heads_to_prune = {
        int(layer): [int(head) if hasattr(head, "__index__") else head for head in heads]
        for layer, heads in (heads_to_prune or {}).items()
    }
    for layer, heads in heads_to_prune.items():
        if not 0 <= layer < len(kept):
            raise ValueError(f"{what}s_to_prune names layer {layer}: the model has layers 0 to {len(kept) - 1}")
        existing = set(kept[layer])
        for head in heads:
            if not isinstance(head, int) or head not in existing:
                raise ValueError(
                    f"{what}s_to_prune[{layer}] names {what} {head!r}: the model has the {what}s {_shown(kept[layer])} in this layer"
                )
    gone = [set(heads_to_prune.get(layer, [])) for layer in range(len(kept))]
    return [[head for head in heads if head not in gone[layer]] for layer, heads in enumerate(kept)]


def _shown(numbers: list[int]) -> str:
    """All of a few numbers, the first and the last of many."""
    return str(numbers) if len(numbers) <= 64 else f"{numbers[0]} to {numbers[-1]} or some of them"


def _keep_heads(
    tensors: dict[str, torch.Tensor], name: str, before: list[int], after: list[int], attention: HydraAttention
) -> None:
    """Leaves of the heads `before` only those in `after` in the packed tensors of the attention called `name`."""
    for parameter in (f"{name}.qkv_proj.weight", f"{name}.qkv_proj.bias"):
        if parameter in tensors:
            tensors[parameter] = qkv_rows(tensors[parameter], before, after, attention)
    positions = [before.index(head) for head in after]
    tensors[f"{name}.o_proj.weight"] = heads_at(tensors[f"{name}.o_proj.weight"], positions, attention.head_dim)


def build(
    cls: type, members: list[Member], shared: Sequence[str], trunks: dict[str, int] | None = None
) -> PreTrainedModel:
    """A `cls` that holds the members: packed where each has its own rows, averaged where they share.

    trunks: by tower, how many leading layers are one for all members
    """
    towers = tower_configs(members[0].config)
    kept = {}
    for tower in towers:
        of_members = [tower_configs(member.config)[tower].kept_heads for member in members]
        layers = range(len(of_members[0]))
        kept[tower] = [[heads[layer][0] for heads in of_members] for layer in layers]
    if differ_in_vision_alone(members):
        kept["text"] = [layer[:1] for layer in kept["text"]]

    reference = next(iter(members[0].tensors.values()))
    config = hydra_config(cls.config_class, members[0].config, kept, shared, trunks, _common_neurons(members, kept))
    for part in (config, *tower_configs(config).values()):
        part.dtype = reference.dtype
    with weights_to_come(reference):
        model = cls(config)
    with torch.no_grad():
        for name, slot in slots(model):
            _fill(model.get_parameter(name), slot, members)
    return model.eval()


def _common_neurons(members: list[Member], kept: dict) -> dict[str, KeptNeurons | None]:
    """`kept_neurons[layer][member]` of members together, by tower, of as many as `kept` has there; None where all keep all."""
    found = {}
    for tower, config in tower_configs(members[0].config).items():
        own = [neurons_of_member(member.config, 0)[tower] for member in members][: len(kept[tower][0])]
        everything = [[mask_of_neurons(list(range(config.layer_spec.inner_size)))]] * len(kept[tower])
        found[tower] = None
        if any(each is not None for each in own):
            of_members = [everything if each is None else each for each in own]
            found[tower] = [[of_member[layer][0] for of_member in of_members] for layer in range(len(kept[tower]))]
    return found


def differ_in_vision_alone(members: list[Member]) -> bool:
    """Whether members of two towers are equal in the text tower, which then need exist only once."""
    first, others = members[0].tensors, members[1:]
    if "text" not in tower_configs(members[0].config):
        return False

    def are_equal(side: str) -> bool:
        names = [name for name in first if name.startswith(side)]
        return all(
            torch.equal(other.tensors[name].to(first[name].device), first[name]) for other in others for name in names
        )

    return are_equal("text_") and not are_equal("vis")


def _fill(parameter: torch.Tensor, slot: Slot, members: list[Member]) -> None:
    if slot.member is not None:
        parameter.copy_(members[slot.member].tensors[slot.name])
    elif slot.rows is not None:
        for rows, member in zip(parameter.split(slot.rows), members, strict=False):
            rows.copy_(member.tensors[slot.name])
    elif len(members) == 1:
        parameter.copy_(members[0].tensors[slot.name])
    else:
        # In float64, the mean of equal tensors is bit for bit that tensor.
        device = "cpu" if parameter.device.type == "mps" else parameter.device  # MPS has no float64
        total = torch.zeros(parameter.shape, dtype=torch.float64, device=device)
        for member in members:
            total += member.tensors[slot.name].to(device)
        parameter.copy_(total / len(members))


@contextmanager
def weights_to_come(like: torch.Tensor) -> Iterator[None]:
    """New models are of the dtype and on the device of `like`, their weights yet to come. Some classes draw them all the same:
    outside, random numbers go on as if nothing had been drawn."""
    own = torch.random.fork_rng(devices=[like.device] if like.is_cuda else [])
    with own, torch.device(like.device), no_init_weights(), default_dtype(like.dtype):
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
