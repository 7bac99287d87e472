"""The comparison runs in its smallest form, and its tables show what was measured."""

import json
import sys
from dataclasses import asdict, replace

import pytest

from experiments import comparison, figures, one_run_table, runs, tables
from experiments.methods import TITLES, Comparison
from experiments.pretrained import SETTINGS
from experiments.results import RESULTS, gather, read_results, write_results
from experiments.smallest import SMALLEST, new_backbone, splits
from experiments.table import auroc, table
from hydra_transformers.pruning.oba import ranked_weights
from tests.pages import ROOT


@pytest.mark.slow
def test_every_method_is_judged_once_with_its_members_and_costs(tmp_path, monkeypatch):
    """Every claim about a whole comparison in one test: it takes half a minute to run."""
    Comparison(SMALLEST, splits(), tmp_path, "cpu").run_seed(0)
    results = gather(tmp_path, "cpu")
    methods = results["seeds"]["0"]
    assert set(TITLES) <= set(methods)
    members = {"single": 1, "oba": 1, "mc-dropout": 10} | dict.fromkeys(("hydra-circ", "lora-ensembles", "packed"), 3)
    assert {name: methods[name]["num_members"] for name in members} == members
    single, ensemble = methods["single"], methods["deep-ensembles"]
    assert (ensemble["parameters"], ensemble["multiply_adds"]) == (
        3 * single["parameters"],
        3 * single["multiply_adds"],
    )
    assert methods["hydra-circ"]["multiply_adds"] < ensemble["multiply_adds"]
    # a temperature changes no prediction
    assert methods["temperature"]["id"]["accuracy"] == single["id"]["accuracy"]
    assert methods["temperature"]["id"]["nll"] != single["id"]["nll"]
    assert set(single["ood"]) == {"msp", "mutual_information", "energy"} and "validation" in single
    assert single["shift"]["corruptions"]["contrast"]["nll"] != [single["id"]["nll"]]
    assert {name: len(each["ranking"]) for name, each in results["circuits"]["0"].items()} == dict.fromkeys(
        ("acc", "avg", "ood"), 2
    )
    rendered = tables.render({"smallest": results})
    row = next(line for line in rendered["smallest/quality"].splitlines() if line.startswith("| Hydra (Circ) |"))
    hydra = methods["hydra-circ"]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == [
        f"{hydra['multiply_adds'] / single['multiply_adds']:.2f}",
        f"{100 * hydra['id']['accuracy']:.2f}",
    ]
    assert cells[6:8] == [f"{100 * hydra['ood'][score]['near']['more']['auroc']:.1f}" for score in ("msp", "energy")]
    assert len(rendered["smallest/shift"].splitlines()) == 2 + len(TITLES)
    again = Comparison(SMALLEST, splits(), tmp_path, "cpu")
    monkeypatch.setattr("experiments.methods.collect_answers", lambda *args, **_: pytest.fail("judged again"))
    again.run_seed(0)
    monkeypatch.setattr("transformers.Trainer.train", lambda *args, **kwargs: pytest.fail("trained again"))
    again.tuned_member(0, "circ-avg")


@pytest.mark.slow
def test_obas_zeros_stay_in_training(tmp_path):
    found = Comparison(SMALLEST, splits(), tmp_path, "cpu")
    sparse, tuned = found.pruned_member(0, "oba"), found.tuned_member(0, "oba")
    zeros = [weight == 0 for weight in ranked_weights(sparse)]
    assert sum(int(zero.sum()) for zero in zeros) == 2 * 4 * 24 * 4  # two heads of 4 x 24 x 4 weights
    trained = zip(ranked_weights(tuned), ranked_weights(sparse), zeros, strict=True)
    assert all((weight != before).any() and (weight[zero] == 0).all() for weight, before, zero in trained)


def test_backbones_of_seeds_are_their_own(tmp_path, monkeypatch):
    found, made = Comparison(SMALLEST, splits(), tmp_path, "cpu"), []
    monkeypatch.setattr(Comparison, "backbone", lambda self, index: made.append(index) or new_backbone())
    for seed in range(3):
        found.deep_ensemble(seed)
    assert made == list(range(9))


def test_a_rate_multiplies_all_learning_rates_under_another_name():
    setting = SETTINGS["sst2-gte"]
    halved = setting.at_rate(0.5)
    assert halved.name == "sst2-gte-rate-0.5" and setting.at_rate(1) is setting
    for recipe in ("backbone_recipe", "member_recipe"):
        before, after = (getattr(each, recipe).arguments for each in (setting, halved))
        assert after["learning_rate"] == before["learning_rate"] / 2
        assert after["classifier_learning_rate"] == before["classifier_learning_rate"] / 2
    assert halved.lora_learning_rate == setting.lora_learning_rate / 2


def test_a_worker_that_fails_fails_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["experiments", "--data", str(tmp_path)])
    monkeypatch.setattr(comparison.sys, "executable", "false")
    with pytest.raises(SystemExit, match="seeds 0, 1, 2 did not finish"):
        comparison.main()
    monkeypatch.setattr(sys, "argv", ["experiments", "--start", "nothing"])
    with pytest.raises(SystemExit):
        comparison.main()


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


def test_near_and_far_count_the_same_and_means_under_shift_are_over_corruptions_and_severities():
    near, far = {"a": {"auroc": 0.6}}, {"b": {"auroc": 0.7}, "c": {"auroc": 0.9}}
    run = {"ood": {"msp": {"near": near, "far": far}}}
    assert auroc()(run) == pytest.approx(70.0) and auroc(group="far")(run) == pytest.approx(80.0)
    corruptions = {"contrast": {"nll": [0.5, 0.3]}, "pixelate": {"nll": [0.7, 0.1]}}
    run = {"shift": {"severities": [1, 5], "corruptions": corruptions}}
    assert tables.shifted("nll", times=1)(run) == pytest.approx(0.4)
    assert tables.shifted("nll", severity=1)(run) == pytest.approx(60)
    assert tables.shifted("nll")({}) is None


def one_run_rows(name: str, brier: float, test: float, count: int = 3, **run) -> list[dict]:
    found = {"accuracy": test, "aurc": 0.05, "nll": 0.7, "answered_at_5": 0.6, "answered_at_5_with_near": 0.4}
    found |= {f"{group}_{score}": 0.75 for group in ("near", "far") for score in ("msp", "energy")}
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
                brier = 0.3 + abs(run.learning_rate - 5e-5) * 1e3 + abs(run.branch_rate - 3) / 100
                rows.append({"name": run.group, "run": asdict(run), "validation": {"brier": brier}})
    for run in dict.fromkeys(runs.finalists(setting, rows)):
        if run.seed:  # the second best of the first seed is best with all three
            brier = 0.1 if run.branch_rate == 1 else 0.5
            rows.append({"name": run.group, "run": asdict(run), "validation": {"brier": brier}})
    assert len(rows) == 18 + 12
    best = runs.chosen(setting, rows)
    for run in (best.single, best.one_run):
        assert (run.learning_rate, run.branch_rate, run.seed) == (5e-5, 1.0, 0)
    assert best.single.epochs == 12 and best.one_run.members == 3


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


def test_every_results_file_is_named_with_its_command_and_commit(monkeypatch):
    there = {path for folder in ("benchmarks", "experiments") for path in (ROOT / folder / "results").rglob("*.json")}
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
