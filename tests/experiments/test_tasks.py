"""Other tasks run on a few rows of each set."""

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
def test_every_task_runs_and_is_written_with_its_metrics_and_learning_rates(folder, monkeypatch):
    start, output = save_bert(folder / "bert"), folder / "tasks.json"
    BertModel(BertConfig.from_pretrained(start)).save_pretrained(start)  # without a head
    for name, value in {"MAX_TOKENS": 16, "SEEDS": (1,), "MOST_RATES": 3, "EPOCHS": 1, "ARGUMENTS": {}}.items():
        monkeypatch.setattr(tasks, name, value)
    monkeypatch.setitem(tasks.MOST, "train", 30)
    tasks.main(["--data", str(folder), "--start", str(start), "--output", str(output), "--device", "cpu"])
    content = json.loads(output.read_text())
    assert {"machine", "versions", "date", "commit", "package"} <= set(content["machine"])
    for name, task in tasks.TASKS.items():
        judged = [row for row in content["tasks"] if row["task"] == name and row["seed"] in tasks.SEEDS]
        assert len(judged) == 3 and all(task.shown[0][1] in row["test"] and row["promises"] for row in judged)
        for row in judged:
            swept = tasks.scores_by_rate(name, row["members"], content["tasks"])
            assert len(swept) == len(tasks.RATES) and swept[row["learning_rate"]] == max(swept.values())
        assert f"| {name}: {task.shown[0][0]} |" in tasks.render(content)["tasks"]
        assert tasks.next_jobs(name, content["tasks"]) == []


def test_the_next_rate_is_tried_where_the_best_lies_at_the_edge():
    swept = [(1, rate, rate) for rate in tasks.RATES] + [(3, rate, -abs(rate - 2.5e-5)) for rate in tasks.RATES]
    rows = [
        {"task": "tokens", "members": members, "epochs": tasks.EPOCHS, "learning_rate": rate, "seed": 0}
        | {"validation": {"entity_f1": score}}
        for members, rate, score in swept
    ]
    [job] = tasks.next_jobs("tokens", rows)
    assert (job["members"], job["learning_rate"]) == (1, 1e-4)


def test_tags_of_social_media_are_renamed_or_left_out():
    renamed = {"B-corporation": "B-ORG", "I-person": "I-PER", "B-product": "O", "O": "O"}
    assert {tag: tasks.renamed(tag) for tag in renamed} == renamed
