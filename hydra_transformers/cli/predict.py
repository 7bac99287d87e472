"""`predict`: answers to texts, images or audio, with their uncertainty."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from .cascades import check_is_no_cascade, line_of_cascade, load_cascade, then_option
from .options import (
    BatchSize,
    Column,
    ModelArgument,
    MonitorFile,
    argument,
    best_device,
    data_name,
    option,
    share,
    switch,
)
from .serve import NEVER_ABSTAINS, UNCALIBRATED, predictor_of


DATA = "A data set"


def predict(
    model: ModelArgument,
    inputs: argument(
        list[str],
        "INPUT",
        "texts, image files or URLs, or audio files; - reads them from stdin, one per line. With --output one data "
        "set: a folder, a csv, jsonl or parquet file, or a Hub name",
    ),
    as_json: switch("--json", "one line of JSON per input instead of a table") = False,
    labels: option(
        list[str] | None, "for CLIP and SigLIP: a class; repeat it for each (default: as calibrated)", "LABEL"
    ) = None,
    output: option(
        Path | None,
        "answer a whole data set into this file (.parquet, .jsonl, .csv); run again to continue after a stop",
        "FILE",
        DATA,
    ) = None,
    split: option(str | None, "default: the first of validation, test and train", panel=DATA) = None,
    column: Column = None,
    engine: option(Literal["local", "ray"], "ray: on a Ray cluster, or in processes here", panel=DATA) = "local",
    workers: option(int | None, "processes of Ray (default: one per GPU; several share it)", "N", DATA, min=1) = None,
    monitor: MonitorFile = None,
    audit: option(
        float | None,
        "draw this share of the answers at random for people to check: marked in the column audit, and in "
        "OUTPUT.audit.csv, to be filled in for `watch --labels` and `calibrate --add`",
        "SHARE",
        DATA,
        parser=share,
    ) = None,
    audit_seed: option(int, "of the draw, which depends on it and on row numbers alone", panel=DATA, min=0) = 0,
    batch_size: BatchSize = 8,
    then: then_option("As calibrated with `calibrate --then`") = None,
) -> None:
    """Predict for texts, images, audio or a whole data set, with uncertainty and abstention."""
    if output is not None:
        data_name(inputs[0])
    from ..data.rows import FILE_FORMATS
    from ..model_info import ModelInfo
    from ..serving.answerer import as_json as finite
    from ..serving.predictor import kind_of
    from ..serving.saved_models import load_config

    if labels and len(set(labels)) < len(labels):
        raise ValueError("--labels names a class twice: name each once")
    if not then:
        check_is_no_cascade(model)
    elif labels:
        raise ValueError("--labels is for one model, and --then for a cascade: leave one of them out")
    kind = kind_of(ModelInfo.of(load_config(model)), model)
    settings = {"batch_size": batch_size, "candidate_labels": labels or None}
    if output is not None:
        if len(inputs) != 1:
            raise ValueError(f"--output is for one data set, and there are {len(inputs)} inputs: pass one")
        # Workers of a cluster may have other devices than this machine.
        settings["device"] = best_device() if engine == "local" else None
        settings |= {"split": split, "column": column or None, "engine": engine, "workers": workers}
        settings |= {"monitor": monitor, "audit": audit, "audit_seed": audit_seed}
        device = settings["device"]
        if then:
            of_one_model = ("batch_size", "candidate_labels", "device")
            settings = {name: value for name, value in settings.items() if name not in of_one_model}
            model = load_cascade(model, then, device, batch_size)
        _predict_data(model, inputs[0], output, **settings)
        return
    only = {"--split": split, "--column": column or None, "--workers": workers, "--monitor": monitor}
    only |= {"--audit": audit, "--audit-seed": audit_seed or None}
    if unused := [flag for flag, value in only.items() if value is not None]:
        raise ValueError(f"{unused[0]} is for a data set: name the file of its answers with --output")
    for name in inputs:
        # os.path: Path fails on texts that are longer than a file's name may be.
        if os.path.isdir(name) or (Path(name).suffix in FILE_FORMATS and os.path.isfile(name)):
            raise ValueError(f"{name} is a data set: name the file of its answers with --output")
        if Path(name).suffix in FILE_FORMATS and " " not in name:
            raise ValueError(f"there is no file {name}: pass a data set with --output, or a text")
        if kind in ("text", "tokens") and os.path.isfile(name):
            raise ValueError(f"{name} is a file, and {model} reads texts: pass the text, or - to read lines of stdin")
    predictor = load_cascade(model, then, best_device(), batch_size) if then else predictor_of(model, **settings)
    if not as_json:
        heads = ("sure", "", "", "stage") if then else ("score", "total", "epistemic", "may be")
        print(_row("input", "answer", *heads, "why"))
    bad_rows = count = 0
    names = _names(inputs)
    while group := list(islice(names, batch_size)):
        count += len(group)
        for name, answer in zip(group, predictor.answers(group), strict=True):
            if "error" in answer:
                bad_rows += 1
                print(f"{name} cannot be read: {answer['error']}", file=sys.stderr)
            else:
                in_json = json.dumps(finite({"input": name, **answer}), allow_nan=False) if as_json else None
                print(in_json or (line_of_cascade(_row, name, answer) if then else _line(name, answer)), flush=True)
    if bad_rows:
        rest = "" if bad_rows == count else ", the others are answered"
        raise ValueError(f"{bad_rows} of {count} {predictor.reads} could not be read{rest}")
    if count == 0:
        raise ValueError("stdin has no lines: pass a text, or an image or audio file, on each")


def _predict_data(model: Any, data: str, output: Path, **settings: Any) -> None:
    from ..serving.jobs import predict_data

    finished = predict_data(model, data, output, **settings)
    if not finished.is_calibrated:
        print(UNCALIBRATED, file=sys.stderr)
    elif not finished.has_target:
        print(NEVER_ABSTAINS, file=sys.stderr)
    rows, bad = finished.rows, finished.bad_rows
    of_split = "" if finished.split is None or os.path.isfile(data) else f" of the split {finished.split}"
    rest = f" and {len(bad) - 1:,} more" if len(bad) > 1 else ""
    unread = f"; row {bad[0]}{rest} cannot be read, see the column why" if bad else ""
    print(f"{output}: answers to {rows - len(bad):,} of {rows:,} rows{of_split}{unread}.")
    print(f"Read from the data: {' and '.join(finished.columns)}.")
    if finished.audited is not None:
        from ..serving.audit_files import audit_file_of

        file = audit_file_of(output)
        advice = "Write the right label of each into reviewed_label."
        print(f"{file}: {finished.audited:,} of these answers to be checked. {advice}")


def _names(inputs: Sequence[str]) -> Iterator[str]:
    for name in inputs:
        yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip()) if name == "-" else [name]


def _line(name: str, answer: dict[str, Any]) -> str:
    from ..serving.answers import prediction_text

    label, may_be = prediction_text(answer), answer.get("prediction_set")
    if answer.get("interval") is not None:
        may_be = ["{:.4g} to {:.4g}".format(*interval) for interval in answer["interval"]]
    is_class = "entities" not in answer and "interval" not in answer
    return _row(
        name,
        f"I don't know ({label}?)" if answer["abstain"] else label,
        f"{answer['score']:.3f}" if is_class else "",
        f"{answer['uncertainty']:.3f}",
        f"{answer['epistemic']:.3f}",
        "" if may_be is None else ", ".join(may_be) or "none of the classes",
        "; ".join(filter(None, [answer.get("reason"), "cut at the end" if answer.get("truncated") else None])),
    )


def _row(name: str, label: str, score: str, total: str, epistemic: str, chosen: str, why: str) -> str:
    name = " ".join(name.split())
    name = name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
    return f"{name:<40}  {label:<28}  {score:>5}  {total:>6}  {epistemic:>9}  {chosen:<20}  {why}".rstrip()
