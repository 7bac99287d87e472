"""The standard corrupted sets by their names on the Hub. Nothing is downloaded before a set is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .corruptions import SEVERITIES, checked_severities


# Hendrycks and Dietterich's fifteen, and the four they keep for validation.
FIFTEEN = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
NINETEEN = (*FIFTEEN, "speckle_noise", "gaussian_blur", "spatter", "saturate")


@dataclass(frozen=True)
class StandardSet:
    """
    repository: on the Hub; with {corruption} and {severity} in its name where every one has its own, else rows name theirs in
        the columns corruption_name and corruption_level
    split: the one that all rows are in
    corruptions: those it has; images are in the column `image`, class indices in `label`
    """

    repository: str
    split: str
    corruptions: tuple[str, ...]


STANDARD_SETS = {
    "cifar10-c": StandardSet("robro/cifar10-c-parquet", "train", NINETEEN),
    "cifar100-c": StandardSet("robro/cifar100-c-parquet", "train", NINETEEN),
    "imagenet-c": StandardSet("Tsomaros/ImageNet-C-{corruption}-severity_{severity}", "validation", FIFTEEN),
}
"""Corrupted test sets on the Hub that `load_standard_set` knows."""


def load_standard_set(
    name: str,
    corruptions: str | Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    limit: int | None = None,
) -> dict[str, dict[int, Any]]:
    """Downloads a standard corrupted set: `{corruption: {severity: rows}}`, each a `datasets.Dataset` of images and labels.

    Args:
        name: one of `STANDARD_SETS`.
        corruptions: which of those it has; by default all. ImageNet-C is 75 downloads of 2 GB each.
        severities: which of 1 to 5.
        limit: at most this many rows of each, drawn at random with the seed 0; they are downloaded all the same.

    `load_data` makes them ready for a model:

        >>> sets = load_standard_set("cifar10-c", ["fog", "snow"], severities=[1, 3, 5])
        >>> sets = {name: {n: load_data(rows, processor) for n, rows in sweep.items()} for name, sweep in sets.items()}
        >>> evaluate_uncertainty(model, data, corruptions=sets)
    """
    if name not in STANDARD_SETS:
        raise ValueError(f"no standard set is called {name!r}: there are {', '.join(STANDARD_SETS)}")
    chosen = STANDARD_SETS[name]
    corruptions = chosen.corruptions if corruptions is None else corruptions
    corruptions = [corruptions] if isinstance(corruptions, str) else corruptions
    for corruption in corruptions:
        if corruption not in chosen.corruptions:
            raise ValueError(f"{name} has no {corruption!r}: it has {', '.join(chosen.corruptions)}")
    severities = checked_severities(severities)
    read = _from_own_repositories if "{" in chosen.repository else _from_columns
    return {
        corruption: {severity: _limited(rows, limit) for severity, rows in sweep.items()}
        for corruption, sweep in read(chosen, corruptions, severities).items()
    }


def _from_own_repositories(chosen: StandardSet, corruptions: Sequence[str], severities: Sequence[int]) -> dict:
    from datasets import load_dataset

    def rows(corruption: str, severity: int) -> Any:
        return load_dataset(chosen.repository.format(corruption=corruption, severity=severity), split=chosen.split)

    return {
        corruption: {severity: rows(corruption, severity) for severity in severities} for corruption in corruptions
    }


def _from_columns(chosen: StandardSet, corruptions: Sequence[str], severities: Sequence[int]) -> dict:
    """The places of every set's rows, in one pass over the two columns: no image is opened."""
    from datasets import load_dataset

    rows = load_dataset(chosen.repository, split=chosen.split)
    places: dict[tuple[str, int], list[int]] = {
        (name, severity): [] for name in corruptions for severity in severities
    }
    for place, (name, severity) in enumerate(zip(rows["corruption_name"], rows["corruption_level"], strict=True)):
        if (name, int(severity)) in places:
            places[name, int(severity)].append(place)
    for (name, severity), found in places.items():
        if not found:
            raise ValueError(
                f"{chosen.repository} has no rows of {name!r} at severity {severity}: its columns have changed"
            )
    return {name: {severity: rows.select(places[name, severity]) for severity in severities} for name in corruptions}


def _limited(rows: Any, limit: int | None) -> Any:
    return rows if limit is None or limit >= len(rows) else rows.shuffle(seed=0).select(range(limit))
