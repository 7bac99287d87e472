"""Data sets that are corrupted when they are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..data.batches import ChangedBatches, check_is_data
from .corruptions import SEVERITIES, corrupt, corruption_named, names_of


def corrupted(data: Any, name: str, severity: int, seed: int = 0, *, processor: Any = None) -> Any:
    """A data set that `corrupt` changes when it is read; it can be used wherever `data` can.

    Args:
        data (`DataLoader`, `Dataset` or `list`): `pixel_values` as `batches` takes them, or texts or images of `load_data`.
        name (`str`), severity (`int`), seed (`int`, defaults to 0): as in `corrupt`.
        processor (image processor, *optional*): what scaled `pixel_values`. By default that of the data set, also in a
            DataLoader or Subset (`load_data` keeps it there); without one, images are taken to lie in [0, 1].

    Images are corrupted in batches, on the device they are read to, at the size the model reads, as in ImageNet-C. Texts are
    corrupted before they are tokenized.
    """
    kind = kind_of(data)
    corruption_named(name, kind, severity)
    settings = {"name": name, "severity": severity, "seed": seed}
    if kind == "text":
        return replace(data, change=partial(_corrupt_text, change=data.change, **settings))
    processor = _processor_of(data) if processor is None else processor
    return ChangedBatches(data, partial(_corrupt_pixels, processor=processor, **settings))


def corrupted_sets(
    data: Any,
    corruptions: str | Sequence[str] = "all",
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    processor: Any = None,
) -> dict[str, dict[int, Any]]:
    """`{corruption: {severity: data}}`, as `evaluate_uncertainty(corruptions=...)` takes it.

    Args:
        data, seed, processor: as in `corrupted`.
        corruptions (`str` or `Sequence[str]`, defaults to `"all"`): one or several names of corruptions or of groups
            ("noise", "blur", "colour", "digital", "characters", "words"), or "all" for this kind of data.
        severities (`Sequence[int]`, *optional*): some of 1 to 5; by default all.
    """
    return {
        name: {severity: corrupted(data, name, severity, seed, processor=processor) for severity in severities}
        for name in names_of(corruptions, kind_of(data))
    }


def kind_of(data: Any) -> str:
    """Whether a data set holds images ("image") or texts ("text"); raises for tokenized texts and audio."""
    if getattr(data, "kind", None) == "text":
        return "text"
    check_is_data(data)
    rows = getattr(data, "dataset", data)
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and len(rows) and isinstance(rows[0], Mapping):
        _check_has_pixels(rows[0])
    return "image"


def _corrupt_text(text: str, change: Callable[[str], str] | None, **settings: Any) -> str:
    return corrupt(text if change is None else change(text), **settings)


def _corrupt_pixels(batch: dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    _check_has_pixels(batch)
    return {**batch, "pixel_values": corrupt(batch["pixel_values"], **settings)}


def _check_has_pixels(row: Mapping[str, Any]) -> None:
    if "pixel_values" not in row:
        raise ValueError(
            f"the data has no pixel_values to corrupt, it has {', '.join(row) or 'nothing'}: pass load_data(rows, model) of "
            "images or texts; texts are corrupted before they are tokenized, and audio is not corrupted"
        )


def _processor_of(data: Any) -> Any:
    """The image processor of a data set, also of one in a DataLoader or Subset, or of one that is corrupted already."""
    while data is not None and getattr(data, "processor", None) is None:
        data = data.data if isinstance(data, ChangedBatches) else getattr(data, "dataset", None)
    return None if data is None else data.processor
