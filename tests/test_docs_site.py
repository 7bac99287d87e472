"""The pages hang together: links and anchors lead somewhere, every page is in the site's menu, every public name is documented.

`make docs` builds the site and checks the same links; this needs no MkDocs.
"""

import ast
import inspect
import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import hydra_transformers
from scripts.docs_site import links, pages, site_files
from tests.pages import ROOT


PACKAGE = ROOT / "hydra_transformers"
INTERNAL = {"cli", "demo", "fusion"}  # commands, and what the models' own methods call
PUBLIC = sorted(
    path.parent.name
    for path in PACKAGE.glob("*/__init__.py")
    if "__all__" in path.read_text() and path.parent.name not in INTERNAL
)


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as the site and the Hub call them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), flags=re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def menu(entries: list) -> list[str]:
    found = []
    for entry in entries:
        for value in entry.values():
            found += [value] if isinstance(value, str) else menu(value)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere_and_lists_are_lists(page):
    for target, anchor in links(page):
        linked = page.parent / target
        assert linked.exists(), f"links to {target}, which is not there"
        assert not anchor or anchor in anchors(linked), f"links to {target}#{anchor}, which has no such heading"
    for anchor in re.findall(r"\]\(#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page), f"links to #{anchor}, which it does not have"
    # Lists that begin elsewhere than behind a blank line or a heading are shown as one paragraph.
    without_code = re.sub(r"^```.*?^```$", "code", page.read_text(), flags=re.S | re.M)
    glued = [
        line
        for before, line in pairwise(without_code.splitlines())
        if re.match(r"([-*+]|\d+\.) ", line) and before and not re.match(r"#|\s*([-*+]|\d+\.) |\s{2,}", before)
    ]
    assert not glued


def test_the_menu_has_every_page_once():
    listed = menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(page.relative_to(ROOT).as_posix() for page in pages())


def test_the_site_has_what_pages_link_to():
    found = {path.relative_to(ROOT).as_posix() for path in site_files()}
    assert {"README.md", "docs/images/overview.png", "experiments/README.md"} <= found


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference_with_a_docstring(name):
    package = import_module(f"hydra_transformers.{name}")
    reference = (ROOT / "docs" / "reference" / f"{name}.md").read_text()
    assert f"::: hydra_transformers.{name}\n" in reference
    for public in package.__all__:
        if (PACKAGE / name / f"{public}.py").exists():  # which hides the name from what reads the source
            assert f"::: hydra_transformers.{name}.{public}.{public}\n" in reference
        value = getattr(package, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            told = value.__doc__ or ""
            assert told.strip() and not told.startswith(f"{public}("), f"{public} has no docstring of its own"
        else:
            assert has_docstring_below(name, public), f"{public} has no docstring below it"


def test_names_at_the_top_are_in_the_reference():
    pages_of_reference = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name in set(hydra_transformers.__all__) - set(hydra_transformers.models.__all__) - {"__version__"}:
        package = getattr(hydra_transformers, name).__module__.split(".")[1]
        assert package in PUBLIC or f".{name}\n" in pages_of_reference, name


def has_docstring_below(package: str, name: str) -> bool:
    """Whether a string follows the assignment of a constant somewhere in a package."""
    for path in (PACKAGE / package).glob("*.py"):
        body = ast.parse(path.read_text()).body
        for statement, below in pairwise(body):
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            if any(getattr(target, "id", None) == name for target in targets) and isinstance(below, ast.Expr):
                return isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    return False
