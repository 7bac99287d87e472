"""`calibrate`: when a model abstains, and which classes its prediction sets name."""

from pathlib import Path

from .._io.records import RECORD, check_is_new, read_settings, record_settings
from .folders import note_training_rows
from .options import DataOptions, ModelArgument, best_device, number, option, share


ABSTAIN = "When to abstain (without one it never does)"


def calibrate(
    model: ModelArgument,
    data: DataOptions,
    output: option(Path, "gets the calibrated model with its code and processor", "DIR"),
    risk: option(
        float | None,
        "at most this share of the answers is wrong: 0.05; of a regression model, their mean absolute error",
        "SHARE",
        ABSTAIN,
        parser=number(lambda value: value > 0, "not a positive number: pass 0.05 for 5 %"),
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
        "the share of prediction sets or intervals that may miss the label (default: 0.1); alone, for a model that never abstains",
        "SHARE",
        parser=share,
    ) = None,
) -> None:
    """Fit when a model abstains ("I don't know") and its sets of possible classes; saved with the model."""
    if risk is not None and coverage is not None:
        raise ValueError("--risk and --coverage exclude each other: pass one of them")
    if risk is None and coverage is None and alpha is None:
        raise ValueError(
            "there is no target, so that the model would never abstain: pass --risk 0.05 or --coverage 0.9, or --alpha alone for "
            "prediction sets or intervals"
        )
    check_is_new(output)
    target = {name: value for name, value in {"risk": risk, "coverage": coverage}.items() if value is not None}
    from .._io.files import written_whole
    from ..data.processors import class_prompts, load_processor
    from ..data.zero_shot import ZeroShotClassifier
    from ..hub.member_heads import copy_circuits
    from ..serving.saved_models import load_config, load_model
    from ..uncertainty import CalibratedClassifier
    from ..uncertainty import calibrate as fit

    config = load_config(model)
    processor = load_processor(model, config)
    rows = data.read(config, processor)
    note_training_rows(model, data, rows)
    prompts = class_prompts(config, processor, rows.class_names)
    loaded = load_model(model, best_device())
    classifier = loaded if prompts is None else ZeroShotClassifier(loaded, prompts, rows.class_names)
    settings = {"target": target or None, "confidence": confidence}
    if alpha is not None:
        settings["alpha"] = alpha
    calibration = fit(classifier, rows, **settings)
    with written_whole(output) as unfinished:
        loaded.save_pretrained(unfinished)
        if isinstance(calibration.model, CalibratedClassifier):  # a Hydra classifier's decision is part of it
            calibration.model.save(unfinished)
        processor.save_pretrained(unfinished)
        copy_circuits(Path(model), unfinished)
        if (Path(model) / RECORD).exists():  # of the rows that it was trained on
            record = read_settings(Path(model) / RECORD)
            record_settings(unfinished, RECORD, {name: record.get(name) for name in ("data", "split", "rows")})
    print(calibration)
    print(f"The calibrated model is in {output}. Next: hydra-transformers predict {output} ...")
