"""`evaluate`: accuracy, calibration and out-of-distribution detection."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn
from transformers import PreTrainedConfig

from .._io.files import check_takes_files, write_atomically
from .._io.processes import on_one_process, rank_and_world_size
from .._io.progress import progress_bar
from ..data.batches import ChangedBatches, collate
from ..data.loading import PreparedData, check_has_variety
from ..data.prediction import ZeroShotClassifier
from ..data.processors import class_prompts, load_processor
from ..data.rows import FEW_ROWS, is_same_source, overlap
from ..models.detection import DETECTORS
from ..reports import Report, evaluate_uncertainty
from ..shift import SEVERITIES, corrupted_sets
from ..uncertainty import CalibratedClassifier, Detector, detector_by_name
from ..uncertainty.calibrated_classifier import OtherClassesError
from . import flags
from .folders import load_config, load_model
from .options import check_named_once, choice, device_named, named, option


def severities_in(text: str) -> list[int]:
    found = [part.strip() for part in text.split(",")]
    if not set(found) <= set(map(str, SEVERITIES)):
        raise typer.BadParameter(f"{text!r} is not a list of severities: pass some of 1 to 5, as 1,3,5")
    return [int(part) for part in found]


def evaluate(
    model: flags.ModelArgument,
    data: flags.PartOptions,
    compare: option(
        list[tuple] | None,
        "another model to evaluate, with its own processor; may be repeated",
        "NAME=MODEL",
        parser=named,
    ) = None,
    near: flags.NearData = None,
    far: flags.FarData = None,
    score: option(choice(DETECTORS), "OOD score; those that need a fit are fitted first") = "msp",
    fit_data: option(str | None, "data to fit the score on (default: --data)", "NAME_OR_FOLDER") = None,
    fit_split: option(str | None, "default: train") = None,
    corruptions: option(
        str | None,
        "evaluate on corrupted data, too: names with commas between them, of corruptions (gaussian_noise, "
        "jpeg_compression, typos, ...) or groups (noise, blur, colour, digital, characters, words), or all",
        "NAMES",
    ) = None,
    severities: option(
        list | None, "of the corruptions, from 1 to 5 (default: 1,2,3,4,5)", "N,N", parser=severities_in
    ) = None,
    batch_size: flags.BatchSize = 32,
    device: flags.Device = None,
    output: option(
        Path | None, "gets report.md, report.html, report.json and plots (default: MODEL/evaluation)", "DIR"
    ) = None,
) -> None:
    """Measure accuracy, calibration and out-of-distribution detection, as tables and plots."""
    groups = {"near": near or [], "far": far or []}
    for flag, given in {**groups, "compare": compare or []}.items():
        check_named_once([name for name, _ in given], f"--{flag}")
    if corruptions is None and severities is not None:
        raise ValueError("--severities is of --corruptions: name those, or all")
    detector = detector_by_name(score)
    for flag, value in (("--fit-data", fit_data), ("--fit-split", fit_split)):
        if value is not None and not detector.needs_fit:
            raise ValueError(f"{flag} is for scores that are fitted, {score} is not")
    sources = _models_by_name(model, compare or [])
    configs = {name: load_config(source) for name, source in sources.items()}
    _check_classes(configs)
    if output is None and not Path(model).is_dir():
        raise ValueError(f"{model} is not a folder to write into: pass --output")
    output = output or Path(model) / "evaluation"
    check_takes_files(output)
    device = device_named(device)
    processors = {name: load_processor(data.processor or source, configs[name]) for name, source in sources.items()}
    models = {name: load_model(source, device) for name, source in sources.items()}
    results = None
    for name, loaded in models.items():
        read = partial(data.read, configs[name], processors[name], quiet=bool(results))
        is_reward = getattr(configs[name], "aggregate", None) is not None
        rows = _pairs(data, configs[name], processors[name]) if is_reward else read(split=data.split, part=data.part)
        ood_rows = {
            group: {each: read(of, labelled=False) for each, of in sets} for group, sets in groups.items() if sets
        }
        if not results and not is_reward:
            _print_notes(data.data, rows, groups)
        prompts = None if is_reward else class_prompts(configs[name], processors[name], rows.class_names)
        classifier = loaded if prompts is None else ZeroShotClassifier(loaded, prompts, rows.class_names)
        classifier = _with_saved_decision(classifier, sources[name])
        detector = detector_by_name(score)
        if detector.needs_fit:
            fit_rows = read(fit_data or data.data, fit_split, labelled=detector.needs_labels, prefer=("train",))
            _check_fit_rows(fit_rows, fit_data or data.data, detector, data.data, rows, prompts is not None)
            detector.fit(classifier, with_progress(fit_rows, batch_size, f"{name}: fit of {score}"), batch_size)
            if not results:
                on_one_process(partial(detector.save, output))
        corrupted = {}
        if corruptions is not None:
            names = [each.strip() for each in corruptions.split(",")]
            corrupted = corrupted_sets(rows, names, severities or SEVERITIES)
        report = evaluate_uncertainty(
            {name: classifier},
            with_progress(rows, batch_size, f"{name}: in distribution"),
            with_progress(ood_rows, batch_size, name) or None,
            score=detector if detector.needs_fit else score,
            corruptions=with_progress(corrupted, batch_size, name) or None,
            batch_size=batch_size,
        )
        results = report if results is None else results.joined(report)
    report = results
    on_one_process(partial(_write, report, output))
    own_name = f" --report-model {next(iter(models))}" if compare else ""
    print(f"Next: hydra-transformers card {model} --report {output / 'report.json'}{own_name} --dataset ...")


def _write(report: Report, output: Path) -> None:
    report.to_json(output / "report.json")
    write_atomically(output / "report.md", report.to_markdown())
    print(report)
    try:
        report.to_html(output / "report.html", pictures=report.plot(output / "plots"))
        written = "report.md, report.html, report.json and plots"
    except ImportError as error:
        print(f"no plots: {error}")
        written = "report.md and report.json"
    print(f"{written} are in {output}.")


def with_progress(data: Any, batch_size: int, name: str) -> Any:
    """The batches of a data set, or of each in nested dicts, with a bar on a terminal where reading them takes long."""
    if rank_and_world_size()[1] > 1:
        return data  # of which each process loads its own rows only
    if isinstance(data, dict):
        return {key: with_progress(each, batch_size, f"{name} {key}") for key, each in data.items()}
    if isinstance(data, ChangedBatches):  # the reader applies the change, on its device
        return ChangedBatches(with_progress(data.data, batch_size, name), data.change)
    return _WithProgress(data, batch_size, name)


class _WithProgress:
    def __init__(self, data: Any, batch_size: int, name: str):
        self.loader, self.name = torch.utils.data.DataLoader(data, batch_size, collate_fn=collate), name

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        with progress_bar(len(self.loader), self.name, "batch") as bar:
            for batch in self.loader:
                yield batch
                bar.update()


# Models


def _models_by_name(model: str, compare: list[tuple[str, str]]) -> dict[str, str]:
    """Name -> folder or Hub name, the model itself first."""
    path = Path(model)
    own = path.resolve().name if path.is_dir() else path.name
    if own in dict(compare):
        raise ValueError(f"--compare calls another model {own}, which is the name of {model}: choose another name")
    return {own: model, **dict(compare)}


def _check_classes(configs: dict[str, PreTrainedConfig]) -> None:
    first = next(iter(configs))
    for name, config in configs.items():
        if getattr(config, "id2label", None) != getattr(configs[first], "id2label", None):
            raise ValueError(f"{name} has other classes than {first}: compare models of the same classes")


def _with_saved_decision(model: nn.Module, source: str) -> nn.Module:
    """With the decision that `calibrate` saved beside the model, if there is one; a Hydra classifier's is part of it."""
    if not CalibratedClassifier.is_saved_in(source):
        return model
    try:
        return CalibratedClassifier.load(model, source).eval()
    except OtherClassesError as error:
        print(f"note: {source} is evaluated without its decision: {error}", file=sys.stderr)
        return model


