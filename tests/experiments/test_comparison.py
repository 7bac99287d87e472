"""The comparison on real data, run whole on a tiny stand-in."""

import json
import math
from dataclasses import replace
from statistics import mean

import pytest
import torch

from benchmarks.provenance import package
from experiments import figures, overview, tables
from experiments import fine_tuning_tables as own
from experiments.comparison import PAGES, RESULTS, TRIES, check_numbers, do_units, main
from experiments.methods import Comparison
from experiments.results import gather, read_results, write_results
from experiments.settings import SETTINGS
from experiments.smallest import SMALLEST as WITH_DEEP_TRUNKS
from experiments.smallest import splits
from experiments.units import Queue, Unit, ensemble, units_of
from tests.experiments.test_deep_trunks import GROUPS as DEEP_TRUNKS
from tests.pages import ROOT


# Deep trunks have a test of their own, and take as long as all the rest.
SMALLEST = replace(
    WITH_DEEP_TRUNKS, groups=tuple(group for group in WITH_DEEP_TRUNKS.groups if group not in DEEP_TRUNKS)
)


@pytest.mark.slow
def test_all_methods_are_compared(tmp_path, monkeypatch):
    """Every claim about a whole comparison, in one test: it takes half a minute to run.

    Two workers do all units of one seed: one makes models, the other reads and evaluates them.
    """
    runs, data = tmp_path / "runs", splits()
    makes, judges = (Comparison(SMALLEST, data, runs / SMALLEST.name, "cpu", seeds=1, backbones=3) for _ in range(2))
    for unit in units_of(SMALLEST, seeds=1, backbones=3):
        (judges if unit.kind == "judge" else makes).run(unit)
    results = {SMALLEST.name: gather(runs / SMALLEST.name, "cpu")}
    methods = results[SMALLEST.name]["seeds"]["0"]

    every_method_of_the_tables_is_judged(methods)
    each_is_judged_with_its_own_number_of_members(methods)
    costs_stand_beside_quality(methods)
    members_differ_in_what_varies_and_in_nothing_else(methods)
    a_temperature_changes_no_prediction_and_no_ranking_of_members(methods)
    every_score_is_there(methods)
    layers_merged_at_the_front_are_judged(methods)
    the_circuits_are_kept_with_the_results(results)
    results_stay_where_nothing_was_judged(results, tmp_path)
    with monkeypatch.context() as patch:
        tables_show_the_numbers_of_the_results(results, methods, patch)
    with monkeypatch.context() as patch:
        what_is_done_is_not_done_again(runs, patch)


def every_method_of_the_tables_is_judged(methods):
    shown = {*tables.COMPARED, *tables.ZERO_SHOT, *tables.MEMBERS, *tables.FUSION, *tables.DIVERSITY}
    shown |= {*tables.by_budget(SMALLEST), *own.member_rows(), *own.quality_rows({"0": methods}, SMALLEST)}
    # five fine-tunings are more than the three that were trained
    assert {name for name in shown if not name.endswith("-of-5")} <= set(methods)


def each_is_judged_with_its_own_number_of_members(methods):
    expected = {"single": 1, "mc-dropout": 10, "deep-ensembles": 3, "lora-ensembles": 3, "circ-ood-tuned": 1}
    expected |= {"hydra-circ": 3, "hydra-circ-5": 5, "varied-heads": 3}
    expected |= {"batch-ensemble": 3, "mimo": 3, "heads": 3, "lora-single": 1}
    assert {name: methods[name]["num_members"] for name in expected} == expected


def costs_stand_beside_quality(methods):
    single, ensemble, hydra = methods["single"], methods["deep-ensembles"], methods["hydra-circ"]
    assert ensemble["parameters"] == 3 * single["parameters"]
    assert ensemble["multiply_adds"] == 3 * single["multiply_adds"] > hydra["multiply_adds"]
    baselines = ("heads", "mimo", "batch-ensemble")
    ratios = [methods[name]["multiply_adds"] / single["multiply_adds"] for name in baselines]
    assert ratios == sorted(ratios) and ratios[0] > 1 and ratios[-1] == 3


