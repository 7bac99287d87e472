"""Examples for visitors to click on, from a folder or a file."""

import os
from pathlib import Path

from .page_inputs import USUAL, InputError, Limits, check_text, read_image


MOST_OF_A_GROUP = 24
DEFAULT_GROUP = "Examples"


def read_examples(path: str | os.PathLike, reads: str, limits: Limits = USUAL) -> dict[str, list[str]]:
    """Group -> files of images, or texts, in the order of their names or lines; each is one that the page will take.

    path: of images a folder, and each folder in it a group with its name; of texts a file with one on each line, or a
        folder of such files, each a group
    reads: "images" or "texts"
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there are no examples {path}: pass a folder, or for texts a file")
    groups = _texts(path) if reads == "texts" else _images(path)
    groups = {name: values[:MOST_OF_A_GROUP] for name, values in groups.items() if values}
    if not groups:
        wanted = "a text file with one text on each line" if reads == "texts" else "a folder of images"
        raise ValueError(f"{path} has no examples in it: pass {wanted}")
    for values in groups.values():
        for value in values:
            try:
                check_text(value, limits) if reads == "texts" else read_image(Path(value).resolve(), limits)
            except InputError as error:
                raise ValueError(f"an example of {path} cannot be shown: {error}") from error
    return groups


def example_files(path: str | os.PathLike) -> list[Path]:
    """The files that `read_examples` reads of a file or folder, and no others that may lie there."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    texts = _text_files(path).values()
    return list(texts) or [Path(file) for files in _images(path).values() for file in files[:MOST_OF_A_GROUP]]


def _images(path: Path) -> dict[str, list[str]]:
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: pass a folder of images as examples")
    folders = {DEFAULT_GROUP: path} | {each.name: each for each in _visible(path) if each.is_dir()}
    return {name: [str(file) for file in _visible(each) if file.is_file()] for name, each in folders.items()}


def _texts(path: Path) -> dict[str, list[str]]:
    files = _text_files(path) if path.is_dir() else {DEFAULT_GROUP: path}
    return {name: _lines(file) for name, file in files.items()}


def _text_files(folder: Path) -> dict[str, Path]:
    return {each.stem: each for each in _visible(folder) if each.suffix == ".txt"}


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: pass one text on each line") from error


def _visible(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
