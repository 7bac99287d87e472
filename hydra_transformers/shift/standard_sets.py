"""The standard corrupted test sets ImageNet-C, CIFAR-10-C and CIFAR-100-C: folders, or the Hub."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..data.batches import as_rows
from ..data.loading import load_data
from ..model_info import ModelInfo
from .corruptions import SEVERITIES


# Hendrycks and Dietterich's fifteen, and the four that they keep for validation.
FIFTEEN = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
NINETEEN = (*FIFTEEN, "speckle_noise", "gaussian_blur", "spatter", "saturate")
LABELS_FILE = "labels.npy"


class StandardSet(NamedTuple):
    """A corrupted test set on the Hub, with the columns `image` and `label`, a class index.

    repository: its name; with {corruption} and {severity} in it, one for each; otherwise one whose
        columns corruption_name and corruption_level tell the rows apart
    """

    repository: str
    split: str
    corruptions: tuple[str, ...]


STANDARD_SETS = {
    "cifar10-c": StandardSet("robro/cifar10-c-parquet", "train", NINETEEN),
    "cifar100-c": StandardSet("robro/cifar100-c-parquet", "train", NINETEEN),
    "imagenet-c": StandardSet("Tsomaros/ImageNet-C-{corruption}-severity_{severity}", "validation", FIFTEEN),
}


def load_corrupted_sets(
    source: str | os.PathLike,
    model: Any,
    corruptions: str | Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    limit: int | None = None,
    processor: Any = None,
) -> dict[str, dict[int, Any]]:
    """Load a standard corrupted set: `{corruption: {severity: data}}`.

    That is what `evaluate_uncertainty(corruptions=...)` takes.

    Args:
        source (`str` or `os.PathLike`): a folder as the authors publish it, ImageNet-C's with
            CORRUPTION/SEVERITY/CLASS/*.JPEG, CIFAR's with CORRUPTION.npy and labels.npy; or
            "imagenet-c", "cifar10-c" or "cifar100-c" for the Hub (ImageNet-C: 75 downloads of
            2 GB each).
        model (`PreTrainedModel`, `str` or `os.PathLike`): the model that reads the images, as for
            `load_data`.
        corruptions (`str` or `Sequence[str]`, *optional*): some of the set's; by default the
            fifteen with which its results are published.
        severities (`Sequence[int]`, *optional*): some of 1 to 5; by default all.
        limit (`int`, *optional*): at most this many images of each, drawn at random with seed 0.
        processor (image processor, *optional*): as for `load_data`.

    Class folders are matched with the model's class names; where they are other names, such as
    ImageNet's n01440764, with its classes in their order.
    """
    folder = Path(source)
    severities = _checked(severities)
    if folder.is_dir():
        read = _reader_of_folder(folder, model)
        known = _corruptions_in(folder)
    elif isinstance(source, str) and source in STANDARD_SETS:
        read = partial(_from_hub, STANDARD_SETS[source])
        known = STANDARD_SETS[source].corruptions
    else:
        raise ValueError(f"source is {str(source)!r}: pass a folder, or one of {', '.join(STANDARD_SETS)}")
    if corruptions is None:
        corruptions = [name for name in FIFTEEN if name in known]
    elif isinstance(corruptions, str):
        corruptions = [corruptions]
    unknown = [name for name in corruptions if name not in known]
    if unknown or not corruptions:
        raise ValueError(f"{source} has no {', '.join(unknown) or 'corruptions'}: it has {', '.join(known) or 'none'}")

    sets: dict[str, dict[int, Any]] = {}
    for name in corruptions:
        sets[name] = {}
        for severity in severities:
            rows = read(name, severity)
            sets[name][severity] = load_data(rows, model, processor=processor, labelled=True, limit=limit)
    return sets


def _checked(severities: Sequence[int]) -> list[int]:
    wrong = [severity for severity in severities if severity not in SEVERITIES]
    if wrong or not severities:
        raise ValueError(f"severities is {severities}: pass some of 1 to 5")
    return list(severities)


def _corruptions_in(folder: Path) -> list[str]:
    """Return the corruptions that a folder holds, the fifteen first."""
    found = {path.stem for path in folder.glob("*.npy")} | {path.name for path in folder.iterdir() if path.is_dir()}
    first = [name for name in NINETEEN if name in found]
    return first + sorted(found - {*NINETEEN, Path(LABELS_FILE).stem})


def _reader_of_folder(folder: Path, model: Any) -> Callable[[str, int], Any]:
    if (folder / LABELS_FILE).exists():
        return partial(_from_arrays, folder)
    return partial(_from_images, folder, model)


def _from_arrays(folder: Path, name: str, severity: int) -> Any:
    """Return the rows of one severity; a file has as many rows of each, from 1 to 5."""
    import numpy as np
    from datasets import Dataset, Features, Image, Value
    from PIL import Image as Pillow

    images = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    labels = np.load(folder / LABELS_FILE, allow_pickle=False)
    count, rest = divmod(len(images), len(SEVERITIES))
    if rest or len(labels) != len(images):
        raise ValueError(
            f"{folder / name}.npy has {len(images)} images and {LABELS_FILE} {len(labels)} labels: both have the rows "
            "of five severities, download them again"
        )
    rows = slice(count * (severity - 1), count * severity)
    pictures = [Pillow.fromarray(np.asarray(image)) for image in images[rows]]
    features = Features({"image": Image(), "label": Value("int64")})
    return Dataset.from_dict({"image": pictures, "label": labels[rows].astype(int).tolist()}, features=features)


def _from_images(folder: Path, model: Any, name: str, severity: int) -> Any:
    """Return the images of one severity, whose folders are their classes."""
    from datasets import Dataset, Features, Image, Value

    place = folder / name / str(severity)
    if not place.is_dir():
        raise FileNotFoundError(f"there is no folder {place}: it has one for each severity, 1 to 5")
    folders = sorted(path for path in place.iterdir() if path.is_dir())
    classes = ModelInfo.of(model).class_names or []
    if {path.name for path in folders} <= set(classes):
        numbers = [classes.index(path.name) for path in folders]
    elif len(folders) == len(classes):
        numbers = list(range(len(folders)))
    else:
        raise ValueError(
            f"{place} has {len(folders)} folders that are not named after classes, and the model has {len(classes)} "
            "classes: pass a model with as many, or name the folders after its classes"
        )
    paths = []
    labels = []
    for path, number in zip(folders, numbers, strict=True):
        files = sorted(file for file in path.iterdir() if file.is_file())
        paths += [str(file) for file in files]
        labels += [number] * len(files)
    features = Features({"image": Image(), "label": Value("int64")})
    return Dataset.from_dict({"image": paths, "label": labels}, features=features)


def _from_hub(chosen: StandardSet, name: str, severity: int) -> Any:
    from datasets import load_dataset

    if "{" in chosen.repository:
        repository = chosen.repository.format(corruption=name, severity=severity)
        return load_dataset(repository, split=chosen.split)
    whole = as_rows(load_dataset(chosen.repository, split=chosen.split))
    kinds = zip(whole["corruption_name"], whole["corruption_level"], strict=True)
    rows = whole.select([row for row, kind in enumerate(kinds) if kind == (name, severity)])
    if not len(rows):
        raise ValueError(f"{chosen.repository} has no rows of {name} at severity {severity}: its columns have changed")
    return rows.select_columns(["image", "label"])
