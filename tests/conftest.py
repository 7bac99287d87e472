"""All tests: the modules they import are no garbage; what the short run leaves out."""

import gc

import pytest

from tests.families import BERT, CLIP, FAMILIES, VIT


# Outside of tests/models, code knows of no family: in the short run it is tested with one of each kind.
FEW = {VIT.name, BERT.name, CLIP.name}
OTHERS = {family.name for family in FAMILIES} - FEW


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named = {getattr(each, "name", each) for each in parameters if isinstance(getattr(each, "name", each), str)}
        if "/models/" not in item.nodeid and named & OTHERS:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Takes what is imported by now out of the garbage collector's sight: full collections, of which every training asks for
    one, would spend half a second each on the modules of torch, Transformers and scikit-learn."""
    gc.collect()
    gc.freeze()
