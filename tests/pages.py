"""The examples of the pages that people read."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[1]


def run_python_blocks(page: str, at_least: int = 1) -> dict:
    """Runs the ```python blocks of a page, such as "docs/pruning.md", in order; returns the names they leave behind."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= at_least, f"{page} has {len(blocks)} blocks"
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names
