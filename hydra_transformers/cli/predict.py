"""`predict`: answers to texts, images or sounds, with their uncertainty."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ..data.sounds import waveform
from ..models.auto import auto_class_of
from ..models.pipeline_hydra import image_mode, read_image
from ..uncertainty import CalibratedClassifier, predict_decisions
from . import flags
from .folders import load_config, load_with_decision
from .options import argument, option, switch


ZERO_SHOT = "AutoModelForZeroShotImageClassification"
AUDIO = "AutoModelForAudioClassification"


def predict(
    model: flags.ModelArgument,
    inputs: argument(
        list[str], "INPUT", "texts, image files or URLs, or audio files; - reads them from stdin, one per line"
    ),
    as_json: switch("--json", "one line of JSON per input instead of a table") = False,
    labels: option(
        list[str] | None,
        "for CLIP and SigLIP: the classes to choose from (default: those of its calibration)",
        "LABEL...",
    ) = None,
    top_k: option(int, "scores per input", "N", min=1) = 5,
    processor: flags.Processor = None,
    batch_size: flags.BatchSize = 8,
    device: flags.Device = None,
) -> None:
    """Answer texts, images or sounds, with the uncertainty of each answer."""
    config = load_config(model)
    task = auto_class_of(config)
    parameters = {"top_k": top_k, **_candidate_labels(model, labels or None, task)}
    loaded, reader = load_with_decision(model, processor, device)
    if not as_json:
        print(_row("input", "answer", "score", "total", "epistemic", "may be", "why"))
    unread = count = 0
    names = _names(inputs)
    while group := list(islice(names, batch_size)):
        read = _read(group, task, reader, image_mode(config))
        count, unread = count + len(group), unread + len(group) - len(read)
        answers = predict_decisions(loaded, list(read.values()), reader, batch_size, **parameters)
        for place, answer in zip(read, answers, strict=True):
            print(_json({"input": group[place], **answer}) if as_json else _line(group[place], answer), flush=True)
    if unread:
        raise ValueError(
            f"{unread} of {count} {'sounds' if task == AUDIO else 'images'} could not be read, the others are answered"
        )
    if count == 0:
        raise ValueError("stdin has no lines: pass a text, or an image or audio file, on each")


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


def _read(names: Sequence[str], task: str, processor: Any, mode: str) -> dict[int, Any]:
    """Texts, or the files that can be read, by their place; prints why others cannot."""
    if task == "AutoModelForSequenceClassification":
        return dict(enumerate(names))
    is_audio, found = task == AUDIO, {}
    for place, name in enumerate(names):
        try:
            found[place] = waveform(name, processor.sampling_rate) if is_audio else read_image(name, "it", mode)
        except Exception as error:  # decoders raise anything for a broken file
            kind = "a sound" if is_audio else "an image"
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
            print(f"{name} cannot be read as {kind}: {reason or type(error).__name__}", file=sys.stderr)
    return found


# Answers


def _json(answer: dict[str, Any]) -> str:
    """A line of JSON, with null for NaN and infinities."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(each) for name, each in value.items()}
        if isinstance(value, list):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(answer), allow_nan=False)


def _line(name: str, answer: dict[str, Any]) -> str:
    chosen = answer["prediction_set"]
    return _row(
        name,
        f"I don't know ({answer['label']}?)" if answer["abstain"] else answer["label"],
        f"{answer['score']:.3f}",
        f"{answer['uncertainty']:.3f}",
        f"{answer['epistemic']:.3f}",
        "" if chosen is None else ", ".join(chosen) or "none of the classes",
        "; ".join(filter(None, [answer.get("reason"), "cut at the end" if answer.get("truncated") else None])),
    )


def _row(name: str, label: str, score: str, total: str, epistemic: str, chosen: str, why: str) -> str:
    name = " ".join(name.split())
    name = name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
    return f"{name:<40}  {label:<28}  {score:>5}  {total:>6}  {epistemic:>9}  {chosen:<20}  {why}".rstrip()
