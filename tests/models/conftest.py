"""Tests that ask for a `family` run for every row of the families' table."""

import pytest

from tests.families import BERT, CLIP, DINOV2, DINOV2_GATED, FAMILIES, VARIANTS, VIT


# Compilers, exporters and other processes take long: there, the short run (`-m "not slow"`) takes three families, and what
# differs from another row in its MLP or its name alone is left to the invariants.
LONG = {"test_exports", "test_remote_code", "test_runtime", "test_encoded_weights"}
FAST_INFERENCE = [VIT, BERT, CLIP, DINOV2, DINOV2_GATED]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark for mark in metafunc.definition.iter_markers("parametrize") if "family" in str(mark.args[0])]
    if "family" not in metafunc.fixturenames or own:
        return
    module = metafunc.module.__name__.rpartition(".")[2]
    families = FAST_INFERENCE if module == "test_fast_inference" else FAMILIES
    rows = []
    for family in families:
        is_long = module in LONG and family not in (VIT, BERT, CLIP)
        if not (is_long and family in VARIANTS):
            rows.append(pytest.param(family, marks=pytest.mark.slow if is_long else (), id=family.name))
    metafunc.parametrize("family", rows)
