"""The paper's tables: every one is made with tiny models and made-up data, and says what was measured."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import datasets
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTImageProcessor

from experiments.paper import __main__ as paper
from experiments.paper import data, tables
from experiments.paper.clip import read_factors
from experiments.paper.figures import FIGURES
from experiments.paper.methods import METHODS, methods_of, varied_members
from experiments.paper.parts import CIRC, TAYLOR, Part, circuit_of, expanded, needs_of, rates
from experiments.paper.pictures import draw_tower_scores, layer_means
from experiments.paper.settings import SETTINGS as CLASSIFIERS
from experiments.paper.studies import SETTINGS, rows_of, smallest_of
from experiments.paper.study import DISTANCES
from experiments.paper.tables import NUMBERS, TABLES, columns_of, difference_cell, value, verdict_of
from experiments.paper.work import do_all
from experiments.splits import Splits
from hydra_transformers.data.loading import PreparedData
from tests.pages import ROOT


def run(detected: float, accuracy: float = 0.9) -> dict:
    """A result with two near sets and one far set."""
    metrics = {"auroc": detected, "fpr95": 0.5, "aupr": 0.6, "mutual_information": 0.1, "disagreement": 0.2}
    near = {"yelp": metrics, "amazon": metrics | {"auroc": detected + 0.1}}
    data = {"accuracy": accuracy, "brier": 0.1, "nll": 0.3, "ece": 0.01, "aece": 0.02}
    return {"data": data, "ood": {"near": near, "far": {"trec": metrics | {"auroc": 0.9}}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [("cifar100",), ("imagenet1k",), ("sst2",), ("clip-vit-b32",)],
    ids=lambda names: names[0],
)
def test_every_table_and_figure_is_made_with_tiny_models(settings, tmp_path, capsys):
    for name in settings:
        own = SETTINGS[name].paper
        words = ["--smallest", "--setting", name, "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
        asked = [["--table", str(number)] for number, table in TABLES.items() if own in table.settings]
        asked += [["--figure", str(number)] for number, figure in FIGURES.items() if own in figure.settings]
        for what in asked:
            paper.main([*words, *what])
            shown = capsys.readouterr().out
            assert "No results" not in shown
            if what[0] == "--table":
                table = TABLES[int(what[1])]
                titles = [rows_of(SETTINGS[name])[row].title for row in table.rows(SETTINGS[name]) if row != DISTANCES]
                assert all(f"| {title} | " in shown for title in titles)
            else:
                assert (tmp_path / f"figure-{what[1]}-{name}.png").stat().st_size > 10_000
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert set(content) >= {"machine", "versions", "date", "commit", "seeds"}
        for result in content["seeds"]["0"].values():
            if "data" in result and not isinstance(next(iter(result["data"].values())), dict):
                assert set(result["data"]) >= set(tables.CLASSIFICATION)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("sst2-gte", "2"), ("tinyimagenet-dinov2", "1")])
def test_a_small_setting_stands_in_for_the_papers(name, number, tmp_path, capsys):
    """Tables are made as with the paper's settings of the same task: here one, of two methods."""
    words = ["--smallest", "--setting", name, "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    paper.main([*words, "--table", number, "--methods", "single", "hydra-circ"])
    shown = capsys.readouterr().out
    assert all(f"| {METHODS[method].title} | " in shown for method in ("single", "hydra-circ"))
    assert set(json.loads((tmp_path / f"{name}.json").read_text())["seeds"]["0"]) == {"single", "hydra-circ"}


@pytest.mark.slow
def test_what_is_there_is_not_done_again_and_workers_do_what_one_process_does(tmp_path, capsys):
    words = ["--table", "2", "--smallest", "--methods", "single", "taylor"]
    alone = [*words, "--runs", str(tmp_path / "alone"), "--results", str(tmp_path / "alone")]
    paper.main(alone)
    first = capsys.readouterr().out
    results = tmp_path / "alone" / "sst2" / "results" / "0" / "taylor.json"
    written = results.stat().st_mtime_ns
    paper.main(alone)
    assert capsys.readouterr().out == first and results.stat().st_mtime_ns == written

    args = paper.parsed([*words, "--runs", str(tmp_path / "two"), "--results", str(tmp_path / "two")])
    args.workers = 2
    paper.run_and_show(args)
    assert capsys.readouterr().out.endswith(first)


def test_every_part_stands_behind_what_it_needs():
    for setting in CLASSIFIERS.values():
        methods = methods_of(setting)
        goals = [part for seed in range(2) for method in methods.values() for part in method.needs(setting, seed)]
        order = expanded(goals, lambda part, setting=setting: needs_of(setting, part))
        assert len(order) == len(set(order)) and set(goals) <= set(order)
        for place, part in enumerate(order):
            assert set(needs_of(setting, part)) <= set(order[:place])


def test_learning_rates_are_tried_where_the_recipe_has_several():
    assert [part.rate for part in rates(SETTINGS["cifar100"], "member")] == [0.001, 0.003, 0.01, 0.03]
    assert [part.rate for part in rates(SETTINGS["imagenet1k"], "backbone")] == [0.003, 0.01, 0.03, 0.06]
    assert rates(SETTINGS["sst2"], "member") == [] == rates(SETTINGS["sst2"], "backbone")
    member = Part("member", 2, "circ-avg")
    assert set(rates(SETTINGS["cifar100"], "member")) <= set(needs_of(SETTINGS["cifar100"], member))


def test_the_papers_budgets():
    for name, heads, kept in (("imagenet1k", 48, 8), ("cifar100", 24, 10), ("sst2", 72, 6), ("sst2-gte", 72, 6)):
        setting = SETTINGS[name]
        assert (setting.heads_to_prune, setting.heads_per_layer) == (heads, kept)
        assert setting.heads_to_prune == setting.layers * (setting.heads - setting.heads_per_layer)
    small = SETTINGS["tinyimagenet-dinov2"]
    assert small.heads_to_prune == small.layers * (small.heads - small.heads_per_layer)
    circuit = circuit_of(SETTINGS["imagenet1k"], Part("member", 0, "sampled-1"))
    assert circuit == Part("circuit", 0, "avg", 100)  # B.5: 48 of the first 100


def test_members_of_the_sources_differ_in_them_alone():
    heads = varied_members(0, ("heads",))
    assert [part.name for part in heads] == ["sampled-0", "sampled-1", "sampled-2"]
    assert {(part.order, part.noise) for part in heads} == {(0, 0)}
    order = varied_members(0, ("order",))
    assert [(part.name, part.order, part.noise) for part in order] == [
        ("sampled-0", place, 0) for place in (0, 10, 20)
    ]
    assert len(set(varied_members(0, ()))) == 1


def test_hydras_are_made_of_the_papers_members():
    setting = SETTINGS["sst2"]
    assert [part.name for part in METHODS["hydra-circ"].needs(setting, 1)] == list(CIRC)
    assert [part.name for part in METHODS["hydra-taylor"].needs(setting, 1)] == list(TAYLOR)
    assert [part.seed for part in METHODS["deep-ensembles"].needs(setting, 1)] == [1, 2, 3]


def test_columns_are_means_over_sets_in_percent():
    result = run(0.7)
    assert value(result, "accuracy") == pytest.approx(90)
    assert value(result, "nll") == pytest.approx(0.3)
    assert value(result, "near.auroc") == pytest.approx(75)
    assert value(result, "ood.auroc") == pytest.approx(100 * (0.7 + 0.8 + 0.9) / 3)
    assert value(result, "amazon.auroc") == pytest.approx(80)
    assert value(result, "ood.disagreement") == pytest.approx(0.2)
    shifted = {"severities": {"1": {"accuracy": 0.5}, "average": {"accuracy": 0.4}}}
    assert [value(shifted, f"severity{name}.accuracy") for name in ("1", "_average")] == [50, 40]


def test_columns_of_several_label_sets():
    both = {"data": {"imagenet1k": run(0.7, 0.6)["data"], "dtd": run(0.7, 0.4)["data"]}}
    both["ood"] = {"imagenet1k": run(0.7)["ood"]}
    assert value(both, "dtd:accuracy") == pytest.approx(40) and value(both, "mean:accuracy") == pytest.approx(50)
    assert value(both, "imagenet1k:near.auroc") == pytest.approx(75)
    assert tables.values([both], "cifar100:accuracy") == [] == tables.values([both], "dtd:near.auroc")
    assert columns_of("each:nll", both) == ["imagenet1k:nll", "dtd:nll", "mean:nll"]
    assert columns_of("imagenet1k:far", both) == [f"imagenet1k:trec.{metric}" for metric in tables.DETECTION]
    assert tables.title_of("imagenet1k:near.auroc") == "imagenet1k near AUROC ↑"


def test_a_table_has_our_mean_and_deviation_and_the_papers_number():
    seeds = {"0": {"single": run(0.6, 0.90)}, "1": {"single": run(0.6, 0.92)}}
    text = tables.render(TABLES[2], SETTINGS["sst2-gte"], seeds)
    [row] = [line for line in text.splitlines() if line.startswith("| Single")]
    assert row.startswith("| Single | 91.00 ± 1.41 (92.55) |")
    assert NUMBERS["sst2"]["single"]["accuracy"] == 92.55
    per_set = tables.render(TABLES[18], SETTINGS["sst2-gte"], seeds)
    assert "yelp AUROC ↑" in per_set and "(62.43)" in per_set


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        (2.8, [2.0, 2.2, 1.8], tables.HOLDS),
        (2.8, [-2.0, -2.2, -1.8], tables.OPPOSITE),
        (2.8, [2.0, -1.0, 0.5], tables.UNCLEAR),
        (2.8, [2.0], tables.UNCLEAR),
        (2.8, [0.0, 0.0, 0.0], tables.UNCLEAR),
        (2.8, [2.0, 1.0, 3.0], tables.UNCLEAR),  # three seeds: 4.3 standard errors
    ],
)
def test_a_difference_holds_if_it_is_clear_and_of_the_papers_sign(theirs, ours, verdict):
    assert verdict_of(theirs, ours) == verdict
    assert difference_cell(theirs, ours, "ood.auroc").endswith(f"(+2.80, {verdict})")


