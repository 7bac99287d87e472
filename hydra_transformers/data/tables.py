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
# Kinds of cells that are one kind together. Codes are digits that no number is written with, such as 007.
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
    """Return what the cells of a csv column look like: "text", "int64", "float64", "bool", "code", or "null" if all are
    empty. None for columns of other data, which have a type."""
    name = getattr(feature, "id", None)
    return name.removeprefix(CELLS) if isinstance(name, str) and name.startswith(CELLS) else None


def typed_values(cells: Sequence[str | None], kind: str) -> list[Any]:
    """Return the cells of a column as values of its kind; empty cells are None."""
    if kind == "int64":
        return [None if cell is None else int(cell) for cell in cells]
    if kind == "float64":
        return [None if cell is None else float(cell) for cell in cells]
    if kind == "bool":
        return [None if cell is None else BOOLS[cell.lower()] for cell in cells]
    return list(cells)


def _kind_of_cell(cell: str) -> str:
    if WHOLE_NUMBER.fullmatch(cell):
        return "int64"
    if DIGITS.fullmatch(cell):
        return "code"
    if NUMBER.fullmatch(cell) and cell.lower() != "nan":
        return "float64"
    return "bool" if cell.lower() in BOOLS else "text"


def _joint_kind(first: str, second: str) -> str:
    if "null" in (first, second):
        return second if first == "null" else first
    return first if first == second else TOGETHER.get(frozenset({first, second}), "text")


# Files


def read_tables(files: Mapping[str, Sequence[str]], known_names: Collection[str] = ()) -> dict[str, Any]:
    """Read the splits of a data set from csv or tsv files, every cell as a text.

    Args:
        files (`Mapping[str, Sequence[str]]`): The files of each split.
        known_names (`Collection[str]`): The usual names of columns, and those that a user gave. Where one is in the
            first line of a file, the line holds names.

    Returns:
        `dict[str, Dataset]`: The splits. Each column is one of strings, and its feature's `id` tells the kind of its
        cells; empty cells are None.
    """
    import datasets

    tables = {split: _read_split(paths) for split, paths in files.items()}
    kinds: dict[str, str] = {}
    for split, (_, columns) in tables.items():
        header = [column.name for column in columns]
        doubts = [column.doubt for column in columns if column.doubt]
        if doubts and not set(header) & set(known_names):
            raise TableError(
                f"the first line of {files[split][0]} looks like a row and not like names of columns ({doubts[0]}): put "
                "names on top, such as text,label, or name a column of it as column= (--column)"
            )
        for column in columns:
            kinds[column.name] = _joint_kind(kinds.get(column.name, "null"), column.kind)
    if not any(len(table) for table, _ in tables.values()):
        [name, *_] = next(iter(files.values()))
        raise TableError(f"{name} cannot be read: it has no rows")

    splits = {}
    for split, (table, columns) in tables.items():
        values = {column.name: datasets.Value("string", id=f"{CELLS}{kinds[column.name]}") for column in columns}
        info = datasets.DatasetInfo(features=datasets.Features(values))
        fingerprint = hashlib.sha256(f"{VERSION} {split} {digest_of_files(files[split])}".encode()).hexdigest()[:16]
        splits[split] = datasets.Dataset(table, info=info, split=datasets.NamedSplit(split), fingerprint=fingerprint)
    return splits


