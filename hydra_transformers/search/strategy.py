"""The order of a search: cheap candidates first, expensive ones where they can still win."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from .._io.progress import CountedBatches, progress_bar
from ..data.tasks import ONE_CLASS, task_of_model
from ..fusion import number_of_layers, trunk_depth
from ..fusion.soup import StrangersError
from ..reports import fusion_report
from ..reports.evaluation import evaluate_uncertainty
from ..reports.report import ModelResult
from ..reports.task_report import TaskResult, read_report, set_name
from ..uncertainty import Calibration, calibrate
from ..uncertainty.task_calibration import TaskCalibration
from .candidates import (
    DEEP_ENSEMBLE,
    HYDRA,
    MEASURES,
    ONE_MODEL,
    SOUP,
    TRUNKS,
    Candidate,
    Design,
    best_first,
    budgets_of,
    near_front,
    pareto_front,
    stand_in,
    taylor_budgets,
    trunk_depths,
)
from .choice import POINTS, Target, in_order
from .costs import Costs, machine_of
from .model_builder import ModelBuilder, SameMembersError
from .resuming import OutOfTime, in_words


NEAR = 2.0  # points of quality below the front from which tuning may win
SLACK = 1.05  # by which two measurements of a time may differ
MOST_TUNED = 2
LEAST_MEMBERS = 2
MOST_WITH_FEWER = 3  # candidates that are tried with fewer members


@dataclass
class Search:
    """Tries candidates on rows that nothing was fitted on.

    builder: makes their models
    seconds: how long each candidate's time is measured
    say: shows a line of progress
    candidates, results: by the key of their design
    notes: what was left out, and why
    """

    builder: ModelBuilder
    target: Target
    seconds: float
    say: Callable[[str], None]
    candidates: dict[str, Candidate] = field(default_factory=dict)
    results: dict[str, ModelResult | TaskResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.builder.check_time = self.check_time
        self.data, self.steps = self.builder.data, self.builder.steps
        self.has_ood_data = self.data.ood_search is not None
        self.trying = ""
        self.task = task_of_model(self.builder.models[0])

    @property
    def plan(self) -> str:
        """The candidates to try, in a sentence."""
        layers, builder = number_of_layers(self.builder.config), self.builder
        if builder.is_one:
            parts = [f"copies of the model that lose heads by {'circuits' if self.has_ood_data else 'Taylor scores'}"]
        else:
            depths = ", ".join(map(str, trunk_depths(layers)))
            parts = [f"the {len(builder.models)} models fused, with {depths} of {layers} layers common"]
            if builder.fine_tunings:
                parts.insert(
                    0, f"the {len(builder.fine_tunings)} models averaged into {builder.num_members} members and fused"
                )
            parts += ["the same with heads pruned by circuits"]
        parts += ["the best of them with fewer members"]
        if builder.tuning is not None:
            is_joint = builder.tuning.jointly and not builder.is_one
            parts += ["those with the most common layers tuned as a whole"] if is_joint else []
            parts += ["the best pruned ones tuned, where that can win"]
        return f"Tried in turn: {'; '.join(parts)}."

    def run(self) -> None:
        try:
            self._run()
        except OutOfTime:
            limit = in_words(self.builder.deadline.seconds)
            self.notes.append(
                f"The time limit of {limit} came at {self.trying!r}: that and what would have followed was not tried, and the "
                "best so far is chosen. The same call goes on from here."
            )
            self.say(self.notes[-1])

    def _run(self) -> None:
        self.evaluate(Design(ONE_MODEL))
        if self.builder.is_one:
            self.try_pruned_copies()
        else:
            self.evaluate(Design(DEEP_ENSEMBLE, self.builder.num_members))
            try:
                self.evaluate(Design(SOUP, self.builder.num_members))
            except StrangersError as error:
                self.notes.append(f"There is no soup: {error}.")
            self.try_pruned_fine_tunings([self.evaluate(design) for design in self.whole_designs()])
        self.try_fewer_members()
        if self.builder.tuning is not None:
            if self.builder.tuning.jointly and not self.builder.is_one:
                self.try_tuned_jointly()
            self.try_tuned()

    def check_time(self) -> None:
        """Ends the search when its time is over, but not before there is a Hydra to choose."""
        if any(each.is_hydra for each in self.candidates.values()):
            self.builder.deadline.check()

    # Several fine-tunings

    @cached_property
    def fusion(self) -> dict[str, Any]:
        """The verdict, sentence and shared parts of `fusion_report` on the search rows."""
        if self.task != ONE_CLASS:  # its report compares, and gives no verdict
            sentence = "Each choice is judged by the task's own measure, and so is a Hydra that shares nothing."
            return {"verdict": "cannot tell", "sentence": sentence, "shared": []}
        found = self.steps.read("fusion")
        if found is None:
            known, ood, batch_size = self.data.search, self.data.ood_search, self.builder.batch_size
            total = 16 * len(known) + 12 * len(ood or ())  # how often the report reads them
            with progress_bar(total, "what to share", "batch", self.builder.progress) as bar:
                ood = None if ood is None else CountedBatches(ood, bar)
                report = fusion_report(self.builder.models, CountedBatches(known, bar), ood, batch_size=batch_size)
            found = {"verdict": report.verdict, "sentence": str(report), "shared": list(report.shared)}
            self.steps.write(found | {"report": report.to_dict()}, "fusion")
        return found

    def whole_designs(self) -> Iterator[Design]:
        """All members with all heads, sharing what the fusion report says; trunks where everything is shared, first of members
        that are means of more fine-tunings."""
        verdict = self.fusion["verdict"]
        self.notes.append(f"May they be fused? {self.fusion['sentence']}")
        hydra = Design(HYDRA, self.builder.num_members)
        if verdict in ("fuse", "cannot tell"):
            # A deep trunk first: it is fast, and where time is short it is the one that is there.
            depths = trunk_depths(number_of_layers(self.builder.config), self.builder.equal_layers)
            more = len(self.builder.fine_tunings) // self.builder.num_members
            for averaged in [more, 1] if more else [1]:
                yield from (replace(hydra, trunk_layers=depth, averaged=averaged) for depth in depths)
        if verdict != "fuse":
            yield replace(hydra, shared=tuple(self.fusion["shared"]))
        if verdict not in ("fuse", "cannot tell"):
            self.notes.append("No layers were merged whole: not even everything else may be shared.")

    def try_pruned_fine_tunings(self, whole: Sequence[Candidate]) -> None:
        """Each member loses heads by its own circuit: with the deepest trunk that costs less than half a point and leaves a
        quarter of the layers, and without a trunk where that is better by half a point, or where the target is the best
        detection."""
        most = max(self.builder.equal_layers, trunk_depth(TRUNKS[-1], number_of_layers(self.builder.config)))
        whole = [each for each in whole if each.design.trunk_layers <= most and each.design.averaged == 1]
        merged = best_first([each for each in whole if each.design.trunk_layers])
        plain = best_first([each for each in whole if not each.design.trunk_layers])
        good = [each.design for each in merged if each.quality >= merged[0].quality - POINTS / 100]
        bases = [max(good, key=lambda design: design.trunk_layers)] if good else []
        is_better = plain and merged and plain[0].quality > merged[0].quality + POINTS / 100
        if plain and (not merged or is_better or self.target.kind == "accuracy_within"):
            bases.append(plain[0].design)
        elif plain:
            self.notes.append(
                f"No circuits were extracted for members without common layers, which are no more than {POINTS:g} points better and "
                "slower."
            )
        for base in bases:
            for budget in self.budgets_that_can_win(base.trunk_layers):
                self.evaluate(replace(base, pruned_by="circuits", budget=budget))

    def budgets_that_can_win(self, trunk_layers: int) -> list[int]:
        """The budgets to try; none where even the fewest members, measured before any circuit, are too slow for the
        target."""
        budgets = budgets_of(self.builder.config, trunk_layers)
        if self.target.kind != "cost" or not budgets:
            return budgets
        fastest = stand_in(self.builder.models[0], LEAST_MEMBERS, trunk_layers, budgets[-1])
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

    def try_pruned_copies(self) -> None:
        """By circuits for accuracy, detection and both, behind half of the layers and behind none; without OOD data by
        Taylor scores, or where these make equal members by samples of a circuit for accuracy. With a time limit, copies by
        Taylor scores come first, so that there is a Hydra before any circuit."""
        hydra = Design(HYDRA, self.builder.num_members)
        taylor = taylor_budgets(self.builder.config)
        if not self.has_ood_data:
            differ = [
                self.evaluate_if_members_differ(replace(hydra, pruned_by="taylor", budget=each)) for each in taylor
            ]
            if not any(differ):  # both halves of the data rank the heads alike
                for budget in self.budgets_that_can_win(0):
                    self.evaluate_if_members_differ(replace(hydra, pruned_by="samples", budget=budget))
            return
        if self.builder.deadline.is_set:
            for budget in taylor[:1]:
                self.evaluate_if_members_differ(replace(hydra, pruned_by="taylor", budget=budget))
        # The deepest trunk first, whose circuits take the least time.
        for depth in sorted({number_of_layers(self.builder.config) // 2, 0}, reverse=True):
            for budget in self.budgets_that_can_win(depth):
                design = replace(hydra, trunk_layers=depth, pruned_by="circuits", budget=budget)
                if len(self.builder.objectives) == 3 and self.evaluate_if_members_differ(design):
                    continue
                self.evaluate_if_members_differ(replace(design, pruned_by="samples"))

    def evaluate_if_members_differ(self, design: Design) -> bool:
        try:
            self.evaluate(design)
        except SameMembersError as error:
            self.notes.append(f"{design.name} was left out: {error}.")
            return False
        return True

    # Fewer members, and tuned ones

    def try_fewer_members(self) -> None:
        """The best on the front, and the choice so far, with their first two, three, ... members: no circuits, no training."""
        hydras = [each for each in self.candidates.values() if each.is_hydra]
        best = best_first(pareto_front(hydras))[:MOST_WITH_FEWER]
        best += [each for each in in_order(hydras, self.target)[:1] if each not in best]
        for candidate in best:
            for members in range(LEAST_MEMBERS, candidate.design.members):
                self.evaluate(replace(candidate.design, members=members))

    def try_tuned(self) -> None:
        """The best pruned candidates that are so near to the front that tuning may bring them there."""
        best: dict[Design, Candidate] = {}
        for each in self.near():  # the best of those that differ only in their number of members
            if each.design.pruned_by:
                best.setdefault(replace(each.design, members=0), each)
        if not best:
            self.notes.append(
                f"Nothing was tuned after pruning: no pruned candidate is within {NEAR:g} points of the front."
            )
        for candidate in list(best.values())[:MOST_TUNED]:
            self.evaluate(replace(candidate.design, tuned=True))

    def near(self) -> list[Candidate]:
        """The Hydras that tuning may bring to the front, the best first; not those that are too slow for the target."""
        tried, is_limited = list(self.candidates.values()), self.target.kind == "cost"
        return [
            each
            for each in best_first(tried)
            if each.is_hydra
            and not each.design.tuned
            and near_front(each, tried, NEAR)
            and not (is_limited and each.time > self.target.value * SLACK)
        ]

    def try_tuned_jointly(self) -> None:
        """Of those with the most layers merged the best each, tuned as a whole, where they are near the front."""
        best: dict[int, Candidate] = {}
        for each in self.near():
            if not each.design.pruned_by and each.design.trunk_layers > self.builder.equal_layers:
                best.setdefault(each.design.trunk_layers, each)
        for depth in sorted(best, reverse=True)[:MOST_TUNED]:
            self.evaluate(replace(best[depth].design, tuned=True))

    # One candidate

    def evaluate(self, design: Design) -> Candidate:
        """Builds, calibrates and evaluates a candidate, or reads it from the steps."""
        self.trying = design.name
        place = ("candidates", design.key)
        record, path = self.steps.read(*place), self.steps.path("candidates", f"{design.key}.report")
        is_known = record is not None and path.exists()
        machine = machine_of(self.builder.models[0])
        if is_known and record["machine"] == machine:
            candidate = Candidate.from_dict(record["candidate"])
        else:
            self.check_time()
            model = self.builder.model_of(design)
            if is_known:  # measured on another machine, whose times mean nothing here
                candidate = replace(Candidate.from_dict(record["candidate"]), **self.costs.of(model))
            else:
                candidate = self._evaluated(design, model, path)
            self.steps.write({"candidate": candidate.to_dict(), "machine": machine}, *place)
        self.candidates[design.key] = candidate
        [self.results[design.key]] = read_report(path).models.values()
        self.say(f"{len(self.candidates)}. {candidate.name}: {candidate.sentence}")
        return candidate

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.builder.models[0], self.builder.batch_size, self.seconds)

    def calibrated(self, model: nn.Module, data: Any) -> Calibration | TaskCalibration:
        """As the chosen candidate will be."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="all answers to the .* rows that a temperature was to be fitted on"
            )
            return calibrate(model, data, batch_size=self.builder.batch_size, seed=self.builder.seed)

    def _evaluated(self, design: Design, model: nn.Module, path: Path) -> Candidate:
        costs = self.costs.of(model)  # before calibration, whose decision is no part of the price
        data, batch_size = self.data, self.builder.batch_size
        foreign = [each for sets in data.ood.values() for each in sets.values()]
        total = sum(map(len, [data.calibration, data.evaluation, *foreign]))
        with progress_bar(total, design.name, "batch", self.builder.progress) as bar:
            calibration = self.calibrated(model, CountedBatches(data.calibration, bar))
            evaluation = CountedBatches(data.evaluation, bar)
            ood = {
                group: {name: CountedBatches(each, bar) for name, each in sets.items()}
                for group, sets in data.ood.items()
            }
            report = evaluate_uncertainty({design.name: calibration.model}, evaluation, ood, batch_size=batch_size)
        report.to_json(path)
        [result] = report.models.values()
        if self.task != ONE_CLASS:
            return self._of_task(design, result, calibration, costs)
        return Candidate(
            design,
            accuracy=result.id["accuracy"],
            nll=result.id["nll"],
            ece=result.id["ece"],
            temperature=calibration.temperature,
            auroc={group: result.ood_average(group)["auroc"] for group in result.ood},
            **costs,
        )

    def _of_task(
        self, design: Design, result: TaskResult, calibration: TaskCalibration, costs: dict[str, float]
    ) -> Candidate:
        """The candidate of a task that does not choose one class, by the task's own measure."""
        metric, title = MEASURES[self.task]
        if math.isnan(result.metrics[metric]):
            raise ValueError(
                f"{title} of the evaluation rows is not a number, so nothing can be chosen by it: pass other data"
            )
        detected = {
            group: [result.ood[set_name(group, name)]["auroc"] for name in sets]
            for group, sets in self.data.ood.items()
        }
        return Candidate(
            design,
            accuracy=result.metrics[metric],
            nll=result.metrics.get("nll"),
            ece=result.metrics.get("ece"),
            temperature=calibration.settings.get("temperature"),
            auroc={group: sum(each) / len(each) for group, each in detected.items()},
            measure=title,
            **costs,
        )
