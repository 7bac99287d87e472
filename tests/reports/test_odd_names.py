"""Names of models and data sets with signs that mean something to matplotlib or markdown."""

from hydra_transformers._io.pictures import drawable
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.reports.report_plots import _risk_coverage
from tests.reports.test_report_forms import MODELS, saved


def test_names_are_drawn_and_listed_as_they_are(tmp_path):
    names = [r"$\bad$", "_hidden\nname"]
    models = dict(zip(names, MODELS.values(), strict=True))
    report = evaluate_uncertainty(models, saved(60, 2.5, 0), {"near": {names[0]: saved(30, 1, 2)}})
    assert len(report.plot(tmp_path)) == 5  # a formula that does not exist would end it
    [legend] = _risk_coverage(report).legends
    assert [text.get_text().strip()[:4] for text in legend.get_texts()][:2] == [r"\$\b", "_hid"]
    assert r"| \_hidden name | 3 |" in report.to_markdown()
    assert drawable("plain") == "plain"
