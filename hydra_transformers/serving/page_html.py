"""Answers as HTML. Everything from users, models or their configs is escaped."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from ..data.tasks import ONE_CLASS, REGRESSION, REWARDS, SEVERAL_LABELS, TOKENS
from ..hub.member_heads import heads_of_backbone, kept_by, trunk_sentence
from ..pruning.head_maps import HeadMap
from .predictor import HydraPredictor


MOST_CLASSES, MOST_OF_A_SET = 5, 12
MEMBER_COLOURS = 6  # in page.css; the seventh member has that of the first
PARTS = {
    "uncertainty": "all of it",
    "aleatoric": "each member is unsure by itself",
    "epistemic": "the members disagree",
}


def answers_html(answers: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Cards side by side. answers: each with the name of its model"""
    cards = "".join(_card(name, answer) for name, answer in answers)
    return f'<div class="hydra-cards">{cards}</div>'


def sentence_html(sentence: str, kind: str) -> str:
    """kind: "hint" or "problem" """
    role = ' role="alert"' if kind == "problem" else ""
    return f'<div class="hydra-{kind}"{role}>{escape(sentence)}</div>'


def heading_html(model: HydraPredictor) -> str:
    """The model's name, kind, and the promises of its calibration."""
    count = len(model.class_names or ())
    answers = {
        ONE_CLASS: f"{count:,} classes" if model.class_names else "classes that you name",
        SEVERAL_LABELS: f"any of {count:,} labels",
        REGRESSION: f"{count:,} numbers" if count > 1 else "a number",
        REWARDS: f"a score, the members' {model.config.aggregate}" if model.task == REWARDS else "",
        TOKENS: f"a tag for each word, of {count:,}",
    }
    members = f"{model.num_members} members in one model" if model.num_members > 1 else "one model"
    about = f"{escape(model.config.model_type)} · {members} · {escape(answers[model.task])}"
    promises = "".join(f"<li>{escape(sentence)}</li>" for sentence in model.promises)
    if promises:
        promises = f"<details><summary>When it says &quot;I don't know&quot;</summary><ul>{promises}</ul></details>"
    return f'<div class="hydra-heading"><h1>{escape(model.name)}</h1><p>{about}</p>{promises}</div>'


def kept_heads_html(model: HydraPredictor) -> str:
    """Which heads each member of a Hydra keeps, how many, and which layers run once for all."""
    every = sorted(heads_of_backbone(model.config))
    kept = [kept_by(model.config, member) for member in range(model.num_members)]
    counts = ", ".join(f"member {member} {len(heads)}" for member, heads in enumerate(kept))
    sentence = "; ".join(filter(None, [f"Heads kept of {len(every)}: {counts}", trunk_sentence(model.config)]))
    maps = {f"member {member}": {head: float(head in heads) for head in every} for member, heads in enumerate(kept)}
    picture = HeadMap(maps, low=0.0, high=1.0)._repr_html_()
    return f'<div class="hydra-heads"><p>{escape(sentence)}.</p>{picture}</div>'


def _card(name: str, answer: dict[str, Any]) -> str:
    members = len(answer["members"])
    count = f"{members} members" if members > 1 else "one member"
    heading = f'<div class="hydra-name">{escape(name)}<span>{count}</span></div>'
    show = next((show for field, show in OF_TASKS.items() if field in answer), _class_parts)
    return f'<section class="hydra-card">{heading}{"".join(show(answer))}</section>'


def _class_parts(answer: dict[str, Any]) -> list[str]:
    score = _percent(answer["score"])
    return [
        _verdict(answer, escape(answer["label"]), score, f"{score} sure"),
        _prediction_set(answer, "It may be", "If it is one of the classes, it may be"),
        _classes(answer),
        _uncertainty(answer, math.log(len(answer["scores"]))),
        _members(answer, lambda member: _best(member, answer["scores"])),
    ]


def _verdict(answer: dict[str, Any], said: str, guess: str, sure: str) -> str:
    """said: the answer as HTML; guess, sure: what stands beside it where the model abstains, and where it does not"""
    notes = [escape(answer["reason"])] if answer["reason"] else []
    if answer["threshold"] is not None and answer.get("detector_score") is not None and not answer["abstain"]:
        score, limit = answer["detector_score"], float(answer["threshold"])
        if answer["detector"] == "low score":
            notes.append(f"It answers: the score is at least {-limit:.3g}.")
        else:
            notes.append(f"It answers: {escape(answer['detector'])} is {score:.3g}, at most {limit:.3g}.")
    if answer.get("truncated"):
        notes.append("The text is longer than the model reads: it read the beginning.")
    shown = "".join(f"<small>{note}</small>" for note in notes)
    if answer["abstain"]:
        unknown = "Nothing relevant" if answer["detector"] == "low score" else "I don't know"
        guess = f"its guess: {said}{f', {guess}' if guess else ''}"
        return f"""<div class="hydra-verdict hydra-abstains">{unknown}<span>{guess}</span>{shown}</div>"""
    never = " · not calibrated: it never abstains" if answer["abstain"] is None else ""
    return f'<div class="hydra-verdict">{said}<span>{sure}{never}</span>{shown}</div>'


