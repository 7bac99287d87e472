"""The paper's own data sets (appendix C): by their names on the Hub, and OpenOOD's image lists from its own folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from transformers import AutoConfig

from hydra_transformers.data.loading import PreparedData, load_data, remember_max_length
from hydra_transformers.data.processors import load_processor
from hydra_transformers.data.rows import DataSource
from hydra_transformers.fusion.probe import TEXT_TOKENS
from hydra_transformers.shift import corrupted_sets
from hydra_transformers.training import Recipe

from .shifted_sets import IMAGE_CORRUPTIONS, ROWS, SEVERITIES, TEXT_CORRUPTIONS, Shifted
from .splits import CIRCUIT_ROWS, Splits


@dataclass(frozen=True)
class ImageList:
    """A list of OpenOOD's benchmark, `benchmark_imglist/LIST.txt`: lines of "path label", the paths below `images`."""

    name: str
    images: str = "images_largescale"


Source = DataSource | ImageList


@dataclass(frozen=True)
class HubSets:
    """
    train: held-out rows are taken from its front
    test: what methods are judged on
    circuit_ood: for circuits only
    ood: {"near": {name: source}, "far": {name: source}}
    num_labels: of the task
    held_out: how many training rows are for validation and circuits; 0 takes a hundredth of the test rows for both
    standard: the standard corrupted set of such images, "cifar100-c" or "imagenet-c"; texts are corrupted here
    """

    train: DataSource
    test: DataSource
    circuit_ood: Source
    ood: Mapping[str, Mapping[str, Source]]
    num_labels: int
    held_out: int
    standard: str | None = None


IMAGENET1K = HubSets(
    train=DataSource("ILSVRC/imagenet-1k", "train"),
    test=DataSource("ILSVRC/imagenet-1k", "validation"),
    circuit_ood=ImageList("imagenet/val_openimage_o"),
    ood={
        "near": {"ssb_hard": ImageList("imagenet/test_ssb_hard"), "ninco": ImageList("imagenet/test_ninco")},
        "far": {
            "inaturalist": ImageList("imagenet/test_inaturalist"),
            "textures": ImageList("imagenet/test_textures", "images_classic"),
        },
    },
    num_labels=1000,
    held_out=0,
    standard="imagenet-c",
)

CIFAR100 = HubSets(
    train=DataSource("uoft-cs/cifar100", "train"),
    test=DataSource("uoft-cs/cifar100", "test"),
    circuit_ood=DataSource("zh-plus/tiny-imagenet", "valid", limit=CIRCUIT_ROWS),
    ood={
        "near": {"cifar10": DataSource("uoft-cs/cifar10", "test")},
        "far": {
            "mnist": DataSource("ylecun/mnist", "test"),
            "svhn": DataSource("ufldl-stanford/svhn:cropped_digits", "test"),
            "textures": DataSource("tanganke/dtd", "test"),
            "places365": ImageList("cifar100/test_places365", "images_classic"),
        },
    },
    num_labels=100,
    held_out=2 * CIRCUIT_ROWS,
    standard="cifar100-c",
)

SST2 = HubSets(
    train=DataSource("nyu-mll/glue:sst2", "train"),
    test=DataSource("nyu-mll/glue:sst2", "validation"),
    circuit_ood=DataSource("fancyzhx/ag_news", "test", limit=CIRCUIT_ROWS),
    ood={
        "near": {
            "yelp": DataSource("fancyzhx/yelp_polarity", "test", limit=5_000),
            "amazon": DataSource("fancyzhx/amazon_polarity", "test", limit=5_000, text="content"),
        },
        "far": {
            "20ng": DataSource("SetFit/20_newsgroups", "test"),
            "trec": DataSource("SetFit/TREC-QC", "test"),
            "mnli": DataSource("nyu-mll/glue:mnli", "validation_matched", text="premise"),
            "rte": DataSource("nyu-mll/glue:rte", "validation", text="sentence1"),
            "wmt16": DataSource("wmt/wmt16:de-en", "test", text="translation.en"),
        },
    },
    num_labels=2,
    held_out=3_000,
)


