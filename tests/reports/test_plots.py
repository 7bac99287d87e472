import sys

import numpy as np
import pytest
import torch
from PIL import Image

from hydra_transformers._io.pictures import drawable, png_of
from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.reports.report_plots import _reliability_diagram, _risk_coverage, report_figures
from tests.uncertainty.answers import saved


ALWAYS = ["reliability_diagram", "risk_coverage"]
WITH_OOD = ["score_histograms", "roc_A_near", "roc_bad_far"]
FORMULA, HIDDEN = r"$\bad$", "_hidden\nname"  # which mean something to matplotlib or Markdown


def assert_drawn(path):
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    inked = (pixels < 250).any(axis=2)
    assert 0.02 < inked.mean() < 0.7, path  # neither blank nor filled
    colourful = pixels.max(axis=2) - pixels.min(axis=2) > 60
    assert colourful.mean() > 0.001, path  # more than axes and text
    border = np.concatenate([inked[0], inked[-1], inked[:, 0], inked[:, -1]])
    assert border.mean() < 0.01, path  # nothing is cut off at the edge


@pytest.mark.slow
def test_every_plot_is_drawn_and_not_blank_and_a_loaded_report_draws_the_same(tmp_path):
    import matplotlib.pyplot as plt

    figures = plt.get_fignums()
    backend = plt.get_backend()
    models = dict.fromkeys((FORMULA, HIDDEN), SavedLogits())
    ood = {"near": {"A": saved(30, 2, 1)}}
    ood["far"] = {FORMULA: saved(20, 0, 2)}
    original = evaluate_uncertainty(models, saved(60, 4, 0), ood, score="disagreement")
    paths = original.plot(tmp_path / "plots")
    assert (plt.get_fignums(), plt.get_backend()) == (figures, backend), "pyplot is left alone"
    assert sorted(path.stem for path in paths) == sorted(ALWAYS + WITH_OOD)
    assert sorted(paths) == sorted((tmp_path / "plots").iterdir())
    for path in paths:
        assert_drawn(path)
    original.to_json(tmp_path / "report.json")
    again = report_figures(Report.from_json(tmp_path / "report.json"))
    drawn = {path.stem: path.read_bytes() for path in paths}
    assert all(png_of(again[n]) == drawn[n] for n in ("reliability_diagram", "score_histograms", "roc_bad_far"))
    [legend] = _risk_coverage(original).legends
    assert [text.get_text().strip()[:4] for text in legend.get_texts()][:2] == [r"\$\b", "_hid"]
    assert r"| \_hidden name | 3 |" in original.to_markdown() and drawable("plain") == "plain"


def test_bins_of_few_rows_are_drawn_pale_and_the_legend_says_so():
    result = evaluate_uncertainty({"a": SavedLogits()}, saved(400, 2, 0))
    result.curves["a"]["reliability"] |= {
        "share": [0.0] * 12 + [0.01, 0.0, 0.99],  # 4 and 396 rows
        "accuracy": [None] * 12 + [0.5, None, 0.9],
        "confidence": [None] * 12 + [0.85, None, 0.98],
    }
    figure = _reliability_diagram(result)
    bars = [bar for bar in figure.axes[0].patches if bar.get_height() in (0.5, 0.9)]
    assert sorted((bar.get_height(), bar.get_alpha()) for bar in bars) == [(0.5, 0.3), (0.9, None)]
    [legend] = figure.legends
    assert "Pale: fewer than 10 rows, too few to tell" in [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize(("answered", "left"), [(None, 0.5), (0.9, 0.5), (0.3, 0.25)])
def test_risk_is_drawn_where_enough_rows_are_answered(answered, left):
    result = evaluate_uncertainty({"a": SavedLogits()}, saved(400, 2, 0))
    if answered is not None:
        result.models["a"]["data"] |= {"answered": answered, "answered_risk": 0.1}
    panel = _risk_coverage(result).axes[0]
    curve = result.curves["a"]["risk_coverage"]
    assert panel.get_xlim() == pytest.approx((left, 1.01))
    shown = [risk for coverage, risk in zip(curve["coverage"], curve["risk"], strict=True) if coverage >= left]
    assert panel.get_ylim() == pytest.approx((0, 1.05 * max([*shown, 0.1 if answered else 0])))
    dots = [tuple(line.get_xydata()[0]) for line in panel.lines if len(line.get_xydata()) == 1]
    assert dots == ([] if answered is None else [(answered, 0.1)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:all labels", "ignore:.*the same data")
def test_equal_scores_and_no_ood_data_are_still_drawn(tmp_path):
    alone = evaluate_uncertainty(SavedLogits(), saved(60, 4, 0))
    assert sorted(report_figures(alone)) == ALWAYS and all(map(png_of, report_figures(alone).values()))
    same = [{"member_logits": torch.zeros(20, 2, 3), "labels": torch.zeros(20, dtype=torch.long)}]
    for path in evaluate_uncertainty(SavedLogits(), same, {"far": {"same": same}}).plot(tmp_path):
        assert_drawn(path)


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch):
    results = evaluate_uncertainty(SavedLogits(), saved(60, 4, 0))
    for name in ("hydra_transformers.reports.report_plots", "hydra_transformers._io.pictures"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib: pip install matplotlib"):
        results.plot(tmp_path)
