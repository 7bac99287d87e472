"""The decision of a calibrated model: when it abstains, and whether the model is still the one that was calibrated.

Ships with calibrated models alone, with the file of their task, `decision_<task>.py`.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .ensembling import is_exporting
from .fixed_dtype import FixedDtype
from .weights_digest import ComparedWeights, digest_of, dtype_of, is_coarser, weights_of_replica


logger = logging.get_logger(f"transformers.{__name__}")

VERSION = 2  # of the settings
TASKS = ("single_label_classification", "multi_label_classification", "regression", "token_classification", "reward")
# Settings of a model's config that change its predictions, and leave the weights as they are.
CONFIG_FIELDS = ("problem_type", "aggregate", "hidden_act", "hidden_activation", "activation", "activation_function")
RECALIBRATE = "call calibrate() again"


@dataclass(frozen=True)
class DecisionOutput:
    """What a calibrated model decides.

    member_logits: (batch, members, classes), with the temperature
    detector_score: (batch,), higher is less sure
    abstain: (batch,) bool, whether the score is above the threshold, or the prediction is not a number
    prediction_set: (batch, classes) bool, the possible classes, all where the prediction is not a number; None without sets
    interval: (batch, outputs, 2), of regression: the lowest and highest value that each output may have; else None
    chosen_labels: (batch, labels) bool, of multi-label classification: the labels that are predicted; else None
    """

    member_logits: Tensor
    detector_score: Tensor
    abstain: Tensor
    prediction_set: Tensor | None = None
    interval: Tensor | None = None
    chosen_labels: Tensor | None = None

    def outputs(self) -> dict[str, Tensor | None]:
        """The fields that a model returns beside its logits."""
        return {name: getattr(self, name) for name in ("detector_score", "abstain", "prediction_set", "interval")}


class Decision(FixedDtype):
    """What `calibrate` fitted for a model, and the digest of the model that it was fitted for. A task is a subclass.

    The weights are compared with their digest when the model is saved or loaded, and at the first inference after it was in
    training mode, gradients passed through it, or it got or lost an adapter. A changed model does not decide. Writing into
    `weight.data` by hand is noticed only then.

    settings: the config's `decision`
        version, task: of these settings, one of `TASKS`
        detector: {"name"}: what `detector_score` is
        threshold: None, or the highest score that is not refused. It lies between two scores of the fitting rows, so that
            rounding does not move rows across it
        alpha: the share of the sets or intervals that may miss the right class or value; None without them
        config: the `CONFIG_FIELDS` that the model had
        dtype: of its weights
        state: {name: shape} of the decision's tensors
        digests: {"weights": of the weights in their dtype and in coarser ones, "state": of the tensors}
        sentences: what was fitted on what, and what it promises
    num_parameters: of the model, which bounds the memory that the shapes of `state` can ask for
    """

    reads_features = False

    def __init__(self, settings: Mapping[str, Any], num_parameters: int):
        super().__init__()
        if not 0 < settings.get("temperature", 1.0) < math.inf:
            raise ValueError(f"decision.temperature is {settings['temperature']}: {RECALIBRATE}")
        self.settings, most = dict(settings), max(2**26, 16 * num_parameters)
        for name, shape in settings["state"].items():
            if not all(type(size) is int and size > 0 for size in shape) or math.prod(shape) > most:
                raise ValueError(f"decision.state.{name} is {str(shape)[:100]}: {RECALIBRATE}")
            self.register_buffer(name, torch.full(shape, math.nan, dtype=torch.float32))
        self.is_same_model: bool | None = None  # of the last comparison; None if there is to be another
        self.weights = ComparedWeights(None)

    def above_threshold(self, detector_score: Tensor) -> Tensor:
        """Which rows not to answer, bool; without a threshold those whose score is not a number."""
        threshold = self.settings["threshold"]
        return detector_score.isnan() if threshold is None else ~(detector_score <= float(threshold))

    def per_output(self, name: str, like: Tensor) -> Tensor:
        """A setting with a value for each output (the last axis of `like`), as a tensor."""
        values = self.settings[name]
        if len(values) != like.shape[-1]:  # one value would silently serve all outputs
            raise ValueError(
                f"decision.{name} has {len(values)} values, and the model has {like.shape[-1]} outputs: {RECALIBRATE}"
            )
        return torch.tensor([float(value) for value in values], dtype=like.dtype, device=like.device)

    # Is the model still the one that was calibrated?

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model is the one that was calibrated; see above for when its weights are read."""
        if is_exporting():
            return True  # `export` has compared them
        is_compared = self.is_same_model is not None and self.weights.are_in_place()
        if not is_compared or has_adapters(model) or config_settings(model) != self.settings["config"]:
            return self.compare(model)
        return self.is_same_model

    def compare(self, model: nn.Module) -> bool:
        """`is_current`, by all numbers of the weights; warns where the model is another one."""
        self.is_same_model = None
        weights = list(model.parameters()) or weights_of_replica(model)
        if any(weight.is_meta for weight in weights):
            if hasattr(model, "hf_device_map"):
                logger.warning_once(
                    "weights of this model are offloaded and cannot be compared with those that were calibrated: nothing is "
                    "decided, load it without offloading"
                )
            return False
        task, config = task_name(model), config_settings(model)
        changes = [
            f"{name} was {then!r} and is {config.get(name)!r}"
            for name, then in self.settings["config"].items()
            if config.get(name) != then
        ]
        if task != self.settings["task"]:
            changes = [f"it was made for {self.settings['task']} and is for {task}"]
        elif not changes and has_adapters(model):
            changes = ["it has adapters"]
        elif not changes and digest_of(weights) not in self.settings["digests"]["weights"]:
            changes = ["the weights have changed"]
        if changes:
            logger.warning_once(
                f"this is not the model that was calibrated ({', '.join(changes)}): it does not abstain, and has no "
                f"temperature and no sets, {RECALIBRATE}"
            )
        if not has_adapters(model):
            self.is_same_model, self.weights = not changes, ComparedWeights(model)
        then, now = self.settings["dtype"], dtype_of(weights)
        if self.reads_features and is_coarser(now, then):
            logger.warning_once(
                f"this model was calibrated in {then} and runs in {now}, and its detector, {self.settings['detector']['name']}, "
                "reads features: rounding may look out-of-distribution, call calibrate() in this dtype"
            )
        return not changes

    def remember(self, model: nn.Module) -> None:
        """Takes a model for the one that was calibrated."""
        weights = list(model.parameters())
        digests = {digest_of(weights, dtype) for dtype in (None, torch.float32, torch.bfloat16, torch.float16)}
        self.settings["dtype"], self.settings["config"] = dtype_of(weights), config_settings(model)
        self.settings["digests"] = {"weights": sorted(digests), "state": self.state_digest()}
        self.is_same_model, self.weights = True, ComparedWeights(model)

    def compare_again(self, *_: Any) -> None:
        """At the next inference."""
        self.is_same_model = None

    def watch(self, logits: Tensor) -> None:
        """Compares the weights again after gradients have passed through these logits."""
        if logits.requires_grad and not torch.compiler.is_compiling():
            logits.register_hook(self.compare_again)

    def train(self, mode: bool = True) -> nn.Module:
        if mode:
            self.compare_again()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self.compare_again()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args):
        self.compare_again()
        return super()._load_from_state_dict(*args)

    def check_loaded(self) -> None:
        """Raises an error where the tensors are not those of the settings."""
        is_loaded = not any(buffer.is_meta for buffer in self.buffers())
        if is_loaded and self.state_digest() != self.settings["digests"]["state"]:
            raise ValueError(
                "decision.state is not what was saved with these settings: save the model again, or load it with decision=None"
            )

    def state_digest(self) -> str:
        return digest_of(self.get_buffer(name) for name in sorted(self.settings["state"]))  # JSON sorts names, too


