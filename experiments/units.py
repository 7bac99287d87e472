"""The work of a comparison in units, and the queue from which workers take them."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .setting import Setting


OBJECTIVES = ("acc", "ood", "avg")
CIRC = tuple(f"circ-{objective}" for objective in OBJECTIVES)
TAYLOR = tuple(f"taylor-{index}" for index in range(3))
SAMPLED = tuple(f"sampled-{index}" for index in range(3))
BASELINES = ("batch-ensemble", "mimo", "heads")
CIRCUIT_MEMBER = re.compile(r"circ-(?P<circuit>acc|ood|avg)(-(?P<budget>\d+))?")
# What varies between members drawn from one circuit, in the order of the paper's table 9: heads, batch order, noise.
SOURCES = (
    ("heads",),
    ("order",),
    ("noise",),
    ("order", "noise"),
    ("heads", "order", "noise"),
    (),
)


# What is compared, and judged at a time; a setting names those it takes part in.
GROUPS = {
    "untuned": "methods on one backbone that train nothing more, and Deep Ensembles",
    "zero-shot": "the same for pruned backbones",
    "fine-tunings": "members of several fine-tunings",
    "fine-tunings-tuned": "the same, each pruned by its own circuit and fine-tuned",
    "trunk": "members of several fine-tunings, with whole layers merged at the front",
    "tuned": "the paper's methods with their fine-tuning, and LoRA ensembles",
    "members": "tuned members by themselves, and their Hydras not fused",
    "five": "five members of one backbone",
    "sources": "what makes members of one circuit differ (tables 8 and 9)",
    "budgets": "members of one backbone that lose other numbers of heads",
    "soups": "three fine-tunings, and six averaged two by two into three members, with deep trunks",
    "baselines": "BatchEnsemble, MIMO, classifiers on one backbone, a single LoRA adapter",
}


@dataclass(frozen=True)
class Unit:
    """What one process does at a time.

    kind: "backbone", "circuit", "lora", "member", "baseline" or "judge"
    index: of the backbone; of what is judged, of LoRA ensembles and baselines, the seed
    name: the circuit (its objective), the member, the baseline, or one of `GROUPS`
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


def units_of(setting: Setting, seeds: int, backbones: int) -> dict[Unit, list[Unit]]:
    """All of a setting's units, and what each needs; what others wait for, and what matters most, comes first. LoRA ensembles
    and baselines come right behind the backbones: they train longest, and no worker should be left alone with one at the end."""

    units = [Unit("backbone", index) for index in range(backbones)]
    for group in sorted(setting.groups, key=list(GROUPS).index):
        for seed in range(seeds):
            judged = Unit("judge", seed, group)
            units += [unit for unit in needs(judged, setting, seeds, backbones) if unit not in units]
        units += [Unit("judge", seed, group) for seed in range(seeds)]
    first = ("run", "backbone", "lora", "baseline")
    units.sort(key=lambda unit: first.index(unit.kind) if unit.kind in first else len(first))
    return {unit: needs(unit, setting, seeds, backbones) for unit in units}


def with_budget(members: Sequence[str], budget: int) -> list[str]:
    """The members of the same circuits that lose another number of heads than the setting's."""
    return [f"{name}-{budget}" for name in members]


def circuit_of(member: str) -> str | None:
    """The name of the circuit that prunes a member; None without one."""
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


def needs(unit: Unit, setting: Setting, seeds: int, backbones: int) -> list[Unit]:
    """The units that must be done before this one, each after what it needs itself."""
    backbone = partial(Unit, "backbone")
    if unit.kind == "backbone":
        return []
    if unit.kind == "lora" and setting.lora_from_start:
        return []
    if unit.kind == "baseline" and unit.name != "heads":
        return []
    if unit.kind != "judge":
        circuit = circuit_of(unit.name) if unit.kind == "member" else None
        return [backbone(unit.index)] + ([] if circuit is None else [Unit("circuit", unit.index, circuit)])
    direct = list(judged_units(unit.name, unit.index, setting, seeds, backbones))
    direct += [backbone(index) for index in ensemble(unit.index, seeds, backbones, members_of(unit.name, backbones))]
    direct += [backbone(index) for index in six(unit.index, seeds, backbones) if unit.name == "soups"]
    found: list[Unit] = []
    for each in direct:
        for one in (*needs(each, setting, seeds, backbones), each):
            if one not in found:
                found.append(one)
    return found


