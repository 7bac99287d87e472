"""The scripts for rented machines name what they need, and run from the data to the answers."""

import ast
import csv
import runpy
import sys
from pathlib import Path

import pytest

from hydra_transformers import hub
from tests.pages import ROOT
from tests.tiny_data import save_bert


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def inline_metadata(path: Path) -> dict:
    """Read the block of a script by which uv and pipx install what it needs (PEP 723)."""
    import tomllib

    lines = path.read_text().splitlines()
    first = lines.index("# /// script") + 1
    block = lines[first : lines.index("# ///", first)]
    return tomllib.loads("\n".join(line.removeprefix("# ") for line in block))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_script_names_its_dependencies_and_imports_nothing_else(path):
    metadata = inline_metadata(path)
    assert metadata["requires-python"] == ">=3.10"
    [requirement] = metadata["dependencies"]
    assert requirement.startswith("hydra-transformers[")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - {"hydra_transformers"} <= set(sys.stdlib_module_names)


@pytest.mark.slow
def test_the_scripts_go_from_rows_to_answers(tmp_path, monkeypatch, capsys):
    bert = save_bert(tmp_path / "bert")
    table = tmp_path / "reviews.csv"
    rows = [{"text": f"{word} film {n % 7}", "label": word} for n in range(120) for word in ("good", "bad")]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows)
    pushed = []
    monkeypatch.setattr(hub, "push_hydra_to_hub", lambda *args, **options: pushed.append((args, options)))

    def run(name: str, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")

    folder = tmp_path / "hydra"
    training = [bert, table, "--output", folder, "--runs", "1", "--epochs", "1", "--risk", "0.9"]
    run("train", *training, "--repository", "me/reviews")
    [((model, repository, *_), options)] = pushed
    assert model.is_calibrated and repository == "me/reviews" and options == {"dataset": None}
    run("train", *training)  # a finished training is not repeated
    run("predict", folder, table, tmp_path / "answers.csv")
    with (tmp_path / "answers.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == len(rows) and {"answer", "prediction", "why"} <= set(answers[0])
