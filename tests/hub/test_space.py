"""The page as a Space, and `push --space`, against a Hub that only takes notes."""

import re
from pathlib import Path

import pytest
from huggingface_hub import RepoCard

from hydra_transformers.cli import main
from hydra_transformers.hub import HubError, publishing, push_space_to_hub, space, write_space
from hydra_transformers.hub.space import MOST_OF_A_GROUP
from tests.command_line import parsed
from tests.hub.fake_hub import commits
from tests.pages import ROOT
from tests.serving.tiny import save_image_models
from tests.tiny_data import pictures


@pytest.fixture
def examples(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "known").mkdir(parents=True)
    (folder / ".cache").mkdir()
    pictures([0])[0].save(folder / "known" / "red.png")
    return folder


def words_of(app: Path) -> list[str]:
    """What app.py hands to the command line."""
    found = re.search(r"main\((\[.*\])\)", app.read_text())
    return eval(found[1])


def test_the_folder_is_a_whole_space(tmp_path, examples):
    folder = write_space(tmp_path / "space", "me/my-hydra", single="me/single", examples=examples)
    card = RepoCard.load(folder / "README.md", ignore_metadata_errors=False)
    assert card.data.to_dict() | {"sdk_version": "", "python_version": ""} == {
        "title": "my-hydra",
        "sdk": "gradio",
        "sdk_version": "",
        "python_version": "",
        "app_file": "app.py",
        "models": ["me/my-hydra", "me/single"],
    }
    values = parsed(words_of(folder / "app.py"))
    assert tuple(values[name] for name in ("model", "single", "host", "port")) == (
        "me/my-hydra",
        "me/single",
        "0.0.0.0",
        7860,
    )
    assert (folder / values["examples"] / "known" / "red.png").exists() and not (folder / "examples/.cache").exists()
    lines = (folder / "requirements.txt").read_text().splitlines()
    assert {"pillow", "torch>=2.11"} <= set(lines) and not any("gradio" in line or "extra" in line for line in lines)


def test_the_space_brings_the_package_that_it_was_written_with(tmp_path):
    folder = write_space(tmp_path / "space", "me/my-hydra")
    of_package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hydra_transformers").rglob("*")
        if path.is_file() and not {"__pycache__", "demo"} & set(path.parts)
    }
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == of_package | {
        "README.md",
        "app.py",
        "requirements.txt",
    }
    assert "--examples" not in words_of(folder / "app.py") and "--single" not in words_of(folder / "app.py")


def test_a_file_of_texts_comes_along(tmp_path):
    (tmp_path / "reviews.txt").write_text("a good film\n")
    folder = write_space(tmp_path / "space", "me/my-hydra", examples=tmp_path / "reviews.txt")
    assert words_of(folder / "app.py")[-2:] == ["--examples", "examples/reviews.txt"]
    assert (folder / "examples" / "reviews.txt").read_text() == "a good film\n"


def test_what_a_space_cannot_have_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="a Space loads its models from the Hub: pass a Hub name"):
        write_space(tmp_path / "space", "me/my-hydra", single=str(tmp_path))
    for names in ({"repo_id": 'me/"""; import os'}, {"repo_id": "me/a", "single": "b](x)"}):
        with pytest.raises(ValueError, match=r"(repo_id|single) is .*: pass an id of the Hub"):
            write_space(tmp_path / "space", **names)
    monkeypatch.setattr(space, "version", lambda name: (_ for _ in ()).throw(space.PackageNotFoundError(name)))
    with pytest.raises(ImportError, match="needs Gradio"):
        write_space(tmp_path / "space", "me/my-hydra")
    with pytest.raises(ValueError, match=r"holds no Space, it has no app\.py"):
        push_space_to_hub(tmp_path, "me/page")
    assert not (tmp_path / "space").exists()


def test_a_folder_with_anything_but_a_space_stays_as_it_is(tmp_path):
    (tmp_path / "my-hydra").mkdir()
    (tmp_path / "my-hydra" / "model.safetensors").write_text("weights")
    with pytest.raises(ValueError, match="my-hydra holds something other than a Space: pass another folder"):
        write_space(tmp_path / "my-hydra", "me/my-hydra")
    assert [path.name for path in (tmp_path / "my-hydra").iterdir()] == ["model.safetensors"]
    again = [write_space(tmp_path / "space", "me/my-hydra") / "README.md" for _ in range(2)]
    assert again[1].exists()


