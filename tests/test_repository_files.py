"""What surrounds the code is true: workflows, constraints, templates, citation, versions, what a package is built of."""

import email
import email.policy
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml

import hydra_transformers
from hydra_transformers import __version__
from scripts import check_package
from tests import typed_use
from tests.pages import ROOT


GITHUB = ROOT / ".github"
PINNED = [path.name for path in ROOT.glob("constraints*.txt")]


def read_yaml(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_workflows_run_the_checks_on_every_python_and_both_ends_of_the_versions():
    jobs = read_yaml(GITHUB / "workflows" / "tests.yml")["jobs"]
    matrix = jobs["tests"]["strategy"]["matrix"]
    assert {*matrix["python"], *(each["python"] for each in matrix["include"])} == {"3.10", "3.11", "3.12", "3.13"}
    assert {*matrix["constraints"], *(each["constraints"] for each in matrix["include"])} == set(PINNED)
    assert any(step.get("run") == ".ci/run" for step in jobs["tests"]["steps"])
    assert "CONSTRAINTS ?= constraints.txt" in (ROOT / "Makefile").read_text()


def steps_of(workflow):
    return [step for job in read_yaml(workflow)["jobs"].values() for step in job.get("steps", [])]


def test_releases_need_no_token_and_publish_what_was_tested():
    release = GITHUB / "workflows" / "release.yml"
    jobs = read_yaml(release)["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and "secrets." not in release.read_text()
    assert jobs["tests"] == {"uses": "./.github/workflows/tests.yml"} and jobs["publish"]["needs"] == "tests"
    package = read_yaml(GITHUB / "workflows" / "tests.yml")["jobs"]["package"]["steps"]
    runs = [step["run"] for step in package if "run" in step]
    order = [" ".join(runs).index(part) for part in ("-m build", "twine check", "--tag", "check_installed.py")]
    assert order == sorted(order)
    (kept,) = [step["with"]["name"] for step in package if step.get("uses", "").startswith("actions/upload-artifact")]
    (taken,) = [step["with"]["name"] for step in jobs["publish"]["steps"] if "with" in step]
    assert kept == taken


def test_scripts_that_workflows_call_exist():
    for path in (GITHUB / "workflows").glob("*.yml"):
        for step in steps_of(path):
            words = step.get("run", "").split()
            scripts = [word for word in words if word.startswith(("scripts/", ".ci/"))]
            assert all((ROOT / script).is_file() for script in scripts), step


def test_constraints_pin_the_same_packages():
    """But for those of the site and of notebooks, which Python 3.10 and the oldest versions do without, and for torchvision,
    which only the oldest Transformers needs."""
    pins = {name: dict(pin.split("==") for pin in (ROOT / name).read_text().split() if "==" in pin) for name in PINNED}
    assert pins["constraints-oldest.txt"]["torch"] < pins["constraints.txt"]["torch"]
    for name in PINNED:
        assert (
            {"torch", "transformers", "pytest", "ruff", "numpy"}
            <= set(pins[name])
            <= set(pins["constraints.txt"]) | {"torchvision"}
        ), name


def test_the_changelog_and_the_citation_tell_of_this_version_and_the_paper():
    headings = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    released = [heading for heading in headings if "unreleased" not in heading]
    assert released[0].split()[0] == __version__
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == __version__
    assert citation["preferred-citation"]["identifiers"][0]["value"] == "arXiv:2510.18358"


def test_a_package_is_refused_that_lacks_a_file_or_has_another_version(tmp_path):
    files = sorted(check_package.expected_files())
    assert not any("__pycache__" in name for name in files)
    wheel = tmp_path / "hydra_transformers-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*files[1:], "tests/test_it.py", "hydra_transformers-0.9.0.dist-info/METADATA"):
            archive.writestr(name, "")
    assert check_package.problems(wheel, tag="v0.8.0") == [
        f"{wheel.name} lacks {files[0]}",
        f"{wheel.name} has tests/test_it.py, which does not belong there",
        f"{wheel.name} has another version than the tag v0.8.0: set __version__ in hydra_transformers/_version.py",
    ]
    source = tmp_path / "hydra_transformers-0.9.0.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        for name in (*files, *check_package.BESIDE_IT - {"LICENSE"}, "docs/images/overview.png"):
            archive.addfile(tarfile.TarInfo(f"hydra_transformers-0.9.0/{name}"))
    assert check_package.problems(source, tag="v0.9.0") == [
        f"{source.name} lacks LICENSE",
        f"{source.name} has docs/images/overview.png, which does not belong there",
    ]


# Build like `python -m build`, offline: an sdist of the repository, a wheel of the sdist.
BUILD = """
import os, shutil, sys
from setuptools import build_meta
repository, dist, unpacked = sys.argv[1:]
os.chdir(repository)
name = build_meta.build_sdist(dist)
shutil.unpack_archive(os.path.join(dist, name), unpacked)
os.chdir(os.path.join(unpacked, name.removesuffix(".tar.gz")))
build_meta.build_wheel(dist)
"""
NOT_OURS = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "site", "runs", "demo-output")


def built(tmp_path, **environment):
    """The wheel and the sdist of this repository."""
    shutil.copytree(ROOT, tmp_path / "repository", ignore=NOT_OURS)
    folders = [tmp_path / name for name in ("repository", "dist", "unpacked")]
    environment = {name: value for name, value in os.environ.items() if name != "REPOSITORY_URL"} | environment
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *folders], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (source,) = folders[1].glob("*.whl"), folders[1].glob("*.tar.gz")
    return wheel, source


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name), policy=email.policy.default)


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package_and_nothing_else(tmp_path):
    archives = built(tmp_path)
    for archive in archives:
        assert check_package.problems(archive, tag=f"v{__version__}") == []
        files = {name.removeprefix("hydra_transformers/") for name in check_package.files_in(archive)}
        needed = ("py.typed", "hub/model_card.md", "serving/page.css")
        assert files >= {*needed, "demo/intents.csv"}
        assert not any(name.startswith(("tests", "docs", "experiments", "benchmarks")) for name in files)
    metadata = metadata_of(archives[0])
    assert (metadata["Name"], metadata["Version"]) == ("hydra-transformers", __version__)
    assert metadata["Project-URL"] is None and "](docs/" not in metadata.get_content()


