"""The search: cheap candidates first, expensive ones where they can still win, all judged on rows that nothing was fitted
on."""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..baselines import DeepEnsemble, soup
from ..baselines.soup import StrangersError
from ..fusion import encoder_config
from ..models.auto import AutoHydra
from ..models.configuration_hydra import SHARED_PARTS
from ..pruning import Circuit, draw_members, extract_circuit
from ..reports import fusion_report
from ..reports.evaluation import evaluate_uncertainty
from ..reports.report import ModelResult, UncertaintyReport
from ..training import Recipe, finetune_members
from ..uncertainty import Calibration, calibrate
from .candidates import (
    DEEP_ENSEMBLE,
    HYDRA,
    ONE_MODEL,
    SOUP,
    Candidate,
    Design,
    better,
    near_front,
    pareto_front,
)
from .costs import Costs, machine_of
from .held_out import HeldOut, rows_of
from .plan import (
    LEAST_MEMBERS,
    MOST_TUNED,
    MOST_WITH_FEWER,
    Extraction,
    Plan,
    budgets_of,
    heads_behind,
    stand_in,
    taylor_budgets,
    trunk_depths,
)
from .targets import POINTS, Target, in_order
from .work import Work


NEAR = 2.0  # points of quality below the front from which tuning may win
SLACK = 1.05  # by which a time that is measured twice may differ


@dataclass(frozen=True)
class Tuning:
    """How pruned members are fine-tuned."""

    recipe: Recipe
    train_data: Any
    arguments: dict[str, Any]


