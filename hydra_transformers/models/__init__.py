"""The Hydra models. What lies in this folder, but for `auto`, is what saved models take along to the Hub."""

from .auto import *  # noqa: F403
from .auto import __all__ as __all__
from .auto import register


register()
