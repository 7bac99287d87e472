"""Candidates with their quality and costs, and the front of those that no other beats."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .designs import HYDRA, Design


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

    @property
    def sentence(self) -> str:
        """Its numbers in a few words."""
        words = [f"{self.time:.2f} times one model's time", f"accuracy {100 * self.accuracy:.1f}"]
        return ", ".join(words if self.detection is None else [*words, f"AUROC {100 * self.detection:.1f}"])

    def to_dict(self) -> dict[str, Any]:
        derived = {"name": self.name, "detection": self.detection, "quality": self.quality}
        return derived | asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Candidate":
        """What `to_dict` gave, as a candidate."""
        fields = {name: value for name, value in fields.items() if name not in ("name", "detection", "quality")}
        design = dict(fields.pop("design"))
        return cls(Design(**design | {"shared": tuple(design["shared"])}), **fields)


def best_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best quality first; of equal ones the lower NLL, then the faster."""
    return sorted(candidates, key=lambda each: (-each.quality, each.nll, each.time))


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats, fastest first: none is at least as good, as fast and as small, and better in one of
    these."""
    front = [each for each in candidates if not any(_beats(other, each) for other in candidates)]
    return sorted(front, key=lambda each: (each.time, -each.quality))


def _beats(one: Candidate, other: Candidate) -> bool:
    mine, theirs = ((each.quality, -each.time, -each.memory) for each in (one, other))
    return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))


def near_front(candidate: Candidate, candidates: Sequence[Candidate], points: float) -> bool:
    """Whether no other that is at least as fast is more than `points` (of 100) better: a little more and it may win."""
    faster = [each.quality for each in candidates if each.time <= candidate.time]
    return candidate.quality >= max(faster, default=candidate.quality) - points / 100
