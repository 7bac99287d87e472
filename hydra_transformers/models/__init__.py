# ruff: noqa: F403
"""The Hydra models. What lies in this folder, but for `auto` and `families`, is what saved models take along to the Hub.

A family is imported when one of its names is asked for.
"""

from typing import TYPE_CHECKING, Any

from .families import MODEL_TYPES, public_class, register


if TYPE_CHECKING:
    from .auto import AutoHydra as AutoHydra
    from .configuration_hydra_albert import *
    from .configuration_hydra_ast import *
    from .configuration_hydra_beit import *
    from .configuration_hydra_bert import *
    from .configuration_hydra_clip import *
    from .configuration_hydra_deberta_v2 import *
    from .configuration_hydra_deit import *
    from .configuration_hydra_dinov2 import *
    from .configuration_hydra_dinov2_with_registers import *
    from .configuration_hydra_dinov3_vit import *
    from .configuration_hydra_distilbert import *
    from .configuration_hydra_electra import *
    from .configuration_hydra_gemma import *
    from .configuration_hydra_gemma3_text import *
    from .configuration_hydra_hubert import *
    from .configuration_hydra_llama import *
    from .configuration_hydra_modernbert import *
    from .configuration_hydra_mpnet import *
    from .configuration_hydra_qwen2 import *
    from .configuration_hydra_qwen3 import *
    from .configuration_hydra_roberta import *
    from .configuration_hydra_siglip import *
    from .configuration_hydra_vit import *
    from .configuration_hydra_wav2vec2 import *
    from .configuration_hydra_wavlm import *
    from .configuration_hydra_whisper import *
    from .modeling_hydra_albert import *
    from .modeling_hydra_ast import *
    from .modeling_hydra_beit import *
    from .modeling_hydra_bert import *
    from .modeling_hydra_clip import *
    from .modeling_hydra_deberta_v2 import *
    from .modeling_hydra_deit import *
    from .modeling_hydra_dinov2 import *
    from .modeling_hydra_dinov2_with_registers import *
    from .modeling_hydra_dinov3_vit import *
    from .modeling_hydra_distilbert import *
    from .modeling_hydra_electra import *
    from .modeling_hydra_gemma import *
    from .modeling_hydra_gemma3_text import *
    from .modeling_hydra_hubert import *
    from .modeling_hydra_llama import *
    from .modeling_hydra_modernbert import *
    from .modeling_hydra_mpnet import *
    from .modeling_hydra_qwen2 import *
    from .modeling_hydra_qwen3 import *
    from .modeling_hydra_roberta import *
    from .modeling_hydra_siglip import *
    from .modeling_hydra_vit import *
    from .modeling_hydra_wav2vec2 import *
    from .modeling_hydra_wavlm import *
    from .modeling_hydra_whisper import *

register()

__all__ = ["AutoHydra", *MODEL_TYPES]


def __getattr__(name: str) -> Any:
    if name == "AutoHydra":
        from .auto import AutoHydra

        return AutoHydra
    if name in MODEL_TYPES:
        return public_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
