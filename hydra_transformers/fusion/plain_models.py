"""Back from a one-member Hydra to a plain model of Transformers, by the rules that read backbones, inverted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.backbone_rules import with_key_bias_of_zeros
from .building import empty_init_like, replace_heads
from .probe import check_same_outputs
from .reading import backbone_source, read_members
from .structure import Member, attention_names, outline, plain_config, tower_configs


def to_transformers(model: PreTrainedModel) -> PreTrainedModel:
    """Converts a one-member Hydra to a plain model of Transformers with the same outputs; `model` is left as it is.

    A plain model has equally many heads in all layers: heads of zeros take the places of those that were pruned, so it has the
    backbone's size.

    Args:
        model (`PreTrainedModel`): a Hydra with one member; of a fused one pass `model.member(i)`. Its calibration stays
            behind. A family that is built from several (RoBERTa, XLM-RoBERTa, CamemBERT) comes back as the first.

    Returns:
        `PreTrainedModel`: a model of the backbone's class, in evaluation mode.
    """
    if getattr(model, "num_members", 0) != 1:
        raise ValueError(f"model is a {type(model).__name__}: pass a Hydra with one member, such as model.member(0)")
    cls = type(model)
    [member] = read_members(cls, model, cls.__name__)
    with empty_init_like(next(iter(member.tensors.values()))):
        plain = _new_plain_model(cls, member.config)
    tensors = _with_heads_of_zeros(cls, member)
    weights = dict(_plain_weights(cls, tensors, dict(plain.named_parameters())))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    check_same_outputs(model, plain.eval(), "the plain model")
    return plain


def _with_heads_of_zeros(cls: type, member: Member) -> dict[str, Tensor]:
    """The member's tensors with every head where it was in the backbone, and zeros in place of the others."""
    tensors, empty = dict(member.tensors), outline(cls, member.config)
    for tower, names in attention_names(empty).items():
        config = tower_configs(member.config)[tower]
        for name, [kept] in zip(names, config.kept_heads, strict=True):
            replace_heads(tensors, name, empty.get_submodule(name), kept, range(config.num_attention_heads))
    return tensors


def _new_plain_model(cls: type, config: PreTrainedConfig) -> PreTrainedModel:
    plain_class, options = cls.backbone_classes[0], {}
    plain = plain_config(cls, config)
    plain._attn_implementation = config._attn_implementation if plain_class._supports_sdpa else None
    if "add_pooling_layer" in signature(plain_class.__init__).parameters and hasattr(config, "add_pooling_layer"):
        options["add_pooling_layer"] = config.add_pooling_layer
    return plain_class(plain, **options)


def _plain_weights(
    cls: type, tensors: Mapping[str, Tensor], plain: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each of the parameters `plain` of a plain model."""
    for name, tensor in tensors.items():
        theirs, transform = backbone_source(cls, name, plain)
        tensor = tensor[0] if name in cls.per_member_parameters else tensor
        yield from zip(theirs, _inverted(transform, tensor, [plain[each].shape for each in theirs], name), strict=True)


def _inverted(
    transform: Callable[..., Tensor], tensor: Tensor, shapes: Sequence[torch.Size], name: str
) -> list[Tensor]:
    """Tensors of these shapes that `transform` turns into `tensor`: its parts, or itself and factors of one."""
    if transform is with_key_bias_of_zeros:
        query, _, value = tensor.tensor_split(3)
        return [query, value]
    factors = [tensor.new_ones(shape) for shape in shapes[1:]]
    forms = [tensor, tensor.t() if tensor.dim() == 2 else tensor]
    if tensor.numel() == shapes[0].numel():
        forms.append(tensor.reshape(shapes[0]))
    guesses = [[form, *factors] for form in forms]
    if factors and sum(shape[0] for shape in shapes) == tensor.shape[0]:
        guesses.append(list(tensor.split([shape[0] for shape in shapes])))
    for guess in guesses:
        if [each.shape for each in guess] == list(shapes) and torch.equal(transform(*guess), tensor):
            return guess
    raise ValueError(f"{name} of shape {tuple(tensor.shape)} does not fit")
