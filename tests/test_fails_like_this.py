"""The errors that guides quote are those that the package raises."""

import ast
import re

import pytest

from tests.pages import ROOT


HEADING = "## Fails like this"
GUIDES = [path for path in sorted((ROOT / "docs").glob("*.md")) if HEADING in path.read_text(encoding="utf-8")]


def text_of(node: ast.AST) -> str | None:
    """Return a string of the code, with "…" in place of what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """All strings of the package."""
    found = []
    for path in sorted((ROOT / "hydra_transformers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found.append(text_of(node) or "")
    return found


def test_guides_have_such_a_section():
    assert {"data.md", "fine-tuning.md", "fusing.md", "publishing.md"} <= {path.name for path in GUIDES}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_quoted_errors_are_raised(guide, messages):
    section = guide.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert quoted
    for error in quoted:
        assert any(error in message for message in messages), error