def decision_of(settings: Any, num_parameters: int) -> Decision | None:
    """The decision that these settings describe; None, with a warning, for those of an earlier version."""
    is_known = isinstance(settings, Mapping) and settings.get("version") == VERSION
    # Sets by other methods, and thresholds for single labels, are of earlier versions, too.
    if not is_known or settings.get("per_label") or (settings.get("sets") or {}).get("method", "lac") != "lac":
        logger.warning_once(
            f"this model was calibrated by another version of hydra_transformers, and decides nothing: {RECALIBRATE}"
        )
        return None
    if settings.get("task") not in TASKS:
        raise ValueError(f"decision.task is {str(settings.get('task'))[:100]!r}: pass one of {', '.join(TASKS)}")
    # By name: a model ships the file of its own task.
    module = importlib.import_module(f".decision_{settings['task']}", __package__)
    return module.TaskDecision(settings, num_parameters)


def prediction_fields(settings: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of a pipeline's prediction for one row that say whether to abstain, by what, and why.

    settings: of the decision that made these outputs
    """
    detector, threshold = settings["detector"]["name"], settings["threshold"]
    detector_score, reason = outputs["detector_score"][0].item(), None
    abstain = None if threshold is None else outputs["abstain"][0].item()
    if abstain and detector == "low score":
        reason = f"The score is {-detector_score:.3g}, below the threshold {-float(threshold):.3g}."
    elif abstain:
        score_name = "msp (1 - the largest probability)" if detector == "msp" else detector
        reason = f"{score_name} is {detector_score:.3g}, above the threshold {float(threshold):.3g}."
        if settings.get("sets") and outputs["prediction_set"][0].sum() == 1:
            share = f"{100 * (1 - settings['alpha']):.3g} %"
            reason += f" Prediction sets are right for {share} of all rows, less often for rows as unsure as this one."
    by_what = {"detector": detector, "detector_score": detector_score, "threshold": threshold, "reason": reason}
    return {"abstain": abstain} | by_what


def task_name(model: nn.Module) -> str:
    """The task of a model, or of the model inside it: one of `TASKS`."""
    if any("ForTokenClassification" in type(module).__name__ for module in model.modules()):
        return "token_classification"
    config = _config_of(model)
    problem_type = getattr(config, "problem_type", None)
    if problem_type is None and getattr(config, "num_labels", None) == 1:
        problem_type = "regression"  # as in Transformers' loss
    if problem_type == "regression" and getattr(config, "aggregate", None) is not None:
        return "reward"
    return problem_type or "single_label_classification"


def config_settings(model: nn.Module) -> dict[str, Any]:
    """Those of `CONFIG_FIELDS` that a model's config has, None left out."""
    config = _config_of(model)
    values = {name: getattr(config, name, None) for name in CONFIG_FIELDS}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _config_of(model: nn.Module) -> Any:
    return next((module.config for module in model.modules() if hasattr(module, "config")), None)


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT, or Transformers through it, has put adapters on the model."""
    return getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")
