"""Back from a one-member Hydra to a plain model of Transformers, by the rules that read backbones, inverted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.modeling_hydra import readers_of
from ..models.pretrained import with_key_bias_of_zeros
from .building import move_rows_of_heads, weights_to_come
from .packed_heads import heads_at, keys_of
from .reading import backbone_source, read_members
from .structure import Member, attention_names, outline, plain_config, tower_configs


Units = list[list[int | None]]  # by layer, the numbers of heads before pruning; None for one of zeros


def to_transformers(model: PreTrainedModel, fill_up: bool = False) -> PreTrainedModel:
    """A plain model of Transformers that answers as `model` does; `model` is left as it is.

    Its config has one number of heads for all layers, and in some families (ViT, DeiT, AST, BEiT, DINOv2, causal language models)
    their width. There all layers have to keep equally many heads, as `lowest_heads(scores, heads_per_layer=...)` leaves them, and
    equally many for each key and value head that several heads read. In the other families (DINOv3, BERT, RoBERTa, ELECTRA,
    ALBERT, MPNet, DeBERTa, DistilBERT, ModernBERT, CLIP, SigLIP, Wav2Vec2, HuBERT, WavLM, Whisper) the heads together
    are always as wide as the hidden size, so none may be missing.
    Other models are refused, or filled up.

    Args:
        model: a one-member Hydra; of a fused one pass `model.member(i)`. Its calibration stays behind. A family that is built
            from several (RoBERTa, XLM-RoBERTa, CamemBERT) comes back as the first.
        fill_up: put heads of zeros in place of missing ones, which changes no answer. Each layer is then as large
            as the largest, or, where the config cannot say so, as before pruning.
    """
    if not hasattr(model, "num_members"):
        raise TypeError(f"model is a {type(model).__name__}: pass a one-member Hydra, such as prune_heads returns")
    if model.num_members > 1:
        raise ValueError(f"model has {model.num_members} members, and a plain model is one: pass model.member(i)")
    if getattr(model.config, "predicts_variance", False):
        raise ValueError("model predicts variances, for which Transformers has no head: use it as a Hydra")
    cls = type(model)
    [member] = read_members(cls, model, cls.__name__)
    layout = _smallest_layout(cls, member, fill_up)
    with weights_to_come(next(iter(member.tensors.values()))):
        plain = _new_plain_model(cls, member.config, layout)
    parameters = dict(plain.named_parameters())
    weights = dict(_plain_weights(cls, _rearranged(cls, member, layout), parameters))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return plain.eval()


@dataclass(frozen=True)
class TowerLayout:
    """Which heads stand where in a tower of a plain model."""

    heads: Units
    heads_per_key: int

    def keys(self, layer: int, heads_per_key_before: int) -> list[int | None]:
        """The numbers of the key and value heads: each is the one that its query heads read."""
        heads = self.heads[layer]
        groups = [heads[start : start + self.heads_per_key] for start in range(0, len(heads), self.heads_per_key)]
        return [next((head // heads_per_key_before for head in group if head is not None), None) for group in groups]


Layout = dict[str, TowerLayout]


def _smallest_layout(cls: type, member: Member, fill_up: bool) -> Layout:
    """The layout of the smallest plain model that can hold the member; refuses one that needs zeros unless `fill_up`."""
    towers, plain_name = tower_configs(member.config), cls.backbone_classes[0].__name__
    instead = "pass fill_up=True for heads of zeros in place of the missing ones"
    kept_by_tower = {tower: [heads for [heads] in config.kept_heads] for tower, config in towers.items()}
    layout = {
        tower: TowerLayout(
            _in_place(kept_by_tower[tower], config.num_attention_heads), config.layer_spec.queries_per_key
        )
        for tower, config in towers.items()
    }
    for tower, config in towers.items():
        kept, total, per_key = kept_by_tower[tower], config.num_attention_heads, config.layer_spec.queries_per_key
        counts = [len(layer) for layer in kept]
        if len(set(counts)) > 1 and not fill_up:
            where = f" of the {tower} tower" if tower else ""
            raise ValueError(
                f"the layers{where} keep {', '.join(map(str, counts))} heads, and those of a plain {plain_name} equally many: "
                f"prune with lowest_heads(scores, heads_per_layer=...), or {instead}"
            )
        readers = {count for heads in kept for count in readers_of(heads, per_key)} or {per_key}
        if len(readers) > 1 and fill_up:
            continue  # each head stays beside those that read the same key
        if len(readers) > 1:
            raise ValueError(
                f"{' or '.join(map(str, sorted(readers)))} heads are left to read a key and value, and in a plain "
                f"{plain_name} equally many read each: prune as many heads of every group of {per_key}, or {instead}"
            )
        smaller = TowerLayout(_closed_up(kept, total), readers.pop())
        if _exists(cls, member, layout | {tower: smaller}):
            layout[tower] = smaller
        elif not fill_up:
            raise ValueError(
                f"a plain {plain_name} cannot have {max(counts)} of its {total} heads: its config has no head_dim that it "
                f"reads; {instead}"
            )
    return layout


def _in_place(kept: list[list[int]], total: int) -> Units:
    """Every unit where it was, with zeros between them."""
    present = [set(layer) for layer in kept]
    return [[number if number in layer else None for number in range(total)] for layer in present]


def _closed_up(kept: list[list[int]], total: int) -> Units:
    """Kept units one after the other, with zeros up to the largest layer. Where that keeps all, each stays in its place:
    MPNet's table of positions knows heads by their numbers."""
    most = max(map(len, kept))
    return _in_place(kept, total) if most == total else [[*layer, *[None] * (most - len(layer))] for layer in kept]


