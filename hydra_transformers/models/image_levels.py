"""Images whose pixels a model would not see: those of more levels than PIL's RGB has."""

from typing import Any


def check_levels(image: Any, name: str) -> None:
    """Refuses an image of PIL of more than 256 levels: made RGB, all that is above the 255th would be white."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"{name} has the mode {image.mode}, of more than 256 levels: scale it to 8 bits a channel first"
        )
