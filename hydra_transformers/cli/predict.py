"""`predict`: answers to texts, images or sounds, with their uncertainty."""

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..data.rows import FILE_FORMATS
from ..hub.handler import as_json as without_nan
from ..models.auto import auto_class_of
from ..serving.answers import BadRow
from ..serving.jobs import ENGINES, FORMATS, predict_data
from ..serving.predictor import NAMED, kind_of
from ..uncertainty import CalibratedClassifier
from . import flags
from .folders import load_config
from .options import argument, check_named_once, choice, device_named, option, switch
from .serve import UNCALIBRATED, predictor_of


ZERO_SHOT = "AutoModelForZeroShotImageClassification"
DATA = "A data set"


def predict(
    model: flags.ModelArgument,
    inputs: argument(
        list[str],
        "INPUT",
        "texts, image files or URLs, or audio files; - reads them from stdin, one per line. With --output one data set: a "
        "folder, a csv, jsonl or parquet file, or a Hub name",
    ),
    as_json: switch("--json", "one line of JSON per input instead of a table") = False,
    labels: option(
        list[str] | None,
        "for CLIP and SigLIP: the classes to choose from (default: those of its calibration)",
        "LABEL...",
    ) = None,
    top_k: option(int, "scores per input", "N", min=1) = 5,
    output: option(
        Path | None,
        f"answer a whole data set into this file ({', '.join(FORMATS)}); run again to continue after a stop",
        "FILE",
        DATA,
    ) = None,
    split: option(str | None, "default: the first of validation, test and train", panel=DATA) = None,
    image_column: option(str | None, "default: the only column of images; may be one of paths", "NAME", DATA) = None,
    audio_column: option(str | None, "default: the only column of sounds; may be one of paths", "NAME", DATA) = None,
    text_column: option(
        str | None, 'default: "text", "sentence", ... or the only one; "FIRST,SECOND" for pairs', "NAME", DATA
    ) = None,
    strict: switch("--strict", "stop at a row that cannot be answered, instead of naming it in a file", DATA) = False,
    engine: option(choice(ENGINES), "ray spreads the rows over a Ray cluster, or over processes here", panel=DATA) = (
        "local"
    ),
    workers: option(int | None, "processes of Ray (default: one per GPU; several share it)", "N", DATA, min=1) = None,
    processor: flags.Processor = None,
    batch_size: flags.BatchSize = 8,
    device: flags.Device = None,
) -> None:
    """Answer texts, images or sounds, or all rows of a data set, with the uncertainty of each answer."""
    check_named_once(labels or [], "--labels")
    config = load_config(model)
    settings = {"top_k": top_k, **_candidate_labels(model, labels or None, auto_class_of(config))}
    settings |= {"processor": processor, "batch_size": batch_size}
    if output is not None:
        if len(inputs) != 1:
            raise ValueError(f"--output is for one data set, and there are {len(inputs)} inputs: pass one")
        columns = {"image": image_column, "audio": audio_column, "text": text_column}
        # Workers of a cluster may have other devices than this machine.
        settings["device"] = device_named(device) if engine == "local" else device
        _predict_data(model, inputs[0], output, split, columns, strict, engine, workers, settings)
        return
    given = {"--split": split, "--image-column": image_column, "--audio-column": audio_column}
    given |= {"--text-column": text_column, "--strict": strict or None, "--workers": workers}
    given["--engine"] = None if engine == "local" else engine
    only = [flag for flag, value in given.items() if value is not None]
    if only:
        raise ValueError(f"{only[0]} is for a data set: name the file of its answers with --output")
    for each in inputs:
        # os.path: Path fails on texts that are longer than a file's name may be.
        if os.path.isdir(each) or (Path(each).suffix in FILE_FORMATS and os.path.isfile(each)):
            raise ValueError(f"{each} is a data set: name the file of its answers with --output")
        if kind_of(config, model) in ("text", "tokens") and os.path.isfile(each):
            raise ValueError(
                f"{each} is a file, and {model} reads texts: pass the text itself, or - to read lines from stdin"
            )
    predictor = predictor_of(model, device=device, **settings)
    if not as_json:
        print(_row("input", "answer", "score", "total", "epistemic", "may be", "why"))
    unread = count = 0
    names = _names(inputs)
    while group := list(islice(names, batch_size)):
        count += len(group)
        for name, answer in zip(group, predictor.answers(group), strict=True):
            if isinstance(answer, BadRow):
                unread += 1
                print(f"{name} cannot be read as {NAMED[predictor.kind]}: {answer.reason}", file=sys.stderr)
            else:
                print(_json({"input": name, **answer}) if as_json else _line(name, answer), flush=True)
    if unread:
        raise ValueError(f"{unread} of {count} {predictor.reads} could not be read, the others are answered")
    if count == 0:
        raise ValueError("stdin has no lines: pass a text, or an image or audio file, on each")


