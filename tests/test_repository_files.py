"""What surrounds the code is true: workflows, constraints, templates, citation, versions, what a package is built of."""

import re
import sys
import tarfile
import zipfile

import pytest
import yaml
from PIL import Image

from hydra_transformers import __version__
from scripts import check_package, draw_overview
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


def test_releases_need_no_token():
    publish = read_yaml(GITHUB / "workflows" / "release.yml")["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()


def test_scripts_that_workflows_call_exist():
    for path in (GITHUB / "workflows").glob("*.yml"):
        for job in read_yaml(path)["jobs"].values():
            for step in job["steps"]:
                words = step.get("run", "").split()
                scripts = [word for word in words if word.startswith(("scripts/", ".ci/"))]
                assert all((ROOT / script).is_file() for script in scripts), step


@pytest.mark.parametrize("name", ["bug", "family", "idea"])
def test_issue_templates_ask_something(name):
    template = read_yaml(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert template["name"] and template["description"]
    fields = template["body"]
    assert len({field["id"] for field in fields}) == len(fields) and all(
        field["attributes"]["label"] for field in fields
    )


def test_constraints_pin_the_same_packages():
    """But for those of the site and of notebooks, which Python 3.10 and the oldest versions do without."""
    pins = {
        name: dict(line.split("==") for line in (ROOT / name).read_text().split() if "==" in line) for name in PINNED
    }
    assert pins["constraints-oldest.txt"]["torch"] < pins["constraints.txt"]["torch"]
    for name in PINNED:
        assert (
            {"torch", "transformers", "pytest", "ruff", "numpy"} <= set(pins[name]) <= set(pins["constraints.txt"])
        ), name


def test_the_citation_names_the_paper():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    paper = citation["preferred-citation"]
    assert paper["url"].endswith("/2510.18358") and paper["identifiers"][0]["value"] == "arXiv:2510.18358"


def test_the_changelog_tells_of_this_version():
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()


def test_a_package_is_refused_that_lacks_a_file_or_has_another_version(tmp_path):
    files = sorted(check_package.expected_files())
    assert "hydra_transformers/hub/model_card.md" in files and not any("__pycache__" in name for name in files)
    wheel = tmp_path / "hydra_transformers-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*files[1:], "tests/test_it.py", "hydra_transformers-0.9.0.dist-info/METADATA"):
            archive.writestr(name, "")
    assert check_package.problems(wheel, tag="v0.1.0") == [
        f"{wheel.name} lacks {files[0]}",
        f"{wheel.name} has tests/test_it.py, which is no part of it",
        f"{wheel.name} has another version than the tag v0.1.0: set __version__ in hydra_transformers/_version.py",
    ]
    source = tmp_path / "hydra_transformers-0.9.0.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        for name in files:
            archive.addfile(tarfile.TarInfo(f"hydra_transformers-0.9.0/{name}"))
    assert check_package.problems(source, tag="v0.9.0") == []


def test_the_picture_of_the_readme_can_be_drawn_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draw_overview.py", str(tmp_path / "overview.png")])
    draw_overview.main()
    drawn, kept = Image.open(tmp_path / "overview.png"), Image.open(draw_overview.OUTPUT)
    assert drawn.size == kept.size


def test_the_page_on_model_families_names_files_that_exist():
    page = (ROOT / "docs" / "adding-a-model-family.md").read_text()
    files = re.findall(r"`([a-z0-9_/]+\.py)`", page)
    assert len(files) >= 5
    folders = (ROOT, ROOT / "hydra_transformers", ROOT / "hydra_transformers" / "models")
    for name in files:
        assert any((folder / name).exists() for folder in folders), name