def _prediction_set(answer: dict[str, Any], begin: str, foreign: str) -> str:
    """begin, foreign: of the sentence, where the model answers, and where it abstains"""
    names = answer["prediction_set"]
    if names is None:
        return ""
    # A set's promise holds for inputs like those it was fitted on, and this one may differ.
    begin = foreign if answer["abstain"] else begin
    shown = "".join(f"<b>{escape(name)}</b>" for name in names[:MOST_OF_A_SET])
    more = f" and {len(names) - MOST_OF_A_SET} more" if len(names) > MOST_OF_A_SET else ""
    return f'<div class="hydra-set">{begin} {shown or "none of them"}{more}</div>'


def _classes(answer: dict[str, Any]) -> str:
    """The likeliest classes, with a dot for each member on each bar."""
    rows = [
        _row(
            score["label"],
            score["score"],
            _percent(score["score"]),
            "probability",
            _dots([member[place] for member in answer["members"]]),
        )
        for place, score in enumerate(answer["scores"][:MOST_CLASSES])
    ]
    return f"<h3>Classes<span>probability{_legend(answer)}</span></h3>{''.join(rows)}"


def _legend(answer: dict[str, Any]) -> str:
    return "; dots: the members" if len(answer["members"]) > 1 else ""


def _dots(shares: Sequence[float]) -> str:
    """Where each of several members stands on a bar, in a lane of its own, because they often agree."""
    if len(shares) == 1:
        return ""
    places = [f"left:{100 * s:.1f}%;top:{100 * (n + 0.5) / len(shares):.0f}%" for n, s in enumerate(shares)]
    return "".join(f'<i class="hydra-of-{n % MEMBER_COLOURS}" style="{place}"></i>' for n, place in enumerate(places))


def _uncertainty(answer: dict[str, Any], most: float, unit: str | None = None) -> str:
    """most: what fills a bar; unit: nats by default"""
    rows = []
    for part, meaning in PARTS.items():
        value, name = answer[part], "total" if part == "uncertainty" else part
        if value is None:
            continue
        if part == "epistemic" and len(answer["members"]) == 1:
            meaning = "one member has nobody to disagree with"
        shown = f"{value:.2f}" if unit is None else f"{value:.3g}"
        rows.append(_row(name, value / most if most else 0.0, shown, name, "", meaning))
    return f"<h3>Uncertainty<span>{unit or f'nats; at most {most:.2f}'}</span></h3>{''.join(rows)}"


def _members(answer: dict[str, Any], said: Callable[[list[float]], tuple[str, str]]) -> str:
    """said: a member's own -> its answer, and what stands at the end of the line"""
    if len(answer["members"]) == 1:
        return ""
    rows = []
    for number, member in enumerate(answer["members"]):
        own, end = said(member)
        rows.append(
            f'<div class="hydra-member"><i class="hydra-of-{number % MEMBER_COLOURS}"></i>member {number}'
            f"<b>{escape(own)}</b><span>{escape(end)}</span></div>"
        )
    return f'<h3>Members</h3><div class="hydra-members">{"".join(rows)}</div>'


def _best(member: list[float], scores: list[dict[str, Any]]) -> tuple[str, str]:
    best = max(range(len(member)), key=member.__getitem__)
    return scores[best]["label"], _percent(member[best])


# Several labels


def _label_parts(answer: dict[str, Any]) -> list[str]:
    said = escape(", ".join(answer["labels"])) or "no label"
    sure = "each from a threshold of its own on"
    return [
        _verdict(answer, said, "", sure),
        _prediction_set(answer, "It may have", "If its labels are among these, it may have"),
        _labels(answer),
        _uncertainty(answer, len(answer["scores"]) * math.log(2)),
        _members(answer, lambda member: (_chosen_labels(member, answer), "")),
    ]


def _labels(answer: dict[str, Any]) -> str:
    """The likeliest labels, and below these all that are answered with yes, or not at all."""
    rows, yes = [], set(answer["labels"])
    for place, (score, threshold) in enumerate(zip(answer["scores"], answer["thresholds"], strict=True)):
        is_unsure = bool(score.get("abstain"))
        if place >= MOST_OF_A_SET or (place >= MOST_CLASSES and score["label"] not in yes and not is_unsure):
            continue
        decided = "not sure" if is_unsure else "yes" if score["label"] in yes else "no"
        marks = f'<s style="left:{100 * threshold:.1f}%"></s>' + _dots([each[place] for each in answer["members"]])
        kind, share = "unsure" if is_unsure else "probability", score["score"]
        rows.append(
            _row(
                score["label"],
                share,
                _percent(share),
                kind,
                marks,
                f"{decided}; uncertainty {score['uncertainty']:.2f}",
            )
        )
    return f"<h3>Labels<span>probability; line: its threshold{_legend(answer)}</span></h3>{''.join(rows)}"


def _chosen_labels(member: list[float], answer: dict[str, Any]) -> str:
    each = zip(member, answer["thresholds"], answer["scores"], strict=True)
    return ", ".join(score["label"] for share, least, score in each if share >= least) or "no label"


