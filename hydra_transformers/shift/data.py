"""Data sets whose rows are corrupted when they are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from ..data.batches import ChangedBatches, check_is_data
from .corruptions import SEVERITIES, checked_severities, checked_severity, corrupt, corruption_named, names_of
from .pixel_scale import PixelScale


def corrupted(
    data: Any,
    name: str,
    severity: int,
    seed: int = 0,
    *,
    processor: Any = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> Any:
    """A data set, corrupted by `corrupt` when it is read; everything that takes the data set takes this.

    Args:
        data: images as `batches` takes them, with `pixel_values`; or texts (or images) that `load_data` made ready, or a Subset
            of these.
        name, severity, seed: as in `corrupt`.
        processor, mean, std: how `pixel_values` were scaled. By default by the image processor that the data set has, as what
            `load_data` makes has one, also in a DataLoader or Subset; else they are taken to lie in [0, 1].

    Images are corrupted in batches on the device they are read to, at the size that the model reads them in, as ImageNet-C's
    are. Texts are corrupted before they are tokenized.
    """
    kind = kind_of(data)
    names_of([corruption_named(name).name], kind)
    if kind == "text":
        return _with_changed_texts(data, partial(corrupt, name=name, severity=checked_severity(severity), seed=seed))
    if processor is None and mean is None and std is None:
        processor = _processor_of(data)
    scale = PixelScale.chosen(processor, mean, std)
    return ChangedBatches(data, CorruptPixels(name, checked_severity(severity), seed, scale))


def corrupted_sets(
    data: Any,
    corruptions: str | Sequence[str] = "all",
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    **scale: Any,
) -> dict[str, dict[int, Any]]:
    """`{corruption: {severity: data}}`, which `evaluate_uncertainty(corruptions=...)` takes.

    Args:
        data, seed, scale: as in `corrupted`.
        corruptions: one name or several, of `CORRUPTIONS` or of groups ("noise", "blur", "colour", "digital", "characters",
            "words"), or "all" that there are for such data.
        severities: which of 1 to 5.
    """
    severities = checked_severities(severities)
    return {
        name: {severity: corrupted(data, name, severity, seed, **scale) for severity in severities}
        for name in names_of(corruptions, kind_of(data))
    }


@dataclass(frozen=True)
class CorruptPixels:
    """Corrupts the `pixel_values` of a batch."""

    name: str
    severity: int
    seed: int
    scale: PixelScale

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        _check_has_pixels(batch)
        scale = {"mean": self.scale.mean, "std": self.scale.std}
        changed = corrupt(batch["pixel_values"], self.name, self.severity, self.seed, **scale)
        return {**batch, "pixel_values": changed}


def kind_of(data: Any) -> str:
    """Whether a data set holds images ("image") or texts ("text"); refuses texts that are tokens already."""
    if getattr(data, "kind", None) == "text" or (isinstance(data, Subset) and kind_of(data.dataset) == "text"):
        return "text"
    check_is_data(data)
    first = _first(getattr(data, "dataset", data))
    if isinstance(first, str):
        raise TypeError("data is a list of texts: pass load_data(rows, model), or corrupt them by corrupt(texts, ...)")
    if isinstance(first, Mapping):
        _check_has_pixels(first)
    return "image"


def _check_has_pixels(row: Mapping[str, Any]) -> None:
    if "pixel_values" in row:
        return
    if "input_values" in row:
        raise ValueError("the data are sounds, for which there is no corruption: pass noisy sounds of your own")
    raise ValueError(
        f"the data has no pixel_values to corrupt, it has {', '.join(row) or 'nothing'}: pass load_data(rows, model); "
        "texts are corrupted before they are tokenized, so pass these, not a DataLoader"
    )


def _with_changed_texts(data: Any, change: Callable[[str], str]) -> Any:
    if isinstance(data, Subset):
        return Subset(_with_changed_texts(data.dataset, change), data.indices)
    return replace(data, change=change)


def _first(data: Any) -> Any:
    """The first row or batch of what can be indexed."""
    return data[0] if hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data) else None


def _processor_of(data: Any) -> Any:
    """The image processor of a data set, be it in a DataLoader, a Subset or both, or corrupted already."""
    while data is not None and getattr(data, "processor", None) is None:
        data = data.data if isinstance(data, ChangedBatches) else getattr(data, "dataset", None)
    return None if data is None else data.processor