def test_the_papers_numbers_agree_with_their_own_averages():
    """A wrong digit in a set or in a mean would show."""
    groups = {"sst2": {"near": ("yelp", "amazon"), "far": ("20ng", "trec", "mnli", "rte", "wmt16")}}
    groups["imagenet1k"] = {"near": ("ssb_hard", "ninco"), "far": ("inaturalist", "textures")}
    for setting, of_setting in groups.items():
        for method, numbers in NUMBERS[setting].items():
            for group, sets in of_setting.items():
                for metric in tables.DETECTION:
                    values = [numbers.get(f"{name}.{metric}") for name in sets]
                    mean = numbers.get(f"{group}.{metric}")
                    # The paper's table 15 has LoRA's numbers in the row of Batch Ensembles.
                    if None in (*values, mean) or method == "batch-ensemble":
                        continue
                    assert math.fsum(values) / len(values) == pytest.approx(mean, abs=0.06), (setting, method, group)


# The paper's data


def test_openoods_lists_name_images_in_its_folders(tmp_path):
    (tmp_path / "benchmark_imglist" / "cifar100").mkdir(parents=True)
    (tmp_path / "images_classic").mkdir()
    for name in ("first", "second"):
        Image.new("RGB", (3, 2), "red").save(tmp_path / "images_classic" / f"{name}.png")
    (tmp_path / "benchmark_imglist" / "cifar100" / "test_places365.txt").write_text("first.png -1\nsecond.png -1\n")
    source = data.CIFAR100.ood["far"]["places365"]
    rows = data.listed_images(source, tmp_path, processor=None)
    assert len(rows) == 2 and rows.rows[1]["image"].size == (3, 2)
    with pytest.raises(FileNotFoundError, match="test_ninco is not in"):
        data.listed_images(data.IMAGENET1K.ood["near"]["ninco"], tmp_path, processor=None)


