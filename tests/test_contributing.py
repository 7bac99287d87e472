"""The map for contributors names files and functions that are there."""

import ast
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hydra_transformers"
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^(\w+/\w+\.py) +(\w+)?", PAGE, re.MULTILINE)


def test_the_map_has_three_journeys_of_about_twenty_steps():
    journeys = [len(re.findall(r"^\w+/\w+\.py ", block, re.MULTILINE)) for block in PAGE.split("\n### ")[1:]]
    assert len(journeys) == 3 and all(10 <= steps <= 20 for steps in journeys)


@pytest.mark.parametrize(("file", "name"), STEPS)
def test_each_step_of_the_map_is_a_function_or_class_of_its_file(file, name):
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    defined = [node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert name in defined, f"{file} has no {name}"


def test_files_and_tables_where_new_things_go_are_there():
    table = PAGE.split("## Where a new thing goes")[1].split("\n## ")[0]
    for file in re.findall(r"`([\w/]+\.(?:py|md))`", table.replace("NAME", "")):
        if not re.search(r"_\.py$|/\.py$", file):
            folders = (PACKAGE, PACKAGE / "shift", ROOT)
            assert any((folder / file).exists() for folder in folders), file
    for name, file in re.findall(r"`([A-Z]+)` of `([\w/]+\.py)`", table):
        assert re.search(rf"^{name}\b", (PACKAGE / file).read_text(encoding="utf-8"), re.MULTILINE), (name, file)
