"""The data of every setting: the paper's sets from the Hub and from OpenOOD's folders, small sets in files, made-up rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, BertConfig, BertForSequenceClassification, PreTrainedModel

from hydra_transformers.data.batches import collate
from hydra_transformers.data.loading import PreparedData, load_data, remember_max_length
from hydra_transformers.data.processors import load_processor
from hydra_transformers.data.rows import DataSource
from hydra_transformers.shift import load_corrupted_sets
from hydra_transformers.shift.corruptions import SEVERITIES

from .. import pretrained, smallest
from ..rows import TensorRows, without_common_padding
from ..splits import CIRCUIT_ROWS, Splits


EVALUATION_BATCH = 250
LOADING_WORKERS = 8
TEXT_TOKENS = 128  # D.2
TINY_SIZE = 84  # pixels a side of Tiny ImageNet's images, which have 64


def as_batches(rows: Any) -> Any:
    """Return rows in batches: all at once where they lie in memory, else by a DataLoader."""
    if isinstance(rows, TensorRows):
        return rows.batches(EVALUATION_BATCH)
    return DataLoader(rows, EVALUATION_BATCH, num_workers=LOADING_WORKERS, collate_fn=collate)


# The paper's sets


@dataclass(frozen=True)
class ImageList:
    """A list of OpenOOD's benchmark, `benchmark_imglist/NAME.txt`: lines of "path label", the paths below `images`."""

    name: str
    images: str = "images_largescale"


Source = DataSource | ImageList


@dataclass(frozen=True)
class PaperSets:
    """The sets of one table, by their names on the Hub and in OpenOOD's folders.

    train, test: with labels
    circuit_ood: for circuits alone (D.1.2)
    ood: {"near": {name: source}, "far": {name: source}}
    num_labels: of the task
    held_out: how many training rows are for validation and circuits; 0 takes a hundredth of the test rows for both
    """

    train: DataSource
    test: DataSource
    circuit_ood: Source
    ood: Mapping[str, Mapping[str, Source]]
    num_labels: int
    held_out: int


IMAGENET1K = PaperSets(
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
)
CIFAR100 = PaperSets(
    train=DataSource("uoft-cs/cifar100", "train", label="fine_label"),
    test=DataSource("uoft-cs/cifar100", "test", label="fine_label"),
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
)
SST2 = PaperSets(
    train=DataSource("nyu-mll/glue:sst2", "train"),
    test=DataSource("nyu-mll/glue:sst2", "validation"),
    circuit_ood=DataSource("fancyzhx/ag_news", "test", limit=CIRCUIT_ROWS),
    ood={
        "near": {
            "yelp": DataSource("fancyzhx/yelp_polarity", "test"),
            "amazon": DataSource("fancyzhx/amazon_polarity", "test", column="content"),
        },
        "far": {
            "20ng": DataSource("SetFit/20_newsgroups", "test"),
            "trec": DataSource("SetFit/TREC-QC", "test"),
            "mnli": DataSource("nyu-mll/glue:mnli", "validation_matched", column="premise"),
            "rte": DataSource("nyu-mll/glue:rte", "validation", column="sentence1"),
            "wmt16": DataSource("wmt/wmt16:de-en", "test", column="translation.en"),
        },
    },
    num_labels=2,
    held_out=3_000,
)


def reader(sets: PaperSets) -> Callable[[Path | None, str], Splits]:
    """Return how a setting reads these sets."""

    def read(folder: Path | None, start: str) -> Splits:
        config = AutoConfig.from_pretrained(start, num_labels=sets.num_labels)
        processor = load_processor(start, config)
        remember_max_length(processor, config, None, TEXT_TOKENS)
        load = partial(prepared, folder=folder, config=config, processor=processor)

        train = load(sets.train, labelled=True)
        test = load(sets.test, labelled=True)
        if sets.held_out:
            parts = held_out_of_train(train, test, sets.held_out)
        else:
            parts = held_out_of_test(train, test)
        ood = {
            group: {name: load(source) for name, source in of_group.items()} for group, of_group in sets.ood.items()
        }
        return Splits(**parts, circuit_ood=load(sets.circuit_ood), ood=ood)

    return read


def prepared(source: Source, folder: Path | None, config: Any, processor: Any, labelled: bool = False) -> PreparedData:
    """Read one set for a model."""
    if isinstance(source, ImageList):
        return listed_images(source, folder, processor)
    return load_data(**vars(source), model=config, processor=processor, labelled=labelled)


def part_of(rows: PreparedData, indices: Sequence[int]) -> PreparedData:
    """Return some of the rows."""
    labels = None if rows.labels is None else [rows.labels[index] for index in indices]
    return replace(rows, rows=rows.rows.select(indices), labels=labels)


