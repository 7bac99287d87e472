"""The paper's numbers beside those of the results files, and the claims beside what was measured."""

from experiments import analysis_table
from experiments.paper.studies import SETTINGS
from experiments.paper.summary import SUMMARIES, render
from experiments.paper.tables import NUMBERS, TABLES


def run(auroc: float) -> dict:
    data = {"accuracy": 0.9, "brier": 0.1, "nll": 0.3, "ece": 0.01, "aece": 0.02, "mutual_information": 0.05}
    metrics = {"auroc": auroc, "fpr95": 0.5, "aupr": 0.6}
    return {"data": data | {"disagreement": 0.1}, "ood": {"near": {"other": metrics}, "far": {"mnist": metrics}}}


WHERE = {"machine": "a GPU", "versions": "torch 2", "date": "2026-01-01", "commit": "abc"}


def test_without_results_the_paper_stands_alone_and_what_was_not_run_is_said():
    text = render(SUMMARIES["paper-readme"], {})
    assert "| Hydra Ensembles (Circ) | 80.88 | 0.74 | 86.29 |" in text
    assert "None of this was run here yet" in text and "here: accuracy" not in text
    assert "--table 1 --setting tinyimagenet-dinov2" in text


def test_results_fill_the_columns_here():
    seeds = {str(seed): {"single": run(0.8), "hydra-circ": run(0.85 + seed / 100)} for seed in range(3)}
    text = render(SUMMARIES["paper-readme"], {"tinyimagenet-dinov2": WHERE | {"seeds": seeds}})
    assert "| Single | 80.67 | 0.71 | 84.40 | 90.00 ± 0.00 | 0.300 ± 0.000 | 80.00 ± 0.00 |" in text
    assert "| Hydra Ensembles (Circ) | 80.88 | 0.74 | 86.29 | 90.00 ± 0.00 | 0.300 ± 0.000 | 86.00 ± 1.00 |" in text
    assert "| Deep Ensembles | 82.19 | 0.65 | 85.48 | - | - | - |" in text
    assert "over 3 seeds (a GPU, 2026-01-01)" in text and "not run" not in text


def test_every_row_of_a_summary_is_in_the_table_that_runs_it_and_in_the_paper():
    for summary in SUMMARIES.values():
        assert set(summary.methods) <= set(TABLES[summary.table].rows(SETTINGS[summary.here]))
        assert all(method in NUMBERS[paper] for paper in summary.papers for method in summary.methods)


def test_claims_say_what_was_not_run():
    lines = analysis_table.render({}, {}).splitlines()[2:]
    assert len(lines) == len(analysis_table.CLAIMS)
    assert all(line.count("| not run | not run |") == 1 for line in lines)


def test_claims_have_what_was_measured():
    estimate = {"value": 0.5, "error": 0.1}
    heads = {name: {"noisy": {"slope": estimate}} for name in ("Taylor", "CircAvg")}
    differences = {name: {"curvature": estimate, "change": estimate} for name in ("Taylor", "CircAvg")}
    pair = {"overlap": 0.29, "overlap_by_chance": 0.2, "head_divergence": 0.37}
    point = {"order": "Taylor", "budget": 24, "kept": 48, "accuracy": 0.8, "auroc": 0.7}
    analyses = {
        "images": {
            "proposition": {"changes": heads, "differences": differences},
            "comparison": {"pairs": [["Taylor", "CircAvg", pair], ["CircAcc", "CircAvg", pair]]},
            "sweep": {"dense": point, "points": [point]},
        }
    }
    untuned = {"single": run(0.8), "taylor-untuned": run(0.7)}
    distance = {"mnist": {"euclidean": 2.0, "mahalanobis": 3.0}, "textures": None}
    untuned["distances"] = {"distances": {"circ-ood": distance, "dense": distance}}
    towers = {"vision": [[0, 0, 0.1], [1, 0, 0.4]], "text": [[0, 0, 0.2], [1, 0, 0.2]]}
    papers = {
        "tinyimagenet-dinov2": {"seeds": {"0": untuned}},
        "clip-vit-b32": {"seeds": {"0": {"tower-scores": {"towers": towers}}}},
    }
    text = analysis_table.render(analyses, papers)
    assert "Taylor: +0.500, +0.500, gap +0.500; CircAvg" in text
    assert "| Taylor: 29 % (by chance 20 %), JSD 0.37 | not run |" in text
    assert "Taylor, 24 removed: 80.0 / 70.0" in text
    assert "Single 90.00 / 80.00 / 80.00, Taylor 90.00 / 70.00 / 70.00" in text
    assert "CircOOD 2.00 / 3.00, all heads 2.00 / 3.00" in text
    assert "in 1 of 2 layers" in text
