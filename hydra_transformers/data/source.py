"""The arguments that select the rows and columns of a data set."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataSource:
    """The arguments of `load_data` that select rows and columns."""

    data: Any
    split: str | Sequence[str] | None = None
    part: str | None = None
    limit: int | None = None
    image: str | None = None
    audio: str | None = None
    text: str | Sequence[str] | None = None
    label: str | None = None
    label_separator: str | None = None
    labels_in_order: bool = False
    max_length: int | None = None

    @property
    def name(self) -> str:
        """The name of the data in messages."""
        return os.fspath(self.data) if isinstance(self.data, (str, os.PathLike)) else "data"

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that `text` names: none, one, or two of pairs."""
        if not self.text:
            return ()
        return tuple(name.strip() for name in (self.text.split(",") if isinstance(self.text, str) else self.text))
