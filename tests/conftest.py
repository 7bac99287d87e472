"""Fixtures and marks of all tests: the families, and what the short run leaves out."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from tests.fresh_process import start_server


LONG = ("test_pipelines.py", "test_cards.py", "test_dropout.py")

# The table of families is imported where tests are collected: the process that hands them to workers does not wait for models.
# Those that run tests fork a server of processes without the package before anything imports it.
if "PYTEST_XDIST_WORKER" in os.environ or not any(word.startswith(("-n", "--numproc")) for word in sys.argv):
    start_server()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `family` runs for every row with code of its own; `each_of` chooses others."""
    is_chosen = any("family" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "family" in metafunc.fixturenames and not is_chosen and not hasattr(metafunc.module, "family"):
        from tests.families import DISTINCT

        metafunc.parametrize("family", DISTINCT, ids=lambda family: family.name)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks files that take long, and tests of families other than the first three of the few, as slow."""
    from tests.families import FAMILIES, FEW

    others = {family.name for family in FAMILIES if family not in FEW[:3]}
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        names = {getattr(each, "name", each) for each in parameters if isinstance(getattr(each, "name", each), str)}
        if names & others or item.path.name in LONG:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    from tests.processes import fix_arithmetic

    fix_arithmetic()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def hidden_from_the_garbage_collector() -> None:
    """Each training asks for a full collection, which would spend a second on modules and on what earlier files of tests keep."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """What a test sets for the threads of torch ends with it: another number sums in another order, and two workers with two
    threads each wait for each other."""
    import torch

    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_verbosity() -> Iterator[None]:
    """What a test, or a script that it runs, sets for Transformers' messages ends with it: others look for warnings."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)


@pytest.fixture
def remote_code(tmp_path, monkeypatch) -> None:
    """Code of repositories is copied to a folder of the test's own, and imported from there."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
