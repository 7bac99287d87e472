"""Predictions as HTML. Everything from users, models or their configs is escaped."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from .answers import text_of
from .predictor import HydraPredictor


MOST_CLASSES, MOST_OF_A_SET = 5, 12
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # of members, again from the seventh on
TRUNCATED = "The text is longer than the model reads: it read the beginning."
PARTS = {
    "uncertainty": ("total", "all of it"),
    "aleatoric": ("aleatoric", "each member is unsure by itself"),
    "epistemic": ("epistemic", "the members disagree"),
}


def sentence_html(sentence: str, kind: str) -> str:
    """kind: "hint" or "problem" """
    role = ' role="alert"' if kind == "problem" else ""
    return f'<div class="hydra-{kind}"{role}>{escape(sentence)}</div>'


def heading_html(model: HydraPredictor) -> str:
    """The model's name, kind, and the promises of its calibration."""
    task, count = model.task.name.replace("_", " "), len(model.class_names or ())
    task += f", {count:,} labels" if count > 1 else ""
    num_members = getattr(model.config, "num_members", 1)
    members = f"{num_members} members in one model" if num_members > 1 else "one model"
    subtitle = f"{escape(model.config.model_type)} · {members} · {task}"
    promises = ""
    if model.calibration is not None:
        promises = "".join(f"<li>{escape(sentence)}</li>" for sentence in model.calibration["sentences"])
        promises = f"<details><summary>When it says &quot;I don't know&quot;</summary><ul>{promises}</ul></details>"
    return f'<div class="hydra-heading"><h1>{escape(model.name)}</h1><p>{subtitle}</p>{promises}</div>'


def answer_html(answer: dict[str, Any]) -> str:
    """A card with an answer of `HydraPredictor.answer_with_members`."""
    tasks = {"entities": _entity_parts, "interval": _number_parts}
    show = next((show for field, show in tasks.items() if field in answer), _probability_parts)
    return f'<section class="hydra-card">{"".join(show(answer))}</section>'


def _probability_parts(answer: dict[str, Any]) -> Iterator[str]:
    """Of classes, or of labels, which have a threshold each."""
    scores, members, thresholds = answer["scores"], answer["members"], answer.get("thresholds")
    if thresholds is None:
        share, most = _percent(answer["score"]), math.log(len(scores))
        yield _verdict(answer, share, f"{share} sure")
        yield _prediction_set(answer, "may be")
        best = [max(zip(member, scores, strict=True), key=lambda pair: pair[0]) for member in members]
        pairs = [(score["label"], _percent(share)) for share, score in best]
    else:
        most, pairs = len(scores) * math.log(2), []
        yield _verdict(answer, "", "each from a threshold of its own on")
        yield _prediction_set(answer, "may have")
        for member in members:
            shares = zip(scores, member, thresholds, strict=True)
            pairs.append((", ".join(score["label"] for score, share, least in shares if share >= least) or "none", ""))
    rows = []
    for place, score in enumerate(scores[: MOST_CLASSES if thresholds is None else MOST_OF_A_SET]):
        marks = _dots([member[place] for member in members])
        if thresholds is not None:
            marks += f'<s style="left:{100 * thresholds[place]:.1f}%"></s>'
        rows.append(_row(score["label"], score["score"], _percent(score["score"]), "probability", marks))
    notes = ["probability", *["dots: the members"] * (len(members) > 1), *["line: its threshold"] * bool(thresholds)]
    yield _section("Classes" if thresholds is None else "Labels", "; ".join(notes), rows)
    yield _uncertainty(answer, most)
    yield _members(pairs)


def _number_parts(answer: dict[str, Any]) -> Iterator[str]:
    intervals = answer["interval"] or []
    between = ", ".join(f"between {low:.4g} and {high:.4g}" for low, high in intervals)
    yield _verdict(answer, between, between or "without an interval")
    yield _uncertainty(answer, answer["uncertainty"], "variance")
    yield _members([(", ".join(f"{number:.4g}" for number in member), "") for member in answer["members"]])


