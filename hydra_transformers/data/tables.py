"""Reads csv and tsv files: each cell as its text, in columns whose separator is found."""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .._io.files import unfinished_path


VERSION = 1  # of what is kept in the cache
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
ICONV = {"latin-1": "latin1"}  # which knows encodings by other names
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
OTHER_SEPARATORS = ("\x1f", "\x01", "^", "~", ":", "#")  # that are seen and not read
CHARACTERS_TO_LOOK_AT = 2**18  # for the separator
MOST_BYTES_IN_MEMORY = 16 * 2**20  # larger files are kept as a table on disk
CHARACTERS_PER_BATCH = 16 * 2**20
MOST_WORDS_OF_A_NAME = 5

WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|[+-]?inf", re.IGNORECASE)
DIGITS = re.compile(r"[+-]?\d+")
BOOLS = {"true": True, "false": False}
# Kinds of cells that are one kind together. Codes are digits that no number is written with, such
# as 007.
TOGETHER = {
    frozenset({"int64", "float64"}): "float64",
    frozenset({"int64", "code"}): "code",
    frozenset({"float64", "code"}): "code",
}
CELLS = "cells:"  # begins the id of a column's feature, and its kind ends it


class TableError(ValueError):
    """A csv or tsv file that cannot be read; the message is one sentence that names the file."""


# Columns and their kinds


def kind_of_cells(feature: Any) -> str | None:
    """Return what the cells of a csv column look like; None for columns of other data, which have a
    type.

    It is "text", "int64", "float64", "bool", "code", or "null" if all cells are empty.
    """
    name = getattr(feature, "id", None)
    if isinstance(name, str) and name.startswith(CELLS):
        return name.removeprefix(CELLS)
    return None


def typed_values(cells: Sequence[str | None], kind: str) -> list[Any]:
    """Return the cells of a column as values of its kind; empty cells are None."""
    readers = {"int64": int, "float64": float, "bool": lambda cell: BOOLS[cell.lower()]}
    if kind not in readers:
        return list(cells)
    read = readers[kind]
    return [None if cell is None else read(cell) for cell in cells]


def _kind_of_cell(cell: str) -> str:
    if WHOLE_NUMBER.fullmatch(cell):
        return "int64"
    if DIGITS.fullmatch(cell):
        return "code"
    if NUMBER.fullmatch(cell) and cell.lower() != "nan":
        return "float64"
    if cell.lower() in BOOLS:
        return "bool"
    return "text"


def _joint_kind(first: str, second: str) -> str:
    """Return the kind of a column with cells of two kinds."""
    if first == "null":
        return second
    if second in ("null", first):
        return first
    return TOGETHER.get(frozenset({first, second}), "text")


# Files


def read_tables(files: Mapping[str, Sequence[str]], known_names: Collection[str] = ()) -> dict[str, Any]:
    """Read the splits of a data set from csv or tsv files, every cell as a text.

    Args:
        files (`Mapping[str, Sequence[str]]`): The files of each split.
        known_names (`Collection[str]`): The usual names of columns, and those that a user gave.
            Where one is in the first line of a file, the line holds names.

    Returns:
        `dict[str, Dataset]`: The splits. Each column is one of strings, and its feature's `id`
        tells the kind of its cells; empty cells are None.
    """
    import datasets

    tables = {split: _read_split(paths) for split, paths in files.items()}
    kinds: dict[str, str] = {}  # of the columns of all splits together
    for split, (_, columns) in tables.items():
        _check_has_names(files[split][0], columns, known_names)
        for column in columns:
            kinds[column.name] = _joint_kind(kinds.get(column.name, "null"), column.kind)
    if not any(len(table) for table, _ in tables.values()):
        [name, *_] = next(iter(files.values()))
        raise TableError(f"{name} cannot be read: it has no rows")

    # The kind of a column is that of all splits together, and stands in its feature.
    splits = {}
    for split, (table, columns) in tables.items():
        values = {column.name: datasets.Value("string", id=f"{CELLS}{kinds[column.name]}") for column in columns}
        info = datasets.DatasetInfo(features=datasets.Features(values))
        version = f"{VERSION} {split} {digest_of_files(files[split])}"
        fingerprint = hashlib.sha256(version.encode()).hexdigest()[:16]
        splits[split] = datasets.Dataset(table, info=info, split=datasets.NamedSplit(split), fingerprint=fingerprint)
    return splits


