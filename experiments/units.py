"""The work of a comparison in units, and the queue from which workers take them."""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .settings import Setting


BACKBONES = ("backbone", "backbones")
OBJECTIVES = ("acc", "ood", "avg")
CIRC = tuple(f"circ-{objective}" for objective in OBJECTIVES)
# Extracted against the altered set; accuracy knows of no such set.
ALTERED = ("circ-acc", "circ-altered-ood", "circ-altered-avg")
TAYLOR = tuple(f"taylor-{index}" for index in range(3))
SAMPLED = tuple(f"sampled-{index}" for index in range(3))
CIRCUIT_MEMBER = re.compile(r"circ-(?P<circuit>acc|(altered-)?(ood|avg))(-(?P<budget>\d+))?")
# What varies between members drawn from one circuit, in the order of the paper's table 9: heads, batch order, noise.
SOURCES = (
    ("heads",),
    ("order",),
    ("noise",),
    ("order", "noise"),
    ("heads", "order", "noise"),
    (),
)


@dataclass(frozen=True)
class Unit:
    """What one process does at a time.

    kind: "backbone", "backbones" (all of them, side by side), "circuit", "lora", "member" or "judge"
    index: of the backbone; after backbones the seed, which is the backbone that is pruned
    name: the circuit (its objective, after "altered-" if extracted against the altered set), the member, or what is judged:
        "untuned", "tuned", "altered", "sources" or "budgets"
    order, noise: of a member, shifts of the seeds of the batches' order and of all else that is random in training
    """

    kind: str
    index: int
    name: str = ""
    order: int = 0
    noise: int = 0

    def __str__(self) -> str:
        varied = (f"order-{self.order}" if self.order else "", f"noise-{self.noise}" if self.noise else "")
        return "-".join(part for part in (self.kind, str(self.index), self.name, *varied) if part)


ALL_BACKBONES = Unit("backbones", 0)


def units_of(setting: Setting, seeds: int, backbones: int) -> list[Unit]:
    """All of a setting's units; what others wait for, and what matters most, comes first."""

    def of_seeds(kind: str, *names: str) -> list[Unit]:
        return [Unit(kind, seed, name) for name in names for seed in range(seeds)]

    together = setting.backbones_together
    units = [ALL_BACKBONES] if together else [Unit("backbone", index) for index in range(backbones)]
    units += [Unit("circuit", seed, objective) for seed in range(seeds) for objective in ("avg", "ood", "acc")]
    units += of_seeds("judge", "untuned")
    units += of_seeds("member", *CIRC, *TAYLOR) + [unit for seed in range(seeds) for unit in further_members(seed)]
    units += of_seeds("member", "single") + of_seeds("lora", "")
    units += of_seeds("judge", "tuned")
    if setting.has_altered_set:
        own = [name for name in ALTERED if name not in CIRC]
        units += of_seeds("circuit", *(circuit_of(name) for name in own)) + of_seeds("member", *own)
        units += of_seeds("judge", "altered")
    for sources in SOURCES:
        units += [unit for seed in range(seeds) for unit in varied_members(seed, sources) if unit not in units]
    units += of_seeds("judge", "sources")
    for budget in setting.budgets:
        units += of_seeds("member", *with_budget(CIRC, budget))
    return units + of_seeds("judge", "budgets")


def with_budget(members: Sequence[str], budget: int) -> list[str]:
    """The members of the same circuits that lose another number of heads than the setting's."""
    return [f"{name}-{budget}" for name in members]


def circuit_of(member: str) -> str | None:
    """The name of the circuit by which a member is pruned."""
    if member in SAMPLED:
        return "avg"
    found = CIRCUIT_MEMBER.fullmatch(member)
    return found["circuit"] if found else None


def budget_of(member: str) -> int | None:
    """How many heads a member loses, where its name says it."""
    found = CIRCUIT_MEMBER.fullmatch(member)
    return int(found["budget"]) if found and found["budget"] else None


def varied_members(seed: int, sources: Sequence[str]) -> list[Unit]:
    """Three members from one circuit that differ in `sources` alone."""
    names = SAMPLED if "heads" in sources else ("circ-avg",) * 3
    return [
        Unit("member", seed, name, 10 * index * ("order" in sources), 10 * index * ("noise" in sources))
        for index, name in enumerate(names)
    ]


def further_members(seed: int) -> list[Unit]:
    """The fourth and the fifth of an ensemble whose first three are the circuits'."""
    return varied_members(seed, ("heads", "order", "noise"))[1:]


def needs(unit: Unit, units: Sequence[Unit]) -> Iterator[Unit]:
    """The units that must be done before this one."""
    if unit.kind == "judge":
        earlier = units[: units.index(unit)]
        yield from (each for each in earlier if each.kind in BACKBONES or each.index == unit.index)
    elif unit.kind not in BACKBONES:
        yield ALL_BACKBONES if ALL_BACKBONES in units else Unit("backbone", unit.index)
    if unit.kind == "member" and circuit_of(unit.name):
        yield Unit("circuit", unit.index, circuit_of(unit.name))


def deep_ensemble(seed: int, seeds: int, backbones: int) -> list[int]:
    """The backbones of a seed's Deep Ensemble, its own first: no two seeds share one if there are three for each."""
    if backbones >= 3 * seeds:
        return [seed, seeds + 2 * seed, seeds + 2 * seed + 1]
    return [(seed + index) % backbones for index in range(3)]


def missing_packages(unit: Unit) -> list[str]:
    """What a unit needs besides Transformers and is not installed: the Trainer wants accelerate, LoRA wants peft."""
    packages = []
    if unit.kind in ("member", "lora") or (unit.kind == "judge" and unit.name != "untuned"):
        packages.append("accelerate")
    if unit.kind == "lora" or (unit.kind == "judge" and unit.name == "tuned"):
        packages.append("peft")
    return [name for name in packages if importlib.util.find_spec(name) is None]


class Queue:
    """The units of one setting, shared by its workers through files.

    UNIT.taken: some worker is at it; UNIT.done; UNIT.failed: it could not be done, and neither can what needs it
    """

    def __init__(self, folder: Path, units: list[Unit]):
        self.folder, self.units = folder, units

    def is_marked(self, unit: Unit, mark: str) -> bool:
        return (self.folder / f"{unit}.{mark}").exists()

    def mark(self, unit: Unit, mark: str) -> bool:
        """Whether this worker was the one to set the mark."""
        try:
            os.close(os.open(self.folder / f"{unit}.{mark}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def left(self) -> list[Unit]:
        """What is not done yet and can be."""
        left: list[Unit] = []
        lost = set()
        for unit in self.units:  # in an order in which needs come first
            if self.is_marked(unit, "failed") or any(each in lost for each in needs(unit, self.units)):
                lost.add(unit)
            elif not self.is_marked(unit, "done"):
                left.append(unit)
        return left

    def take(self) -> Unit | None:
        """The first unit that nobody has taken and whose needs are done."""
        for unit in self.left():
            if all(self.is_marked(each, "done") for each in needs(unit, self.units)) and self.mark(unit, "taken"):
                return unit
        return None

    def start_again(self) -> None:
        """Gives back what workers of an earlier start had taken and not done, and all judging: what is judged stays, but
        there may be more methods now."""
        for mark in ("*.taken", "*.failed", "judge-*.done"):
            for path in self.folder.glob(mark):
                path.unlink()