def test_no_row_is_in_two_splits():
    rows = PreparedData(
        datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(2_050)]}),
        None,
        "text",
        ("text",),
        [0, 1] * 1_025,
    )
    parts = data.held_out_of_train(rows, rows, held_out=2_000)
    assert [len(parts[name]) for name in ("circuit_id", "validation", "train")] == [1_000, 1_000, 50]
    seen = [row["text"] for name in ("circuit_id", "validation", "train") for row in parts[name].rows]
    assert sorted(seen) == sorted(row["text"] for row in rows.rows)
    parts = data.held_out_of_test(rows, rows)
    held, tested = ({row["text"] for row in parts[name].rows} for name in ("validation", "test"))
    assert len(held) == 20 and len(tested) == 2_030 and not held & tested
    assert parts["test"].labels[0] == int(parts["test"].rows[0]["text"].split()[1]) % 2


def test_imagenet_c_is_read_from_the_authors_folders(tmp_path):
    start = tmp_path / "vit"
    ViTConfig(image_size=8, patch_size=4).save_pretrained(start)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(start)
    for severity in data.SEVERITIES:
        for number in range(1_000):
            (tmp_path / "imagenet-c" / "fog" / str(severity) / f"n{number:08}").mkdir(parents=True)
        Image.new("RGB", (4, 4), "blue").save(tmp_path / "imagenet-c" / "fog" / str(severity) / "n00000007" / "a.png")
    found = data.imagenet_c(tmp_path, str(start))
    assert {name: {severity: rows.labels for severity, rows in sweep.items()} for name, sweep in found.items()} == {
        "fog": {severity: [7] for severity in data.SEVERITIES}
    }