def _check_has_names(path: str, columns: Sequence["_Column"], known_names: Collection[str]) -> None:
    """Raise for a file whose first line may be a row."""
    names = {column.name for column in columns}
    doubts = [column.doubt for column in columns if column.doubt]
    if doubts and not names & set(known_names):
        raise TableError(
            f"the first line of {path} looks like a row and not like names of columns ({doubts[0]}): put "
            "names on top, such as text,label, or name a column of it as column= (--column)"
        )


@dataclass
class _Column:
    """What is known of a column: its kind, and why its name may be a cell."""

    name: str
    kind: str = "null"
    doubt: str = ""
    are_words: bool = True  # whether no cell has a space
    cells: list[str | None] = field(default_factory=list, repr=False)

    def add(self, cell: str) -> None:
        self.cells.append(cell or None)
        self.are_words = self.are_words and " " not in cell.strip()
        if cell and self.kind != "text":
            self.kind = _joint_kind(self.kind, _kind_of_cell(cell))
        if cell == self.name and not self.doubt:
            self.doubt = f"{cell!r} is also a cell below it"


def digest_of_files(paths: Sequence[str]) -> str:
    """Return a hash of the content of some files, in their order, whenever they were written."""
    digest = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(2**20):
                content.update(chunk)
        digest.update(content.digest())
    return digest.hexdigest()


def _read_split(paths: Sequence[str]) -> tuple[Any, list[_Column]]:
    """Return the table of some files, and its columns; kept on disk where the files are large."""
    import datasets

    if sum(map(os.path.getsize, paths)) <= MOST_BYTES_IN_MEMORY:
        import pyarrow

        columns, batches = _batches_of(paths)
        table = pyarrow.Table.from_batches(list(batches), schema=_schema(columns))
        return datasets.table.InMemoryTable(table), columns

    name = hashlib.sha256(f"{VERSION} {digest_of_files(paths)}".encode()).hexdigest()[:32]
    kept = Path(datasets.config.HF_DATASETS_CACHE, "hydra_transformers", f"{name}.arrow")
    known = kept.with_suffix(".json")
    if not (kept.exists() and known.exists()):
        _keep(kept, known, paths)
    columns = [_Column(**column) for column in json.loads(known.read_text(encoding="utf-8"))]
    return datasets.table.MemoryMappedTable.from_file(str(kept)), columns


def _keep(kept: Path, known: Path, paths: Sequence[str]) -> None:
    """Write the table of large files to disk, whole or not at all."""
    import pyarrow

    kept.parent.mkdir(parents=True, exist_ok=True)
    columns, batches = _batches_of(paths)
    unfinished = unfinished_path(kept.parent, kept.name)
    try:
        with pyarrow.OSFile(str(unfinished), "wb") as sink, pyarrow.ipc.new_stream(sink, _schema(columns)) as writer:
            for batch in batches:
                writer.write_batch(batch)
        os.replace(unfinished, kept)
    finally:
        unfinished.unlink(missing_ok=True)
    described = [{"name": column.name, "kind": column.kind, "doubt": column.doubt} for column in columns]
    unfinished.write_text(json.dumps(described), encoding="utf-8")
    os.replace(unfinished, known)


def _schema(columns: Sequence[_Column]) -> Any:
    import pyarrow

    return pyarrow.schema([(column.name, pyarrow.string()) for column in columns])


def _batches_of(paths: Sequence[str]) -> tuple[list[_Column], Iterator[Any]]:
    """Return the columns of some files, and their rows as batches.

    The kinds of the columns are known when all batches have been read.
    """
    headers = [_File.of(path) for path in paths]
    first = headers[0]
    for file in headers[1:]:
        if sorted(file.names) != sorted(first.names):
            raise TableError(
                f"{file.path} has the columns {', '.join(file.names)}, and {first.path} has "
                f"{', '.join(first.names)}: put them into folders of their own"
            )
    columns = [_Column(name) for name in first.names]
    return columns, _batches(headers, columns)


