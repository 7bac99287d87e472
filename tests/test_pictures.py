"""The pictures of the pages can be drawn again, in light and dark, and show what the results files have."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

from scripts.picture_style import IMAGES, dark_path
from tests.pages import ROOT


SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("draw_*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_picture_can_be_drawn_again_and_shows_what_it_did(name, tmp_path, monkeypatch):
    script = import_module(f"scripts.{name}")
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "drawn.png")])
    script.main()
    for kept in (script.OUTPUT, dark_path(script.OUTPUT)):
        drawn = tmp_path / kept.name.replace(script.OUTPUT.stem, "drawn")
        with Image.open(drawn) as new, Image.open(kept) as old:
            assert new.size == old.size
            assert new.text.get("Description") == old.text.get("Description"), "the numbers are others: draw it again"


def test_every_picture_has_a_dark_one_and_is_on_a_page():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for path in IMAGES.glob("*.png"):
        assert f"images/{path.name}" in pages, path.name
    scripts = [import_module(f"scripts.{name}") for name in SCRIPTS]
    for output in (Path(script.OUTPUT) for script in scripts):
        assert f'srcset="images/{dark_path(output).name}"' in pages or dark_path(output).name in pages
