"""Predicts for all rows of a data set into one file, part by part; a job that was stopped goes on where it was."""

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
from ..data.prediction import config_of
from ..data.rows import DataSource, as_dataset, load_rows
from ..hub.handler import as_json
from ..models.weights_digest import digest_of
from ..uncertainty import Monitor
from ..uncertainty.abstention import check_share
from .answers import to_table
from .audit_files import Audit
from .predictor import HydraPredictor, kind_of, kind_of_model
from .saved_models import load_config


logger = logging.get_logger(f"transformers.{__name__}")

FORMATS = (".parquet", ".jsonl", ".csv")
ROWS_PER_PART = 1024


class Finished(NamedTuple):
    """A job that wrote its file.

    split: of the data, whose rows these are; None without splits
    has_target: whether the model was calibrated to abstain
    audited: how many answers were drawn for an audit; None without one
    """

    rows: int
    bad_rows: list[int]
    is_calibrated: bool
    split: str | None
    has_target: bool = False
    audited: int | None = None


def predict_data(
    model: str | os.PathLike | torch.nn.Module,
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
    """Predicts for every row of a data set, and writes the table with the answers to a file.

    The file has all rows in their order: `row`, which counts from 0, the columns of the data (images and audio as paths,
    classes by name; one with a name of ours becomes `input_NAME`), then `answer` (empty where the model abstains),
    `prediction` (what it would say if it never abstained; empty only where a row cannot be read), `why`, and the other fields of `predict`. Until it is complete, its parts are in
    the folder `OUTPUT.ID.parts`: call it again with the same arguments to go on after a stop. No row is lost or predicted twice.

    Args:
        model (`str`, `os.PathLike` or `nn.Module`): a folder, a Hub name or a model, as in `HydraPredictor`.
        data (`str`, `os.PathLike`, `Dataset`, `DataFrame` or `list[dict]`): what `load_data` accepts.
        output (`str` or `os.PathLike`): a new file, .parquet, .jsonl or .csv.
        split (`str`, *optional*): of the data; by default the first of validation, test and train.
        column (`str` or pair of `str`, *optional*): the column that is read, by default found; two of pairs of texts.
        engine (`str`, defaults to `"local"`): "local" for this process, or "ray" for the processes of a Ray cluster, which must see
            model and data under the same names.
        workers (`int`, *optional*): of Ray; by default one per GPU, or without GPUs one. Several share a GPU.
        monitor (`str` or `os.PathLike`, *optional*): the file of a `Monitor`, which counts the rows that are predicted.
        audit (`float`, *optional*): the share of the answers that people shall check. They are drawn at random, by row number and
            seed alone, and marked in the column `audit`; `OUTPUT.audit.csv` has them with an empty column `reviewed_label`.
        audit_seed (`int`, defaults to 0): of the draw.
        settings (*optional*): of `HydraPredictor`: processor, device, candidate_labels, top_k, batch_size.

    Returns:
        `Finished`: how many rows there are, and which could not be read.
    """
    output, source = Path(output), DataSource(_absolute(data), split=split, column=column)
    check_output(output, source)
    if monitor is not None:
        check_monitor_file(Path(monitor), output, source)
    if audit is not None:
        check_share(audit, "audit")
    if engine not in ("local", "ray"):
        raise ValueError(f"engine is {engine!r}: pass local or ray")
    if engine == "ray" and isinstance(model, torch.nn.Module):
        raise ValueError("engine is 'ray', and model is in memory: save it with its processor, and pass its folder")
    settings["processor"] = _absolute(settings.get("processor"))
    model = model if isinstance(model, torch.nn.Module) else os.fspath(_absolute(model))
    arguments = {"model": model, "source": source, "rows_per_part": ROWS_PER_PART, "settings": settings}
    if engine == "ray":
        from .ray_engine import predicted_by_workers, start_cluster

        cluster = start_cluster(workers, settings.get("device"))  # raises errors before anything is loaded
        settings = settings | {"device": "cpu"}
    job = Job(**arguments | {"settings": settings})
    folder = job.folder_for(output)
    drawn = None if audit is None else Audit.of(job, folder, output, audit, audit_seed)
    watched = None if monitor is None else Monitor.of(job.predictor.model, file=monitor)
    files = [folder / f"part-{number:08d}.parquet" for number in range(job.num_parts)]
    missing = [number for number, file in enumerate(files) if read_part(file) is None]
    contents: Iterable = ((number, job.predicted(number)) for number in missing)
    if engine == "ray" and missing:
        contents = predicted_by_workers(Job, arguments, job.identity, missing, *cluster)
    done = len(job.rows) - sum(len(job.places(number)) for number in missing)
    with progress_bar(len(job.rows), "predict", "row", initial=done) as bar:
        for number, content in contents:
            if watched is not None:  # before the part is there: one that is predicted again, anywhere, counts once
                table = read_part(io.BytesIO(content))
                columns = [
                    name for name in table.column_names if name in job.predictor.columns
                ]  # not those of the data
                readable = table.filter(table["prediction"].is_valid()).select(columns)
                watched.update(readable.to_pylist(), batch=f"{folder.suffixes[-2]} {number}")
                watched.save(monitor)
            write_atomically(files[number], content)
            bar.update(len(job.places(number)))
    calibration = job.predictor.calibration
    has_target = calibration is not None and calibration["threshold"] is not None
    bad_rows = join_parts(files, output, drawn)
    audited = None if drawn is None else drawn.count
    return Finished(len(job.rows), bad_rows, calibration is not None, job.split, has_target, audited)


def _absolute(name: Any) -> Any:
    """A folder or file by its whole path, as workers may start elsewhere; a name on the Hub, or anything else, as it is."""
    return os.path.abspath(name) if isinstance(name, (str, os.PathLike)) and os.path.exists(name) else name


def check_output(output: Path, source: DataSource) -> None:
    """Raises an error, before any work, for a file that exists, is among the data, or cannot be written."""
    if output.suffix not in FORMATS:
        raise ValueError(f"output is {output}: pass a file that ends in {', '.join(FORMATS)}")
    data = source.data if isinstance(source.data, str) and os.path.isdir(source.data) else None
    if data is not None and Path(data).resolve() in output.resolve().parents:
        raise ValueError(f"output is {output}, inside the data {data}: pass a file elsewhere")
    if output.exists():
        raise exists_already(output)
    check_takes_files(output.parent)


def check_monitor_file(monitor: Path, output: Path, source: DataSource) -> None:
    """Raise, before any work, for a monitor's file that is the output, among the data, or cannot be written."""
    if os.path.realpath(monitor) == os.path.realpath(output):
        raise ValueError(f"monitor and output are both {output}: pass a file of its own, such as monitor.json")
    if monitor.is_dir():
        raise ValueError(f"monitor is {monitor}, a folder: pass a file, such as {monitor / 'monitor.json'}")
    data = Path(source.data).resolve() if isinstance(source.data, str) and os.path.exists(source.data) else None
    if data is not None and data in (monitor.resolve(), *monitor.resolve().parents):
        raise ValueError(f"monitor is {monitor}, among the data {source.name}: pass a file elsewhere")
    check_takes_files(monitor.parent)


def exists_already(output: Path) -> ValueError:
    return ValueError(f"{output} exists already: pass another --output, or remove it")


class Job:
    """The rows of a data set in parts, and the model that predicts for them: what each process of a job has."""

    def __init__(
        self, model: str | torch.nn.Module, source: DataSource, settings: Mapping[str, Any], rows_per_part: int
    ):
        self.rows_per_part = rows_per_part
        config = load_config(model) if isinstance(model, str) else config_of(model)
        kind = kind_of(config, model) if isinstance(model, str) else kind_of_model(model)
        source = replace(source, remembered=DataSource.of_model(config, source.data).remembered)
        with access_to(source.name, "data set"):
            rows, self.split, _ = load_rows(source)
        if not hasattr(rows, "features"):
            rows = as_dataset(rows, source.name)
        words = find_words(rows, source) if kind == "tokens" else None
        kind = {"zero-shot": "image", "tokens": "text"}.get(kind, kind)
        self.columns = find_columns(rows, kind, source) if words is None else (words,)
        if kind != "text" and column_kinds(rows)[self.columns[0]] == "text":
            name = model if isinstance(model, str) else type(model).__name__
            raise ValueError(
                f"the column {self.columns[0]!r} holds texts, and {name} reads {PLURALS[kind]}: for paths, call the column "
                "file_name and the table metadata.csv, and pass the folder of both"
            )
        self.rows = rows.with_format("arrow")  # files stay undecoded: a broken one is a bad row
        self.num_parts = math.ceil(len(rows) / rows_per_part)
        self.predictor = HydraPredictor(model, **settings)
        self.identity = [digest_of_model(self.predictor), len(rows)]  # equal in all processes

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
        inputs, *pairs = [batch.column(column).to_pylist() for column in self.columns]
        if pairs:
            inputs = [{"text": text, "text_pair": pair} for text, pair in zip(inputs, *pairs, strict=True)]
        predicted = to_table(self.predictor.answers(inputs), self.predictor.columns)
        table = {"row": pyarrow.array(places)}
        for name, column in zip(batch.column_names, batch.columns, strict=True):
            if pyarrow.types.is_struct(column.type) and {field.name for field in column.type} == {"bytes", "path"}:
                column = struct_field(column, "path")  # an image or audio
            column = named_classes(column, self.rows.features[name])
            while name in table or name in predicted.column_names:
                name = f"input_{name}"
            if not pyarrow.types.is_binary(column.type):
                table[name] = column
        return pyarrow.table(table | dict(zip(predicted.column_names, predicted.columns, strict=True)))

    def folder_for(self, output: Path) -> Path:
        """Of the parts: its name has a digest of model, data and settings, so no other job reads, replaces or removes them."""
        # `datasets` makes the fingerprint of the data's files.
        settings = [self.rows._fingerprint, self.predictor.parameters, self.columns, self.rows_per_part]
        digest = _digest([*self.identity, *settings])[:12]
        folder = output.with_name(f"{output.name}.{digest}.parts")
        folders = [path for path in output.parent.glob(f"{glob.escape(output.name)}.*.parts") if path.is_dir()]
        if folders and folder not in folders:
            logger.warning(f"{folders[0]} is of another model, data or settings: this job starts anew")
        return folder


def named_classes(column: Any, feature: Any) -> Any:
    """Return a column of class indices, or of lists of them, with the names of the classes; others as they are."""
    import pyarrow

    inside = getattr(feature, "feature", None) or feature
    names = getattr(inside, "names", None)
    if names is None:
        return column

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(part) for part in value]
        return names[value] if value is not None and value >= 0 else None

    return pyarrow.array([name(value) for value in column.to_pylist()])


