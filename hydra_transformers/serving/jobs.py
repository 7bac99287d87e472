"""Predicts for all rows of a data set into one file, part by part.

A job that was stopped goes on where it was.
"""

import csv
import glob
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from .._io.access import access_to
from .._io.files import check_takes_files, write_atomically
from .._io.progress import progress_bar
from .._version import __version__
from ..data.columns import PLURALS, column_kinds, find_columns, find_words
from ..data.groups import group_name
from ..data.json_values import mixed_columns
from ..data.rows import DataSource, as_dataset, load_rows
from ..model_info import ModelInfo
from ..models.weights_digest import digest_of
from ..uncertainty import Monitor
from ..uncertainty.abstention import check_share
from .answerer import as_json
from .answers import to_table
from .audit_files import Audit, audit_file_of
from .cascade import Cascade
from .predictor import HydraPredictor, kind_of
from .saved_models import load_config


logger = logging.get_logger(f"transformers.{__name__}")

FORMATS = (".parquet", ".jsonl", ".csv")
ROWS_PER_PART = 1024
BYTES = ("binary", "large_binary")  # types of columns that no table of answers holds
IN_JSON = {b"hydra_transformers": b"json"}  # the metadata of a column whose cells are JSON


class Finished(NamedTuple):
    """A job that wrote its file.

    Attributes:
        rows (`int`): how many there are.
        bad_rows (`list[int]`): the numbers of those that could not be read.
        is_calibrated (`bool`): whether the model is calibrated.
        split (`str` or `None`): of the data, whose rows these are; None without splits.
        has_target (`bool`): whether the model was calibrated to abstain.
        audited (`int` or `None`): how many answers were drawn for an audit; None without one.
        columns (`tuple`): the names of those that were read.
    """

    rows: int
    bad_rows: list[int]
    is_calibrated: bool
    split: str | None
    has_target: bool = False
    audited: int | None = None
    columns: tuple[str, ...] = ()


