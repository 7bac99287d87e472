"""Evaluates models in and out of distribution, and reports the results."""

import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._io.processes import check_can_be_shared, gather, rank_and_world_size
from ..data.batches import ChangedBatches, batches, split_labels
from ..data.loading import load_if_named, ood_groups
from ..data.prediction import ZeroShotClassifier, classes_of
from ..data.tags import collect_words
from ..data.tasks import ONE_CLASS, REGRESSION, REWARDS, SEVERAL_LABELS, TOKENS, WORDS, check_task
from ..models.decision import Decision
from ..uncertainty.abstention import Abstention
from ..uncertainty.conformal import ConformalSets, count_sets, summarize_sets
from ..uncertainty.decomposition import decompose
from ..uncertainty.detectors import Detector, as_detector, ood_score
from ..uncertainty.features import AnswerReader, without_decision
from ..uncertainty.label_decisions import LABEL_COLUMNS, label_scores, measure_labels
from ..uncertainty.metrics import exact_mean, ood_metrics
from ..uncertainty.regression import NUMBER_COLUMNS, measure_numbers, number_scores
from ..uncertainty.rewards import PAIR_COLUMNS, collect_pairs
from ..uncertainty.streaming import UncertaintyAccumulator
from ..uncertainty.tagging import TAG_COLUMNS, measure_tags, text_scores
from ..uncertainty.temperature import TemperatureScaling
from .curves import reliability_curve, risk_at_coverages, risk_curve, roc_curve, score_histograms
from .gains import packed_rows
from .report import Metrics, ModelResult, UncertaintyReport
from .report_tables import set_title
from .task_report import Evaluation, PairEvaluation, TaskReport


ENERGY = (
    "energy"  # shown beside any other score: no fit, no foreign data, and often better than the maximum probability
)


