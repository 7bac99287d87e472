"""Finds the rows of a data set: by Hub name, folder, file or DataFrame, of one split or part."""

import glob
import hashlib
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
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


def is_dataframe(data: Any) -> bool:
    """Whether `data` is a DataFrame of pandas, which is not imported for it."""
    return "pandas" in sys.modules and isinstance(data, sys.modules["pandas"].DataFrame)


def as_rows(data: Any) -> Any:
    """A DataFrame as a `datasets` Dataset without its index, or as a list of dict rows where it holds images."""
    if not is_dataframe(data):
        return data
    import datasets
    import pyarrow

    try:
        return datasets.Dataset.from_pandas(data, preserve_index=False)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # it knows no objects such as images of PIL
        return data.astype(object).where(data.notna(), None).to_dict("records")


def as_dataset(rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return a list of dict rows as a `Dataset` with the columns of all rows. name: of the data, in messages"""
    import datasets
    import pyarrow

    names = dict.fromkeys(chain.from_iterable(rows))
    columns = {column: _without_nan([row.get(column) for row in rows]) for column in names}
    try:
        return datasets.Dataset.from_dict(columns)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
        for column, values in columns.items():
            kinds = sorted({type(value).__name__ for value in values if value is not None})
            if len(kinds) > 1:
                raise ValueError(
                    f"the column {column!r} of {name} has values of several types ({', '.join(kinds)}): give them one, "
                    "such as texts, or leave the column out"
                ) from error
        raise ValueError(f"the rows of {name} do not make a table: {' '.join(str(error).split())}") from error


def _without_nan(values: list[Any]) -> list[Any]:
    """None for each NaN of a column that is not of numbers; pandas has it where a value is missing."""
    if all(value is None or isinstance(value, float) for value in values):
        return values
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]


def load_rows(source: DataSource) -> tuple[Any, str | None, str]:
    """The rows of a source, their split (None without splits), and a sentence about both."""
    rows, split, note = _load(source), None, ""
    rows = {name: as_rows(part) for name, part in rows.items()} if isinstance(rows, Mapping) else as_rows(rows)
    for part in rows.values() if isinstance(rows, Mapping) else [rows]:
        if not isinstance(part, (list, tuple)) and not hasattr(part, "select"):
            kind = type(part).__name__
            raise TypeError(f"data is a {kind}: pass a DataFrame, a Dataset of datasets, or a list of dict rows")
    # `datasets` calls rows "train" where it finds no split.
    if isinstance(rows, Mapping) and list(rows) == ["train"] and source.split is None:
        rows = rows["train"]
    if isinstance(rows, Mapping) and source.part is not None:
        rows, split, note = _part_of(rows, source)
    elif isinstance(rows, Mapping):
        split = _choose_split(rows, source, PREFERRED_SPLITS)
        rows, note = _rows_of_split(rows, split, source.name), f" of the split {split}"
    elif source.split is not None:
        raise ValueError(f"{source.name} has no splits: leave out the split {source.split!r}{_parts_to_cut(())}")
    elif source.part is not None:
        rows, note = _cut(rows, source, ("test", "validation")), f", a random part for {source.part}"
    features = getattr(rows, "features", None) or {}
    names = [column for column in features if not column.startswith("__index_level_")]
    if names and all(";" in name for name in names):
        raise ValueError(f"{source.name} has ';' between its columns: {SEPARATORS}")
    if len(names) < len(features):  # pandas took the first cells for row names
        raise ValueError(f"rows of {source.name} have more cells than its first line: {SEPARATORS}")
    if source.limit is not None and source.limit < len(rows):
        if features:
            rows = rows.shuffle(seed=0, keep_in_memory=True).select(range(source.limit))
        else:
            rows = _selected(rows, _random_order(len(rows))[: source.limit])
    if len(rows) == 0:
        raise ValueError(f"{source.name} has no rows" + (f" in the split {split}" if split else ""))
    return rows, split, f"{source.name}: {len(rows):,} rows{note}"


def load_once(source: DataSource) -> DataSource:
    """Return the source with its data read, so that what is made of it reads no file again."""
    return replace(source, data=LoadedData(source.name, _load(source)))


def _load(source: DataSource) -> Any:
    """The rows of a source, or its splits by name."""
    if isinstance(source.data, LoadedData):
        return source.data.rows
    if not isinstance(source.data, (str, os.PathLike)):
        return source.data
    import datasets

    path, name = Path(source.data), source.name
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return datasets.load_from_disk(path.absolute())
    if not path.exists() and (name.startswith((".", "/", "~")) or path.suffix in FILE_FORMATS):
        raise ValueError(f"there is no folder or file {name}")
    # `load_dataset` takes these for file formats, and reads such files of the working directory.
    if not path.exists() and name.partition(":")[0] in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        raise ValueError(f"there is no folder {name} here, and on the Hub no data set can have that name: check it")
    if path.is_file() and path.suffix not in FILE_FORMATS:
        raise ValueError(f"{path} is not a {', '.join(FILE_FORMATS)} file: pass one, or a folder")
    try:
        if path.exists():
            return _read_files(path, source)
        name, _, config = name.partition(":")
        with access_to(source.name, "data set"):
            return datasets.load_dataset(name, config or None)
    except TableError:
        raise
    except StopIteration as error:  # of JSON files that are empty
        raise ValueError(f"{name} cannot be read: it is empty") from error
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        reason += f" ({SEPARATORS})" * ("tokenizing" in reason)
        reason = "it has no rows" if "corresponds to no data" in reason else reason
        raise ValueError(f"{name} cannot be read: {reason}") from error


def _read_files(path: Path, source: DataSource) -> Any:
    """The splits of a file or a folder, whose fingerprint is of its content, whenever it was written."""
    import datasets

    kind = FILE_FORMATS.get(path.suffix) if path.is_file() else None
    place = str(path.absolute())
    if kind == "csv":
        return datasets.DatasetDict(read_tables({"train": [source.name]}, _known_names(source)))
    files = {"data_files": glob.escape(place)} if kind else {}
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
    return datasets.DatasetDict(
        {
            split: datasets.Dataset(
                rows.data,
                info=rows.info,
                split=rows.split,
                fingerprint=f"{digests[split][:16]}{rows._fingerprint[:16]}",
            )
            for split, rows in splits.items()
        }
    )


def _known_names(source: DataSource) -> set[str]:
    remembered = source.remembered.get("column") or ()
    return {*USUAL_NAMES, *source.columns, *remembered, *filter(None, [source.label])}


def _digest_of(files: Sequence[str]) -> str:
    """Of the content of tables, and of size and times of other files, which may be many images."""
    tables = [file for file in files if Path(file).suffix in FILE_FORMATS]
    times = [(file, os.stat(file)) for file in files if Path(file).suffix not in FILE_FORMATS]
    described = [(file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in times]
    return hashlib.sha256(f"{tables} {digest_of_files(tables)} {described}".encode()).hexdigest()


# Splits and parts


def _rows_of_split(splits: Mapping[str, Any], split: str, name: str) -> Any:
    """The rows of a split, or of a slice of it in the notation of `datasets`."""
    if split in splits:
        return splits[split]
    import datasets

    named = [part.partition("[")[0].strip() for part in split.split("+")]
    unknown = next((part for part in named if part not in splits), None)
    if unknown is not None:
        raise ValueError(f"{name} has no split {unknown!r}: it has {', '.join(splits)}{_parts_to_cut(splits)}")
    instruction = datasets.ReadInstruction.from_spec(split)
    slices = instruction.to_absolute({name: len(rows) for name, rows in splits.items()})
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in slices]
    return datasets.concatenate_datasets(parts)


def _parts_to_cut(splits: Collection[str]) -> str:
    """The parts that could be cut out, as the end of a sentence."""
    parts = [f"part={part!r} (--split {part})" for part in ("validation", "test") if part not in splits]
    return f"; {' and '.join(parts)} would be a random tenth" if parts else ""


def _choose_split(splits: Mapping[str, Any], source: DataSource, preferred: Sequence[str]) -> str:
    if source.split is not None:
        return source.split
    chosen = [name for name in preferred if name in splits] or (list(splits) if len(splits) == 1 else [])
    if not chosen:
        raise ValueError(f"{source.name} has the splits {', '.join(splits)}: choose one")
    return chosen[0]


def _part_of(splits: Mapping[str, Any], source: DataSource) -> tuple[Any, str, str]:
    """The rows to train, validate or test on: the split with that purpose, else a random part of the first split."""
    first, matching = _choose_split(splits, source, SPLITS_TO_CUT), {}
    if source.split is None:
        is_labelled = _has_labels(splits[first], source)  # pairs of texts have no labels in any split
        matching = {
            part: name
            for part, names in SPLITS_OF_PARTS.items()
            for name in splits
            if name in names and name != first and (not is_labelled or _has_labels(splits[name], source))
        }
    if source.part in matching:
        split = matching[source.part]
        return splits[split], split, f" of the split {split}"
    missing = [part for part in ("test", "validation") if part not in matching]
    rows = _cut(_rows_of_split(splits, first, source.name), source, missing)
    note = f", a random part for {source.part}" if missing else ""
    return rows, first, f" of the split {first}{note}"


def _has_labels(rows: Any, source: DataSource) -> bool:
    """Test splits on the Hub may have no labels, or only -1."""
    try:
        words = find_words(rows, source)
        column = find_label_column(rows, source, words)
    except ValueError:
        return False
    values = values_of(rows, column)
    values = values if words is None else chain.from_iterable(tags or () for tags in values)
    return any(value not in (None, -1, NO_TAG) for value in values)


def _cut(rows: Any, source: DataSource, parts: Sequence[str]) -> Any:
    """The rows of a part: a random tenth for each of `parts`, at most 3,000 rows, and the rest for training."""
    count = len(rows)
    if count < 1 + len(parts):
        raise ValueError(f"{source.name} has {count} rows, too few to split them for training, validation and test")
    held_out, order = min(MOST_HELD_OUT_ROWS, max(1, count // 10)), _random_order(count)
    places = {part: order[place * held_out : (place + 1) * held_out] for place, part in enumerate(parts)}
    places |= {"training": order[len(parts) * held_out :], "all": order}
    return _selected(rows, sorted(places[source.part]))


def _random_order(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


def _selected(rows: Any, places: Sequence[int]) -> Any:
    return rows.select(places) if hasattr(rows, "select") else [rows[place] for place in places]
