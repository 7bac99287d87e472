"""Other tasks run on a few rows of each set."""

import argparse
import gzip
import json

import pytest
from transformers import BertConfig, BertModel

from experiments import tasks
from tests.tiny_data import save_bert


def write(folder, name: str, rows: list[dict]) -> None:
    with gzip.open(folder / "text" / f"{name}.jsonl.gz", "wt") as lines:
        lines.write("\n".join(map(json.dumps, rows)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    words = ["good film", "bad film with words", "a good bad one of them", "film"]
    for part in ("train", "dev", "test"):
        rows = [{"sentence1": words[n % 4], "sentence2": words[n % 3], "score": n % 5} for n in range(48)]
        genres = ["forum" if n % 6 == 0 else "news" for n in range(48)]
        write(tmp_path, f"stsb_{part}", [row | {"genre": genre} for row, genre in zip(rows, genres, strict=True)])
        write(tmp_path, f"goemotions_{part}", [{"text": words[n % 4], "labels": [n % 2]} for n in range(40)])
        tagged = [{"tokens": ["good", "film"], "tags": ["B-PER", "O"] if n % 2 else ["O", "B-LOC"]} for n in range(40)]
        write(tmp_path, f"wikiann_{part}", tagged)
    write(tmp_path, "wnut17_train", [{"tokens": ["bad", "film"], "tags": ["B-person", "B-product"]}] * 12)
    for name in ("sst2_train", "sst2_validation", "amazon_snippets", "trec"):
        write(tmp_path, name, [{"text": words[n % 4], "label": n % 2} for n in range(60)])
    (tmp_path / "text" / "goemotions_labels.json").write_text('["joy", "anger"]')
    return tmp_path


@pytest.mark.slow
def test_every_task_runs_and_is_written_with_its_metrics_and_costs(folder, monkeypatch, capsys):
    start = save_bert(folder / "bert")
    output = folder / "tasks.json"
    BertModel(BertConfig.from_pretrained(start)).save_pretrained(start)  # without a head
    sweep = {name: tasks.SWEEP[name] for name in (tasks.RULE, "Twice the rate, 0.75 a layer")}
    constants = {"MAX_TOKENS": 16, "SEEDS": (1,), "SWEEP": sweep, "ARGUMENTS": {}}
    for name, value in constants.items():
        monkeypatch.setattr(tasks, name, value)
    monkeypatch.setattr(tasks.defaults, "MOST_EPOCHS", 1)
    monkeypatch.setattr(tasks.defaults, "LEAST_EPOCHS", 1)
    monkeypatch.setitem(tasks.MOST, "validation", 24)
    words = ["--data", str(folder), "--start", str(start), "--output", str(output), "--device", "cpu"]
    words += ["--rows", "30", "--seeds", "0", "1"]

    tasks.main([*words, "--seconds", "0"])
    assert not output.exists()  # nothing begins

    tasks.main(words)
    content = json.loads(output.read_text())
    assert {"machine", "versions", "date", "commit", "package"} <= set(content["machine"])
    tables = tasks.render(content)
    for name, task in tasks.TASKS.items():
        rows = [row for row in content["tasks"] if row["task"] == name]
        assert {row["method"] for row in rows if row["seed"] == 0} == set(sweep)
        judged = {row["method"]: row for row in rows if row["seed"] == 1}
        assert set(judged) == set(tasks.METHODS)
        assert all(task.shown[0][1] in row["test"] and row["promises"] for row in judged.values())
        costs = {method: (row["trainings"], row["work"]) for method, row in judged.items()}
        assert costs[tasks.ONE_MODEL] == (1, 1) and costs[tasks.LONGER] == costs[tasks.SOUP] == (3, 1)
        assert costs[tasks.DEEP_ENSEMBLE] == (3, 3)
        assert costs[tasks.TWO_RUNS][0] == pytest.approx(2 * costs[tasks.ONE_RUN][0], rel=1e-4)
        assert f"| {name}: {task.shown[0][0]} |" in tables["tasks"]
        assert f"| {name} | {task.main[0]} |" in tables["tasks/rule"]

    capsys.readouterr()
    tasks.main(words)  # all is there
    assert json.loads(output.read_text()) == content and " s: " not in capsys.readouterr().out


def made_up_options(**changes):
    return argparse.Namespace(**{"tasks": ["tokens"], "seeds": [1], "workers": 2, "seconds": 60} | changes)


def test_the_longest_jobs_begin_first_and_finished_ones_are_left_out():
    done = [{"task": "tokens", "plan": tasks.TWO_RUNS, "seed": 1}]
    left = tasks.jobs_left(made_up_options(seeds=[0, 1]), done)
    lengths = [tasks.PLANS[job.plan].length for job in left]
    assert lengths == sorted(lengths, reverse=True) and len(left) == len(tasks.SWEEP) + len(tasks.TRAININGS) - 1


def test_a_job_that_fails_is_written_and_run_again_unless_it_diverged(tmp_path, monkeypatch):
    def fail(job, options):
        raise RuntimeError("the GPU is full")

    monkeypatch.setattr(tasks, "rows_of", fail)
    output = tmp_path / "tasks.json"
    words = ["--data", str(tmp_path), "--start", "bert", "--output", str(output), "--tasks", "tokens", "--seeds", "1"]
    for _ in range(2):
        tasks.main([*words, "--device", "cpu"])
        rows = json.loads(output.read_text())["tasks"]
        assert len(rows) == len(tasks.TRAININGS) and all("GPU is full" in row["error"] for row in rows)
    assert not tasks.is_final(rows[0]) and tasks.is_final(rows[0] | {"error": "DivergedError('the loss is nan')"})


def test_the_rule_is_that_of_finetune_and_a_plan_passes_what_differs():
    task = tasks.TASKS["sentiment"]
    rule = tasks.rule_for(task, 2000)
    assert rule["epochs"] == 12 and rule["learning_rate"] == pytest.approx(2e-4 * (500 / (12 * 63)) ** 0.5)
    assert tasks.passed_settings(tasks.PLANS[tasks.RULE], task, 2000) == {"runs": 1, "num_members": 1}
    assert tasks.passed_settings(tasks.PLANS[tasks.TWO_RUNS], task, 2000) == {}
    assert tasks.passed_settings(tasks.PLANS[tasks.LONGER], task, 2000)["epochs"] == 36
    twice = tasks.passed_settings(tasks.PLANS["Twice the rate, 0.75 a layer"], task, 2000)
    assert twice["learning_rate"] == 2 * rule["learning_rate"] and twice["layer_decay"] == 0.75
    for name, other in (("sentiment", 1e-3), ("tokens", 3e-3)):
        plan = tasks.PLANS["The other rate of classifiers"]
        assert tasks.passed_settings(plan, tasks.TASKS[name], 2000)["classifier_learning_rate"] == other


def test_the_table_of_the_rule_has_the_best_on_validation_rows_with_its_gains():
    settings = tasks.rule_for(tasks.TASKS["regression"], 2000)
    rows = []
    for plan, validation, test in (
        (tasks.RULE, 0.75, 0.8),
        ("Half the rate", 0.625, 0.9),
        ("Half the epochs", 1, 0.5),
    ):
        row = {"task": "regression", "plan": plan, "method": plan, "seed": 0, "settings": settings}
        rows.append(row | {"validation": {"rmse": validation}, "test": {"rmse": test}})
    [line] = tasks.table_of_rule(rows).values()
    assert line[2].startswith("half the rate") and line[3:] == ["0.750", "+0.125", "0.800", "-0.100"]


def test_results_of_the_earlier_recipe_have_no_tables():
    assert tasks.render({"tasks": [{"task": "tokens", "members": 1, "epochs": 5.0, "seed": 0}]}) == {}


def test_tags_of_social_media_are_renamed_or_left_out():
    renamed = {"B-corporation": "B-ORG", "I-person": "I-PER", "B-product": "O", "O": "O"}
    assert {tag: tasks.renamed(tag) for tag in renamed} == renamed
