"""A classifier as the server and the page ask it."""

import threading
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .._version import __version__
from ..data.prediction import ZeroShotClassifier, accepted_inputs, config_of, member_logits_of, zero_shot_in
from ..data.processors import class_prompts
from ..hub.handler import KINDS, Answerer
from ..models.auto import auto_class_of
from ..uncertainty import predict_decisions
from ..uncertainty.features import without_decision


MOST_CLASS_LISTS = 8  # of CLIP, whose prompts are kept


def kind_of(config: PreTrainedConfig, name: str) -> str:
    """The inputs of a model: "image", "text", or "zero-shot" for images with classes in each request."""
    kind = KINDS.get(auto_class_of(config))
    if kind is None:
        raise ValueError(f"{name} is a {config.model_type}: server and page take classifiers of images and texts")
    if getattr(config, "problem_type", None) == "regression":
        raise ValueError(f"{name} is made for regression, and answers choose among classes: pass a classifier")
    return kind


class Predictor(Answerer):
    """A classifier with its processor and a name. Any number of threads may ask it.

    Args:
        name: shown by the server and the page.
        model: a Hydra, a classifier or CLIP model of Transformers, a `ZeroShotClassifier` with `class_names`, a baseline, or
            one of these calibrated. It is put into eval mode.
        processor: the tokenizer, image processor or both in one.
    """

    def __init__(self, name: str, model: nn.Module, processor: Any):
        self.name, self.config = name, config_of(model)
        zero_shot, kind = zero_shot_in(model), kind_of(self.config, name)
        super().__init__(model.eval(), processor, kind if zero_shot is None else "image")
        self.class_names: list[str] | None = None
        if zero_shot is not None:
            self.class_names = list(zero_shot.class_names)
        elif not self.needs_classes:
            self.class_names = [str(self.config.id2label[index]) for index in range(self.config.num_labels)]
        self._of_classes: dict[tuple[str, ...], ZeroShotClassifier] = {}
        # Two threads cannot use one tokenizer at once, and a pass already takes all cores.
        self._one_at_a_time = threading.Lock()

    @property
    def needs_classes(self) -> bool:
        """Whether every question names the classes to choose from, as for CLIP and SigLIP."""
        return self.kind == "zero-shot"

    @property
    def reads(self) -> str:
        return "texts" if self.kind == "text" else "images"

    @property
    def num_members(self) -> int:
        """Of a Hydra; any other model counts as one."""
        return getattr(self.config, "num_members", 1)

    @property
    def promises(self) -> list[str]:
        """The sentences of its calibration; none if it is not calibrated, or has other weights since."""
        _, decision = without_decision(self.model)
        return [] if decision is None else list(decision.settings["sentences"])

    @property
    def about(self) -> dict[str, Any]:
        """The server's description at GET /."""
        return {
            "model": self.name,
            "kind": self.kind,
            "labels": self.class_names,
            "members": getattr(self.config, "num_members", None),
            "calibrated": without_decision(self.model)[1] is not None,
            "hydra_transformers": __version__,
        }

    def answer(self, inputs: list[Any], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        with self._one_at_a_time:
            return predict_decisions(self.model, inputs, self.processor, len(inputs), **parameters)

    def answer_with_members(self, value: Any, class_names: Sequence[str] | None = None) -> dict[str, Any]:
        """An answer with the `scores` of all classes, and with `members`: each member's probabilities in their order.

        value: a PIL image or a text
        class_names: for CLIP that `needs_classes`, in "A photo of a {}."
        """
        with self._one_at_a_time:
            asked = _KeepsOutput(self._with_classes(class_names) if self.needs_classes else self.model)
            [answer] = predict_decisions(asked, [value], self.processor)
        names = list(class_names) if self.needs_classes else self.class_names
        members = member_logits_of(asked.output)[0].double().softmax(dim=-1)  # (members, classes)
        mean = members.mean(dim=0)
        order = mean.argsort(descending=True, stable=True)
        scores = [{"label": names[index], "score": mean[index].item()} for index in order.tolist()]
        return answer | {"scores": scores, "members": members[:, order].tolist()}

    def _with_classes(self, class_names: Sequence[str] | None) -> ZeroShotClassifier:
        if not class_names:
            raise ValueError(f"class_names is missing: {self.name} chooses among classes that you name")
        key = tuple(class_names)
        if key not in self._of_classes:
            while len(self._of_classes) >= MOST_CLASS_LISTS:
                del self._of_classes[next(iter(self._of_classes))]
            prompts = class_prompts(self.config, self.processor, key)
            self._of_classes[key] = ZeroShotClassifier(self.model, prompts, key).eval()
        return self._of_classes[key]


class _KeepsOutput(nn.Module):
    """Keeps the output of its one pass: the answers of `predict_decisions` have no members."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.output = model, None

    def forward(self, **inputs: Any) -> Any:
        self.output = self.model(**accepted_inputs(self.model, inputs))
        return self.output
