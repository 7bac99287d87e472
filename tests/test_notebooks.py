"""The notebooks run from top to bottom, offline, and are kept as they ran. Half a minute to a minute each on one slow core."""

import ast
import importlib.util
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError


pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHECKPOINTS = {
    "analysis": "google/vit-base-patch16-224",
    "heads": "google/vit-base-patch16-224",
    "images": "google/vit-base-patch16-224",
    "text": "textattack/bert-base-uncased-SST-2",
    "zero_shot": "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
}

spec = importlib.util.spec_from_file_location("build_notebooks", ROOT / "scripts" / "build_notebooks.py")
build_notebooks = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = build_notebooks
spec.loader.exec_module(build_notebooks)


def pictures(notebook) -> list:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output for output in outputs if "image/png" in output.get("data", {})]


def test_every_notebook_has_lines_for_a_checkpoint():
    assert [path.stem for path in NOTEBOOKS] == sorted(CHECKPOINTS)


@pytest.fixture(scope="module")
def kernel():
    """One for all notebooks: what they import is imported once."""
    with build_notebooks.started_kernel() as kernel:
        yield kernel


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_offline_and_ends_with_a_picture(path, kernel):
    assert pictures(build_notebooks.execute(path, kernel))


def test_a_notebook_knows_nothing_of_those_before_it(kernel, tmp_path):
    path = tmp_path / "some.ipynb"
    for code in ("known = 1", "known"):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        path.write_text(nbformat.writes(notebook))
        if code == "known":
            with pytest.raises(CellExecutionError, match="name 'known' is not defined"):
                build_notebooks.execute(path, kernel)
        else:
            [cell] = build_notebooks.execute(path, kernel).cells
            assert (cell.source, cell.execution_count) == (code, 1)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_kept_executed_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert pictures(notebook)
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_ends_with_the_lines_for_a_real_checkpoint(path):
    last = nbformat.read(path, as_version=4).cells[-1]
    code = "\n".join(code_blocks(last))
    ast.parse(code)
    assert CHECKPOINTS[path.stem] in code and "push_hydra_to_hub" in code


def test_the_lines_for_a_real_checkpoint_define_what_the_cells_that_stay_use():
    cells = nbformat.read(ROOT / "notebooks" / "images.ipynb", as_version=4).cells
    titles = {cell.source.splitlines()[0]: place for place, cell in enumerate(cells) if cell.cell_type == "markdown"}
    first, end = titles["## Data"], titles["## Three fine-tunings"]
    gone, stay = (
        [each.source for each in some if each.cell_type == "code"] for some in (cells[first:end], cells[end:])
    )
    used = read_in([*stay, cells[1].source])
    needed = defined_in(gone) & used
    assert {"images", "labels", "train", "choosing", "test", "pretrained", "settings", "near", "far"} <= needed
    assert needed <= defined_in(code_blocks(cells[-1])[:1])


def code_blocks(cell) -> list[str]:
    return [part.split("```")[0] for part in cell.source.split("```python\n")[1:]]


def read_in(sources) -> set[str]:
    nodes = [node for tree in map(parsed, sources) for node in ast.walk(tree)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def defined_in(sources) -> set[str]:
    """Names that the lines themselves give a value, not what comprehensions and functions have inside."""
    lines = [line for tree in map(parsed, sources) for line in tree.body if isinstance(line, ast.Assign)]
    return {node.id for line in lines for target in line.targets for node in ast.walk(target) if hasattr(node, "id")}


def parsed(source: str) -> ast.Module:
    return ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%")))
