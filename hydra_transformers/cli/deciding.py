"""`calibrate` and `predict`: from a number to a decision."""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from .._io.files import written_whole
from ..data.loading import remember_max_length
from ..data.prediction import ZeroShotClassifier
from ..data.rows import is_same_source
from ..data.sounds import waveform
from ..models.auto import auto_class_of
from ..models.pipeline_hydra import image_mode, read_image
from ..uncertainty import DecidingClassifier, detector_by_name, predict_decisions
from ..uncertainty import calibrate as fit
from .arguments import (
    class_prompts,
    device_of,
    prompts_for,
    read_data,
)
from .folders import (
    FUSE_SETTINGS,
    check_is_new,
    check_takes_files,
    circuits_of,
    copy_circuits,
    load_config,
    load_model,
    load_processor,
)
from .judging import WithProgress
from .problems import CommandError


ZERO_SHOT = "AutoModelForZeroShotImageClassification"
AUDIO = "AutoModelForAudioClassification"
TARGETS = ("risk", "coverage", "tpr")


# calibrate


def calibrate(arguments: argparse.Namespace) -> None:
    check_is_new(arguments.output)
    check_takes_files(arguments.output)
    target = _target(arguments)
    device = device_of(arguments)
    config = load_config(arguments.model)
    folder = Path(arguments.model)
    if folder.is_dir():
        circuits_of(folder, [config])  # refuses those that a card could not be made of
    processor = load_processor(arguments.processor or arguments.model, config)
    if arguments.max_length is not None:  # saved with the model, which then reads what it was calibrated on
        remember_max_length(processor, config, arguments.max_length, arguments.max_length)
    data = read_data(arguments, config, processor, split=arguments.split, part=arguments.part)
    if str(data.split).startswith("train") and arguments.part in (None, "training"):
        print(
            f"note: these rows are of the split {data.split}: where the model was trained on them, nothing promised holds",
            file=sys.stderr,
        )
    others = {
        name: read_data(arguments, config, processor, source, labelled=labelled, prefer=prefer)
        for name, source, labelled, prefer in (
            ("ood", arguments.ood_data, False, ("test", "validation", "train")),
            ("training_data", arguments.training_data, True, ("train",)),
        )
        if source is not None
    }
    prompts = class_prompts(config, processor, data)
    if prompts is not None and "training_data" in others and others["training_data"].class_names != data.class_names:
        raise CommandError(
            f"{arguments.training_data} has other classes than {arguments.data}: let the detector learn from the same"
        )
    model = load_model(arguments.model, device)
    calibration = fit(
        model if prompts is None else ZeroShotClassifier(model, prompts, data.class_names),
        WithProgress(data, arguments.batch_size, arguments.data),
        target=target,
        confidence=arguments.confidence,
        detector=arguments.detector,
        alpha=None if arguments.sets == "none" else arguments.alpha,
        sets=arguments.sets,
        **{name: WithProgress(rows, arguments.batch_size, name) for name, rows in others.items()},
    )
    with written_whole(arguments.output) as unfinished:
        model.save_pretrained(unfinished)
        if isinstance(calibration.model, DecidingClassifier):  # a Hydra classifier's decision is a part of it
            calibration.model.save(unfinished)
        processor.save_pretrained(unfinished)
        if (folder / FUSE_SETTINGS).exists():
            shutil.copy(folder / FUSE_SETTINGS, unfinished)
        copy_circuits(folder, unfinished)
    print(calibration)
    print(f"The calibrated model is in {arguments.output}. Next: hydra-transformers predict {arguments.output} ...")


def _target(arguments: argparse.Namespace) -> dict[str, float] | None:
    """What to abstain by; refuses what would have no effect, or could not be fitted."""
    target = {name: getattr(arguments, name) for name in TARGETS if getattr(arguments, name) is not None}
    if arguments.tpr is not None and arguments.ood_data is None:
        raise CommandError("--tpr is a share of rows from elsewhere: name them with --ood-data")
    for name in ("confidence", "ood_data"):
        if not target and getattr(arguments, name) is not None:
            raise CommandError(
                f"--{name.replace('_', '-')} is about when to abstain: pass --risk, --coverage or --tpr, too"
            )
    if arguments.ood_data is not None and is_same_source(arguments.ood_data, arguments.data):
        raise CommandError(f"--ood-data is the data itself, {arguments.data}: name rows from elsewhere")
    if arguments.training_data is not None and not detector_by_name(arguments.detector).needs_fit:
        raise CommandError(
            f"the detector {arguments.detector} learns nothing: leave --training-data out, or name another"
        )
    return target or None


# predict


