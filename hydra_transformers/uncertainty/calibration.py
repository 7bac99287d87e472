"""Fits a decision on held-out data: a temperature, a detector with its threshold, and prediction sets."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import check_is_data
from ..data.loading import load_if_named
from ..data.prediction import classes_of, config_of, device_of, zero_shot_in
from ..data.tags import collect_words
from ..data.tasks import ONE_CLASS, REGRESSION, REWARDS, SEVERAL_LABELS, TOKENS, WORDS, check_task
from ..models.decision import Decision, digest_of, dtype_of, uncalibrated
from ..models.task_decisions import decision_of
from .abstention import Abstention, check_share, check_target
from .calibrated_classifier import CalibratedClassifier, num_parameters, prompts_of
from .conformal import ConformalSets, check_method
from .decomposition import decompose
from .detectors import Detector, detector_by_name
from .features import AnswerReader, collect_answers
from .label_decisions import check_label_target, fit_labels
from .regression import check_number_target, fit_intervals
from .rewards import fit_relevance
from .tagging import fit_entities
from .task_calibration import HeldOutRows, Rows, TaskCalibration, TaskFit
from .temperature import TemperatureScaling, fit_temperature


LEAST_ROWS = 20  # half of fewer rows fits nothing
SETTINGS_OF_SETS = ("method", "thresholds", "by_class", "k_reg", "penalty", "allow_empty")


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`.

    model: the calibrated model: the Hydra itself, or a `CalibratedClassifier` around another model
    temperature: of the ensemble's answer
    detector: the score that it abstains by
    abstention: the threshold, with its effect and promise; None without a target
    sets: the conformal prediction sets; None without alpha
    rows: how many fitted the temperature and the detector, and how many the threshold and the sets
    """

    model: nn.Module
    temperature: float
    detector: Detector
    abstention: Abstention | None
    sets: ConformalSets | None
    rows: tuple[int, int]

    @property
    def sentences(self) -> list[str]:
        found = [
            f"The ensemble's answer has the temperature {self.temperature:.3g}; the detector is {self.detector.description}.",
            f"Of {sum(self.rows)} rows, a random half ({self.rows[0]}) fitted these, and the other half ({self.rows[1]}) what "
            "follows: promises need rows that nothing else was fitted on.",
        ]
        return found + [each.sentence for each in (self.abstention, self.sets) if each is not None]

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def calibrate(
    model: nn.Module,
    data: Any,
    ood_data: Any = None,
    *,
    target: Mapping[str, float] | None = None,
    confidence: float | None = None,
    detector: str | Detector = "msp",
    train_data: Any = None,
    alpha: float | None = 0.1,
    sets: str = "lac",
    temperature: bool = True,
    batch_size: int = 32,
    seed: int = 0,
) -> Calibration | TaskCalibration:
    """Fits what turns a model's numbers into decisions, and makes it part of the model.

    This is written for models that choose one class. Others are asked in the same way, by `data`, `ood_data`, `target`,
    `confidence` and `alpha`; what these then mean, docs/tasks.md says task by task.

    Args:
        model: a Hydra, which is changed: its config and weights then carry the decision, which applies wherever the model is
            loaded. Or any classifier or baseline, which is left as it is and wrapped.
        data: held-out, labelled rows that the model was not trained on; or the name, folder or file of a data set, which
            `load_data` reads for the model, as with `ood_data` and `train_data`. A random half fits the temperature, and the
            detector if it needs a fit and there is no `train_data`; the other half fits the threshold and the sets, whose
            promises need rows that nothing else was fitted on.
        ood_data: out-of-distribution rows, for `target={"tpr": ...}`, or to see how many of them a threshold refuses.
        target: when to abstain, one of {"risk": 0.05} (at most 5 % of the answers are wrong), {"coverage": 0.9} (at least
            90 % are answered) and {"tpr": 0.95} (95 % of `ood_data` are refused); None for never. See `Abstention.fit`.
        confidence: of a promise about new rows, made from half of `data`; see there.
        detector: a name (see `detector_by_name`), or a detector, which is fitted anew if it needs a fit.
        train_data: the rows that a detector is fitted on, best the training data.
        alpha: the share of prediction sets that may miss the right class; None for no sets.
        sets: "lac", "aps" or "raps", see `ConformalSets.fit`.
        temperature: whether to fit one; otherwise it is 1.
        batch_size: rows per batch, if data comes in rows.
        seed: of the halves.
    """
    inner = model.model if isinstance(model, CalibratedClassifier) else model
    task = check_task(inner, "model", (ONE_CLASS, *FITS))
    if task != ONE_CLASS:
        given = {"detector": detector, "sets": sets, "temperature": temperature, "train_data": train_data}
        for name, value in given.items():
            if value != inspect.signature(calibrate).parameters[name].default:
                raise ValueError(
                    f"{name} is for models that choose one class, this one is made for {WORDS[task]}: leave it out"
                )
        return _calibrate_task(task, inner, data, ood_data, target, confidence, alpha, batch_size, seed)
    if isinstance(detector, Detector):
        chosen = detector_by_name(detector.name, by=detector.by, multi_label=detector.multi_label, **detector.settings)
    else:
        chosen = detector_by_name(detector)
    _check_model(inner, chosen, sets if alpha is not None else None)
    data = load_if_named(data, inner, labelled=True)
    ood_data = load_if_named(ood_data, inner, labelled=False)
    train_data = load_if_named(train_data, inner, split="train")
    _check_fit(chosen, target, confidence, alpha, {"data": data, "ood_data": ood_data, "train_data": train_data})
    hydra = inner if hasattr(type(inner), "backbone_rules") else None
    # An earlier decision is off meanwhile, and stays in place should anything fail.
    with nullcontext() if hydra is None else uncalibrated(hydra):
        logits, features, labels = collect_answers(inner, data, batch_size, with_features=chosen.reads_features)
        first, second = _halves(labels, seed)
        scaling = fit_temperature(logits[first], labels[first]) if temperature else TemperatureScaling(1.0)
        if chosen.needs_fit and train_data is not None:
            chosen.fit(scaling.wrap(inner), train_data, batch_size)
        elif chosen.needs_fit:
            chosen.fit_answers(scaling(logits[first]), _rows(features, first), labels[first])
        [value] = scaling.temperature
        decision = _unfinished_decision(chosen, scaling, inner)
        ood_scores = None if ood_data is None else _scores(decision, inner, ood_data, batch_size)
    scaled, abstention, conformal = scaling(logits[second]), None, None
    if target is not None:
        scores = decision(logits[second], _rows(features, second)).detector_score
        right = decompose(scaled).prediction == labels[second]
        try:
            abstention = Abstention.fit(scores, right, ood_scores, **target, confidence=confidence, score=chosen.name)
        except ValueError as error:
            raise ValueError(
                f"{error} (these {len(second)} rows are half of data: the other half fits the temperature and the detector, and "
                "a promise needs rows that nothing else was fitted on)"
            ) from error
        decision.settings["threshold"] = abstention.to_dict()["threshold"]
    if alpha is not None:
        conformal = ConformalSets.fit(scaled, labels[second], alpha, sets)
        decision.settings["sets"] = {name: conformal.to_dict()[name] for name in SETTINGS_OF_SETS}
        decision.settings["alpha"] = conformal.alpha
    # Nothing fails from here on, so the model has its earlier decision or the new one.
    remember_weights(decision, inner)
    decision.to(device_of(inner))
    result = hydra or CalibratedClassifier(inner, decision)
    calibration = Calibration(result, value, chosen, abstention, conformal, (len(first), len(second)))
    decision.settings["sentences"] = calibration.sentences
    if hydra is not None:
        hydra.decision, hydra.config.decision = decision, decision.settings
    return calibration


