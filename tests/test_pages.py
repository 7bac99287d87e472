"""The Python blocks of README.md and of docs/how-it-works.md run (```py marks those that need the Hub)."""

import re

import pytest

from tests.pages import ROOT, run_python_blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/how-it-works.md"])
def test_the_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python_blocks(page)


def test_links_to_files_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