def members_differ_in_what_varies_and_in_nothing_else(methods):
    assert methods["varied-nothing"]["id"]["mutual_information"] == pytest.approx(0, abs=1e-9)
    for source in ("heads", "order", "noise", "order-noise", "heads-order-noise"):
        assert methods[f"varied-{source}"]["id"]["mutual_information"] > 1e-9, source


def a_temperature_changes_no_prediction_and_no_ranking_of_members(methods):
    assert methods["temperature"]["id"]["accuracy"] == methods["single"]["id"]["accuracy"]
    assert methods["temperature"]["id"]["nll"] != methods["single"]["id"]["nll"]


def every_score_is_there(methods):
    assert set(methods["hydra-circ"]["ood"]) == {"msp", "mutual_information", "energy"}


def the_circuits_are_kept_with_the_results(results):
    circuits = results[SMALLEST.name]["circuits"]["0"]
    lengths = {name: len(circuit["ranking"]) for name, circuit in circuits.items()}
    assert lengths == {"acc": 2, "avg": 5, "ood": 2}


def what_is_done_is_not_done_again(runs, monkeypatch):
    comparison = Comparison(SMALLEST, splits(), runs / SMALLEST.name, "cpu", seeds=1, backbones=3)
    monkeypatch.setattr("experiments.methods.collect_member_logits", lambda *args: pytest.fail("judged again"))
    monkeypatch.setattr("transformers.Trainer.train", lambda *args, **kwargs: pytest.fail("trained again"))
    for unit in (Unit("backbone", 0), Unit("member", 0, "circ-avg"), Unit("lora", 0), Unit("judge", 0, "tuned")):
        comparison.run(unit)


def tables_show_the_numbers_of_the_results(results, methods, monkeypatch):
    monkeypatch.setitem(SETTINGS, SMALLEST.name, SMALLEST)
    rendered = tables.render(results)
    row = next(line for line in rendered[f"{SMALLEST.name}/quality"].splitlines() if "Hydra (Circ)" in line)
    hydra = methods["hydra-circ"]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == f"{100 * hydra['id']['accuracy']:.2f}"
    aurocs = [of_set["auroc"] for sets in hydra["ood"]["msp"].values() for of_set in sets.values()]
    assert cells[6] == f"{100 * mean(aurocs):.1f}" and len(aurocs) == 2
    assert "1 heads pruned" in rendered[f"{SMALLEST.name}/budgets"]


def layers_merged_at_the_front_are_judged(methods):
    """All of a trunk's weights are the members' mean: the members of such a Hydra differ behind it alone."""
    assert own.trunk_depths({"0": methods}) == [1]
    assert methods["tunings-whole-trunk-1"]["id"] != methods["tunings-whole"]["id"]


def results_stay_where_nothing_was_judged(results, tmp_path):
    folder, [content] = tmp_path / "results", results.values()
    folder.mkdir()
    path = folder / "setting.json"
    write_results({"seeds": {}}, path)
    assert not path.exists() and read_results(folder) == {}
    write_results(content, path)
    write_results({"seeds": {}}, path)
    assert read_results(folder) == {"setting": json.loads(json.dumps(content))}


# The order of work


def test_units_come_after_what_they_need():
    units = units_of(SMALLEST, seeds=3, backbones=4)
    assert len(set(map(str, units))) == len(units)
    for place, (unit, needs) in enumerate(units.items()):
        assert set(needs) <= set(list(units)[:place]), unit