@dataclass
class _Column:
    """What is known of a column: its kind, and why its name may be a cell."""

    name: str
    kind: str = "null"
    doubt: str = ""
    cells: list[str | None] = field(default_factory=list, repr=False)

    def add(self, cell: str) -> None:
        self.cells.append(cell or None)
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
    """The table of some files, and its columns; kept on disk where the files are large."""
    import datasets

    if sum(map(os.path.getsize, paths)) <= MOST_BYTES_IN_MEMORY:
        columns, batches = _batches_of(paths)
        import pyarrow

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
    """Writes the table of large files to disk, whole or not at all."""
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
    """The columns of some files, and their rows as batches, during whose iteration the kinds become known."""
    headers = [_File.of(path) for path in paths]
    columns = [_Column(name) for name in headers[0].names]
    for file in headers[1:]:
        if sorted(file.names) != sorted(headers[0].names):
            raise TableError(
                f"{file.path} has the columns {', '.join(file.names)}, and {headers[0].path} has "
                f"{', '.join(headers[0].names)}: put them into folders of their own"
            )
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
    """Why the name of a column may be a cell of a file without names."""
    name = column.name
    if column.doubt:
        return column.doubt
    are_numbered = [column.name for column in columns] == [str(place) for place in range(len(columns))]
    if column.kind in ("int64", "float64") and _kind_of_cell(name) in ("int64", "float64") and not are_numbered:
        return f"{name!r} is a number, as the cells below it"
    is_long = len(name.split()) > MOST_WORDS_OF_A_NAME or name.rstrip().endswith((".", "!"))
    if column.kind == "text" and (is_long or (len(columns) == 1 and len(name.split()) > 1)):
        shortened = name if len(name) <= 40 else f"{name[:37]}..."
        return f"{shortened!r} is a text"
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
        twice = next((name for place, name in enumerate(file.names) if name in file.names[:place]), None)
        if twice is not None:
            raise TableError(f"{path} has two columns {twice!r}: rename one")
        return file

    def records(self) -> Iterator[list[str]]:
        """The cells of each row; a blank line is a row of empty ones."""
        width = len(self.names)
        records = self._numbered()
        next(records)  # the names
        for line, record in records:
            record = record or [""] * width
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
        """The records, each with the number of its first line."""
        with _opened(self.path, self.newline) as file:
            reader = _reader(file, self.separator)
            line = 1
            while True:
                try:
                    record = next(reader, None)
                except UnicodeDecodeError as error:
                    raise TableError(_of_encoding(self.path)) from error
                except csv.Error as error:
                    advice = 'in a cell that begins with a ", each " inside is written twice and one ends it'
                    if "new-line" in str(error):
                        advice = "put texts with a carriage return into double quotes"
                        error = "it has a carriage return"
                    raise TableError(f"{self.path} cannot be read from line {line} on ({error}): {advice}") from None
                if record is None:
                    return
                yield line, record
                line = reader.line_num + 1


def _opened(path: str, newline: str = "") -> IO[str]:
    opener = OPENERS.get(Path(path).suffix, open)
    return opener(path, "rt", encoding="utf-8-sig", newline=newline)


def _reader(file: IO[str], separator: str, strict: bool = True) -> Any:
    csv.field_size_limit(2**31 - 1)  # a cell may hold a book
    return csv.reader(file, delimiter=separator, strict=strict)


def _find_separator(path: str) -> tuple[str, str]:
    """The separator of a file's columns, the usual one where there is only one, and what ends its lines, as for `open`."""
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

    # A carriage return alone is part of a cell where others end the lines.
    newline = "\n" if "\n" in start else ""
    usual = "\t" if ".tsv" in Path(path).suffixes else ","
    looked_at: dict[str, list[list[str]]] = {}
    for separator in (usual, *(other for other in SEPARATORS if other != usual)):
        records = list(_reader(io.StringIO(start, newline=""), separator, strict=False))
        looked_at[separator] = records if is_whole or len(records) == 1 else records[:-1]

    several = {separator: records for separator, records in looked_at.items() if len(records[0]) > 1}
    if not several:
        _check_is_one_column(path, re.split(r"\r\n|\r|\n", start))
        return usual, newline
    if len(several) == 1:
        return next(iter(several)), newline
    fitting = [
        separator
        for separator, records in several.items()
        if all(len(record) in (0, len(records[0])) for record in records)
    ]
    if len(fitting) != 1 and usual not in fitting:
        found = " or ".join(SEPARATORS[separator] for separator in several)
        raise TableError(f"{path} may have {found} between its columns: write it with commas, and texts in quotes")
    return (usual if usual in fitting else fitting[0]), newline


def _check_is_one_column(path: str, lines: Sequence[str]) -> None:
    """Raises where all lines have a sign that may stand between columns."""
    lines = [line for line in lines if line.strip()]
    for sign in OTHER_SEPARATORS:
        count = lines[0].count(sign)
        if len(lines) > 1 and count and all(line.count(sign) >= count for line in lines[:-1]):
            raise TableError(
                f"{path} has one column, and {sign!r} in every line: write it with commas between columns, and texts in "
                "quotes"
            )


def _of_encoding(path: str) -> str:
    """Why a file's text cannot be decoded, and what to do."""
    opener = OPENERS.get(Path(path).suffix, open)
    with opener(path, "rb") as file:
        start = file.read(4096)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding, where = "utf-16", ""
    elif b"\0" in start:
        return f"{path} is not a text file: write the table as csv in utf-8"
    else:
        number, line = _first_line_that_is_not_utf8(path)
        # Only Windows' encoding has signs there, such as curly quotes.
        encoding = "cp1252" if any(0x80 <= byte < 0xA0 for byte in line) else "latin-1"
        where = f" (line {number})"
    name = os.path.basename(path)
    return (
        f"{path} is not written in utf-8{where}: try {encoding}, with `iconv -f {ICONV.get(encoding, encoding)} -t utf-8 "
        f"{name} > utf8-{name}`, or pandas.read_csv({name!r}, encoding={encoding!r}, dtype=str, keep_default_na=False)"
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
