"""What users send: read within limits, and refused in a sentence."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..models import pipeline_hydra


if TYPE_CHECKING:
    from PIL.Image import Image

# Those of Pillow's formats that people have images in; some others start programs or read other files.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
MEGABYTE = 1_000_000


class InputError(ValueError):
    """Something the user can put right; the message is a sentence for the page."""


@dataclass(frozen=True)
class Limits:
    """
    megabytes: of an image's file
    pixels: of an image; a small file can hold very many
    slender: its long side by its short one; processors scale the short one up, and the long one with it
    characters: of a text, or of the names of the classes
    classes: for CLIP to choose from
    """

    megabytes: float = 10.0
    pixels: int = 50_000_000
    slender: int = 100
    characters: int = 10_000
    classes: int = 100


USUAL = Limits()


def read_image(path: str | os.PathLike, limits: Limits = USUAL, name: str | None = None) -> "Image":
    """An image in RGB; nothing is decoded of one that is too large.

    name: what the user calls it; by default that of the file
    """
    from PIL import Image

    path, name = Path(path), name or Path(path).name
    try:
        if path.stat().st_size > limits.megabytes * MEGABYTE:
            raise InputError(f"{name} has more than {limits.megabytes:g} MB: send a smaller file.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit here is lower
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > limits.pixels:
                    raise InputError(
                        f"{name} has {width:,} x {height:,} pixels, more than {limits.pixels:,}: send a smaller image."
                    )
                if max(width, height) > limits.slender * min(width, height):
                    raise InputError(
                        f"{name} is more than {limits.slender} times as long as wide: send an image that is less so."
                    )
                try:
                    return pipeline_hydra.read_image(image, name)
                except ValueError as error:
                    raise InputError(f"{error}.") from error
    except InputError:
        raise
    except Image.UnidentifiedImageError as error:
        raise InputError(f"{name} is no image that can be read: send a {_listed(FORMATS)} file.") from error
    except Image.DecompressionBombError as error:
        raise InputError(f"{name} has more than {limits.pixels:,} pixels: send a smaller image.") from error
    except Exception as error:  # whatever a broken file makes a decoder raise
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        raise InputError(f"{name} is broken ({reason or type(error).__name__}): send another file.") from error


def check_text(text: str, limits: Limits = USUAL) -> str:
    """The text as it is."""
    if not text.strip():
        raise InputError("There is no text yet: type some.")
    if len(text) > limits.characters:
        raise InputError(
            f"The text has {len(text):,} characters, more than {limits.characters:,}: send a shorter one."
        )
    return text


def read_class_names(text: str, limits: Limits = USUAL) -> list[str]:
    """Names between commas or line ends, each once."""
    if len(text) > limits.characters:
        raise InputError(f"The classes have more than {limits.characters:,} characters: name fewer.")
    names = [name.strip() for line in text.splitlines() for name in line.split(",")]
    names = list(dict.fromkeys(filter(None, names)))
    if len(names) < 2:
        raise InputError("Name at least two classes to choose from, with commas between them.")
    if len(names) > limits.classes:
        raise InputError(f"These are {len(names)} classes, more than {limits.classes}: name fewer.")
    return names


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
