"""Writes the data sets of the experiments from the Hub into plain files, as `local_files.py` reads them.

    python -m experiments.public_sets --output DIR                      # everything, some hundred megabytes of downloads
    python -m experiments.public_sets --output DIR --only vision64      # some folders

Images become sheets of JPEG tiles, all through the same compression, so that it gives no set away. Pre-trained models are
not written: pass their folders or Hub names as `--start`. The regression task of `tasks.py` needs STS-B with its genres,
which the Hub's versions lack: text/stsb_train.jsonl.gz, _dev and _test have to be made from the benchmark's own files.
"""

import argparse
import gzip
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hydra_transformers._io.files import write_atomically

from .local_files import FOLDERS
from .pretrained import CLASSES, HELD_OF_EACH


Rows = list[dict[str, Any]]

TILES_IN_A_ROW = 100
JPEG_QUALITY = 90
TILES_OF_A_SHEET = 10_000


@dataclass(frozen=True)
class Source:
    """Rows of a data set on the Hub.

    name: its name there; config: of several in one data set
    columns: the columns that are read, by the names they get
    most: how many rows are taken, the first ones; None for all
    """

    name: str
    split: str
    columns: Mapping[str, str]
    config: str | None = None
    most: int | None = None

    def read(self) -> Rows:
        """Return the rows, with the names of their classes where `label` is a class."""
        from datasets import ClassLabel, load_dataset

        loaded = load_dataset(self.name, self.config, split=self.split)
        if self.most is not None:
            loaded = loaded.select(range(min(self.most, len(loaded))))
        label = loaded.features.get(self.columns.get("label", ""))
        rows = []
        for row in loaded:
            renamed = {new: row[old] for new, old in self.columns.items()}
            if isinstance(label, ClassLabel):
                renamed["label_name"] = label.int2str(renamed["label"])
            rows.append(renamed)
        return rows


# Images


TINY = {"image": "image", "label": "label"}
TINY_TRAIN = Source("zh-plus/tiny-imagenet", "train", TINY)
TINY_TEST = Source("zh-plus/tiny-imagenet", "valid", TINY)
CIFAR = {"image": "img", "label": "label"}
CIFAR_TRAIN = Source("uoft-cs/cifar10", "train", CIFAR)
CIFAR_TEST = Source("uoft-cs/cifar10", "test", CIFAR)
MNIST = Source("ylecun/mnist", "test", {"image": "image"}, most=5_000)
TEXTURES = Source("tanganke/dtd", "test", {"image": "image"}, most=1_200)

UNKNOWN_CLASSES = 50  # of Tiny ImageNet, for circuits, and as many as near OOD
LEARNED_OF_EACH = 200  # training images of a class


def split_off(rows: Rows, of_each: int) -> tuple[Rows, Rows]:
    """Return the first rows of each class, and the others."""
    seen: dict[int, int] = {}
    first = []
    others = []
    for row in rows:
        count = seen.get(row["label"], 0)
        seen[row["label"]] = count + 1
        if count < of_each:
            first.append(row)
        else:
            others.append(row)
    return first, others


def of_classes(rows: Rows, first: int, last: int) -> Rows:
    """Return the rows of the classes from `first` to before `last`, class by class."""
    chosen = [row for row in rows if first <= row["label"] < last]
    return sorted(chosen, key=lambda row: row["label"])


def write_tiny_imagenet(folder: Path) -> None:
    """Write 100 classes to learn, 50 for circuits and 50 as near OOD, all of 64 x 64 pixels."""
    known = [row for row in TINY_TRAIN.read() if row["label"] < CLASSES]
    held, others = split_off(known, HELD_OF_EACH)
    train, _ = split_off(others, LEARNED_OF_EACH)
    test = TINY_TEST.read()
    near_begins = CLASSES + UNKNOWN_CLASSES
    sets = {
        "train": train,
        "held": held,
        "test": [row for row in test if row["label"] < CLASSES],
        "circuit_ood": of_classes(test, CLASSES, near_begins),
        "near": of_classes(test, near_begins, near_begins + UNKNOWN_CLASSES),
    }
    for name, rows in sets.items():
        labels = [row["label"] if row["label"] < CLASSES else -1 for row in rows]
        write_images(folder, name, rows, labels, side=64)


def write_small_images(folder: Path) -> None:
    """Write CIFAR-10 with its labels, and MNIST and textures as far OOD, all of 32 x 32 pixels."""
    for name, source in (("cifar10_train", CIFAR_TRAIN), ("cifar10_test", CIFAR_TEST)):
        rows = source.read()
        write_images(folder, name, rows, [row["label"] for row in rows], side=32)
    for name, source in (("mnist", MNIST), ("textures", TEXTURES)):
        write_images(folder, name, source.read(), None, side=32)


def write_images(folder: Path, name: str, rows: Rows, labels: Sequence[int] | None, side: int) -> None:
    """Write images as sheets of tiles, NAME.jpg or, of a large set, NAME_0.jpg and so on, and their labels."""
    place = folder / FOLDERS[side]
    starts = range(0, len(rows), TILES_OF_A_SHEET)
    for index, start in enumerate(starts):
        sheet = sheet_of([row["image"] for row in rows[start : start + TILES_OF_A_SHEET]], side)
        number = f"_{index}" if len(starts) > 1 else ""
        encoded = io.BytesIO()
        sheet.save(encoded, "JPEG", quality=JPEG_QUALITY)
        write_atomically(place / f"{name}{number}.jpg", encoded.getvalue())
    if labels is not None:
        encoded = io.BytesIO()
        np.save(encoded, np.asarray(labels, dtype=np.int16))
        write_atomically(place / f"{name}_labels.npy", encoded.getvalue())


