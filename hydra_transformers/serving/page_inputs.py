"""Reads what visitors of the page send, within limits; the rest gets a sentence."""

import os
from pathlib import Path
from typing import Any

from ..hub.handler import FORMATS as SERVER_FORMATS
from ..hub.handler import RequestError
from ..hub.handler import read_audio as decode_audio
from ..hub.handler import read_image as decode_image


FORMATS = (*SERVER_FORMATS, "TIFF")
MOST_MEGABYTES = 10
MOST_PIXELS = 50_000_000  # a small file can hold very many
MOST_CHARACTERS = 10_000  # of a text, or of the names of the classes
MOST_CLASSES = 100  # for CLIP to choose from
MOST_OF_A_GROUP = 24  # examples


def read_file(path: str | os.PathLike, reads: str, name: str | None = None, rate: int = 16_000) -> Any:
    """An image in RGB, or the samples of a 16-bit WAV file (samples,).

    reads: "images" or "audio"; name: the visitor's name for the file; rate: samples per second that the model reads
    """
    path, name = Path(path), name or Path(path).name
    if path.is_symlink() or not path.is_file():  # not a FIFO or device, which could be read for ever
        raise RequestError(f"{name} cannot be opened: send it again")
    if path.stat().st_size > MOST_MEGABYTES * 1_000_000:
        raise RequestError(f"{name} has more than {MOST_MEGABYTES} MB: send a smaller file")
    if reads == "audio":
        return decode_audio(path.read_bytes(), name, rate)
    return decode_image(path.read_bytes(), name, MOST_PIXELS, formats=FORMATS)


def check_text(text: str) -> str:
    """The text as it is."""
    if not text.strip():
        raise RequestError("There is no text yet: type some")
    if len(text) > MOST_CHARACTERS:
        raise RequestError(f"The text has {len(text):,} characters: send at most {MOST_CHARACTERS:,}")
    return text


def read_class_names(text: str) -> list[str]:
    """Names between commas or line ends, each once."""
    names = [name.strip() for name in check_text(text).replace("\n", ",").split(",")]
    names = list(dict.fromkeys(filter(None, names)))
    if not 2 <= len(names) <= MOST_CLASSES:
        raise RequestError(f"These are {len(names)} classes: name 2 to {MOST_CLASSES}, with commas between them")
    return names


def read_examples(path: str | os.PathLike, reads: str, rate: int = 16_000) -> dict[str, list[str]]:
    """Examples to click on: group -> files of images or audio, or texts. One that cannot be shown raises an error.

    path: for images and audio a folder, each folder in it a group; for texts a file with one on each line
    reads: "images", "audio" or "texts"
    rate: samples of audio per second that the model reads
    """
    path = Path(path)
    if reads == "texts":
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        groups = {"Examples": [line.strip() for line in lines if line.strip()]}
    else:
        folders = {"Examples": path} | {each.name: each for each in sorted(path.glob("[!.]*")) if each.is_dir()}
        files = {name: sorted(each.glob("[!.]*")) for name, each in folders.items()}
        groups = {name: [str(file) for file in inside if file.is_file()] for name, inside in files.items()}
    groups = {name: values[:MOST_OF_A_GROUP] for name, values in groups.items() if values}
    if not groups:
        expected = "a text file with one text on each line" if reads == "texts" else f"a folder of {reads}"
        raise ValueError(f"there are no examples in {path}: pass {expected}")
    for values in groups.values():
        for value in values:
            check_text(value) if reads == "texts" else read_file(Path(value).resolve(), reads, rate=rate)
    return groups
