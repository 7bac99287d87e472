"""Reads what visitors of the page send, within limits, and refuses the rest in a sentence."""

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..hub.handler import FORMATS as SERVER_FORMATS
from ..hub.handler import RequestError
from ..hub.handler import read_image as decode_image
from ..hub.handler import read_sound as decode_sound
from ..hub.space import DEFAULT_GROUP, MOST_OF_A_GROUP, example_files, text_files


if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

FORMATS = (*SERVER_FORMATS, "TIFF")
MEGABYTE = 1_000_000
SECONDS_TO_READ = 10.0

Found = TypeVar("Found")


@dataclass(frozen=True)
class Limits:
    """
    megabytes: of the file of an image or a sound
    pixels: of an image; a small file can hold very many
    characters: of a text, or of the names of the classes
    classes: for CLIP to choose from
    """

    megabytes: float = 10.0
    pixels: int = 50_000_000
    characters: int = 10_000
    classes: int = 100


USUAL = Limits()


def read_image(path: str | os.PathLike, limits: Limits = USUAL, name: str | None = None) -> "Image":
    """An image in RGB. Links, FIFOs, devices and folders are refused, without the system's reason.

    name: the visitor's name for it, by default the file's
    """
    name = name or Path(path).name

    def read() -> "Image":
        return decode_image(_content(path, limits, name), name, limits.pixels, formats=FORMATS)

    return _within(SECONDS_TO_READ, name, read)


def read_sound(path: str | os.PathLike, rate: int, limits: Limits = USUAL, name: str | None = None) -> "np.ndarray":
    """The samples of a 16-bit WAV file with `rate` of them per second, (samples,). Files and names are as for `read_image`."""
    name = name or Path(path).name
    return _within(SECONDS_TO_READ, name, lambda: decode_sound(_content(path, limits, name), name, rate))


def _content(path: str | os.PathLike, limits: Limits, name: str) -> bytes:
    most = int(limits.megabytes * MEGABYTE)
    try:
        # O_NONBLOCK, because opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("not a regular file")
            content = file.read(most + 1) or b""  # None where nothing is there yet, as in /proc
    except OSError as error:
        raise RequestError(f"{name} cannot be opened: send it again") from error
    if len(content) > most:
        raise RequestError(f"{name} has more than {limits.megabytes:g} MB: send a smaller file")
    return content


def _within(seconds: float, name: str, read: Callable[[], Found]) -> Found:
    """Calls `read` in a thread that is given up after a while: a hanging disk must not stop the page for everyone."""
    found: Future[Found] = Future()

    def run() -> None:
        try:
            found.set_result(read())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return found.result(seconds)
    except FutureTimeout as error:
        raise RequestError(f"{name} could not be read within {seconds:g} seconds: send another file") from error


def check_text(text: str, limits: Limits = USUAL) -> str:
    """The text as it is."""
    if not text.strip():
        raise RequestError("There is no text yet: type some")
    if len(text) > limits.characters:
        raise RequestError(
            f"The text has {len(text):,} characters, more than {limits.characters:,}: send a shorter one"
        )
    return text


def read_class_names(text: str, limits: Limits = USUAL) -> list[str]:
    """Names between commas or line ends, each once."""
    if len(text) > limits.characters:
        raise RequestError(f"The classes have more than {limits.characters:,} characters: name fewer")
    names = [name.strip() for line in text.splitlines() for name in line.split(",")]
    names = list(dict.fromkeys(filter(None, names)))
    if len(names) < 2:
        raise RequestError("Name at least two classes to choose from, with commas between them")
    if len(names) > limits.classes:
        raise RequestError(f"These are {len(names)} classes, more than {limits.classes}: name fewer")
    return names


def read_examples(
    path: str | os.PathLike, reads: str, limits: Limits = USUAL, rate: int = 16_000
) -> dict[str, list[str]]:
    """Examples to click on: group -> files of images or sounds, or texts, in the order of their names or lines.

    path: for images and sounds a folder, each folder in it a group; for texts a file with one on each line, or a folder of
        such files, each a group
    reads: "images", "sounds" or "texts"
    rate: how many samples of a sound per second the model reads
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there are no examples {path}: pass a folder, or for texts a file")
    if reads == "texts":
        files = text_files(path) if path.is_dir() else {DEFAULT_GROUP: path}
        groups = {name: _lines(file) for name, file in files.items()}
    else:
        groups = example_files(path, reads)
    groups = {name: values[:MOST_OF_A_GROUP] for name, values in groups.items() if values}
    if not groups:
        expected = "a text file with one text on each line" if reads == "texts" else f"a folder of {reads}"
        raise ValueError(f"{path} has no examples in it: pass {expected}")
    for value in (value for values in groups.values() for value in values):
        try:
            if reads == "texts":
                check_text(value, limits)
            elif reads == "sounds":
                read_sound(Path(value).resolve(), rate, limits)
            else:
                read_image(Path(value).resolve(), limits)
        except RequestError as error:
            raise ValueError(f"an example of {path} cannot be shown: {error}") from error
    return groups


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: pass one text on each line") from error
