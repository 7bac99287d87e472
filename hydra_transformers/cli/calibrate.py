"""`calibrate`: when a model abstains, and which classes its prediction sets name."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .._io.records import RECORD, check_is_new, read_settings, record_settings
from .cascades import calibrated_cascade, check_can_be_recalibrated, check_cascade_target, then_option
from .folders import note_training_rows
from .options import (
    DATA_HELP,
    DataOptions,
    ModelArgument,
    best_device,
    data_name,
    named,
    number,
    option,
    share,
    switch,
    typed,
)


if TYPE_CHECKING:
    from torch import nn

    from ..uncertainty.calibration import Calibration


ABSTAIN = "When to abstain (without one it never does)"


@dataclass(kw_only=True)
class CalibrationData(DataOptions):
    """Which rows to read; none, where audited answers are enough."""

    data: option(str | None, f"{DATA_HELP}; with --add it may be left out", "NAME_OR_FOLDER", parser=data_name) = None


def calibrate(
    model: ModelArgument,
    data: CalibrationData,
    output: option(Path, "gets the calibrated model with its code and processor", "DIR"),
    risk: option(
        float | None,
        "at most this share of the answers is wrong: 0.05; of a regression model, their mean absolute error",
        "SHARE",
        ABSTAIN,
        parser=number(lambda value: value > 0, "not a positive number: pass 0.05 for 5 %"),
    ) = None,
    by: option(
        str | None,
        "prediction: every predicted class keeps --risk, not only their average; or a column that is known when "
        "predicting, such as site: each of its groups keeps it. Those with few rows are pooled",
        "COLUMN",
        ABSTAIN,
    ) = None,
    risk_of: option(
        list[tuple] | None,
        "--risk of the rows that are predicted LABEL, or with --by COLUMN of those of that group; may be repeated",
        "LABEL=SHARE",
        ABSTAIN,
        parser=named,
    ) = None,
    missed: option(
        tuple | None,
        "at most this share of the true rows of LABEL is answered as another label: fraud=0.01",
        "LABEL=SHARE",
        ABSTAIN,
        parser=named,
    ) = None,
    cost: option(
        list[tuple] | None,
        "the threshold of the least expected cost: --cost wrong=20 --cost review=1",
        "NAME=PRICE",
        ABSTAIN,
        parser=named,
    ) = None,
    coverage: option(float | None, "at least this share is answered: 0.9", "SHARE", ABSTAIN, parser=share) = None,
    confidence: option(
        float | None,
        "guarantee it for new data with this probability; 0 for none (default: 0.9 for --risk, else 0)",
        "SHARE",
        ABSTAIN,
        parser=number(lambda value: 0 <= value < 1, "not a share between 0 and 1: pass 0.9 for 90 %"),
    ) = None,
    alpha: option(
        float | None,
        "the share of prediction sets or intervals that may miss the label (default: 0.1); alone, for a model that "
        "never abstains",
        "SHARE",
        parser=share,
    ) = None,
    add: option(
        Path | None,
        "the file of `predict --audit` with labels: lowers the threshold of a calibrated model for --risk, by these "
        "answers, and by the rows of --data if there are any, which must be those that it was calibrated on",
        "FILE",
        ABSTAIN,
    ) = None,
    then: then_option("One promise for all answers: --risk. DIR gets MODEL and cascade.json", ABSTAIN) = None,
    verbose: switch("--verbose", "print all that was fitted and promised, and on which conditions") = False,
) -> None:
    """Fit when a model abstains ("I don't know") and its sets of classes; saved with the model."""
    if then:
        others = {"--coverage": coverage, "--by": by, "--risk-of": risk_of, "--missed": missed, "--cost": cost}
        check_cascade_target(others | {"--alpha": alpha, "--add": add, "--verbose": verbose or None})
        if risk is None:
            raise ValueError("--then makes a cascade, which promises a risk: pass --risk 0.05, for example")
    if risk is not None and coverage is not None:
        raise ValueError("--risk and --coverage exclude each other: pass one of them")
    if missed is not None and (risk is not None or coverage is not None or risk_of or by is not None):
        raise ValueError("--missed is a target by itself: leave out --risk, --risk-of, --coverage and --by")
    if risk_of and (risk is None or by == "prediction"):
        raise ValueError(
            "--risk-of names the risk of some labels: pass --risk for the others, and leave out --by prediction"
        )
    if cost and (risk is not None or coverage is not None or missed is not None or risk_of or by is not None):
        raise ValueError("--cost is a target by itself: leave out --risk, --risk-of, --missed, --coverage and --by")
    if risk is None and coverage is None and alpha is None and missed is None and not cost:
        raise ValueError(
            "there is no target, so that the model would never abstain: pass --risk 0.05 or --coverage 0.9, or "
            "--alpha alone for prediction sets or intervals"
        )
    if add is not None and (risk is None or alpha is not None or by is not None or risk_of):
        raise ValueError(
            "--add lowers the threshold of a calibrated model for a --risk: pass that, and neither --coverage nor "
            "--alpha"
        )
    if data.data is None and add is None:
        raise ValueError("there are no rows: pass --data")
    check_is_new(output)
    if then:
        _calibrate_cascade(model, then, data, output, risk, confidence)
        return
    if add is not None:
        check_can_be_recalibrated(model)
        calibration, loaded, processor = _recalibrated(model, data, add, risk, confidence)
    else:
        target: dict[str, Any] = {"risk": risk, "coverage": coverage}
        target = {name: value for name, value in target.items() if value is not None}
        if risk_of:
            target = {"risk": {label: _share_of(label, text) for label, text in risk_of} | {"*": risk}}
        if missed is not None:
            label, text = missed
            target = {"missed": _share_of(label, text), "label": label}
        if cost:
            from ..uncertainty.costs import parse_prices

            target = {"cost": parse_prices(cost)}
        settings = {"target": target or None, "by": by, "confidence": confidence}
        if alpha is not None:
            settings["alpha"] = alpha
        calibration, loaded, processor = _calibrated(model, data, settings)
    _save(calibration.model, loaded, processor, Path(model), output)
    print(calibration if verbose else "\n".join(calibration.summary))
    print(f"The calibrated model is in {output}. Next: hydra-transformers predict {output} ...")


def _calibrate_cascade(
    model: str, then: list[str], data: DataOptions, output: Path, risk: float, confidence: float | None
) -> None:
    """Calibrate several stages together; write the first one as it is, and the promise of all."""
    cascade = calibrated_cascade(model, then, data, risk, confidence)
    first = cascade.first_model
    _save(first.model, _model_inside(first.model), first.processor, Path(model), output)
    cascade.stages[0].source = str(output)
    cascade.save(output)
    print(*cascade.sentences, sep="\n")
    print(f"The cascade is in {output}. Next: hydra-transformers predict {output} {typed(then=then)} ...")


def _share_of(label: str, text: str) -> float:
    """Read the share in LABEL=SHARE."""
    try:
        return share(text)
    except typer.BadParameter as error:
        raise ValueError(f"the share of {label}: {error}") from error


def _calibrated(model: str, data: DataOptions, settings: dict[str, Any]) -> "tuple[Calibration, nn.Module, Any]":
    """Calibrate a model on data.

    Returns the calibration, the model that is saved with it, and its processor.
    """
    from ..serving.saved_models import open_model
    from ..uncertainty import calibrate as fit

    opened = open_model(model)
    rows = data.read(opened.info, opened.processor)
    note_training_rows(model, data, rows)
    loaded = opened.load_to_calibrate(best_device())
    classifier = opened.as_classifier(loaded, rows.class_names)
    return fit(classifier, rows, **settings), loaded, opened.processor


def _recalibrated(
    model: str, data: DataOptions, add: Path, risk: float, confidence: float | None
) -> "tuple[Calibration, nn.Module, Any]":
    """Lower the threshold of a calibrated model by audited answers.

    Returns the calibration, the model that is saved with it, and its processor.
    """
    from ..serving.saved_models import open_model
    from ..uncertainty.recalibration import recalibrate

    opened = open_model(model)
    calibrated = opened.load_with_decision(best_device())
    rows = None
    if data.data is not None:
        rows = data.read(opened.info, opened.processor)
        note_training_rows(model, data, rows)
    settings: dict[str, Any] = {"risk": risk}
    if confidence is not None:
        settings["confidence"] = confidence
    calibration = recalibrate(calibrated, add, rows, **settings)
    return calibration, _model_inside(calibrated), opened.processor


def _model_inside(calibrated: "nn.Module") -> "nn.Module":
    """Return the model of Transformers inside a calibrated one."""
    from ..uncertainty import CalibratedClassifier

    if not isinstance(calibrated, CalibratedClassifier):
        return calibrated
    loaded = calibrated.model
    return getattr(loaded, "model", loaded) if hasattr(loaded, "class_prompts") else loaded


def _save(calibrated: "nn.Module", loaded: "nn.Module", processor: Any, model: Path, output: Path) -> None:
    """Write the calibrated model with all that belongs to it."""
    from .._io.files import written_whole
    from ..hub.member_heads import copy_circuits
    from ..uncertainty import CalibratedClassifier

    with written_whole(output) as unfinished:
        loaded.save_pretrained(unfinished)
        if isinstance(calibrated, CalibratedClassifier):  # a Hydra classifier's decision is part of it
            calibrated.save(unfinished)
        processor.save_pretrained(unfinished)
        copy_circuits(model, unfinished)
        if (model / RECORD).exists():  # of the rows that it was trained on
            record = read_settings(model / RECORD)
            record_settings(unfinished, RECORD, {name: record.get(name) for name in ("data", "split", "rows")})
