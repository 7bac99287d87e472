"""Predictions as HTML. Everything from users, models or their configs is escaped."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from .answers import prediction_text
from .predictor import HydraPredictor


MOST_CLASSES = 5
MOST_OF_A_SET = 12
# Of members, again from the seventh on.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
TRUNCATED = "The text is longer than the model reads: it read the beginning."
PARTS = {
    "uncertainty": ("total", "all of it"),
    "aleatoric": ("aleatoric", "each member is unsure by itself"),
    "epistemic": ("epistemic", "the members disagree"),
}


def sentence_html(sentence: str, kind: str) -> str:
    """Show a sentence; kind: "hint" or "problem"."""
    role = ' role="alert"' if kind == "problem" else ""
    return f'<div class="hydra-{kind}"{role}>{escape(sentence)}</div>'


def heading_html(model: HydraPredictor) -> str:
    """Show the model's name, its kind, and the promises of its calibration."""
    num_members = getattr(model.config, "num_members", 1)
    members = "one model"
    if num_members > 1:
        members = f"{num_members} members in one model"
    task = model.task.name.replace("_", " ")
    num_classes = len(model.class_names or ())
    if num_classes > 1:
        task += f", {num_classes:,} labels"
    subtitle = f"{escape(model.config.model_type)} · {members} · {task}"

    promises = ""
    if model.calibration is not None:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in model.calibration["sentences"])
        promises = f"<details><summary>When it says &quot;I don't know&quot;</summary><ul>{items}</ul></details>"
    return f'<div class="hydra-heading"><h1>{escape(model.name)}</h1><p>{subtitle}</p>{promises}</div>'


def answer_html(answer: dict[str, Any]) -> str:
    """Show an answer of `HydraPredictor.answer_with_members` as a card."""
    if "entities" in answer:
        parts = _entity_parts(answer)
    elif "interval" in answer:
        parts = _number_parts(answer)
    elif answer.get("thresholds") is not None:
        parts = _label_parts(answer)
    else:
        parts = _class_parts(answer)
    return f'<section class="hydra-card">{"".join(parts)}</section>'


def _class_parts(answer: dict[str, Any]) -> Iterator[str]:
    """Show an answer of one class."""
    scores = answer["scores"]
    members = answer["members"]  # probabilities in the order of the scores
    share = _percent(answer["score"])
    yield _verdict(answer, guess=share, sure=f"{share} sure")
    yield _prediction_set(answer, "may be")

    rows = []
    for index, score in enumerate(scores[:MOST_CLASSES]):
        marks = _dots([member[index] for member in members])
        rows.append(_row(score["label"], score["score"], _percent(score["score"]), "probability", marks))
    notes = ["probability"]
    if len(members) > 1:
        notes.append("dots: the members")
    yield _section("Classes", "; ".join(notes), rows)
    yield _uncertainty(answer, most=math.log(len(scores)))

    predictions = []
    for member in members:
        highest = max(range(len(scores)), key=member.__getitem__)
        predictions.append((scores[highest]["label"], _percent(member[highest])))
    yield _members(predictions)


def _label_parts(answer: dict[str, Any]) -> Iterator[str]:
    """Show an answer of several labels, which have a threshold each."""
    scores = answer["scores"]
    members = answer["members"]  # probabilities in the order of the scores
    thresholds = answer["thresholds"]
    yield _verdict(answer, guess="", sure="each from a threshold of its own on")
    yield _prediction_set(answer, "may have")

    rows = []
    for index, score in enumerate(scores[:MOST_OF_A_SET]):
        marks = _dots([member[index] for member in members])
        marks += f'<s style="left:{100 * thresholds[index]:.1f}%"></s>'
        rows.append(_row(score["label"], score["score"], _percent(score["score"]), "probability", marks))
    notes = ["probability"]
    if len(members) > 1:
        notes.append("dots: the members")
    if thresholds:
        notes.append("line: its threshold")
    yield _section("Labels", "; ".join(notes), rows)
    yield _uncertainty(answer, most=len(scores) * math.log(2))

    predictions = []
    for member in members:
        labels = []
        for score, share, threshold in zip(scores, member, thresholds, strict=True):
            if share >= threshold:
                labels.append(score["label"])
        predictions.append((", ".join(labels) or "none", ""))
    yield _members(predictions)


def _number_parts(answer: dict[str, Any]) -> Iterator[str]:
    """Show an answer of one number or several."""
    intervals = answer["interval"] or []
    between = ", ".join(f"between {low:.4g} and {high:.4g}" for low, high in intervals)
    yield _verdict(answer, guess=between, sure=between or "without an interval")
    yield _uncertainty(answer, most=answer["uncertainty"], unit="variance")
    predictions = []
    for member in answer["members"]:
        numbers = ", ".join(f"{number:.4g}" for number in member)
        predictions.append((numbers, ""))
    yield _members(predictions)


