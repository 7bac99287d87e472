"""Runs the notebooks from top to bottom, offline, and keeps what they show.

python scripts/build_notebooks.py                  # run all and write their outputs
python scripts/build_notebooks.py texts.ipynb      # only some
python scripts/build_notebooks.py --check          # run all, write nothing, fail on the first error
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from jupyter_client import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
SECONDS_PER_CELL = 300


@contextmanager
def started_kernel() -> Iterator[KernelManager]:
    """A process for notebooks to run in, one after the other."""
    with tempfile.TemporaryDirectory() as folder:  # whatever a notebook writes goes there
        kernel = KernelManager(kernel_name="python3")
        kernel.start_kernel(env={**os.environ, **ENVIRONMENT}, cwd=folder)
        try:
            yield kernel
        finally:
            kernel.shutdown_kernel(now=True)


def execute(path: Path, kernel: KernelManager) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run without a variable; raises `CellExecutionError` where a cell fails."""
    forget = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])
    notebook = nbformat.read(path, as_version=4)
    for each in (forget, notebook):
        client = NotebookClient(each, timeout=SECONDS_PER_CELL, km=kernel)
        try:
            client.execute()
        finally:
            client.kc.stop_channels()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what changes from run to run or from machine to machine, so that a diff shows what changed."""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.clear()
        if cell.cell_type == "code":  # progress bars and warnings about this machine go to stderr
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = nbformat.from_dict({"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="file names in notebooks/; by default all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    for path in [FOLDER / name for name in arguments.notebooks] or sorted(FOLDER.glob("*.ipynb")):
        start = time.perf_counter()
        try:
            with started_kernel() as kernel:
                notebook = execute(path, kernel)
        except CellExecutionError as error:
            print(f"{path.name} failed:\n{error}", file=sys.stderr)
            return 1
        if not arguments.check:
            path.write_text(nbformat.writes(tidy(notebook)) + "\n", encoding="utf-8")
        print(f"{path.name}: ran in {time.perf_counter() - start:.0f} s, {path.stat().st_size // 1024} KB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
