"""The comparison of one run in its smallest form, and tables that show what was measured."""

import json
from argparse import Namespace
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from experiments import figures, one_run, one_run_table, recipe_table, runs, tables
from experiments.results import RESULTS, read_results, write_results
from experiments.table import table
from hydra_transformers.uncertainty import classification_metrics
from tests.pages import ROOT


@pytest.fixture
def judge(tmp_path):
    args = Namespace(data=None, start=None, device="cpu", runs=tmp_path)
    found = one_run.Judge(args, runs.SETTINGS["smallest"])
    found.setting = replace(found.setting, single=replace(found.setting.single, epochs=1), members=(3,))
    return found


@pytest.mark.slow
def test_every_comparator_is_trained_and_judged_with_its_members(judge):
    members = {"LoRA ensemble": 3, "BatchEnsemble": 3, "MIMO": 3, "MC Dropout": 10}
    assert {run.group for run in judge.setting.comparators} == set(members)
    for usual in judge.setting.comparators:
        run = replace(usual, epochs=1)
        model = judge.built(run).eval()
        logits = judge.logits(model)["test"]
        assert logits.shape == (48, members[run.group], 3) and len(logits[0].unique(dim=0)) == members[run.group]
        row, values = judge.trained(run)
        assert row["run"] == asdict(run) and row["work"] > 0 and len(values["sure"]) == 48


@pytest.mark.slow
def test_checkpoints_make_ensembles_soups_and_pruned_hydras(judge):
    """They are trained where their files are gone, and then kept."""
    made = {kind: [row for row, _ in judge.composed(kind, 0)] for kind in one_run.KINDS}
    fused = [f"fused, {trunk} layers merged" for trunk in (0, 4, 5)]
    assert [row["name"] for row in made["ensembles"]] == ["Deep Ensemble of 3", *fused]
    assert [row["name"] for kind in ("soup", "Laplace") for row in made[kind]] == ["soup", "Laplace"]
    short = {run.group: run for run in runs.short_runs(judge.setting)}
    assert list(short) == ["soup, tuned", "Hydra, Taylor", "Hydra, circuits"]
    tuned = {name: judge.trained(run)[0] for name, run in short.items()}
    assert {path.name for path in judge.args.runs.glob("*.pt")} == {f"2.5e-05-3-1-{seed}.pt" for seed in (0, 1, 2)}
    assert all(row["name"] == name and row["run"] == asdict(short[name]) for name, row in tuned.items())
    assert tuned["soup, tuned"]["test"]["nll"] != made["soup"][0]["test"]["nll"]
    smallest, *pruned = sorted(row["work"] for row in tuned.values())
    assert made["Laplace"][0]["work"] >= smallest < pruned[0] <= pruned[1] < made["ensembles"][1]["work"]
    torch.testing.assert_close(judge.logits(judge.checkpoint(0))["test"], judge.kept(0)["logits"]["test"])


def test_what_the_results_file_has_is_not_run_again():
    setting = runs.SETTINGS["smallest"]
    first, *others = runs.sweep(setting, [])
    rows = [{"name": first.group, "run": json.loads(json.dumps(asdict(first)))}, {"name": "x", "error": "memory"}]
    assert one_run.tasks_of("sweep", setting, rows) == others
    tasks = one_run.tasks_of(one_run.COMPOSED, setting, [{"name": "soup", "task": "soup-1000"}])
    assert len(tasks) == 3 * len(one_run.KINDS) - 1 and ("soup", 1000) not in tasks
    assert {kind for kind, _ in one_run.tasks_of(one_run.COMPOSED, runs.SETTINGS["sst2"], [])} == {"ensembles", "soup"}
    first, *others = one_run.tasks_of("tuned", setting, [])
    assert len(others) == 3 * 3 * 3 - 1 and {run.seed for run in others} == set(setting.seeds)
    assert one_run.tasks_of("tuned", setting, [{"name": first.group, "run": asdict(first)}]) == others


