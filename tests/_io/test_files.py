"""Files and folders are there whole or not at all, and nothing of a user or another process is removed."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from hydra_transformers._io.files import write_atomically, written_whole


def names_in(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill(path, **files):
    with written_whole(path) as folder:
        for name, content in {"config.json": "new", **files}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)


def test_files_of_users_and_other_processes_stay(tmp_path):
    """Also those whose names look like unfinished ones."""
    names = {".report.json.1.tmp", ".report.json.99999999.tmp", ".model.1-2.tmp", ".model.7.old", "mine.txt"}
    model = tmp_path / "model"
    model.mkdir()
    for folder in (tmp_path, model):
        for name in names:
            (folder / name).write_text("mine")
    write_atomically(tmp_path / "report.json", "whole")
    fill(model)
    assert names_in(tmp_path) == {"report.json", "model", *names}
    assert names_in(model) == {"config.json", *names}


@pytest.mark.parametrize("target", ["new", "empty", "full", "link to new", "link to full", "working directory"])
def test_a_folder_is_filled_and_stays(target, tmp_path, monkeypatch):
    """A mount point and the working directory cannot be renamed, and a link goes on pointing to its folder."""
    folder = place = tmp_path / "model"
    if "new" not in target:
        folder.mkdir(mode=0o750)
    before = folder.stat() if folder.exists() else None
    if "full" in target:
        fill(folder, **{"mine.txt": "mine", "config.json": "old", "code/a.py": "old", "code/b.py": "old"})
    if "link" in target:
        place = tmp_path / "link"
        place.symlink_to(folder)
    if target == "working directory":
        monkeypatch.chdir(folder)
        place = "."
    fill(place, **{"code/a.py": "new"})
    assert (folder / "config.json").read_text() == (folder / "code" / "a.py").read_text() == "new"
    assert names_in(folder) == {"config.json", "code", *(["mine.txt"] if "full" in target else [])}
    assert names_in(folder / "code") == {"a.py", *(["b.py"] if "full" in target else [])}
    assert before is None or (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)
    assert names_in(tmp_path) == {"model", *(["link"] if "link" in target else [])}


def test_a_model_replaces_the_weights_of_another(tmp_path):
    """Transformers would load an old model.safetensors beside the shards of the new one."""
    fill(tmp_path / "model", **{"model.safetensors": "old", "adapter.safetensors": "mine"})
    fill(tmp_path / "model", **{"model-00001-of-00002.safetensors": "new", "model.safetensors.index.json": "new"})
    expected = {"config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    assert names_in(tmp_path / "model") == {*expected, "adapter.safetensors"}


def test_the_config_of_a_model_comes_last(tmp_path, monkeypatch):
    """A folder whose filling was cut off is not a model, neither the old one nor the new."""
    fill(tmp_path)
    order = []
    replace = os.replace

    def seen(source, target):
        order.append((target.name, (tmp_path / "config.json").exists()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    fill(tmp_path, **{"a.py": "new", "model.safetensors": "new"})
    assert sorted(order[:2]) == [("a.py", False), ("model.safetensors", False)]
    assert order[2:] == [("config.json", False)]


def test_threads_that_write_one_file_do_not_meet_and_a_symlink_stays(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    contents = [letter * 100_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda content: write_atomically(tmp_path / "link", content), contents * 10))
    assert (tmp_path / "file").read_text() in contents
    assert names_in(tmp_path) == {"file", "link"} and (tmp_path / "link").is_symlink()


def test_what_fails_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    fill(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    for name in ("model", "empty", "new"):
        with pytest.raises(ZeroDivisionError), written_whole(tmp_path / name) as folder:
            (folder / "config.json").write_text("newer")
            raise ZeroDivisionError
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "model" / "config.json", "newer")
    assert names_in(tmp_path) == {"model", "empty"} and names_in(tmp_path / "model") == {"config.json"}
    assert (tmp_path / "model" / "config.json").read_text() == "new"
    assert names_in(tmp_path / "empty") == set()
