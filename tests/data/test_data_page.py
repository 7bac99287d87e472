"""The example of docs/data.md runs."""

from tests.pages import run_python_blocks


def test_the_python_blocks_run(capsys):
    names = run_python_blocks("docs/data.md")
    assert names["batch"]["input_ids"].shape == (2, 5)
    assert "data: 2 rows" in capsys.readouterr().out