def test_intervals_of_differences_are_paired():
    rows = [
        *one_run_rows("one model", 0.5, 0.70),
        *one_run_rows("one run", 0.4, 0.80, members=3, branch_rate=6.0, epochs=9),
        *(row | {"work": None} for row in one_run_rows("Deep Ensemble of 3", 0.4, 0.85)),
    ]
    random = np.random.default_rng(0)
    sure = random.normal(size=400)
    right = random.random(400) < 0.7
    better = right | (random.random(400) < 0.4)  # right wherever the other is, so that every draw gains
    values = {f"{place}/sure": sure.astype("float16") for place in range(9)}
    values |= {f"{place}/right": np.packbits(better if place > 2 else right) for place in range(9)}
    values |= {f"{place}/near": (sure[:50] - (place > 2)).astype("float16") for place in range(9)}
    found = one_run_table.differences({"rows": rows}, values)["One run, 9 layers shared, 9 epochs"]
    middle, low, high = found["One model"]["accuracy"]
    assert middle == pytest.approx(better.mean() - right.mean(), abs=1e-4) and 0.05 < low < middle < high < 0.2
    assert found["One model"]["aurc"][2] < 0 < found["One model"]["near"][1] and found["Deep Ensemble of 3"][
        "accuracy"
    ] == [0, 0, 0]
    labels = torch.tensor(np.where(right, 0, 1))
    for scores in (sure, sure.round()):  # the second with ties
        values["0/sure"] = scores.astype("float16")
        values["0/near"] = (scores[:50] - 1).astype("float16")
        exact = one_run_table.drawn_metrics(values, 0, np.ones((1, 400), "float32"), np.ones((1, 50), "float32"))
        margins = torch.tensor(scores - scores.min())[:, None, None]
        judged = classification_metrics(margins * torch.tensor([1.0, 0.0]), labels)
        assert exact["accuracy"][0] == pytest.approx(right.mean())
        assert exact["aurc"][0] == pytest.approx(judged["aurc"], abs=5e-4)
        auroc = roc_auc_score([0] * 400 + [1] * 50, [*-values["0/sure"], *-values["0/near"]])
        assert exact["near"][0] == pytest.approx(auroc, abs=1e-5)


def test_results_stay_where_nothing_was_judged(tmp_path):
    path = tmp_path / "setting.json"
    write_results({"seeds": {}}, path)
    assert not path.exists()
    write_results({"seeds": {"0": {"single": {"a": 1.5}}}}, path)
    write_results({"seeds": {}}, path)
    assert read_results(tmp_path) == {"setting": {"seeds": {"0": {"single": {"a": 1.5}}}}}


# Tables


def test_cells_are_means_with_standard_deviations_and_say_of_how_few_seeds_they_are():
    seeds = {str(seed): {"single": {"value": float(seed)}} for seed in (1, 2, 3)}
    seeds["1"]["other"] = {"value": None}
    shown = table(seeds, {"single": "A", "other": "B"}, [("Value", lambda run: run["value"], ".1f")])
    assert shown.splitlines()[2:] == ["| A | 2.0 ± 1.0 |", "| B (1 of 3 seeds) | - |"]


def one_run_rows(name: str, brier: float, test: float, count: int = 3, **run) -> list[dict]:
    found = {"accuracy": test, "aurc": 0.05, "nll": 0.7, "answered_at_5": 0.6, "answered_at_5_with_near": 0.4}
    found |= {f"{group}_{score}": 0.75 for group in ("near", "far") for score in ("msp", "energy")}
    found |= {"calibrated_answered": 0.5, "calibrated_errors": 0.04}
    usual = runs.Run(name, **{"members": 1, "branch_rate": 1.0, "epochs": 8} | run)
    row = {"name": name, "work": 150 if name == "one run" else 100, "validation": {"brier": brier}, "test": found}
    return [row | {"run": asdict(replace(usual, seed=seed))} for seed in runs.SEEDS[:count]]


