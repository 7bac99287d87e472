"""Finds the rows of a data set: by Hub name, folder or file, of one split or part."""

import csv
import glob
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import get_logger


logger = get_logger(f"transformers.{__name__}")  # follows Transformers' verbosity

FILE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".wav", ".flac", ".mp3", ".ogg")
MOST_HELD_OUT_ROWS = 3_000
FEW_ROWS = 100
PREFERRED_SPLITS = ("validation", "test", "train")
# The splits that serve as a part where a set has them; other parts are cut out of the first split.
SPLITS_OF_PARTS = {"validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
SPLITS_TO_CUT = ("train", "validation", "test")


@dataclass(frozen=True)
class DataSource:
    """The arguments of `load_data` that select rows and columns."""

    data: Any
    split: str | Sequence[str] | None = None
    part: str | None = None
    limit: int | None = None
    image: str | None = None
    audio: str | None = None
    text: str | Sequence[str] | None = None
    label: str | None = None
    labels_in_order: bool = False
    max_length: int | None = None

    @property
    def name(self) -> str:
        """The name of the data in messages."""
        return os.fspath(self.data) if isinstance(self.data, (str, os.PathLike)) else "data"

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that `text` names: none, one, or two of pairs."""
        if not self.text:
            return ()
        return tuple(name.strip() for name in (self.text.split(",") if isinstance(self.text, str) else self.text))


def load_rows(source: DataSource) -> tuple[Any, str | None, str]:
    """The rows of a source, their split (None without splits), and a sentence about both."""
    found = _load(source)
    if isinstance(found, Splits):
        rows, split, words = _part_of(found, source) if source.part else _split_of(found, source)
    else:
        rows, split, words = found, None, ""
        if isinstance(source.split, str):
            raise ValueError(f"{source.name} has no splits: leave out the split {source.split!r}")
        if source.part is not None:
            rows, words = _cut(rows, source, ("test", "validation")), f", cut out for the part {source.part}"
    features = getattr(rows, "features", None) or {}
    if any(column.startswith("__index_level_") for column in features):  # pandas took the first cells for row names
        raise ValueError(f"rows of {source.name} have more cells than its first line: check separators and quotes")
    if features and any("." in column and column not in features for column in source.text_columns):
        rows = rows.flatten()  # "translation.en" is a field of the column "translation"
    if source.limit is not None and source.limit < len(rows):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        rows = rows.shuffle(seed=0).select(range(source.limit)) if features else _selected(rows, order[: source.limit])
    if len(rows) == 0:
        raise ValueError(f"{source.name} has no rows" + (f" in the split {split}" if split else ""))
    return rows, split, f"{source.name}: {len(rows):,} rows{words}"


class Splits:
    """The splits of a data set by name, each loaded when it is first read."""

    def __init__(self, names: Sequence[str], load: Callable[[str], Any]):
        self.names, self.load, self.loaded = list(names), load, {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.loaded:
            self.loaded[name] = self.load(name)
        return self.loaded[name]


def _load(source: DataSource) -> Any:
    """The splits of a source, or its rows where it has none."""
    found = source.data
    if isinstance(found, (str, os.PathLike)):
        try:
            import datasets
        except ImportError as error:
            raise ImportError("reading data sets needs datasets: pip install datasets") from error
        path = Path(found)
        if not path.exists():
            return _hub_splits(datasets, source)
        found = _read_local(datasets, path)
        if isinstance(found, datasets.Dataset) and found.split is not None:
            found = {str(found.split): found}
    return Splits(found, found.__getitem__) if isinstance(found, Mapping) else found


def _hub_splits(datasets: Any, source: DataSource) -> Splits:
    if source.name.startswith((".", "/", "~")) or Path(source.name).suffix in FILE_FORMATS:
        raise ValueError(f"there is no folder or file {source.name}")
    name, _, config = source.name.partition(":")
    # `load_dataset` takes these for file formats, and reads such files of the working directory.
    if name in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        raise ValueError(f"there is no folder {name} here, and on the Hub no data set can have that name: check it")
    names = datasets.get_dataset_split_names(name, config or None)
    return Splits(names, lambda split: datasets.load_dataset(name, config or None, split=split))


# Splits and parts


def _split_of(splits: Splits, source: DataSource) -> tuple[Any, str, str]:
    split = _choose_split(splits.names, source, PREFERRED_SPLITS)
    return _rows_of_split(splits, split, source), split, f" of the split {split}"


def _rows_of_split(splits: Splits, split: str, source: DataSource) -> Any:
    """The rows of a split, or of a slice of it in the notation of `datasets`."""
    if split in splits.names:
        return splits[split]
    import datasets

    lengths = {name: len(splits[name]) for name in splits.names if name in re.split(r"[\[+]|\]\+?", split)}
    try:
        slices = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"the split {split!r} of {source.name} cannot be read ({_cause(error)}): it has {', '.join(splits.names)}, of "
            'which a part is written as "train[:1000]" or "train[:10%]"'
        ) from error
    return datasets.concatenate_datasets(
        [splits[each.splitname].select(range(each.from_, each.to)) for each in slices]
    )


def _choose_split(names: Sequence[str], source: DataSource, preferred: Sequence[str]) -> str:
    if isinstance(source.split, str):
        if source.split not in names and not re.search(r"[\[+]", source.split):
            raise ValueError(f"{source.name} has no split {source.split!r}: it has {', '.join(names)}")
        return source.split
    chosen = [name for name in source.split or preferred if name in names] or (names if len(names) == 1 else [])
    if not chosen:
        raise ValueError(f"{source.name} has the splits {', '.join(names)}: choose one")
    return chosen[0]


def _part_of(splits: Splits, source: DataSource) -> tuple[Any, str, str]:
    """The rows to train, validate or test on: the split with that purpose, else a random part of the first split."""
    first, own = source.split, {}
    if not isinstance(first, str):
        first = _choose_split(splits.names, source, SPLITS_TO_CUT)
        own = {
            part: name
            for part, known in SPLITS_OF_PARTS.items()
            for name in splits.names
            if name in known and name != first and _has_labels(splits[name], source)
        }
    if source.part in own:
        split = own[source.part]
        return splits[split], split, f" of the split {split}"
    missing = [part for part in ("test", "validation") if part not in own]
    rows = _cut(_rows_of_split(splits, first, source), source, missing)
    note = f", cut out for the part {source.part}"
    if source.part == "training":
        note = f", all but what is held out for {' and '.join(missing)}" if missing else ""
    return rows, first, f" of the split {first}{note}"


def _has_labels(rows: Any, source: DataSource) -> bool:
    """Test splits on the Hub may have no labels, or only -1."""
    from .columns import find_label_column
    from .tags import NO_TAG, find_tag_column, find_word_column, has_words

    try:
        if has_words(rows, source):
            tags = rows[find_tag_column(rows, source, find_word_column(rows, source), None)]
            values = [tag for tags_of_row in tags for tag in tags_of_row or ()]
        else:
            values = rows[find_label_column(rows, source, None)]
    except ValueError:
        return False
    return any(value not in (None, -1, NO_TAG) for value in values)


def _cut(rows: Any, source: DataSource, parts: Sequence[str]) -> Any:
    """The rows of a part: a random tenth for each of `parts`, at most 3,000 rows, and the rest for training."""
    count = len(rows)
    if count < 1 + len(parts):
        raise ValueError(f"{source.name} has {count} rows, too few for a part each to train, to validate and to test")
    held_out = min(MOST_HELD_OUT_ROWS, max(1, count // 10))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    places = {part: order[place * held_out : (place + 1) * held_out] for place, part in enumerate(parts)}
    places["training"] = order[len(parts) * held_out :]
    return _selected(rows, sorted(places[source.part]))


def _selected(rows: Any, places: list[int]) -> Any:
    return rows.select(places) if hasattr(rows, "select") else torch.utils.data.Subset(rows, places)


def is_same_source(name: str, other: str) -> bool:
    """Whether two names mean one data set, however its folder is written."""
    if Path(name).exists() and Path(other).exists():
        return Path(name).samefile(other)
    return name == other


def overlap(split: str | None, other: str | None) -> bool:
    """Whether two splits of one data set certainly share rows: they are equal, or one is a part of the other."""
    if split is None or other is None:  # the only one
        return split == other
    is_same = split.partition("[")[0] == other.partition("[")[0]
    return is_same and (split == other or "[" not in split or "[" not in other)


# Files


def _read_local(datasets: Any, path: Path) -> Any:
    """Reads by absolute paths: a bare name may be that of a file format, see `_hub_splits`."""
    if path.is_file() and path.suffix not in FILE_FORMATS:
        raise ValueError(f"{path} is no {', '.join(FILE_FORMATS)} file: pass one, or a folder")
    if path.is_dir() and not any(path.iterdir()):
        raise ValueError(
            f"the folder {path} is empty: it should hold a saved data set, images, csv, json or parquet files"
        )
    with _one_sentence(path):
        if path.is_file():
            file = glob.escape(str(path.absolute()))
            return datasets.load_dataset(FILE_FORMATS[path.suffix], data_files=file, **_csv_settings(path))
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return datasets.load_from_disk(path.absolute())
        builder = datasets.load_dataset_builder(str(path.absolute()), **_csv_settings_of_folder(path))
        _warn_of_unread_files(path, builder.config.data_files)
        builder.download_and_prepare()
        return builder.as_dataset()


def _warn_of_unread_files(folder: Path, files_of_splits: Mapping[Any, Sequence[str]]) -> None:
    """Names files of data that `datasets` leaves out without a word."""
    base, read = os.path.realpath(folder), {file for files in files_of_splits.values() for file in files}
    there = [file.relative_to(folder) for file in folder.rglob("*") if file.suffix.lower() in (*FILE_FORMATS, *MEDIA)]
    there = [file for file in there if not any(part.startswith((".", "__")) for part in file.parts)]
    unread = sorted(file for file in there if os.path.join(base, file) not in read)
    if unread:
        logger.warning_once(
            f"{len(unread):,} of the {len(there):,} files in {folder} are not read, such as {unread[0]}: files of one format are "
            "read, and where some have train, test or another split in their names only these; rename or convert the others"
        )


def _csv_settings_of_folder(folder: Path) -> dict[str, str]:
    """The separator of the first csv file. Beside images or sounds a csv file is metadata, which takes no settings."""
    table = min((file for suffix in ("csv", "tsv") for file in folder.rglob(f"*.{suffix}")), default=None)
    if table is None or any(file.suffix.lower() in MEDIA for file in table.parent.rglob("*")):
        return {}
    return _csv_settings(table)


def _csv_settings(path: Path) -> dict[str, str]:
    """The separator of a csv file: the first that splits the first lines into equally many cells."""
    if FILE_FORMATS[path.suffix] != "csv":
        return {}
    for separator in (",", ";", "\t", "|"):
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            try:
                cells = {len(line) for line in islice(csv.reader(file, delimiter=separator), 50) if line}
            except csv.Error:
                continue
        if len(cells) == 1 and cells != {1}:
            return {} if separator == "," else {"sep": separator}
    return {"sep": "\t"} if path.suffix == ".tsv" else {}


@contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    """Reports the cause of a read error in one sentence, where `datasets` logs and wraps it."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        if "corresponds to no data" in str(error) or "BatchSize must be greater than 0" in _cause(error):
            raise ValueError(f"{path} has no rows") from error
        files = [path] if path.is_file() else path.rglob("*")
        empty = next((file for file in files if file.suffix in FILE_FORMATS and file.stat().st_size == 0), None)
        reason = _cause(error) if empty is None else f"{empty.name} is an empty file"
        raise ValueError(f"{path} cannot be read: {reason}") from error
    finally:
        logger.setLevel(level)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    words = str(error).split()
    return " ".join(words[:40]) + (" ..." if len(words) > 40 else "") or type(error).__name__
