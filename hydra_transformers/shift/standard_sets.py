"""The standard corrupted sets by name, downloaded from the Hub when they are loaded."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from .corruptions import SEVERITIES, checked_severities


# Hendrycks and Dietterich's fifteen, and the four they keep for validation.
FIFTEEN = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
NINETEEN = (*FIFTEEN, "speckle_noise", "gaussian_blur", "spatter", "saturate")


class StandardSet(NamedTuple):
    """A corrupted test set on the Hub, with images in the column `image` and class indices in `label`.

    repository: its name; with {corruption} and {severity} in it, one for each, otherwise one whose columns corruption_name and
        corruption_level tell the rows apart
    """

    repository: str
    split: str
    corruptions: tuple[str, ...]


STANDARD_SETS = {
    "cifar10-c": StandardSet("robro/cifar10-c-parquet", "train", NINETEEN),
    "cifar100-c": StandardSet("robro/cifar100-c-parquet", "train", NINETEEN),
    "imagenet-c": StandardSet("Tsomaros/ImageNet-C-{corruption}-severity_{severity}", "validation", FIFTEEN),
}
"""The sets that `load_standard_set` knows."""


def load_standard_set(
    name: str,
    corruptions: str | Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    limit: int | None = None,
) -> dict[str, dict[int, Any]]:
    """Downloads a standard corrupted set: `{corruption: {severity: rows}}`, each a `datasets.Dataset` of images and labels.

    Args:
        name: one of `STANDARD_SETS`.
        corruptions: some of the set's, by default all. ImageNet-C is 75 downloads of 2 GB each.
        severities: some of 1 to 5.
        limit: at most this many rows of each, drawn at random with the seed 0; all are downloaded nevertheless.

    `load_data` makes them ready for a model:

        >>> sets = load_standard_set("cifar10-c", ["fog", "snow"], severities=[1, 3, 5])
        >>> sets = {name: {n: load_data(rows, processor) for n, rows in sweep.items()} for name, sweep in sets.items()}
        >>> evaluate_uncertainty(model, data, corruptions=sets)
    """
    if name not in STANDARD_SETS:
        raise ValueError(f"no standard set is called {name!r}: there are {', '.join(STANDARD_SETS)}")
    chosen, severities = STANDARD_SETS[name], checked_severities(severities)
    corruptions = [corruptions] if isinstance(corruptions, str) else corruptions or chosen.corruptions
    for corruption in corruptions:
        if corruption not in chosen.corruptions:
            raise ValueError(f"{name} has no {corruption!r}: it has {', '.join(chosen.corruptions)}")
    read = _from_own_repositories if "{" in chosen.repository else _from_columns
    sets: dict[str, dict[int, Any]] = {corruption: {} for corruption in corruptions}
    for (corruption, severity), rows in read(chosen, list(product(corruptions, severities))).items():
        is_short = limit is None or limit >= len(rows)
        sets[corruption][severity] = rows if is_short else rows.shuffle(seed=0).select(range(limit))
    return sets


def _from_own_repositories(chosen: StandardSet, pairs: list[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    from datasets import load_dataset

    names = {pair: chosen.repository.format(corruption=pair[0], severity=pair[1]) for pair in pairs}
    return {pair: load_dataset(name, split=chosen.split) for pair, name in names.items()}


def _from_columns(chosen: StandardSet, pairs: list[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    """Finds the rows of each set in one pass over the two columns, without opening an image."""
    from datasets import load_dataset

    rows = load_dataset(chosen.repository, split=chosen.split)
    places: dict[tuple[str, int], list[int]] = {pair: [] for pair in pairs}
    for place, (name, severity) in enumerate(zip(rows["corruption_name"], rows["corruption_level"], strict=True)):
        if (name, int(severity)) in places:
            places[name, int(severity)].append(place)
    missing = [pair for pair, at in places.items() if not at]
    if missing:
        raise ValueError(f"{chosen.repository} has no rows of {missing[0]}: its columns have changed")
    return {pair: rows.select(at) for pair, at in places.items()}