def predict_data(
    model: str | os.PathLike | torch.nn.Module | Cascade,
    data: Any,
    output: str | os.PathLike,
    *,
    split: str | None = None,
    column: str | Sequence[str] | None = None,
    engine: str = "local",
    workers: int | None = None,
    monitor: str | os.PathLike | None = None,
    audit: float | None = None,
    audit_seed: int = 0,
    **settings: Any,
) -> Finished:
    """Predict for every row of a data set, and write the table with the answers to a file.

    The file has all rows in their order. Its columns are `row`, which counts from 0; those of the
    data (images and audio as paths, classes by name; one with a name of ours becomes `input_NAME`);
    `answer` (empty where the model abstains); `prediction` (what it would say if it never
    abstained; empty only where a row cannot be read); `why`; and the other fields of `predict`.

    Until the file is complete, its parts are in the folder `OUTPUT.ID.parts`: call this again with
    the same arguments to go on after a stop. No row is lost or predicted twice.

    Args:
        model (`str`, `os.PathLike`, `nn.Module` or `Cascade`): a folder, a Hub name or a model, as
            in `HydraPredictor`; or several stages, calibrated together.
        data (`str`, `os.PathLike`, `Dataset`, `DataFrame` or `list[dict]`): what `load_data`
            accepts.
        output (`str` or `os.PathLike`): a new file, .parquet, .jsonl or .csv.
        split (`str`, *optional*): of the data; by default the first of validation, test and train.
        column (`str` or pair of `str`, *optional*): the column that is read, by default found; two
            of pairs of texts.
        engine (`str`, defaults to `"local"`): "local" for this process, or "ray" for the processes
            of a Ray cluster, which must see model and data under the same names.
        workers (`int`, *optional*): of Ray; by default one per GPU, or without GPUs one. Several
            share a GPU.
        monitor (`str` or `os.PathLike`, *optional*): the file of a `Monitor`, which counts the rows
            that are predicted.
        audit (`float`, *optional*): the share of the answers that people shall check. They are
            drawn at random, by row number and seed alone, and marked in the column `audit`;
            `OUTPUT.audit.csv` has them with an empty column `reviewed_label`.
        audit_seed (`int`, defaults to 0): of the draw.
        settings (*optional*): of `HydraPredictor`: processor, device, candidate_labels, top_k,
            batch_size.

    Returns:
        `Finished`: how many rows there are, and which could not be read.
    """
    # Check all arguments before anything is loaded.
    output = Path(output)
    source = DataSource(_absolute(data), split=split, column=column)
    check_output(output, source)
    if monitor is not None:
        check_monitor_file(Path(monitor), output, source)
    if audit is not None:
        check_share(audit, "audit")
        check_audit_file(output, source, monitor)
    if engine not in ("local", "ray"):
        raise ValueError(f"engine is {engine!r}: pass local or ray")
    if engine == "ray" and isinstance(model, torch.nn.Module):
        raise ValueError("engine is 'ray', and model is in memory: save it with its processor, and pass its folder")
    if isinstance(model, Cascade):
        check_cascade_job(settings | {"monitor": monitor, "audit": audit})
    else:
        settings["processor"] = _absolute(settings.get("processor"))
        if not isinstance(model, torch.nn.Module):
            model = os.fspath(_absolute(model))
    arguments = {"model": model, "source": source, "rows_per_part": ROWS_PER_PART, "settings": settings}

    # The job in this process; the workers of Ray make their own.
    if engine == "ray":
        from .ray_engine import predicted_by_workers, start_cluster

        cluster = start_cluster(workers, settings.get("device"))  # raises before anything is loaded
        if not isinstance(model, Cascade):
            settings = settings | {"device": "cpu"}
    job = Job(**arguments | {"settings": settings})
    folder = job.folder_for(output)
    drawn = None
    if audit is not None:
        drawn = Audit.of(job.predictor, folder, output, audit, audit_seed)
    watched = None
    if monitor is not None:
        watched = Monitor.of(job.predictor.model, file=monitor)

    # What is missing, and how it comes.
    files = [folder / f"part-{number:08d}.parquet" for number in range(job.num_parts)]
    missing = [number for number, file in enumerate(files) if read_part(file) is None]
    contents: Iterable = ((number, job.predicted(number)) for number in missing)
    if engine == "ray" and missing:
        contents = predicted_by_workers(Job, arguments, job.identity, missing, *cluster)

    # Write it, part by part.
    missing_rows = sum(len(job.rows_of(number)) for number in missing)
    with progress_bar(len(job.rows), "predict", "row", initial=len(job.rows) - missing_rows) as bar:
        for number, content in contents:
            # Count before the part is there: one that is predicted again, anywhere, counts once.
            if watched is not None:
                predictions = predictions_in(read_part(io.BytesIO(content)), job.predictor.columns)
                watched.update(predictions, batch=f"{folder.suffixes[-2]} {number}")
                watched.save(monitor)
            write_atomically(files[number], content)
            bar.update(len(job.rows_of(number)))

    bad_rows = join_parts(files, output, drawn)
    audited = None
    if drawn is not None:
        audited = drawn.count
    calibration = job.predictor.calibration
    has_target = calibration is not None and calibration["threshold"] is not None
    return Finished(
        rows=len(job.rows),
        bad_rows=bad_rows,
        is_calibrated=calibration is not None,
        split=job.split,
        has_target=has_target,
        audited=audited,
        columns=tuple(job.columns),
    )