def _batches(files: Sequence["_File"], columns: list[_Column]) -> Iterator[Any]:
    import pyarrow

    schema = _schema(columns)
    by_name = {column.name: column for column in columns}

    def batch() -> Any:
        arrays = [pyarrow.array(column.cells, pyarrow.string()) for column in columns]
        for column in columns:
            column.cells = []
        return pyarrow.record_batch(arrays, schema=schema)

    # Columns may stand in another order in each file.
    for file in files:
        in_order = [by_name[name] for name in file.names]
        characters = 0
        for record in file.records():
            for column, cell in zip(in_order, record, strict=True):
                column.add(cell)
                characters += len(cell)
            if characters > CHARACTERS_PER_BATCH:
                yield batch()
                characters = 0
    yield batch()
    for column in columns:
        column.doubt = _doubt(column, columns)


def _doubt(column: _Column, columns: Sequence[_Column]) -> str:
    """Return why the name of a column may be a cell of a file without names."""
    if column.doubt:
        return column.doubt
    name = column.name
    numbers = ("int64", "float64")
    are_numbered = [other.name for other in columns] == [str(place) for place in range(len(columns))]
    if column.kind in numbers and _kind_of_cell(name) in numbers and not are_numbered:
        return f"{name!r} is a number, as the cells below it"

    words = len(name.split())
    is_alone = len(columns) == 1 and words > 1
    is_sentence = words > MOST_WORDS_OF_A_NAME or name.rstrip().endswith((".", "!"))
    if column.kind == "text" and (is_sentence or is_alone):
        if len(name) > 40:
            name = f"{name[:37]}..."
        return f"{name!r} is a text"
    if column.kind == "text" and len(columns) == 1 and column.are_words:
        return f"{name!r} is one word, as every cell below it"
    return ""