def evaluate_uncertainty(
    models: nn.Module | Mapping[str, nn.Module],
    data: Any,
    ood_data: Any = None,
    *,
    score: str | Detector | Mapping[str, Detector] = "msp",
    corruptions: Mapping[str, Mapping[Any, Any]] | None = None,
    class_prompts: Mapping[str, Tensor] | None = None,
    temperature: TemperatureScaling | Mapping[str, TemperatureScaling] | None = None,
    abstention: Abstention | Mapping[str, Abstention] | None = None,
    conformal: ConformalSets | Mapping[str, ConformalSets] | None = None,
    batch_size: int = 32,
) -> UncertaintyReport | TaskReport:
    """Evaluates models in and out of distribution. Each predicts on its own device; no logits are kept.

    This is written for models that choose one class. Others take `data`, `ood_data` and `batch_size`, and get a `TaskReport`
    with the metrics of their task; see docs/tasks.md.

    Args:
        models: a Hydra, a Hugging Face classifier or a baseline; or several, `{name: model}`.
        data: labelled data: a DataLoader, a list of dict batches, or a Dataset or list of dict rows; or the name, folder or
            file of a data set, which `load_data` reads for the first model, as with `ood_data`.
        ood_data: `{"near": {name: data}, "far": {name: data}}`, `{name: data}`, or one data set; labels are not read.
        score: the OOD score: a name, see `ood_score` (the paper's is `"msp"`), or a `Detector`. A fitted detector belongs
            to one model: for several pass `{name: detector}`, the same detector fitted on each.
        corruptions: `{corruption: {severity: data}}`, as `hydra_transformers.shift.corrupted_sets` and `load_standard_set`
            give it.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one prompt per class: makes it a zero-shot classifier.
        temperature: applied to the member logits; one for all models, or `{name: temperature}` for some of them. Fit a
            detector that reads logits on `temperature.wrap(model)`, and pass that as the model.
        abstention: fitted on other rows with the same `score`: the report says what its threshold buys on these rows. One
            for all models, or by name as above. By default the threshold of a calibrated model.
        conformal: fitted on other rows: the report says how often the sets hold the right class, and how large they are.
            By default the sets of a calibrated model.
        batch_size: rows per batch, where data comes in rows.

    With `torch.distributed` initialised, the processes share the batches of each data set: give every process the whole
    data in the same order (no sampler's part, not shuffled); all of them get the same report.
    """
    models = dict(models) if isinstance(models, Mapping) else {type(models).__name__: models}
    if not models:
        raise ValueError("models is empty: pass at least one model")
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} is no model: pass one model, or several as {{name: model}}")
    tasks = {name: check_task(model, name, (ONE_CLASS, *EVALUATIONS)) for name, model in models.items()}
    are_pairs = isinstance(data, Mapping) and set(data) == {"chosen", "rejected"}
    if set(tasks.values()) <= {REGRESSION, REWARDS} and (are_pairs or REWARDS in tasks.values()):
        tasks = dict.fromkeys(tasks, REWARDS)  # a plain model of one output has no aggregate
    task, first = next(iter(tasks.values())), next(iter(models.values()))
    for name, other in tasks.items():
        if other != task:
            raise ValueError(
                f"{name} is made for {WORDS[other]}, the first model for {WORDS[task]}: compare models of one task"
            )
    if task != ONE_CLASS:
        given = {
            "score": score,
            "corruptions": corruptions,
            "class_prompts": class_prompts,
            "temperature": temperature,
        }
        given |= {"abstention": abstention, "conformal": conformal}
        for name, value in given.items():
            if value != inspect.signature(evaluate_uncertainty).parameters[name].default:
                raise ValueError(
                    f"{name} is for models that choose one class, these are made for {WORDS[task]}: leave it out"
                )
        return _evaluate_task(EVALUATIONS[task], models, data, ood_data, batch_size)
    data = load_if_named(data, first, labelled=True)
    ood_data = load_if_named(ood_data, first, labelled=False)
    groups = {} if isinstance(ood_data, Mapping) and not ood_data else ood_groups(ood_data)
    sweeps = _sweeps(corruptions or {})
    everything = {"data": data}
    everything |= {place_of(group, name): each for group, sets in groups.items() for name, each in sets.items()}
    everything |= {_place(*at): each for at, each in sweeps.items()}
    for place, each in everything.items():
        each = each.data if isinstance(each, ChangedBatches) else each
        if (len(models) > 1 or sweeps) and hasattr(each, "__next__"):
            raise TypeError(f"{place} is an iterator, which can be read once: pass a list, a Dataset or a DataLoader")
        check_can_be_shared(each, place)
    scalings = _by_model(temperature, "temperature", TemperatureScaling, models)
    scores = _scores(score, scalings)
    abstentions = _by_model(abstention, "abstention", Abstention, models)
    conformals = _by_model(conformal, "conformal", ConformalSets, models)
    for name, fitted in abstentions.items():
        used = scores[name].description
        if fitted is not None and fitted.score not in (None, used):
            raise ValueError(
                f"abstention was fitted on the score {fitted.score!r}, the report's is {used!r}: use one score"
            )
    results = {}
    for name, model in models.items():
        model = ZeroShotClassifier(model, class_prompts) if class_prompts is not None else model
        model, decision = without_decision(model)
        reads_features = scores[name].reads_features or bool(decision and decision.reads_features)
        reader = AnswerReader(model, reads_features)
        rules = (scalings[name], abstentions[name], conformals[name])
        results[name] = _Evaluator(reader, decision, *rules, scores[name], batch_size).result(data, groups, sweeps)
    return UncertaintyReport(next(iter(scores.values())).description, results)


