"""The finder that waits for Transformers."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_transformers import registration


def test_two_finders_do_not_ask_each_other_for_ever(monkeypatch):
    """As there are after `importlib.reload(hydra_transformers)`."""
    finders = [registration._AfterTransformers() for _ in range(2)]
    monkeypatch.setattr(sys, "meta_path", [*finders, *sys.meta_path])
    assert importlib.util.find_spec("transformers").name == "transformers"
    assert finders[0].find_spec("transformers").origin == importlib.import_module("transformers").__file__


IN_THREADS = """
import importlib, sys, threading
import hydra_transformers

importlib.reload(hydra_transformers)
found = []

def look(name):
    found.append(importlib.import_module(name))

names = ("transformers", "hydra_transformers.models")
threads = [threading.Thread(target=look, args=[name]) for name in names]

def read():
    while "transformers" not in sys.modules:
        pass
    from transformers import PreTrainedConfig

    found.append(PreTrainedConfig)

threads.append(threading.Thread(target=read))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
from transformers import AutoConfig

assert len(found) == 3, found
assert AutoConfig.for_model("hydra_bert").model_type == "hydra_bert"
"""


@pytest.mark.slow
def test_threads_that_import_transformers_and_hydras_at_once_do_not_fail_each_other():
    subprocess.run([sys.executable, "-c", IN_THREADS], cwd=Path(__file__).parents[1], check=True, timeout=300)
