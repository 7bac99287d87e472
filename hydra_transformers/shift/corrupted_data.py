"""Data sets that are corrupted when they are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..data.batches import ChangedBatches, check_is_data
from .corruptions import SEVERITIES, corrupt, corruption_named, corruption_names


def corrupted(data: Any, name: str, severity: int, seed: int = 0, *, processor: Any = None) -> Any:
    """Return a data set that `corrupt` changes when it is read; it can be used wherever `data` can.

    Args:
        data (`DataLoader`, `Dataset` or `list`): `pixel_values` as `batches` takes them, or texts
            or images of `load_data`.
        name (`str`): of a corruption, such as "gaussian_noise".
        severity (`int`): 1 to 5.
        seed (`int`, defaults to 0): the result depends on it and on each image or text alone.
        processor (image processor, *optional*): what scaled `pixel_values`. By default that of the
            data set, also in a DataLoader or Subset (`load_data` keeps it there); without one,
            images are taken to lie in [0, 1].

    Images are corrupted in batches, on the device they are read to, at the size the model reads, as
    in ImageNet-C. Texts are corrupted before they are tokenized.
    """
    kind = image_or_text(data)
    corruption_named(name, kind, severity)
    settings = {"name": name, "severity": severity, "seed": seed}
    if kind == "text":
        return replace(data, change=partial(_corrupt_text, change=data.change, **settings))
    if processor is None:
        processor = _processor_of(data)
    return ChangedBatches(data, partial(_corrupt_pixels, processor=processor, **settings))


def corrupted_sets(
    data: Any,
    corruptions: str | Sequence[str] = "all",
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    processor: Any = None,
) -> dict[str, dict[int, Any]]:
    """Return `{corruption: {severity: data}}`, for `evaluate_uncertainty(corruptions=...)`.

    Args:
        data (`DataLoader`, `Dataset` or `list`): as in `corrupted`.
        corruptions (`str` or `Sequence[str]`, defaults to `"all"`): one or several names of
            corruptions or of groups ("noise", "blur", "colour", "digital", "characters", "words"),
            or "all" for this kind of data.
        severities (`Sequence[int]`, *optional*): some of 1 to 5; by default all.
        seed (`int`, defaults to 0): as in `corrupted`.
        processor (image processor, *optional*): as in `corrupted`.
    """
    sets = {}
    for name in corruption_names(corruptions, image_or_text(data)):
        sets[name] = {severity: corrupted(data, name, severity, seed, processor=processor) for severity in severities}
    return sets


def image_or_text(data: Any) -> str:
    """Return what a data set holds, "image" or "text"; raise for tokenized texts and audio."""
    if getattr(data, "kind", None) == "text":
        return "text"

    # Look into the first row, where rows can be had without reading all of them.
    check_is_data(data)
    rows = getattr(data, "dataset", data)
    has_rows = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
    if has_rows and len(rows) and isinstance(rows[0], Mapping):
        _check_has_pixels(rows[0])
    return "image"


def _corrupt_text(text: str, change: Callable[[str], str] | None, **settings: Any) -> str:
    """Corrupt a text, after the change that its data set makes already."""
    if change is not None:
        text = change(text)
    return corrupt(text, **settings)


def _corrupt_pixels(batch: dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    """Return a batch with other `pixel_values`."""
    _check_has_pixels(batch)
    pixel_values = corrupt(batch["pixel_values"], **settings)
    return {**batch, "pixel_values": pixel_values}


def _check_has_pixels(row: Mapping[str, Any]) -> None:
    """Raise for a row, or a batch, without images."""
    if "pixel_values" not in row:
        columns = ", ".join(row) or "nothing"
        raise ValueError(
            f"the data has no pixel_values to corrupt, it has {columns}: pass load_data(rows, model) of images or "
            "texts; texts are corrupted before they are tokenized, and audio is not corrupted"
        )


def _processor_of(data: Any) -> Any:
    """Return the image processor of a data set, None without one.

    Looks into DataLoaders, Subsets and data that is corrupted already.
    """
    while data is not None:
        processor = getattr(data, "processor", None)
        if processor is not None:
            return processor
        if isinstance(data, ChangedBatches):
            data = data.data
        else:
            data = getattr(data, "dataset", None)
    return None
