"""The Hydra models. What lies in this folder, but for `auto`, is what saved models take along to the Hub."""

import transformers  # noqa: F401  first: two threads that import it and this in turns would wait for each other

from .auto import *  # noqa: F403
from .auto import __all__ as __all__
from .auto import register


register()
