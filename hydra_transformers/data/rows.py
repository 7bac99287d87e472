"""Finds the rows of a data set: by its name on the Hub, folder or file, and of which split or part."""

import csv
import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch


FILE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
SEPARATORS = (",", ";", "\t", "|")
MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".wav", ".flac", ".mp3", ".ogg")
MOST_HELD_OUT_ROWS = 3_000
FEW_ROWS = 100
PREFERRED_SPLITS = ("validation", "test", "train")
# The splits that serve as a part where a set has them; a part that has none is cut out of the first split.
SPLITS_OF_PARTS = {"validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
SPLITS_TO_CUT = ("train", "validation", "test")


@dataclass(frozen=True)
class DataSource:
    """The arguments of `load_data` that say which rows and columns to read; see there."""

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
        """What messages call the data."""
        return os.fspath(self.data) if isinstance(self.data, (str, os.PathLike)) else "data"

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The one or two columns that `text` names; none where it names none."""
        if not self.text:
            return ()
        return tuple(name.strip() for name in (self.text.split(",") if isinstance(self.text, str) else self.text))


def load_rows(source: DataSource) -> tuple[Any, str | None, str]:
    """The rows of a source, the split that they are of (None where there are none), and a sentence on both."""
    splits = _splits_of(source)
    if isinstance(splits, _Splits):
        rows, split, words = _part_of(splits, source) if source.part else _split_of(splits, source)
    else:
        rows, split, words = splits, None, ""
        if isinstance(source.split, str):
            raise ValueError(f"{source.name} has no splits: leave out the split {source.split!r}")
        if source.part is not None:
            rows, words = _cut(rows, source, ("test", "validation")), f", cut out for the part {source.part}"
    features = getattr(rows, "features", None) or {}
    if any(column.startswith("__index_level_") for column in features):
        # where pandas puts what it takes for the names of the rows
        raise ValueError(f"rows of {source.name} have more cells than its first line: check separators and quotes")
    if features and any("." in column and column not in features for column in source.text_columns):
        rows = rows.flatten()  # "translation.en" is a field of the column "translation"
    if source.limit is not None and source.limit < len(rows):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        rows = rows.shuffle(seed=0).select(range(source.limit)) if features else _selected(rows, order[: source.limit])
    if len(rows) == 0:
        raise ValueError(f"{source.name} has no rows" + (f" in the split {split}" if split else ""))
    return rows, split, f"{source.name}: {len(rows):,} rows{words}"


class _Splits:
    """The splits of a data set, of the Hub each loaded when it is asked for."""

    def __init__(self, names: Sequence[str], load: Any):
        self.names, self.load, self.loaded = list(names), load, {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.loaded:
            self.loaded[name] = self.load(name)
        return self.loaded[name]


def _splits_of(source: DataSource) -> Any:
    """The splits of a source, or its rows where it has no splits."""
    if not isinstance(source.data, (str, os.PathLike)):
        if isinstance(source.data, Mapping):
            return _Splits(source.data, source.data.__getitem__)
        return source.data
    try:
        import datasets
    except ImportError as error:
        raise ImportError("reading data sets needs datasets: pip install datasets") from error
    path = Path(source.data)
    if path.exists():
        found = _load_local(datasets, path)
        if isinstance(found, dict):
            return _Splits(found, found.__getitem__)
        return found if found.split is None else _Splits([str(found.split)], {str(found.split): found}.__getitem__)
    if source.name.startswith((".", "/", "~")) or path.suffix in FILE_FORMATS:
        raise ValueError(f"there is no folder or file {source.name}")
    name, _, config = source.name.partition(":")
    if name in _builders(datasets):
        raise ValueError(f"there is no folder {name} here, and on the Hub no data set can have that name: check it")
    names = datasets.get_dataset_split_names(name, config or None)
    return _Splits(names, lambda split: datasets.load_dataset(name, config or None, split=split))


# Splits and parts


def _split_of(splits: _Splits, source: DataSource) -> tuple[Any, str, str]:
    split = _chosen_split(splits.names, source, PREFERRED_SPLITS)
    return _rows_of_split(splits, split, source), split, f" of the split {split}"


def _rows_of_split(splits: _Splits, split: str, source: DataSource) -> Any:
    """The rows of a split, or of a part of it that is written as `datasets` writes it."""
    if split in splits.names:
        return splits[split]
    import datasets

    lengths = {name: len(splits[name]) for name in splits.names if name in re.split(r"[\[+]|\]\+?", split)}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"the split {split!r} of {source.name} cannot be read ({_cause(error)}): it has {', '.join(splits.names)}, of "
            'which a part is written as "train[:1000]" or "train[:10%]"'
        ) from error
    rows = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(rows)


def _chosen_split(names: Sequence[str], source: DataSource, preferred: Sequence[str]) -> str:
    if isinstance(source.split, str):
        if source.split not in names and not re.search(r"[\[+]", source.split):
            raise ValueError(f"{source.name} has no split {source.split!r}: it has {', '.join(names)}")
        return source.split
    preferred = source.split or preferred
    chosen = next((name for name in preferred if name in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        raise ValueError(f"{source.name} has the splits {', '.join(names)}: choose one")
    return chosen


def _part_of(splits: _Splits, source: DataSource) -> tuple[Any, str, str]:
    """The part to train, to validate or to test on: the split for that, else a random part of the first split."""
    if isinstance(source.split, str):
        first, own = source.split, {}
    else:
        first = _chosen_split(splits.names, source, SPLITS_TO_CUT)
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
    if source.part == "training":
        kept = f", all but what is held out for {' and '.join(missing)}" if missing else ""
        return rows, first, f" of the split {first}{kept}"
    return rows, first, f" of the split {first}, cut out for the part {source.part}"


def _has_labels(rows: Any, source: DataSource) -> bool:
    """Whether a split may judge: the test splits of some sets on the Hub have no labels, or -1 in place of them."""
    from .columns import find_label_column

    try:
        values = rows[find_label_column(rows, source, None)]
    except ValueError:
        return False
    return any(value not in (None, -1) for value in values)


def _cut(rows: Any, source: DataSource, parts: Sequence[str]) -> Any:
    """The rows of a part where `parts` have to be cut out: a tenth for each, at most 3,000, and the rest to train."""
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
    """Whether two names are those of one data set, however its folder is written."""
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


def _load_local(datasets: Any, path: Path) -> Any:
    """By their whole paths: a bare name may be that of a builder, which would read what lies around it."""
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise ValueError(f"{path} is no {', '.join(FILE_FORMATS)} file: pass one, or a folder")
        file = glob.escape(str(path.absolute()))
        with _one_sentence(path):
            return datasets.load_dataset(FILE_FORMATS[path.suffix], data_files=file, **_csv_settings(path))
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        with _one_sentence(path):
            return datasets.load_from_disk(path.absolute())
    if not any(path.iterdir()):
        raise ValueError(
            f"the folder {path} is empty: it should hold a saved data set, images, csv, json or parquet files"
        )
    with _one_sentence(path):
        return datasets.load_dataset(str(path.absolute()), **_csv_settings_of_folder(path))


def _csv_settings_of_folder(folder: Path) -> dict[str, str]:
    """The separator of its first csv file; beside images or sounds a csv file describes these, which takes no settings."""
    table = min((file for suffix in ("csv", "tsv") for file in folder.rglob(f"*.{suffix}")), default=None)
    if table is None or any(file.suffix.lower() in MEDIA for file in table.parent.rglob("*")):
        return {}
    return _csv_settings(table)


def _csv_settings(path: Path) -> dict[str, str]:
    """The separator of a csv file: the first that gives its first lines equally many cells, and more than one."""
    if FILE_FORMATS[path.suffix] != "csv":
        return {}
    for separator in SEPARATORS:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            try:
                cells = {len(line) for line in islice(csv.reader(file, delimiter=separator), 50) if line}
            except csv.Error:
                continue
        if len(cells) == 1 and cells != {1}:
            return {} if separator == "," else {"sep": separator}
    return {"sep": "\t"} if path.suffix == ".tsv" else {}


def _builders(datasets: Any) -> set[str]:
    """Names that `load_dataset` takes for file formats, whose files it then looks for in the working directory."""
    known = getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ())
    return {*known, *FILE_FORMATS.values(), "text", "arrow", "imagefolder", "audiofolder"}


@contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    """Tells the cause of what goes wrong while local files are read; `datasets` itself says that something went wrong."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # its errors come as exceptions, too
    try:
        yield
    except Exception as error:
        if "corresponds to no data" in str(error):
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
