"""Run models over data, in and out of distribution, into an `UncertaintyReport`."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._io.processes import check_can_be_shared, gather, rank_and_world_size
from ..data.batches import ChangedBatches, batches, split_labels
from ..data.loading import load_if_named, ood_groups
from ..data.prediction import ZeroShotClassifier, check_chooses_one_class, classes_of
from ..models.decision import Decided, Decision
from ..uncertainty.abstention import Abstention
from ..uncertainty.conformal import ConformalSets, count_sets, summarize_sets
from ..uncertainty.decomposition import decompose
from ..uncertainty.detectors import Detector, as_detector
from ..uncertainty.features import AnswerReader, without_decision
from ..uncertainty.metrics import exact_mean, ood_metrics
from ..uncertainty.streaming import UncertaintyAccumulator
from ..uncertainty.temperature import TemperatureScaling
from .curves import reliability_curve, risk_at_coverages, risk_curve, roc_curve, score_histograms
from .gains import packed_rows
from .report import Metrics, ModelResult, UncertaintyReport
from .tables import set_title


def corrupt_by_name(data: Any, names: str | Sequence[str]) -> Mapping[str, Mapping[Any, Any]]:
    """Corruption -> severity -> data. `hydra_transformers.shift`, which knows how, puts its function in this place."""
    raise RuntimeError("corruptions are named, and what makes them is missing: import hydra_transformers.shift")


def evaluate_uncertainty(
    models: nn.Module | Mapping[str, nn.Module],
    data: Any,
    ood_data: Any = None,
    *,
    score: str | Detector | Mapping[str, Detector] = "msp",
    corruptions: str | Sequence[str] | Mapping[str, Mapping[Any, Any]] | None = None,
    class_prompts: Mapping[str, Tensor] | None = None,
    temperature: TemperatureScaling | Mapping[str, TemperatureScaling] | None = None,
    abstention: Abstention | Mapping[str, Abstention] | None = None,
    conformal: ConformalSets | Mapping[str, ConformalSets] | None = None,
    batch_size: int = 32,
) -> UncertaintyReport:
    """Evaluates models in and out of distribution; each predicts on its own device, and no logits are kept.

    Args:
        models: a Hydra, a Hugging Face classifier or a baseline; or several, `{name: model}`.
        data: labelled data: a DataLoader, a list of dict batches, or a Dataset or list of dict rows; or the name, folder or
            file of a data set, which `load_data` reads for the first model, as with `ood_data`.
        ood_data: `{"near": {name: data}, "far": {name: data}}`, `{name: data}`, or one data set; labels are not read.
        score: the OOD score: a name, see `ood_score` (the paper's is `"msp"`), or a `Detector`. One that is fitted knows a
            single model: for several pass `{name: detector}`, the same detector fitted on each.
        corruptions: names of `hydra_transformers.shift.CORRUPTIONS` or of their groups, one or several, or "all": `data` is
            corrupted so at severities 1 to 5. Other choices, and `data` whose image processor is not known: pass what
            `corrupted_sets` makes. Or other labelled data, such as ImageNet-C, as `{corruption: {severity: data}}`.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one prompt per class: makes it a zero-shot classifier.
        temperature: applied to the member logits; one for all models, or `{name: temperature}` for those that have one. A
            detector that was fitted on logits is fitted on `temperature.wrap(model)`, and that is passed as the model.
        abstention: fitted on other rows, on the same `score`: the report tells what its threshold buys on these. One for all
            models, or by name as above. By default the threshold that a calibrated model has itself.
        conformal: fitted on other rows: the report tells how often the sets hold the right class, and how large they are.
            By default those that a calibrated model has itself.
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
        check_chooses_one_class(model, name)
    first = next(iter(models.values()))
    data = load_if_named(data, first, labelled=True)
    ood_data = load_if_named(ood_data, first, labelled=False)
    groups = {} if isinstance(ood_data, Mapping) and not ood_data else ood_groups(ood_data)
    by_name = corruptions is not None and not isinstance(corruptions, Mapping)
    sweeps = _sweeps(corrupt_by_name(data, corruptions) if by_name else corruptions or {})
    for name, each in _all_data(data, groups, sweeps):
        _check_data(name, each, read_often=len(models) > 1 or by_name)
    scalings = _by_model(temperature, "temperature", TemperatureScaling, models)
    scores = _scores(score, scalings)
    abstentions = _by_model(abstention, "abstention", Abstention, models)
    conformals = _by_model(conformal, "conformal", ConformalSets, models)
    for name, fitted in abstentions.items():
        if fitted is not None and fitted.score not in (None, described(scores[name])):
            raise ValueError(
                f"abstention was fitted on the score {fitted.score!r}, the report's is {described(scores[name])!r}: use one "
                "score"
            )
    results = {}
    for name, model in models.items():
        model = ZeroShotClassifier(model, class_prompts) if class_prompts is not None else model
        model, decision = without_decision(model)
        reads_features = getattr(scores[name], "reads_features", False) or bool(decision and decision.reads_features)
        evaluator = _Evaluator(
            AnswerReader(model, reads_features),
            decision,
            scalings[name],
            abstentions[name],
            conformals[name],
            scores[name],
            batch_size,
        )
        results[name] = evaluator.result(data, groups, sweeps)
    return UncertaintyReport(score=described(next(iter(scores.values()))), models=results)


@dataclass
class _Counts:
    """What was decided, batch by batch: rows, answered rows, wrong ones among these; and see `ConformalSets.counts`."""

    answers: list[tuple[int, int, int]] = field(default_factory=list)
    sets: list[tuple[int, int, int, int]] = field(default_factory=list)

    def gather(self) -> None:
        """Those of all processes."""
        self.answers, self.sets = (
            [each for of_process in gather(counts) for each in of_process] for counts in (self.answers, self.sets)
        )

    def coverage_and_risk(self) -> tuple[float, float | None]:
        rows, answered, wrong = (sum(column) for column in zip(*self.answers, strict=True))
        return answered / rows, wrong / answered if answered else None


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
    score: str | Detector
    batch_size: int

    def result(self, data: Any, ood: Mapping, corruptions: Mapping) -> ModelResult:
        counts = _Counts()
        judged = self.run("data", data, labelled=True, counts=counts)
        id_values = judged.values()
        ood_metrics_by_group, ood_scores, scores_by_group = {}, {}, {}
        for group, data_sets in ood.items():
            ood_metrics_by_group[group], scores_by_group[group] = {}, {}
            for name, foreign in data_sets.items():
                of_ood, place = _Counts(), place_of(group, name)
                judged_ood = self.run(place, foreign, labelled=False, counts=of_ood)
                _warn_of_same_data(place, id_values, judged_ood.values())
                scores = judged_ood.values()["score"]
                detection = ood_metrics(id_values["score"], scores)
                if self.abstention is not None:
                    detection["refused"] = exact_mean(self.abstention.abstain(scores).double())
                elif of_ood.answers:
                    detection["refused"] = 1 - of_ood.coverage_and_risk()[0]
                ood_metrics_by_group[group][name] = detection | _uncertainty(judged_ood)
                ood_scores[set_title(group, name)] = scores_by_group[group][name] = scores
        return ModelResult(
            num_members=judged.num_members,
            id=judged.compute() | _uncertainty(judged),
            ood=ood_metrics_by_group,
            corruptions={
                corruption: {
                    severity: self.corrupted(
                        f"corruptions[{corruption!r}][{severity!r}]", each, id_values["score"], ood_scores
                    )
                    for severity, each in sweep.items()
                }
                for corruption, sweep in corruptions.items()
            },
            abstaining=self.abstaining(id_values, counts),
            sets={"alpha": self.alpha} | summarize_sets(counts.sets) if counts.sets else {},
            rows=packed_rows(id_values, scores_by_group),
            curves={
                "reliability": reliability_curve(id_values["confidence"], id_values["correct"]),
                "risk_coverage": risk_curve(id_values["confidence"], id_values["correct"]),
                "histograms": score_histograms(id_values["score"], ood_scores),
                "roc": {name: roc_curve(id_values["score"], scores) for name, scores in ood_scores.items()},
            },
        )

    def corrupted(self, name: str, data: Any, id_scores: Tensor, ood_scores: Mapping[str, Tensor]) -> Metrics:
        """The metrics on corrupted data, and how well the score separates it from `data` and foreign data from it."""
        judged = self.run(name, data, labelled=True)
        scores = judged.values()["score"]
        found = judged.compute() | {"shift_auroc": ood_metrics(id_scores, scores)["auroc"]}
        if ood_scores:
            aurocs = [ood_metrics(scores, foreign)["auroc"] for foreign in ood_scores.values()]
            found["ood_auroc"] = math.fsum(aurocs) / len(aurocs)
        return found

    @property
    def alpha(self) -> float:
        return self.decision.settings["alpha"] if self.conformal is None else self.conformal.alpha

    def abstaining(self, id_values: Mapping[str, Tensor], counts: _Counts) -> dict[str, float | None]:
        risks = risk_at_coverages(id_values["confidence"], id_values["correct"])
        if self.abstention is not None:
            measured = self.abstention.measure(id_values["score"], id_values["correct"])
            threshold, coverage, risk = self.abstention.threshold, measured["coverage"], measured["risk"]
        elif counts.answers:
            threshold, (coverage, risk) = float(self.decision.settings["threshold"]), counts.coverage_and_risk()
        else:
            return risks
        return risks | {"threshold": threshold, "coverage": coverage, "risk": risk}

    def run(self, name: str, data: Any, labelled: bool, counts: _Counts | None = None) -> UncertaintyAccumulator:
        """All of one data set, gathered from all processes; what is decided on it goes into `counts`."""
        accumulator, classes = UncertaintyAccumulator(self.score), set()
        rank, world_size = rank_and_world_size()
        names = classes_of(self.reader.model) if labelled else None
        shared = batches(data, self.batch_size, self.reader.device, rank, world_size, names)
        for number, batch in enumerate(shared):
            member_logits, member_features = self.reader(batch)
            if isinstance(self.score, Detector) and len(accumulator) == 0:
                self.score.check_heads(self.reader)
            labels = split_labels(batch)[1] if labelled else None
            if labelled and labels is None:
                raise ValueError(f"{name} has no labels: add a column labels (or label) with class indices")
            if self.decision is not None:
                decided = self.decision(member_logits, member_features)
                member_logits = decided.member_logits
                if counts is not None:
                    self.count(counts, decided, labels)
            if self.scaling is not None:
                member_logits = self.scaling(member_logits)
            # Gathered rows are in the order of one process.
            place = (number * world_size + rank) * 2**24 + torch.arange(len(member_logits))
            accumulator.update(member_logits, labels, place, member_features)
            if counts is not None and self.conformal is not None and labelled:
                counts.sets.append(self.conformal.counts(member_logits, labels))
            classes |= set() if labels is None else set(labels.tolist())
        gathered = accumulator.gather()
        if counts is not None:
            counts.gather()
        classes = set().union(*gather(classes)) if labelled else classes
        if len(classes) == 1 and len(gathered) > 1:
            warnings.warn(
                f"all {len(gathered)} labels of {name} are class {classes.pop()}: the metrics say nothing of the others",
                stacklevel=4,
            )
        if len(gathered) == 0:
            raise ValueError(f"{name} is empty: pass at least one sample")
        return gathered

    def count(self, counts: _Counts, decided: Decided, labels: Tensor | None) -> None:
        """Counts what the model itself decides on a batch, where no other rule was passed."""
        if self.decision.settings["threshold"] is not None and self.abstention is None:
            answered = ~decided.abstain
            is_wrong = torch.zeros_like(answered)
            if labels is not None:
                is_wrong = decompose(decided.member_logits).prediction.to(labels.device) != labels
            wrong = answered & is_wrong.to(answered.device)
            counts.answers.append((len(answered), int(answered.sum()), int(wrong.sum())))
        if decided.prediction_set is not None and self.conformal is None and labels is not None:
            counts.sets.append(count_sets(decided.prediction_set, labels))


def _warn_of_same_data(name: str, id_values: Mapping[str, Tensor], ood_values: Mapping[str, Tensor]) -> None:
    """Where a model answers two sets with the same numbers to the last digit, they are most likely one set."""
    columns = ("confidence", "total", "aleatoric")
    if all(torch.equal(id_values[column].sort().values, ood_values[column].sort().values) for column in columns):
        warnings.warn(f"the model answers {name} exactly as it answers data: are they the same data?", stacklevel=4)


def _uncertainty(judged: UncertaintyAccumulator) -> Metrics:
    values = judged.values()
    return {
        "mutual_information": exact_mean(values["epistemic"]),
        "disagreement": exact_mean(values["disagreement"]),
        "total": exact_mean(values["total"]),
        "aleatoric": exact_mean(values["aleatoric"]),
        "num_samples": len(judged),
    }


def place_of(group: str, name: str) -> str:
    """Where an OOD set stands in the argument, for messages."""
    return f"ood_data[{name!r}]" if group == "OOD" else f"ood_data[{group!r}][{name!r}]"


def _sweeps(corruptions: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, Any]]:
    """Corruption -> severity, as a text -> data."""
    for corruption, sweep in corruptions.items():
        if not isinstance(sweep, Mapping):
            raise TypeError("corruptions must be a dict of dicts: pass {corruption: {severity: data}}, or names")
        if not sweep:
            raise ValueError(f"corruptions[{corruption!r}] is empty: pass at least one data set, or leave it out")
    return {name: {str(severity): data for severity, data in sweep.items()} for name, sweep in corruptions.items()}


