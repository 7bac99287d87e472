"""What pictures say: names as they are, and no more certainty than there is. Nothing is rendered."""

import numpy as np
import pytest

from experiments.heads import BudgetSweep, HeadSetComparison, PruningUnderNoise, head_plots
from experiments.heads.proposition import Estimate, LossChange
from experiments.heads.sweep import SweepPoint


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """By the name of their file."""
    found = {}
    monkeypatch.setattr(head_plots, "write_png", lambda figure, path: found.setdefault(path.name, figure) and path)
    return found


def entries(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_order_is_in_the_legend_and_a_band_says_what_it_is(figures, tmp_path):
    def point(order, draw, budget):
        return SweepPoint(order, draw, budget, 9 - budget, False, 0.5, 0.1, 1.0, None, None, {})

    drawn = [point("_mine", 0, 3), point("cost $5, $6", 0, 3), point("cost $5, $6", 1, 3)]
    BudgetSweep(point("all heads", 0, 0), drawn).plot(tmp_path)
    names = ["all heads", " _mine", r"cost \$5, \$6", r"cost \$5, \$6: lowest to highest"]
    assert entries(figures["budgets.png"]) == names


def test_an_error_that_is_not_known_is_not_drawn_as_none(figures, tmp_path):
    without, known = Estimate(0.5), Estimate(0.5, 0.25)
    change = LossChange(1.0, 1.5, change=known, slope=without, curvature=without, second_order=without, rows=4)
    PruningUnderNoise({"text": {"clean": change, "noisy": change}}, {"text": [("text", 0, 0)]}).plot(tmp_path)
    expected, true = figures["proposition.png"].axes[0].containers[1::2]  # each behind its lines
    lines = [bars.errorbar[2][0].get_segments() for bars in (expected, true)]
    assert lines[0][0].size == 0 and np.allclose(lines[1][0][:, 0], [0.25, 0.75])


def test_a_map_says_what_its_shades_are_and_long_names_are_broken(figures, tmp_path):
    heads = [(0, 0), (0, 1)]
    HeadSetComparison({"a name that is longer than its map": [(0, 1)]}, heads, {}).plot(tmp_path)
    figure = figures["kept_heads.png"]
    assert entries(figure) == ["kept", "cut out"] and "\n" in figure.axes[0].get_title()
    figures.clear()
    HeadSetComparison({"one": [(0, 1)]}, [*heads, (1, 0)], {}).plot(tmp_path)  # of a model that was pruned before
    assert entries(figures["kept_heads.png"]) == ["kept", "cut out", "not in the model"]