def predictions_in(table: Any, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the predictions in a part's table, without bad rows and the columns of the data."""
    names = [name for name in table.column_names if name in columns]
    readable = table.filter(table["prediction"].is_valid())
    return readable.select(names).to_pylist()


def _absolute(name: Any) -> Any:
    """Return a folder or file by its whole path, for workers may start elsewhere.

    A name on the Hub, or anything else, stays as it is.
    """
    if isinstance(name, (str, os.PathLike)) and os.path.exists(name):
        return os.path.abspath(name)
    return name


def check_output(output: Path, source: DataSource) -> None:
    """Raise, before any work, for a file that exists, is among the data, or cannot be written."""
    if output.suffix not in FORMATS:
        raise ValueError(f"output is {output}: pass a file that ends in {', '.join(FORMATS)}")
    is_folder = isinstance(source.data, str) and os.path.isdir(source.data)
    if is_folder and Path(source.data).resolve() in output.resolve().parents:
        raise ValueError(f"output is {output}, inside the data {source.data}: pass a file elsewhere")
    if output.exists():
        raise exists_already(output)
    check_takes_files(output.parent)


def check_monitor_file(monitor: Path, output: Path, source: DataSource) -> None:
    """Raise, before any work, for a monitor's file that cannot be one.

    It is the output, among the data, or cannot be written.
    """
    if os.path.realpath(monitor) == os.path.realpath(output):
        raise ValueError(f"monitor and output are both {output}: pass a file of its own, such as monitor.json")
    if monitor.is_dir():
        raise ValueError(f"monitor is {monitor}, a folder: pass a file, such as {monitor / 'monitor.json'}")
    if isinstance(source.data, str) and os.path.exists(source.data):
        path = monitor.resolve()
        if Path(source.data).resolve() in (path, *path.parents):
            raise ValueError(f"monitor is {monitor}, among the data {source.name}: pass a file elsewhere")
    check_takes_files(monitor.parent)


def check_audit_file(output: Path, source: DataSource, monitor: str | os.PathLike | None) -> None:
    """Raise, before any work, where the reviewers' file would replace the data or the monitor."""
    file = audit_file_of(output)
    others: dict[str, Any] = {"monitor": monitor, "the data": source.data}
    for name, other in others.items():
        if isinstance(other, (str, os.PathLike)) and os.path.realpath(other) == os.path.realpath(file):
            raise ValueError(f"the audited answers go to {file}, which is {name}: pass another output, or rename that")


def check_cascade_job(settings: Mapping[str, Any]) -> None:
    """Raise for what a job with a cascade cannot do.

    settings: of `predict_data` that need one model, None where they are left out
    """
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"{name} is for one model, and this is a cascade: leave it out")


def exists_already(output: Path) -> ValueError:
    """Make the error for an output that is there, before the job or at its end."""
    return ValueError(f"{output} exists already: pass another --output, or remove it")


