"""`evaluate`: accuracy, calibration and out-of-distribution detection."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import PreTrainedConfig

from .._io.files import write_atomically
from .._io.progress import progress_bar
from ..data.batches import ChangedBatches, collate
from ..data.loading import PreparedData
from ..data.prediction import ZeroShotClassifier
from ..data.processors import class_prompts, load_processor
from ..data.rows import FEW_ROWS, is_same_source
from ..models.auto import is_zero_shot
from ..models.detection import DETECTORS
from ..reports.evaluation import evaluate_uncertainty
from ..reports.report import UncertaintyReport
from ..uncertainty import CalibratedClassifier, detector_by_name
from ..uncertainty.calibrated_classifier import OtherClassesError
from .folders import check_takes_files, load_config, load_model
from .options import (
    BatchSize,
    Device,
    FarData,
    ModelArgument,
    NearData,
    PartOptions,
    check_named_once,
    choice,
    device_named,
    named,
    option,
)
from .rows import check_can_be_learnt_from, overlap


SEVERITIES = (1, 2, 3, 4, 5)


def _severities(text: str) -> list[int]:
    found = [part.strip() for part in text.split(",")]
    if not set(found) <= set(map(str, SEVERITIES)):
        raise typer.BadParameter(f"{text!r} is no list of severities: pass some of 1 to 5, as 1,3,5")
    return [int(part) for part in found]


class WithProgress:
    """Batches of a data set, with a bar on a terminal where reading them takes long."""

    def __init__(self, data: Any, batch_size: int, name: str):
        self.loader, self.name = torch.utils.data.DataLoader(data, batch_size, collate_fn=collate), name

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        with progress_bar(len(self.loader), self.name, "batch") as bar:
            for batch in self.loader:
                yield batch
                bar.update()


def _with_progress(data: Any, batch_size: int, name: str) -> Any:
    """A bar on data that may be changed; the change is left to whoever reads it, who knows the device."""
    if isinstance(data, ChangedBatches):
        return ChangedBatches(WithProgress(data.data, batch_size, name), data.change)
    return WithProgress(data, batch_size, name)


def evaluate(
    model: ModelArgument,
    data: PartOptions,
    compare: Annotated[
        list[tuple] | None,
        option("another model, judged as well, with its own processor; may be repeated", "NAME=MODEL", parser=named),
    ] = None,
    near: NearData = None,
    far: FarData = None,
    score: Annotated[
        choice(DETECTORS), option("OOD score; those that know the training data are fitted first")
    ] = "msp",
    fit_data: Annotated[
        str | None, option("data to fit the score on (default: that of --data)", "NAME_OR_FOLDER")
    ] = None,
    fit_split: Annotated[str | None, option("default: train")] = None,
    corruptions: Annotated[
        str | None,
        option(
            "judge on the corrupted data, too: names with commas between them, of corruptions (gaussian_noise, "
            "jpeg_compression, typos, ...) or groups (noise, blur, colour, digital, characters, words), or all",
            "NAMES",
        ),
    ] = None,
    severities: Annotated[
        list | None, option("of the corruptions, of 1 to 5 (default: 1,2,3,4,5)", "N,N", parser=_severities)
    ] = None,
    batch_size: BatchSize = 32,
    device: Device = None,
    output: Annotated[
        Path | None, option("gets report.md, report.html, report.json and plots (default: MODEL/evaluation)", "DIR")
    ] = None,
) -> None:
    """Judge accuracy, calibration and out-of-distribution detection, as tables and plots."""
    groups = {"near": near or [], "far": far or []}
    for group, sets in groups.items():
        check_named_once([name for name, _ in sets], f"--{group}")
    check_named_once([name for name, _ in compare or []], "--compare")
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
        raise ValueError(f"{model} is no folder to write into: pass --output")
    output = output or Path(model) / "evaluation"
    check_takes_files(output)
    device = device_named(device)
    processors = {name: load_processor(data.processor or source, configs[name]) for name, source in sources.items()}
    rows, foreign, fit_rows, corrupted = {}, {}, {}, {}
    for place, name in enumerate(sources):
        read = partial(data.read, configs[name], processors[name], quiet=place > 0)
        rows[name] = read(split=data.split, part=data.part)
        foreign[name] = {
            group: {each: read(source, labelled=False) for each, source in sets}
            for group, sets in groups.items()
            if sets
        }
    for place, name in enumerate(sources):
        if detector.needs_fit:
            read = partial(data.read, configs[name], processors[name], quiet=place > 0)
            fit_rows[name] = _fit_rows(
                read, fit_data or data.data, fit_split, detector, configs[name], data, rows[name]
            )
        corrupted[name] = _corrupted(rows[name], corruptions, severities, processors[name])
    _tell_what_says_little(data.data, rows[next(iter(sources))], groups)
    models = {name: load_model(source, device) for name, source in sources.items()}
    results = {}
    for place, (name, loaded) in enumerate(models.items()):
        prompts = class_prompts(configs[name], processors[name], rows[name].class_names)
        judged = loaded if prompts is None else ZeroShotClassifier(loaded, prompts, rows[name].class_names)
        judged = _with_saved_decision(judged, sources[name])
        detector = detector_by_name(score)
        if detector.needs_fit:
            detector.fit(judged, WithProgress(fit_rows[name], batch_size, f"{name}: fit of {detector.name}"))
            if place == 0:
                detector.save(output)
        results |= evaluate_uncertainty(
            {name: judged},
            WithProgress(rows[name], batch_size, f"{name}: in distribution"),
            {
                group: {each: WithProgress(found, batch_size, f"{name}: {each}") for each, found in sets.items()}
                for group, sets in foreign[name].items()
            }
            or None,
            score=detector if detector.needs_fit else score,
            corruptions={
                corruption: {
                    severity: _with_progress(found, batch_size, f"{name}: {corruption} {severity}")
                    for severity, found in sweep.items()
                }
                for corruption, sweep in corrupted[name].items()
            },
        ).models
    report = UncertaintyReport(score=score, models=results)
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
    own_name = f" --report-model {next(iter(models))}" if compare else ""
    print(f"Next: hydra-transformers card {model} --report {output / 'report.json'}{own_name} --dataset ...")


def _with_saved_decision(model: nn.Module, source: str) -> nn.Module:
    """With the decision that `calibrate` saved beside the model, where there is one: a Hydra classifier's is a part of it."""
    if not CalibratedClassifier.is_saved_in(source):
        return model
    try:
        return CalibratedClassifier.load(model, source).eval()
    except OtherClassesError as error:
        print(f"note: {source} is judged without its decision: {error}", file=sys.stderr)
        return model


