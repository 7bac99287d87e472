"""The standard corrupted sets by name, downloaded from the Hub when they are loaded."""

from collections.abc import Sequence
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
    from datasets import load_dataset

    whole = None if "{" in chosen.repository else load_dataset(chosen.repository, split=chosen.split)
    kinds = [] if whole is None else list(zip(whole["corruption_name"], whole["corruption_level"], strict=True))
    sets: dict[str, dict[int, Any]] = {corruption: {} for corruption in corruptions}
    for corruption in corruptions:
        for severity in severities:
            if whole is None:
                repository = chosen.repository.format(corruption=corruption, severity=severity)
                rows = load_dataset(repository, split=chosen.split)
            else:
                rows = whole.select([row for row, kind in enumerate(kinds) if kind == (corruption, severity)])
            if not len(rows):
                raise ValueError(
                    f"{name} has no rows of {corruption!r} at severity {severity}: its columns have changed"
                )
            is_short = limit is None or limit >= len(rows)
            sets[corruption][severity] = rows if is_short else rows.shuffle(seed=0).select(range(limit))
    return sets
