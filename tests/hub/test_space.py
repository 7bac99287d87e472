"""The page as a Space, and `push --space`, against a Hub that only takes notes."""

import ast

import pytest
from huggingface_hub import RepoCard

from hydra_transformers.cli import main
from hydra_transformers.hub import publishing, push_space_to_hub, write_space
from tests.command_line import parsed
from tests.hub.fake_hub import commits
from tests.pages import ROOT
from tests.serving.tiny import save_image_models


def test_the_folder_is_a_whole_space_with_the_package_that_it_was_written_with(tmp_path):
    folder = write_space(tmp_path / "space", "me/my-hydra")
    data = RepoCard.load(folder / "README.md", ignore_metadata_errors=False).data.to_dict()
    expected = {"title": "my-hydra", "sdk": "gradio", "app_file": "app.py", "models": ["me/my-hydra"]}
    assert data.pop("sdk_version") and data == expected
    app = (folder / "app.py").read_text()
    [call] = [node for node in ast.walk(ast.parse(app)) if getattr(getattr(node, "func", None), "id", "") == "main"]
    values = parsed(ast.literal_eval(call.args[0]))
    assert tuple(values[name] for name in ("model", "host", "port")) == ("me/my-hydra", "0.0.0.0", 7860)
    lines = (folder / "requirements.txt").read_text().splitlines()
    assert {"pillow", "torch>=2.11"} <= set(lines) and not any("gradio" in line or "extra" in line for line in lines)
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hydra_transformers").rglob("*")
        if path.is_file() and not {"__pycache__", "demo"} & set(path.parts)
    }
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == package | {"README.md", "app.py", "requirements.txt"} and len(app.splitlines()) <= 10


def test_what_is_not_a_space_stays_as_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"repo_id is .*: pass an id of the Hub"):
        write_space(tmp_path / "space", 'me/"""; import os')
    with pytest.raises(ValueError, match=r"is not a Space, it has no app\.py"):
        push_space_to_hub(tmp_path, "me/page")
    assert not (tmp_path / "space").exists()
    (tmp_path / "my-hydra").mkdir()
    (tmp_path / "my-hydra" / "model.safetensors").write_text("weights")
    with pytest.raises(ValueError, match="my-hydra holds something other than a Space: pass another folder"):
        write_space(tmp_path / "my-hydra", "me/my-hydra")
    assert [path.name for path in (tmp_path / "my-hydra").iterdir()] == ["model.safetensors"]
    assert all((write_space(tmp_path / "space", "me/my-hydra") / "README.md").exists() for _ in range(2))


def test_a_space_goes_in_one_commit_and_old_code_goes(tmp_path, hub, monkeypatch):
    folder = write_space(tmp_path / "space", "me/my-hydra")
    hub.files = {"hydra_transformers/old.py": b"", "notes.md": b"mine"}
    assert push_space_to_hub(folder, "me/page", private=True) == "commit"
    asked = {"repo_id": "me/page", "repo_type": "space", "space_sdk": "gradio", "private": True, "exist_ok": True}
    assert hub.calls[0] == ("create_repo", asked) and commits(hub)[0]["repo_type"] == "space"
    assert {"README.md", "app.py", "requirements.txt", "notes.md"} < set(hub.files)
    assert "hydra_transformers/old.py" not in hub.files
    push_space_to_hub(folder, "me/page")
    assert [commit["changed"] == [] for commit in commits(hub)] == [False, True]
    hub.fails_with = ConnectionError("no route")
    with pytest.raises(publishing.HubError, match="me/page was not published"):
        push_space_to_hub(folder, "me/page")
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    with pytest.raises(publishing.HubError, match="there is no token for the Hub"):
        push_space_to_hub(folder, "me/page")


def test_push_publishes_the_model_and_its_page(tmp_path, hub, capsys):
    hydra = save_image_models(tmp_path)[0]
    assert main(["push", str(hydra), "me/my-hydra", "--space", "a b"]) == 2
    assert "repo_id is 'a b'" in capsys.readouterr().err and not hub.calls and not (hydra / "space").exists()
    words = ["push", str(hydra), "me/my-hydra", "--space", "me/page"]
    assert main(words) == 0
    kinds = [arguments.get("repo_type") for name, arguments in hub.calls if name == "create_commit"]
    assert kinds == [None, "space"] and "published the page: commit" in capsys.readouterr().out
    assert b'"me/my-hydra"' in hub.files["app.py"] and not (hydra / "space").exists()
