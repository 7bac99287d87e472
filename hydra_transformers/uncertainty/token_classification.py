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
    """answers: (texts, members, words, classes); labels, scores: (texts, words); classes: the names of the tags"""
    by_prefix = have_prefixes(classes)
    chosen = log_mean_probability(answers).argmax(dim=-1)
    are_words = ~answers.isnan().all(dim=-1).all(dim=1) if labels is None else labels != NO_TAG
    texts, found_scores, right, num_there = [], [], [], 0
    for text in range(len(answers)):
        mask = are_words[text]
        predicted = _entities(chosen[text][mask], classes, by_prefix)
        truth = None if labels is None else set(_entities(labels[text][mask], classes, by_prefix))
        num_there += 0 if truth is None else len(truth)
        of_words = scores[text][mask].tolist()
        for entity in predicted:
            texts.append(text)
            found_scores.append(worst_and_mean(entity, of_words)[0])
            right.append(truth is not None and entity in truth)
    right = None if labels is None else torch.tensor(right, dtype=torch.bool)
    found_scores = torch.tensor(found_scores, dtype=scores.dtype)
    return FoundEntities(torch.tensor(texts, dtype=torch.long), found_scores, right, num_there)


def _entities(tags: Tensor, classes: Sequence[str], by_prefix: bool) -> list[Entity]:
    return entities_in([classes[tag] for tag in tags.tolist()], by_prefix)


def entity_metrics(found: FoundEntities) -> dict[str, float]:
    """Precision, recall and F1 over all texts together: an entity is right if its kind, beginning and end are."""
    right, predicted = int(found.right.sum()), len(found.right)
    return {
        "precision": right / predicted if predicted else 0.0,
        "recall": right / found.num_there if found.num_there else 0.0,
        "entity_f1": 2 * right / (predicted + found.num_there) if predicted + found.num_there else 0.0,
    }


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
        """The members' logits for words (texts, members, words, classes), and their tags (texts, words)."""
        return collect_words(model, data, batch_size)

    def measure(self, answers: Tensor, labels: Tensor | None, decided: DecisionOutput | None = None) -> Metrics:
        """Metrics of entities and of words, and what a calibrated model's threshold brings.

        entity_aurc: the area under risk (share of wrong entities among those answered) against coverage, the surest first
        """
        answers = answers if decided is None else decided.member_logits
        spans = find_entities(answers, labels, _least_sure(answers), self.classes)
        words, tags = rows_of_words(answers, labels)
        metrics = {"mutual_information": float(entropy_split(wide_log_softmax(words))[2].mean())}
        if labels is not None:
            of_words = classification_metrics(words, tags)
            metrics |= entity_metrics(spans) | {name: of_words[name] for name in ("accuracy", "ece", "nll")}
            if len(spans.scores):
                metrics["entity_aurc"] = exact_mean(error_coverage_curve(-spans.scores, (~spans.right).double())[1])
        if decided is not None and len(spans.scores):
            # An entity is answered if it abstains on none of its words.
            answered = find_entities(answers, labels, decided.abstain.double(), self.classes).scores == 0
            metrics["answered"] = float(answered.double().mean())
            if labels is not None and answered.any():
                metrics["answered_risk"] = float((~spans.right[answered]).double().mean())
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        """The mean over the words of a text of 1 - the probability of the likeliest tag."""
        return _least_sure(answers).nanmean(dim=1).nan_to_num(0.0)

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        if labels is None:
            raise ValueError("an output does not say which tokens are words: pass labels, or rows of predict")
        spans = find_entities(output.member_logits, labels, output.detector_score, self.classes)
        spans = _one_of_each_text(spans, random)
        threshold = math.inf if settings["threshold"] is None else float(settings["threshold"])
        answered = spans.scores <= threshold
        return Outcomes(spans.scores, answered, ~spans.right[answered])

    # Calibration

    def fit(self, rows: ValidationRows) -> Fitted:
        """A temperature for the words, and how unsure the least sure word of an entity may be.

        The first half of the texts fits the temperature. The second half fits the threshold of the target, with the entities
        that the model finds as its units: each has the score of its least sure word, and is wrong unless kind, beginning and
        end are right. The entities of one text depend on each other, so a promise with a confidence is made from one of each
        text, drawn at random, and is about such draws: over all entities the share can be higher where long texts err more.
        """
        if rows.alpha not in (None, DEFAULT_ALPHA):
            raise ValueError("alpha is for sets and intervals: leave it out, a target says which entities to answer")
        # not pooled: the decision divides members' logits
        temperature = fit_temperature(*rows_of_words(*rows.first[:2]), pooled=False)
        check_predictions(rows_of_words(*rows.second[:2])[0])
        settings = {"detector": {"name": "msp"}, "temperature": temperature}
        words = int((rows.first.labels != NO_TAG).sum())
        sentences = [
            f"Logits are divided by {temperature:.3g}, fitted on the {words:,} words of a random half of the texts "
            f"({rows.counts[0]:,}). What follows was fitted on the other half: promises need texts that nothing else was fitted on."
        ]
        abstention = None
        if rows.target is not None:
            abstention = self._fit_threshold(rows, self.decision(settings))
            sentences.append(f"{abstention.sentence} Entities that it does not find are not counted.")
            if rows.confidence is not None:
                sentences.append("Over all entities of a text nothing is promised: texts with many may err more.")
        return Fitted(settings, sentences, abstention)

    def _fit_threshold(self, rows: ValidationRows, decision: Decision) -> Abstention:
        entities = {"data": self._entities(rows.second, decision)}
        if rows.ood is not None:
            entities["ood_data"] = self._entities(rows.ood, decision)
        unit, scores = "entities", torch.cat([spans.scores for spans in entities.values()])
        if rows.confidence is not None:
            unit = ONE_OF_EACH_TEXT
            entities = {
                name: _one_of_each_text(spans, torch.Generator().manual_seed(0)) for name, spans in entities.items()
            }
        ood_scores = None if rows.ood is None else entities["ood_data"].scores
        return rows.fit_abstention(entities["data"].scores, entities["data"].right, ood_scores, unit, others=scores)

    def _entities(self, rows: Rows, decision: Decision) -> FoundEntities:
        output = decision(rows.answers)
        return find_entities(output.member_logits, rows.labels, output.detector_score, self.classes)


def _least_sure(answers: Tensor) -> Tensor:
    """1 - the probability of the likeliest tag: (texts, members, words, classes) -> (texts, words)"""
    return 1 - log_mean_probability(widened(answers)).exp().amax(dim=-1)


def _one_of_each_text(found: FoundEntities, random: Generator) -> FoundEntities:
    order = torch.randperm(len(found.texts), generator=random)
    first: dict[int, int] = {}
    for place in order.tolist():
        first.setdefault(int(found.texts[place]), place)
    chosen = torch.tensor(sorted(first.values()), dtype=torch.long)
    right = None if found.right is None else found.right[chosen]
    return FoundEntities(found.texts[chosen], found.scores[chosen], right, found.num_there)