# How tasks that do not choose one class are judged.
EVALUATIONS = {
    REGRESSION: Evaluation(REGRESSION, NUMBER_COLUMNS, measure_numbers, number_scores),
    REWARDS: PairEvaluation(REWARDS, PAIR_COLUMNS, None, None, collect_pairs),
    SEVERAL_LABELS: Evaluation(SEVERAL_LABELS, LABEL_COLUMNS, measure_labels, label_scores),
    TOKENS: Evaluation(TOKENS, TAG_COLUMNS, measure_tags, text_scores, collect_words, needs_classes=True),
}


def _evaluate_task(
    evaluation: Evaluation, models: Mapping[str, nn.Module], data: Any, ood_data: Any, batch_size: int
) -> TaskReport:
    first = next(iter(models.values()))
    data = evaluation.load(data, first)
    ood_data = load_if_named(ood_data, first)  # its labels are read where it has any
    for place, each in {"data": data, "ood_data": ood_data}.items():
        if len(models) > 1 and hasattr(each, "__next__"):
            raise TypeError(f"{place} is an iterator, which can be read once: pass a list, a Dataset or a DataLoader")
    results = {name: evaluation.result(model, data, ood_data, batch_size) for name, model in models.items()}
    return TaskReport(evaluation.task, results, dict(evaluation.columns))


