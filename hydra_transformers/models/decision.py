"""The decision of a calibrated model: when it abstains, and whether the model is still the one that was calibrated.

Ships with calibrated models alone.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .decision_settings import (
    NEWER_VERSION,
    RECALIBRATE,
    VERSION,
    DecisionSettings,
    Digests,
    digest_of_settings,
    typed_settings,
)
from .detection import DETECTORS, answers_of, score
from .ensembling import is_exporting
from .fixed_dtype import FixedDtype
from .task import DecisionOutput, config_inside, load_task, task_name
from .task_multi_label import (
    MultiLabel as MultiLabel,
)  # named here, so that every calibrated model has the tasks' files
from .task_regression import Regression as Regression
from .task_tokens import TokenClassification as TokenClassification
from .weights_digest import ComparedWeights, digest_of, dtype_of, is_coarser, weights_of_replica


logger = logging.get_logger(f"transformers.{__name__}")

# Settings of a model's config that change its predictions, and leave the weights as they are.
CONFIG_FIELDS = ("problem_type", "aggregate", "hidden_act", "hidden_activation", "activation", "activation_function")
# Numbers of a config, or of one of its towers, that do so without changing the shape of any weight. Not among them is what
# other versions of Transformers, or users for good reasons, set otherwise: the implementation of attention, dtypes, dropout.
INFERENCE_FIELDS = (
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rms_norm_eps",
    "norm_eps",
    "num_attention_heads",
    "num_key_value_heads",
    "position_embedding_type",
    "rope_theta",
    "local_attention",
    "global_attn_every_n_layers",
    "max_relative_positions",
    "position_buckets",
)
TOWERS = ("text_config", "vision_config")
CLASSES = "id2label"  # the names of the classes, in their order


class Decision(FixedDtype):
    """What `calibrate` fitted for a model, and the digest of the model that it was fitted for. What it decides is up to its
    `task`.

    The weights are compared with their digest when the model is saved or loaded, and at the first inference after it was in
    training mode, gradients passed through it, or it got or lost an adapter. A changed model does not decide. Writing into
    `weight.data` by hand is noticed only then.

    settings: of the task's `settings_class`
    num_parameters: of the model, which bounds the memory that the shapes of `state` can ask for
    """

    def __init__(self, settings: DecisionSettings, num_parameters: int):
        super().__init__()
        self.settings = settings
        self.task = load_task(settings.task)
        self.check_detector()
        most = max(2**26, 16 * num_parameters)
        for name, shape in settings.state.items():
            if math.prod(shape) > most:
                raise ValueError(f"decision.state.{name} is {str(shape)[:100]}: {RECALIBRATE}")
            self.register_buffer(name, torch.full(shape, math.nan, dtype=torch.float32))
        self.is_same_model: bool | None = None  # of the last comparison; None if there is to be another
        self.weights = ComparedWeights(None)

    def check_detector(self) -> None:
        """Raise for settings of a detector that there is not, or for tensors that are not its own."""
        detector = self.settings.detector
        state = sorted(self.settings.state)
        is_known = not state
        if self.task.has_detector:
            method = DETECTORS.get(detector.name)
            is_known = method is not None and state == sorted(method.state) and detector.by in method.by
        if not is_known:
            raise ValueError(f"decision.detector is {str(detector.to_dict())[:200]}: {RECALIBRATE}")

    @property
    def reads_features(self) -> bool:
        """Whether the detector reads what the classifier's last map reads."""
        return bool(self.settings.state)

    def forward(
        self, member_logits: Tensor, member_features: Tensor | None = None, group: Tensor | None = None
    ) -> DecisionOutput:
        """
        member_logits: (batch, members, classes)
        member_features: (batch, members, dim), where `reads_features`
        group: (batch,), where promises are made by a column, see `GroupSettings.indices`; without it no row is answered
        """
        decided = self.task.decide(self, member_logits, member_features)
        if self.settings.by_group is None:
            return decided
        is_above = self.settings.by_group.are_above(decided.detector_score, group)
        return replace(decided, abstain=decided.abstain | is_above)

    def detect(self, member_logits: Tensor, member_features: Tensor | None) -> Tensor:
        """Return the score of the settings' detector, (batch,)."""
        detector = self.settings.detector
        state = {name: getattr(self, name) for name in self.settings.state}
        answers = answers_of(member_logits, member_features, state)
        return score(detector.name, answers, detector.by, **(detector.settings or {}))

    def above_threshold(self, detector_score: Tensor) -> Tensor:
        """Return which rows not to answer, bool; without a threshold those whose score is not a number."""
        threshold = self.settings.threshold
        return detector_score.isnan() if threshold is None else ~(detector_score <= threshold)

    def per_output(self, name: str, like: Tensor) -> Tensor:
        """Return a setting with a value for each output (the last axis of `like`), as a tensor."""
        values = getattr(self.settings, name)
        if len(values) != like.shape[-1]:  # one value would silently serve all outputs
            raise ValueError(
                f"decision.{name} has {len(values)} values, and the model has {like.shape[-1]} outputs: {RECALIBRATE}"
            )
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    # Is the model still the one that was calibrated?

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model is the one that was calibrated; see above for when its weights are read."""
        if is_exporting():
            return True  # `export` has compared them
        is_compared = self.is_same_model is not None and self.weights.are_in_place()
        has_changed = config_settings(model) != self.settings.config or self.inference_changes(model)
        if not is_compared or has_adapters(model) or has_changed:
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
            for name, then in self.settings.config.items()
            if config.get(name) != then
        ]
        changes += self.inference_changes(model)
        if task != self.settings.task:
            changes = [f"it was made for {self.settings.task} and is for {task}"]
        elif not changes and has_adapters(model):
            changes = ["it has adapters"]
        elif not changes and not self.knows(digest_of(weights)):
            changes = ["the weights have changed"]
        if changes:
            logger.warning_once(
                f"this is not the model that was calibrated ({', '.join(changes)}): it does not abstain, and has no "
                f"temperature and no sets, {RECALIBRATE}"
            )
        if not has_adapters(model):
            self.is_same_model, self.weights = not changes, ComparedWeights(model)
        then = self.settings.dtype
        now = dtype_of(weights)
        if self.reads_features and is_coarser(now, then):
            logger.warning_once(
                f"this model was calibrated in {then} and runs in {now}, and its detector, {self.settings.detector.name}, "
                "reads features: rounding may look out-of-distribution, call calibrate() in this dtype"
            )
        return not changes

    def inference_changes(self, model: nn.Module) -> list[str]:
        """Return what has changed of `inference_settings`, in words; fields that this version does not know have not."""
        then = self.settings.inference or {}
        now = inference_settings(model)
        changes = [
            f"{name} was {value!r} and is {now[name]!r}"
            for name, value in then.items()
            if name != CLASSES and name in now and now[name] != value
        ]
        before = then.get(CLASSES, [])
        classes = now.get(CLASSES, [])
        if classes != before and sorted(classes) == sorted(before):  # other names of the same classes are no change
            changes.append("its classes have another order")
        return changes

    def knows(self, digest: str) -> bool:
        """Whether a digest is that of the weights that were calibrated."""
        return self.settings.digests is not None and digest in self.settings.digests.weights

    def remember(self, model: nn.Module) -> None:
        """Takes a model for the one that was calibrated."""
        weights = list(model.parameters())
        digests = {digest_of(weights, dtype) for dtype in (None, torch.float32, torch.bfloat16, torch.float16)}
        settings = replace(
            self.settings,
            dtype=dtype_of(weights),
            config=config_settings(model),
            inference=inference_settings(model),
        )
        digests = Digests(weights=tuple(sorted(digests)), state=self.state_digest(), settings=settings.digest())
        self.settings = replace(settings, digests=digests)
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
        digests = self.settings.digests
        if is_loaded and (digests is None or self.state_digest() != digests.state):
            raise ValueError(
                "decision.state is not what was saved with these settings: save the model again, or load it with decision=None"
            )

    def state_digest(self) -> str:
        return digest_of(self.get_buffer(name) for name in sorted(self.settings.state))  # JSON sorts names, too


# Names that code reads which was saved before version 0.4: the package may have calibrated a model that came with it.

TaskDecision = Decision


def prediction_fields(settings: DecisionSettings, outputs: Mapping[str, Tensor]) -> dict[str, Any]:
    return settings.prediction_fields(outputs)


# Making a decision


def decision_of(settings: Any, num_parameters: int) -> Decision | None:
    """Make the decision that a config's `decision` describes; None, with a warning, for that of an earlier version.

    Settings that `calibrate` did not write raise an error.
    """
    saved = settings if isinstance(settings, Mapping) else {}
    sets = saved.get("sets")
    # Sets by other methods, and thresholds for single labels, are of earlier versions, too.
    is_earlier = saved.get("per_label") or (isinstance(sets, Mapping) and sets.get("method", "lac") != "lac")
    if saved.get("version") not in (VERSION, NEWER_VERSION) or is_earlier:
        logger.warning_once(
            f"this model was calibrated by another version of hydra_transformers, and decides nothing: {RECALIBRATE}"
        )
        return None
    typed = typed_settings(saved)
    expected = None if typed.digests is None else typed.digests.settings
    if expected is not None and digest_of_settings(saved) != expected:
        raise ValueError(
            "decision has settings that were changed since calibrate() wrote them, so that its promises do not hold: "
            f"{RECALIBRATE}, or load the model with decision=None"
        )
    return Decision(typed, num_parameters)


def config_settings(model: nn.Module) -> dict[str, Any]:
    """Return those of `CONFIG_FIELDS` that a model's config has, None left out."""
    config = config_inside(model)
    values = {name: getattr(config, name, None) for name in CONFIG_FIELDS}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def inference_settings(model: nn.Module) -> dict[str, Any]:
    """Return those of `INFERENCE_FIELDS` that a model's config has, also in its towers, and the names of its classes."""
    config = config_inside(model)
    values = {name: getattr(config, name, None) for name in INFERENCE_FIELDS}
    for tower in TOWERS:
        inside = getattr(config, tower, None)
        values |= {f"{tower}.{name}": getattr(inside, name, None) for name in INFERENCE_FIELDS}
    settings = {name: value for name, value in values.items() if isinstance(value, (int, float, str))}
    names = getattr(config, CLASSES, None)
    if isinstance(names, Mapping):
        # A saved config may have them in the order of the texts "0", "1", "10".
        settings[CLASSES] = [str(names[index]) for index in sorted(names, key=int)]
    return settings


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT, or Transformers through it, has put adapters on the model."""
    return getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")


def with_groups(model: nn.Module, predictions: list[dict[str, Any]], groups: Any) -> list[dict[str, Any]]:
    """Return predictions with what their groups decide, see `DecisionSettings.with_groups`."""
    # By name: its class may be of the model's own folder. A model that has changed since its calibration decides nothing.
    decision = next((module for module in model.modules() if type(module).__name__.endswith("Decision")), None)
    if decision is None:
        raise ValueError("groups is for a model that was calibrated with by=column: leave it out")
    if any(prediction["detector"] is None for prediction in predictions):
        return predictions
    return typed_settings(decision.settings).with_groups(predictions, groups)