def _entity_parts(answer: dict[str, Any]) -> Iterator[str]:
    """The text with its entities marked, those that the model abstains on in another way."""
    text, marked, end, unsure = answer["text"], [], 0, 0
    for entity in answer["entities"]:
        is_unsure, word = bool(entity["abstain"]), escape(text[entity["start"] : entity["end"]])
        note = f"{_percent(entity['score'])}{', not sure' * is_unsure}; uncertainty {entity['uncertainty']:.2f}"
        marked.append(escape(text[end : entity["start"]]))
        marked.append(f'<mark class="hydra-entity{" hydra-doubted" * is_unsure}" title="{note}">{word}')
        marked.append(f"<small>{escape(entity['entity_group'])}{' ?' * is_unsure}</small></mark>")
        end, unsure = entity["end"], unsure + is_unsure
    yield f'<div class="hydra-text">{"".join(marked)}{escape(text[end:])}</div>'
    notes = [answer["reason"], TRUNCATED if answer["truncated"] else None]
    yield "".join(f"<p>{escape(note)}</p>" for note in notes if note)
    hint = "" if answer["abstain"] is not None else " · not calibrated: none is marked as not sure"
    yield _section("Entities", f"{len(answer['entities'])} found, {unsure} not sure{hint}", [])
    yield _uncertainty(answer, math.log(answer["num_classes"]), "nats, of the least sure word")


def _verdict(answer: dict[str, Any], guess: str, sure: str) -> str:
    """guess, sure: what stands beside the answer where the model abstains, and where it does not"""
    text = escape(text_of(answer, "{:.4g}"))
    notes = [answer["reason"], TRUNCATED if answer.get("truncated") else None]
    shown = "".join(f"<small>{escape(note)}</small>" for note in notes if note)
    if answer["abstain"]:
        unknown = "Nothing relevant" if answer["detector"] == "low score" else "I don't know"
        guess = f"its guess: {text}{f', {guess}' if guess else ''}"
        return f"""<div class="hydra-verdict hydra-abstains">{unknown}<span>{guess}</span>{shown}</div>"""
    hint = " · not calibrated: it never abstains" if answer["abstain"] is None else ""
    return f'<div class="hydra-verdict">{text}<span>{sure}{hint}</span>{shown}</div>'


def _prediction_set(answer: dict[str, Any], may: str) -> str:
    names = answer["prediction_set"]
    if names is None:
        return ""
    shown = "".join(f"<b>{escape(name)}</b>" for name in names[:MOST_OF_A_SET])
    more = f" and {len(names) - MOST_OF_A_SET} more" if len(names) > MOST_OF_A_SET else ""
    # The promise of sets is about data like the validation data, and an input that the model abstains on may be none of it.
    begin = "If it is like the validation data, it" if answer["abstain"] else "It"
    return f'<div class="hydra-set">{begin} {may} {shown or "none of them"}{more}</div>'


def _uncertainty(answer: dict[str, Any], most: float, unit: str | None = None) -> str:
    """most: what fills a bar; unit: nats by default"""
    rows = []
    for part, (name, meaning) in PARTS.items():
        if (value := answer[part]) is not None:
            shown = f"{value:.2f}" if unit is None else f"{value:.3g}"
            rows.append(_row(name, value / most if most else 0.0, shown, name, note=meaning))
    return _section("Uncertainty", unit or f"nats; at most {most:.2f}", rows)


def _members(said: Sequence[tuple[str, str]]) -> str:
    """said: each member's prediction, and what stands at the end of its line"""
    rows = []
    for number, (prediction, end) in enumerate(said):
        dot = f'<i style="background:{COLOURS[number % len(COLOURS)]}"></i>'
        shown = f"{dot}member {number}<b>{escape(prediction)}</b><span>{end}</span>"
        rows.append(f'<div class="hydra-member">{shown}</div>')
    return _section("Members", "", rows) if rows[1:] else ""


def _section(title: str, note: str, rows: Sequence[str]) -> str:
    return f"<h3>{title}<span>{note}</span></h3>{''.join(rows)}"


def _dots(shares: Sequence[float]) -> str:
    """Where each of several members stands on a bar, in a lane of its own, because they often agree."""
    dots = []
    for number, share in enumerate(shares):
        place = f"left:{100 * share:.1f}%;top:{100 * (number + 0.5) / len(shares):.0f}%"
        dots.append(f'<i style="background:{COLOURS[number % len(COLOURS)]};{place}"></i>')
    return "".join(dots) if dots[1:] else ""


def _row(name: str, share: float, value: str, kind: str, marks: str = "", note: str = "") -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    style = f"width:{100 * min(1.0, max(0.0, share)):.1f}%"
    return (
        f'<div class="hydra-row"><label title="{escape(name)}">{escape(name)}{small}</label>'
        f'<div class="hydra-track"><div class="hydra-bar hydra-{kind}" style="{style}"></div>{marks}</div>'
        f"<output>{value}</output></div>"
    )


def _percent(share: float) -> str:
    """Never 100 % unless it is certain, nor 0 % unless it is impossible."""
    rounded = f"{100 * share:.0f} %"
    return {"100 %": "> 99 %", "0 %": "< 1 %"}.get(rounded, rounded) if 0 < share < 1 else rounded