def predict(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.model)
    task = auto_class_of(config)
    parameters = _parameters(arguments, task, classes_decided_on(arguments.model))
    model, processor = load_to_answer(arguments)
    if not arguments.json:
        print(_row("input", "answer", "score", "total", "epistemic", "may be"))
    unread = count = 0
    names = _names(arguments.inputs)
    while group := list(islice(names, arguments.batch_size)):
        inputs = _read(group, task, processor, image_mode(config))
        count, unread = count + len(group), unread + len(group) - len(inputs)
        answers = predict_decisions(model, list(inputs.values()), processor, arguments.batch_size, **parameters)
        for place, answer in zip(inputs, answers, strict=True):
            print(
                _json({"input": group[place], **answer}) if arguments.json else _told(group[place], answer),
                flush=True,
            )
    if unread:
        raise CommandError(
            f"{unread} of {count} {'sounds' if task == AUDIO else 'images'} could not be read, the others are answered"
        )
    if count == 0:
        raise CommandError("stdin has no lines: pass a text, or an image or audio file, on each")


def _json(answer: dict[str, Any]) -> str:
    """A line of JSON, which has no word for what is no number: null."""
    try:
        return json.dumps(answer, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(answer), allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def classes_decided_on(name: str) -> list[str] | None:
    """Of two towers, the classes that it was calibrated for."""
    return DecidingClassifier.classes_saved_in(name) if DecidingClassifier.is_saved_in(name) else None


def load_to_answer(arguments: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model with what it decides by, and its processor; two towers as a classifier where it was calibrated as one.

    arguments: with model, processor and device
    """
    device = device_of(arguments)
    config = load_config(arguments.model)
    processor = load_processor(arguments.processor or arguments.model, config)
    model = load_model(arguments.model, device)
    classes = classes_decided_on(arguments.model)
    if classes is not None:
        model = ZeroShotClassifier(model, prompts_for(config, processor, classes), classes)
    if DecidingClassifier.is_saved_in(arguments.model):
        model = DecidingClassifier.load(model, arguments.model).eval()
    elif getattr(config, "decision", None) is None:
        print("note: this model was not calibrated, so it never abstains and has no sets", file=sys.stderr)
    return model, processor


def _parameters(arguments: argparse.Namespace, task: str, classes: list[str] | None) -> dict[str, Any]:
    """Of the pipeline. classes: of two towers, those that it was calibrated for"""
    parameters = {"top_k": arguments.top_k}
    if task != ZERO_SHOT:
        if arguments.labels is not None:
            raise CommandError(
                f"--labels is for CLIP and SigLIP, {arguments.model} has classes of its own: leave it out"
            )
        return parameters
    if classes is not None:
        if arguments.labels not in (None, classes):
            raise CommandError(
                f"{arguments.model} was calibrated for {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}: leave --labels "
                "out, or pass the model from before its calibration"
            )
        return parameters
    if arguments.labels is None:
        raise CommandError(f"{arguments.model} chooses among classes that you name: pass --labels")
    return parameters | {"candidate_labels": arguments.labels}


def _names(inputs: Sequence[str]) -> Iterator[str]:
    for each in inputs:
        yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip()) if each == "-" else [each]


def _read(names: Sequence[str], task: str, processor: Any, mode: str) -> dict[int, Any]:
    """Texts, or what of files can be read, by their place; tells of the others."""
    if task == "AutoModelForSequenceClassification":
        return dict(enumerate(names))
    is_audio, found = task == AUDIO, {}
    for place, name in enumerate(names):
        try:
            found[place] = waveform(name, processor.sampling_rate) if is_audio else read_image(name, "it", mode)
        except Exception as error:  # whatever a broken file makes a decoder raise
            kind = "a sound" if is_audio else "an image"
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
            print(f"{name} cannot be read as {kind}: {reason or type(error).__name__}", file=sys.stderr)
    return found


def _told(name: str, answer: dict[str, Any]) -> str:
    label = f"I don't know ({answer['label']}?)" if answer["abstain"] else answer["label"]
    chosen = answer["prediction_set"]
    return _row(
        name,
        label,
        f"{answer['score']:.3f}",
        f"{answer['uncertainty']:.3f}",
        f"{answer['epistemic']:.3f}",
        "" if chosen is None else ", ".join(chosen) or "none of the classes",
    )


def _row(name: str, label: str, score: str, total: str, epistemic: str, chosen: str) -> str:
    name = " ".join(name.split())
    name = name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
    return f"{name:<40}  {label:<28}  {score:>5}  {total:>6}  {epistemic:>9}  {chosen}".rstrip()
