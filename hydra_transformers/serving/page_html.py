"""Answers as HTML. Everything from users, models or their configs is escaped."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

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
    classes = f"{len(model.class_names):,} classes" if model.class_names else "classes that you name"
    members = f"{model.num_members} members in one model" if model.num_members > 1 else "one model"
    about = f"{escape(model.config.model_type)} · {members} · {classes}"
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
    parts = [
        f'<div class="hydra-name">{escape(name)}<span>{count}</span></div>',
        _verdict(answer),
        _prediction_set(answer),
        _classes(answer),
        _uncertainty(answer),
        _members(answer) if members > 1 else "",
    ]
    return f'<section class="hydra-card">{"".join(parts)}</section>'


def _verdict(answer: dict[str, Any]) -> str:
    label, score = escape(answer["label"]), _percent(answer["score"])
    notes = [escape(answer["reason"])] if answer["reason"] else []
    if answer["threshold"] is not None and not answer["abstain"]:
        score_and_limit = f"{answer['detector_score']:.3g}, at most {float(answer['threshold']):.3g}"
        notes.append(f"It answers: {escape(answer['detector'])} is {score_and_limit}.")
    if answer.get("truncated"):
        notes.append("The text is longer than the model reads: it read the beginning.")
    shown = "".join(f"<small>{note}</small>" for note in notes)
    if answer["abstain"]:
        guess = f"its guess: {label}, {score}"
        return f"""<div class="hydra-verdict hydra-abstains">I don't know<span>{guess}</span>{shown}</div>"""
    never = " · not calibrated: it never abstains" if answer["abstain"] is None else ""
    return f'<div class="hydra-verdict">{label}<span>{score} sure{never}</span>{shown}</div>'


def _prediction_set(answer: dict[str, Any]) -> str:
    names = answer["prediction_set"]
    if names is None:
        return ""
    # A set's promise holds for inputs like those it was fitted on, and this one may differ.
    begin = "If it is one of the classes, it may be" if answer["abstain"] else "It may be"
    shown = "".join(f"<b>{escape(name)}</b>" for name in names[:MOST_OF_A_SET])
    more = f" and {len(names) - MOST_OF_A_SET} more" if len(names) > MOST_OF_A_SET else ""
    return f'<div class="hydra-set">{begin} {shown or "none of them"}{more}</div>'


def _classes(answer: dict[str, Any]) -> str:
    """The likeliest classes, with a dot for each member on each bar."""
    rows, count = [], len(answer["members"])
    for place, score in enumerate(answer["scores"][:MOST_CLASSES]):
        marks = ""
        for number, member in enumerate(answer["members"] if count > 1 else []):
            # Each member has its own lane, because they often agree.
            style = f"left:{100 * member[place]:.1f}%;top:{100 * (number + 0.5) / count:.0f}%"
            marks += f'<i class="hydra-of-{number % MEMBER_COLOURS}" style="{style}"></i>'
        rows.append(_row(score["label"], score["score"], _percent(score["score"]), "probability", marks))
    dots = "; dots: the members" if count > 1 else ""
    return f"<h3>Classes<span>probability{dots}</span></h3>{''.join(rows)}"


def _uncertainty(answer: dict[str, Any]) -> str:
    most = math.log(len(answer["scores"]))
    rows = []
    for part, meaning in PARTS.items():
        value, name = answer[part], "total" if part == "uncertainty" else part
        if part == "epistemic" and len(answer["members"]) == 1:
            meaning = "one member has nobody to disagree with"
        rows.append(_row(name, value / most, f"{value:.2f}", name, "", meaning))
    return f"<h3>Uncertainty<span>nats; at most {most:.2f}</span></h3>{''.join(rows)}"


def _members(answer: dict[str, Any]) -> str:
    rows = []
    for number, member in enumerate(answer["members"]):
        best = max(range(len(member)), key=member.__getitem__)
        rows.append(
            f'<div class="hydra-member"><i class="hydra-of-{number % MEMBER_COLOURS}"></i>member {number}'
            f"<b>{escape(answer['scores'][best]['label'])}</b><span>{_percent(member[best])}</span></div>"
        )
    return f'<h3>Members</h3><div class="hydra-members">{"".join(rows)}</div>'


def _row(name: str, share: float, value: str, kind: str, marks: str, meaning: str = "") -> str:
    width = 100 * min(1.0, max(0.0, share))
    note = f"<small>{meaning}</small>" if meaning else ""
    return (
        f'<div class="hydra-row"><label title="{escape(name)}">{escape(name)}{note}</label>'
        f'<div class="hydra-track"><div class="hydra-bar hydra-{kind}" style="width:{width:.1f}%"></div>{marks}</div>'
        f"<output>{value}</output></div>"
    )


def _percent(share: float) -> str:
    """Never 100 % unless it is certain, nor 0 % unless it is impossible."""
    rounded = f"{100 * share:.0f} %"
    if 0 < share < 1:
        return {"100 %": "> 99 %", "0 %": "< 1 %"}.get(rounded, rounded)
    return rounded