@dataclass
class Search:
    """Candidates of some models, and what they reached.

    models: several fine-tunings, or one
    num_members: of a Hydra at most
    tuning: None where there is nothing to train with
    seconds: for which each candidate's time is measured
    say: shows a line of progress
    notes: what was left out, and why
    """

    models: list[PreTrainedModel]
    num_members: int
    data: HeldOut
    work: Work
    target: Target
    tuning: Tuning | None
    batch_size: int
    seed: int
    seconds: float
    progress: bool
    say: Callable[[str], None]
    planned: int = 0
    candidates: dict[str, Candidate] = field(default_factory=dict)
    results: dict[str, ModelResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _circuits: dict[int, list[Circuit]] = field(default_factory=dict)

    def run(self) -> None:
        self.judge(Design(ONE_MODEL))
        if self.is_one:
            self.judge_pruned_copies()
        else:
            self.judge(Design(DEEP_ENSEMBLE, self.num_members))
            self.judge_soup()
            whole = [self.judge(design) for design in self.whole_designs()]
            self.judge_pruned_fine_tunings(whole)
        self.judge_fewer_members()
        if self.tuning is not None:
            self.judge_tuned()

    def judge_soup(self) -> None:
        try:
            self.judge(Design(SOUP, self.num_members))
        except StrangersError as error:
            self.notes.append(f"There is no soup: {error}.")

    @property
    def is_one(self) -> bool:
        return len(self.models) == 1

    @property
    def has_ood_data(self) -> bool:
        return self.data.ood_search is not None

    @property
    def config(self) -> Any:
        return encoder_config(self.models[0])

    def plan(self, is_one: bool) -> Plan:
        """The work ahead, as far as it is known: which trunk is best is not, so half of the layers stand for it.

        is_one: whether members will be copies of one model; before a fine-tuning, the one that is there tells nothing
            of it
        """
        layers = self.config.num_hidden_layers
        depths = copies_trunks(layers) if is_one else sorted({0, layers // 2})
        has_circuits = not is_one or self.has_ood_data
        circuits = [depth for depth in depths if has_circuits and budgets_of(self.config, depth)]
        later = [] if is_one or self.target.kind == "accuracy_within" or len(depths) < 2 else [0]
        pruned = sum(len(budgets_of(self.config, depth)) for depth in circuits if depth not in later)
        count = 1 + (pruned if has_circuits else len(taylor_budgets(self.config)))
        if not is_one:
            count += 2 + len(trunk_depths(layers)) + (self.verdict_if_known != "fuse")
        count += min(MOST_WITH_FEWER, count) * (self.num_members - LEAST_MEMBERS)
        done = len(list((self.work.folder / "candidates").glob("*.report.json")))
        self.planned = max(count, done)
        return Plan(
            self.num_members,
            max(0, count - done),
            extractions=[self._extraction(depth, is_one) for depth in circuits if depth not in later],
            later_extractions=[self._extraction(depth, is_one) for depth in circuits if depth in later],
            passes=0 if is_one or self.verdict_if_known else 13,
            tuned=0 if self.tuning is None else MOST_TUNED * self.num_members,
        )

    @property
    def verdict_if_known(self) -> str | None:
        found = self.work.read("fusion")
        return None if found is None else found["verdict"]

    def _extraction(self, depth: int, is_one: bool) -> Extraction:
        circuits = len(self.objectives) if is_one else self.num_members
        removals, heads = self.removals(depth, is_one), heads_behind(self.config, depth)
        is_done = len(list((self.work.folder / "circuits" / f"trunk-{depth}").glob("*.json"))) == circuits
        layers = self.config.num_hidden_layers
        return Extraction(0 if is_done else circuits, heads, removals, share=(layers - depth) / layers)

    # Several fine-tunings

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """What `fusion_report` says, on the search rows: verdict, sentence and shared."""
        found = self.work.read("fusion")
        if found is None:
            report = fusion_report(self.models, self.data.search, self.data.ood_search, batch_size=self.batch_size)
            found = {"verdict": report.verdict, "sentence": report.sentence, "shared": list(report.shared)}
            self.work.write(found | {"report": report.to_dict()}, "fusion")
        return found

    @cached_property
    def equal_layers(self) -> int:
        """How many first layers fine-tunings have in common already."""
        return AutoHydra.from_pruned_members(self.models).config.trunk_layers

    def whole_designs(self) -> Iterator[Design]:
        """All members with all heads, sharing what the fusion report says; trunks where everything is shared."""
        verdict = self.verdict["verdict"]
        self.notes.append(f"May they be fused? {self.verdict['sentence']}")
        hydra = Design(HYDRA, self.num_members)
        if verdict in ("fuse", "cannot tell"):
            for depth in trunk_depths(self.config.num_hidden_layers, self.equal_layers):
                yield replace(hydra, trunk_layers=depth)
        if verdict != "fuse":
            yield replace(hydra, shared=tuple(self.verdict["shared"]))
        if verdict not in ("fuse", "cannot tell"):
            self.notes.append("No layers were merged whole: not even everything else may be shared.")

    def judge_pruned_fine_tunings(self, whole: Sequence[Candidate]) -> None:
        """Each without heads of its own circuit: with the deepest trunk that costs less than half a point, and without
        any where that is better by half a point, or detection counts whatever it takes."""
        merged = better([each for each in whole if each.design.trunk_layers])
        plain = better([each for each in whole if not each.design.trunk_layers])
        good = [each for each in merged if each.quality >= merged[0].quality - POINTS / 100]
        bases = [max((each.design for each in good), key=lambda each: each.trunk_layers)] if good else []
        if plain and (
            not merged or self.target.kind == "accuracy_within" or plain[0].quality > merged[0].quality + POINTS / 100
        ):
            bases.append(plain[0].design)
        elif plain:
            self.notes.append(
                f"No circuits were extracted for members without common layers, which are no more than {POINTS:g} points better and "
                "slower."
            )
        for base in bases:
            for budget in self.budgets_that_can_win(base.trunk_layers):
                self.judge(replace(base, pruned_by="circuits", budget=budget))

    def budgets_that_can_win(self, trunk_layers: int) -> list[int]:
        """The budgets to try; none, before any circuit is extracted, where even the fewest members would be too slow for the
        target."""
        budgets = budgets_of(self.config, trunk_layers)
        if self.target.kind != "cost" or not budgets:
            return budgets
        fastest = stand_in(self.models[0], LEAST_MEMBERS, trunk_layers, budgets[-1])
        _, time = self.costs.milliseconds(fastest)
        if time <= self.target.value * SLACK:
            return budgets
        where = f"with {trunk_layers} common layers" if trunk_layers else "without common layers"
        self.notes.append(
            f"No circuits were extracted for members {where}: {LEAST_MEMBERS} with {budgets[-1]} heads pruned take {time:.2f} times "
            f"one model's time, and {self.target.value:g} is the most."
        )
        return []

    # Copies of one model

    def judge_pruned_copies(self) -> None:
        """By circuits for accuracy, detection and both, behind half of the layers and behind none; without OOD data by
        Taylor scores, and where these make equal members by samples of a circuit for accuracy."""
        if not self.has_ood_data:
            design = Design(HYDRA, self.num_members, pruned_by="taylor")
            judged = [
                self.judge_if_members_differ(replace(design, budget=lost)) for lost in taylor_budgets(self.config)
            ]
            if not any(judged):  # halves of the data may tell the same of heads
                for budget in self.budgets_that_can_win(0):
                    self.judge_if_members_differ(replace(design, pruned_by="samples", budget=budget))
            return
        for depth in copies_trunks(self.config.num_hidden_layers):
            for budget in self.budgets_that_can_win(depth):
                design = Design(HYDRA, self.num_members, depth, pruned_by="circuits", budget=budget)
                if len(self.objectives) == 3 and self.judge_if_members_differ(design):
                    continue
                self.judge_if_members_differ(replace(design, pruned_by="samples"))

    def judge_if_members_differ(self, design: Design) -> bool:
        try:
            self.judge(design)
        except SameMembersError as error:
            self.notes.append(f"{design.name} was left out: {error}.")
            return False
        return True

    # Fewer members

    def judge_fewer_members(self) -> None:
        """The best on the front, and the choice so far, with the first two, three, ... of their members: that takes no more than
        judging them."""
        hydras = [each for each in self.candidates.values() if each.is_hydra]
        best = better(pareto_front(hydras))[:MOST_WITH_FEWER]
        best += [each for each in in_order(hydras, self.target)[:1] if each not in best]
        for candidate in best:
            for members in range(LEAST_MEMBERS, candidate.design.members):
                self.judge(replace(candidate.design, members=members))

    # Tuned members

    def judge_tuned(self) -> None:
        """The best pruned candidates, where they are near enough to the front that a training may bring them there."""
        judged = list(self.candidates.values())
        pruned = [each for each in better(judged) if each.design.pruned_by and not each.design.tuned]
        near = [each for each in pruned if near_front(each, judged, NEAR)]
        if self.target.kind == "cost":
            near = [each for each in near if each.time <= self.target.value * SLACK]
        best: dict[Design, Candidate] = {}
        for each in near:  # of those that differ in their number of members alone the best
            best.setdefault(replace(each.design, members=0), each)
        if not best:
            self.notes.append(f"Nothing was tuned: no pruned candidate is within {NEAR:g} points of the front.")
        for candidate in list(best.values())[:MOST_TUNED]:
            self.judge(replace(candidate.design, tuned=True))

    # Making models

    def circuits(self, trunk_layers: int) -> list[Circuit]:
        """One of each fine-tuning; of one model, by objective."""
        if trunk_layers not in self._circuits:
            self._circuits[trunk_layers] = self._extracted(trunk_layers)
        return self._circuits[trunk_layers]

    def _extracted(self, trunk_layers: int) -> list[Circuit]:
        budget = self.removals(trunk_layers, self.is_one)
        settings = {
            "budget": budget,
            "trunk_layers": trunk_layers,
            "batch_size": self.batch_size,
            "progress": self.progress,
        }
        folder = self.work.folder / "circuits" / f"trunk-{trunk_layers}"
        data = (self.data.search, self.data.ood_search)
        if not self.is_one:
            objective = "avg" if self.has_ood_data else "acc"
            return extract_circuit(self.models, *data, objective, checkpoint=folder, **settings)
        return [
            extract_circuit(self.models[0], *data, objective, checkpoint=folder / f"{objective}.json", **settings)
            for objective in self.objectives
        ]

    @property
    def objectives(self) -> tuple[str, ...]:
        """Of one model's circuits."""
        if not self.has_ood_data:
            return ("acc",)
        return ("acc", "ood", "avg") if self.num_members == 3 else ("avg",)

    def removals(self, trunk_layers: int, is_one: bool) -> int:
        """How many heads a circuit ranks: the largest budget; twice as many where members are sampled from it."""
        largest = budgets_of(self.config, trunk_layers)[-1]
        if not is_one or len(self.objectives) == 3:
            return largest
        return min(max(2 * largest, largest + self.num_members - 1), heads_behind(self.config, trunk_layers) - 1)

    def circuits_of(self, design: Design) -> list[Circuit] | None:
        """Those by which a design's members lost their heads."""
        if design.pruned_by not in ("circuits", "samples"):
            return None
        circuits = self.circuits(design.trunk_layers)
        if design.pruned_by == "samples":
            return circuits[-1:]
        return [circuit.first(design.budget) for circuit in circuits[: design.members]]

    def members_of(self, design: Design) -> list[PreTrainedModel]:
        """The design's members: the first ones of those that there are."""
        if design.pruned_by is None:
            return self.models[: design.members]
        if design.tuned:
            return self._tuned_members(design)
        return self._pruned_members(replace(design, members=self.num_members))[: design.members]

    def _pruned_members(self, design: Design) -> list[PreTrainedModel]:
        models: Any = self.models[0] if self.is_one else self.models
        settings: dict[str, Any] = {"trunk_layers": design.trunk_layers}
        circuits = self.circuits_of(design)
        if design.pruned_by == "taylor":
            settings |= {"dataloader": self.data.search, "num_members": self.num_members, "seed": self.seed}
            settings["heads_per_layer"] = self.config.num_attention_heads - design.budget
        elif design.pruned_by == "samples":
            ranked = len(circuits[0].ranking)
            out_of = min(max(2 * design.budget, design.budget + self.num_members - 1), ranked)
            settings |= {"circuit": circuits[0], "budget": design.budget, "out_of": out_of}
            settings |= {"num_members": self.num_members, "seed": self.seed}
        else:
            settings |= {"circuits": circuits, "budget": design.budget}
        members = draw_members(models, **settings, allow_equal=True)
        if self.is_one and len({str(each.config.kept_heads) for each in members}) < len(members):
            raise SameMembersError("two members would lose the same heads")
        return members

    def _tuned_members(self, design: Design) -> list[PreTrainedModel]:
        recipe = self.tuning.recipe
        if self.is_one and design.trunk_layers:
            recipe = replace(recipe, trunk_layers=design.trunk_layers)  # what is common stays so
        with told(self.progress):
            return finetune_members(
                self.members_of(replace(design, tuned=False)),
                recipe,
                self.tuning.train_data,
                list(rows_of(self.data.search)),
                self.work.folder / "tuned" / design.key,
                seed=self.seed,
                **self.tuning.arguments,
            )

    def model_of(self, design: Design) -> nn.Module:
        """The model that a design describes; whatever takes long is found in the work folder again."""
        if design.kind == ONE_MODEL:
            return self.models[0]
        if design.kind == DEEP_ENSEMBLE:
            return DeepEnsemble(self.models)
        if design.kind == SOUP:
            return soup(self.models)
        trunk = None if self.is_one or set(design.shared) != set(SHARED_PARTS) else design.trunk_layers
        # Circuits of one model may spare the same heads: that the members are one model then shows in the results.
        return AutoHydra.from_pruned_members(self.members_of(design), design.shared, trunk, allow_equal=True)

    # Judging

    def judge(self, design: Design) -> Candidate:
        """Calibrated and judged, or known from before."""
        place = ("candidates", design.key)
        record, path = self.work.read(*place), self.work.path("candidates", f"{design.key}.report")
        is_known = record is not None and path.exists()
        machine = machine_of(self.models[0])
        if is_known and record["machine"] == machine:
            candidate = Candidate.from_dict(record["candidate"])
        else:
            model = self.model_of(design)
            if is_known:  # on another machine, whose times mean nothing here
                candidate = replace(Candidate.from_dict(record["candidate"]), **self.costs.of(model))
            else:
                candidate = self._judged(design, model, path)
            self.work.write({"candidate": candidate.to_dict(), "machine": machine}, *place)
        self.candidates[design.key] = candidate
        [self.results[design.key]] = UncertaintyReport.from_json(path).models.values()
        self._tell(candidate)
        return candidate

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.models[0], self.batch_size, self.seconds)

    def calibrated(self, model: nn.Module) -> Calibration:
        """As the chosen one will be."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="all answers to the .* rows that a temperature was to be fitted on"
            )
            return calibrate(model, self.data.calibration, batch_size=self.batch_size, seed=self.seed)

    def _judged(self, design: Design, model: nn.Module, path: Any) -> Candidate:
        costs = self.costs.of(model)  # first: what a decision adds is no part of a model's price
        calibration = self.calibrated(model)
        report = evaluate_uncertainty(
            {design.name: calibration.model}, self.data.judging, self.data.ood, batch_size=self.batch_size
        )
        report.to_json(path)
        [result] = report.models.values()
        return Candidate(
            design,
            accuracy=result.id["accuracy"],
            nll=result.id["nll"],
            ece=result.id["ece"],
            temperature=calibration.temperature,
            auroc={group: result.ood_average(group)["auroc"] for group in result.ood},
            **costs,
        )

    def _tell(self, candidate: Candidate) -> None:
        detection = "" if candidate.detection is None else f", AUROC {100 * candidate.detection:.1f}"
        self.say(
            f"{len(self.candidates)} of about {max(self.planned, len(self.candidates))}: {candidate.name}: accuracy "
            f"{100 * candidate.accuracy:.1f}{detection}, {candidate.time:.2f} times one model's time"
        )


def told(progress: bool) -> AbstractContextManager:
    """Trainings print a line for each validation: here they do, or not."""
    return nullcontext() if progress else redirect_stdout(io.StringIO())


class SameMembersError(ValueError):
    """Members that would be one model."""


def copies_trunks(layers: int) -> list[int]:
    """How many first layers copies of one model keep whole, the deepest first: its circuits are the cheapest."""
    return sorted({layers // 2, 0}, reverse=True)