@dataclass
class _File:
    """A csv or tsv file: its separator, what ends its lines, and the names in its first line."""

    path: str
    separator: str
    newline: str
    names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, path: str) -> "_File":
        file = cls(path, *_find_separator(path))
        _, names = next(file._numbered())
        if not any(names):
            raise TableError(f"the first line of {path} is blank: put the names of the columns there")
        file.names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
        for place, name in enumerate(file.names):
            if name in file.names[:place]:
                raise TableError(f"{path} has two columns {name!r}: rename one")
        return file

    def records(self) -> Iterator[list[str]]:
        """Yield the cells of each row; a blank line is a row of empty ones."""
        width = len(self.names)
        records = self._numbered()
        next(records)  # the names
        for line, record in records:
            if not record:
                record = [""] * width
            if len(record) != width:
                raise TableError(
                    f"line {line} of {self.path} has {len(record)} cells, and its first line names {width} columns "
                    f"({SEPARATORS[self.separator]} are between them): put texts with {self.separator!r} or a line "
                    "break into double quotes"
                )
            if record == self.names and width > 1:
                raise TableError(f"line {line} of {self.path} has the names of the columns again: remove it")
            yield record

    def _numbered(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the records, each with the number of its first line."""
        with _opened(self.path, self.newline) as file:
            reader = _reader(file, self.separator)
            line = 1
            while True:
                try:
                    record = next(reader, None)
                except UnicodeDecodeError as error:
                    raise TableError(_of_encoding(self.path)) from error
                except csv.Error as error:
                    raise TableError(f"{self.path} cannot be read from line {line} on {_advice_for(error)}") from None
                if record is None:
                    return
                yield line, record
                line = reader.line_num + 1


def _advice_for(error: csv.Error) -> str:
    """Return in words why a line cannot be read, and what to do."""
    if "new-line" in str(error):
        return "(it has a carriage return): put texts with a carriage return into double quotes"
    return f'({error}): in a cell that begins with a ", each " inside is written twice and one ends it'


def _opened(path: str, newline: str = "") -> IO[str]:
    opener = OPENERS.get(Path(path).suffix, open)
    return opener(path, "rt", encoding="utf-8-sig", newline=newline)


def _reader(file: IO[str], separator: str, strict: bool = True) -> Any:
    csv.field_size_limit(2**31 - 1)  # a cell may hold a book
    return csv.reader(file, delimiter=separator, strict=strict)


def _find_separator(path: str) -> tuple[str, str]:
    """Return the separator of a file's columns, the usual one where there is only one, and what
    ends its lines, as for `open`."""
    start, is_whole = _read_start(path)
    # A carriage return alone is part of a cell where others end the lines.
    newline = ""
    if "\n" in start:
        newline = "\n"
    usual = ","
    if ".tsv" in Path(path).suffixes:
        usual = "\t"

    # The records by separator, where it makes several columns; the last one may be cut off
    several: dict[str, list[list[str]]] = {}
    for separator in (usual, *(other for other in SEPARATORS if other != usual)):
        records = list(_reader(io.StringIO(start, newline=""), separator, strict=False))
        if not is_whole and len(records) > 1:
            records = records[:-1]
        if len(records[0]) > 1:
            several[separator] = records
    if not several:
        _check_is_one_column(path, re.split(r"\r\n|\r|\n", start))
        return usual, newline
    if len(several) == 1:
        return next(iter(several)), newline

    # Of several, the one that makes rows of equal length
    fitting = [separator for separator, records in several.items() if _are_equally_long(records)]
    if usual in fitting:
        return usual, newline
    if len(fitting) != 1:
        found = " or ".join(SEPARATORS[separator] for separator in several)
        raise TableError(f"{path} may have {found} between its columns: write it with commas, and texts in quotes")
    return fitting[0], newline


def _read_start(path: str) -> tuple[str, bool]:
    """Return the first characters of a file, and whether they are all."""
    try:
        with _opened(path) as file:
            start = file.read(CHARACTERS_TO_LOOK_AT)
            is_whole = not file.read(1)
    except UnicodeDecodeError as error:
        raise TableError(_of_encoding(path)) from error
    if not start.strip():
        raise TableError(f"{path} cannot be read: it is empty")
    if "\0" in start:
        raise TableError(f"{path} is not a text in utf-8, it has zero bytes: write it as csv in utf-8")
    return start, is_whole


def _are_equally_long(records: Sequence[Sequence[str]]) -> bool:
    """Whether all records have as many cells as the first one, or none."""
    return all(len(record) in (0, len(records[0])) for record in records)


def _check_is_one_column(path: str, lines: Sequence[str]) -> None:
    """Raise where all lines have a sign that may stand between columns."""
    lines = [line for line in lines if line.strip()]
    for sign in OTHER_SEPARATORS:
        count = lines[0].count(sign)
        if len(lines) > 1 and count and all(line.count(sign) >= count for line in lines[:-1]):
            raise TableError(
                f"{path} has one column, and {sign!r} in every line: write it with commas between columns, and texts "
                "in quotes"
            )


def _of_encoding(path: str) -> str:
    """Return why a file's text cannot be decoded, and what to do."""
    opener = OPENERS.get(Path(path).suffix, open)
    with opener(path, "rb") as file:
        start = file.read(4096)
    where = ""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif b"\0" in start:
        return f"{path} is not a text file: write the table as csv in utf-8"
    else:
        number, line = _first_line_that_is_not_utf8(path)
        where = f" (line {number})"
        encoding = "latin-1"
        # Only Windows' encoding has signs there, such as curly quotes.
        if any(0x80 <= byte < 0xA0 for byte in line):
            encoding = "cp1252"
    name = os.path.basename(path)
    return (
        f"{path} is not written in utf-8{where}: try {encoding}, with `iconv -f {ICONV.get(encoding, encoding)} -t "
        f"utf-8 {name} > utf8-{name}`, or pandas.read_csv({name!r}, encoding={encoding!r}, dtype=str, "
        "keep_default_na=False)"
    )


def _first_line_that_is_not_utf8(path: str) -> tuple[int, bytes]:
    opener = OPENERS.get(Path(path).suffix, open)
    with opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number, line
    return 1, b""
