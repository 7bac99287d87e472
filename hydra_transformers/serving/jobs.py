"""Predicts for all rows of a data set into one file, part by part; a job that was stopped goes on where it was."""

import csv
import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from .._io.access import access_to
from .._io.files import check_takes_files, write_atomically
from .._io.progress import progress_bar
from .._version import __version__
from ..data.columns import column_kinds, find_columns, find_words
from ..data.rows import DataSource, load_rows
from ..hub.handler import as_json
from ..models.decision import digest_of
from ..uncertainty.features import without_decision
from .answers import to_table
from .predictor import NAMED, HydraPredictor, kind_of
from .saved_models import load_config


logger = logging.getLogger(__name__)

FORMATS = (".parquet", ".jsonl", ".csv")
ROWS_PER_PART = 1024


@dataclass(frozen=True)
class Finished:
    """
    rows: of the data
    bad_rows: the numbers of those that cannot be read
    output: the file of answers
    is_calibrated: whether the model abstains and has sets
    split: of the data, whose rows these are; None without splits
    """

    rows: int
    bad_rows: list[int]
    output: Path
    is_calibrated: bool
    split: str | None = None


def predict_data(
    model: str | os.PathLike,
    data: Any,
    output: str | os.PathLike,
    *,
    split: str | None = None,
    image: str | None = None,
    audio: str | None = None,
    text: str | Sequence[str] | None = None,
    strict: bool = False,
    engine: str = "local",
    workers: int | None = None,
    **settings: Any,
) -> Finished:
    """Predicts for every row of a data set, and writes the table with the answers to a file.

    The file has all rows in their order: `row`, which counts from 0, the columns of the data (of images and audio their path; one
    with a name of ours becomes `input_NAME`), and

    - `answer`: the label, or empty where the model abstains; of labels and entities those that it does not abstain on
    - `prediction`: what it would say if it never abstained; empty only where a row cannot be read
    - `why`: the reason for an empty answer, or for one that is not all of the prediction
    - `score`, `uncertainty` and the other fields of `predict`.

    Call it again with the same arguments to go on after a stop: no row is lost or predicted twice. Until the file is complete, its
    parts are in the folder `OUTPUT.ID.parts`, where the id stands for model, data and settings.

    Args:
        model (`str` or `os.PathLike`): a folder or Hub name, as in `HydraPredictor`.
        data (`str`, `os.PathLike`, `Dataset` or `DataFrame`): what `load_data` accepts.
        output (`str` or `os.PathLike`): a new file, .parquet, .jsonl or .csv.
        split (`str`, *optional*): of the data; by default the first of validation, test and train.
        image, audio, text (`str`, *optional*): the column that is read, found where not named; two of pairs of texts. A column of
            texts that is named for images or audio holds paths of files.
        strict (`bool`, defaults to `False`): raise an error at a row that cannot be read.
        engine (`str`, defaults to `"local"`): "local" for this process, or "ray" for the processes of a Ray cluster, which must see
            model and data under the same names.
        workers (`int`, *optional*): of Ray; by default one per GPU, or without GPUs one. Several share a GPU.
        settings: of `HydraPredictor`: processor, device, candidate_labels, top_k, batch_size.

    Returns:
        `Finished`: how many rows there are, and which could not be read.
    """
    output, source = Path(output), DataSource(_absolute(data), split=split, image=image, audio=audio, text=text)
    check_output(output, source)
    if engine not in ("local", "ray"):
        raise ValueError(f"engine is {engine!r}: pass local or ray")
    here = settings | {"processor": _absolute(settings.get("processor"))}
    if engine == "ray":
        from .ray_engine import predicted_by_workers, start_cluster

        cluster = start_cluster(workers, settings.get("device"))  # raises errors before anything is loaded
    arguments = {"model": _absolute(model), "source": source, "rows_per_part": ROWS_PER_PART, "settings": here}
    reader = PartReader(**arguments | ({"settings": here | {"device": "cpu"}} if engine == "ray" else {}))
    parts = Parts(output, reader, strict)
    if output.exists():
        bad_rows = parts.remove_leftovers()
    else:
        missing = [number for number in range(reader.num_parts) if parts.read(number) is None]
        contents = ((number, reader.predicted(number)) for number in missing)
        if engine == "ray" and missing:
            expected = {"digest": reader.model_digest, "num_rows": len(reader.rows)}
            contents = predicted_by_workers(arguments | expected, missing, *cluster)
        done = len(reader.rows) - sum(len(reader.places(number)) for number in missing)
        with progress_bar(len(reader.rows), "predict", "row", initial=done) as bar:
            for number, content in contents:
                parts.write(number, content)
                bar.update(len(reader.places(number)))
        bad_rows = parts.join()
    return Finished(len(reader.rows), bad_rows, output, reader.predictor.is_calibrated, reader.split)