def judged_units(group: str, seed: int, setting: Setting, seeds: int, backbones: int) -> Iterator[Unit]:
    """The circuits, members and adapters that a group compares with one seed."""
    own = partial(Unit, "member", seed)
    if group == "zero-shot":
        yield from (Unit("circuit", seed, objective) for objective in ("avg", "ood", "acc"))
    elif group == "tuned":
        yield from (own(name) for name in (*CIRC, *TAYLOR, "oba"))
        yield Unit("lora", seed)
    elif group == "members":
        yield from (own(name) for name in (*CIRC, *TAYLOR, "single"))
    elif group == "five":
        yield from (*(own(name) for name in CIRC), *further_members(seed))
    elif group == "sources":
        yield from (unit for sources in SOURCES for unit in varied_members(seed, sources))
    elif group == "budgets":
        yield from (own(name) for budget in setting.budgets for name in with_budget(CIRC, budget))
    elif group == "fine-tunings-tuned":
        yield from (Unit("member", index, "circ-avg") for index in ensemble(seed, seeds, backbones))
    elif group == "baselines":
        yield from (Unit("baseline", seed, name) for name in BASELINES)
        yield Unit("lora", seed)


def members_of(group: str, backbones: int) -> int:
    """How many fine-tunings the largest ensemble of a group has."""
    if group == "baselines":
        return 1
    return min(5, backbones) if group == "fine-tunings" else 3


def ensemble(seed: int, seeds: int, backbones: int, members: int = 3) -> list[int]:
    """The backbones of a seed's Deep Ensemble, its own first: no two seeds share one of the first three if there are three
    for each."""
    if backbones >= 3 * seeds:
        own = [seed, seeds + 2 * seed, seeds + 2 * seed + 1]
        others = [(own[-1] + step) % backbones for step in range(1, backbones)]
    else:
        own, others = [], [(seed + step) % backbones for step in range(backbones)]
    return list(dict.fromkeys(own + others))[:members]


def six(seed: int, seeds: int, backbones: int) -> list[int]:
    """The fine-tunings that are averaged two by two into a seed's members: no two seeds share one if there are six for each."""
    three = ensemble(seed, seeds, backbones)
    if backbones >= 6 * seeds:
        return three + [3 * (seeds + seed) + step for step in range(3)]
    return [(seed + step) % backbones for step in range(6)]


class Queue:
    """The units of one setting with what each needs, shared by its workers through files.

    UNIT.taken: some worker is at it; UNIT.done; UNIT.failed: it could not be done, and neither can what needs it
    """

    def __init__(self, folder: Path, units: Mapping[Unit, Sequence[Unit]]):
        self.folder, self.needs, self.units = folder, units, list(units)
        for unit, needs in units.items():
            strange = [each for each in needs if each not in units]
            if strange:
                raise ValueError(f"{unit} needs {strange[0]}, which is not among the units: it would wait for ever")

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
        """The units that are not done yet and can be done."""
        left: list[Unit] = []
        lost = set()
        for unit in self.units:  # in an order in which needs come first
            if self.is_marked(unit, "failed") or any(each in lost for each in self.needs[unit]):
                lost.add(unit)
            elif not self.is_marked(unit, "done"):
                left.append(unit)
        return left

    def take(self) -> Unit | None:
        """The first unit that nobody has taken and whose needs are done."""
        for unit in self.left():
            if all(self.is_marked(each, "done") for each in self.needs[unit]) and self.mark(unit, "taken"):
                return unit
        return None

    def give_back(self, unit: Unit) -> None:
        """Leaves a unit that was taken to whoever takes it next."""
        (self.folder / f"{unit}.taken").unlink()

    def start_again(self) -> None:
        """Gives back units that an earlier start left unfinished, and all evaluations: finished ones are not repeated, but there
        may be new methods."""
        for mark in ("*.taken", "*.failed", "judge-*.done"):
            for path in self.folder.glob(mark):
                path.unlink()
