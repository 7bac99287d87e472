"""LoRA through PEFT, on the grouped weights of Hydras and on plain backbones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..fusion.reading import projection_names
from ..fusion.structure import hydra_class_of
from ..models.auto import is_hydra_class


if TYPE_CHECKING:
    from peft import LoraConfig


TARGETS = ("q", "k", "v", "o")
# Heads of classifiers in Transformers: the last map, and new layers before it, as in DistilBERT.
CLASSIFIERS = ("classifier", "score", "pre_classifier", "head", "projector")


def lora_config(
    model: nn.Module, r: int = 8, targets: Sequence[str] | None = None, lora_alpha: float | None = None, **options: Any
) -> "LoraConfig":
    """Return a `LoraConfig` for the attention of `model`.

    Use it as `peft.get_peft_model(model, lora_config(model))`.

    Args:
        model (`nn.Module`): a member, a fused Hydra, a model of Transformers, or another one whose
            modules `targets` names.
        r (`int`, defaults to 8): the rank; the paper's LoRA ensembles have r=4 and lora_alpha=8.
        targets (`Sequence[str]`, *optional*): the projections that get an adapter, of "q", "k", "v"
            and "o"; for another model the names of its modules. By default "q" and "v", or all of
            q, k and v where they are one weight, as in Hydras.
        lora_alpha (`float`, *optional*): the scale of the adapters times r, 2 * r by default.
        options (*optional*): further arguments of `LoraConfig`.

    A classifier is trained whole and saved with the adapters (`modules_to_save`), as each member
    has its own already.

    A Hydra's weights hold the members' rows below each other. In W + B A each member has its own
    rows of B, so members do not mix, while A, the directions that are read, is shared by the
    members of a layer. For such weights PEFT has neither dropout nor DoRA, and raises.
    """
    from peft import LoraConfig

    hydra_class = hydra_class_of(model)
    if not is_hydra_class(type(model)) and not getattr(hydra_class, "supports_lora_on_qkvo", True):
        raise ValueError(
            f"model is a {type(model).__name__}, whose attention reads weights without calling their modules, so that "
            "adapters would change nothing: pass AutoHydra.from_backbone(model)"
        )
    where: dict[str, Any]
    if is_hydra_class(type(model)):
        where = {"target_modules": [], "target_parameters": _grouped_weights(model, targets)}
    else:
        where = {"target_modules": _modules(model, targets)}

    heads = [name for name in CLASSIFIERS if hasattr(model, name)]
    if heads:
        where["modules_to_save"] = heads
    if lora_alpha is None:
        lora_alpha = 2 * r
    return LoraConfig(r=r, lora_alpha=lora_alpha, **where | options)


def _grouped_weights(hydra: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Return the names of a Hydra's weights that get an adapter."""
    if targets is None:
        targets = ("q", "k", "v")
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise ValueError(f"targets has {unknown}: choose from {', '.join(TARGETS)}")
    _check_are_together(hydra, targets)
    endings = []
    if "q" in targets:
        endings.append(".attention.qkv_proj.weight")
    if "o" in targets:
        endings.append(".attention.o_proj.weight")
    # A weight that has lost all its heads can have no adapter.
    weights = [name for name, weight in hydra.named_parameters() if weight.numel() > 0]
    return [name for name in weights if name.endswith(tuple(endings))]


def _modules(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Return the ends of the names of a plain model's modules that get an adapter."""
    projections = _projections_of(model)
    is_joint = bool(projections) and projections["q"] == projections["k"]
    if targets is None:
        targets = ("q", "k", "v") if is_joint else ("q", "v")
    targets = tuple(targets)
    are_known = all(target in TARGETS for target in targets)
    if is_joint and are_known:
        _check_are_together(model, targets)
    if projections and are_known:
        return list(dict.fromkeys(projections[target] for target in targets))

    # The names of the model's own modules
    for target in targets:
        if not _has_module(model, target):
            raise ValueError(
                f"model is a {type(model).__name__}, which has no module called {target!r}: pass as targets the names "
                f"of its own modules; those of Hydras and of all AutoHydra.supported() are {', '.join(TARGETS)}"
            )
    return list(targets)


def _check_are_together(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise for some of q, k and v, where they are one weight."""
    joint = [target for target in "qkv" if target in targets]
    if len(joint) not in (0, 3):
        raise ValueError(
            f"targets has {joint}, but q, k and v of {type(model).__name__} are one weight: "
            "name all three or none of them"
        )


def _projections_of(model: nn.Module) -> dict[str, str]:
    """Return, by target, the end of the names of a plain model's projections.

    Empty for a model that is not supported.
    """
    hydra_class = hydra_class_of(model)
    if hydra_class is None:
        return {}
    for names_of_version in projection_names(hydra_class):
        if all(_has_module(model, name) for name in names_of_version):
            return dict(zip(TARGETS, names_of_version, strict=True))
    return {}


def _has_module(model: nn.Module, ending: str) -> bool:
    return any(f".{name}".endswith(f".{ending}") for name, _ in model.named_modules())
