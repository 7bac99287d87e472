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
        import_module("transformers")  # which another thread may be at
        import_module(".models", __package__)
    else:
        sys.meta_path.insert(0, _AfterTransformers())


def _register() -> None:
    """Imports the models, which register themselves."""
    try:
        import_module(".models", __package__)
    except RuntimeError as error:
        # Another thread is at that already, and waits for Transformers to be imported: it registers them when this one is done.
        if type(error).__name__ != "_DeadlockError":
            raise


def _hand_on(module: ModuleType) -> None:
    """Transformers ends its import by putting another module in its place, which knows all names. `from transformers import ...`
    in a thread that has waited for that import still looks into the first: it looks further now."""
    final = sys.modules[module.__name__]
    if final is not module:
        vars(module)["__getattr__"] = lambda name: getattr(final, name)


class _AfterTransformers(MetaPathFinder):
    """Finds `transformers` where the other finders do, and registers the Hydras once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers":
            return None
        # Those after it alone: two of this kind, of a package that was loaded again, would ask each other for ever.
        finders = list(sys.meta_path)
        others = finders[finders.index(self) + 1 :] if self in finders else []
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _hand_on(module)
            if self in sys.meta_path:  # looked up is not imported: only now is this finder done
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = run_and_register
        return spec
