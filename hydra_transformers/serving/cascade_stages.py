"""The stages of a cascade: models, functions that answer rows, and a person behind them."""

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from .._io.access import in_one_line
from ..cost import count_multiply_adds, inputs_for, multiply_adds_of
from ..fusion.structure import without_weights
from ..models.decision import config_settings
from ..models.weights_digest import digest_of
from ..uncertainty import CalibratedClassifier
from ..uncertainty.features import without_decision
from .predictor import HydraPredictor


PERSON = "person"  # the last stage, to whom the remaining rows are passed
DUMMY_SIZE = 300  # pixels of the image that shows at which size a processor hands over images


class StageAnswer(NamedTuple):
    """What a stage says of a row.

    label: None where it has no answer
    score: lower is surer; inf where it passes the row on whatever its threshold is
    confidence: for people; None where it has no answer
    problem: why it passes the row on whatever its threshold is; None where it does not
    """

    label: str | None
    score: float
    confidence: float | None
    problem: str | None = None


class ModelStage:
    """A classifier. It is scored by its detector if it is calibrated, else by 1 - its probability.

    Args:
        predictor (`HydraPredictor`): of the model.
        source (`str`, *optional*): its folder or Hub name; None for a model in memory.
        name (`str`, *optional*): by default the predictor's.
    """

    def __init__(self, predictor: HydraPredictor, source: str | None = None, name: str | None = None):
        self.predictor = predictor
        self.source = source
        self.name = name or predictor.name
        if Path(self.name).is_dir():  # of a model in memory, where it came from
            self.name = Path(self.name).name
        if predictor.needs_classes:
            raise ValueError(f"stage {self.name} has no classes of its own: calibrate it for the classes first")
        if predictor.task.name != "single_label_classification":
            raise ValueError(
                f"stage {self.name} is for {predictor.task.title}: a cascade is of single-label classifiers"
            )
        calibration = predictor.calibration or {}
        if calibration.get("thresholds") is not None or calibration.get("by_group") is not None:
            raise ValueError(
                f"stage {self.name} was calibrated by class or group, and a cascade has one promise for all answers: "
                "pass a model that was calibrated otherwise, or not at all"
            )
        self.scoring = HydraPredictor(
            _without_threshold(predictor.model),
            predictor.processor,
            name=predictor.name,
            batch_size=predictor.batch_size,
        )

    def answers(self, values: Sequence[Any]) -> list[StageAnswer]:
        """Return what the model says of each input.

        Args:
            values (`Sequence`): inputs, as for `HydraPredictor.answers`.
        """
        return [_answer_of_model(prediction) for prediction in self.scoring.answers(values)]

    def work(self) -> int:
        """Return the multiply-adds for one row: an image of the processor's size, or 128 tokens."""
        model = self.predictor.model
        if isinstance(model, CalibratedClassifier):
            model = model.model
        if self.predictor.kind != "image" or not isinstance(model, PreTrainedModel):
            return count_multiply_adds(model)
        from PIL import Image

        image = Image.new("RGB", (DUMMY_SIZE, DUMMY_SIZE))
        pixels = self.predictor.processor(images=image, return_tensors="pt")["pixel_values"]
        inputs = inputs_for(model, 1, "meta") | {"pixel_values": torch.empty(pixels.shape, device="meta")}
        return multiply_adds_of(without_weights(type(model), model.config), **inputs)

    def digest(self) -> str:
        """Return a digest of what the scores and labels depend on: weights, classes, decision."""
        model = self.predictor.model
        state = model.state_dict()
        tensors = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
        inner, _ = without_decision(model)
        described = [
            digest_of(tensors),
            config_settings(inner),
            self.predictor.class_names,
            self.predictor.calibration,
        ]
        text = json.dumps(described, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


class FunctionStage:
    """A function from inputs to (label, confidence) for each, such as one that calls an LLM.

    A row is passed on where it gives None, or no confidence, or where it fails.

    Args:
        function (`Callable`): gets a list of inputs: texts, pairs of texts, or images of PIL.
        name (`str`, *optional*): by default the function's.
    """

    def __init__(self, function: Callable[[list[Any]], Sequence[Any]], name: str | None = None):
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)

    @property
    def place(self) -> str:
        """Where it is defined: "module:function"."""
        module = getattr(self.function, "__module__", type(self.function).__module__)
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{module}:{name}"

    def answers(self, values: Sequence[Any]) -> list[StageAnswer]:
        """Return what the function says of each input; where it fails, it is asked row by row.

        Args:
            values (`Sequence`): inputs, as the function gets them.
        """
        if not values:
            return []
        try:
            found = list(self.function(list(values)))
        except Exception as error:  # a service may fail in any way
            if len(values) == 1:
                return [StageAnswer(None, math.inf, None, f"it failed ({in_one_line(error)})")]
            return [answer for value in values for answer in self.answers([value])]
        if len(found) != len(values):
            raise ValueError(
                f"{self.name} gave {len(found)} answers to {len(values)} rows: return a (label, confidence) for each"
            )
        return [self._answer(answer) for answer in found]

    def _answer(self, answer: Any) -> StageAnswer:
        """Read a (label, confidence), or None."""
        if answer is None:
            return StageAnswer(None, math.inf, None, "it has no answer")
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise ValueError(
                f"{self.name} gave {repr(answer)[:60]}: return (label, confidence), or None to pass a row on"
            )
        label, confidence = answer
        confidence = math.nan if confidence is None else float(confidence)
        if label is None or not math.isfinite(confidence):
            return StageAnswer(None, math.inf, None, "it has no answer")
        return StageAnswer(str(label), 1 - confidence, confidence)


