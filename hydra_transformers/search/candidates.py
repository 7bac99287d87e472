"""Candidates: how each is made, its quality and costs, and the front of those that no other beats."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.tasks import ONE_CLASS, REGRESSION, SEVERAL_LABELS, TOKENS
from ..fusion import encoder_config, number_of_layers, trunk_depth
from ..models.auto import AutoHydra
from ..models.configuration_hydra import SHARED_PARTS


# By task, the metric of its report that a search goes by, and what it is called.
MEASURES = {
    ONE_CLASS: ("accuracy", "accuracy"),
    REGRESSION: ("r2", "R²"),
    SEVERAL_LABELS: ("map", "mAP"),
    TOKENS: ("entity_f1", "entity F1"),
}
ONE_MODEL, DEEP_ENSEMBLE, SOUP, HYDRA = "one model", "Deep Ensemble", "soup", "Hydra"
BUDGETS = (1 / 12, 1 / 6, 1 / 3)  # of the heads that compete
TRUNKS = (1 / 4, 1 / 2, 3 / 4)  # of the layers
PRUNED = {
    "circuits": "pruned each",
    "samples": "pruned each, sampled from one circuit",
    "taylor": "pruned in each layer (Taylor)",
}


@dataclass(frozen=True)
class Design:
    """How a candidate is made.

    kind: "one model", "Deep Ensemble", "soup" or "Hydra"
    trunk_layers: how many first layers are merged whole; members of one model keep them whole
    shared: the parts that members share
    pruned_by: "circuits" (one for each member), "samples" (of one circuit), "taylor", or None where nothing is pruned
    budget: heads that each member loses; with "taylor" heads that each layer loses
    tuned: whether members are fine-tuned after pruning, or where nothing is pruned the Hydra as a whole
    averaged: how many fine-tunings each member is the mean of
    """

    kind: str
    members: int = 1
    trunk_layers: int = 0
    shared: tuple[str, ...] = SHARED_PARTS
    pruned_by: str | None = None
    budget: int = 0
    tuned: bool = False
    averaged: int = 1

    @property
    def key(self) -> str:
        """The name of its file."""
        if self.kind != HYDRA:
            return self.kind.lower().replace(" ", "-")
        parts = [f"hydra_trunk-{self.trunk_layers}_of-{self.members}_shares-{'-'.join(self.shared) or 'nothing'}"]
        parts += [f"averaged-{self.averaged}"] if self.averaged > 1 else []
        parts += [f"{self.pruned_by}-{self.budget}"] if self.pruned_by else []
        return "_".join([*parts, *(["tuned"] if self.tuned else [])])

    @property
    def name(self) -> str:
        """In words: "Hydra of 3, first 6 layers common, 12 heads pruned each, tuned"."""
        if self.kind in (ONE_MODEL, SOUP):
            return self.kind
        words = [f"{self.kind} of {self.members}"]
        if self.kind == DEEP_ENSEMBLE:
            return words[0]
        if self.averaged > 1:
            words.append(f"each the mean of {self.averaged} fine-tunings")
        if set(self.shared) != set(SHARED_PARTS):
            words.append(f"sharing {' and '.join(self.shared) or 'nothing'}")
        if self.trunk_layers:
            words.append(f"first {self.trunk_layers} layers common" if self.trunk_layers > 1 else "first layer common")
        if self.pruned_by:
            heads = f"{self.budget} heads" if self.budget > 1 else "1 head"
            words.append(f"{heads} {PRUNED[self.pruned_by]}")
        if self.tuned:
            words.append("tuned" if self.pruned_by else "tuned as a whole")
        return ", ".join(words)


@dataclass(frozen=True)
class Candidate:
    """A design with its results on the evaluation rows and its costs on this machine.

    Attributes:
        design: how it is made.
        accuracy, nll, ece: on the evaluation rows, with the temperature that was fitted on the calibration rows. Of another
            task than one class per row, accuracy is its own measure (R², mAP or entity F1); what it does not have is None.
        temperature: the divisor of its logits.
        auroc: group (near, far) -> AUROC of the maximum softmax probability, a mean over the group's sets; empty
            without OOD data.
        time, memory: measured on this machine, one model's being 1. Memory is the weights and the peak of a forward.
        multiply_adds, parameters: counted, one model's being 1.
        milliseconds, megabytes: for a batch, measured.
    """

    design: Design
    accuracy: float
    nll: float | None
    ece: float | None
    temperature: float | None
    auroc: dict[str, float] = field(default_factory=dict)
    time: float = 1.0
    memory: float = 1.0
    multiply_adds: float = 1.0
    parameters: float = 1.0
    milliseconds: float = 0.0
    megabytes: float = 0.0
    measure: str = "accuracy"  # what `accuracy` is called

    @property
    def name(self) -> str:
        return self.design.name

    @property
    def is_hydra(self) -> bool:
        return self.design.kind == HYDRA

    @property
    def detection(self) -> float | None:
        """The mean of the groups' AUROC; None without OOD data."""
        return sum(self.auroc.values()) / len(self.auroc) if self.auroc else None

    @property
    def quality(self) -> float:
        """The mean of accuracy and detection; the accuracy where detection was not measured."""
        return self.accuracy if self.detection is None else (self.accuracy + self.detection) / 2

    @property
    def sentence(self) -> str:
        """Its numbers in a few words."""
        words = [f"{self.time:.2f} times one model's time", f"{self.measure} {100 * self.accuracy:.1f}"]
        return ", ".join(words if self.detection is None else [*words, f"AUROC {100 * self.detection:.1f}"])

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "detection": self.detection, "quality": self.quality} | asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Candidate":
        """Reverses `to_dict`."""
        fields = {name: value for name, value in fields.items() if name not in ("name", "detection", "quality")}
        design = fields.pop("design")
        return cls(Design(**design | {"shared": tuple(design["shared"])}), **fields)