@pytest.mark.parametrize("seeds, backbones", [(1, 3), (3, 4), (3, 9)])
def test_a_deep_ensemble_has_three_backbones_with_its_own_first(seeds, backbones):
    ensembles = [ensemble(seed, seeds, backbones) for seed in range(seeds)]
    assert [each[0] for each in ensembles] == list(range(seeds))
    assert all(len(set(each)) == 3 and max(each) < backbones for each in ensembles)
    if backbones >= 3 * seeds:
        assert len({index for each in ensembles for index in each}) == 3 * seeds
    for seed, three in enumerate(ensembles):
        larger = ensemble(seed, seeds, backbones, min(5, backbones))
        assert larger[:3] == three and len(set(larger)) == min(5, backbones)


def test_workers_share_units_and_wait_for_needs(tmp_path):
    units = units_of(replace(SMALLEST, groups=("zero-shot", "tuned")), seeds=1, backbones=3)
    first, second = Queue(tmp_path, units), Queue(tmp_path, units)
    taken = [first.take(), second.take(), first.take()]
    assert taken == list(units)[:3] and second.take() is None
    first.mark(taken[0], "done")
    assert second.take() == Unit("lora", 0)  # what trains longest, then what others wait for
    assert first.take() == Unit("circuit", 0, "avg")


def test_what_needs_a_failed_unit_is_given_up_and_all_else_goes_on(tmp_path):
    queue = Queue(tmp_path, units_of(SMALLEST, seeds=1, backbones=3))
    queue.mark(Unit("circuit", 0, "avg"), "failed")
    left = set(map(str, queue.left()))
    assert "member-0-circ-acc" in left and "member-0-taylor-1" in left
    assert not left & {
        "circuit-0-avg",
        "member-0-circ-avg",
        "member-0-sampled-1",
        "judge-0-zero-shot",
        "judge-0-tuned",
    }


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_unit_that_finds_no_memory_is_tried_again_but_not_for_ever(is_lasting, tmp_path):
    unit, runs = Unit("backbone", 0), []

    def run(unit):
        runs.append(unit)
        if is_lasting or len(runs) == 1:
            raise torch.cuda.OutOfMemoryError("out of memory")

    queue = Queue(tmp_path, {unit: []})
    do_units(queue, run, pause=0)
    assert len(runs) == (TRIES if is_lasting else 2)
    assert queue.is_marked(unit, "failed" if is_lasting else "done")
    assert not queue.is_marked(unit, "done" if is_lasting else "failed")


def test_starting_again_takes_up_what_was_cut_off_or_failed(tmp_path):
    queue = Queue(tmp_path, units_of(SMALLEST, seeds=1, backbones=3))
    done, cut_off, failed = (queue.take() for _ in range(3))
    queue.mark(done, "done")
    queue.mark(failed, "failed")
    judged = Unit("judge", 0, "untuned")
    queue.mark(judged, "done")
    queue.start_again()
    assert queue.take() == cut_off and queue.take() == failed
    assert queue.is_marked(done, "done") and not queue.is_marked(judged, "done")  # there may be more methods now


def test_a_folder_is_for_one_number_of_seeds_and_backbones(tmp_path):
    numbers = {"seeds": 3, "backbones": 4}
    check_numbers(tmp_path, numbers)
    check_numbers(tmp_path, numbers)
    with pytest.raises(SystemExit, match="was begun with --backbones 4, not 9: pass that, or another --runs"):
        check_numbers(tmp_path, numbers | {"backbones": 9})


# Tables


def test_cells_are_means_with_standard_deviations_over_the_seeds():
    seeds = {"0": {"single": {"value": 1.0}}, "1": {"single": {"value": 2.0}}, "2": {"single": {"value": 3.0}}}
    [line] = tables.table(seeds, {"single": "Single"}, [("Value", lambda run: run["value"], ".1f")]).splitlines()[2:]
    assert line == "| Single | 2.0 ± 1.0 |"