Stage = ModelStage | FunctionStage


def stage_of(stage: Any, **settings: Any) -> Stage:
    """Return a stage for what a user passes.

    Args:
        stage: a folder or Hub name, a model or a (model, processor), a `HydraPredictor`, a
            function, or a stage.
        settings: of `HydraPredictor`, for models.
    """
    if isinstance(stage, (ModelStage, FunctionStage)):
        return stage
    if isinstance(stage, (str, os.PathLike)):
        source = os.fspath(stage)
        return ModelStage(HydraPredictor(source, **settings), source)
    if isinstance(stage, HydraPredictor):
        return ModelStage(stage)
    if isinstance(stage, nn.Module):
        return ModelStage(HydraPredictor(stage, **settings))
    if isinstance(stage, tuple) and len(stage) == 2:
        model, processor = stage
        return ModelStage(HydraPredictor(model, processor, **settings))
    if callable(stage):
        return FunctionStage(stage)
    raise TypeError(
        f"a stage is a {type(stage).__name__}: pass a folder or Hub name, a model, a function, or {PERSON!r} as the "
        "last one"
    )


def _answer_of_model(prediction: Mapping[str, Any]) -> StageAnswer:
    """Read a prediction of a model without a threshold, which abstains on empty inputs alone."""
    if "error" in prediction:
        return StageAnswer(None, math.inf, None, f"it cannot be read ({prediction['error']})")
    label = prediction["label"]
    confidence = prediction["score"]
    if prediction["abstain"]:
        return StageAnswer(label, math.inf, confidence, prediction["reason"])
    score = prediction["detector_score"]
    if score is None:
        score = 1 - confidence
    if math.isnan(score) or score == math.inf:
        return StageAnswer(label, math.inf, confidence, "its score is not a number")
    return StageAnswer(label, score, confidence)


def _without_threshold(model: nn.Module) -> nn.Module:
    """Return a calibrated model that scores rows as it did, and abstains on empty inputs alone.

    It shares the weights of the given one, which stays as it is.
    """
    inside, decision = without_decision(model)
    if decision is None:
        return model
    scoring = copy.deepcopy(decision)
    scoring.settings = replace(decision.settings, threshold=None)
    if isinstance(model, CalibratedClassifier):
        return CalibratedClassifier(model.model, scoring).eval()
    inside.decision = scoring  # a copy that shares the weights
    return inside.eval()