def reader(sets: HubSets, recipe: Recipe) -> Callable[[Path | None, str], Splits]:
    """How a setting reads these sets; `recipe` says how training images are changed."""

    def read(folder: Path | None, start: str) -> Splits:
        config = AutoConfig.from_pretrained(start, num_labels=sets.num_labels)
        has_images = hasattr(config, "image_size")
        processor = load_processor(start, config)
        remember_max_length(processor, config, None, TEXT_TOKENS)

        def prepared(source: Source, labelled: bool = False) -> PreparedData:
            if isinstance(source, ImageList):
                return listed_images(source, folder, processor)
            return load_data(**vars(source), model=config, processor=processor, labelled=labelled)

        train, test = prepared(sets.train, labelled=True), prepared(sets.test, labelled=True)
        changed = replace(train, change=Augmented(recipe)) if has_images else train
        if sets.held_out:
            parts = _held_out_of_train(changed, train, test, sets.held_out)
        else:
            parts = _held_out_of_test(changed, test)
        ood = {
            group: {name: prepared(each) for name, each in group_sets.items()}
            for group, group_sets in sets.ood.items()
        }

        def shift(test: Any) -> Shifted:
            if sets.standard is None:
                return corrupted_sets(test, TEXT_CORRUPTIONS, SEVERITIES)
            found = load_standard_set(sets.standard, IMAGE_CORRUPTIONS, SEVERITIES, limit=ROWS)
            return {
                name: {n: load_data(rows, processor) for n, rows in sweep.items()} for name, sweep in found.items()
            }

        return Splits(**parts, circuit_ood=prepared(sets.circuit_ood), ood=ood, shift=shift)

    return read


def load_standard_set(name: str, corruptions: Sequence[str], severities: Sequence[int], limit: int) -> Shifted:
    """At most `limit` rows of each part of a standard corrupted set, drawn with the seed 0; the parts are downloaded whole."""
    from datasets import load_dataset

    whole = load_dataset("robro/cifar100-c-parquet", split="train") if name == "cifar100-c" else None
    parts = [] if whole is None else list(zip(whole["corruption_name"], whole["corruption_level"], strict=True))

    def read(corruption: str, severity: int) -> Any:
        if whole is None:
            repository = f"Tsomaros/ImageNet-C-{corruption}-severity_{severity}"
            rows = load_dataset(repository, split="validation")
        else:
            rows = whole.select([row for row, part in enumerate(parts) if part == (corruption, severity)])
        if not len(rows):
            raise ValueError(f"{name} has no rows of {corruption!r} at severity {severity}: its columns have changed")
        return rows if limit >= len(rows) else rows.shuffle(seed=0).select(range(limit))

    return {
        corruption: {severity: read(corruption, severity) for severity in severities} for corruption in corruptions
    }


def _held_out_of_train(changed: Any, train: Any, test: Any, held_out: int) -> dict[str, Any]:
    """The first rows are kept from training: `CIRCUIT_ROWS` of them for circuits, the others for validation."""
    return {
        "train": Subset(changed, range(held_out, len(train))),
        "validation": Subset(train, range(CIRCUIT_ROWS, held_out)),
        "circuit_id": Subset(train, range(CIRCUIT_ROWS)),
        "test": test,
    }


def _held_out_of_test(changed: Any, test: Any) -> dict[str, Any]:
    """Where test is the official validation set (C.1.2): 1 % of it validates, the rest tests."""
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0)).tolist()
    few = max(1, len(test) // 100)
    held_out = Subset(test, order[:few])
    return {"train": changed, "validation": held_out, "circuit_id": held_out, "test": Subset(test, order[few:])}


class Augmented:
    """The recipe's random changes of an image, which are torchvision's."""

    def __init__(self, recipe: Recipe):
        try:
            from torchvision import transforms
        except ImportError as error:
            raise ImportError("training on images needs torchvision: pip install torchvision") from error
        # The processor normalises, as the model is used to.
        changes = [(name, settings) for name, settings in recipe.train_transforms if name != "Normalize"]
        self.changes = [getattr(transforms, name)(**settings) for name, settings in changes]

    def __call__(self, image: Any) -> Any:
        for change in self.changes:
            image = change(image)
        return image


class _Files:
    """Images in files, opened when they are read."""

    def __init__(self, paths: list[Path]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            return {"image": image.convert("RGB")}


def listed_images(source: ImageList, folder: Path | None, processor: Any) -> PreparedData:
    path = None if folder is None else folder / "benchmark_imglist" / f"{source.name}.txt"
    if path is None or not path.is_file():
        raise FileNotFoundError(
            f"OpenOOD's list {source.name} is not in {folder}: pass the folder that OpenOOD downloads to as --data"
        )
    names = [line.rsplit(maxsplit=1)[0] for line in path.read_text().splitlines() if line.strip()]
    files = _Files([folder / source.images / name for name in names])
    return load_data(files, processor, image="image")