def sheet_of(images: Sequence[Image.Image], side: int) -> Image.Image:
    """Return images of one size side by side, 100 in a row; the last row is filled up with black."""
    rows = -(-len(images) // TILES_IN_A_ROW)
    sheet = Image.new("RGB", (TILES_IN_A_ROW * side, rows * side))
    for index, image in enumerate(images):
        tile = image.convert("RGB").resize((side, side))
        sheet.paste(tile, (index % TILES_IN_A_ROW * side, index // TILES_IN_A_ROW * side))
    return sheet


# Texts


SENTENCES = {"text": "sentence", "label": "label"}
INTENTS = {"text": "text", "label": "intent"}
TEXTS = {"text": "text"}
OUT_OF_SCOPE = "oos"
EMOTIONS = {"text": "text", "labels": "labels"}
ENTITIES = {"tokens": "tokens", "tags": "ner_tags"}

PLAIN_TEXTS = {
    "sst2_train": Source("nyu-mll/glue", "train", SENTENCES, "sst2"),
    "sst2_validation": Source("nyu-mll/glue", "validation", SENTENCES, "sst2"),
    "agnews": Source("fancyzhx/ag_news", "test", TEXTS, most=3_000),
    "amazon_snippets": Source("fancyzhx/amazon_polarity", "test", {"text": "title"}, most=4_000),
    "trec": Source("SetFit/TREC-QC", "train", TEXTS, most=3_000),
    "rte": Source("nyu-mll/glue", "train", {"text": "sentence1"}, "rte"),
    "goemotions_train": Source("google-research-datasets/go_emotions", "train", EMOTIONS, "simplified"),
    "goemotions_dev": Source("google-research-datasets/go_emotions", "validation", EMOTIONS, "simplified"),
    "goemotions_test": Source("google-research-datasets/go_emotions", "test", EMOTIONS, "simplified"),
}
INTENT_SETS = {
    "clinc150_train": Source("clinc/clinc_oos", "train", INTENTS, "plus"),
    "clinc150_train_small": Source("clinc/clinc_oos", "train", INTENTS, "small"),
    "clinc150_val": Source("clinc/clinc_oos", "validation", INTENTS, "plus"),
    "clinc150_test": Source("clinc/clinc_oos", "test", INTENTS, "plus"),
}
ENTITY_SETS = {
    "wikiann_train": Source("unimelb-nlp/wikiann", "train", ENTITIES, "en"),
    "wikiann_dev": Source("unimelb-nlp/wikiann", "validation", ENTITIES, "en"),
    "wikiann_test": Source("unimelb-nlp/wikiann", "test", ENTITIES, "en"),
    "wnut17_train": Source("leondz/wnut_17", "train", ENTITIES),
}


def write_texts(folder: Path) -> None:
    """Write the sets of sentences, intents, emotions and entities."""
    for name, source in PLAIN_TEXTS.items():
        rows = source.read()
        write_rows(folder, name, [without(row, "label_name") for row in rows])
    for name, source in INTENT_SETS.items():
        write_intents(folder, name, source.read())
    for name, source in ENTITY_SETS.items():
        write_rows(folder, name, with_tag_names(source))
    names = feature_names(PLAIN_TEXTS["goemotions_train"], "labels")
    write_atomically(folder / "text" / "goemotions_labels.json", json.dumps(names))


def write_intents(folder: Path, name: str, rows: Rows) -> None:
    """Write the intents by their names, and the messages that are out of scope to a file of their own."""
    named = [{"text": row["text"], "label": intent_of(row)} for row in rows]
    write_rows(folder, name, [row for row in named if row["label"] != OUT_OF_SCOPE])
    outside = [row for row in named if row["label"] == OUT_OF_SCOPE]
    split = name.rpartition("_")[2]
    if split in ("val", "test"):
        write_rows(folder, f"clinc150_oos_{split}", outside)


def intent_of(row: Mapping[str, Any]) -> str:
    return row.get("label_name", row["label"])


def with_tag_names(source: Source) -> Rows:
    """Return rows of tokens with the names of their tags."""
    names = feature_names(source, "tags")
    return [{"tokens": row["tokens"], "tags": [names[tag] for tag in row["tags"]]} for row in source.read()]


def feature_names(source: Source, column: str) -> list[str]:
    """Return the names of the classes of a column of lists."""
    from datasets import load_dataset

    loaded = load_dataset(source.name, source.config, split=source.split)
    return loaded.features[source.columns[column]].feature.names


def without(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def write_rows(folder: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a row of JSON a line, the same bytes each time."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(folder / "text" / f"{name}.jsonl.gz", gzip.compress(lines.encode(), mtime=0))


WRITERS: dict[str, Callable[[Path], None]] = {
    "vision64": write_tiny_imagenet,
    "vision": write_small_images,
    "text": write_texts,
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder, as --data of the experiments")
    parser.add_argument("--only", nargs="+", choices=WRITERS, default=list(WRITERS))
    options = parser.parse_args(words)
    for name in options.only:
        (options.output / name).mkdir(parents=True, exist_ok=True)
        WRITERS[name](options.output)
        print(f"{options.output / name} is written", flush=True)


if __name__ == "__main__":
    main()
