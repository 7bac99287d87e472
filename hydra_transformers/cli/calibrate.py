"""`calibrate`: when a model abstains, and which classes its prediction sets name."""

from pathlib import Path

from .folders import check_is_new, note_training_rows
from .options import DataOptions, ModelArgument, OodData, best_device, choice, number, option, share


ABSTAIN = "When to abstain (default: never)"
DETECTORS = ("msp", "max_logit", "energy", "entropy", "gen", "mutual_information", "disagreement")
DETECTORS += ("knn", "mahalanobis", "relative_mahalanobis")


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
    label_risk: option(
        float | None,
        "of a multi-label model: at most this share of its decisions on single labels is wrong: 0.01",
        "SHARE",
        ABSTAIN,
        parser=share,
    ) = None,
    coverage: option(float | None, "at least this share is answered: 0.9", "SHARE", ABSTAIN, parser=share) = None,
    tpr: option(float | None, "this share of --ood-data is refused: 0.95", "SHARE", ABSTAIN, parser=share) = None,
    confidence: option(
        float | None,
        "guarantee it for new data with this probability; 0 for none (default: 0.9 for --risk, else 0)",
        "SHARE",
        ABSTAIN,
        parser=number(lambda value: 0 <= value < 1, "not a share between 0 and 1: pass 0.9 for 90 %"),
    ) = None,
    ood_data: OodData = None,
    detector: option(choice(DETECTORS), "the score that decides", panel=ABSTAIN) = "msp",
    alpha: option(
        float, "the share of sets that may miss the right class, or of intervals the right number", parser=share
    ) = 0.1,
) -> None:
    """Fit when a model abstains ("I don't know") and its sets of possible classes; saved with the model."""
    target = {"risk": risk, "label_risk": label_risk, "coverage": coverage, "tpr": tpr}
    target = {name: value for name, value in target.items() if value is not None}
    if len(target) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in target)
        raise ValueError(f"{flags} exclude each other: pass one of them")
    from .._io.files import written_whole
    from ..data.prediction import ZeroShotClassifier
    from ..data.processors import class_prompts, load_processor
    from ..hub.member_heads import copy_circuits
    from ..serving.saved_models import load_config, load_model
    from ..uncertainty import CalibratedClassifier
    from ..uncertainty import calibrate as fit

    config = load_config(model)
    check_is_new(output)
    processor = load_processor(model, config)
    rows = data.read(config, processor)
    note_training_rows(model, data.data, data.split)
    ood_rows = None if ood_data is None else data.read(config, processor, ood_data, labelled=False)
    prompts = class_prompts(config, processor, rows.class_names)
    loaded = load_model(model, best_device())
    calibration = fit(
        loaded if prompts is None else ZeroShotClassifier(loaded, prompts, rows.class_names),
        rows,
        ood_rows,
        target=target or None,
        confidence=confidence,
        detector=detector,
        alpha=alpha,
    )
    with written_whole(output) as unfinished:
        loaded.save_pretrained(unfinished)
        if isinstance(calibration.model, CalibratedClassifier):  # a Hydra classifier's decision is part of it
            calibration.model.save(unfinished)
        processor.save_pretrained(unfinished)
        copy_circuits(Path(model), unfinished)
    print(calibration)
    print(f"The calibrated model is in {output}. Next: hydra-transformers predict {output} ...")
