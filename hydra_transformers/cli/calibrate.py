"""`calibrate`: when a model abstains, and which classes its prediction sets name."""

import shutil
import sys
from pathlib import Path

from .._io.files import written_whole
from ..data.loading import remember_max_length
from ..data.prediction import ZeroShotClassifier
from ..data.processors import class_prompts, load_processor
from ..data.rows import is_same_source
from ..hub.member_heads import copy_circuits, load_circuits
from ..models.detection import DETECTORS
from ..uncertainty import CalibratedClassifier, detector_by_name
from ..uncertainty import calibrate as fit
from ..uncertainty.abstention import check_share
from . import flags
from .evaluate import with_progress
from .folders import FUSE_SETTINGS, check_is_new, load_config, load_model
from .options import choice, device_named, option, positive, share


ABSTAIN, SETS = "When to abstain (default: never)", "Prediction sets"
DECIDING_DETECTORS = tuple(name for name in DETECTORS if name != "vim")


def calibrate(
    model: flags.ModelArgument,
    data: flags.PartOptions,
    output: option(Path, "gets the calibrated model with its code, processor and circuits", "DIR"),
    risk: option(
        float | None,
        "at most this share of the answers is wrong: 0.05; of a regression model, their mean absolute error",
        "SHARE",
        ABSTAIN,
        parser=positive,
    ) = None,
    label_risk: option(
        float | None,
        "of a model of several labels: at most this share of its decisions on single labels is wrong: 0.01",
        "SHARE",
        ABSTAIN,
        parser=share,
    ) = None,
    coverage: option(float | None, "at least this share is answered: 0.9", "SHARE", ABSTAIN, parser=share) = None,
    tpr: option(float | None, "this share of --ood-data is refused: 0.95", "SHARE", ABSTAIN, parser=share) = None,
    confidence: option(
        float | None, "guarantee it for new rows with this probability: 0.95", "SHARE", ABSTAIN, parser=share
    ) = None,
    ood_data: option(
        str | None, "rows from elsewhere, for --tpr, or to see how many are refused", "NAME_OR_FOLDER", ABSTAIN
    ) = None,
    detector: option(choice(DECIDING_DETECTORS), "the score that decides", panel=ABSTAIN) = "msp",
    training_data: option(
        str | None, "rows to fit a detector that needs a fit (default: half of --data)", "NAME_OR_FOLDER", ABSTAIN
    ) = None,
    alpha: option(
        float,
        "how many sets may miss the right class, or intervals the right number; of several labels, the share that is missed",
        "SHARE",
        SETS,
        parser=share,
    ) = 0.1,
    sets: option(choice(("lac", "aps", "raps", "none")), "the kind of sets", panel=SETS) = "lac",
    batch_size: flags.BatchSize = 32,
    device: flags.Device = None,
) -> None:
    """Fit when a model says that it does not know, and which classes it may be; saved with the model."""
    target = {"risk": risk, "label_risk": label_risk, "coverage": coverage, "tpr": tpr}
    target = {name: value for name, value in target.items() if value is not None}
    if len(target) > 1:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in target)
        raise ValueError(f"{named} exclude each other: pass one of them")
    for flag, value in (("--confidence", confidence), ("--ood-data", ood_data)):
        if not target and value is not None:
            raise ValueError(f"{flag} is about when to abstain: pass --risk, --coverage or --tpr, too")
    if tpr is not None and ood_data is None:
        raise ValueError("--tpr is a share of rows from elsewhere: name them with --ood-data")
    if ood_data is not None and is_same_source(ood_data, data.data):
        raise ValueError(f"--ood-data is the data itself, {data.data}: name rows from elsewhere")
    if training_data is not None and not detector_by_name(detector).needs_fit:
        raise ValueError(f"the detector {detector} is not fitted: leave --training-data out, or name another detector")
    config = load_config(model)
    if label_risk is not None and getattr(config, "problem_type", None) != "multi_label_classification":
        raise ValueError(f"--label-risk is for models of several labels, {model} is none: pass --risk")
    if risk is not None and getattr(config, "problem_type", None) != "regression":
        check_share(risk, "--risk")
    check_is_new(output)
    device = device_named(device)
    folder = Path(model)
    if folder.is_dir():
        load_circuits(folder, [config])  # refuses circuits that a card could not describe
    processor = load_processor(data.processor or model, config)
    if data.max_length is not None:  # saved with the model, so that it reads texts as it was calibrated
        remember_max_length(processor, config, data.max_length, data.max_length)
    rows = data.read_part(config, processor)
    if str(rows.split).startswith("train") and data.part in (None, "training"):
        print(
            f"note: these rows are of the split {rows.split}: if the model was trained on them, no guarantee holds",
            file=sys.stderr,
        )
    others = {}
    if ood_data is not None:
        prefer = ("test", "validation", "train")
        others["ood_data"] = data.read(config, processor, ood_data, labelled=False, prefer=prefer)
    if training_data is not None:
        others["train_data"] = data.read(config, processor, training_data, prefer=("train",))
    prompts = class_prompts(config, processor, rows.class_names)
    if prompts is not None and "train_data" in others and others["train_data"].class_names != rows.class_names:
        raise ValueError(f"{training_data} has other classes than {data.data}: fit the detector on the same classes")
    loaded = load_model(model, device)
    calibration = fit(
        loaded if prompts is None else ZeroShotClassifier(loaded, prompts, rows.class_names),
        with_progress(rows, batch_size, data.data),
        target=target or None,
        confidence=confidence,
        detector=detector,
        alpha=None if sets == "none" else alpha,
        sets="lac" if sets == "none" else sets,
        **{name: with_progress(each, batch_size, name) for name, each in others.items()},
    )
    with written_whole(output) as unfinished:
        loaded.save_pretrained(unfinished)
        if isinstance(calibration.model, CalibratedClassifier):  # a Hydra classifier's decision is part of it
            calibration.model.save(unfinished)
        processor.save_pretrained(unfinished)
        if (folder / FUSE_SETTINGS).exists():
            shutil.copy(folder / FUSE_SETTINGS, unfinished)
        copy_circuits(folder, unfinished)
    print(calibration)
    print(f"The calibrated model is in {output}. Next: hydra-transformers predict {output} ...")
