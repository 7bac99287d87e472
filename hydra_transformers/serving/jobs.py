"""Answers all rows of a data set into one file, part by part; a job that was stopped goes on where it was."""

import csv
import filecmp
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._io.access import access_to
from .._io.files import check_takes_files, remove_leftovers, write_atomically
from .._io.folder_lock import LOCK, only_writer
from .._io.progress import progress_bar
from .._version import __version__
from ..data.audio import undecoded
from ..data.columns import column_kinds, find_columns, find_word_column, has_words
from ..data.rows import DataSource, load_rows
from ..hub.handler import as_json
from ..models.decision import digest_of
from ..uncertainty.features import without_decision
from .answer_columns import arrow_schema
from .predictor import NAMED, HydraPredictor, kind_of
from .saved_models import load_config


FORMATS = (".parquet", ".jsonl", ".csv")
ENGINES = ("local", "ray")
ROWS_PER_PART = 1024
BYTES_PER_ROW_GROUP = 2**26
IDENTITY = "job.json"  # in the folder of parts: what they are answers to


@dataclass(frozen=True)
class Finished:
    """
    rows: of the data
    bad_rows: of these, those without an answer
    output: the file of answers, with a column `row` that counts from 0
    bad_rows_file: row, input and reason of each bad row; None if there is none
    is_calibrated: whether the model abstains and has sets
    split: of the data, whose rows these are; None without splits
    """

    rows: int
    bad_rows: int
    output: Path
    bad_rows_file: Path | None
    is_calibrated: bool
    split: str | None = None


