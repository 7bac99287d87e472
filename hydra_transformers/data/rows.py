"""Finds the rows of a data set: by Hub name, folder, file or DataFrame, of one split or part."""

import glob
import hashlib
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from .._io.access import access_to
from .columns import USUAL_NAMES, DataSource, LoadedData, find_label_column, find_words, values_of
from .json_values import restore_values
from .labels import NO_TAG
from .tables import TableError, digest_of_files, read_tables


FILE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
SEPARATORS = "put commas between columns, and texts with commas into quotes, or pass pandas.read_csv(file, sep=';')"
MOST_HELD_OUT_ROWS = 3_000
PREFERRED_SPLITS = ("validation", "test", "train")
# The splits that serve as a part where a set has them; other parts are cut out of the first split.
SPLITS_OF_PARTS = {"validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
SPLITS_TO_CUT = ("train", "validation", "test")


@dataclass(frozen=True)
class LoadedRows:
    """The rows that a source selects, and where they are from.

    rows: a `Dataset`, or a list of dict rows
    split: the one that they are of, whole or in part; None where the data has none
    is_cut: whether they are one of the random parts that the data, or a split, was cut into
    note: a sentence about them, for users
    """

    rows: Any
    split: str | None
    is_cut: bool
    note: str


def is_dataframe(data: Any) -> bool:
    """Whether `data` is a DataFrame of pandas, which is not imported for it."""
    return "pandas" in sys.modules and isinstance(data, sys.modules["pandas"].DataFrame)


def as_rows(data: Any) -> Any:
    """Return a DataFrame as a `datasets` Dataset without its index, or as a list of dict rows where
    it holds images; other data as it is."""
    if not is_dataframe(data):
        return data
    import datasets
    import pyarrow

    try:
        return datasets.Dataset.from_pandas(data, preserve_index=False)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # it knows no objects such as images of PIL
        return data.astype(object).where(data.notna(), None).to_dict("records")


def as_dataset(rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return a list of dict rows as a `Dataset` with the columns of all rows.

    name: of the data, in messages
    """
    import datasets
    import pyarrow

    names = dict.fromkeys(chain.from_iterable(rows))
    columns = {column: _without_nan([row.get(column) for row in rows]) for column in names}
    try:
        return datasets.Dataset.from_dict(columns)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
        # A column of several types is the usual reason, and its name helps more than the error.
        for column, values in columns.items():
            kinds = sorted({type(value).__name__ for value in values if value is not None})
            if len(kinds) > 1:
                raise ValueError(
                    f"the column {column!r} of {name} has values of several types ({', '.join(kinds)}): give them "
                    "one, such as texts, or leave the column out"
                ) from error
        raise ValueError(f"the rows of {name} do not make a table: {' '.join(str(error).split())}") from error


def _without_nan(values: list[Any]) -> list[Any]:
    """Return a column with None for NaN, unless it is one of numbers.

    pandas has NaN where a value is missing.
    """
    if all(value is None or isinstance(value, float) for value in values):
        return values
    is_missing = [isinstance(value, float) and math.isnan(value) for value in values]
    return [None if missing else value for missing, value in zip(is_missing, values, strict=True)]


def load_rows(source: DataSource) -> LoadedRows:
    """Return the rows of a source, of one split or part of it."""
    loaded = _load(source)
    if isinstance(loaded, Mapping):
        splits = {name: _checked_rows(rows) for name, rows in loaded.items()}
        # `datasets` calls rows "train" where it finds no split.
        has_splits = list(splits) != ["train"] or source.split is not None
        found = _of_splits(splits, source) if has_splits else _without_splits(splits["train"], source)
    else:
        found = _without_splits(_checked_rows(loaded), source)

    _check_columns(found.rows, source.name)
    rows = _limited(found.rows, source.limit)
    if len(rows) == 0:
        where = f" in the split {found.split}" if found.split else ""
        raise ValueError(f"{source.name} has no rows{where}")
    return replace(found, rows=rows, note=f"{source.name}: {len(rows):,} rows{found.note}")


def load_once(source: DataSource) -> DataSource:
    """Return the source with its data read, so that what is made of it reads no file again."""
    return replace(source, data=LoadedData(source.name, _load(source)))


def _checked_rows(data: Any) -> Any:
    """Return data as rows; raise where it is something else."""
    rows = as_rows(data)
    if not isinstance(rows, (list, tuple)) and not hasattr(rows, "select"):
        kind = type(rows).__name__
        raise TypeError(f"data is a {kind}: pass a DataFrame, a Dataset of datasets, or a list of dict rows")
    return rows


def _check_columns(rows: Any, name: str) -> None:
    """Raise for columns of a file with another separator than commas."""
    features = getattr(rows, "features", None) or {}
    names = [column for column in features if not column.startswith("__index_level_")]
    if names and all(";" in column for column in names):
        raise ValueError(f"{name} has ';' between its columns: {SEPARATORS}")
    if len(names) < len(features):  # pandas took the first cells for row names
        raise ValueError(f"rows of {name} have more cells than its first line: {SEPARATORS}")


def _limited(rows: Any, limit: int | None) -> Any:
    """Return at most `limit` rows, drawn at random."""
    if limit is None or limit >= len(rows):
        return rows
    if getattr(rows, "features", None):
        return rows.shuffle(seed=0, keep_in_memory=True).select(range(limit))
    return _selected(rows, _random_order(len(rows))[:limit])


# Files, folders and the Hub


def _load(source: DataSource) -> Any:
    """Return the rows of a source, or its splits by name."""
    if isinstance(source.data, LoadedData):
        return source.data.rows
    if not isinstance(source.data, (str, os.PathLike)):
        return source.data
    import datasets

    path = Path(source.data)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return datasets.load_from_disk(path.absolute())
    _check_is_readable(path, source.name)
    name = source.name
    if not path.exists():
        name = name.partition(":")[0]  # on the Hub a configuration may follow
    try:
        if path.exists():
            return _read_files(path, source)
        return _read_from_hub(source.name)
    except TableError:
        raise
    except StopIteration as error:  # of JSON files that are empty
        raise ValueError(f"{name} cannot be read: it is empty") from error
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{name} cannot be read: {_reason_of(error)}") from error


def _check_is_readable(path: Path, name: str) -> None:
    """Raise for files that are missing or of another format, and for names that no data set has."""
    import datasets

    if path.exists():
        if path.is_file() and path.suffix not in FILE_FORMATS:
            raise ValueError(f"{path} is not a {', '.join(FILE_FORMATS)} file: pass one, or a folder")
        return
    if name.startswith((".", "/", "~")) or path.suffix in FILE_FORMATS:
        raise ValueError(f"there is no folder or file {name}")
    # `load_dataset` takes these for file formats, and reads such files of the working directory.
    if name.partition(":")[0] in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        raise ValueError(f"there is no folder {name} here, and on the Hub no data set can have that name: check it")


def _read_from_hub(name: str) -> Any:
    import datasets

    repository, _, config = name.partition(":")
    with access_to(name, "data set"):
        return datasets.load_dataset(repository, config or None)


def _reason_of(error: Exception) -> str:
    """Return in one line why `datasets` cannot read files, and what to do about it."""
    reason = " ".join(str(error.__cause__ or error).split())
    if "corresponds to no data" in reason:
        return "it has no rows"
    if "tokenizing" in reason:
        return f"{reason} ({SEPARATORS})"
    return reason


def _read_files(path: Path, source: DataSource) -> Any:
    """Return the splits of a file or a folder.

    Their fingerprint is of the content, whenever it was written.
    """
    import datasets

    kind = None
    if path.is_file():
        kind = FILE_FORMATS.get(path.suffix)
    if kind == "csv":
        return datasets.DatasetDict(read_tables({"train": [source.name]}, _known_names(source)))

    # `datasets` knows the files of a folder by split, and by their names.
    place = str(path.absolute())
    files = {}
    if kind is not None:
        files["data_files"] = glob.escape(place)
    builder = datasets.load_dataset_builder(kind or place, **files)
    by_split = {str(split): list(map(str, names)) for split, names in builder.config.data_files.items()}
    if hasattr(builder.config, "skip_blank_lines"):  # csv files
        return datasets.DatasetDict(read_tables(by_split, _known_names(source)))

    # The cache of `datasets` goes by time stamps, which a file that was replaced may share.
    digests = {split: _digest_of(names) for split, names in by_split.items()}
    digest = hashlib.sha256(repr(digests).encode()).hexdigest()[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE, "hydra_transformers", digest)
    splits = datasets.load_dataset(kind or place, **files, cache_dir=str(cache))
    if hasattr(builder.config, "on_mixed_types"):  # JSON files
        splits = {split: restore_values(rows, by_split[split]) for split, rows in splits.items()}
    return datasets.DatasetDict({split: _with_digest(rows, digests[split]) for split, rows in splits.items()})


def _with_digest(rows: Any, digest: str) -> Any:
    """Return a `Dataset` whose fingerprint begins with the digest of its files."""
    import datasets

    fingerprint = f"{digest[:16]}{rows._fingerprint[:16]}"
    return datasets.Dataset(rows.data, info=rows.info, split=rows.split, fingerprint=fingerprint)


def _known_names(source: DataSource) -> set[str]:
    """Return names that columns may have, by which names in a first line are told from a row."""
    names = {*USUAL_NAMES, *source.columns, *(source.remembered.get("column") or ())}
    if source.label:
        names.add(source.label)
    return names


def _digest_of(files: Sequence[str]) -> str:
    """Return a digest of files: of the content of tables, of size and times of images."""
    tables = [file for file in files if Path(file).suffix in FILE_FORMATS]
    described = []
    for file in files:
        if Path(file).suffix not in FILE_FORMATS:
            stat = os.stat(file)
            described.append((file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return hashlib.sha256(f"{tables} {digest_of_files(tables)} {described}".encode()).hexdigest()


# Splits and parts


def _without_splits(rows: Any, source: DataSource) -> LoadedRows:
    """Return all rows of data without splits, or the random part of them that the source names."""
    if source.split is not None:
        raise ValueError(f"{source.name} has no splits: leave out the split {source.split!r}{_parts_to_cut(())}")
    if source.part is None:
        return LoadedRows(rows, split=None, is_cut=False, note="")
    part = _cut(rows, source, ("test", "validation"))
    return LoadedRows(part, split=None, is_cut=True, note=f", a random part for {source.part}")


def _of_splits(splits: Mapping[str, Any], source: DataSource) -> LoadedRows:
    """Return the rows of the split, or of the part, that the source names."""
    if source.part is not None:
        return _part_of(splits, source)
    split = _choose_split(splits, source, PREFERRED_SPLITS)
    rows = _rows_of_split(splits, split, source.name)
    return LoadedRows(rows, split, is_cut=False, note=f" of the split {split}")


def _rows_of_split(splits: Mapping[str, Any], split: str, name: str) -> Any:
    """Return the rows of a split, or of a slice of it in the notation of `datasets`."""
    if split in splits:
        return splits[split]
    import datasets

    named = [part.partition("[")[0].strip() for part in split.split("+")]
    for part in named:
        if part not in splits:
            raise ValueError(f"{name} has no split {part!r}: it has {', '.join(splits)}{_parts_to_cut(splits)}")
    instruction = datasets.ReadInstruction.from_spec(split)
    slices = instruction.to_absolute({name: len(rows) for name, rows in splits.items()})
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in slices]
    return datasets.concatenate_datasets(parts)


def _parts_to_cut(splits: Collection[str]) -> str:
    """Return which parts could be cut out, as the end of a sentence."""
    parts = [f"part={part!r} (--split {part})" for part in ("validation", "test") if part not in splits]
    if not parts:
        return ""
    return f"; {' and '.join(parts)} would be a random tenth"


def _choose_split(splits: Mapping[str, Any], source: DataSource, preferred: Sequence[str]) -> str:
    """Return the split that the source names, or the first of those that are preferred."""
    if source.split is not None:
        return source.split
    for name in preferred:
        if name in splits:
            return name
    if len(splits) == 1:
        return next(iter(splits))
    raise ValueError(f"{source.name} has the splits {', '.join(splits)}: choose one")


def _part_of(splits: Mapping[str, Any], source: DataSource) -> LoadedRows:
    """Return the rows to train, validate or test on: the split with that purpose, else a random
    part of the first split."""
    first = _choose_split(splits, source, SPLITS_TO_CUT)
    matching = {}
    if source.split is None:
        matching = _splits_of_parts(splits, first, source)
    if source.part in matching:
        split = matching[source.part]
        return LoadedRows(splits[split], split, is_cut=False, note=f" of the split {split}")

    # The other parts are cut out of the first split, or it is whole where none is.
    missing = [part for part in ("test", "validation") if part not in matching]
    rows = _cut(_rows_of_split(splits, first, source.name), source, missing)
    note = f" of the split {first}"
    if missing:
        note += f", a random part for {source.part}"
    return LoadedRows(rows, first, is_cut=bool(missing), note=note)


def _splits_of_parts(splits: Mapping[str, Any], first: str, source: DataSource) -> dict[str, str]:
    """Return, by part, the split that serves as it.

    The first split serves as none, and where it has labels, the others need some, too.
    """
    is_labelled = _has_labels(splits[first], source)  # pairs of texts have no labels in any split
    matching = {}
    for part, names in SPLITS_OF_PARTS.items():
        for name in splits:
            if name not in names or name == first:
                continue
            if not is_labelled or _has_labels(splits[name], source):
                matching[part] = name
    return matching


def _has_labels(rows: Any, source: DataSource) -> bool:
    """Whether rows have labels: test splits on the Hub may have none, or only -1."""
    try:
        words = find_words(rows, source)
        column = find_label_column(rows, source, words)
    except ValueError:
        return False
    values = values_of(rows, column)
    if words is not None:
        values = chain.from_iterable(tags or () for tags in values)
    return any(value not in (None, -1, NO_TAG) for value in values)


def _cut(rows: Any, source: DataSource, parts: Sequence[str]) -> Any:
    """Return the rows of a part: a random tenth for each of `parts`, at most 3,000 rows, and the
    rest for training."""
    count = len(rows)
    if count < 1 + len(parts):
        raise ValueError(f"{source.name} has {count} rows, too few to split them for training, validation and test")

    # The parts follow each other in one random order, the same for each of them.
    held_out = min(MOST_HELD_OUT_ROWS, max(1, count // 10))
    order = _random_order(count)
    places = {}
    for number, part in enumerate(parts):
        places[part] = order[number * held_out : (number + 1) * held_out]
    places["training"] = order[len(parts) * held_out :]
    places["all"] = order
    return _selected(rows, sorted(places[source.part]))


def _random_order(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(count, generator=generator).tolist()


def _selected(rows: Any, places: Sequence[int]) -> Any:
    if hasattr(rows, "select"):
        return rows.select(places)
    return [rows[place] for place in places]