def test_a_space_goes_in_one_commit_and_old_code_goes(tmp_path, hub):
    folder = write_space(tmp_path / "space", "me/my-hydra")
    hub.files = {"hydra_transformers/old.py": b"", "examples/old.png": b"", "notes.md": b"mine"}
    assert push_space_to_hub(folder, "me/page", private=True) == "commit"
    asked = {"repo_id": "me/page", "repo_type": "space", "space_sdk": "gradio", "private": True, "exist_ok": True}
    assert hub.calls[0] == ("create_repo", asked) and commits(hub)[0]["repo_type"] == "space"
    assert {"README.md", "app.py", "requirements.txt", "notes.md", "hydra_transformers/serving/page.css"} < set(
        hub.files
    )
    assert not {"hydra_transformers/old.py", "examples/old.png"} & set(hub.files)
    push_space_to_hub(folder, "me/page")
    assert [commit["changed"] == [] for commit in commits(hub)] == [False, True]


def test_what_the_hub_refuses_is_said_in_one_sentence(tmp_path, hub, monkeypatch):
    folder = write_space(tmp_path / "space", "me/my-hydra")
    hub.fails_with = ConnectionError("no route")
    with pytest.raises(HubError, match="could not be reached"):
        push_space_to_hub(folder, "me/page")
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    with pytest.raises(HubError, match="there is no token for the Hub"):
        push_space_to_hub(folder, "me/page")


# Examples: all of them become public


def files_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_lies_beside_texts_stays_private(tmp_path):
    examples = tmp_path / "mine"
    (examples / "raw").mkdir(parents=True)
    for name in ("good.txt", "customers.csv", "raw/all.txt"):
        (examples / name).write_text("a film\n")
    space = write_space(tmp_path / "space", "me/my-hydra", examples=examples)
    assert files_in(space / "examples") == {"good.txt"}


def test_pictures_that_are_not_shown_stay_private(tmp_path):
    examples = tmp_path / "mine"
    (examples / "known" / "raw").mkdir(parents=True)
    [picture] = pictures([0])
    names = [f"known/{number:02}.png" for number in range(MOST_OF_A_GROUP + 1)]
    for name in (*names, "first.png", "known/raw/deep.png"):
        picture.save(examples / name)
    space = write_space(tmp_path / "space", "me/my-hydra", examples=examples)
    assert files_in(space / "examples") == {"first.png", *names[:-1]}


# On the command line


@pytest.fixture
def hydra(tmp_path):
    return save_image_models(tmp_path)[0]


def test_push_publishes_the_model_and_its_page(hydra, examples, hub, capsys):
    words = ["push", str(hydra), "me/my-hydra", "--space", "me/page", "--space-examples", str(examples)]
    assert main(words) == 0
    kinds = [arguments.get("repo_type") for name, arguments in hub.calls if name == "create_commit"]
    assert kinds == [None, "space"] and "published the page: commit" in capsys.readouterr().out
    assert words_of(hydra / "space" / "app.py")[1] == "me/my-hydra" and "examples/known/red.png" in hub.files
    (hydra / "space" / "app.py").write_text("# mine\n")
    hub.files.clear()  # here model and page would have one README.md
    assert main(words) == 0
    assert hub.files["app.py"] == b"# mine\n"
    assert "is published as it is, and --space-examples is ignored" in capsys.readouterr().err


def test_push_refuses_a_bad_page_before_it_publishes_anything(hydra, examples, hub, capsys):
    (examples / "known" / "broken.png").write_text("no image")
    for flags, sentence in (
        (["--space-single", "me/single"], "--space-single is about a page: name its Space with --space"),
        (["--space", "a b"], "repo_id is 'a b'"),
        (["--space", "me/page", "--space-examples", str(examples)], "broken.png is no image"),
        (["--space", "me/page", "--space-single", str(hydra)], "a Space loads its models from the Hub"),
    ):
        assert main(["push", str(hydra), "me/my-hydra", *flags]) == 2
        assert sentence in capsys.readouterr().err
    assert not hub.calls and not (hydra / "space").exists()
