"""The pages hang together: links and anchors lead somewhere, every page is in the site's menu, every public name is documented.

`make docs` builds the site and checks the same links; this needs no MkDocs.
"""

import inspect
import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import hydra_transformers
from hydra_transformers.models.families import MODEL_TYPES
from scripts.docs_site import links, on_page_markdown, pages, site_files
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


def test_pictures_follow_the_reader_in_the_repository_and_the_switch_on_the_site():
    page = ROOT / "docs" / "results.md"
    assert {("images/results.png", ""), ("images/results-dark.png", "")} <= set(links(page))
    shown = on_page_markdown(page.read_text(), SimpleNamespace(file=SimpleNamespace(abs_src_path=page)))
    assert "<picture>" not in shown
    assert "](images/results.png#only-light)\n" in shown and "](images/results-dark.png#only-dark)\n" in shown


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference_with_a_docstring(name):
    package = import_module(f"hydra_transformers.{name}")
    reference = (ROOT / "docs" / "reference" / f"{name}.md").read_text()
    assert f"::: hydra_transformers.{name}\n" in reference
    for public in package.__all__:
        if (PACKAGE / name / f"{public}.py").exists():  # which hides the name from what reads the source
            assert f"::: hydra_transformers.{name}.{public}.{public}\n" in reference
        told = getattr(package, public).__doc__ or ""
        assert told.strip() and not told.startswith(f"{public}("), f"{public} has no docstring of its own"


def test_the_page_of_public_names_has_all_of_them_and_each_has_an_example_that_runs():
    rows = re.findall(r"^\| .+ \| (`.+`) \|$", (ROOT / "docs/reference/names.md").read_text(), flags=re.M)
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    packages = [import_module(f"hydra_transformers.{name}") for name in PUBLIC if name != "models"]
    public = {name: getattr(package, name) for package in (*packages, hydra_transformers) for name in package.__all__}
    public = {name: value for name, value in public.items() if name not in MODEL_TYPES}
    assert set(public) <= set(listed) and len(listed) == len(set(listed)) <= 80
    blocks = re.findall(r"^```python\n(.*?)^```", "".join(page.read_text() for page in pages()), flags=re.S | re.M)
    shown = set(re.findall(r"\w+", "".join(blocks)))
    missing = {
        name for name in set(public) - shown if name == "__version__" or ">>>" not in inspect.getsource(public[name])
    }
    assert missing == {"DivergedError", "__version__"}


def test_names_at_the_top_are_in_the_reference():
    pages_of_reference = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name in set(hydra_transformers.__all__) - set(hydra_transformers.models.__all__) - {"__version__"}:
        package = getattr(hydra_transformers, name).__module__.split(".")[1]
        assert package in PUBLIC or f".{name}\n" in pages_of_reference, name
