"""Classifiers of tokens: metrics of words and entities, and which entities to answer, with a promised share of wrong ones.

Answers are those of words, as `collect_words` gives them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.tags import NO_TAG, collect_words, rows_of_words
from ..models.decision import Decided
from ..models.detection import entropy_split
from ..models.entities import Entity, entities_in, have_prefixes, worst_and_mean
from ..models.modeling_hydra import log_mean_probability
from ..models.tokens import TokensDecision
from .abstention import Abstention, what_it_buys
from .inputs import wide_log_softmax, widened
from .metrics import classification_metrics, error_coverage_curve, exact_mean
from .task import Task
from .task_calibration import Fitted, HeldOutRows, Rows
from .temperature import fit_temperature


DEFAULT_ALPHA = 0.1  # of `calibrate`, which makes sets for other tasks


# Entities


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
        own = are_words[text]
        predicted = _entities(chosen[text][own], classes, by_prefix)
        there = None if labels is None else set(_entities(labels[text][own], classes, by_prefix))
        num_there += 0 if there is None else len(there)
        of_words = scores[text][own].tolist()
        for entity in predicted:
            texts.append(text)
            found_scores.append(worst_and_mean(entity, of_words)[0])
            right.append(there is not None and entity in there)
    return FoundEntities(
        torch.tensor(texts, dtype=torch.long),
        torch.tensor(found_scores, dtype=scores.dtype),
        None if labels is None else torch.tensor(right, dtype=torch.bool),
        num_there,
    )


def _entities(tags: Tensor, classes: Sequence[str], by_prefix: bool) -> list[Entity]:
    return entities_in([classes[tag] for tag in tags.tolist()], by_prefix)


def entity_metrics(found: FoundEntities) -> dict[str, float]:
    """Precision, recall and F1 over all texts together: an entity is right if its kind, beginning and end are.

    Example:
        >>> right, nothing = torch.tensor([True, False]), torch.zeros(2)
        >>> entity_metrics(FoundEntities(nothing, nothing, right, num_there=4))
        {'precision': 0.5, 'recall': 0.25, 'entity_f1': 0.3333333333333333}
    """
    right, predicted = int(found.right.sum()), len(found.right)
    return {
        "precision": right / predicted if predicted else 0.0,
        "recall": right / found.num_there if found.num_there else 0.0,
        "entity_f1": 2 * right / (predicted + found.num_there) if predicted + found.num_there else 0.0,
    }


TAG_COLUMNS = {
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


def measure_tags(
    answers: Tensor, labels: Tensor | None, decided: Decided | None, classes: Sequence[str]
) -> dict[str, float]:
    """Metrics of entities and of words, and what a calibrated model's threshold buys; without labels what can be said without.

    entity_aurc: the area under risk (share of wrong entities among those answered) against coverage, the surest first
    """
    answers = answers if decided is None else decided.member_logits
    word_scores = _least_sure(answers)
    found = find_entities(answers, labels, word_scores, classes)
    words, tags = rows_of_words(answers, labels)
    metrics = {"mutual_information": float(entropy_split(wide_log_softmax(words))[2].mean())}
    if labels is not None:
        of_words = classification_metrics(words, tags)
        metrics |= entity_metrics(found) | {name: of_words[name] for name in ("accuracy", "ece", "nll")}
        if len(found.scores):
            metrics["entity_aurc"] = exact_mean(error_coverage_curve(-found.scores, (~found.right).double())[1])
    if decided is not None and len(found.scores):
        answered = _answered(answers, labels, decided, classes)
        metrics["answered"] = float(answered.double().mean())
        if labels is not None and answered.any():
            metrics["answered_risk"] = float((~found.right[answered]).double().mean())
    return metrics


def _answered(answers: Tensor, labels: Tensor | None, decided: Decided, classes: Sequence[str]) -> Tensor:
    """Of each entity that is found, whether none of its words is marked."""
    return find_entities(answers, labels, decided.abstain.double(), classes).scores == 0


def _least_sure(answers: Tensor) -> Tensor:
    """1 - the probability of the likeliest tag: (texts, members, words, classes) -> (texts, words)"""
    return 1 - log_mean_probability(widened(answers)).exp().amax(dim=-1)


def text_scores(answers: Tensor) -> Tensor:
    """The mean over the words of a text of 1 - the probability of the likeliest tag: (texts, members, words, classes) -> (texts,)"""
    return _least_sure(answers).nanmean(dim=1).nan_to_num(0.0)


# Calibration


def fit_entities(rows: HeldOutRows) -> Fitted:
    """A temperature for the words, and how unsure the least sure word of an entity may be.

    The first half of the texts fits the temperature. The second half fits the threshold of the target, with the entities that the
    model finds as its units: each has the score of its least sure word, and is wrong unless kind, beginning and end are right.
    The entities of one text depend on each other, so a promise with a confidence is made from one of each text, drawn at random.
    """
    if rows.alpha not in (None, DEFAULT_ALPHA):
        raise ValueError(
            "alpha is for sets and intervals, and this model classifies tokens: leave it out, a target says which entities to answer"
        )
    scaling = fit_temperature(*rows_of_words(*rows.first), pooled=False)  # the decision divides members' logits
    [temperature] = scaling.temperature
    settings = {"detector": {"name": "msp"}, "threshold": None, "alpha": None, "temperature": temperature}
    counts = [int((part.labels != NO_TAG).sum()) for part in (rows.first, rows.second)]
    sentences = [
        f"Logits are divided by {temperature:.3g}, fitted on the {counts[0]:,} words of a random half of the texts "
        f"({len(rows.first.labels):,}). What follows was fitted on the other half: promises need texts that nothing else was fitted "
        "on."
    ]
    abstention = None
    if rows.target is not None:
        decision = rows.unfinished(TokensDecision, settings)
        abstention = _fit_threshold(rows, decision)
        settings["threshold"] = abstention.to_dict()["threshold"]
        sentences.append(_sentence(abstention))
    return Fitted(settings, sentences, abstention)


def _fit_threshold(rows: HeldOutRows, decision: TokensDecision) -> Abstention:
    found = _units(rows.second, decision, rows.classes)
    ood = None if rows.ood is None else _units(Rows(rows.ood, None), decision, rows.classes)
    for name, each in {"data": found, "ood_data": ood}.items():
        if each is not None and len(each.scores) == 0:
            raise ValueError(
                f"the model finds no entity in {'half of ' if name == 'data' else ''}{name}, so that no threshold can be fitted: pass "
                "more texts, or texts with entities"
            )
    if rows.confidence is not None:
        found, ood = _one_of_each_text(found), None if ood is None else _one_of_each_text(ood)
    try:
        return Abstention.fit(
            found.scores,
            found.right,
            None if ood is None else ood.scores,
            **rows.target,
            confidence=rows.confidence,
            score=decision.settings["detector"]["name"],
        )
    except ValueError as error:
        units = "entities, one of each text" if rows.confidence is not None else "entities"
        raise ValueError(f"{error} (fitted on half of data: its rows are {len(found.scores)} {units})") from error


def _units(part: Rows, decision: TokensDecision, classes: Sequence[str]) -> FoundEntities:
    decided = decision(part.answers)
    return find_entities(decided.member_logits, part.labels, decided.detector_score, classes)


def _one_of_each_text(found: FoundEntities) -> FoundEntities:
    order = torch.randperm(len(found.texts), generator=torch.Generator().manual_seed(0))
    seen: dict[int, int] = {}
    for place in order.tolist():
        seen.setdefault(int(found.texts[place]), place)
    chosen = torch.tensor(sorted(seen.values()), dtype=torch.long)
    right = None if found.right is None else found.right[chosen]
    return FoundEntities(found.texts[chosen], found.scores[chosen], right, found.num_there)


def _sentence(abstention: Abstention) -> str:
    """What the threshold does to the entities of the fitting texts, and what is promised for others."""
    bought = what_it_buys(abstention.coverage, abstention.risk, abstention.risk_without)
    start = f"Of {abstention.rows:,} entities that it finds there, {bought}."
    shift = "Entities that it does not find are not counted, and nothing holds under distribution shift."
    if abstention.confidence is None:
        return f"{start} No guarantee: new texts may miss the target. {shift}"
    share = f"{100 * abstention.value:g} %"
    promise = {
        "risk": f"at most {share} of the answered entities are wrong",
        "coverage": f"at least {share} of the entities are answered",
        "tpr": f"at least {share} of the entities from elsewhere are refused",
    }[abstention.target]
    return (
        f"{start} With {100 * abstention.confidence:g} % confidence {promise}, counting one of each text as these do, if new texts are "
        f"independent and of the same distribution. {shift}"
    )


ENTITY_COLUMNS = {
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


class TokenTask(Task):
    name = "token_classification"
    title = "token classification"
    metrics = TAG_COLUMNS
    columns = ENTITY_COLUMNS

    def collect(self, model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
        """The members' logits for words (texts, members, words, classes), and their tags (texts, words)."""
        return collect_words(model, data, batch_size)

    def fit(self, rows: HeldOutRows) -> Fitted:
        return fit_entities(rows)

    def measure(
        self, answers: Tensor, labels: Tensor | None, decision_output: Decided | None = None
    ) -> dict[str, float]:
        return measure_tags(answers, labels, decision_output, self.classes)

    def scores(self, answers: Tensor) -> Tensor:
        return text_scores(answers)