# Tasks that do not choose one class.
FITS: dict[str, TaskFit] = {
    REGRESSION: TaskFit(fit_intervals, check_number_target),
    REWARDS: TaskFit(fit_relevance),
    SEVERAL_LABELS: TaskFit(fit_labels, check_label_target),
    TOKENS: TaskFit(fit_entities, collect=collect_words),
}


def _calibrate_task(
    task: str,
    model: nn.Module,
    data: Any,
    ood_data: Any,
    target: Mapping[str, float] | None,
    confidence: float | None,
    alpha: float | None,
    batch_size: int,
    seed: int,
) -> TaskCalibration:
    """`calibrate` for a task of `FITS`."""
    fit = FITS[task]
    data = load_if_named(data, model, labelled=True)
    ood_data = load_if_named(ood_data, model, labelled=False)
    check_promises(target, confidence, alpha, {"data": data, "ood_data": ood_data}, fit.check_target)
    hydra = model if hasattr(type(model), "backbone_rules") else None
    with nullcontext() if hydra is None else uncalibrated(hydra):
        answers, labels = fit.collect(model, data, batch_size)
        first, second = (Rows(answers[half], labels[half]) for half in _halves(labels, seed))
        ood = None if ood_data is None else fit.collect(model, ood_data, batch_size)[0]
    about = {"classes": classes_of(model), "aggregate": getattr(config_of(model), "aggregate", None)}
    held_out = HeldOutRows(task, first, second, ood, target, confidence, alpha, **about)
    fitted = fit.fit(held_out)
    decision = decision_of(held_out.complete(fitted.settings), num_parameters(model))
    remember_weights(decision, model)
    decision.to(device_of(model))
    rows = (len(first.labels), len(second.labels))
    decision.settings["sentences"] = fitted.sentences
    if hydra is not None:
        hydra.decision, hydra.config.decision = decision, decision.settings
    result = hydra or CalibratedClassifier(model, decision)
    return TaskCalibration(result, decision.settings, fitted.abstention, rows, fitted.sentences)


