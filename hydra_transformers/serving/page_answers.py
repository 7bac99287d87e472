"""A model as the page asks it: one image or text in, one answer with those of the members out."""

import threading
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..data.prediction import (
    ZeroShotClassifier,
    accepted_inputs,
    check_chooses_one_class,
    config_of,
    member_logits_of,
    zero_shot_in,
)
from ..data.prompts import class_prompts
from ..hub.kept_heads_map import trunk_sentence
from ..hub.member_circuits import heads_of_backbone, kept_by
from ..models.auto import auto_class_of
from ..pruning.head_maps import HeadMap
from ..uncertainty import predict_decisions
from ..uncertainty.features import without_decision


ZERO_SHOT = "AutoModelForZeroShotImageClassification"
# What a model reads, by the Auto class of its task.
READS = {
    "AutoModelForImageClassification": "images",
    ZERO_SHOT: "images",
    "AutoModelForSequenceClassification": "texts",
}
MOST_CLASS_LISTS = 8  # of CLIP, whose prompts are kept


def read_by(config: PreTrainedConfig, name: str) -> str:
    """What a model reads, "images" or "texts"; any other is refused."""
    found = READS.get(auto_class_of(config))
    if found is None:
        raise ValueError(f"{name} is a {config.model_type}: the page shows classifiers of images and texts")
    return found


class AskedModel:
    """A classifier with the name that the page calls it by. Any number of threads may ask it.

    Args:
        name: what the page calls it.
        model: a Hydra, a classifier or CLIP model of Transformers, a `ZeroShotClassifier` with `class_names`, a baseline, or
            what `calibrate` made of one. It is put into eval mode.
        processor: the tokenizer, image processor or both in one.
    """

    def __init__(self, name: str, model: nn.Module, processor: Any):
        self.name, self.model, self.processor = name, model.eval(), processor
        self.config = config_of(model)
        self.reads = read_by(self.config, name)
        check_chooses_one_class(model, name)
        zero_shot = zero_shot_in(model)
        self.class_names = self._own_classes() if zero_shot is None else zero_shot.class_names
        self._of_classes: dict[tuple[str, ...], ZeroShotClassifier] = {}
        # Tokenizers cannot be used by two threads at once, and a pass already takes all cores.
        self._one_at_a_time = threading.Lock()

    def _own_classes(self) -> list[str] | None:
        if auto_class_of(self.config) == ZERO_SHOT:
            return None
        if self.config.num_labels < 2:
            raise ValueError(f"{self.name} has a single output: the page shows models that choose among classes")
        return [str(self.config.id2label[index]) for index in range(self.config.num_labels)]

    @property
    def needs_classes(self) -> bool:
        """Whether it is CLIP, and every question names the classes to choose from."""
        return self.class_names is None

    @property
    def num_members(self) -> int:
        """Of a Hydra; any other model is one until it answers."""
        return getattr(self.config, "num_members", 1)

    @property
    def sentences(self) -> list[str]:
        """What it was calibrated for and promises; none where it was not calibrated, or has other weights since."""
        _, decision = without_decision(self.model)
        return [] if decision is None else list(decision.settings["sentences"])

    @property
    def kept_heads(self) -> HeadMap | None:
        """Which heads each member keeps, as a picture; None for a model that is no Hydra."""
        if not hasattr(self.config, "kept_heads"):
            return None
        every = sorted(heads_of_backbone(self.config))
        kept = [kept_by(self.config, member) for member in range(self.num_members)]
        maps = {f"member {place}": {head: float(head in each) for head in every} for place, each in enumerate(kept)}
        return HeadMap(maps, low=0.0, high=1.0)

    @property
    def kept_heads_sentence(self) -> str:
        """How many heads each member keeps, and which layers run once for all; for a Hydra."""
        every = len(heads_of_backbone(self.config))
        counts = [len(kept_by(self.config, member)) for member in range(self.num_members)]
        parts = [
            f"Heads kept of {every}: {', '.join(f'member {place} {count}' for place, count in enumerate(counts))}"
        ]
        return "; ".join([*parts, *filter(None, [trunk_sentence(self.config)])]) + "."

    def answer(self, value: Any, class_names: Sequence[str] | None = None) -> dict[str, Any]:
        """What `predict_decisions` says, with `scores` of all classes, and `members`: each member's probabilities in their order.

        value: a PIL image or a text, as the model `reads`
        class_names: for CLIP that `needs_classes`
        """
        with self._one_at_a_time:
            asked = _Listening(self._with_classes(class_names) if self.needs_classes else self.model)
            [decided] = predict_decisions(asked, [value], self.processor)
        names = list(class_names) if self.needs_classes else self.class_names
        members = member_logits_of(asked.output)[0].double().softmax(dim=-1)  # (members, classes)
        mean = members.mean(dim=0)
        order = mean.argsort(descending=True, stable=True)
        scores = [
            {"label": names[index], "score": score}
            for index, score in zip(order.tolist(), mean[order].tolist(), strict=True)
        ]
        return decided | {"scores": scores, "members": members[:, order].tolist()}

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


class _Listening(nn.Module):
    """Keeps the output of the one pass that it is made for: `predict_decisions` tells no members apart."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.output = model, None

    def forward(self, **inputs: Any) -> Any:
        self.output = self.model(**accepted_inputs(self.model, inputs))
        return self.output
