"""LoRA through PEFT, on the grouped weights of Hydras and on plain backbones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..fusion import projection_names
from ..models.auto import HYDRA_CLASSES, AutoHydra


if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


TARGETS = ("q", "k", "v", "o")
# The head of a classifier in Transformers: its last map, and what is new before that with it (DistilBERT, ModernBERT).
CLASSIFIERS = ("classifier", "score", "pre_classifier", "head")


def lora_config(
    model: nn.Module, r: int = 8, targets: Sequence[str] | None = None, lora_alpha: float | None = None, **options
) -> "LoraConfig":
    """A `LoraConfig` for the attention of `model`: `peft.get_peft_model(model, lora_config(model))`.

    model: a member, a fused Hydra, a supported model of Transformers, or another one whose modules `targets` names
    r: the rank; the paper's LoRA ensembles have r=4 and lora_alpha=8
    targets: the projections that get an adapter, of "q", "k", "v" and "o"; of a model of another kind the names of its
        modules. By default "q" and "v"; where queries, keys and values are one weight, as in Hydras and in ModernBERT, "q",
        "k" and "v"
    lora_alpha: the scale of the adapters times r, 2 * r by default
    options: further arguments of `LoraConfig`

    A classifier is trained whole and saved with the adapters (`modules_to_save`), as it is one per member already.

    A Hydra's weights hold the members' rows below each other, so in W + B A each member has its own rows of B (they
    belong to that member alone: members do not mix) while A, the directions that are read, is shared by the members of
    a layer. PEFT knows neither dropout nor DoRA for such weights.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("lora_config() needs peft: pip install peft") from error

    is_hydra, projections = hasattr(type(model), "backbone_rules"), _projections_of(model)
    if targets is None:
        targets = ("q", "k", "v") if is_hydra or _is_joint(projections) else ("q", "v")
    targets = tuple(targets)
    if not targets:
        raise ValueError(f"targets has no projection: choose from {', '.join(TARGETS)}")
    if is_hydra:
        _check_targets(targets)
        refused = [name for name in ("lora_dropout", "use_dora") if options.get(name)]
        if refused:
            raise ValueError(
                f"{refused[0]} does not work on the grouped weights of {type(model).__name__}: leave it out"
            )
        where = {"target_modules": [], "target_parameters": _hydra_parameters(model, targets)}
    else:
        where = {"target_modules": _backbone_modules(model, projections, targets)}
    heads = [name for name in CLASSIFIERS if hasattr(model, name)]
    if heads:
        where["modules_to_save"] = heads
    return LoraConfig(r=r, lora_alpha=2 * r if lora_alpha is None else lora_alpha, **where | options)


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is a `PeftModel`; peft need not be installed to ask."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_settings(model: "PeftModel") -> dict[str, Any]:
    """The config of the active adapter as plain values, the same in every process and for every version of PEFT."""
    settings = model.peft_config[model.active_adapter].to_dict()
    settings.pop("peft_version", None)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def _hydra_parameters(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the grouped weights; one that has lost all its heads can have no adapter."""
    joint = _check_joint(targets, "a Hydra")
    endings = (".attention.qkv_proj.weight",) * bool(joint) + (".attention.o_proj.weight",) * ("o" in targets)
    return [name for name, weight in model.named_parameters() if name.endswith(endings) and weight.numel() > 0]


def _check_joint(targets: tuple[str, ...], whose: str) -> list[str]:
    """Those of `targets` that are queries, keys and values, where these are one weight: all of them or none."""
    joint = [target for target in "qkv" if target in targets]
    if len(joint) not in (0, 3):
        raise ValueError(
            f"targets has {joint}: queries, keys and values of {whose} are one weight, name all three or none of them"
        )
    return joint


def _projections_of(model: nn.Module) -> dict[str, str]:
    """By target, how the names of a plain model's projections end; empty where the model is of another kind."""
    names = [f".{name}" for name, _ in model.named_modules()]
    hydra_class = next((hydra for backbone, hydra in HYDRA_CLASSES.items() if isinstance(model, backbone)), None)
    for names_of_version in () if hydra_class is None else projection_names(hydra_class):
        endings = dict(zip(TARGETS, names_of_version, strict=True))
        if all(any(name.endswith(f".{ending}") for name in names) for ending in endings.values()):
            return endings
    return {}


def _is_joint(projections: dict[str, str]) -> bool:
    """Whether queries, keys and values are one weight."""
    return bool(projections) and projections["q"] == projections["k"]


def _backbone_modules(model: nn.Module, projections: dict[str, str], targets: tuple[str, ...]) -> list[str]:
    """Names of the projections in a plain model, as PEFT takes them: the ends of module names."""
    names = [f".{name}" for name, _ in model.named_modules()]
    if projections and not set(targets) - set(TARGETS):
        if _is_joint(projections):
            _check_joint(targets, f"a {type(model).__name__}")
        return list(dict.fromkeys(projections[target] for target in targets))
    missing = [target for target in targets if not any(name.endswith(f".{target}") for name in names)]
    if missing:
        raise ValueError(
            f"model is a {type(model).__name__}, which has no module called {missing[0]!r}: pass as targets the names "
            f"of its own modules; those of Hydras and of {', '.join(AutoHydra.supported())} are {', '.join(TARGETS)}"
        )
    return list(targets)


def _check_targets(targets: tuple[str, ...]) -> None:
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise ValueError(f"targets has {unknown}: choose from {', '.join(TARGETS)}")
