"""The examples of docs/baselines.md run."""

import re
from pathlib import Path

from hydra_transformers import baselines


PAGE = Path(__file__).parents[2] / "docs" / "baselines.md"


def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert names["output"].member_logits.shape == (4, 2, 3)
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names["models"])


def test_the_page_shows_every_public_name():
    assert all(name in PAGE.read_text() for name in baselines.__all__)
