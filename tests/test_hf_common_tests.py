"""The script that runs Transformers' common model tests, without a checkout: what it counts and what it complains of."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import hydra_transformers.models as models


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[1] / "scripts" / "hf_common_tests.py"
    spec = importlib.util.spec_from_file_location("hf_common_tests", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
def test_every_model_class_is_tested_with_ragged_members_and_every_exception_has_a_class(script):
    subjects = script.subjects()
    names = [subject.name for subject in subjects]
    assert set(names) == {name for name in models.__all__ if not name.endswith("Config")} - {"AutoHydra"}
    assert all(len({len(member) for member in layer}) == len(layer) and [] in layer for layer in script.KEPT_HEADS)
    for subject in subjects:
        model = subject.model_class(subject.config()).eval()
        assert model.config.num_members == 3
        with torch.no_grad():
            outputs = model(**subject.inputs())
        if "last_hidden_state" in outputs:
            assert outputs.last_hidden_state.shape[1] == subject.seq_length
    for classes, tests, reason in script.BY_DESIGN:
        assert tests.startswith("test_") and reason
        for pattern in classes.split():
            assert any(script.matches(name, pattern) for name in names), pattern


def test_only_what_is_listed_may_fail_and_must(script):
    by_design = [("HydraBert* HydraViT*", "test_other test_listed*", "a reason")]
    outcomes = {"test_fine": "passed", "test_absent": "skipped", "test_broken": "AssertionError: 1 != 2"}
    outcomes |= {"test_listed_1": "ValueError: no", "test_listed_2": "passed"}
    counts, unexpected = script.judge("HydraViTModel", outcomes, by_design)
    assert counts == {"passed": 2, "failed": 1, "skipped": 1, "by design": 1}
    assert sorted(unexpected) == [
        "HydraViTModel.test_broken fails: AssertionError: 1 != 2",
        "HydraViTModel.test_listed_2 passes: take it out of BY_DESIGN",
    ]
    counts, _ = script.judge("HydraRobertaModel", {"test_listed_1": "ValueError: no"}, by_design)
    assert counts == {"failed": 1}
