"""Tells the Auto classes of Transformers about the Hydras, no sooner than somebody imports Transformers.

Importing Transformers and torch takes seconds, too long for `hydra-transformers --help`. So `import hydra_transformers`
imports neither: where Transformers is there already, the models are registered at once, otherwise right after its import.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_transformers() -> None:
    """Registers all Hydras, now or when `transformers` is imported."""
    if "transformers" in sys.modules:
        import_module(".models", __package__)
    else:
        sys.meta_path.insert(0, _AfterTransformers())


class _AfterTransformers(MetaPathFinder):
    """Finds `transformers` where the other finders do, and registers the Hydras once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:  # looked up is not imported: only now is this finder done
                sys.meta_path.remove(self)
                import_module(".models", __package__)

        spec.loader.exec_module = run_and_register
        return spec