def test_of_several_learning_rates_validation_rows_choose_never_test_rows():
    rows = [
        *one_run_rows("one model", 0.5, 0.70),
        *one_run_rows("one run", 0.4, 0.80, members=3, branch_rate=6.0, epochs=9),
        *one_run_rows("one run", 0.5, 0.90, members=3, branch_rate=10.0, epochs=9),
        *one_run_rows("one run", 0.3, 0.95, count=1, members=3, branch_rate=3.0, epochs=9),
        *one_run_rows("soup, tuned", 0.4, 0.75, epochs=4),
        *(row | {"work": None} for row in one_run_rows("Deep Ensemble of 3", 0.4, 0.85)),
        {"name": "one run", "error": "out of memory"},
    ]
    shown = one_run_table.render({"rows": rows})[""].splitlines()[2:]
    columns = [[cell.strip() for cell in line.strip("|").split("|")][:4] for line in shown]
    assert columns == [
        ["One model", "1.00", "1.00", "70.00 %"],
        ["One run, 9 layers shared, 9 epochs", "1.50", "1.69", "80.00 %"],
        ["Soup of three, tuned 4 epochs", "1.00", "3.50", "75.00 %"],
        ["Deep Ensemble of 3", "3.00", "3.00", "85.00 %"],
    ]


def test_the_three_best_of_a_sweep_get_more_seeds_and_their_mean_decides():
    setting = runs.SETTINGS["clinc150-small"]
    rows = []
    for kind in (setting.single, setting.one_run):
        for run in runs.sweep(setting, []):
            if run.group == kind.group:
                brier = 0.3 + abs(run.learning_rate - 5e-5) * 1e4 + abs(run.branch_rate - 6) / 100
                rows.append({"name": run.group, "run": asdict(run), "validation": {"brier": brier}})
    for run in dict.fromkeys(runs.finalists(setting, rows)):
        if run.seed != setting.sweep_seeds[0]:  # the second best of the first seed is best with all three
            brier = 0.1 if run.branch_rate == 12 else 0.5
            rows.append({"name": run.group, "run": asdict(run), "validation": {"brier": brier}})
    assert len(rows) == 24 + 12
    best = runs.chosen(setting, rows)
    for run in (best.single, best.one_run):
        assert (run.learning_rate, run.branch_rate, run.seed) == (5e-5, 12.0, 0)
    assert best.single.epochs == 12 and best.one_run.members == 3
    published = {run.seed for run in runs.seeds(best, rows)}
    assert published.isdisjoint(setting.sweep_seeds) and published >= set(setting.seeds)


def test_where_the_best_of_a_sweep_lies_at_its_edge_the_next_value_is_tried():
    setting = runs.SETTINGS["sst2"]
    rows = []
    for run in runs.sweep(setting, []):
        brier = 0.3 - run.learning_rate if run.group == "one model" else 0.3 + abs(run.learning_rate - 5e-5)
        brier += abs(run.branch_rate - 3) / 1e6 if run.group == "one model" else run.branch_rate / 1e6
        rows.append({"name": run.group, "run": asdict(run), "validation": {"brier": brier}})
    found = [(run.group, run.learning_rate, run.branch_rate, run.seed) for run in runs.edges(setting, rows)]
    assert found == [("one model", 2e-4, 3.0, 0), ("one run", 5e-5, 0.5, 0)]
    assert not list(runs.edges(setting, []))
    for run in runs.tuned(setting, []):
        rows.append({"name": run.group, "run": asdict(run), "validation": {"brier": run.learning_rate}})
    *lower, failed = one_run.tasks_of("tuned edges", setting, rows[:-1])[::-1]
    assert failed == run and {one.learning_rate / run.learning_rate for one in lower} == {0.125} and len(lower) == 3