def _all_data(data: Any, groups: Mapping, sweeps: Mapping) -> list[tuple[str, Any]]:
    found = [("data", data)]
    found += [(place_of(group, name), each) for group, sets in groups.items() for name, each in sets.items()]
    for corruption, sweep in sweeps.items():
        found += [(f"corruptions[{corruption!r}][{severity!r}]", each) for severity, each in sweep.items()]
    return found


def _check_data(name: str, data: Any, read_often: bool) -> None:
    data = data.data if isinstance(data, ChangedBatches) else data
    if read_often and hasattr(data, "__next__"):
        raise TypeError(f"{name} is an iterator, which can be read once: pass a list, a Dataset or a DataLoader")
    check_can_be_shared(data, name)


def described(score: str | Detector) -> str:
    return score if isinstance(score, str) else score.description


def _scores(score: Any, scalings: Mapping[str, TemperatureScaling | None]) -> dict[str, str | Detector]:
    """The score of each model, all of one kind."""
    scores = dict(score) if isinstance(score, Mapping) else dict.fromkeys(scalings, score)
    if set(scores) != set(scalings):
        raise ValueError(
            f"score is for {', '.join(scores) or 'no model'}, models has {', '.join(scalings)}: name each once"
        )
    for each in scores.values():
        as_detector(each)
    kinds = sorted({described(each) for each in scores.values()})
    if len(kinds) > 1:
        raise ValueError(f"score is {' and '.join(kinds)}: models are compared by one, pass the same for each")
    for name, each in scores.items():
        if isinstance(each, str):
            continue
        if each.multi_label:
            raise ValueError(f"the detector of {name} is made for multi-label models: leave out multi_label")
        if each.needs_fit and each.reads_logits and scalings[name] is not None:
            raise ValueError(
                f"{each.name} was fitted on logits, which a temperature changes: fit it on temperature.wrap(model), and pass "
                f"that as {name} without a temperature"
            )
    return scores


def _by_model(given: Any, argument: str, kind: type, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What each model is given: one for all of them, or those named in a dict."""
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
