"""Predictions as HTML. Everything from users, models or their configs is escaped."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

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
    count = len(model.class_names or ())
    predicts = {
        "single_label_classification": f"{count:,} classes" if count else "classes that you name",
        "multi_label_classification": f"any of {count:,} labels",
        "regression": f"{count:,} numbers" if count > 1 else "a number",
        "reward": f"a score, the members' {model.task.aggregate}",
        "token_classification": f"a class for each word, of {count:,}",
    }
    members = f"{model.num_members} members in one model" if model.num_members > 1 else "one model"
    about = f"{escape(model.config.model_type)} · {members} · {escape(predicts[model.task.name])}"
    promises = "".join(f"<li>{escape(sentence)}</li>" for sentence in model.promises)
    if promises:
        promises = f"<details><summary>When it says &quot;I don't know&quot;</summary><ul>{promises}</ul></details>"
    return f'<div class="hydra-heading"><h1>{escape(model.name)}</h1><p>{about}</p>{promises}</div>'


def answer_html(answer: dict[str, Any]) -> str:
    """A card with an answer of `HydraPredictor.answer_with_members`."""
    show = next((show for field, show in TASKS.items() if field in answer), _class_parts)
    return f'<section class="hydra-card">{"".join(show(answer))}</section>'


def _class_parts(answer: dict[str, Any]) -> Iterator[str]:
    scores, members = answer["scores"], answer["members"]
    yield _verdict(answer, answer["label"], _percent(answer["score"]), f"{_percent(answer['score'])} sure")
    yield _prediction_set(answer, "It may be", "If it is one of the classes, it may be")
    rows = []
    for place, score in enumerate(scores[:MOST_CLASSES]):
        dots = _dots([member[place] for member in members])
        rows.append(_row(score["label"], score["score"], _percent(score["score"]), marks=dots))
    yield _section("Classes", f"probability{_legend(answer)}", rows)
    yield _uncertainty(answer, math.log(len(scores)))
    best = [max(range(len(scores)), key=member.__getitem__) for member in members]
    said = zip(best, members, strict=True)
    yield _members([(scores[place]["label"], _percent(member[place])) for place, member in said])


def _label_parts(answer: dict[str, Any]) -> Iterator[str]:
    yield _verdict(answer, ", ".join(answer["labels"]) or "no label", "", "each from a threshold of its own on")
    yield _prediction_set(answer, "It may have", "If its labels are among these, it may have")
    rows = []
    for place, (score, threshold) in enumerate(zip(answer["scores"], answer["thresholds"], strict=True)):
        is_unsure, is_yes = bool(score.get("abstain")), score["label"] in answer["labels"]
        # Below the likeliest labels, all that the model says yes to or is not sure of.
        if place >= MOST_OF_A_SET or (place >= MOST_CLASSES and not is_yes and not is_unsure):
            continue
        note = f"{'not sure' if is_unsure else 'yes' if is_yes else 'no'}; uncertainty {score['uncertainty']:.2f}"
        marks = _line(threshold) + _dots([member[place] for member in answer["members"]])
        kind = "unsure" if is_unsure else "probability"
        rows.append(_row(score["label"], score["score"], _percent(score["score"]), kind, marks, note))
    yield _section("Labels", f"probability; line: its threshold{_legend(answer)}", rows)
    yield _uncertainty(answer, len(answer["scores"]) * math.log(2))
    names = [score["label"] for score in answer["scores"]]
    said = []
    for member in answer["members"]:
        shares = zip(names, member, answer["thresholds"], strict=True)
        said.append((", ".join(name for name, share, least in shares if share >= least) or "no label", ""))
    yield _members(said)


def _number_parts(answer: dict[str, Any]) -> Iterator[str]:
    """Of each output the interval as a bar, on a line from the lowest to the highest of all that is shown of it."""
    scores, intervals = answer["scores"], answer["interval"] or []
    said = ", ".join(
        f"{each['label']} {each['score']:.4g}" if scores[1:] else f"{each['score']:.4g}" for each in scores
    )
    between = [f"between {low:.4g} and {high:.4g}" for low, high in intervals]
    yield _verdict(answer, said, ", ".join(between), ", ".join(between) or "without an interval")
    rows = []
    for place, score in enumerate(scores):
        members, interval = [each[place] for each in answer["members"]], intervals[place] if intervals else []
        shown = [score["score"], *members, *interval]
        if not all(map(math.isfinite, shown)):
            continue  # the verdict says so
        low, span = min(shown), (max(shown) - min(shown)) or 1.0
        own, *shares = [0.05 + 0.9 * (each - low) / span for each in shown]
        first, last = shares[len(members) :] or (0.0, 0.0)
        name, note = "number" if score["label"] == "LABEL_0" else score["label"], between[place] if between else ""
        marks = _line(own) + _dots(shares[: len(members)])
        rows.append(_row(name, last - first, f"{score['score']:.4g}", marks=marks, note=note, start=first))
    bar = "bar: the interval; " if intervals else ""
    yield _section("Number", f"{bar}line: the prediction{_legend(answer)}", rows)
    yield _uncertainty(answer, answer["uncertainty"], "variance")
    yield _members([(", ".join(f"{number:.4g}" for number in member), "") for member in answer["members"]])


def _entity_parts(answer: dict[str, Any]) -> Iterator[str]:
    """The text with its entities marked, those that the model abstains on in another way."""
    text, marked, rows, end = answer["text"], [], [], 0
    for entity in answer["entities"]:
        unsure, group, word = bool(entity["abstain"]), entity["entity_group"], text[entity["start"] : entity["end"]]
        note, kind = escape(group) + " ?" * unsure, " hydra-doubted" * unsure
        marked.append(f'{escape(text[end : entity["start"]])}<mark class="hydra-entity{kind}">')
        marked.append(f"{escape(word)}<small>{note}</small></mark>")
        end = entity["end"]
        note = f"{group}{', not sure' * unsure}; uncertainty {entity['uncertainty']:.2f}"
        share = entity["score"]
        rows.append(_row(entity["word"], share, _percent(share), "unsure" if unsure else "probability", note=note))
    yield f'<div class="hydra-text">{"".join(marked)}{escape(text[end:])}</div>'
    yield f"<p>{escape(answer['reason'])}</p>" if answer["reason"] else ""
    yield f"<p>{TRUNCATED}</p>" if answer["truncated"] else ""
    unsure = sum(bool(entity["abstain"]) for entity in answer["entities"])
    count = f"{len(answer['entities'])} found" + (f", {unsure} not sure" if unsure else "")
    never = "" if answer["abstain"] is not None else " · not calibrated: none is marked as not sure"
    yield _section("Entities", f"{count}{never}", rows[:MOST_OF_A_SET])
    yield _uncertainty(answer, math.log(answer["num_classes"]), "nats, of the least sure word")


# By a field that the answers of a task have; others are of a model that chooses one class.
TASKS = {"entities": _entity_parts, "labels": _label_parts, "interval": _number_parts}


def _verdict(answer: dict[str, Any], said: str, guess: str, sure: str) -> str:
    """guess, sure: what stands beside the answer where the model abstains, and where it does not"""
    notes = [answer["reason"]] if answer["reason"] else []
    if answer["threshold"] is not None and answer.get("detector_score") is not None and not answer["abstain"]:
        score, limit = answer["detector_score"], float(answer["threshold"])
        reached = f"{answer['detector']} is {score:.3g}, at most {limit:.3g}"
        if answer["detector"] == "low score":
            reached = f"the score is at least {-limit:.3g}"
        notes.append(f"It answers: {reached}.")
    notes += [TRUNCATED] if answer.get("truncated") else []
    shown = "".join(f"<small>{escape(note)}</small>" for note in notes)
    if answer["abstain"]:
        unknown = "Nothing relevant" if answer["detector"] == "low score" else "I don't know"
        guess = f"its guess: {escape(said)}{f', {guess}' if guess else ''}"
        return f"""<div class="hydra-verdict hydra-abstains">{unknown}<span>{guess}</span>{shown}</div>"""
    never = " · not calibrated: it never abstains" if answer["abstain"] is None else ""
    return f'<div class="hydra-verdict">{escape(said)}<span>{sure}{never}</span>{shown}</div>'


def _prediction_set(answer: dict[str, Any], begin: str, unlike: str) -> str:
    """begin, unlike: of the sentence, where the model answers, and where it abstains"""
    names = answer["prediction_set"]
    if names is None:
        return ""
    # A set's promise holds for inputs like those it was fitted on, and this one may differ.
    shown = "".join(f"<b>{escape(name)}</b>" for name in names[:MOST_OF_A_SET])
    more = f" and {len(names) - MOST_OF_A_SET} more" if len(names) > MOST_OF_A_SET else ""
    return f'<div class="hydra-set">{unlike if answer["abstain"] else begin} {shown or "none of them"}{more}</div>'


def _uncertainty(answer: dict[str, Any], most: float, unit: str | None = None) -> str:
    """most: what fills a bar; unit: nats by default"""
    rows = []
    for part, (name, meaning) in PARTS.items():
        value = answer[part]
        if value is not None:
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


def _legend(answer: dict[str, Any]) -> str:
    return "; dots: the members" if len(answer["members"]) > 1 else ""


def _dots(shares: Sequence[float]) -> str:
    """Where each of several members stands on a bar, in a lane of its own, because they often agree."""
    dots = []
    for number, share in enumerate(shares):
        place = f"left:{100 * share:.1f}%;top:{100 * (number + 0.5) / len(shares):.0f}%"
        dots.append(f'<i style="background:{COLOURS[number % len(COLOURS)]};{place}"></i>')
    return "".join(dots) if dots[1:] else ""


def _line(share: float) -> str:
    return f'<s style="left:{100 * share:.1f}%"></s>'


def _row(
    name: str, share: float, value: str, kind: str = "probability", marks: str = "", note: str = "", start: float = 0.0
) -> str:
    style = f"width:{100 * min(1.0, max(0.0, share)):.1f}%;margin-left:{100 * start:.1f}%"
    small = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<div class="hydra-row"><label title="{escape(name)}">{escape(name)}{small}</label>'
        f'<div class="hydra-track"><div class="hydra-bar hydra-{kind}" style="{style}"></div>{marks}</div>'
        f"<output>{value}</output></div>"
    )


def _percent(share: float) -> str:
    """Never 100 % unless it is certain, nor 0 % unless it is impossible."""
    rounded = f"{100 * share:.0f} %"
    if 0 < share < 1:
        return {"100 %": "> 99 %", "0 %": "< 1 %"}.get(rounded, rounded)
    return rounded