@dataclass
class _Answers:
    """The answers to one data set.

    decided: by batch, rows, answered rows and wrong ones among these; empty where no threshold of the model is used
    sets: by batch, see `ConformalSets.counts`
    energies: by batch, (rows,), a second score beside the report's own
    """

    rows: UncertaintyAccumulator
    decided: list[tuple[int, int, int]] = field(default_factory=list)
    sets: list[tuple[int, int, int, int]] = field(default_factory=list)
    energies: list[Tensor] = field(default_factory=list)

    def gathered(self) -> "_Answers":
        """Those of all processes."""
        own = (self.decided, self.sets, self.energies)
        return _Answers(self.rows.gather(), *(list(chain.from_iterable(gather(each))) for each in own))

    def __getitem__(self, name: str) -> Tensor:
        return self.rows.values()[name]

    def coverage_and_risk(self) -> tuple[float, float | None]:
        rows, answered, wrong = (sum(column) for column in zip(*self.decided, strict=True))
        return answered / rows, wrong / answered if answered else None

    def uncertainty(self) -> Metrics:
        names = {"mutual_information": "epistemic"} | {name: name for name in ("disagreement", "total", "aleatoric")}
        return {title: exact_mean(self[name]) for title, name in names.items()} | {"num_samples": len(self.rows)}


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates one model under its settings.

    decision: the model's own, which `reader` does not apply
    """

    reader: AnswerReader
    decision: Decision | None
    scaling: TemperatureScaling | None
    abstention: Abstention | None
    conformal: ConformalSets | None
    score: Detector
    batch_size: int

    def result(self, data: Any, groups: Mapping, sweeps: Mapping[tuple[str, str], Any]) -> ModelResult:
        known = self.answers("data", data)
        ood: dict[str, dict[str, Metrics]] = {group: {} for group in groups}
        scores: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
        for group, sets in groups.items():
            for name, each in sets.items():
                foreign = self.answers(place_of(group, name), each, labelled=False)
                _warn_of_same_data(place_of(group, name), known, foreign)
                scores[group][name] = foreign["score"]
                detection = ood_metrics(known["score"], foreign["score"])
                if self.score.name != ENERGY:
                    energies = (torch.cat(each.energies) for each in (known, foreign))
                    detection["energy_auroc"] = ood_metrics(*energies)["auroc"]
                if self.abstention is not None:
                    detection["refused"] = exact_mean(self.abstention.abstain(foreign["score"]).double())
                elif foreign.decided:
                    detection["refused"] = 1 - foreign.coverage_and_risk()[0]
                ood[group][name] = detection | foreign.uncertainty()
        titled = {set_title(group, name): each for group, sets in scores.items() for name, each in sets.items()}
        corruptions: dict[str, dict[str, Metrics]] = {corruption: {} for corruption, _ in sweeps}
        for (corruption, severity), each in sweeps.items():
            corruptions[corruption][severity] = self.corrupted(_place(corruption, severity), each, known, titled)
        confidence, correct = known["confidence"], known["correct"]
        alpha = self.conformal.alpha if self.conformal is not None else known.sets and self.decision.settings["alpha"]
        return ModelResult(
            num_members=known.rows.num_members,
            id=known.rows.compute() | known.uncertainty(),
            ood=ood,
            corruptions=corruptions,
            abstaining=risk_at_coverages(confidence, correct) | self.at_threshold(known),
            sets={"alpha": alpha} | summarize_sets(known.sets) if known.sets else {},
            rows=packed_rows(known.rows.values(), scores),
            curves={
                "reliability": reliability_curve(confidence, correct),
                "risk_coverage": risk_curve(confidence, correct),
                "histograms": score_histograms(known["score"], titled),
                "roc": {name: roc_curve(known["score"], each) for name, each in titled.items()},
            },
        )

    def corrupted(self, place: str, data: Any, known: _Answers, foreign: Mapping[str, Tensor]) -> Metrics:
        """The metrics on corrupted data, and how well the score separates it from `data` and foreign data from it."""
        corrupted = self.answers(place, data)
        found = corrupted.rows.compute() | {"shift_auroc": ood_metrics(known["score"], corrupted["score"])["auroc"]}
        if foreign:
            aurocs = [ood_metrics(corrupted["score"], scores)["auroc"] for scores in foreign.values()]
            found["ood_auroc"] = math.fsum(aurocs) / len(aurocs)
        return found

    def at_threshold(self, known: _Answers) -> dict[str, float | None]:
        """Threshold, coverage and risk; empty without a threshold."""
        if self.abstention is not None:
            measured = self.abstention.measure(known["score"], known["correct"])
            return {"threshold": self.abstention.threshold, "coverage": measured["coverage"], "risk": measured["risk"]}
        if not known.decided:
            return {}
        coverage, risk = known.coverage_and_risk()
        return {"threshold": float(self.decision.settings["threshold"]), "coverage": coverage, "risk": risk}

    def answers(self, place: str, data: Any, labelled: bool = True) -> _Answers:
        """The answers to one data set, from all processes."""
        found, classes = _Answers(UncertaintyAccumulator(self.score)), set()
        rank, world_size = rank_and_world_size()
        names = classes_of(self.reader.model) if labelled else None
        own_batches = batches(data, self.batch_size, self.reader.device, rank, world_size, names)
        for number, batch in enumerate(own_batches):
            member_logits, member_features = self.reader(batch)
            if len(found.rows) == 0:
                self.score.check_heads(self.reader)
            labels = split_labels(batch)[1] if labelled else None
            if labelled and labels is None:
                raise ValueError(f"{place} has no labels: add a column labels (or label) with class indices")
            if self.decision is not None:
                member_logits = self.decide(found, member_logits, member_features, labels)
            if self.scaling is not None:
                member_logits = self.scaling(member_logits)
            # Gathered rows are in the order of one process.
            index = (number * world_size + rank) * 2**24 + torch.arange(len(member_logits))
            found.rows.update(member_logits, labels, index, member_features)
            found.energies.append(ood_score(member_logits, ENERGY).double().cpu())
            if labelled:
                classes |= set(labels.tolist())
                if self.conformal is not None:
                    found.sets.append(self.conformal.counts(member_logits, labels))
        found = found.gathered()
        classes = set().union(*gather(classes))
        if len(classes) == 1 and len(found.rows) > 1:
            warnings.warn(
                f"all {len(found.rows)} labels of {place} are class {classes.pop()}: the metrics say nothing of the others",
                stacklevel=4,
            )
        if len(found.rows) == 0:
            raise ValueError(f"{place} is empty: pass at least one sample")
        return found

    def decide(self, found: _Answers, logits: Tensor, features: Tensor | None, labels: Tensor | None) -> Tensor:
        """Applies the model's decision, counts what it does where no other rule was passed, and returns its logits."""
        decided = self.decision(logits, features)
        if self.decision.settings["threshold"] is not None and self.abstention is None:
            answered = ~decided.abstain
            wrong = torch.zeros_like(answered)
            if labels is not None:
                wrong = (decompose(decided.member_logits).prediction.to(labels.device) != labels).to(answered.device)
            found.decided.append((len(answered), int(answered.sum()), int((answered & wrong).sum())))
        if decided.prediction_set is not None and self.conformal is None and labels is not None:
            found.sets.append(count_sets(decided.prediction_set, labels))
        return decided.member_logits


