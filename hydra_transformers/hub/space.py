"""Writes the folder of a Space on the Hub with the page of a published model."""

import os
import shutil
from importlib.metadata import requires, version
from pathlib import Path

from huggingface_hub import RepoCard, SpaceCardData

from .._io.files import written_whole
from .card import check_names


PACKAGE = Path(__file__).parents[1]
NOT_NEEDED = ("__pycache__", "demo")
APP = '''"""The page of {repo_id}."""

import sys

from hydra_transformers.cli import main


sys.exit(main(["app", "{repo_id}", "--host", "0.0.0.0", "--port", "7860"]))
'''


def write_space(folder: str | os.PathLike, repo_id: str) -> Path:
    """Write a Space into a folder: README.md, app.py, requirements.txt and this package.

    `push_space_to_hub` publishes it.

    Args:
        folder (`str` or `os.PathLike`):
            A new folder, or a Space that was written before, whose files are replaced.
        repo_id (`str`):
            The model on the Hub, which the Space loads when it starts.

    Returns:
        `Path`: the folder.
    """
    check_names(repo_id=repo_id)
    folder = Path(folder)
    is_space = (folder / "app.py").is_file() and (folder / PACKAGE.name).is_dir()
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_space and not is_free:
        raise ValueError(f"{folder} holds something other than a Space: pass another folder, or remove it")

    # The page that visitors see before the Space has started.
    title = repo_id.rpartition("/")[2]
    data = SpaceCardData(title=title, sdk="gradio", sdk_version=version("gradio"), app_file="app.py", models=[repo_id])
    link = f"[{repo_id}](https://huggingface.co/{repo_id})"
    text = f"# {title}\n\nThe page of {link}. What you send is deleted after an hour.\n"

    # The package itself lies beside app.py: only what it needs is installed.
    needed = [line for line in requires("hydra-transformers") or () if "extra ==" not in line]
    needed = sorted([*needed, "pillow"])
    with written_whole(folder) as unfinished:
        shutil.copytree(PACKAGE, unfinished / PACKAGE.name, ignore=shutil.ignore_patterns(*NOT_NEEDED))
        (unfinished / "app.py").write_text(APP.format(repo_id=repo_id), encoding="utf-8")
        (unfinished / "requirements.txt").write_text("\n".join(needed) + "\n", encoding="utf-8")
        RepoCard(f"---\n{data.to_yaml()}\n---\n{text}").save(unfinished / "README.md")
    return folder