def best_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best quality first; of equal ones the lower NLL, then the faster."""
    return sorted(candidates, key=lambda each: (-each.quality, each.nll or 0.0, each.time))


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats, fastest first: none is at least as good, as fast and as small, and better in one of
    these."""

    def beats(one: Candidate, other: Candidate) -> bool:
        mine, theirs = ((each.quality, -each.time, -each.memory) for each in (one, other))
        return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))

    front = [each for each in candidates if not any(beats(other, each) for other in candidates)]
    return sorted(front, key=lambda each: (each.time, -each.quality))


def near_front(candidate: Candidate, candidates: Sequence[Candidate], points: float) -> bool:
    """Whether no candidate that is at least as fast is more than `points` (of 100) better."""
    faster = [each.quality for each in candidates if each.time <= candidate.time]
    return candidate.quality >= max(faster, default=candidate.quality) - points / 100


# The designs to try


def trunk_depths(layers: int, equal: int = 0) -> list[int]:
    """How many first layers to merge, in the order to try: three quarters, a half, a quarter, as many as are equal already, and
    all but the last."""
    shares = {equal, *(depth for share in TRUNKS if (depth := trunk_depth(share, layers)) > equal)}
    return list(dict.fromkeys([*sorted(shares, reverse=True), max(equal, layers - 1)]))


def heads_behind(config: PreTrainedConfig, trunk_layers: int) -> int:
    return (number_of_layers(config) - trunk_layers) * config.num_attention_heads


def budgets_of(config: PreTrainedConfig, trunk_layers: int) -> list[int]:
    """How many heads a member loses, of those behind the trunk: a twelfth, a sixth and a third."""
    return _shares(heads_behind(config, trunk_layers), BUDGETS)


def taylor_budgets(config: PreTrainedConfig) -> list[int]:
    """How many heads each layer loses: a sixth and a third."""
    return _shares(config.num_attention_heads, BUDGETS[1:])


def _shares(heads: int, shares: Sequence[float]) -> list[int]:
    return sorted({count for share in shares if (count := max(1, round(share * heads))) < heads})


def stand_in(model: PreTrainedModel, members: int, trunk_layers: int, budget: int) -> nn.Module:
    """A Hydra as fast as one whose members lose `budget` heads behind the trunk: which heads does not matter."""
    config = encoder_config(model)
    layers = range(trunk_layers, number_of_layers(config))
    heads: dict[int, list[int]] = {}
    for layer, head in [(layer, head) for head in range(config.num_attention_heads) for layer in layers][:budget]:
        heads.setdefault(layer, []).append(head)
    pruned = AutoHydra.from_backbone(model, heads)
    return AutoHydra.from_pruned_members([pruned] * members, trunk_layers=trunk_layers, allow_equal=True)
