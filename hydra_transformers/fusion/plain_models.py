"""Back from a one-member Hydra to a plain model of Transformers, by the rules that read backbones,
inverted."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.backbone_rules import with_key_bias_of_zeros
from ..models.rotary_attention import queries_per_kv_head
from .building import empty_init_like, replace_heads
from .packed_heads import keys_of
from .probe import check_same_outputs
from .reading import backbone_source, read_members
from .structure import Member, attention_names, outline, plain_config, tower_configs


def to_transformers(model: PreTrainedModel, fill_up: bool = False) -> PreTrainedModel:
    """Convert a one-member Hydra to a plain model of Transformers with the same outputs; `model` is
    left as it is.

    A plain model has equally many heads in all layers, and equally many for each key and value
    head. Only the configs of some families (ViT, DeiT, AST, BEiT, DINOv2, causal language models)
    can say that there are fewer of the same width. What does not fit raises, or is filled up.

    Args:
        model (`PreTrainedModel`): a Hydra with one member; of a fused one pass `model.member(i)`.
            Its calibration stays behind. A family that is built from several (RoBERTa, XLM-RoBERTa,
            CamemBERT) comes back as the first.
        fill_up (`bool`, defaults to `False`): build a model of the backbone's size, with heads of
            zeros in place of those that were pruned. This fits every family and any heads.

    Returns:
        `PreTrainedModel`: a model of the backbone's class, in evaluation mode.
    """
    if getattr(model, "num_members", 0) != 1:
        raise ValueError(f"model is a {type(model).__name__}: pass a Hydra with one member, such as model.member(0)")
    cls = type(model)
    [member] = read_members(cls, model, cls.__name__)
    if fill_up:
        tensors = _with_heads_of_zeros(cls, member)
        changes = {}
    else:
        tensors = member.tensors
        changes = _fewer_heads(member.config)

    # A plain model, and its weights from ours.
    try:
        with empty_init_like(next(iter(member.tensors.values()))):
            plain = _new_plain_model(cls, member.config, changes)
        weights = {}
        if getattr(member.config, "layer_scale", True) is False:
            weights |= _factors_of_one(plain)
        weights |= _plain_weights(cls, tensors, dict(plain.named_parameters()))
    except (StrictDataclassError, ValueError, ZeroDivisionError) as error:
        if not any(changes.values()):
            raise
        raise ValueError(
            f"a plain {cls.backbone_classes[0].__name__} cannot have these heads ({error}): prune equally many in "
            "each layer of a family whose config has a head_dim, or pass fill_up=True for heads of zeros in place of "
            "the missing ones"
        ) from error
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    check_same_outputs(model, plain.eval(), "the plain model")
    return plain


def _fewer_heads(config: PreTrainedConfig) -> dict[str, dict]:
    """Return by tower the config fields of a plain model with as many heads as the first layer
    keeps; none where all layers keep all. Other layers do not fit where they keep another
    number."""
    changes = {}
    for tower, part in tower_configs(config).items():
        per_key = part.queries_per_key
        kept = [heads for [heads] in part.kept_heads]
        readers = set()
        for heads in kept:
            readers.update(queries_per_kv_head(heads, per_key))
        if len(readers) > 1:
            numbers = " or ".join(map(str, sorted(readers)))
            raise ValueError(
                f"{numbers} heads are left to read a key and value, and in a plain model equally many read each: "
                f"prune as many heads of every group of {per_key}, or pass fill_up=True"
            )
        changes[tower] = {}
        if any(len(heads) < part.num_attention_heads for heads in kept):
            name = part.attribute_map.get("num_attention_heads", "num_attention_heads")
            head_dim = part.layer_spec.head_dim or part.hidden_size // part.num_attention_heads
            changes[tower] = {name: len(kept[0]), "head_dim": head_dim}
            if hasattr(part, "num_key_value_heads"):
                changes[tower]["num_key_value_heads"] = len(keys_of(kept[0], per_key))
    return changes


def _with_heads_of_zeros(cls: type, member: Member) -> dict[str, Tensor]:
    """Return the member's tensors with every head where it was in the backbone, and zeros in place
    of the others."""
    tensors = dict(member.tensors)
    empty = outline(cls, member.config)
    for tower, names in attention_names(empty).items():
        config = tower_configs(member.config)[tower]
        for name, [kept] in zip(names, config.kept_heads, strict=True):
            attention = empty.get_submodule(name)
            replace_heads(tensors, name, attention, kept, range(config.num_attention_heads))
    return tensors


def _new_plain_model(cls: type, config: PreTrainedConfig, changes: Mapping[str, dict]) -> PreTrainedModel:
    """Make the plain model of a Hydra's config, with these changes by tower."""
    plain_class = cls.backbone_classes[0]
    plain = plain_config(cls, config, changes)
    plain._attn_implementation = None
    if plain_class._supports_sdpa:
        plain._attn_implementation = config._attn_implementation

    options = {}
    takes_pooler = "add_pooling_layer" in signature(plain_class.__init__).parameters
    if takes_pooler and hasattr(config, "add_pooling_layer"):
        options["add_pooling_layer"] = config.add_pooling_layer
    return plain_class(plain, **options)


def _factors_of_one(plain: PreTrainedModel) -> dict[str, Tensor]:
    """Return the LayerScale of a plain model whose maps have these factors folded in, by name."""
    factors = {}
    for name, parameter in plain.named_parameters():
        if re.search(r"layer_scale\d\.lambda1$|lambda_\d$", name):
            factors[name] = torch.ones_like(parameter)
    return factors


def _plain_weights(
    cls: type, tensors: Mapping[str, Tensor], plain: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each of the parameters `plain` of a plain model."""
    for name, tensor in tensors.items():
        theirs, transform = backbone_source(cls, name, plain)
        if name in cls.per_member_parameters:
            tensor = tensor[0]
        shapes = [plain[key].shape for key in theirs]
        yield from zip(theirs, _inverted(transform, tensor, shapes, name), strict=True)


def _inverted(
    transform: Callable[..., Tensor], tensor: Tensor, shapes: Sequence[torch.Size], name: str
) -> list[Tensor]:
    """Return tensors of these shapes that `transform` turns into `tensor`: its parts, or itself in
    another form."""
    if transform is with_key_bias_of_zeros:
        query, _, value = tensor.tensor_split(3)
        return [query, value]

    # What it may have been made from.
    guesses = []
    if len(shapes) == 1:
        guesses.append([tensor])
        if tensor.dim() == 2:
            guesses.append([tensor.t()])
        if tensor.numel() == shapes[0].numel():
            guesses.append([tensor.reshape(shapes[0])])
    else:
        lengths = [shape[0] for shape in shapes]
        if sum(lengths) == tensor.shape[0]:
            guesses.append(list(tensor.split(lengths)))

    # The guess that the rule turns into it.
    for guess in guesses:
        has_shapes = [part.shape for part in guess] == list(shapes)
        if has_shapes and torch.equal(transform(*guess), tensor):
            return guess
    raise ValueError(f"{name} of shape {tuple(tensor.shape)} does not fit")