def test_a_row_says_of_how_few_seeds_it_is():
    seeds = {"0": {"single": {"value": 1.0}, "other": {"value": 1.0}}, "1": {"single": {"value": 2.0}}}
    shown = tables.table(seeds, {"single": "A", "other": "B"}, [("Value", lambda run: run["value"], ".1f")])
    assert "| A | 1.5 ± 0.7 |" in shown and "| B (1 of 2 seeds) | 1.0 |" in shown


def test_the_overview_has_every_setting_side_by_side_and_costs_against_one_model():
    found = tables.pretrained_only(read_results(RESULTS))
    assert list(found) == ["tinyimagenet-dinov2", "sst2-gte"]
    lines = overview.table_of_all(found, SETTINGS).splitlines()
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines[2:]}
    assert {float(rows["| One model"][index]) for index in (0, 4)} == {1.0}
    seeds = found["sst2-gte"]["seeds"].values()
    accuracy = mean(100 * methods["deep-ensembles"]["id"]["accuracy"] for methods in seeds)
    assert rows["| Deep Ensemble of 3 fine-tunings"][5] == f"{accuracy:.2f}"
    in_table = set(overview.methods(found["sst2-gte"]["seeds"]))
    assert set(overview.LOOKS) == in_table | set(overview.ONLY_DRAWN)


def test_the_first_table_has_five_methods_with_cost_time_and_detection():
    found = tables.pretrained_only(read_results(RESULTS))
    for name, family in overview.FAMILIES.items():
        lines = overview.first_table(found[name]["seeds"], family).splitlines()
        assert len(lines) == 2 + 5 and {line.count("|") for line in lines} == {8}
        merged = [each.strip() for each in lines[5].strip("|").split("|")]
        assert merged[1] == "1.29"
        for place, mode in ((2, "eager"), (3, "compiled")):
            assert merged[place] == " / ".join(
                overview.times(family, "Hydra 3, three quarters merged", mode, (1, 256))
            )
            soup = [each.strip() for each in lines[3].strip("|").split("|")]
            assert "soup" in soup[0] and soup[place] == "- / -"  # its time was not measured
        by_confidence = [run["tunings-whole-trunk-9"]["ood"]["msp"] for run in found[name]["seeds"].values()]
        values = [
            mean(mean(each["auroc"] for each in sets.values()) for sets in groups.values()) for groups in by_confidence
        ]
        assert merged[6] == f"{100 * mean(values):.1f} %"


@pytest.mark.parametrize("mode", overview.MODES)
def test_times_are_those_of_the_benchmark(mode):
    method = "Hydra 3, nothing merged"
    rows = json.loads((overview.BENCHMARKS / overview.TIMES).read_text())["rows"]
    wanted = ("vit", method, 32, mode)
    [row] = [row for row in rows if (row["family"], row["method"], row["batch"], row["mode"]) == wanted]
    assert overview.times("vit", method, mode, (32, 5)) == [f"{row['ratio']:.2f}", "-"]
    [line] = [
        line
        for line in overview.table_of_times().splitlines()
        if line.startswith("| ViT-B/16: **Hydra of the three**, nothing")
    ]
    shown = [each.strip() for each in line.strip("|").split("|")][1:]
    assert shown == [each for one in overview.MODES for each in overview.times("vit", method, one, overview.BATCHES)]


def test_the_overview_draws_a_method_unless_it_is_far_behind_or_far_more_expensive():
    """A method that is ahead is never left out."""

    def run(auroc):
        found = {"noise": {"auroc": auroc}}
        return [{"ood": {"msp": {"near": found, "far": found}}}]

    single = run(0.80)
    assert not overview.far_off(run(0.99), single, lambda run: 1.0)
    assert not overview.far_off(run(0.76), single, lambda run: 3.0)
    assert overview.far_off(run(0.70), single, lambda run: 1.0)
    assert overview.far_off(run(0.99), single, lambda run: 10.0)


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_results(tmp_path):
    found = tables.pretrained_only(read_results(RESULTS))
    assert overview.draw(found, SETTINGS, tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_page_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["comparison.py", "--tables", "--pages", "nowhere.md"])
    with pytest.raises(SystemExit):
        main()
    assert "--pages: there is no nowhere.md" in capsys.readouterr().err


