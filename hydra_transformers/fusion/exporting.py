"""Back from a one-member Hydra to a plain model of Transformers: the rules by which backbones are read, the other way round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..models.configuration_hydra import HydraConfigMixin, neurons_in
from ..models.modeling_hydra import readers_of
from .building import weights_to_come
from .packed_heads import keys_of
from .reading import Member, backbone_source, read_members
from .structure import attention_names, fields_of_backbone, outline, tower_configs


# What a Hydra's config has beyond its backbone's.
FIELDS_OF_HYDRAS = (
    *HydraConfigMixin.__annotations__,
    "add_pooling_layer",
    "custom_pipelines",
    "auto_map",
    "architectures",
    "model_type",
)

# By tower and layer, the places of a plain model's heads or neurons: which of the member's it takes, None for one of zeros.
Places = dict[str, list[list[int | None]]]
# {"heads": places, "keys": places, "neurons": places}
Layout = dict[str, Places]


def to_transformers(model: PreTrainedModel, fill_up: bool = False) -> PreTrainedModel:
    """A plain model of Transformers that answers as `model` does, for every tool that takes one; `model` is left as it is.

    Its config says how many heads a layer has, once for all layers, and in some families (ViT, DeiT, AST, DINOv2, Llama,
    Qwen2, Gemma) how wide a head is. There all layers have to keep equally many heads, as `lowest_heads(scores, heads_per_layer=...)`
    leaves them, and where several heads read one key and value, equally many for each of these. Families
    whose heads are always as wide together as the hidden size (BERT, RoBERTa, ELECTRA, MPNet, DistilBERT, ModernBERT, CLIP, SigLIP)
    cannot have fewer heads of the same width. Neurons of MLPs likewise: equally many in each layer, where the config has an
    `intermediate_size` (all but DINOv2 and DistilBERT). What a plain model cannot be is refused with a sentence, or filled up.

    Args:
        model: a one-member Hydra; of a fused one pass `model.member(i)`. What `calibrate` added to its answers stays behind.
            A family that is built from several (RoBERTa, XLM-RoBERTa, CamemBERT) comes back as the first.
        fill_up: let heads and neurons of zeros stand in for missing ones. The answers stay the same, and every model can be
            exported; each layer is then as large as the largest, or, where the config cannot say so, as before pruning.
    """
    if not hasattr(model, "num_members"):
        raise TypeError(f"model is a {type(model).__name__}: pass a one-member Hydra, such as prune_heads returns")
    if model.num_members > 1:
        raise ValueError(f"model has {model.num_members} members, and a plain model is one: pass model.member(i)")
    cls = type(model)
    member = next(read_members(cls, model, cls.__name__))
    layout = _smallest_layout(cls, member, fill_up)
    reference = next(iter(member.tensors.values()))
    with weights_to_come(reference):
        plain = _new(cls, member.config, layout)
    own = dict(plain.named_parameters())
    weights = dict(_plain_weights(cls, _rearranged(cls, member, layout), own))
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    return plain.eval()


def _smallest_layout(cls: type, member: Member, fill_up: bool) -> Layout:
    """Where heads and neurons go in the smallest plain model that there is; refuses where `fill_up` would be needed."""
    units = {"heads": _heads_in(member.config), "neurons": _neurons_in(member.config)}
    layout = {what: _whole(kept, all_of) for what, (kept, all_of) in units.items()}
    layout["keys"] = _keys_in(member.config, layout["heads"], _queries_per_key(member.config))
    for what, (kept, all_of) in units.items():
        if not fill_up:
            _check_equal(cls, what, kept)
        narrow = layout | {what: _narrow(kept, all_of)}
        if what == "heads":
            left = _queries_left_per_key(cls, member.config, fill_up)
            if left is None:
                continue  # each head stays where it was, beside those that read the same key
            narrow["keys"] = _keys_in(member.config, narrow["heads"], left)
        if _exists(cls, member, narrow):
            layout = narrow
        elif not fill_up:
            most = {tower: max(map(len, layers)) for tower, layers in kept.items()}
            tower = next(each for each in most if most[each] < all_of[each])
            needed = "head_dim" if what == "heads" else "intermediate_size"
            raise ValueError(
                f"a plain {cls.backbone_classes[0].__name__} cannot have {most[tower]} of its {all_of[tower]} {what}: its config "
                f"has no {needed} that it reads; {_instead(what)}"
            )
    return layout


def _instead(what: str) -> str:
    return f"pass fill_up=True for {what} of zeros in place of the missing ones"


def _check_equal(cls: type, what: str, kept: dict[str, list[list[int]]]) -> None:
    for tower, layers in kept.items():
        counts = [len(of_layer) for of_layer in layers]
        if len(set(counts)) > 1:
            where = f" of the {tower} tower" if tower else ""
            raise ValueError(
                f"the layers{where} keep {', '.join(map(str, counts))} {what}, and those of a plain "
                f"{cls.backbone_classes[0].__name__} equally many: prune with lowest_{what}(scores, {what}_per_layer=...), or "
                f"{_instead(what)}"
            )


def _keys_in(config: PreTrainedConfig, heads: Places, queries_per_key: dict[str, int]) -> Places:
    """Where keys and values go in a plain model whose heads take these places: each is what its heads read.

    queries_per_key: by tower, how many heads of the plain model read one
    """
    kept, _ = _heads_in(config)
    found: Places = {tower: [] for tower in heads}
    for tower, layers in heads.items():
        before, after = _queries_per_key(config)[tower], queries_per_key[tower]
        for places, own in zip(layers, kept[tower], strict=True):
            groups = [places[start : start + after] for start in range(0, len(places), after)]
            read = [next((own[place] // before for place in group if place is not None), None) for group in groups]
            keys = keys_of(own, before)
            found[tower].append([None if key is None else keys.index(key) for key in read])
    return found


def _queries_per_key(config: PreTrainedConfig) -> dict[str, int]:
    """By tower, how many heads read one key and value before pruning."""
    return {tower: getattr(each.layer_spec, "queries_per_key", 1) for tower, each in tower_configs(config).items()}


def _queries_left_per_key(cls: type, config: PreTrainedConfig, fill_up: bool) -> dict[str, int] | None:
    """By tower, how many heads are left to read a key and value, where these are equally many; otherwise refuses, or None."""
    kept, _ = _heads_in(config)
    left = {}
    for tower, per_key in _queries_per_key(config).items():
        counts = {count for heads in kept[tower] for count in readers_of(heads, per_key)}
        if len(counts) > 1:
            if fill_up:
                return None
            raise ValueError(
                f"{' or '.join(map(str, sorted(counts)))} heads are left to read a key and value, and in a plain "
                f"{cls.backbone_classes[0].__name__} equally many read each: prune as many heads of every group of {per_key}, "
                f"or {_instead('heads')}"
            )
        left[tower] = counts.pop() if counts else per_key
    return left


def _heads_in(config: PreTrainedConfig) -> tuple[dict[str, list[list[int]]], dict[str, int]]:
    """By tower and layer the numbers of the heads that a member keeps, and by tower how many there were."""
    towers = tower_configs(config)
    kept = {tower: [layer[0] for layer in each.kept_heads] for tower, each in towers.items()}
    return kept, {tower: each.num_attention_heads for tower, each in towers.items()}


def _neurons_in(config: PreTrainedConfig) -> tuple[dict[str, list[list[int]]], dict[str, int]]:
    """The same of the neurons."""
    towers = tower_configs(config)
    all_of = {tower: each.layer_spec.inner_size for tower, each in towers.items()}
    kept = {
        tower: [list(range(all_of[tower]))] * each.num_hidden_layers
        if each.kept_neurons is None
        else [neurons_in(mask) for [mask] in each.kept_neurons]
        for tower, each in towers.items()
    }
    return kept, all_of


def _narrow(kept: dict[str, list[list[int]]], all_of: dict[str, int]) -> Places:
    """Those that are kept one after the other, with zeros up to the largest layer. In a tower whose largest layer keeps all they
    stay where they were: a head may be known by its number elsewhere (MPNet's table of positions)."""
    most, found = {tower: max(map(len, layers)) for tower, layers in kept.items()}, _whole(kept, all_of)
    for tower, layers in kept.items():
        if most[tower] < all_of[tower]:
            found[tower] = [[*range(len(of_layer)), *[None] * (most[tower] - len(of_layer))] for of_layer in layers]
    return found


def _whole(kept: dict[str, list[list[int]]], all_of: dict[str, int]) -> Places:
    """Those that are kept where they were, with zeros between them."""
    return {
        tower: [
            [place.get(number) for number in range(all_of[tower])]
            for place in ({number: at for at, number in enumerate(of_layer)} for of_layer in layers)
        ]
        for tower, layers in kept.items()
    }


def _exists(cls: type, member: Member, layout: Layout) -> bool:
    """Whether there is a plain model with so many heads of this width, and so many neurons, in every layer."""
    try:
        with torch.device("meta"), no_init_weights():
            plain = dict(_new(cls, member.config, layout).named_parameters())
    except (StrictDataclassError, ValueError, ZeroDivisionError):
        return False
    tensors = _rearranged(cls, member, layout)
    for name in tensors:
        if any(part in name for part in (".attention.qkv_proj.", ".attention.o_proj.", ".mlp.fc")):
            theirs, transform = backbone_source(cls, name, plain)
            if transform(*(plain[each] for each in theirs)).shape != tensors[name].shape:
                return False
    return True


def _new(cls: type, config: PreTrainedConfig, layout: Layout) -> PreTrainedModel:
    """A plain model for the heads and neurons of a layout, its weights yet to come."""
    plain_class = cls.backbone_classes[0]
    fields = config.to_dict()
    towers = {tower: fields[f"{tower}_config"] if tower else fields for tower in layout["heads"]}
    for tower, own in towers.items():
        of_tower = tower_configs(config)[tower]
        heads, neurons = (len(layout[what][tower][0]) for what in ("heads", "neurons"))
        if heads != of_tower.num_attention_heads:
            own["head_dim"] = of_tower.layer_spec.head_dim or of_tower.hidden_size // of_tower.num_attention_heads
            own[of_tower.attribute_map.get("num_attention_heads", "num_attention_heads")] = heads
        if hasattr(of_tower, "num_key_value_heads"):
            own["num_key_value_heads"] = len(layout["keys"][tower][0])
        if neurons != of_tower.layer_spec.inner_size:
            own["intermediate_size"] = neurons
    for own in (fields, *towers.values()):
        for name in FIELDS_OF_HYDRAS:
            own.pop(name, None)
    plain_config = plain_class.config_class(**fields_of_backbone(cls, fields))
    plain_config._attn_implementation = config._attn_implementation if plain_class._supports_sdpa else None
    has_pooler = getattr(config, "add_pooling_layer", None)
    if has_pooler is None or "add_pooling_layer" not in signature(plain_class.__init__).parameters:
        return plain_class(plain_config)
    return plain_class(plain_config, add_pooling_layer=has_pooler)


def _rearranged(cls: type, member: Member, layout: Layout) -> dict[str, Tensor]:
    """The member's tensors with its heads and neurons at their places."""
    tensors, empty = dict(member.tensors), outline(cls, member.config)

    def rearrange(name: str, places: Sequence[int | None], width: int, parts: int) -> None:
        if name in tensors:
            tensors[name] = _units_at(tensors[name], places, width, parts)

    for tower, names in attention_names(empty).items():
        for layer, name in enumerate(names):
            mlp, heads, keys, neurons = (
                f"{name.removesuffix('attention')}mlp",
                *(layout[what][tower][layer] for what in ("heads", "keys", "neurons")),
            )
            head_dim, parts = empty.get_submodule(name).head_dim, 2 if empty.get_submodule(mlp).has_gate else 1
            width = head_dim * len(tower_configs(member.config)[tower].kept_heads[layer][0])
            for kind in ("weight", "bias"):
                if (joint := f"{name}.qkv_proj.{kind}") in tensors:
                    query, rest = tensors[joint].tensor_split([width])
                    tensors[joint] = torch.cat(
                        [_units_at(query, heads, head_dim, 1), _units_at(rest, keys, head_dim, 2)]
                    )
                rearrange(f"{mlp}.fc1.{kind}", neurons, 1, parts)
            rearrange(f"{name}.o_proj.weight", heads, head_dim, 1)
            tensors[f"{mlp}.fc2.weight"] = _units_at(tensors[f"{mlp}.fc2.weight"].t(), neurons, 1, 1).t()
    return tensors


def _units_at(tensor: Tensor, places: Sequence[int | None], width: int, parts: int) -> Tensor:
    """Rows of heads or neurons in the order of `places`, with zeros for None: (parts * units * width, ...)"""
    units = tensor.unflatten(0, (parts, -1, width))
    units = torch.cat([units, units.new_zeros(parts, 1, *units.shape[2:])], dim=1)
    index = [units.shape[1] - 1 if place is None else place for place in places]
    return units.index_select(1, torch.tensor(index, dtype=torch.long, device=tensor.device)).flatten(0, 2)


def _plain_weights(
    cls: type, tensors: Mapping[str, Tensor], plain: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a plain model, of all of its parameters `plain`."""
    missing = set(plain)
    for name, tensor in tensors.items():
        theirs, transform = backbone_source(cls, name, plain)
        if name in cls.per_member_parameters:
            tensor = tensor[0]
        shapes = [plain[each].shape for each in theirs]
        missing.difference_update(theirs)
        yield from zip(theirs, _undone(transform, tensor, shapes, name), strict=True)
    if missing:
        raise ValueError(f"{cls.__name__} has nothing for {sorted(missing)[0]} of {cls.backbone_classes[0].__name__}")


def _undone(transform: Callable[..., Tensor], tensor: Tensor, shapes: Sequence[torch.Size], name: str) -> list[Tensor]:
    """Tensors of these shapes of which `transform` makes `tensor`: its parts, or itself with factors of one behind it."""
    others = shapes[1:]
    factors = [tensor.new_ones(shape) for shape in others]
    forms = [tensor, tensor.t() if tensor.dim() == 2 else tensor, tensor.squeeze(0), tensor.unsqueeze(0)]
    guesses = [[form, *factors] for form in forms]
    if others:
        rows = [shape[0] for shape in shapes]
        guesses += [list(tensor.split(rows))] if sum(rows) == tensor.shape[0] else []
    for guess in guesses:
        if [each.shape for each in guess] == list(shapes) and torch.equal(transform(*guess), tensor):
            return guess
    raise ValueError(f"the rule by which {name} is read from a backbone cannot be turned round")
