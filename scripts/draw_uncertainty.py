"""Draws docs/images/uncertainty.png: the errors of a small classifier of digits, by how much it answers.

python -m scripts.draw_uncertainty [OUTPUT]

The classifier is a logistic regression of noisy images, trained in a second; its threshold is the one that `calibrate` fits.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from hydra_transformers.uncertainty import Abstention
from hydra_transformers.uncertainty.metrics import error_coverage_curve

from .picture_style import IMAGES, NORMAL, SMALL, WIDTH, Look, save, style_axes


OUTPUT = IMAGES / "uncertainty.png"
RISK = 0.05
NOISE = 2.5  # of pixels between 0 and 16
TRAINING, VALIDATION = 500, 700  # rows; the others are for the test


class Measured(NamedTuple):
    """coverage, risk: of the test rows; answered, wrong: shares of them at the fitted threshold"""

    coverage: Tensor
    risk: Tensor
    answered: float
    wrong: float


def measure() -> Measured:
    """Train the classifier, fit its threshold, and return what it does on the test rows."""
    images, labels = load_digits(return_X_y=True)
    images = images + NOISE * np.random.default_rng(0).normal(size=images.shape)
    parts = np.split(np.arange(len(labels)), (TRAINING, TRAINING + VALIDATION))
    train, validation, test = ((images[rows], labels[rows]) for rows in parts)
    model = LogisticRegression(max_iter=1000, C=0.01).fit(*train)

    def rows_of(part: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
        probabilities = model.predict_proba(part[0])
        return torch.tensor(probabilities.max(axis=1)), torch.tensor(probabilities.argmax(axis=1) == part[1])

    confidence, is_right = rows_of(validation)
    rule = Abstention.fit(1 - confidence, is_right, risk=RISK, confidence=0.9)
    confidence, is_right = rows_of(test)
    coverage, risk = error_coverage_curve(confidence, 1 - is_right.double())
    answers = ~rule.abstain(1 - confidence)
    return Measured(coverage, risk, float(answers.double().mean()), float((~is_right[answers]).double().mean()))


def draw(measured: Measured, look: Look) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.55))
    panel = figure.add_axes((0.08, 0.16, 0.89, 0.74))
    coverage = 100 * measured.coverage.numpy()
    risk = 100 * measured.risk.numpy()
    panel.plot(coverage, risk, color=look.members[0], linewidth=2)
    panel.axhline(100 * RISK, color=look.ink, linewidth=1, linestyle="--")
    panel.text(
        31, 100 * RISK + 0.3, "promised: at most 5 % of the answers", fontsize=SMALL, color=look.ink, va="bottom"
    )
    x = 100 * measured.answered
    y = 100 * measured.wrong
    panel.plot(x, y, "o", markersize=10, color=look.members[1])
    look_of_words = {"fontsize": SMALL, "color": look.ink}
    words = f"after calibrate: {x:.0f} % are answered,\n{y:.1f} % of these wrong; “I don't know”\nto the others"
    pointer = {"arrowstyle": "-", "color": look.members[1]}
    panel.annotate(words, (x, y), (32, 0.6 * risk[-1]), arrowprops=pointer, **look_of_words)
    panel.text(91, 0.97 * risk[-1], f"all answered: {risk[-1]:.0f} % wrong", ha="right", **look_of_words)
    panel.set_xlim(30, 101)
    panel.set_ylim(0, 1.1 * risk[-1])
    style_axes(
        panel, look, "Risk: wrong among the answers, in %", "coverage: rows that are answered, the surest first, in %"
    )
    panel.title.set_fontsize(NORMAL)
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    measured = measure()
    save(lambda look: draw(measured, look), output)


if __name__ == "__main__":
    main()