def digest_of_model(predictor: HydraPredictor) -> str:
    """Of weights, config, decision, processor and this package's version; the same on every device."""
    tokenizer = getattr(predictor.processor, "tokenizer", predictor.processor)
    rules = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    if hasattr(tokenizer, "backend_tokenizer"):  # also whether it ignores case, and the like
        rules = tokenizer.backend_tokenizer.to_str()
    state, config = predictor.model.state_dict(), predictor.config.to_dict() | {"_name_or_path": None}
    tensors = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    described = [config, predictor.calibration, str(predictor.processor), rules, __version__]
    return _digest([digest_of(tensors), sorted(state), *described])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def read_part(file: Path | io.BytesIO) -> Any:
    """The table of a part; None if it is not there, or not what was written."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file, page_checksum_verification=True)
    except (OSError, pyarrow.ArrowException):
        return None


def join_parts(files: Sequence[Path], output: Path, audit: Audit | None = None) -> list[int]:
    """Writes the output, with one part at a time in memory, and removes the parts. Returns the numbers of the bad rows."""
    bad_rows: list[int] = []

    def tables() -> Iterator[Any]:
        for file in files:
            table = read_part(file)
            if table is None:
                raise RuntimeError(f"{file} is not what was written: run the command again")
            bad_rows.extend(table.filter(table["prediction"].is_null())["row"].to_pylist())
            yield table if audit is None else audit.marked(table)

    joined = files[0].with_name(f"joined{output.suffix}")
    joined.unlink(missing_ok=True)  # a user may have moved the output of a killed job, which is the same file
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
    """Writes one table or more, one after the other, into a file of the format that its name ends in."""
    import pyarrow.parquet

    first = next(tables)
    tables = chain([first], tables)
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetWriter(path, first.schema) as writer:
            for table in tables:
                writer.write_table(table)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer, is_csv = csv.writer(file), path.suffix == ".csv"
        if is_csv:
            writer.writerow(first.column_names)
        for row in chain.from_iterable(as_json(table.to_pylist()) for table in tables):
            if is_csv:
                writer.writerow(_json(cell) if isinstance(cell, (list, dict)) else cell for cell in row.values())
            else:
                file.write(_json(row) + "\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
