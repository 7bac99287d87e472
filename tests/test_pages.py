"""The Python blocks of README.md and of some guides run (```py marks those that need the Hub)."""

import pytest

from tests.pages import run_python_blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/paper.md",
        "docs/data.md",
        "docs/how-it-works.md",
        "docs/monitoring.md",
        "docs/tasks.md",
        "docs/cascade.md",
    ],
)
def test_the_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python_blocks(page)
