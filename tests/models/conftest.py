"""Tests that ask for a `family` run for every row of the families' table."""

import pytest

from tests.families import (
    AST,
    BERT,
    CAMEMBERT,
    CLIP,
    CLIP_CLASSIFIER,
    DINOV2,
    FAMILIES,
    GEMMA,
    LLAMA,
    MODERNBERT,
    MPNET,
    QWEN2,
    SIGLIP,
    SIGLIP_CLASSIFIER,
    VARIANTS,
    VIT,
    XLM_ROBERTA,
)


# These differ from another row in the name of their config, or in being one of its towers, which decides on reading, saving
# and loading alone.
ALIASES = [XLM_ROBERTA, CAMEMBERT, CLIP_CLASSIFIER, SIGLIP_CLASSIFIER]
# And these from Llama in parts that these modules see.
LIKE_LLAMA = [QWEN2, GEMMA]
OWN_LAYERS = [VIT, BERT, CLIP, DINOV2, MPNET, MODERNBERT, LLAMA]
READ_SAVE_LOAD = ("test_auto", "test_checkpoints", "test_constructors", "test_hub", "test_invariants")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark for mark in metafunc.definition.iter_markers("parametrize") if "family" in str(mark.args[0])]
    if "family" not in metafunc.fixturenames or own:
        return
    families = FAMILIES
    if metafunc.definition.get_closest_marker("slow"):
        # Exports are promised for each; AST's, with the layers of ViT, is in test_ast. Compilers and other processes see no
        # difference between rows that have the same layers.
        is_exported = metafunc.function.__name__ == "test_exported_models_answer_as_the_model_does"
        families = [family for family in FAMILIES if family not in (*VARIANTS, AST)] if is_exported else OWN_LAYERS
    elif metafunc.module.__name__.endswith("test_trunk"):
        families = [*OWN_LAYERS, SIGLIP]
    elif not metafunc.module.__name__.endswith(READ_SAVE_LOAD):
        families = [family for family in FAMILIES if family not in ALIASES + LIKE_LLAMA]
    rows = [
        pytest.param(family, id=family.name, marks=[pytest.mark.slow] if family in ALIASES else [])
        for family in families
    ]
    metafunc.parametrize("family", rows)