def test_factors_of_bayesvlm_are_read_where_all_are_there(tmp_path):
    assert read_factors(None) is None and read_factors(tmp_path) is None
    (tmp_path / "bayesvlm").mkdir()
    for number, name in enumerate(("A_img", "B_img", "A_txt", "B_txt")):
        assert read_factors(tmp_path) is None
        torch.save(torch.eye(2) * number, tmp_path / "bayesvlm" / f"{name}_analytic.pt")
    assert torch.equal(read_factors(tmp_path)["B_txt"], 3 * torch.eye(2))


def test_real_ood_sets_alone_and_few_rows_for_circuits():
    texts = {name: data.made_up_texts(8, seed) for seed, name in enumerate(("amazon", "spliced", "trec"))}
    many = data.made_up_texts(600, 9)
    ood = {"near": {"amazon": texts["amazon"], "spliced": texts["spliced"]}, "far": {"trec": texts["trec"]}}
    splits = data.shortened(Splits(many, many, many, many, many, ood, validation_ood=many))
    assert {group: list(sets) for group, sets in splits.ood.items()} == {"near": ["amazon"], "far": ["trec"]}
    assert len(splits.circuit_id) == 500 == len(splits.circuit_ood) and len(splits.test) == 600


# Work


class Failing:
    def __init__(self):
        self.made = []

    def make(self, part):
        if part.name == "fails":
            raise RuntimeError("no memory")
        self.made.append(part)


def test_what_fails_loses_nothing_but_what_needs_it():
    first = Part("a", 0, "fails")
    second = Part("b", 0)
    third = Part("c", 0)
    study = Failing()
    needs = {first: [], second: [first], third: []}.__getitem__
    lines = do_all([first, second, third], needs, lambda: study, workers=0)
    assert study.made == [third]
    assert [line.split(" failed")[0] for line in lines] == [str(first), str(second)] and "no memory" in lines[0]


class Dying(Failing):
    """Its process ends in the middle of a part."""

    def make(self, part):
        if part.name == "dies":
            os._exit(1)


@pytest.mark.slow
def test_a_process_that_dies_loses_its_part_alone():
    parts = [Part("a", 0, "dies"), Part("b", 0, "needs it"), Part("c", 0), Part("c", 1)]
    lines = do_all(parts, lambda part: parts[:1] if part == parts[1] else [], Dying, 1)
    assert [line.split(" failed: ")[1] for line in lines] == ["its process died", f"needs {parts[0]}"]


@pytest.mark.slow
def test_work_stops_in_time_and_says_what_is_left():
    parts = [Part("a", seed) for seed in range(3)]
    assert do_all(parts, lambda part: [], Failing, 1, stop_after=0.01) == [
        f"3 parts are left, the first is {parts[0]}: start again to go on"
    ]