def test_a_page_gets_its_tables_and_keeps_its_words():
    page = "Words.\n<!-- table: a/b -->\nold\n<!-- end -->\nMore words.\n"
    renewed = tables.with_tables(page, {"a/b": "| new |"})
    assert renewed == "Words.\n<!-- table: a/b -->\n| new |\n<!-- end -->\nMore words.\n"
    assert tables.with_tables(renewed, {"a/b": "| new |"}) == renewed
    with pytest.raises(ValueError, match="asks for the table 'a/b': there are c"):
        tables.with_tables(page, {"c": ""})


@pytest.mark.slow
def test_the_pages_show_the_results_files():
    rendered = tables.render(read_results(RESULTS))
    for page in PAGES:
        assert tables.MARKED.search(page.read_text()), page.name
        assert tables.with_tables(page.read_text(), rendered) == page.read_text(), page.name


def test_the_page_of_other_tasks_shows_promises_and_leaves_dashes_where_nothing_was_judged():
    def run(metrics, **ood):
        return {"metrics": metrics, "ood": ood}

    numbers = {"interval_coverage": 0.91, "rmse": 0.5, "aurc": math.nan}
    content = {"machine": "M", "versions": "V", "date": "D", "tasks": {"numbers": {}}}
    content["tasks"]["numbers"]["0"] = {"One model": run(numbers, forums={"interval_coverage": 0.7, "auroc": 0.6})}
    content["tasks"]["rewards"] = {"0": {"Hydra, min": run({"pair_accuracy": 0.8, "best_of": {"1": 0.25}})}}
    rendered = tables.render({"tasks": content})
    assert rendered["tasks/machine"] == "M, V, D, 1 seeds."
    assert "| numbers: at least 90 % in their interval | 91.0 |" in rendered["tasks/promises"]
    assert "| … forums, where nothing is promised | 70.0 |" in rendered["tasks/promises"]
    assert "| One model | 0.500 | - | - | - | - |" in rendered["tasks/numbers"]
    assert "| Hydra, min | 80.0 % | - | 0.25 | - |" in rendered["tasks/rewards"]


def test_every_results_file_is_named_with_its_command_and_commit(monkeypatch):
    there = {path for folder in ("benchmarks", "experiments") for path in (ROOT / folder / "results").rglob("*.json")}
    named = {ROOT / figure.file for figure in figures.FIGURES}
    assert there == named, "experiments/figures.py names every results file, and none that is gone"
    added = {"soups": {"commit": "1234567890"}, "trunk": {"commit": "abcdefghij"}, "tuned": {"commit": "abcdefghij"}}
    assert figures.recorded("commit", {"commit": "0", "added": added}) == ["0", "12345678", "abcdefgh"]
    assert figures.recorded("commit", {"machine": {"commit": "1 with changes"}}) == ["1 with changes"]
    assert figures.recorded("commit", {"runs": [{"machine": {"commit": "a"}}, {"machine": {"commit": "b"}}]}) == [
        "a",
        "b",
    ]
    monkeypatch.setattr(figures, "package", lambda: "another")
    alike = figures.of_other_states()
    monkeypatch.setattr(figures, "ALIKE", {})
    assert set(alike) < set(figures.of_other_states())
    assert figures.of_other_states() == list(dict.fromkeys(figure.command for figure in figures.FIGURES))


def test_the_state_of_a_package_is_its_code(tmp_path):
    (tmp_path / "hydra_transformers").mkdir()
    file = tmp_path / "hydra_transformers" / "a.py"
    file.write_text("1")
    before = package(tmp_path)
    (tmp_path / "README.md").write_text("2")
    assert package(tmp_path) == before != package()
    file.write_text("2")
    assert package(tmp_path) != before
