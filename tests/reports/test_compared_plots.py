"""What the plots of several models show, before pixels are made of them."""

import itertools

import pytest
import torch

from hydra_transformers.cost import Cost
from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.reports.curves import reliability_curve
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.reports.report_plots import _free_name, _joined_bins, _on_common_axis, report_figures
from hydra_transformers.uncertainty import TemperatureScaling
from tests.uncertainty.answers import saved


def figures(strength=3, costs=None, score="msp"):
    """Of two models of which one is surer, on three data sets."""
    ood = {"near": {"A": saved(40, 1, 1)}, "far": {"A": saved(40, 0, 2), "B/C": saved(40, 0, 3)}}
    models = {"plain": SavedLogits(), "surer": SavedLogits()}
    scaling = {"surer": TemperatureScaling(0.5)}
    report = evaluate_uncertainty(models, saved(300, strength, 0), ood, score=score, temperature=scaling)
    return report, report_figures(report, costs)


@pytest.fixture(scope="module")
def compared():
    return figures()


def test_each_ood_set_has_one_figure_with_the_roc_curves_of_all_models(compared):
    report, drawn = compared
    names = [name for name in drawn if name.startswith("roc")]
    assert names == ["roc_A_near", "roc_A_far", "roc_B_C_far"]
    [panel] = drawn["roc_A_far"].axes
    lines = {line.get_label().split(",")[0]: line for line in panel.lines}
    for name, result in report.models.items():
        curve = result.curves["roc"]["A (far)"]
        assert lines[name].get_xydata().tolist() == [
            list(each) for each in zip(curve["fpr"], curve["tpr"], strict=True)
        ]
        assert f"AUROC {100 * result.ood['far']['A']['auroc']:.1f} %" in lines[name].get_label()


def test_two_data_sets_never_share_a_file():
    taken = {}
    for name in ("roc a/b", "roc a?b", "roc a b", "roc " + 200 * "x"):
        taken[_free_name(name, taken)] = name
    assert list(taken)[:3] == ["roc_a_b", "roc_a_b_2", "roc_a_b_3"] and len(list(taken)[3]) == 80


def test_histograms_of_all_models_share_bins_and_axes(compared):
    _, drawn = compared
    panels = [panel for panel in drawn["score_histograms"].axes if panel.get_visible()]
    assert len({panel.get_xlim() for panel in panels}) == len({panel.get_ylim() for panel in panels}) == 1
    first, second = (panel.lines[0].get_xdata().tolist() for panel in panels)
    assert first == second


def test_spreading_over_common_bins_loses_no_sample_and_leaves_equal_bins_alone():
    narrow = {"edges": [0.0, 0.25, 0.5], "id": [0.9, 0.1], "ood": {"A": [0.5, 0.5]}}
    wide = {"edges": [0.0, 0.5, 1.0], "id": [0.2, 0.8], "ood": {"A": [0.0, 1.0]}}
    (first, second), is_common = _on_common_axis([narrow, wide])
    assert is_common and first["edges"] == second["edges"] == [0.0, 0.5, 1.0]
    assert first["id"] == pytest.approx([1.0, 0.0]) and second == wide


def test_scores_of_another_order_of_magnitude_keep_their_own_axis():
    histograms = [{"edges": [0.0, top / 2, top], "id": [0.5, 0.5], "ood": {}} for top in (1.0, 50.0)]
    assert _on_common_axis(histograms) == (histograms, False)


@pytest.mark.parametrize(("strength", "scale"), [(8, "log"), (1, "linear")])
def test_heights_are_logarithmic_where_one_bar_dwarfs_the_rest(strength, scale):
    report, drawn = figures(strength)
    panel = drawn["score_histograms"].axes[0]
    assert panel.get_yscale() == scale
    shares = [max(result.curves["histograms"]["id"]) for result in report.models.values()]
    assert panel.get_ylim()[1] > max(shares) and (max(shares) > 0.5) == (scale == "log")
    lowest = min(value for line in panel.lines for value in line.get_ydata())
    assert lowest >= panel.get_ylim()[0]  # an empty bin lies on the axis, not below all sight


def test_bins_with_few_samples_join_their_neighbours():
    confidence = torch.tensor([0.45] * 3 + [0.55] * 2 + [0.65] * 12 + [0.85] * 30 + [0.99] * 4).double()
    correct = (torch.arange(len(confidence)) % 3 > 0).double()
    bins = _joined_bins(reliability_curve(confidence, correct, num_bins=10), len(confidence))
    assert [each.count for each in bins] == [17, 34]
    assert [(each.low, each.high) for each in bins] == [pytest.approx((0.4, 0.7)), pytest.approx((0.8, 1.0))]
    for each, rows in zip(bins, (slice(0, 17), slice(17, None)), strict=True):
        assert each.accuracy == pytest.approx(correct[rows].mean().item())
        assert each.confidence == pytest.approx(confidence[rows].mean().item())


def test_every_sample_is_in_a_bin_whatever_their_number():
    for count in (1, 9, 10, 11, 500):
        confidence = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        bins = _joined_bins(reliability_curve(confidence, (confidence > 0.5).double()), count)
        assert sum(each.count for each in bins) == count
        assert len(bins) == 1 or min(each.count for each in bins) >= 10
        assert all(low.high <= high.low for low, high in itertools.pairwise(bins))


def test_the_number_of_samples_stands_above_each_bin(compared):
    report, drawn = compared
    panel, result = drawn["reliability_diagram"].axes[0], report.models["plain"]
    bins = _joined_bins(result.curves["reliability"], result.id["num_samples"])
    assert [text.get_text() for text in panel.texts] == [str(each.count) for each in bins]


@pytest.mark.parametrize(
    ("times", "label", "places"),
    [
        ({8: 2.0, 64: 10.0}, "Time of a batch of 64, plain's being 1", [1.0, 3.0]),
        ({}, "Multiply-adds, plain's being 1", [1.0, 2.0]),
    ],
)
def test_quality_stands_against_time_or_multiply_adds(times, label, places):
    costs = {
        "plain": Cost(5, 100, times),
        "surer": Cost(5, 200, {size: 3 * value for size, value in times.items()}),
    }
    report, drawn = figures(costs=costs)
    panels = drawn["quality_against_cost"].axes
    assert [panel.get_xlabel() for panel in panels] == [label] * 3
    for panel, expected in zip(
        panels,
        (
            [100 * result.id["accuracy"] for result in report.models.values()],
            [result.id["nll"] for result in report.models.values()],
            [100 * result.ood_average()["auroc"] for result in report.models.values()],
        ),
        strict=True,
    ):
        dots = [dot.get_offsets()[0].tolist() for dot in panel.collections]
        assert dots == [pytest.approx([place, value]) for place, value in zip(places, expected, strict=True)]
