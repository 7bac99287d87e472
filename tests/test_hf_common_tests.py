"""The script that runs Transformers' common model tests, without a checkout: what it counts and what it complains of."""

import importlib.util
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hydra_transformers.models as models


SCRIPT = Path(__file__).parents[1] / "scripts" / "hf_common_tests.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("hf_common_tests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def subjects(script):
    return script.subjects()


@pytest.mark.slow
def test_every_model_class_is_tested(subjects):
    classes = {name for name in models.__all__ if not name.endswith("Config")} - {"AutoHydra"}
    assert {subject.name for subject in subjects} == classes


@pytest.mark.slow
def test_the_models_are_ragged_and_read_their_inputs(script, subjects):
    for layer in script.KEPT_HEADS:
        assert len({len(member) for member in layer}) == len(layer)
        assert [] in layer
    for subject in subjects:
        model = subject.model_class(subject.config()).eval()
        assert model.config.num_members == 3
        with torch.no_grad():
            outputs = model(**subject.inputs())
        if "last_hidden_state" in outputs:
            assert outputs.last_hidden_state.shape[1] == subject.seq_length


@pytest.mark.slow
def test_what_is_by_design_has_a_reason_and_a_class(script, subjects):
    names = [subject.name for subject in subjects]
    for classes, test, reason in script.BY_DESIGN:
        assert test.startswith("test_") and reason
        assert any(script.fnmatchcase(name, classes) for name in names)


def test_only_what_is_listed_may_fail_and_must(script):
    by_design = [("HydraViT*", "test_listed*", "a reason")]
    outcomes = {
        "test_fine": "passed",
        "test_absent": "skipped",
        "test_listed_1": "ValueError: no",
        "test_listed_2": "passed",
        "test_broken": "AssertionError: 1 != 2",
    }
    row = script.judge("HydraViTModel", outcomes, by_design)
    assert (row.passed, row.failed, row.skipped, row.by_design) == (2, 1, 1, 1)
    assert row.unexpected == [
        "HydraViTModel.test_listed_2 passes: take it out of BY_DESIGN",
        "HydraViTModel.test_broken fails: AssertionError: 1 != 2",
    ]
    other = script.judge("HydraBertModel", {"test_listed_1": "ValueError: no"}, by_design)
    assert (other.failed, other.by_design) == (1, 0)
    assert script.judge("HydraViTModel", {"test_fine": "passed", "test_listed_1": "E: "}, by_design).unexpected == []


class CommonTests:
    """What a checkout's tests look like."""

    def test_passes(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        self.assertIsNotNone(self.all_model_classes[0](config)(**inputs))

    def test_skips(self):
        self.skipTest("not here")

    def test_fails(self):
        self.assertEqual(1, 2)

    def test_raises(self):
        raise ValueError("first line\nsecond line")

    def test_fails_in_a_part(self):
        for part in range(2):
            with self.subTest(part):
                self.assertEqual(part, 1)

    @unittest.skip("never")
    def test_is_skipped(self):
        pass


@pytest.mark.slow
def test_outcomes_of_tests(script):
    subject = script.subjects()[-1]
    checkout = SimpleNamespace(ModelTesterMixin=CommonTests)
    outcomes = script.run(subject, checkout, "")
    assert outcomes.pop("test_raises") == "ValueError: first line"
    assert outcomes.pop("test_fails").startswith("AssertionError: 1 != 2")
    assert outcomes.pop("test_fails_in_a_part").startswith("AssertionError: 0 != 1")
    assert outcomes == {"test_passes": "passed", "test_skips": "skipped", "test_is_skipped": "skipped"}
    assert set(script.run(subject, checkout, "fails")) == {"test_fails", "test_fails_in_a_part"}


def test_a_folder_that_is_no_checkout_is_refused(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf_common_tests.py", str(tmp_path)])
    with pytest.raises(SystemExit) as refusal:
        script.main()
    assert refusal.value.code == 2
    assert "pass a checkout of huggingface/transformers" in capsys.readouterr().err
