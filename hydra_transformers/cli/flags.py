"""Flags that several commands share, each declared once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._io.access import access_to
from ..data.loading import PreparedData, load_data
from ..data.rows import PREFERRED_SPLITS, DataSource
from ..fusion.probe import TEXT_TOKENS
from .options import argument, choice, named, option, switch


MOST_SEED = 2**31 - 1  # numpy takes twice as much, and member i gets the seed plus i
DATA = "Data"

ModelArgument = argument(
    str,
    "MODEL",
    "the output of `fuse` or `calibrate`, or any classifier, CLIP or SigLIP model, by folder or Hub name",
)
BatchSize = option(int, "rows per batch", "N", min=1)
Device = option(str | None, "default: cuda where there is one, otherwise cpu")
Seed = option(int, "of everything that is random", min=0, max=MOST_SEED)
Mode = option(choice(("exact", "shortlist")), "how circuits are extracted: shortlist is faster, and may differ")
Processor = option(str | None, "default: the one saved with the model", "NAME_OR_FOLDER")
OodSplit = option(str | None, "default: train, validation or test, whichever comes first")
Epochs = option(int | None, "at most N passes over the data (default: 3 to 12, fewer for more rows)", "N", min=1)
MaxSteps = option(int | None, "train for N steps instead of the recipe's length, to try it out", "N", min=1)
Regression = switch(
    "--regression", "the labels are numbers to predict, also where all of them are whole, such as ratings"
)
ReportTo = option(str, "where trainings are logged, as in Trainer: tensorboard, wandb, ...", "NAME")
NearData = option(list[tuple] | None, "near out-of-distribution data; may be repeated", "NAME=DATA", parser=named)
FarData = option(list[tuple] | None, "far out-of-distribution data; may be repeated", "NAME=DATA", parser=named)


@dataclass(kw_only=True)
class DataOptions:
    """Which rows and columns to read."""

    data: option(
        str,
        'a data set on the Hub ("cifar100", "glue:sst2"), a folder that save_to_disk wrote, a folder of images, csv, json or '
        "parquet files, or one such file",
        "NAME_OR_FOLDER",
        DATA,
    )
    split: option(
        str | None,
        'a split, or a part of one, "train[:1000]" (default: train for training and pruning, otherwise the first of '
        "validation, test and train)",
        panel=DATA,
    ) = None
    limit: option(int | None, "read at most N rows of each set, drawn at random", "N", DATA, min=1) = None
    image_column: option(str | None, "default: the only column of images", "NAME", DATA) = None
    audio_column: option(str | None, "default: the only column of audio", "NAME", DATA) = None
    text_column: option(
        str | None,
        'default: "text", "sentence", ... or the only one; "column.field" for a field, "premise,hypothesis" for pairs of texts',
        "NAME",
        DATA,
    ) = None
    max_length: option(
        int | None,
        f"cut texts to N tokens; saved with the tokenizer (default: {TEXT_TOKENS} in training, later as in training)",
        "N",
        DATA,
        min=1,
    ) = None
    label_column: option(str | None, "default: the column whose classes fit the model", "NAME", DATA) = None
    label_separator: option(
        str | None, 'between several labels in a cell of a csv file, such as "|"', "TEXT", DATA
    ) = None
    processor: option(str | None, "default: the one saved with the model", "NAME_OR_FOLDER", DATA) = None

    def source(
        self, name: str | None = None, split: str | Sequence[str] | None = None, part: str | None = None
    ) -> DataSource:
        return DataSource(
            name or self.data,
            split=split,
            part=part,
            limit=self.limit,
            image=self.image_column,
            audio=self.audio_column,
            text=self.text_column,
            max_length=self.max_length,
            label=self.label_column,
            label_separator=self.label_separator,
            labels_in_order=getattr(self, "labels_in_order", False),
        )

    def read(
        self,
        config: Any,
        processor: Any,
        name: str | None = None,
        split: str | None = None,
        labelled: bool = True,
        prefer: tuple[str, ...] = PREFERRED_SPLITS,
        part: str | None = None,
        quiet: bool = False,
    ) -> PreparedData:
        """The rows of a set, by default of --data, prepared for a model; prints what was found unless `quiet`."""
        source = self.source(name, split or (prefer if part is None else None), part)
        with access_to(source.name, "data set"):
            data = load_data(**vars(source), model=config, processor=processor, labelled=labelled)
        if not quiet:
            print(*data.notes, sep="\n", flush=True)
        return data


@dataclass(kw_only=True)
class PartOptions(DataOptions):
    """Which rows to read, or which part of them, for a model that has its own classes."""

    part: option(
        choice(("training", "validation", "test")) | None,
        "the split for this purpose, or else a fixed random part of the first split: a tenth, at most 3,000 rows, each for "
        "validation and test, the rest for training",
        panel=DATA,
    ) = None
    labels_in_order: switch("--labels-in-order", "take class indices as they are, though class names differ", DATA) = (
        False
    )

    def read_part(self, config: Any, processor: Any, **settings: Any) -> PreparedData:
        """The rows of --data, of its --split or --part."""
        return self.read(config, processor, split=self.split, part=self.part, **settings)
