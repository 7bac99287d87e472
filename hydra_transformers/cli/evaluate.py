"""`evaluate`: accuracy, calibration, abstention and out-of-distribution detection."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .folders import note_training_rows
from .options import BatchSize, DataOptions, ModelArgument, best_device, named, option


if TYPE_CHECKING:
    from torch import nn

    from ..data.loading import PreparedData
    from ..reports import Report
    from ..serving.saved_models import OpenModel

# The first one shows that a folder is of a report.
REPORT_FILES = ("report.json", "report.md", "report.html")
PLOTS = "plots"


def evaluate(
    model: ModelArgument,
    data: DataOptions,
    near: option(
        list[tuple] | None, "near out-of-distribution data; may be repeated", "NAME=DATA", parser=named
    ) = None,
    far: option(list[tuple] | None, "far out-of-distribution data; may be repeated", "NAME=DATA", parser=named) = None,
    corruptions: option(
        str | None,
        "evaluate on corrupted data, too: names with commas between them, of corruptions (gaussian_noise, typos, ...) "
        "or groups (noise, blur, colour, digital, characters, words), or all; or a standard set: imagenet-c, "
        "cifar10-c, cifar100-c (the Hub's), or its folder",
        "NAMES",
    ) = None,
    batch_size: BatchSize = 32,
    output: option(
        Path | None, "gets report.md, report.html, report.json and plots (default: MODEL/evaluation)", "DIR"
    ) = None,
) -> None:
    """Measure accuracy, calibration, abstention and out-of-distribution detection.

    The results are tables and plots.
    """
    from .._io.files import check_takes_files
    from ..reports import evaluate_uncertainty
    from ..serving.saved_models import open_model

    # Where the report goes, before any work.
    path = Path(model)
    opened = open_model(model)
    if output is None and not path.is_dir():
        raise ValueError(f"{model} is not a folder to write into: pass --output")
    output = output or path / "evaluation"
    check_takes_files(output)
    check_is_not_in_data(output, data.data)
    check_holds_no_other_report(output)

    # The model and the rows; reward models are judged by pairs.
    info = opened.info
    loaded = opened.load(best_device())
    ood_rows = None
    if getattr(info.config, "aggregate", None) is not None:
        from ..uncertainty.rewards import pairs_of

        if near or far or corruptions:
            raise ValueError("--near, --far and --corruptions are not for reward models: leave them out")
        rows = pairs_of(lambda column: replace(data, column=[column]).read(info, opened.processor, labelled=False))
    else:
        rows = data.read(info, opened.processor)
        note_training_rows(model, data, rows)
        ood_rows = data.read_groups(info, opened.processor, {"near": near or [], "far": far or []})
        loaded = _with_decision(loaded, opened, rows.class_names)
    corrupted = None
    if corruptions is not None:
        corrupted = _read_corrupted(corruptions, opened, rows, data.limit)

    # The report, which says what it is of.
    name = path.name
    if path.is_dir():
        name = path.resolve().name
    report = evaluate_uncertainty({name: loaded}, rows, ood_rows, corruptions=corrupted, batch_size=batch_size)
    report.about["data"] = str(data.data)
    if getattr(rows, "split", None):
        report.about["data"] += f", split {rows.split}"
    write_report(report, output)


def _read_corrupted(names: str, opened: "OpenModel", rows: "PreparedData", limit: int | None) -> Any:
    """Return rows with corruptions, or those of a standard set.

    names: of corruptions or their groups, or of a standard set or its folder
    """
    from ..shift import corrupted_sets, load_corrupted_sets
    from ..shift.standard_sets import STANDARD_SETS

    if names in STANDARD_SETS or Path(names).is_dir():
        return load_corrupted_sets(names, opened.info, limit=limit, processor=opened.processor)
    return corrupted_sets(rows, [name.strip() for name in names.split(",")])


def _with_decision(model: "nn.Module", opened: "OpenModel", classes: list[str]) -> "nn.Module":
    """Return a model with the decision saved beside it.

    Two towers become a classifier of the data's classes.
    """
    from ..uncertainty import CalibratedClassifier
    from ..uncertainty.calibrated_classifier import OtherClassesError

    model = opened.as_classifier(model, classes)
    if not CalibratedClassifier.is_saved_in(opened.name):
        return model
    try:
        return CalibratedClassifier.load(model, opened.name).eval()
    except OtherClassesError as error:
        print(f"note: {opened.name} is evaluated without its decision: {error}", file=sys.stderr)
        return model


def check_is_not_in_data(output: Path, data: str) -> None:
    """Raise, before any work, for a folder in a folder of data.

    A report and its plots would become rows.
    """
    if not Path(data).is_dir():
        return
    folder = Path(data).resolve()
    if folder in (output.resolve(), *output.resolve().parents):
        raise ValueError(f"output is {output}, inside the data {data}: pass a folder elsewhere")


def check_holds_no_other_report(output: Path) -> None:
    """Raise, before any work, for a folder whose files have a report's names and are not of one."""
    from .._io.files import parse_json

    names = [name for name in (*REPORT_FILES, PLOTS) if (output / name).exists()]
    if not names:
        return
    try:
        content = parse_json((output / REPORT_FILES[0]).read_bytes())
        is_report = isinstance(content, dict) and {"models", "groups"} <= content.keys()
    except (OSError, ValueError):
        is_report = False
    if not is_report:
        raise ValueError(f"{output} has {' and '.join(names)}, which `evaluate` did not write: pass another --output")


def write_report(report: "Report", output: Path) -> None:
    """Print a report and write all its forms."""
    from .._io.files import write_atomically
    from .._io.processes import on_one_process
    from .._io.progress import timed_step

    def write() -> None:
        report.to_json(output / REPORT_FILES[0])
        write_atomically(output / REPORT_FILES[1], report.to_markdown())
        print(report)
        try:
            with timed_step("plots and page written"):
                report.to_html(output / REPORT_FILES[2], pictures=report.plot(output / PLOTS))
        except ImportError as error:
            print(f"no plots: {error}")
        print(f"The report is in {output}.")

    on_one_process(write)