def held_out_of_train(train: PreparedData, test: PreparedData, held_out: int) -> dict[str, PreparedData]:
    """Keep the first rows from training: `CIRCUIT_ROWS` of them for circuits, the others for validation."""
    return {
        "train": part_of(train, range(held_out, len(train))),
        "validation": part_of(train, range(CIRCUIT_ROWS, held_out)),
        "circuit_id": part_of(train, range(CIRCUIT_ROWS)),
        "test": test,
    }


def held_out_of_test(train: PreparedData, test: PreparedData) -> dict[str, PreparedData]:
    """Split the official validation set (C.1.2): 1 % of it validates, the rest tests."""
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0)).tolist()
    few = max(1, len(test) // 100)
    held_out = part_of(test, order[:few])
    return {"train": train, "validation": held_out, "circuit_id": held_out, "test": part_of(test, order[few:])}


class ImageFiles:
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
    files = ImageFiles([folder / source.images / name for name in names])
    return PreparedData(files, processor, "image", ("image",))


def imagenet_c(folder: Path | None, start: str) -> dict[str, dict[int, PreparedData]]:
    """Read ImageNet-C's fifteen corruptions as they are published, imagenet-c/CORRUPTION/SEVERITY/CLASS/*.JPEG, else from the Hub."""
    config = AutoConfig.from_pretrained(start, num_labels=1000)
    there = None if folder is None else folder / "imagenet-c"
    source = there if there is not None and there.is_dir() else "imagenet-c"
    return load_corrupted_sets(source, config, processor=load_processor(start, config))


# Small sets in files


SMALL_CIRCUIT_ROWS = 500  # in distribution, and as many out of it
REAL_SETS = {"other classes", "mnist", "textures", "amazon", "trec", "rte"}  # without those that are made up


def read_tiny_imagenet(folder: Path | None, start: str) -> Splits:
    return shortened(pretrained.read_tiny_imagenet(folder, start, TINY_SIZE))


def read_small_sst2(folder: Path | None, start: str) -> Splits:
    return shortened(pretrained.read_sst2(folder, start))


def shortened(splits: Splits) -> Splits:
    """Return the splits with few rows for circuits, and with real OOD sets only."""
    ood = {
        group: {name.replace(" ", "_"): rows for name, rows in of_group.items() if name in REAL_SETS}
        for group, of_group in splits.ood.items()
    }
    few = {}
    for name in ("circuit_id", "circuit_ood"):
        rows = getattr(splits, name)
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:SMALL_CIRCUIT_ROWS]
        part = rows.part(chosen.sort().values)
        few[name] = part.sorted_by_length() if "attention_mask" in part.tensors else part
    return replace(splits, ood=ood, validation_ood=None, **few)


# Made-up rows


WORDS = 40
LENGTH = 8


def made_up_texts(count: int, seed: int, labelled: bool = True) -> TensorRows:
    """Return rows of tokens of two classes, which are told apart by their numbers."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    tokens = torch.randint(4, WORDS // 2, (count, LENGTH), generator=generator) + WORDS // 2 * labels[:, None]
    tensors: dict[str, Tensor] = {"input_ids": tokens.clamp(max=WORDS - 1), "attention_mask": torch.ones_like(tokens)}
    return TensorRows(tensors | ({"labels": labels} if labelled else {}), without_common_padding)


def read_made_up_texts(folder: Path | None, start: str) -> Splits:
    return Splits(
        train=made_up_texts(48, 0),
        validation=made_up_texts(24, 1),
        circuit_id=made_up_texts(24, 2),
        circuit_ood=made_up_texts(24, 3, labelled=False),
        test=made_up_texts(32, 4),
        ood={
            "near": {"some": made_up_texts(24, 5, labelled=False)},
            "far": {"others": made_up_texts(24, 6, labelled=False)},
        },
    )


def read_made_up_images(folder: Path | None, start: str) -> Splits:
    return replace(smallest.splits(), validation_ood=None)


def made_up_shift(folder: Path | None, start: str) -> dict[str, dict[int, TensorRows]]:
    return {"noise": {severity: smallest.images(16, severity) for severity in SEVERITIES}}


def smallest_bert(start: str, seed: int) -> PreTrainedModel:
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, initializer_range=0.3, **sizes)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    torch.manual_seed(seed)
    model.classifier.reset_parameters()
    return model


def smallest_vit(start: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return smallest.new_backbone()


MADE_UP = {
    "images": (read_made_up_images, smallest_vit),
    "texts": (read_made_up_texts, smallest_bert),
}
