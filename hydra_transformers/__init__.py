"""Hydra Ensembles for Hugging Face Transformers.

Several fine-tunings of one pre-trained transformer, or copies of a trained one with different attention heads cut out, run
fused as a single model that knows when it does not know. The subpackages: `pruning`, `training`, `uncertainty`, `baselines`, `analysis`,
`hub`, and `hydration`, whose `hydrate` does everything in one call.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .registration import register_with_transformers


if TYPE_CHECKING:
    from .formats import export  # noqa: F401
    from .hydration import Hydrated, hydrate  # noqa: F401
    from .models import *  # noqa: F403
    from .raw_data import prepare  # noqa: F401


__version__ = "0.1.0"

# Where names are that are no models; all come when they are asked for, for torch and transformers take seconds to import.
_HOMES = {"Hydrated": "hydration", "export": "formats", "hydrate": "hydration", "prepare": "raw_data"}


def __getattr__(name: str) -> Any:
    """A public name or a subpackage, imported now."""
    if name == "__all__":
        return [*import_module(".models", __name__).__all__, *_HOMES]
    if not name.startswith("_"):
        if find_spec(f"{__name__}.{name}"):
            return import_module(f".{name}", __name__)
        import_module("transformers")  # first: its import ends with that of the models, in whichever thread that is
        home = import_module(f".{_HOMES.get(name, 'models')}", __name__)
        if name in _HOMES or name in home.__all__:
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


register_with_transformers()