def _exists(cls: type, member: Member, layout: Layout) -> bool:
    """Whether there is a plain model with so many heads of this width in every layer."""
    try:
        with weights_to_come(torch.empty(0, device="meta")):
            plain = dict(_new_plain_model(cls, member.config, layout).named_parameters())
    except (StrictDataclassError, ValueError, ZeroDivisionError):
        return False
    for name, tensor in _rearranged(cls, member, layout).items():
        if any(
            part in name
            for part in (".attention.qkv_proj.", ".attention.o_proj.", ".mlp.fc", "relative_attention_bias.")
        ):
            theirs, transform = backbone_source(cls, name, plain)
            if transform(*(plain[each] for each in theirs)).shape != tensor.shape:
                return False
    return True


def _new_plain_model(cls: type, config: PreTrainedConfig, layout: Layout) -> PreTrainedModel:
    changes: dict[str, dict] = {tower: {} for tower in layout}
    for tower, own in tower_configs(config).items():
        heads = len(layout[tower].heads[0])
        if heads != own.num_attention_heads:
            changes[tower]["head_dim"] = own.layer_spec.head_dim or own.hidden_size // own.num_attention_heads
            changes[tower][own.attribute_map.get("num_attention_heads", "num_attention_heads")] = heads
        if hasattr(own, "num_key_value_heads"):
            changes[tower]["num_key_value_heads"] = len(layout[tower].keys(0, own.layer_spec.queries_per_key))
    plain_class, options = cls.backbone_classes[0], {}
    plain = plain_config(cls, config, changes)
    plain._attn_implementation = config._attn_implementation if plain_class._supports_sdpa else None
    if "add_pooling_layer" in signature(plain_class.__init__).parameters and hasattr(config, "add_pooling_layer"):
        options["add_pooling_layer"] = config.add_pooling_layer
    return plain_class(plain, **options)


def _rearranged(cls: type, member: Member, layout: Layout) -> dict[str, Tensor]:
    """The member's tensors with its heads where the layout has them."""
    tensors, empty = dict(member.tensors), outline(cls, member.config)
    for tower, names in attention_names(empty).items():
        for layer, name in enumerate(names):
            attention = empty.get_submodule(name)
            head_dim, per_key = attention.head_dim, attention.queries_per_key
            [own] = tower_configs(member.config)[tower].kept_heads[layer]
            heads = _positions(own, layout[tower].heads[layer])
            keys = _positions(keys_of(own, per_key), layout[tower].keys(layer, per_key))
            for parameter in (f"{name}.qkv_proj.weight", f"{name}.qkv_proj.bias"):
                if parameter in tensors:
                    query, rest = tensors[parameter].tensor_split([head_dim * len(own)])
                    tensors[parameter] = torch.cat(
                        [heads_at(query, heads, head_dim), heads_at(rest, keys, head_dim, 2)]
                    )
            tensors[f"{name}.o_proj.weight"] = heads_at(tensors[f"{name}.o_proj.weight"], heads, head_dim)
            move_rows_of_heads(tensors, name, heads, attention)
    return tensors


def _positions(kept: Sequence[int], numbers: Sequence[int | None]) -> list[int | None]:
    """Where the units with these numbers lie among those that are kept."""
    places = {number: place for place, number in enumerate(kept)}
    return [places.get(number) for number in numbers]


def _plain_weights(
    cls: type, tensors: Mapping[str, Tensor], plain: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each of the parameters `plain` of a plain model."""
    missing = set(plain)
    for name, tensor in tensors.items():
        theirs, transform = backbone_source(cls, name, plain)
        missing.difference_update(theirs)
        own = tensor[0] if name in cls.per_member_parameters else tensor
        yield from zip(theirs, _inverted(transform, own, [plain[each].shape for each in theirs], name), strict=True)
    if missing:
        raise ValueError(f"{cls.__name__} has nothing for {sorted(missing)[0]} of {cls.backbone_classes[0].__name__}")


def _inverted(
    transform: Callable[..., Tensor], tensor: Tensor, shapes: Sequence[torch.Size], name: str
) -> list[Tensor]:
    """Tensors of these shapes that `transform` turns into `tensor`: its parts, or itself and factors of one."""
    if transform is with_key_bias_of_zeros:
        query, _, value = tensor.tensor_split(3)
        return [query, value]
    factors = [tensor.new_ones(shape) for shape in shapes[1:]]
    forms = [tensor, tensor.t() if tensor.dim() == 2 else tensor, tensor.squeeze(0), tensor.unsqueeze(0)]
    if tensor.numel() == shapes[0].numel():
        forms.append(tensor.reshape(shapes[0]))
    guesses = [[form, *factors] for form in forms]
    if factors and sum(shape[0] for shape in shapes) == tensor.shape[0]:
        guesses.append(list(tensor.split([shape[0] for shape in shapes])))
    for guess in guesses:
        if [each.shape for each in guess] == list(shapes) and torch.equal(transform(*guess), tensor):
            return guess
    raise ValueError(f"the rule that reads {name} from a backbone cannot be inverted")