def test_a_threshold_of_validation_rows_is_judged_on_test_rows():
    confidence = torch.linspace(1, 0, 1000)
    validation = {"confidence": confidence, "correct": (torch.arange(1000) < 500).float()}
    test = {"confidence": confidence[::2], "correct": (torch.arange(500) < 200).float()}
    found = one_run.answered_as_calibrated(validation, test)
    assert 0.45 < found["calibrated_answered"] < 0.53  # the surest half, and some errors below the promised 5 %
    assert found["calibrated_errors"] == pytest.approx(1 - 0.4 / found["calibrated_answered"], abs=1e-6)
    never = {"confidence": confidence, "correct": torch.zeros(1000)}
    assert one_run.answered_as_calibrated(never, test) == {"calibrated_answered": 0.0, "calibrated_errors": 0.0}


def test_a_page_gets_its_tables_and_keeps_its_words():
    page = "Words.\n<!-- table: a/b -->\nold\n<!-- end -->\nMore words.\n"
    renewed = tables.with_tables(page, {"a/b": "| new |"})
    assert renewed == "Words.\n<!-- table: a/b -->\n| new |\n<!-- end -->\nMore words.\n"
    assert tables.with_tables(renewed, {"a/b": "| new |"}) == renewed
    with pytest.raises(ValueError, match="asks for the table 'a/b': there are c"):
        tables.with_tables(page, {"c": ""})


def test_the_pages_show_the_results_files():
    rendered = tables.all_tables()
    for page in tables.pages():
        assert tables.with_tables(page.read_text(), rendered) == page.read_text(), page.name


def test_figures_that_pages_copy_are_those_of_the_results_files():
    # The recipe: accuracy and AURC of each method, in one line of each page.
    dial = recipe_table.render(json.loads((RESULTS / "recipe-tiny-imagenet.json").read_text()))["dial"]
    cells = {line.split(" | ")[0].strip("| *"): line.split(" | ") for line in dial.splitlines()[2:]}
    usual = [
        "One model, 8 epochs",
        "One run of 3 members, 11 layers shared, 12 epochs",
        "2 runs of 3 members, 11 layers shared, 12 epochs each, fused, MLPs apart",
        "Soup of 2 models, 12 epochs each",
        "Deep Ensemble of 3 models, 8 epochs each",
    ]
    three = ["3 models, 12 epochs each, fused, 9 layers merged", "Deep Ensemble of 3 models, 12 epochs each"]
    apart = [f"{three[0]}, MLPs apart", three[1]]
    pages = {
        "docs/fine-tuning.md": [*usual, *apart, "One model, 24 epochs"],
        "docs/which-do-i-need.md": [*usual[:3], *three, "Soup of 3 models, 12 epochs each"],
    }
    for page, titles in pages.items():
        lines = (ROOT / page).read_text().splitlines()
        for title in titles:
            accuracy, aurc = (cells[title][place].split(" ± ")[0] for place in (4, 5))
            assert any(f"{accuracy} %" in line and aurc in line for line in lines), (page, title, accuracy, aurc)


def test_every_results_file_is_named_with_its_command_and_commit(monkeypatch):
    there = {path for folder in ("benchmarks", "experiments") for path in (ROOT / folder / "results").rglob("*.json")}
    # Of a card, the file that says where its model was made stands for the others.
    cards = RESULTS / "cards"
    there -= {path for path in there if cards in path.parents and path.name != "where.json"}
    assert there == {ROOT / figure.file for figure in figures.FIGURES}, (
        "experiments/figures.py names every results file"
    )
    assert all((RESULTS / f"{name}.json").exists() for name in ("one-run-images", "one-run-images-sweep"))
    assert figures.recorded("commit", {"machine": {"commit": "1 with changes"}}) == "1 with changes"
    assert figures.recorded("commit", {"commit": "1234567890"}) == "12345678" and figures.recorded("commit", {}) == ""
    made = json.loads((ROOT / figures.FIGURES[0].file).read_text())["machine"]["package"]
    monkeypatch.setattr(figures, "package", lambda: made)
    assert figures.FIGURES[0].command not in figures.of_other_states()
    monkeypatch.setattr(figures, "package", lambda: "another")
    assert len(figures.of_other_states()) == len(figures.FIGURES)
