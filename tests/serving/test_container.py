"""The Dockerfile without Docker: what it copies is enough to build the package, and what it starts is the server."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.command_line import parsed
from tests.pages import ROOT


BUILD = (
    "import sys; from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
)
SHIM = '#!/bin/sh\nprintf "%s\\n" "$@"\n'


def instructions() -> list[tuple[str, str]]:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]


def started(folder, model: str, *words: str) -> list[str]:
    """Return the words that the container's command passes on to `hydra-transformers`."""
    shim = folder / "hydra-transformers"
    shim.write_text(SHIM)
    shim.chmod(0o755)
    [entry] = [json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT"]
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "MODEL": model}
    run = subprocess.run([*entry, *words], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@pytest.mark.parametrize("words", [(), ("serve",)], ids=["as docker run", "as a managed service"])
def test_it_serves_the_model_to_other_machines(words, tmp_path):
    [environment] = [rest for name, rest in instructions() if name == "ENV"]
    assert environment == "MODEL=/opt/ml/model"
    arguments = parsed(started(tmp_path, "/opt/ml/model", *words))
    assert arguments["model"] == "/opt/ml/model"
    assert (arguments["host"], arguments["port"]) == ("0.0.0.0", 8080) and ("EXPOSE", "8080") in instructions()
    assert parsed(started(tmp_path, "me/my hydra", *words))["model"] == "me/my hydra"


def test_it_installs_what_serve_needs_and_runs_without_rights():
    runs = [rest for name, rest in instructions() if name == "RUN"]
    [extra] = re.findall(r'"\.\[(\w+)\]"', " ".join(runs))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'^{extra} = \[.*"fastapi".*"uvicorn"', project, re.M)
    assert any("torch --index-url https://download.pytorch.org/whl/cpu" in run for run in runs)
    names = [name for name, _ in instructions()]
    [user] = [rest for name, rest in instructions() if name == "USER"]
    assert f"RUN useradd --create-home {user}" in map(" ".join, instructions())
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")


@pytest.mark.slow
def test_the_package_is_built_of_what_is_copied(tmp_path):
    place = tmp_path / "package"
    place.mkdir()
    for name, rest in instructions():
        if name != "COPY":
            continue
        *sources, target = rest.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place / target)
    run = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=place, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    assert "Name: hydra-transformers" in metadata and 'extra == "serve"' in metadata
