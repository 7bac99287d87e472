"""What models read: images, the lengths of texts, and the evaluation mode in which they read
them."""

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import image_utils


# Images


def read_image(image: Any, name: str = "the image", mode: str = "RGB", timeout: float | None = None) -> Any:
    """Return a new image of PIL as a model reads it: turned as its EXIF tag says, without
    transparency, 8 bits a channel.

    image: of PIL; or a path or a URL
    name: what messages call it
    mode: "RGB", or "L" for a model of one channel
    """
    PIL = image_utils.PIL
    if isinstance(image, (str, os.PathLike)):
        source = os.fspath(image)
        if source.startswith(("http://", "https://")):
            response = image_utils.httpx.get(source, timeout=timeout, follow_redirects=True)
            source = io.BytesIO(response.content)
        with PIL.Image.open(source) as opened:
            return read_image(opened, name, mode)
    if not hasattr(image, "mode"):
        raise TypeError(f"{name} is a {type(image).__name__}: pass an image of PIL, a path or a URL")
    if image.mode.startswith(("I", "F")):  # converted, everything above level 255 would be white
        raise ValueError(f"{name} has the mode {image.mode}, of more than 256 levels: scale it to 8 bits first")
    converted = PIL.ImageOps.exif_transpose(image).convert(mode)
    converted.info.clear()  # a broken EXIF tag would make Transformers' pipeline fail, which turns images once more
    return converted


def image_mode(config: Any) -> str:
    """Return the mode of PIL in which a model reads images."""
    if getattr(config, "num_channels", 3) == 1:
        return "L"
    return "RGB"


# Texts


def has_content(text: str) -> bool:
    """Whether a text holds a character that one can see."""
    return any(character.isprintable() and not character.isspace() for character in text)


def most_tokens(model: nn.Module) -> int:
    """Return how long a text may be: RoBERTa and MPNet count positions from the padding token's
    number on, which takes some of them."""
    taken = 0
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "position_embeddings":
            padding = getattr(module, "padding_idx", None)
            if padding is not None:
                taken = max(taken, padding + 1)
    return model.config.max_position_embeddings - taken


# The mode of a model


_MODES_LOCK = threading.Lock()
# id of a module in evaluation mode -> [uses, whether it was in training mode before]
_MODES: dict[int, list[int]] = {}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a while, thread-safe: a module is back in its mode when the
    last of all threads has left."""
    modules = list(model.modules())
    with _MODES_LOCK:
        for module in modules:
            _MODES.setdefault(id(module), [0, module.training])[0] += 1
        model.eval()
    try:
        yield
    finally:
        with _MODES_LOCK:
            for module in modules:
                mode = _MODES[id(module)]
                mode[0] -= 1
                if mode[0] == 0:
                    del _MODES[id(module)]
                    module.training = module.training or bool(mode[1])