def check_output(output: Path, source: DataSource) -> None:
    """Raises an error, before any work, for a file that exists, is among the data, or cannot be written."""
    if output.suffix not in FORMATS:
        raise ValueError(f"output is {output}: pass a file that ends in {', '.join(FORMATS)}")
    data = Path(source.name)
    if data.is_dir() and data.resolve() in output.resolve().parents:
        raise ValueError(f"output is {output}, inside the data {data}: pass a file elsewhere")
    if output.exists() and not folders_of_parts(output):
        raise exists_already(output)
    check_takes_files(output.parent)


def exists_already(output: Path) -> ValueError:
    return ValueError(f"{output} exists already: pass another --output, or remove it")


def folders_of_parts(output: Path) -> list[Path]:
    """Of any job that writes this file."""
    return [
        each for each in output.parent.glob("*.parts") if each.name.startswith(f"{output.name}.") and each.is_dir()
    ]


def _absolute(name: Any) -> Any:
    """A folder or file by its whole path, as workers may start elsewhere; a name on the Hub, or anything else, as it is."""
    return os.path.abspath(name) if isinstance(name, (str, os.PathLike)) and os.path.exists(name) else name


class PartReader:
    """Reads parts of a data set and predicts for them: what each process of a job does.

    model, settings: of `HydraPredictor`
    rows_per_part: equal in all processes
    """

    def __init__(self, model: str, source: DataSource, settings: Mapping[str, Any], rows_per_part: int):
        self.source, self.rows_per_part = source, rows_per_part
        kind = kind_of(load_config(model), model)
        kind = "image" if kind == "zero-shot" else kind
        with access_to(source.name, "data set"):
            rows, self.split, _ = load_rows(source)
        self.columns = _columns_to_read(rows, kind, source)
        self.holds_paths = kind not in ("text", "tokens") and column_kinds(rows)[self.columns[0]] == "text"
        path = Path(source.name)
        self.folder = (path if path.is_dir() else path.parent) if path.exists() else None
        self.rows = rows.with_format("arrow")  # files stay undecoded: a broken one is a bad row
        self.predictor = HydraPredictor(model, **{**settings, "strict": False})
        self.top_k = self.predictor.parameters["top_k"]
        if self.predictor.task.name == "multi_label_classification":
            self.predictor.parameters["top_k"] = None  # whether it abstains on a label is among the scores
        self.model_digest = digest_of_model(self.predictor)
        self.num_parts = math.ceil(len(self.rows) / rows_per_part)

    def places(self, part: int) -> range:
        """The rows of a part."""
        return range(part * self.rows_per_part, min((part + 1) * self.rows_per_part, len(self.rows)))

    def predicted(self, part: int) -> bytes:
        """A part of the table with its predictions, as the content of a parquet file."""
        import pyarrow.parquet

        places, size, sink = self.places(part), self.predictor.batch_size, io.BytesIO()
        # By batches: the images of a whole part may be large.
        batches = [self._batch(places[start : start + size]) for start in range(0, len(places), size)]
        pyarrow.parquet.write_table(pyarrow.concat_tables(batches), sink, write_page_checksum=True)
        return sink.getvalue()

    def _batch(self, places: range) -> Any:
        import pyarrow
        from pyarrow.compute import struct_field

        batch = self.rows[places.start : places.stop]
        values = [batch.column(column).to_pylist() for column in self.columns]
        if self.holds_paths:
            values = [[self.path_of(value) for value in values[0]]]
        inputs = values[0]
        if len(values) == 2:
            inputs = [{"text": one, "text_pair": other} for one, other in zip(*values, strict=True)]
        predicted = to_table(self.predictor.answers(inputs), self.predictor.columns, self.top_k)
        table = {"row": pyarrow.array(places), **dict(zip(predicted.column_names, predicted.columns, strict=True))}
        kept = {}
        for name, column in zip(batch.column_names, batch.columns, strict=True):
            if pyarrow.types.is_struct(column.type) and {field.name for field in column.type} == {"bytes", "path"}:
                column = struct_field(column, "path")  # an image or audio
            while name in table or name in kept:
                name = f"input_{name}"
            if not pyarrow.types.is_binary(column.type):
                kept[name] = column
        return pyarrow.table({"row": table.pop("row"), **kept, **table})

    def path_of(self, value: str | None) -> str | None:
        """A path in a table, as it is or beside the table."""
        if value is None or self.folder is None or os.path.exists(value):
            return value
        beside = os.path.join(self.folder, value)
        return beside if os.path.exists(beside) else value

    def data_digest(self) -> str:
        """Of name, size and time of each file of the data and of each file that its rows name; on the Hub, of its revision."""
        path = Path(self.source.name)
        files: list[Any] = [file for file in (path, *sorted(path.rglob("*"))) if file.is_file()]
        for batch in self.rows.iter(ROWS_PER_PART) if self.holds_paths else ():
            files += map(self.path_of, batch.column(self.columns[0]).to_pylist())
        digest = hashlib.sha256(repr((self.source.split, path.exists() or self.rows._fingerprint)).encode())
        for file in files:
            digest.update(repr((str(file), _stamp(file))).encode())
        return digest.hexdigest()


