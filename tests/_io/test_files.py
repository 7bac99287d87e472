"""Files and folders are there whole or not at all, and what killed processes left behind goes."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hydra_transformers._io import files
from hydra_transformers._io.files import remove_leftovers, write_atomically, written_whole


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def names_in(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_takes_the_leftovers_of_killed_processes_with_it(gone, tmp_path):
    for name in (f".report.json.{gone}.tmp", f".other.json.{gone}.tmp", f".report.json.{os.getppid()}.tmp"):
        (tmp_path / name).write_text("half")
    write_atomically(tmp_path / "report.json", "whole")
    assert names_in(tmp_path) == {"report.json", f".other.json.{gone}.tmp", f".report.json.{os.getppid()}.tmp"}


def test_a_folder_takes_the_leftovers_of_killed_processes_with_it(gone, tmp_path):
    (tmp_path / f".model.{gone}.tmp").mkdir()
    (tmp_path / f".model.{gone}.tmp" / "config.json").write_text("half")
    with written_whole(tmp_path / "model") as folder:
        (folder / "config.json").write_text("whole")
    assert names_in(tmp_path) == {"model"}
    assert (tmp_path / "model" / "config.json").read_text() == "whole"


def test_only_what_processes_left_unfinished_is_removed(gone, tmp_path):
    (tmp_path / f".folder.{gone}.tmp").mkdir()
    (tmp_path / f".file.json.{gone}.tmp").write_text("half")
    others = {".hidden", "file.tmp", f"file.{gone}.tmp", f".{gone}.tmp", f".running.{os.getpid()}.tmp"}
    for name in others:
        (tmp_path / name).write_text("mine")
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == others
    remove_leftovers(tmp_path / "nothing")


def fill(path):
    with written_whole(path) as folder:
        (folder / "config.json").write_text("new")


def test_the_working_directory_is_filled_and_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = tmp_path.stat().st_ino
    fill(".")
    assert names_in(tmp_path) == {"config.json"}
    (tmp_path / "old").write_text("old")
    fill(".")
    assert names_in(tmp_path) == {"config.json"}
    assert tmp_path.stat().st_ino == before


def test_an_empty_folder_is_filled_and_stays(tmp_path):
    """As a mount point must: it cannot be renamed, and what is beside it lies elsewhere."""
    folder = tmp_path / "mounted"
    folder.mkdir(mode=0o750)
    before = folder.stat()
    fill(folder)
    assert names_in(folder) == {"config.json"}
    assert names_in(tmp_path) == {"mounted"}
    assert (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("target", ["empty", "full", "missing"])
def test_a_symlink_goes_on_pointing_to_its_folder(target, tmp_path):
    if target != "missing":
        (tmp_path / "target").mkdir()
    if target == "full":
        (tmp_path / "target" / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    fill(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert names_in(tmp_path / "target") == {"config.json"}
    assert names_in(tmp_path) == {"link", "target"}


def test_the_config_of_a_model_comes_last(tmp_path, monkeypatch):
    """A folder that was cut off while it was filled is no model."""
    order, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (order.append(target.name), replace(source, target)))
    with written_whole(tmp_path) as folder:
        for name in ("a.py", "config.json", "model.safetensors"):
            (folder / name).write_text("new")
    assert sorted(order) == ["a.py", "config.json", "model.safetensors"]
    assert order[-1] == "config.json"


KILLED = """
import importlib.util, os, shutil, sys
spec = importlib.util.spec_from_file_location("files", sys.argv[3])  # without the package, whose import takes seconds
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
moves, replace = [], os.replace
def move(source, target):
    if len(moves) == int(sys.argv[2]):
        os._exit(9)
    moves.append(replace(source, target))
def remove(path, **_):
    min(path.iterdir()).unlink()
    os._exit(9)
os.replace = move
with files.written_whole(sys.argv[1]) as folder:
    (folder / "config.json").write_text("newer")
    shutil.rmtree = remove
"""


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_process_killed_while_it_replaces_a_folder_leaves_a_whole_one(moves, tmp_path):
    model = tmp_path / "model"
    fill(model)
    (model / "weights").write_text("old")
    assert subprocess.run([sys.executable, "-c", KILLED, model, str(moves), files.__file__]).returncode == 9
    with pytest.raises(ZeroDivisionError), written_whole(model):
        raise ZeroDivisionError
    assert names_in(tmp_path) == {"model"}
    assert names_in(model) == ({"config.json"} if moves == 2 else {"config.json", "weights"})


def test_threads_that_write_one_file_do_not_meet_and_a_symlink_stays(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    contents = [letter * 100_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda content: write_atomically(tmp_path / "link", content), contents * 10))
    assert (tmp_path / "file").read_text() in contents
    assert names_in(tmp_path) == {"file", "link"} and (tmp_path / "link").is_symlink()


def test_what_fails_leaves_nothing_and_keeps_what_was_there(tmp_path):
    fill(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    for name in ("model", "empty", "new"):
        with pytest.raises(ZeroDivisionError), written_whole(tmp_path / name) as folder:
            (folder / "config.json").write_text("newer")
            raise ZeroDivisionError
    assert names_in(tmp_path) == {"model", "empty"}
    assert (tmp_path / "model" / "config.json").read_text() == "new"
    assert names_in(tmp_path / "empty") == set()