def predict_data(
    model: str | os.PathLike,
    data: str | os.PathLike,
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
    """Answers every row of a data set and writes the answers to a file, in the order of the rows.

    Args:
        model: a folder or Hub name, as in `HydraPredictor`.
        data: a folder of images or sounds, a csv, json, jsonl or parquet file or a folder of these, a folder that
            `save_to_disk` wrote, or a data set on the Hub, as in `load_data`.
        output: a new file, .parquet, .jsonl or .csv. Beside it, `NAME.bad-rows.jsonl` names the rows that could not be
            answered, with the reason.
        split: of the data; by default the first of validation, test and train.
        image, audio, text: the column that is read, found where not named; two of pairs of texts. A column of texts that is
            named for images or sounds holds paths of files.
        strict: stop at the first row that cannot be answered.
        engine: "local" for this process, or "ray" for the processes of a Ray cluster, which must see model and data under the
            same names.
        workers: of Ray; by default one per GPU, or without GPUs one. Several share a GPU: each prepares its rows on a core.
        settings: of `HydraPredictor`: processor, device, candidate_labels, top_k, batch_size.

    Until the end, the answers lie in the folder `OUTPUT.parts`. Call it again with the same arguments to go on after a stop: no
    row is lost or answered twice. If model, data or settings have changed since, it refuses.
    """
    output = Path(output)
    check_output(output, Path(data))
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}: pass one of {', '.join(ENGINES)}")
    if workers is not None and engine != "ray":
        raise ValueError(f"workers is {workers}, which is for engine='ray' (--engine ray): leave it out")
    if engine == "ray":
        from .ray_engine import start_cluster

        start_cluster(workers, settings.get("device"))  # refuses before anything is loaded
    source = DataSource(_absolute(data), split=split, image=image, audio=audio, text=text)
    settings["processor"] = _absolute(settings.get("processor"))
    device = "cpu" if engine == "ray" else settings.get("device")
    part_reader = PartReader(_absolute(model), source, settings | {"device": device}, ROWS_PER_PART)
    writer = PartWriter(output, part_reader, strict)
    with only_writer(writer.folder):
        identity = identity_of(part_reader)
        writer.claim(identity)
        parts = range(-(-len(part_reader.rows) // ROWS_PER_PART))
        done = [part for part in parts if writer.is_done(part)]
        missing = sorted(set(parts) - set(done))
        if missing:
            check_is_new(output)
        counted = sum(len(part_reader.places(part)) for part in done)
        with progress_bar(len(part_reader.rows), "predict", "row", initial=counted) as bar:
            for part, table in _answered(part_reader, missing, engine, workers, settings, identity["model"]):
                writer.write(part, table)
                bar.update(table.num_rows)
        finished = writer.join(parts)
        shutil.rmtree(writer.folder, ignore_errors=True)
    return finished


def check_output(output: Path, data: Path) -> None:
    """Refuses, before any work, a file that exists, that lies among the data, or that cannot be written."""
    if output.suffix not in FORMATS:
        raise ValueError(f"output is {output}: pass a file that ends in {', '.join(FORMATS)}")
    if data.is_dir() and data.resolve() in output.resolve().parents:
        raise ValueError(f"output is {output}, inside the data {data}: pass a file elsewhere")
    # A job that was stopped after it joined its parts may have left both: `_put` compares them.
    if not (parts_folder(output) / IDENTITY).exists():
        check_is_new(output)
        check_is_new(bad_rows_file(output))
    check_takes_files(output.parent)


def check_is_new(path: Path) -> None:
    if path.exists():
        raise ValueError(f"{path} exists already: pass another --output, or remove it")


def parts_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def bad_rows_file(output: Path) -> Path:
    return output.with_name(f"{output.stem}.bad-rows.jsonl")


def _answered(
    reader: "PartReader",
    parts: list[int],
    engine: str,
    workers: int | None,
    settings: dict[str, Any],
    digest: str,
) -> Iterator[tuple[int, Any]]:
    """The number and the table of each part, in order. digest: of the model"""
    if not parts:
        return
    if engine == "local":
        for part in parts:
            yield part, reader.answered(part)
        return
    from .ray_engine import answered_by_workers

    arguments = {"model": reader.model, "source": vars(reader.source), "settings": settings, "rows": len(reader.rows)}
    arguments |= {"rows_per_part": reader.rows_per_part, "digest": digest}
    yield from answered_by_workers(arguments, {part: len(reader.places(part)) for part in parts}, workers)


def _absolute(name: Any) -> Any:
    """A folder or file by its whole path, as workers may start elsewhere; a name on the Hub, or anything else, as it is."""
    return os.path.abspath(name) if isinstance(name, (str, os.PathLike)) and os.path.exists(name) else name


def reader_of_worker(
    model: str, source: Mapping[str, Any], settings: Mapping[str, Any], rows_per_part: int, rows: int, digest: str
) -> "PartReader":
    """A `PartReader` in another process, which must find the same model and as many rows."""
    reader = PartReader(model, DataSource(**source), settings, rows_per_part)
    what = model if model_digest(reader.predictor) != digest else source["data"] if len(reader.rows) != rows else None
    if what is not None:
        raise RuntimeError(
            f"a worker finds another {what} than the process that was started: share one copy, and leave it as it is while "
            "the job runs."
        )
    return reader


class PartReader:
    """Reads parts of a data set and answers them: what each process of a job does.

    model, settings: of `HydraPredictor`
    rows_per_part: equal in all processes
    """

    def __init__(self, model: str, source: DataSource, settings: Mapping[str, Any], rows_per_part: int):
        self.model, self.rows_per_part = model, rows_per_part
        kind = kind_of(load_config(model), model)
        kind = "image" if kind == "zero-shot" else kind
        with access_to(source.name, "data set"):
            rows, self.split, _ = load_rows(source)
        self.columns, self.folder = _columns_to_read(rows, kind, source), None
        self.predictor = HydraPredictor(model, **{**settings, "strict": False})
        path = Path(source.name)
        if path.exists():
            self.folder = path if path.is_dir() else path.parent
        rows = undecoded(rows.select_columns(list(self.columns)))
        for column in self.columns:  # a broken image is to be a bad row, not the end of the job
            feature = rows.features[column]
            if type(feature).__name__ == "Image" and feature.decode:
                rows = rows.cast_column(column, type(feature)(decode=False))
        self.rows, self.source = rows, source
        kinds = column_kinds(rows)
        self.holds_paths = kind not in ("text", "tokens") and kinds[self.columns[0]] == "text"
        self.names = ["row", "input", *(["input_pair"] if len(self.columns) == 2 else [])]
        types = dict(zip(self.names, ("int64", "string", "string"), strict=False))
        self.schema = arrow_schema(types | self.predictor.columns)

    def places(self, part: int) -> range:
        """The rows of a part."""
        return range(part * self.rows_per_part, min((part + 1) * self.rows_per_part, len(self.rows)))

    def answered(self, part: int) -> Any:
        """An Arrow table of the answers to a part: row, input, the answers' columns, and error."""
        import pyarrow

        places, size = self.places(part), self.predictor.batch_size
        # By batches: the images of a whole part may be large.
        return pyarrow.concat_tables(
            [self._batch(places[start : start + size]) for start in range(0, len(places), size)]
        )

    def _batch(self, places: range) -> Any:
        import pyarrow

        batch = self.rows[places.start : places.stop]
        values = [batch[column] for column in self.columns]
        if self.holds_paths:
            values = [[self.path_of(each) for each in values[0]]]
        inputs = values[0]
        if len(values) == 2:
            inputs = [{"text": one, "text_pair": other} for one, other in zip(*values, strict=True)]
        shown = [list(places), *([_shown(each) for each in column] for column in values)]
        columns = dict(zip(self.names, shown, strict=True)) | self.predictor.answer_columns(inputs)
        return pyarrow.table(columns, schema=self.schema)

    def path_of(self, value: str | None) -> str | None:
        """A path in a table, as it is or beside the table."""
        if value is None or self.folder is None or os.path.exists(value):
            return value
        beside = os.path.join(self.folder, value)
        return beside if os.path.exists(beside) else value


def _columns_to_read(rows: Any, kind: str, source: DataSource) -> tuple[str, ...]:
    named = {"image": source.image, "audio": source.audio}.get(kind)
    if named is not None and column_kinds(rows).get(named) == "text":
        return (named,)  # paths
    if kind == "tokens":
        return (find_word_column(rows, source),) if has_words(rows, source) else find_columns(rows, "text", source)
    return find_columns(rows, kind, source)


def _shown(value: Any) -> str | None:
    """A text, the words of one, or the path of a file."""
    if isinstance(value, Mapping):
        value = value.get("path")
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return " ".join(value)
    return value if isinstance(value, str) else None


# What the parts are answers to


def identity_of(reader: PartReader) -> dict[str, Any]:
    """Model, data and settings of a job, as digests."""
    return {
        "version": __version__,
        "model": model_digest(reader.predictor),
        "data": _digest(_stamps(reader)),
        "rows": len(reader.rows),
        "rows_per_part": reader.rows_per_part,
        "columns": list(reader.columns),
        "settings": reader.predictor.parameters,
    }


def model_digest(predictor: HydraPredictor) -> str:
    """Of weights, config, decision and processor; the same on every device."""
    state = predictor.model.state_dict()
    _, decision = without_decision(predictor.model)
    config = {name: value for name, value in predictor.config.to_dict().items() if name != "_name_or_path"}
    processor = predictor.processor
    tokenizer = getattr(processor, "tokenizer", processor)
    prepared = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    if hasattr(tokenizer, "backend_tokenizer"):  # its rules, too, such as whether it ignores case
        prepared = tokenizer.backend_tokenizer.to_str()
    described = [sorted(state), config, None if decision is None else decision.settings, str(processor), prepared]
    tensors = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    return _digest([digest_of(tensors), *described])


def _stamps(reader: PartReader) -> Any:
    """What changes with the data: the content of a file; name, size and time of each file of a folder; the Hub's revision; and
    size and time of all files that the rows name."""
    path, named = Path(reader.source.name), hashlib.sha256()
    for start in range(0, len(reader.rows) if reader.holds_paths else 0, ROWS_PER_PART):
        for file in map(reader.path_of, reader.rows[start : start + ROWS_PER_PART][reader.columns[0]]):
            found = os.stat(file) if file is not None and os.path.exists(file) else None
            named.update(str(found and (found.st_size, found.st_mtime_ns)).encode())
    if path.is_file():
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
        data = digest.hexdigest()
    elif path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() and each.name != LOCK)
        data = [(str(each.relative_to(path)), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    else:
        data = reader.rows._fingerprint
    return [data, named.hexdigest(), reader.source.split]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


# Files


class PartWriter:
    """Writes parts beside the output, and in the end joins them.

    A part is done once its record, which holds its digest and its bad rows, is written behind it.
    """

    def __init__(self, output: Path, reader: PartReader, strict: bool):
        self.output, self.reader, self.strict = output, reader, strict
        self.folder = parts_folder(output)
        self.schema = reader.schema.remove(reader.schema.get_field_index("error"))

    def claim(self, identity: dict[str, Any]) -> None:
        """Records what the parts answer; refuses parts of another job."""
        identity = json.loads(json.dumps(identity))
        record = self.folder / IDENTITY
        remove_leftovers(self.folder)
        found = _read_record(record)
        if found is not None:
            changed = [name for name, value in identity.items() if found.get(name) != value]
            if changed:
                raise ValueError(
                    f"{self.folder} holds answers of a job that was stopped, and its {changed[0]} changed since: remove the "
                    "folder to start anew, or pass another --output"
                )
            return
        if any(path.name not in (LOCK, IDENTITY) for path in self.folder.iterdir()):
            raise ValueError(f"{self.folder} holds other files: remove it, or pass another --output")
        write_atomically(record, json.dumps(identity, indent=1))

    def part_file(self, part: int) -> Path:
        return self.folder / f"part-{part:08d}{self.output.suffix}"

    def record_file(self, part: int) -> Path:
        return self.folder / f"part-{part:08d}.done.json"

    def read(self, part: int) -> tuple[bytes, list[dict[str, Any]]] | None:
        """The content of a part and its bad rows; None if it is not done, or not what was written."""
        record, file = _read_record(self.record_file(part)), self.part_file(part)
        if record is None or not file.exists() or _digest_of(content := file.read_bytes()) != record.get("digest"):
            return None
        self.check_strict(record["bad"])
        return content, record["bad"]

    def is_done(self, part: int) -> bool:
        return self.read(part) is not None

    def check_strict(self, bad: list[dict[str, Any]]) -> None:
        if bad and self.strict:
            named = "" if bad[0]["input"] is None else f" ({bad[0]['input'][:200]})"
            what = NAMED[self.reader.predictor.kind]
            raise ValueError(
                f"row {bad[0]['row']}{named} cannot be answered as {what}: {bad[0]['reason']}; leave --strict out to go on "
                "without such rows"
            )

    def write(self, part: int, table: Any) -> None:
        import pyarrow.compute

        if table.column("row").to_pylist() != list(self.reader.places(part)):
            raise RuntimeError(f"part {part} came back with other rows than it has: run the command again")
        is_bad = pyarrow.compute.is_valid(table.column("error"))
        bad = table.filter(is_bad).select(["row", "input", "error"]).to_pylist()
        bad = [{"row": row["row"], "input": row["input"], "reason": row["error"]} for row in bad]
        self.check_strict(bad)
        content = self._content(table.filter(pyarrow.compute.invert(is_bad)).select(self.schema.names))
        write_atomically(self.part_file(part), content)
        write_atomically(self.record_file(part), json.dumps({"digest": _digest_of(content), "bad": bad}))

    def _content(self, table: Any) -> bytes:
        """A part as a file of the output's format."""
        if self.output.suffix == ".parquet":
            import pyarrow.parquet

            sink = io.BytesIO()
            pyarrow.parquet.write_table(table.cast(self.schema), sink)
            return sink.getvalue()
        rows = as_json(table.to_pylist())
        if self.output.suffix == ".jsonl":
            return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerows([_cell(value) for value in row.values()] for row in rows)
        return text.getvalue().encode()

    def join(self, parts: Sequence[int]) -> Finished:
        """Writes the output and the file of bad rows; one part at a time is in memory."""
        unfinished, not_answered = self.folder / f"joined{self.output.suffix}", self.folder / "bad-rows.jsonl"
        bad_rows = 0
        with _Joined(unfinished, self.schema) as joined, not_answered.open("w", encoding="utf-8") as file:
            for part in parts:
                found = self.read(part)
                if found is None:
                    raise RuntimeError(f"part {part} in {self.folder} is not what was written: run the command again")
                joined.add(found[0])
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in found[1])
                bad_rows += len(found[1])
        named = bad_rows_file(self.output) if bad_rows else None
        if named is not None:
            _put(not_answered, named)
        _put(unfinished, self.output)
        rows, is_calibrated = len(self.reader.rows), self.reader.predictor.is_calibrated
        return Finished(rows, bad_rows, self.output, named, is_calibrated, self.reader.split)


def _put(file: Path, place: Path) -> None:
    """Moves a file to where nothing is yet, or the same: a job that was stopped behind this left it."""
    if place.exists() and not filecmp.cmp(file, place, shallow=False):
        check_is_new(place)
    os.replace(file, place)


class _Joined:
    """A file made of the contents of parts."""

    def __init__(self, path: Path, schema: Any):
        self.path, self.schema, self.tables = path, schema, []

    def __enter__(self) -> "_Joined":
        if self.path.suffix == ".parquet":
            import pyarrow.parquet

            self.file = pyarrow.parquet.ParquetWriter(self.path, self.schema)
        else:
            self.file = self.path.open("wb")
            if self.path.suffix == ".csv":
                self.file.write((",".join(self.schema.names) + "\r\n").encode())
        return self

    def add(self, content: bytes) -> None:
        if self.path.suffix == ".parquet":
            import pyarrow.parquet

            self.tables.append(pyarrow.parquet.read_table(io.BytesIO(content)))
            # Each write is a row group, and readers hold a note on every group in memory: few large ones.
            if sum(table.nbytes for table in self.tables) > BYTES_PER_ROW_GROUP:
                self._write_tables()
        else:
            self.file.write(content)

    def _write_tables(self) -> None:
        import pyarrow

        self.file.write_table(pyarrow.concat_tables(self.tables))
        self.tables = []

    def __exit__(self, *_: Any) -> None:
        if self.tables:
            self._write_tables()
        self.file.close()


def _cell(value: Any) -> Any:
    """A value in a csv file: lists as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _read_record(path: Path) -> dict[str, Any] | None:
    """A file of JSON with an object; None if there is none, or a broken one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
