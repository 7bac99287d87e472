"""What a search may try, and what a candidate reached."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..models.configuration_hydra import SHARED_PARTS


ONE_MODEL, DEEP_ENSEMBLE, SOUP, HYDRA = "one model", "Deep Ensemble", "soup", "Hydra"


@dataclass(frozen=True)
class Design:
    """How a candidate is made.

    kind: "one model", "Deep Ensemble", "soup" or "Hydra"
    trunk_layers: how many first layers are merged whole, or for members of one model kept whole; equal ones count by
        themselves
    shared: the parts that members share
    pruned_by: "circuits" (one for each member), "samples" (of one circuit), "taylor", or None where nothing is pruned
    budget: heads that each member loses; with "taylor" heads that each layer loses
    tuned: whether members are fine-tuned after pruning
    """

    kind: str
    members: int = 1
    trunk_layers: int = 0
    shared: tuple[str, ...] = SHARED_PARTS
    pruned_by: str | None = None
    budget: int = 0
    tuned: bool = False

    @property
    def key(self) -> str:
        """The name of its file."""
        if self.kind != HYDRA:
            return self.kind.lower().replace(" ", "-")
        parts = [
            "hydra",
            f"trunk-{self.trunk_layers}",
            f"of-{self.members}",
            "shares-" + ("-".join(self.shared) or "nothing"),
        ]
        parts += [f"{self.pruned_by}-{self.budget}"] if self.pruned_by else []
        return "_".join([*parts, *(["tuned"] if self.tuned else [])])

    @property
    def name(self) -> str:
        """In words; "Hydra, first 6 layers merged, 12 heads pruned each, tuned"."""
        if self.kind == DEEP_ENSEMBLE:
            return f"Deep Ensemble of {self.members}"
        if self.kind != HYDRA:
            return self.kind
        words = [f"Hydra of {self.members}"]
        if set(self.shared) != set(SHARED_PARTS):
            words.append(f"sharing {' and '.join(self.shared) or 'nothing'}")
        if self.trunk_layers:
            words.append(f"first {self.trunk_layers} layers common" if self.trunk_layers > 1 else "first layer common")
        words += [self._pruning()] if self.pruned_by else []
        return ", ".join([*words, *(["tuned"] if self.tuned else [])])

    def _pruning(self) -> str:
        heads = f"{self.budget} heads" if self.budget > 1 else "1 head"
        where = {
            "circuits": "pruned each",
            "samples": "pruned each, sampled from one circuit",
            "taylor": "pruned in each layer (Taylor)",
        }
        return f"{heads} {where[self.pruned_by]}"


@dataclass(frozen=True)
class Candidate:
    """A design with what it reached on the judging rows and what it costs here.

    Attributes:
        design: how it is made.
        accuracy, nll, ece: on the judging rows, with the temperature that was fitted on the calibration rows.
        temperature: what its logits are divided by.
        auroc: group (near, far) -> AUROC of the maximum softmax probability, a mean over the group's sets; empty
            without OOD data.
        time, memory: measured on this machine, one model's being 1. Memory is weights and the most that is alive in a
            forward.
        multiply_adds, parameters: counted, one model's being 1.
        milliseconds, megabytes: of a batch, measured.
    """

    design: Design
    accuracy: float
    nll: float
    ece: float
    temperature: float
    auroc: dict[str, float] = field(default_factory=dict)
    time: float = 1.0
    memory: float = 1.0
    multiply_adds: float = 1.0
    parameters: float = 1.0
    milliseconds: float = 0.0
    megabytes: float = 0.0

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
        """The mean of accuracy and detection; accuracy alone where detection was not measured."""
        return self.accuracy if self.detection is None else (self.accuracy + self.detection) / 2

    def to_dict(self) -> dict[str, Any]:
        derived = {"name": self.name, "detection": self.detection, "quality": self.quality}
        return derived | asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Candidate":
        """What `to_dict` gave, as a candidate."""
        fields = {name: value for name, value in fields.items() if name not in ("name", "detection", "quality")}
        design = dict(fields.pop("design"))
        return cls(Design(**design | {"shared": tuple(design["shared"])}), **fields)


def better(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best quality first; of equal ones the lower NLL, then the faster."""
    return sorted(candidates, key=lambda each: (-each.quality, each.nll, each.time))


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats, fastest first: none is at least as good, as fast and as small, and better in one of
    these."""
    return sorted((each for each in candidates if not any(_beats(other, each) for other in candidates)), key=_by_time)


def _by_time(candidate: Candidate) -> tuple[float, float]:
    return candidate.time, -candidate.quality


def _beats(one: Candidate, other: Candidate) -> bool:
    mine, theirs = ((each.quality, -each.time, -each.memory) for each in (one, other))
    return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))


def near_front(candidate: Candidate, candidates: Sequence[Candidate], points: float) -> bool:
    """Whether no other that is at least as fast is more than `points` (of 100) better: a little more and it may win."""
    faster = [each.quality for each in candidates if each.time <= candidate.time]
    return candidate.quality >= max(faster, default=candidate.quality) - points / 100