class Job:
    """What each process of a job has: the rows of a data set in parts, and the model.

    model: as in `predict_data`
    source: the data
    settings: of the predictor
    rows_per_part: of the table
    """

    def __init__(
        self,
        model: str | torch.nn.Module | Cascade,
        source: DataSource,
        settings: Mapping[str, Any],
        rows_per_part: int,
    ):
        self.rows_per_part = rows_per_part
        if isinstance(model, Cascade):
            name = model.name
            kind = model.kind
            remembered = {"column": list(model.input_columns)}
        else:
            if isinstance(model, str):
                name = model
                info = ModelInfo.of(load_config(model))
            else:
                name = type(model).__name__
                info = ModelInfo.of(model)
            kind = kind_of(info, name)
            remembered = DataSource.of_model(info.config, source.data).remembered

        # The rows, and which columns are read.
        source = replace(source, remembered=remembered)
        with access_to(source.name, "data set"):
            loaded = load_rows(source)
        rows = loaded.rows
        self.split = loaded.split
        if not hasattr(rows, "features"):
            rows = as_dataset(rows, source.name)
        words = None
        if kind == "tokens":
            words = find_words(rows, source)
        kind = {"zero-shot": "image", "tokens": "text"}.get(kind, kind)
        if words is not None:
            self.columns = (words,)
        else:
            self.columns = find_columns(rows, kind, source)
        first_column = self.columns[0]
        if kind != "text" and column_kinds(rows)[first_column] == "text":
            raise ValueError(
                f"the column {first_column!r} holds texts, and {name} reads {PLURALS[kind]}: for paths, call the "
                "column file_name and the table metadata.csv, and pass the folder of both"
            )
        for column in self.columns:
            if column in mixed_columns(rows):
                raise ValueError(
                    f"the column {column!r} of {source.name} has values of several types, and {name} reads "
                    f"{PLURALS[kind]}: give them one"
                )
        self.rows = rows.with_format("arrow")  # files stay undecoded: a broken one is a bad row
        left_out = [name for name, feature in rows.features.items() if getattr(feature, "dtype", "") in BYTES]
        if left_out:
            logger.warning(f"the output leaves out columns of bytes: {', '.join(left_out)}")
        self.mixed = rows.select_columns(mixed_columns(rows)).with_format(None)
        self.num_parts = math.ceil(len(rows) / rows_per_part)

        self.predictor = model if isinstance(model, Cascade) else HydraPredictor(model, **settings)
        group_column = self.predictor.group_column
        if group_column is not None and group_column not in self.rows.column_names:
            names = ", ".join(self.rows.column_names)
            raise ValueError(f"{source.name} has no column {group_column!r}, by which {name} answers: it has {names}")
        self.identity = [digest_of_model(self.predictor), len(rows)]  # equal in all processes

    def rows_of(self, part: int) -> range:
        """Return the numbers of a part's rows."""
        start = part * self.rows_per_part
        return range(start, min(start + self.rows_per_part, len(self.rows)))

    def predicted(self, part: int) -> bytes:
        """Return a part of the table with its predictions, as the content of a parquet file."""
        import pyarrow.parquet

        # By batches: the images of a whole part may be large.
        rows = self.rows_of(part)
        size = self.predictor.batch_size
        batches = [self._batch(rows[start : start + size]) for start in range(0, len(rows), size)]
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.concat_tables(batches), file, write_page_checksum=True)
        return file.getvalue()

    def _batch(self, rows: range) -> Any:
        """Predict for some rows; return their table."""
        import pyarrow
        from pyarrow.compute import struct_field

        # Predictions.
        batch = self.rows[rows.start : rows.stop]
        inputs, *pairs = [batch.column(column).to_pylist() for column in self.columns]
        if pairs:
            inputs = [{"text": text, "text_pair": pair} for text, pair in zip(inputs, *pairs, strict=True)]
        groups = self._groups_in(batch, rows)
        options = {} if groups is None else {"groups": groups}
        predicted = to_table(self.predictor.answers(inputs, **options), self.predictor.columns)

        # The columns of the data, then those of the predictions.
        table = {"row": pyarrow.array(rows)}
        mixed = self.mixed[rows.start : rows.stop] if self.mixed.column_names else {}
        in_json = []
        for name, column in zip(batch.column_names, batch.columns, strict=True):
            if pyarrow.types.is_struct(column.type) and {field.name for field in column.type} == {"bytes", "path"}:
                column = struct_field(column, "path")  # an image or audio
            column = named_classes(column, self.rows.features[name])
            is_mixed = name in mixed
            if is_mixed:
                texts = [None if value is None else _json(value) for value in mixed[name]]
                column = pyarrow.array(texts, "string")
            while name in table or name in predicted.column_names:
                name = f"input_{name}"
            if is_mixed:
                in_json.append(name)
            if not pyarrow.types.is_binary(column.type):
                table[name] = column
        table |= dict(zip(predicted.column_names, predicted.columns, strict=True))
        return with_json_columns(pyarrow.table(table), in_json)

    def _groups_in(self, batch: Any, rows: range) -> list[str] | None:
        """Return the group of each row, by which the model answers.

        None where it answers by none.
        """
        name = self.predictor.group_column
        if name is None:
            return None
        if name in self.mixed.column_names:
            cells = self.mixed[rows.start : rows.stop][name]
        else:
            cells = named_classes(batch.column(name), self.rows.features[name]).to_pylist()
        return [group_name(cell, f"row {row} of the data", name) for row, cell in zip(rows, cells, strict=True)]

    def folder_for(self, output: Path) -> Path:
        """Return the folder of the parts.

        Its name has a digest of model, data and settings, so no other job reads, replaces or
        removes them.
        """
        # `datasets` makes the fingerprint of the data's files.
        settings = [self.rows._fingerprint, self.predictor.parameters, self.columns, self.rows_per_part]
        digest = _digest([*self.identity, *settings])[:12]
        folder = output.with_name(f"{output.name}.{digest}.parts")

        pattern = f"{glob.escape(output.name)}.*.parts"
        folders = [path for path in output.parent.glob(pattern) if path.is_dir()]
        if folders and folder not in folders:
            logger.warning(f"{folders[0]} is of another model, data or settings: this job starts anew")
        return folder


def with_json_columns(table: Any, names: Sequence[str]) -> Any:
    """Mark columns of a table whose cells are JSON, for `decode_row`."""
    for name in names:
        place = table.column_names.index(name)
        table = table.set_column(place, table.field(place).with_metadata(IN_JSON), table.column(place))
    return table


def decode_row(row: Mapping[str, Any], in_json: Sequence[str]) -> dict[str, Any]:
    """Return a row with the values of its JSON columns as they were in the data."""
    decoded = {name: json.loads(row[name]) for name in in_json if row[name] is not None}
    return {**row, **decoded}