def _models_by_name(model: str, compare: list[tuple[str, str]]) -> dict[str, str]:
    """Name -> folder or Hub name, the model itself first; refuses a name that stands for two things."""
    path = Path(model)
    own = path.resolve().name if path.is_dir() else path.name
    if own in dict(compare):
        raise ValueError(f"--compare calls another model {own}, as {model} itself is called: name it otherwise")
    return {own: model, **dict(compare)}


def _check_classes(configs: dict[str, PreTrainedConfig]) -> None:
    first = next(iter(configs))
    for name, config in configs.items():
        if getattr(config, "id2label", None) != getattr(configs[first], "id2label", None):
            raise ValueError(f"{name} has other classes than {first}: they cannot be judged on the same labels")


def _corrupted(
    rows: PreparedData, corruptions: str | None, severities: list[int] | None, processor: Any
) -> dict[str, dict[int, Any]]:
    """The corrupted data that was asked for, by corruption and severity."""
    if corruptions is None:
        return {}
    from ..shift import corrupted_sets

    scale = {} if rows.kind == "text" else {"processor": processor}
    names = [name.strip() for name in corruptions.split(",")]
    return corrupted_sets(rows, names, severities or SEVERITIES, **scale)


def _fit_rows(
    read: Callable[..., PreparedData],
    source: str,
    split: str | None,
    detector: Any,
    config: PreTrainedConfig,
    data: PartOptions,
    judged: PreparedData,
) -> PreparedData:
    """The rows that the score is fitted on; refuses those that it is judged on."""
    rows = read(source, split, labelled=detector.needs_labels, prefer=("train",))
    if is_same_source(source, data.data) and overlap(rows.split, judged.split):
        raise ValueError(
            f"{detector.name} would be fitted on the rows that it is judged on ({source}, {rows.split}): pass the training "
            "data with --fit-data or --fit-split"
        )
    if detector.needs_labels:
        check_can_be_learnt_from(rows, source, "to fit the score on")
        if is_zero_shot(config) and rows.class_names != judged.class_names:
            raise ValueError(f"{source} has other classes than {data.data}: fit the score on data with the same")
    return rows


def _tell_what_says_little(name: str, rows: PreparedData, groups: dict[str, list[tuple[str, str]]]) -> None:
    if len(rows) < 2:
        print(f"note: {name} gives 1 row, of which no figure means anything", file=sys.stderr)
    elif len(set(rows.labels)) < 2:
        print(f"note: all {len(rows):,} rows of {name} have the same label", file=sys.stderr)
    elif len(rows) < FEW_ROWS and not any("rows judge" in note for note in rows.notes):
        print(f"note: only {len(rows)} rows judge: differences of a few points may be chance", file=sys.stderr)
    for group, sets in groups.items():
        for each, source in sets:
            if is_same_source(source, name):
                print(f"note: --{group} {each} is the data itself, so it cannot be told from it", file=sys.stderr)