def _halves(labels: Tensor | None, seed: int) -> tuple[Tensor, Tensor]:
    """The numbers of the rows of two random halves."""
    if labels is None:
        raise ValueError("data has no labels: calibrate on rows whose right answer is known, add a column labels")
    if len(labels) < LEAST_ROWS:
        raise ValueError(f"data has {len(labels)} rows: pass at least {LEAST_ROWS}, better 1,000")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return order[: len(order) // 2], order[len(order) // 2 :]


def remember_weights(decision: Decision, model: nn.Module) -> None:
    """Takes the model's weights for those that were calibrated: as they are, and cast to a coarser dtype."""
    weights = list(model.parameters())
    digests = {digest_of(weights, dtype) for dtype in (None, torch.float32, torch.bfloat16, torch.float16)}
    decision.settings["dtype"] = dtype_of(weights)
    decision.settings["digests"] = {"weights": sorted(digests), "state": decision.state_digest()}
    decision.seen = None


def _check_model(model: nn.Module, detector: Detector, sets: str | None) -> None:
    """Refuses a model that does not choose one of several classes, and sets that do not suit their number."""
    zero_shot, config = zero_shot_in(model), config_of(model)
    if zero_shot is None and any(hasattr(each, "get_image_features") for each in model.modules()):
        raise ValueError(
            f"model is a {type(model).__name__}, which has no classes but those of each call's prompts: calibrate a "
            "ZeroShotClassifier of it"
        )
    if detector.multi_label:
        raise ValueError("detector is made for multi-label models: leave out multi_label, the model chooses one class")
    if sets is not None:
        check_method(sets, getattr(config, "num_labels", None) if zero_shot is None else len(zero_shot.text_features))


def _check_fit(
    detector: Detector,
    target: Mapping[str, float] | None,
    confidence: float | None,
    alpha: float | None,
    data_sets: Mapping[str, Any],
) -> None:
    """Refuses what cannot be fitted, or would have no effect, before hours of predictions."""
    if detector.name == "vim":
        raise ValueError(
            "vim adds the energy of the logits as they are to a distance: calibrate by another detector, or use it by itself"
        )
    if data_sets["train_data"] is not None and not detector.needs_fit:
        raise ValueError(f"train_data is for detectors that learn, {detector.name} does not: leave it out")
    check_promises(target, confidence, alpha, data_sets)


def check_promises(
    target: Mapping[str, float] | None,
    confidence: float | None,
    alpha: float | None,
    data_sets: Mapping[str, Any],
    check: Callable[[Mapping[str, float]], Any] = check_target,
) -> None:
    """The part of these checks that is the same for every task. check: refuses a target that the task does not have"""
    if target is not None:
        check(target)
        if "tpr" in target and data_sets["ood_data"] is None:
            raise ValueError(
                "ood_data is missing: a tpr is the share of rows from elsewhere that is refused, pass some"
            )
    for name, value in {"confidence": confidence, "ood_data": data_sets["ood_data"]}.items():
        if target is None and value is not None:
            raise ValueError(f"{name} has no effect without a target: pass one, such as {{'risk': 0.05}}")
    for name, value in {"confidence": confidence, "alpha": alpha}.items():
        if value is not None:
            check_share(value, name)
    for name, data in data_sets.items():
        if name == "data" or data is not None:
            check_is_data(data, name)


def _unfinished_decision(detector: Detector, scaling: TemperatureScaling, model: nn.Module) -> Decision:
    """A decision with the temperature and the fitted detector, still without a threshold and sets."""
    state = detector.state or {}
    settings = {
        "temperature": scaling.temperature[0],
        "pooled": scaling.pooled,
        "detector": {"name": detector.name, "by": detector.by, "settings": detector.score_settings},
        **dict.fromkeys(("threshold", "sets", "alpha", "dtype")),
        "state": {name: list(tensor.shape) for name, tensor in state.items()},
        "digests": None,
        "sentences": [],
        **prompts_of(model),
    }
    decision = Decision(settings, num_parameters(model))
    for name, tensor in state.items():
        getattr(decision, name).copy_(tensor)
    return decision


def _scores(decision: Decision, model: nn.Module, data: Any, batch_size: int) -> Tensor:
    """The detector's scores (samples,) of a data set, on the CPU, without holding logits."""
    reader, scores = AnswerReader(model, decision.reads_features), []
    for _, *answers in reader.read(data, batch_size, "ood_data"):
        scores.append(decision(*(None if part is None else part.cpu() for part in answers)).detector_score)
    return torch.cat(scores)


def _rows(features: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if features is None else features[rows]
