"""LoRA through PEFT, on the grouped weights of Hydras and on plain backbones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from ..models.attention import HydraAttention


if TYPE_CHECKING:
    from peft import LoraConfig


# The attention's projections as Hydras name them, and as each plain backbone does.
HYDRA_PARAMETERS = {target: f".attention.{target}_proj.weight" for target in "qkvo"}
BACKBONE_MODULES = {
    "vit": {target: f"attention.{target}_proj" for target in "qkvo"},
    "bert": {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
    },
    "clip": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj"},
}


def lora_config(
    model: nn.Module, r: int = 8, targets: Sequence[str] = ("q", "v"), lora_alpha: float | None = None, **options
) -> "LoraConfig":
    """A `LoraConfig` for the attention of `model`: `peft.get_peft_model(model, lora_config(model))`.

    model: a member, a fused Hydra, or a plain ViT, BERT or CLIP model
    r: the rank; the paper's LoRA ensembles have r=4 and lora_alpha=8
    targets: the projections that get an adapter, of "q", "k", "v" and "o"
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

    targets = tuple(targets)
    unknown = [target for target in targets if target not in HYDRA_PARAMETERS]
    if unknown or not targets:
        raise ValueError(f"targets has {unknown or 'no projection'}: choose from {', '.join(HYDRA_PARAMETERS)}")
    if any(isinstance(module, HydraAttention) for module in model.modules()):
        refused = [name for name in ("lora_dropout", "use_dora") if options.get(name)]
        if refused:
            raise ValueError(
                f"{refused[0]} does not work on the grouped weights of {type(model).__name__}: leave it out"
            )
        where = {"target_modules": [], "target_parameters": _hydra_parameters(model, targets)}
    else:
        names = _backbone_modules(model)
        where = {"target_modules": [names[target] for target in targets]}
    if hasattr(model, "classifier"):
        where["modules_to_save"] = ["classifier"]
    return LoraConfig(r=r, lora_alpha=2 * r if lora_alpha is None else lora_alpha, **where | options)


def _hydra_parameters(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the grouped weights; one that has lost all its heads can have no adapter."""
    endings = tuple(HYDRA_PARAMETERS[target] for target in targets)
    return [name for name, weight in model.named_parameters() if name.endswith(endings) and weight.numel() > 0]


def _backbone_modules(model: nn.Module) -> dict[str, str]:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in BACKBONE_MODULES:
        raise ValueError(
            f"model is a {type(model).__name__} ({model_type}): pass a ViT, BERT or CLIP model, or a Hydra made from one"
        )
    return BACKBONE_MODULES[model_type]
