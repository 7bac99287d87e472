"""The demo's end: a model that may say "I don't know", why it does, and whether it is right to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedModel

from ..reports.report import ModelResult
from ..uncertainty import Calibration
from .digits import DemoData


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# On the images to choose by it refuses 82 % of the unknown and 6 % of the known; no other does clearly better in both.
DETECTOR, TARGET = "gen", {"coverage": 0.95}
MEMBER_COLOURS = ("#0072B2", "#D55E00", "#009E73")


@dataclass(frozen=True)
class Example:
    """An image (8, 8) that a saved model is asked about; label: the digit it shows, None where it is none of the known."""

    name: str
    pixels: np.ndarray
    label: str | None


@dataclass(frozen=True)
class Answer:
    """What the second process says of an example.

    reason: why it abstains, None where it does not
    members: each member's probabilities, by class
    """

    label: str
    score: float
    abstain: bool
    reason: str | None
    members: Sequence[Mapping[str, float]]

    @property
    def mean(self) -> dict[str, float]:
        return {name: sum(member[name] for member in self.members) / len(self.members) for name in self.members[0]}


def examples_of(data: DemoData) -> list[Example]:
    """The first digit that is judged on, and the middle patch of the judged photo: chosen before any model is asked."""
    digit, photo = str(int(data.test.labels[0])), data.far["photo patches"].pixels
    return [
        Example(f"digit-{digit}", data.test.pixels[0], digit),
        Example("photo-patch", photo[len(photo) // 2], None),
    ]


def calibrate(hydra: PreTrainedModel, data: DemoData, batch_size: int) -> Calibration:
    return hydra.calibrate(data.calibration.batches(batch_size), target=TARGET, detector=DETECTOR)


def rule(calibration: Calibration) -> str:
    """When the model does not answer, in a sentence."""
    return (
        f'It says "I don\'t know" where {DETECTOR.upper()}, which is high where probability is spread over several classes, is '
        f"above {calibration.abstention.threshold:.2f}: {1 - TARGET['coverage']:.0%} of the digits that this was fitted on."
    )


def reached(result: ModelResult) -> str:
    """What the decision does on images that it was not fitted on."""
    answered, risk = result.abstaining["coverage"], result.abstaining["risk"]
    wrong = "" if risk is None else f", {risk:.1%} of these answers wrong ({1 - result.id['accuracy']:.1%} of all)"
    refused = [f"{sets['refused']:.0%} of {name}" for group in result.ood.values() for name, sets in group.items()]
    return f"On images it never saw: it answers {answered:.1%} of the digits{wrong}, and refuses {', '.join(refused)}."


def answer_line(example: Example, answer: Answer) -> str:
    """What it says, why, and what each member would say."""
    guess = f"{answer.label} with {answer.score:.0%} confidence"
    votes = [max(member.items(), key=lambda vote: vote[1]) for member in answer.members]
    says = f"I don't know. {answer.reason} (Its guess would be {guess}.)" if answer.abstain else f"{guess}."
    members = ", ".join(f"{label} ({share:.0%})" for label, share in votes)
    return f"{example.name}.png: {says} The members: {members}."


def is_right(example: Example, answer: Answer) -> bool:
    """Whether it answers what it should, and with the right class."""
    return answer.abstain if example.label is None else not answer.abstain and answer.label == example.label


def judgement(example: Example, answer: Answer) -> str:
    """Whether what it says is right, in a sentence."""
    says = '"I don\'t know"' if answer.abstain else f'"{answer.label}"'
    judged = "right" if is_right(example, answer) else "wrong"
    shown = "nothing that it learned" if example.label is None else f"a {example.label}"
    return f"It says {says} of {example.name}.png, and is {judged}: it shows {shown}."


def draw(examples: Sequence[Example], answers: Sequence[Answer], path: Path) -> None:
    picture(examples, answers).savefig(path, metadata={"Software": None})


def picture(examples: Sequence[Example], answers: Sequence[Answer]) -> "Figure":
    """Each image, beside it the members' probabilities and their mean, above what the model says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 2.6 * len(examples)), dpi=120, layout="constrained")
    panels = figure.subplots(len(examples), 2, width_ratios=(1, 2.6), squeeze=False)
    for (image, bars), example, answer in zip(panels, examples, answers, strict=True):
        image.imshow(example.pixels, cmap="gray", vmin=0, vmax=255)
        image.set(xticks=[], yticks=[], xlabel=f"{example.name}.png")
        for number, member in enumerate(answer.members):
            places = [place + 0.22 * (number - 1) for place in range(len(member))]
            bars.bar(places, member.values(), width=0.2, color=MEMBER_COLOURS[number % 3])
        for place, share in enumerate(answer.mean.values()):
            bars.plot([place - 0.36, place + 0.36], [share, share], color="black", linewidth=1.6)
        bars.set(xticks=range(len(answer.mean)), xticklabels=list(answer.mean), ylim=(0, 1.02), ylabel="probability")
        sentence = judgement(example, answer).replace(": ", ":\n")
        bars.set_title(sentence, loc="left", fontsize=10, fontweight="bold")
        bars.spines[["top", "right"]].set_visible(False)
    panels[-1][1].set_xlabel("bars: each member; black: their mean")
    return figure