def _stamp(file: Any) -> tuple[int, int] | None:
    """Size and time of a file; None if there is none."""
    if file is None or not os.path.exists(file):
        return None
    stat = os.stat(file)
    return stat.st_size, stat.st_mtime_ns


def _columns_to_read(rows: Any, kind: str, source: DataSource) -> tuple[str, ...]:
    named = {"image": source.image, "audio": source.audio}.get(kind)
    if named is not None and column_kinds(rows).get(named) == "text":
        return (named,)  # paths
    words = find_words(rows, source) if kind == "tokens" else None
    return find_columns(rows, "text" if kind == "tokens" else kind, source) if words is None else (words,)


def digest_of_model(predictor: HydraPredictor) -> str:
    """Of weights, config, decision, processor and this package's version; the same on every device."""
    state, tokenizer = predictor.model.state_dict(), getattr(predictor.processor, "tokenizer", predictor.processor)
    _, decision = without_decision(predictor.model)
    config = {name: value for name, value in predictor.config.to_dict().items() if name != "_name_or_path"}
    rules = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    if hasattr(tokenizer, "backend_tokenizer"):  # also whether it ignores case, and the like
        rules = tokenizer.backend_tokenizer.to_str()
    tensors = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    described = [config, None if decision is None else decision.settings, str(predictor.processor), rules, __version__]
    return _digest([digest_of(tensors), sorted(state), *described])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class Parts:
    """The parts of a job, in a folder beside the output whose name has a digest of model, data and settings.

    Only files that a job of this very digest writes are read, replaced or removed.
    """

    def __init__(self, output: Path, reader: PartReader, strict: bool):
        self.output, self.reader, self.strict = output, reader, strict
        settings = [reader.predictor.parameters, reader.top_k, reader.columns, len(reader.rows), reader.rows_per_part]
        digest = _digest([reader.model_digest, reader.data_digest(), settings])[:12]
        self.folder = output.with_name(f"{output.name}.{digest}.parts")
        self.finished = self.folder / "finished.json"
        others = folders_of_parts(output)
        if others and self.folder not in others and not output.exists():
            logger.warning(f"{others[0]} is of another model, data or settings: this job starts anew")

    def file(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.parquet"

    def write(self, number: int, content: bytes) -> None:
        write_atomically(self.file(number), content)
        self.whole(number)

    def read(self, number: int) -> Any:
        """The table of a part; None if it is not there, or not what was written."""
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(self.file(number), page_checksum_verification=True)
        except (OSError, pyarrow.ArrowException):
            return None
        if table["row"].to_pylist() != list(self.reader.places(number)):
            return None
        bad = bad_rows_of(table) if self.strict else []
        if bad:
            why, what = table["why"][bad[0] - self.reader.places(number)[0]], NAMED[self.reader.predictor.kind]
            raise ValueError(f"row {bad[0]} is not {what}. {why} Leave --strict out to go on without such rows")
        return table

    def whole(self, number: int) -> Any:
        table = self.read(number)
        if table is None:
            raise RuntimeError(f"{self.file(number)} does not have the rows of its part: run the command again")
        return table

    def join(self) -> list[int]:
        """Writes the output, with one part at a time in memory, and removes the parts. Returns the numbers of the bad rows."""
        bad: list[int] = []

        def tables() -> Iterator[Any]:
            for number in range(self.reader.num_parts):
                table = self.whole(number)
                bad.extend(bad_rows_of(table))
                yield table

        joined = self.folder / f"joined{self.output.suffix}"
        write_tables(joined, tables())
        # A file keeps its size and time when it gets its name: the next start knows it again if this one is killed now.
        write_atomically(self.finished, json.dumps({"stamp": _stamp(joined), "bad_rows": bad}))
        if self.output.exists():
            raise exists_already(self.output)
        os.replace(joined, self.output)
        self.remove()
        return bad

    def remove_leftovers(self) -> list[int]:
        """Removes the parts of a job that was killed when its output had its name. Returns the numbers of the bad rows."""
        finished = json.loads(self.finished.read_bytes()) if self.finished.exists() else {"stamp": None}
        if finished["stamp"] != list(_stamp(self.output)):
            with suppress(OSError):  # where it is not empty
                self.folder.rmdir()
            raise exists_already(self.output)
        self.remove()
        logger.warning(f"{self.output} is finished: the parts that were left of it are removed")
        return finished["bad_rows"]

    def remove(self) -> None:
        """Removes the files of this job, also those that a killed process left unfinished."""
        for name in (*(self.file(number).name for number in range(self.reader.num_parts)), self.finished.name):
            for file in (self.folder / name, *self.folder.glob(f".{name}.*.tmp")):
                file.unlink(missing_ok=True)
        with suppress(OSError):  # a user may have put something into it
            self.folder.rmdir()


def bad_rows_of(table: Any) -> list[int]:
    """The numbers of the rows that could not be read."""
    return table.filter(table["prediction"].is_null())["row"].to_pylist()


def write_tables(path: Path, tables: Iterator[Any]) -> None:
    """Writes one table or more, one after the other, into a file of the format that its name ends in."""
    import pyarrow.parquet

    first = next(tables)
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetWriter(path, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer, is_csv = csv.writer(file), path.suffix == ".csv"
        if is_csv:
            writer.writerow(first.column_names)
        for row in chain.from_iterable(as_json(table.to_pylist()) for table in chain([first], tables)):
            if is_csv:
                writer.writerow(_json(cell) if isinstance(cell, (list, dict)) else cell for cell in row.values())
            else:
                file.write(_json(row) + "\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
