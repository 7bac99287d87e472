"""Writes the folder of a Space on the Hub with the page of a published model."""

import json
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from huggingface_hub import RepoCard, SpaceCardData

from .._io.files import written_whole
from .card import check_names


PACKAGE = Path(__file__).parents[1]
NOT_NEEDED = ("__pycache__", "demo")
EXAMPLES = "examples"
MOST_OF_A_GROUP = 24
DEFAULT_GROUP = "Examples"

README = """
# {title}

The page of [{repo_id}](https://huggingface.co/{repo_id}): its answer to what you send, that of each of its members, how uncertain
it is and why, and "I don't know" where it was calibrated to say so.

The same on your machine: `hydra-transformers app {repo_id}`. What you send is deleted after an hour.
"""

APP = '''"""The page of {repo_id}."""

import sys

from hydra_transformers.cli import main


sys.exit(main({words}))
'''


def write_space(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    single: str | None = None,
    examples: str | os.PathLike | None = None,
) -> Path:
    """Writes a Space into a folder: README.md, app.py, requirements.txt, this package, and the examples.

    Args:
        folder: a new one, or a Space that was written before, which is replaced.
        repo_id: the model on the Hub, which the Space loads when it starts.
        single: another model on the Hub, whose answers are shown beside.
        examples: a folder, or for texts a file: see `hydra_transformers.serving.read_examples`.

    `push_space_to_hub` publishes it.
    """
    if single is not None and Path(single).exists():
        raise ValueError(f"single is the folder {single}, and a Space loads its models from the Hub: pass a Hub name")
    check_names(repo_id=repo_id, single=single)
    folder = Path(folder)
    is_space = (folder / "app.py").is_file() and (folder / PACKAGE.name).is_dir()
    if folder.exists() and not is_space and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something other than a Space: pass another folder, or remove it")
    words = ["app", repo_id, "--host", "0.0.0.0", "--port", "7860"]
    words += [] if single is None else ["--single", single]
    sdk = _version("gradio", "push --space needs Gradio, to try the page first: pip install 'gradio>=6'")
    needed = _requirements()
    with written_whole(folder) as unfinished:
        if examples is not None:
            words += ["--examples", _copied(Path(examples), unfinished / EXAMPLES).relative_to(unfinished).as_posix()]
        shutil.copytree(PACKAGE, unfinished / PACKAGE.name, ignore=shutil.ignore_patterns(*NOT_NEEDED))
        (unfinished / "app.py").write_text(
            APP.format(repo_id=repo_id, words=json.dumps(words, ensure_ascii=False)), encoding="utf-8"
        )
        (unfinished / "requirements.txt").write_text("\n".join(needed) + "\n", encoding="utf-8")
        _readme(repo_id, single, sdk).save(unfinished / "README.md")
    return folder


def _readme(repo_id: str, single: str | None, sdk_version: str) -> RepoCard:
    title = repo_id.rpartition("/")[2]
    data = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=sdk_version,
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        app_file="app.py",
        models=[repo_id, *filter(None, [single])],
    )
    return RepoCard(f"---\n{data.to_yaml()}\n---\n{README.format(title=title, repo_id=repo_id)}")


def _requirements() -> list[str]:
    """The requirements of the package, and Pillow; a Space has Gradio anyway."""
    try:
        found = requires("hydra-transformers") or []
    except PackageNotFoundError as error:
        raise ValueError(
            "hydra-transformers is not installed here, so the requirements of its page are not known: pip install . in its folder"
        ) from error
    return sorted([*(each for each in found if "extra ==" not in each), "pillow"])


def _version(package: str, missing: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise ImportError(missing) from error


def _copied(examples: Path, folder: Path) -> Path:
    """Copies only the examples that the page shows: all of them become public."""
    if not examples.is_dir():
        folder.mkdir()
        return Path(shutil.copy(examples, folder))
    files = list(text_files(examples).values())
    files = files or [Path(each) for group in example_files(examples).values() for each in group[:MOST_OF_A_GROUP]]
    for file in files:
        place = folder / file.relative_to(examples)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    return folder


def example_files(path: Path, reads: str = "images") -> dict[str, list[str]]:
    """Group -> the images or sounds of a folder, and of each folder in it."""
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: pass a folder of {reads} as examples")
    folders = {DEFAULT_GROUP: path} | {each.name: each for each in _visible(path) if each.is_dir()}
    return {name: [str(file) for file in _visible(each) if file.is_file()] for name, each in folders.items()}


def text_files(folder: Path) -> dict[str, Path]:
    """Group -> the file with its texts."""
    return {each.stem: each for each in _visible(folder) if each.suffix == ".txt"}


def _visible(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
