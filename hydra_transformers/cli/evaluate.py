"""`evaluate`: accuracy, calibration, abstention and out-of-distribution detection."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .folders import note_training_rows
from .options import (
    BatchSize,
    DataOptions,
    FarData,
    ModelArgument,
    NearData,
    best_device,
    check_named_once,
    choice,
    named,
    option,
)


if TYPE_CHECKING:
    from torch import nn

    from ..data.loading import PreparedData
    from ..reports import Report

SCORES = ("msp", "max_logit", "energy", "entropy", "gen", "mutual_information", "disagreement")


def evaluate(
    model: ModelArgument,
    data: DataOptions,
    compare: option(
        list[tuple] | None,
        "another model to evaluate, with its own processor; may be repeated",
        "NAME=MODEL",
        parser=named,
    ) = None,
    near: NearData = None,
    far: FarData = None,
    score: option(choice(SCORES), "the OOD score") = "msp",
    corruptions: option(
        str | None,
        "evaluate on corrupted data, too: names with commas between them, of corruptions (gaussian_noise, typos, ...) or "
        "groups (noise, blur, colour, digital, characters, words), or all",
        "NAMES",
    ) = None,
    batch_size: BatchSize = 32,
    output: option(
        Path | None, "gets report.md, report.html, report.json and plots (default: MODEL/evaluation)", "DIR"
    ) = None,
) -> None:
    """Measure accuracy, calibration, abstention and out-of-distribution detection, as tables and plots."""
    from .._io.files import check_takes_files
    from ..reports import evaluate_uncertainty
    from ..serving.saved_models import load_config

    for flag, pairs in {"near": near, "far": far, "compare": compare}.items():
        check_named_once([name for name, _ in pairs or ()], f"--{flag}")
    path = Path(model)
    own_name = path.resolve().name if path.is_dir() else path.name
    sources = {own_name: model, **dict(compare or [])}
    if len(sources) <= len(compare or []):
        raise ValueError(
            f"--compare calls another model {own_name}, which is the name of {model}: choose another name"
        )
    configs = {name: load_config(source) for name, source in sources.items()}
    if output is None and not path.is_dir():
        raise ValueError(f"{model} is not a folder to write into: pass --output")
    output = output or path / "evaluation"
    check_takes_files(output)
    note_training_rows(model, data.data, data.split)
    report = None
    for name, source in sources.items():
        classifier, rows, ood_rows = _read(data, source, configs[name], near, far, quiet=report is not None)
        corrupted = {}
        if corruptions is not None:
            from ..shift import corrupted_sets

            corrupted = corrupted_sets(rows, [each.strip() for each in corruptions.split(",")])
        settings = {} if score == "msp" else {"score": score}
        evaluated = evaluate_uncertainty(
            {name: classifier}, rows, ood_rows, corruptions=corrupted or None, batch_size=batch_size, **settings
        )
        report = evaluated if report is None else report.joined(evaluated)
    write_report(report, output)


def _read(
    data: DataOptions, source: str, config: Any, near: list | None, far: list | None, quiet: bool
) -> tuple["nn.Module", "PreparedData | dict[str, PreparedData]", dict | None]:
    """A model with its saved decision, and all data sets as it reads them."""
    from ..data.prediction import ZeroShotClassifier
    from ..data.processors import class_prompts, load_processor
    from ..serving.saved_models import load_model
    from ..uncertainty import CalibratedClassifier
    from ..uncertainty.calibrated_classifier import OtherClassesError

    processor = load_processor(source, config)
    model = load_model(source, best_device())
    if getattr(config, "aggregate", None) is not None:  # reward models are judged by pairs
        pairs = {}
        for column in ("chosen", "rejected"):
            options = DataOptions(data=data.data, split=data.split, limit=data.limit, column=[column])
            pairs[column] = options.read(config, processor, labelled=False, quiet=quiet)
        return model, pairs, None
    rows = data.read(config, processor, quiet=quiet)
    ood_rows = data.read_groups(config, processor, near, far, quiet)
    prompts = class_prompts(config, processor, rows.class_names)
    if prompts is not None:
        model = ZeroShotClassifier(model, prompts, rows.class_names)
    if CalibratedClassifier.is_saved_in(source):  # beside a model that is not a Hydra classifier
        try:
            model = CalibratedClassifier.load(model, source).eval()
        except OtherClassesError as error:
            print(f"note: {source} is evaluated without its decision: {error}", file=sys.stderr)
    return model, rows, ood_rows


def write_report(report: "Report", output: Path) -> None:
    """Prints a report and writes all its forms."""
    from .._io.files import write_atomically
    from .._io.processes import on_one_process

    def write() -> None:
        report.to_json(output / "report.json")
        write_atomically(output / "report.md", report.to_markdown())
        print(report)
        try:
            report.to_html(output / "report.html", pictures=report.plot(output / "plots"))
        except ImportError as error:
            print(f"no plots: {error}")
        print(f"The report is in {output}.")

    on_one_process(write)