def _entity_parts(answer: dict[str, Any]) -> Iterator[str]:
    """Show a text with its entities marked, those that the model abstains on in another way."""
    text = answer["text"]
    marked = []
    end = 0  # of the entity before
    num_unsure = 0
    for entity in answer["entities"]:
        note = _percent(entity["score"])
        group = escape(entity["entity_group"])
        css_class = "hydra-entity"
        if entity["abstain"]:
            note += ", not sure"
            group += " ?"
            css_class += " hydra-doubted"
            num_unsure += 1
        note += f"; uncertainty {entity['uncertainty']:.2f}"
        word = escape(text[entity["start"] : entity["end"]])
        marked.append(escape(text[end : entity["start"]]))
        marked.append(f'<mark class="{css_class}" title="{note}">{word}<small>{group}</small></mark>')
        end = entity["end"]
    yield f'<div class="hydra-text">{"".join(marked)}{escape(text[end:])}</div>'
    yield "".join(f"<p>{escape(note)}</p>" for note in _notes(answer))

    counts = f"{len(answer['entities'])} found, {num_unsure} not sure"
    if answer["abstain"] is None:
        counts += " · not calibrated: none is marked as not sure"
    yield _section("Entities", counts, [])
    yield _uncertainty(answer, most=math.log(answer["num_classes"]), unit="nats, of the least sure word")


def _notes(answer: dict[str, Any]) -> list[str]:
    """Return why the model abstains, and that it did not read all of a text."""
    notes = []
    if answer["reason"]:
        notes.append(answer["reason"])
    if answer.get("truncated"):
        notes.append(TRUNCATED)
    return notes


def _verdict(answer: dict[str, Any], guess: str, sure: str) -> str:
    """Show the answer, or "I don't know".

    guess, sure: what stands beside it where the model abstains, and where it does not
    """
    text = escape(prediction_text(answer, "{:.4g}"))
    notes = "".join(f"<small>{escape(note)}</small>" for note in _notes(answer))
    if answer["abstain"]:
        unknown = "I don't know"
        if answer["detector"] == "low score":
            unknown = "Nothing relevant"
        its_guess = f"its guess: {text}"
        if guess:
            its_guess += f", {guess}"
        return f'<div class="hydra-verdict hydra-abstains">{unknown}<span>{its_guess}</span>{notes}</div>'
    if answer["abstain"] is None:
        sure += " · not calibrated: it never abstains"
    return f'<div class="hydra-verdict">{text}<span>{sure}</span>{notes}</div>'


def _prediction_set(answer: dict[str, Any], may: str) -> str:
    """Show the classes or labels that may be right; may: the verb."""
    names = answer["prediction_set"]
    if names is None:
        return ""
    listed = "".join(f"<b>{escape(name)}</b>" for name in names[:MOST_OF_A_SET])
    if not listed:
        listed = "none of them"
    if len(names) > MOST_OF_A_SET:
        listed += f" and {len(names) - MOST_OF_A_SET} more"
    # The promise of sets is about data like the validation data, and an input that the model
    # abstains on may be none of it.
    subject = "If it is like the validation data, it" if answer["abstain"] else "It"
    return f'<div class="hydra-set">{subject} {may} {listed}</div>'


def _uncertainty(answer: dict[str, Any], most: float, unit: str | None = None) -> str:
    """Show the uncertainty and its parts as bars.

    most: what fills a bar
    unit: nats by default
    """
    rows = []
    for part, (name, meaning) in PARTS.items():
        value = answer[part]
        if value is None:
            continue
        share = value / most if most else 0.0
        number = f"{value:.2f}" if unit is None else f"{value:.3g}"
        rows.append(_row(name, share, number, name, note=meaning))
    return _section("Uncertainty", unit or f"nats; at most {most:.2f}", rows)


def _members(predictions: Sequence[tuple[str, str]]) -> str:
    """Show each member's prediction, and what stands at the end of its line."""
    if len(predictions) < 2:
        return ""
    rows = []
    for number, (prediction, end) in enumerate(predictions):
        dot = f'<i style="background:{_colour(number)}"></i>'
        line = f"{dot}member {number}<b>{escape(prediction)}</b><span>{end}</span>"
        rows.append(f'<div class="hydra-member">{line}</div>')
    return _section("Members", "", rows)


def _section(title: str, note: str, rows: Sequence[str]) -> str:
    """Show rows under a title, with a note beside it."""
    return f"<h3>{title}<span>{note}</span></h3>{''.join(rows)}"


def _dots(shares: Sequence[float]) -> str:
    """Show where each of several members stands on a bar, in lanes, because they often agree."""
    if len(shares) < 2:
        return ""
    dots = []
    for number, share in enumerate(shares):
        height = 100 * (number + 0.5) / len(shares)
        style = f"background:{_colour(number)};left:{100 * share:.1f}%;top:{height:.0f}%"
        dots.append(f'<i style="{style}"></i>')
    return "".join(dots)


def _colour(member: int) -> str:
    """Return a member's colour."""
    return COLOURS[member % len(COLOURS)]


def _row(name: str, share: float, value: str, kind: str, marks: str = "", note: str = "") -> str:
    """Show a bar between its name and its value.

    share: how full it is
    kind: its class in the style sheet
    marks: what stands on it, as HTML
    note: what stands below the name
    """
    small = f"<small>{escape(note)}</small>" if note else ""
    width = 100 * min(1.0, max(0.0, share))
    return (
        f'<div class="hydra-row"><label title="{escape(name)}">{escape(name)}{small}</label>'
        f'<div class="hydra-track"><div class="hydra-bar hydra-{kind}" style="width:{width:.1f}%"></div>{marks}</div>'
        f"<output>{value}</output></div>"
    )


def _percent(share: float) -> str:
    """Write a share: never 100 % unless it is certain, nor 0 % unless it is impossible."""
    rounded = f"{100 * share:.0f} %"
    if 0 < share < 1:
        if rounded == "100 %":
            return "> 99 %"
        if rounded == "0 %":
            return "< 1 %"
    return rounded
