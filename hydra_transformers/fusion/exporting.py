"""Back from a one-member Hydra to a plain model of Transformers: the rules by which backbones are read, the other way round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..models.configuration_hydra import HydraConfigMixin
from .building import default_dtype
from .reading import Member, backbone_source, read_members
from .structure import attention_names, outline, tower_configs


OWN_FIELDS = (
    *HydraConfigMixin.__annotations__,
    "add_pooling_layer",
    "custom_pipelines",
    "auto_map",
    "architectures",
    "model_type",
)

# By tower and layer, the places of a plain model's heads: which of the member's it takes, None for one of zeros.
Places = dict[str, list[list[int | None]]]


def to_transformers(model: PreTrainedModel, fill_up: bool = False) -> PreTrainedModel:
    """A plain model of Transformers that answers as `model` does, for every tool that takes one; `model` is left as it is.

    Its config says how many heads a layer has, once for all layers, and in some families (ViT, DeiT, DINOv2) how wide a head
    is. There all layers have to keep equally many heads, as `lowest_heads(scores, heads_per_layer=...)` leaves them. Families
    whose heads are always as wide together as the hidden size (BERT, RoBERTa, ELECTRA, DistilBERT, CLIP) cannot have fewer
    heads of the same width. What a plain model cannot be is refused with a sentence, or filled up.

    Args:
        model: a one-member Hydra; of a fused one pass `model.member(i)`. What `calibrate` added to its answers stays behind.
            A family that is built from several (RoBERTa, XLM-RoBERTa, CamemBERT) comes back as the first.
        fill_up: let heads of zeros stand in for missing ones. The answers stay the same, and every model can be exported; each
            layer is then as large as the largest, or, where a family has no width of heads, as before pruning.
    """
    if not hasattr(model, "num_members"):
        raise TypeError(f"model is a {type(model).__name__}: pass a one-member Hydra, such as prune_heads returns")
    if model.num_members > 1:
        raise ValueError(f"model has {model.num_members} members, and a plain model is one: pass model.member(i)")
    cls = type(model)
    member = next(read_members(cls, model, cls.__name__))
    places = _places(cls, member, fill_up)
    reference = next(iter(member.tensors.values()))
    with torch.device(reference.device), no_init_weights(), default_dtype(reference.dtype):
        plain = _new(cls, member.config, places)
    own = dict(plain.named_parameters())
    weights = dict(_plain_weights(cls, _rearranged(cls, member, places), own))
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    return plain.eval()


def _places(cls: type, member: Member, fill_up: bool) -> Places:
    """Where heads go in the smallest plain model that there is; refuses where `fill_up` would be needed."""
    name = cls.backbone_classes[0].__name__
    kept = {tower: [layer[0] for layer in config.kept_heads] for tower, config in tower_configs(member.config).items()}
    instead = "pass fill_up=True for heads of zeros in place of the missing ones"
    most = {tower: max(map(len, layers)) for tower, layers in kept.items()}
    for tower, layers in kept.items():
        if not fill_up and any(len(heads) != most[tower] for heads in layers):
            where = f" of the {tower} tower" if tower else ""
            raise ValueError(
                f"the layers{where} keep {', '.join(str(len(heads)) for heads in layers)} heads, and those of a plain {name} "
                f"equally many: prune with lowest_heads(scores, heads_per_layer=...), or {instead}"
            )
    narrow = {
        tower: [[*range(len(heads)), *[None] * (most[tower] - len(heads))] for heads in layers]
        for tower, layers in kept.items()
    }
    if _exists(cls, member, narrow):
        return narrow
    if not fill_up:
        tower = next(each for each in most if most[each] < tower_configs(member.config)[each].num_attention_heads)
        whole = tower_configs(member.config)[tower].num_attention_heads
        raise ValueError(
            f"a plain {name} cannot have {most[tower]} heads of the width of its {whole}: its config has no head_dim that it "
            f"reads; {instead}"
        )
    return {
        tower: [
            [heads.index(head) if head in heads else None for head in range(config.num_attention_heads)]
            for heads in kept[tower]
        ]
        for tower, config in tower_configs(member.config).items()
    }


def _exists(cls: type, member: Member, places: Places) -> bool:
    """Whether there is a plain model with so many heads of this width in every layer."""
    try:
        with torch.device("meta"), no_init_weights():
            plain = dict(_new(cls, member.config, places).named_parameters())
    except (StrictDataclassError, ValueError, ZeroDivisionError):
        return False
    tensors = _rearranged(cls, member, places)
    for name in tensors:
        if ".attention.qkv_proj." in name or ".attention.o_proj." in name:
            theirs, transform = backbone_source(cls, name, plain)
            if transform(*(plain[each] for each in theirs)).shape != tensors[name].shape:
                return False
    return True


def _new(cls: type, config: PreTrainedConfig, places: Places) -> PreTrainedModel:
    """A plain model for the heads of `places`, its weights yet to come."""
    plain_class = cls.backbone_classes[0]
    fields = config.to_dict()
    towers = {tower: fields[f"{tower}_config"] if tower else fields for tower in places}
    for tower, own in towers.items():
        of_tower, count = tower_configs(config)[tower], len(places[tower][0])
        if count != of_tower.num_attention_heads:
            own["head_dim"] = (
                getattr(of_tower, "head_dim", None) or of_tower.hidden_size // of_tower.num_attention_heads
            )
            own[of_tower.attribute_map.get("num_attention_heads", "num_attention_heads")] = count
    for own in (fields, *towers.values()):
        for name in OWN_FIELDS:
            own.pop(name, None)
    plain_config = plain_class.config_class(**fields)
    plain_config._attn_implementation = config._attn_implementation
    has_pooler = getattr(config, "add_pooling_layer", None)
    if has_pooler is None or "add_pooling_layer" not in signature(plain_class.__init__).parameters:
        return plain_class(plain_config)
    return plain_class(plain_config, add_pooling_layer=has_pooler)


def _rearranged(cls: type, member: Member, places: Places) -> dict[str, Tensor]:
    """The member's tensors with its heads at their `places`."""
    tensors, empty = dict(member.tensors), outline(cls, member.config)
    for tower, names in attention_names(empty).items():
        for name, of_layer in zip(names, places[tower], strict=True):
            for parameter, projections in (("qkv_proj.weight", 3), ("qkv_proj.bias", 3), ("o_proj.weight", 1)):
                if f"{name}.{parameter}" in tensors:
                    tensor, head_dim = tensors[f"{name}.{parameter}"], empty.get_submodule(name).head_dim
                    tensors[f"{name}.{parameter}"] = _heads_at(tensor, of_layer, head_dim, projections)
    return tensors


def _heads_at(tensor: Tensor, places: Sequence[int | None], head_dim: int, projections: int) -> Tensor:
    """Rows of heads in the order of `places`, with zeros for None: (projections * heads * head_dim, ...)"""
    heads = tensor.unflatten(0, (projections, -1, head_dim))
    heads = torch.cat([heads, heads.new_zeros(projections, 1, *heads.shape[2:])], dim=1)
    index = [heads.shape[1] - 1 if place is None else place for place in places]
    return heads.index_select(1, torch.tensor(index, dtype=torch.long, device=tensor.device)).flatten(0, 2)


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
    forms = [tensor, tensor.t() if tensor.dim() == 2 else tensor, tensor.squeeze(0)]
    guesses = [[form, *factors] for form in forms]
    if others and tensor.shape[0] % len(shapes) == 0:
        guesses.append(list(tensor.chunk(len(shapes))))
    for guess in guesses:
        if [each.shape for each in guess] == list(shapes) and torch.equal(transform(*guess), tensor):
            return guess
    raise ValueError(f"the rule by which {name} is read from a backbone cannot be turned round")