def named_classes(column: Any, feature: Any) -> Any:
    """Return a column of class indices, or of lists of them, with the names of the classes.

    Other columns stay as they are.
    """
    import pyarrow

    inside = getattr(feature, "feature", None) or feature
    names = getattr(inside, "names", None)
    if names is None:
        return column

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(part) for part in value]
        if value is None or value < 0:
            return None
        return names[value]

    return pyarrow.array([name(value) for value in column.to_pylist()])


def digest_of_model(predictor: HydraPredictor | Cascade) -> str:
    """Digest weights, config, decision, processor and this package's version.

    The result is the same on every device.
    """
    if isinstance(predictor, Cascade):
        return _digest([predictor.digest(), __version__])
    # What the tokenizer does; the rules of a fast one also say whether it ignores case, and the
    # like.
    tokenizer = getattr(predictor.processor, "tokenizer", predictor.processor)
    rules: Any = {}
    if hasattr(tokenizer, "backend_tokenizer"):
        rules = tokenizer.backend_tokenizer.to_str()
    elif hasattr(tokenizer, "get_vocab"):
        rules = tokenizer.get_vocab()

    state = predictor.model.state_dict()
    tensors = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    config = predictor.config.to_dict() | {"_name_or_path": None}
    described = [config, predictor.calibration, str(predictor.processor), rules, __version__]
    return _digest([digest_of(tensors), sorted(state), *described])


def _digest(value: Any) -> str:
    """Digest a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def read_part(file: Path | io.BytesIO) -> Any:
    """Return the table of a part; None if it is not there, or not what was written."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file, page_checksum_verification=True)
    except (OSError, pyarrow.ArrowException):
        return None


def join_parts(files: Sequence[Path], output: Path, audit: Audit | None = None) -> list[int]:
    """Write the output, with one part at a time in memory, and remove the parts.

    With an audit, its answers are marked, and written for reviewers, too. Returns the numbers of
    the bad rows.
    """
    bad_rows: list[int] = []

    def tables() -> Iterator[Any]:
        for file in files:
            table = read_part(file)
            if table is None:
                raise RuntimeError(f"{file} is not what was written: run the command again")
            unread = table.filter(table["prediction"].is_null())
            bad_rows.extend(unread["row"].to_pylist())
            if audit is not None:
                table = audit.marked(table)
            yield table

    # Remove first: a user may have moved the output of a killed job, which is the same file.
    joined = files[0].with_name(f"joined{output.suffix}")
    joined.unlink(missing_ok=True)
    write_tables(joined, tables())
    if audit is not None:
        for_reviewers = joined.with_name("audit.csv")
        write_tables(for_reviewers, iter([audit.for_reviewers()]))
        os.replace(for_reviewers, audit.file)
    try:
        os.link(joined, output)  # never replaces a file
    except OSError:  # one that appeared meanwhile, or a file system without links
        if output.exists():
            raise exists_already(output) from None
        os.replace(joined, output)

    unfinished = joined.parent.glob(".part-*.tmp")  # of killed processes
    for file in (*files, *unfinished, joined):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # a user may have put something into it
        joined.parent.rmdir()
    return bad_rows


def write_tables(path: Path, tables: Iterator[Any]) -> None:
    """Write one table or more into a file, one after the other.

    path: the format is the one that its name ends in
    """
    import pyarrow.parquet

    first = next(tables)
    tables = chain([first], tables)
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetWriter(path, first.schema) as writer:
            for table in tables:
                writer.write_table(table)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        in_json = [field.name for field in first.schema if field.metadata == IN_JSON]
        written = chain.from_iterable(as_json(table.to_pylist()) for table in tables)
        rows = (decode_row(row, in_json) for row in written)
        if path.suffix == ".jsonl":
            for row in rows:
                file.write(_json(row) + "\n")
            return
        writer = csv.writer(file)
        writer.writerow(first.column_names)
        for row in rows:
            writer.writerow(_csv_cell(value) for value in row.values())


def _csv_cell(value: Any) -> Any:
    """Return a value as a cell: lists and dicts as JSON."""
    if isinstance(value, (list, dict)):
        return _json(value)
    return value


def _json(value: Any) -> str:
    """Return a value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)