def _predict_data(
    model: str,
    data: str,
    output: Path,
    split: str | None,
    columns: dict[str, str | None],
    strict: bool,
    engine: str,
    workers: int | None,
    settings: dict[str, Any],
) -> None:
    finished = predict_data(
        model, data, output, split=split, strict=strict, engine=engine, workers=workers, **columns, **settings
    )
    if not finished.is_calibrated:
        print(UNCALIBRATED, file=sys.stderr)
    bad = finished.bad_rows
    named = f"; {len(bad):,} cannot be read (the first is row {bad[0]:,}), and `why` says why" if bad else ""
    of_split = "" if finished.split is None or os.path.isfile(data) else f" of the split {finished.split}"
    print(f"{output}: {finished.rows:,} rows{of_split} with their answers{named}.")


def _candidate_labels(model: str, labels: list[str] | None, task: str) -> dict[str, list[str]]:
    """The classes that a model of two towers is to choose from."""
    if task != ZERO_SHOT:
        if labels is not None:
            raise ValueError(f"--labels is for CLIP and SigLIP, {model} has its own classes: leave it out")
        return {}
    if CalibratedClassifier.is_saved_in(model):
        classes = CalibratedClassifier.classes_saved_in(model)
        if labels not in (None, classes):
            raise ValueError(
                f"{model} was calibrated for {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}: leave --labels out, or "
                "pass the model from before its calibration"
            )
        return {}
    if labels is None:
        raise ValueError(f"{model} chooses among classes that you name: pass --labels")
    return {"candidate_labels": labels}


# Inputs


def _names(inputs: Sequence[str]) -> Iterator[str]:
    for each in inputs:
        yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip()) if each == "-" else [each]


# Answers


def _json(answer: dict[str, Any]) -> str:
    """A line of JSON, with null for NaN and infinities."""
    return json.dumps(without_nan(answer), allow_nan=False)


def _line(name: str, answer: dict[str, Any]) -> str:
    if "entities" in answer:
        answer = {**answer, "label": _entities(answer["entities"]), "score": math.nan, "prediction_set": None}
    chosen, label, score = answer["prediction_set"], answer["label"], f"{answer['score']:.3f}"
    if "interval" in answer:  # numbers instead of classes
        numbers = [f"{each['score']:.4g}" for each in answer["scores"]]
        label, score = ", ".join(numbers), ""
        chosen = (
            None if answer["interval"] is None else ["{:.4g} to {:.4g}".format(*each) for each in answer["interval"]]
        )
    if "labels" in answer:
        label = ", ".join(answer["labels"]) or "no label"
    return _row(
        name,
        f"I don't know ({label}?)" if answer["abstain"] and "entities" not in answer else label,
        "" if "entities" in answer else score,
        f"{answer['uncertainty']:.3f}",
        f"{answer['epistemic']:.3f}",
        "" if chosen is None else ", ".join(chosen) or "none of the classes",
        "; ".join(filter(None, [answer.get("reason"), "cut at the end" if answer.get("truncated") else None])),
    )


def _entities(entities: list[dict[str, Any]]) -> str:
    """ "Anna (PER), Paris (LOC?)": with a question mark where the model rather does not say."""
    named = [f"{each['word']} ({each['entity_group']}{'?' * bool(each['abstain'])})" for each in entities]
    return ", ".join(named) or "no entity"


def _row(name: str, label: str, score: str, total: str, epistemic: str, chosen: str, why: str) -> str:
    name = " ".join(name.split())
    name = name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
    return f"{name:<40}  {label:<28}  {score:>5}  {total:>6}  {epistemic:>9}  {chosen:<20}  {why}".rstrip()
