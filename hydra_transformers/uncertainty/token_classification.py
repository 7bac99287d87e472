"""Token classification: metrics of words and entities, and which entities to answer.

Predictions are those of words, as `collect_words` gives them.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..data.tags import NO_TAG, collect_words, rows_of_words
from ..models.decision import Decision
from ..models.ensembling import entropy_split, log_mean_probability
from ..models.entities import Entity, entities_in, have_prefixes, worst_and_mean
from ..models.task import DecisionOutput
from .abstention import Abstention
from .inputs import check_predictions, wide_log_softmax, widened
from .metrics import classification_metrics, error_coverage_curve, exact_mean
from .task import Fitted, Metrics, Outcomes, Rows, Settings, TaskFit, ValidationRows
from .temperature import fit_temperature


DEFAULT_ALPHA = 0.1  # of `calibrate`, which makes sets for other tasks
ONE_OF_EACH_TEXT = "entities (one drawn from each text)"


class FoundEntities(NamedTuple):
    """The entities that a model finds, one after the other.

    texts: the number of each one's text
    scores: the score of its least sure word; higher is less sure
    right: whether kind, beginning and end are those of an entity that is there; None without tags
    num_there: how many entities there are
    """

    texts: Tensor
    scores: Tensor
    right: Tensor | None
    num_there: int


def find_entities(answers: Tensor, labels: Tensor | None, scores: Tensor, classes: Sequence[str]) -> FoundEntities:
    """Find the entities of all texts, one after the other.

    answers: (texts, members, words, classes)
    labels: (texts, words), or None
    scores: (texts, words), how unsure each word is
    classes: the names of the tags
    """
    by_prefix = have_prefixes(classes)
    chosen = log_mean_probability(answers).argmax(dim=-1)
    if labels is None:
        are_words = ~answers.isnan().all(dim=-1).all(dim=1)
    else:
        are_words = labels != NO_TAG

    texts = []
    found_scores = []
    right = []
    num_there = 0
    for text in range(len(answers)):
        mask = are_words[text]
        truth: set[Entity] = set()
        if labels is not None:
            truth.update(_entities(labels[text][mask], classes, by_prefix))
        num_there += len(truth)
        scores_of_words = scores[text][mask].tolist()
        for entity in _entities(chosen[text][mask], classes, by_prefix):
            least_sure, _ = worst_and_mean(entity, scores_of_words)
            texts.append(text)
            found_scores.append(least_sure)
            right.append(entity in truth)

    return FoundEntities(
        texts=torch.tensor(texts, dtype=torch.long),
        scores=torch.tensor(found_scores, dtype=scores.dtype),
        right=None if labels is None else torch.tensor(right, dtype=torch.bool),
        num_there=num_there,
    )


def _entities(tags: Tensor, classes: Sequence[str], by_prefix: bool) -> list[Entity]:
    return entities_in([classes[tag] for tag in tags.tolist()], by_prefix)


def entity_metrics(found: FoundEntities) -> dict[str, float]:
    """Measure precision, recall and F1 over all texts together: an entity is right if its kind,
    beginning and end are."""
    right = int(found.right.sum())
    predicted = len(found.right)
    return {
        "precision": _share(right, predicted),
        "recall": _share(right, found.num_there),
        "entity_f1": _share(2 * right, predicted + found.num_there),
    }


def _share(part: int, whole: int) -> float:
    """Return a share; 0 of nothing."""
    if whole == 0:
        return 0.0
    return part / whole


class TokenFit(TaskFit):
    name = "token_classification"
    judges_rows = False
    metrics: ClassVar = {
        "entity_f1": ("Entity F1", "high"),
        "precision": ("Precision", "high"),
        "recall": ("Recall", "high"),
        "entity_aurc": ("Entity AURC", "low"),
        "accuracy": ("Word accuracy", "high"),
        "ece": ("Word ECE", "low"),
        "nll": ("Word NLL", "low"),
        "mutual_information": ("MI", ""),
        "answered": ("Entities answered", ""),
        "answered_risk": ("Wrong of answered", "low"),
    }
    columns: ClassVar = {
        "entities": "entities",
        "uncertainty": "double",
        "aleatoric": "double",
        "epistemic": "double",
        "abstain": "bool",
        "detector": "string",
        "threshold": "double",
        "reason": "string",
        "truncated": "bool",
    }

    def collect(self, model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
        """Return the members' logits for words (texts, members, words, classes), and their tags
        (texts, words)."""
        return collect_words(model, data, batch_size)

    def measure(self, answers: Tensor, labels: Tensor | None, decided: DecisionOutput | None = None) -> Metrics:
        """Measure entities and words, and what a calibrated model's threshold brings.

        entity_aurc: the area under risk (share of wrong entities among those answered) against
            coverage, the surest first
        """
        if decided is not None:
            answers = decided.member_logits
        found = find_entities(answers, labels, _least_sure(answers), self.classes)
        words, tags = rows_of_words(answers, labels)
        _, _, epistemic = entropy_split(wide_log_softmax(words))
        metrics = {"mutual_information": float(epistemic.mean())}

        if labels is not None:
            metrics |= entity_metrics(found)
            metrics_of_words = classification_metrics(words, tags)
            for name in ("accuracy", "ece", "nll"):
                metrics[name] = metrics_of_words[name]
            if len(found.scores):
                _, risks = error_coverage_curve(-found.scores, (~found.right).double())
                metrics["entity_aurc"] = exact_mean(risks)

        if decided is not None and len(found.scores):
            # An entity is answered if it abstains on none of its words.
            answered = find_entities(answers, labels, decided.abstain.double(), self.classes).scores == 0
            metrics["answered"] = float(answered.double().mean())
            if labels is not None and answered.any():
                metrics["answered_risk"] = float((~found.right[answered]).double().mean())
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        """Return the mean over the words of a text of 1 - the probability of the likeliest tag."""
        return _least_sure(answers).nanmean(dim=1).nan_to_num(0.0)

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        if labels is None:
            raise ValueError("an output does not say which tokens are words: pass labels, or rows of predict")
        found = find_entities(output.member_logits, labels, output.detector_score, self.classes)
        found = _one_of_each_text(found, random)
        threshold = math.inf
        if settings["threshold"] is not None:
            threshold = float(settings["threshold"])
        answered = found.scores <= threshold
        return Outcomes(found.scores, answered, ~found.right[answered])

    # Calibration

    def fit(self, rows: ValidationRows) -> Fitted:
        """Fit a temperature for the words, and how unsure the least sure word of an entity may be.

        The first half of the texts fits the temperature. The second half fits the threshold of the
        target, with the entities that the model finds as its units: each has the score of its least
        sure word, and is wrong unless kind, beginning and end are right. The entities of one text
        depend on each other, so a promise with a confidence is made from one of each text, drawn at
        random, and is about such draws: over all entities the share can be higher where long texts
        err more.
        """
        if rows.alpha not in (None, DEFAULT_ALPHA):
            raise ValueError("alpha is for sets and intervals: leave it out, a target says which entities to answer")

        # The temperature, from the first half; not pooled, as the decision divides members' logits.
        first_words, first_tags = rows_of_words(rows.first.answers, rows.first.labels)
        temperature = fit_temperature(first_words, first_tags, pooled=False)
        second_words, _ = rows_of_words(rows.second.answers, rows.second.labels)
        check_predictions(second_words)
        settings = {"detector": {"name": "msp"}, "temperature": temperature}
        sentences = [
            f"Logits are divided by {temperature:.3g}, fitted on the {len(first_words):,} words of a random half of "
            f"the texts ({rows.counts[0]:,}). What follows was fitted on the other half: promises need texts that "
            "nothing else was fitted on."
        ]

        # The threshold, from the second half.
        abstention = None
        if rows.target is not None:
            abstention = self._fit_threshold(rows, self.decision(settings))
            sentences.append(f"{abstention.sentence} Entities that it does not find are not counted.")
            if rows.confidence is not None:
                sentences.append("Over all entities of a text nothing is promised: texts with many may err more.")
        return Fitted(settings, sentences, abstention)

    def _fit_threshold(self, rows: ValidationRows, decision: Decision) -> Abstention:
        sets = [rows.second]
        if rows.ood is not None:
            sets.append(rows.ood)
        entities = [self._entities(each, decision) for each in sets]
        all_scores = torch.cat([found.scores for found in entities])

        unit = "entities"
        if rows.confidence is not None:
            unit = ONE_OF_EACH_TEXT
            entities = [_one_of_each_text(found, torch.Generator().manual_seed(0)) for found in entities]
        ood_scores = None
        if rows.ood is not None:
            ood_scores = entities[1].scores
        return rows.fit_abstention(entities[0].scores, entities[0].right, ood_scores, unit, others=all_scores)

    def _entities(self, rows: Rows, decision: Decision) -> FoundEntities:
        output = decision(rows.answers)
        return find_entities(output.member_logits, rows.labels, output.detector_score, self.classes)


def _least_sure(answers: Tensor) -> Tensor:
    """Return 1 - the probability of the likeliest tag: (texts, members, words, classes) -> (texts,
    words)"""
    probabilities = log_mean_probability(widened(answers)).exp()
    return 1 - probabilities.amax(dim=-1)


def _one_of_each_text(found: FoundEntities, random: Generator) -> FoundEntities:
    """Keep one entity of each text, drawn at random."""
    order = torch.randperm(len(found.texts), generator=random)
    first: dict[int, int] = {}
    for place in order.tolist():
        first.setdefault(int(found.texts[place]), place)
    chosen = torch.tensor(sorted(first.values()), dtype=torch.long)
    right = found.right
    if right is not None:
        right = right[chosen]
    return FoundEntities(found.texts[chosen], found.scores[chosen], right, found.num_there)