@pytest.mark.slow
def test_the_description_on_pypi_links_to_the_files_of_its_tag(tmp_path):
    wheel, _ = built(tmp_path, REPOSITORY_URL="https://example.org/us/hydra")
    metadata = metadata_of(wheel)
    assert metadata.get_all("Project-URL")[0] == "Repository, https://example.org/us/hydra"
    page = metadata.get_content()
    targets = re.findall(r"\]\((.+?)\)", page)
    assert all(target.startswith("https://") for target in targets)
    ours = "https://example.org/us/hydra/"
    for picture in ("overview", "results"):
        assert f"({ours}raw/v{__version__}/docs/images/{picture}.png)" in page
    assert "<picture>" not in page
    files = [target.removeprefix(f"{ours}blob/v{__version__}/") for target in targets if target.startswith(f"{ours}b")]
    assert len(files) >= 20 and all((ROOT / name.partition("#")[0]).exists() for name in files)
    assert 'pip install "hydra-transformers[demo]"' in page and "Clone this repository" not in page


def test_what_is_type_checked_uses_every_function_of_the_front_page():
    functions = [name for name in hydra_transformers.__all__ if name.islower() and not name.startswith("_")]
    assert len(functions) >= 9
    assert [name for name in functions if not callable(getattr(typed_use, name, None))] == []


def test_the_page_on_model_families_names_files_that_exist():
    page = (ROOT / "docs" / "adding-a-model-family.md").read_text()
    files = re.findall(r"`([a-z0-9_/]+\.py)`", page)
    assert len(files) >= 5
    folders = (ROOT, ROOT / "hydra_transformers", ROOT / "hydra_transformers" / "models")
    for name in files:
        assert any((folder / name).exists() for folder in folders), name