def _warn_of_same_data(place: str, known: _Answers, foreign: _Answers) -> None:
    """Two sets with the same answers to the last digit are most likely one set."""
    columns = ("confidence", "total", "aleatoric")
    if all(torch.equal(known[column].sort().values, foreign[column].sort().values) for column in columns):
        warnings.warn(f"the model answers {place} exactly as it answers data: are they the same data?", stacklevel=4)


def place_of(group: str, name: str) -> str:
    """An OOD set's place in the argument, for messages."""
    return f"ood_data[{name!r}]" if group == "OOD" else f"ood_data[{group!r}][{name!r}]"


def _place(corruption: str, severity: str) -> str:
    return f"corruptions[{corruption!r}][{severity!r}]"


def _sweeps(corruptions: Mapping[str, Mapping[Any, Any]]) -> dict[tuple[str, str], Any]:
    """(corruption, severity) -> data."""
    if not isinstance(corruptions, Mapping) or not all(isinstance(each, Mapping) for each in corruptions.values()):
        raise TypeError(
            "corruptions must be a dict of dicts, {corruption: {severity: data}}: pass corrupted_sets(data, names)"
        )
    for corruption, sweep in corruptions.items():
        if not sweep:
            raise ValueError(f"corruptions[{corruption!r}] is empty: pass at least one data set, or leave it out")
    return {(name, str(severity)): data for name, sweep in corruptions.items() for severity, data in sweep.items()}


def _scores(score: Any, scalings: Mapping[str, TemperatureScaling | None]) -> dict[str, Detector]:
    """The score of each model, all of one kind."""
    scores = dict(score) if isinstance(score, Mapping) else dict.fromkeys(scalings, score)
    if set(scores) != set(scalings):
        raise ValueError(
            f"score is for {', '.join(scores) or 'no model'}, models has {', '.join(scalings)}: name each once"
        )
    scores = {name: as_detector(each) for name, each in scores.items()}
    kinds = sorted({each.description for each in scores.values()})
    if len(kinds) > 1:
        raise ValueError(f"score is {' and '.join(kinds)}: models are compared by one, pass the same for each")
    for name, each in scores.items():
        if each.multi_label:
            raise ValueError(f"the detector of {name} is made for multi-label models: leave out multi_label")
        if each.needs_fit and each.reads_logits and scalings[name] is not None:
            raise ValueError(
                f"{each.name} was fitted on logits, which a temperature changes: fit it on temperature.wrap(model), and pass "
                f"that as {name} without a temperature"
            )
    return scores


def _by_model(given: Any, argument: str, kind: type, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """One setting for all models, or those named in a dict."""
    each = given.values() if isinstance(given, Mapping) else [given]
    if not all(value is None or isinstance(value, kind) for value in each):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{argument} is {given!r}: pass {article} {kind.__name__}, or {{name: {kind.__name__}}}")
    if not isinstance(given, Mapping):
        return dict.fromkeys(models, given)
    unknown = [name for name in given if name not in models]
    if unknown:
        raise ValueError(f"{argument} names {unknown[0]!r}, models has {', '.join(models)}: use the models' names")
    return {name: given.get(name) for name in models}
