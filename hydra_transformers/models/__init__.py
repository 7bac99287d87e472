# ruff: noqa: F403
"""The Hydra models. Saved models take the files of this folder along to the Hub, but for `auto` and
`families`.

A family is imported when one of its names is asked for.
"""

from typing import TYPE_CHECKING, Any

from .families import MODEL_TYPES, public_class
from .families import register as register


if TYPE_CHECKING:
    from .auto import AutoHydra as AutoHydra
    from .configuration_hydra_ast import *
    from .configuration_hydra_beit import *
    from .configuration_hydra_bert import *
    from .configuration_hydra_deberta_v2 import *
    from .configuration_hydra_decoders import *
    from .configuration_hydra_deit import *
    from .configuration_hydra_dinov2 import *
    from .configuration_hydra_dinov3_vit import *
    from .configuration_hydra_modernbert import *
    from .configuration_hydra_mpnet import *
    from .configuration_hydra_towers import *
    from .configuration_hydra_vit import *
    from .configuration_hydra_waveforms import *
    from .modeling_hydra_ast import *
    from .modeling_hydra_beit import *
    from .modeling_hydra_bert import *
    from .modeling_hydra_deberta_v2 import *
    from .modeling_hydra_decoders import *
    from .modeling_hydra_deit import *
    from .modeling_hydra_dinov2 import *
    from .modeling_hydra_dinov3_vit import *
    from .modeling_hydra_modernbert import *
    from .modeling_hydra_mpnet import *
    from .modeling_hydra_towers import *
    from .modeling_hydra_vit import *
    from .modeling_hydra_waveforms import *

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