# Numbers and rewards


def _number_parts(answer: dict[str, Any]) -> list[str]:
    named = len(answer["scores"]) > 1
    said = ", ".join(
        f"{each['label']} {each['score']:.4g}" if named else f"{each['score']:.4g}" for each in answer["scores"]
    )
    intervals = [_between(*each) for each in answer["interval"] or ()]
    beside = ", ".join(intervals)
    return [
        _verdict(answer, escape(said), beside, beside or "without an interval"),
        _numbers(answer),
        _uncertainty(answer, answer["uncertainty"], "variance"),
        _members(answer, lambda member: (", ".join(f"{number:.4g}" for number in member), "")),
    ]


def _between(low: float, high: float) -> str:
    return f"between {low:.4g} and {high:.4g}"


def _numbers(answer: dict[str, Any]) -> str:
    """Of each output the interval as a bar, on a line from the lowest to the highest of all that is shown of it."""
    rows = []
    for place, score in enumerate(answer["scores"]):
        members = [each[place] for each in answer["members"]]
        interval = answer["interval"][place] if answer["interval"] else []
        shown = [score["score"], *members, *interval]
        if not all(map(math.isfinite, shown)):
            continue  # the verdict says so
        low, span = min(shown), max(shown) - min(shown)
        low, span = (low, span) if span else (low - 0.5, 1.0)
        own, *shares = [0.05 + 0.9 * (each - low) / span for each in shown]
        first, last = shares[len(members) :] or (0.0, 0.0)
        marks = f'<s style="left:{100 * own:.1f}%"></s>' + _dots(shares[: len(members)])
        note = _between(*interval) if interval else ""
        name = "number" if score["label"] == "LABEL_0" else score["label"]
        rows.append(_row(name, last - first, f"{score['score']:.4g}", "probability", marks, note, first))
    bar = "bar: the interval; " if answer["interval"] else ""
    return f"<h3>Number<span>{bar}line: the answer{_legend(answer)}</span></h3>{''.join(rows)}"


# Tokens


def _entity_parts(answer: dict[str, Any]) -> list[str]:
    unsure = sum(bool(entity["abstain"]) for entity in answer["entities"])
    count = f"{len(answer['entities'])} found" + (f", {unsure} not sure" if unsure else "")
    never = "" if answer["abstain"] is not None else " · not calibrated: none is marked as not sure"
    rows = [
        _row(
            entity["word"],
            entity["score"],
            _percent(entity["score"]),
            "unsure" if entity["abstain"] else "probability",
            "",
            f"{escape(entity['entity_group'])}{', not sure' * bool(entity['abstain'])}; uncertainty {entity['uncertainty']:.2f}",
        )
        for entity in answer["entities"][:MOST_OF_A_SET]
    ]
    return [
        f'<div class="hydra-text">{_marked(answer)}</div>',
        f"<p>{escape(answer['reason'])}</p>" if answer["reason"] else "",
        "<p>The text is longer than the model reads: it read the beginning.</p>" if answer["truncated"] else "",
        f"<h3>Entities<span>{count}{never}</span></h3>{''.join(rows)}",
        _uncertainty(answer, math.log(answer["num_classes"]), "nats, of the least sure word"),
    ]


def _marked(answer: dict[str, Any]) -> str:
    """The text with its entities marked, those that the model abstains on in another way."""
    text, parts, end = answer["text"], [], 0
    for entity in answer["entities"]:
        kind = "hydra-entity hydra-doubted" if entity["abstain"] else "hydra-entity"
        note = f"{entity['entity_group']}{' ?' * bool(entity['abstain'])}"
        word = escape(text[entity["start"] : entity["end"]])
        parts.append(
            f'{escape(text[end : entity["start"]])}<mark class="{kind}">{word}<small>{escape(note)}</small></mark>'
        )
        end = entity["end"]
    return "".join([*parts, escape(text[end:])])


# By a field that the answers of a task have; others are of a model that chooses one class.
OF_TASKS = {"entities": _entity_parts, "labels": _label_parts, "interval": _number_parts}


def _row(name: str, share: float, value: str, kind: str, marks: str, meaning: str = "", start: float = 0.0) -> str:
    width = 100 * min(1.0, max(0.0, share))
    note = f"<small>{meaning}</small>" if meaning else ""
    style = f"width:{width:.1f}%" + (f";margin-left:{100 * start:.1f}%" if start else "")
    return (
        f'<div class="hydra-row"><label title="{escape(name)}">{escape(name)}{note}</label>'
        f'<div class="hydra-track"><div class="hydra-bar hydra-{kind}" style="{style}"></div>{marks}</div>'
        f"<output>{value}</output></div>"
    )


def _percent(share: float) -> str:
    """Never 100 % unless it is certain, nor 0 % unless it is impossible."""
    rounded = f"{100 * share:.0f} %"
    if 0 < share < 1:
        return {"100 %": "> 99 %", "0 %": "< 1 %"}.get(rounded, rounded)
    return rounded