def test_the_smallest_setting_keeps_recipes_and_has_few_steps():
    for setting in CLASSIFIERS.values():
        small = smallest_of(setting)
        assert small.layers == 2 and small.member_recipe.arguments["max_steps"] == 2
        assert small.member_recipe.reset_classifier == setting.member_recipe.reset_classifier
        model = replace(small).new_backbone(small.start, 0)
        assert model.config.num_attention_heads == small.heads and not torch.equal(
            model.classifier.weight, small.new_backbone(small.start, 1).classifier.weight
        )


def test_the_page_shows_what_was_run():
    results = paper.read_paper_results(paper.PAPER_RESULTS)
    assert paper.PAGE.exists() == bool(results)
    if results:
        assert paper.PAGE.read_text() == tables.page(results)


def test_a_page_has_tables_differences_and_where_they_were_run():
    seeds = {
        str(seed): {"single": run(0.6), "hydra-circ": run(0.7 + seed / 100), "deep-ensembles": run(0.6)}
        for seed in range(3)
    }
    where = {"machine": "a GPU", "versions": "torch 2", "date": "2026-01-01", "commit": "abc"}
    tried = {"learning_rates": {"member": {"0.01": 0.8, "0.03": 0.7}}}
    text = tables.page({"tinyimagenet-dinov2": where | tried | {"seeds": seeds}})
    assert "a GPU, torch 2, 2026-01-01, commit abc; 3 seeds" in text and "### Table 1: Images" in text
    assert "member: 0.01 (80.00 %), 0.03 (70.00 %)" in text
    beside = [part for part in text.split("### ") if part.startswith("Differences")]
    assert [part.splitlines()[0].split(" on ")[1] for part in beside] == [
        "CIFAR-100, ViT-B/16",
        "ImageNet-1K, ViT-B/16",
    ]
    assert "(+3.35, holds)" in beside[0] and "(+0.81, holds)" in beside[1]  # AUROC of Circ less that of Deep Ensembles


def test_costs_have_a_command_of_their_own(capsys):
    for words in (["--table", "7"], ["--figure", "3"]):
        paper.main(words)
        assert "python benchmarks/inference_cost.py --paper" in capsys.readouterr().out


def test_a_setting_of_another_task_is_an_error(capsys):
    with pytest.raises(SystemExit):
        paper.main(["--table", "13", "--setting", "sst2"])
    assert "pass imagenet1k, cifar100, tinyimagenet-dinov2" in capsys.readouterr().err


def test_no_table_of_the_small_images_has_packed_ensembles():
    small = SETTINGS["tinyimagenet-dinov2"]
    for table in TABLES.values():
        assert "packed" not in table.rows(small)
    assert "packed" in TABLES[16].rows(SETTINGS["cifar100"])


def test_headings_of_a_stand_in_do_not_name_the_papers_data():
    metrics = {name: run(0.6) for name in TABLES[16].rows(SETTINGS["tinyimagenet-dinov2"])}
    where = {"machine": "a GPU", "versions": "torch 2", "date": "2026-01-01", "commit": "abc"}
    text = tables.page({"tinyimagenet-dinov2": where | {"seeds": {"0": metrics}}})
    headings = [line for line in text.splitlines() if line.startswith("### Table")]
    assert len(headings) > 2 and not any("CIFAR" in line or "ImageNet-1K" in line for line in headings)


def test_matplotlib_is_loaded_where_a_figure_is_drawn():
    check = "import sys, experiments.paper.__main__; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


def test_figure_7_has_the_scores_of_both_towers(tmp_path):
    scores = {"vision": [[0, 0, 0.2], [0, 1, 0.4], [1, 0, 0.1], [1, 1, 0.1]], "text": [[0, 0, 0.01], [0, 1, 0.02]]}
    assert layer_means(scores["vision"]) == pytest.approx({0: 0.3, 1: 0.1})
    path = draw_tower_scores({"towers": scores}, tmp_path / "figure.png")
    assert path.stat().st_size > 10_000


def test_list_names_every_table_and_setting(capsys):
    paper.main(["--list"])
    shown = capsys.readouterr().out
    assert all(f"--table {number}:" in shown for number in TABLES)
    assert all(f"--figure {number}:" in shown for number in FIGURES)
    assert all(f"--setting {name}:" in shown for name in SETTINGS)