# Data


def _pairs(data: flags.PartOptions, config: PreTrainedConfig, processor: Any) -> dict[str, PreparedData]:
    """The preferred texts and the others, which reward models are judged by."""
    columns = ("chosen", "rejected")
    return {name: replace(data, text_column=name).read_part(config, processor, labelled=False) for name in columns}


def _check_fit_rows(
    rows: PreparedData, source: str, detector: Detector, test_source: str, test: PreparedData, is_zero_shot: bool
) -> None:
    """Refuses to fit a score on the rows that test it, or on other classes."""
    if is_same_source(source, test_source) and overlap(rows.split, test.split):
        raise ValueError(
            f"{detector.name} would be fitted on the rows that test it ({source}, {rows.split}): pass the training data with "
            "--fit-data or --fit-split"
        )
    if detector.needs_labels:
        check_has_variety(rows, source, "to fit the score on")
        if is_zero_shot and rows.class_names != test.class_names:
            raise ValueError(f"{source} has other classes than {test_source}: fit the score on data with the same")


def _print_notes(name: str, rows: PreparedData, groups: dict[str, list[tuple[str, str]]]) -> None:
    """What makes the figures less meaningful."""
    notes = []
    if len(rows) < 2:
        notes.append(f"{name} gives 1 row, so no figure means anything")
    elif len(set(map(str, rows.labels))) < 2:
        notes.append(f"all {len(rows):,} rows of {name} have the same label")
    elif len(rows) < FEW_ROWS and not any("rows to evaluate on" in note for note in rows.notes):
        notes.append(f"only {len(rows)} rows to evaluate on: differences of a few points may be chance")
    for group, sets in groups.items():
        same = [each for each, source in sets if is_same_source(source, name)]
        notes += [f"--{group} {each} is the data itself, so no score can separate them" for each in same]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
