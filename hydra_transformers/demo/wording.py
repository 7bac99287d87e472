"""The demo's table, sentences and picture: what each model knows, and what the saved model answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..cost import Cost, readable_count
from ..reports.gains import gain_sentence
from ..reports.report import DATA, Report
from ..reports.table import Table


if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS = ("near", "far")
MEMBER_COLOURS = ("#0072B2", "#D55E00", "#009E73")


# Models


def comparison_table(report: Report, costs: Mapping[str, Cost], batch_size: int) -> Table:
    """A row for each model; arrows say which way is better."""
    titles = ["", "accuracy ↑", "NLL ↓", *(f"{group} AUROC ↑" for group in GROUPS)]
    titles += ["parameters", "multiply-adds", f"ms / {batch_size} images"]
    rows = []
    for name, results in report.models.items():
        cost = costs[name]
        metrics = [f"{results[DATA]['accuracy']:.1%}", f"{results[DATA]['nll']:.3f}"]
        metrics += [f"{report.average(name, group)['auroc']:.1%}" for group in GROUPS]
        counts = [f"{cost.parameters:,}", readable_count(cost.multiply_adds)]
        rows.append([name, *metrics, *counts, f"{cost.milliseconds[batch_size]:.1f}"])
    return titles, rows


def comparison(report: Report, costs: Mapping[str, Cost], name: str, other: str, batch_size: int) -> str:
    """The differences between two models that these rows can show, and the price."""
    mine, theirs = costs[name], costs[other]
    time = mine.milliseconds[batch_size] / theirs.milliseconds[batch_size]
    counts = (mine.parameters / theirs.parameters, mine.multiply_adds / theirs.multiply_adds)
    speed = f"{1 / time:.1f} times as fast" if time < 0.95 else f"{time:.2f} times the time"
    price = f"{speed}, {counts[0]:.2f} times the parameters, {counts[1]:.2f} times the multiply-adds"
    return f"{gain_sentence(name, other, report.gains(name, other))} Price: {price}."


def decision_sentence(report: Report) -> str:
    """What a calibrated model answers, and what it does not."""
    [results] = report.models.values()
    known = results[DATA]
    risk = known.get("answered_risk")
    wrong = "" if risk is None else f", {risk:.1%} of these answers wrong ({1 - known['accuracy']:.1%} of all)"
    refused = [f"{1 - results[name]['answered']:.0%} of {report.groups[name][1]}" for name in report.data_sets()]
    return f"On images it never saw: it answers {known['answered']:.1%} of the digits{wrong}, and refuses {', '.join(refused)}."


# Answers of the saved model


@dataclass(frozen=True)
class Example:
    """An image (8, 8) to ask about; label: its digit, None if it shows none of the known ones."""

    name: str
    pixels: np.ndarray
    label: str | None


@dataclass(frozen=True)
class Answer:
    """reason: why it abstains, None if it answers; members: each member's probabilities, by class"""

    label: str
    score: float
    abstain: bool
    reason: str | None
    members: Sequence[Mapping[str, float]]


def answer_line(example: Example, answer: Answer) -> str:
    guess = f"{answer.label} with {answer.score:.0%} confidence"
    says = f"I don't know. {answer.reason} (Its guess would be {guess}.)" if answer.abstain else f"{guess}."
    votes = [max(member.items(), key=lambda vote: vote[1]) for member in answer.members]
    members = ", ".join(f"{label} ({share:.0%})" for label, share in votes)
    return f"{example.name}.png: {says} The members: {members}."


def judgement(example: Example, answer: Answer) -> str:
    """Whether the answer is right."""
    says = '"I don\'t know"' if answer.abstain else f'"{answer.label}"'
    is_right = answer.abstain if example.label is None else not answer.abstain and answer.label == example.label
    shown = "nothing that it learned" if example.label is None else f"a {example.label}"
    return f"It says {says} of {example.name}.png, and is {'right' if is_right else 'wrong'}: it shows {shown}."


def picture(examples: Sequence[Example], answers: Sequence[Answer]) -> "Figure":
    """Each image with the members' probabilities, their mean, and what the model says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 2.6 * len(examples)), dpi=120, layout="constrained")
    panels = figure.subplots(len(examples), 2, width_ratios=(1, 2.6), squeeze=False)
    for (image, bars), example, answer in zip(panels, examples, answers, strict=True):
        image.imshow(example.pixels, cmap="gray", vmin=0, vmax=255)
        image.set(xticks=[], yticks=[], xlabel=f"{example.name}.png")
        for number, member in enumerate(answer.members):
            places = [place + 0.22 * (number - 1) for place in range(len(member))]
            bars.bar(places, member.values(), width=0.2, color=MEMBER_COLOURS[number % 3])
        names = list(answer.members[0])
        for place, name in enumerate(names):
            mean = sum(member[name] for member in answer.members) / len(answer.members)
            bars.plot([place - 0.36, place + 0.36], [mean, mean], color="black", linewidth=1.6)
        bars.set(xticks=range(len(names)), xticklabels=names, ylim=(0, 1.02), ylabel="probability")
        title = judgement(example, answer).replace(": ", ":\n")
        bars.set_title(title, loc="left", fontsize=10, fontweight="bold")
        bars.spines[["top", "right"]].set_visible(False)
    panels[-1][1].set_xlabel("bars: each member; black: their mean")
    return figure
