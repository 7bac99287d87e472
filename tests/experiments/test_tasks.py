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
    for name in ("amazon_snippets", "trec"):
        write(tmp_path, name, [{"text": words[n % 4]} for n in range(12)])
    (tmp_path / "text" / "goemotions_labels.json").write_text('["joy", "anger"]')
    return tmp_path


@pytest.mark.slow
def test_every_task_runs_and_is_written_with_its_metrics_and_learning_rates(folder, monkeypatch):
    start = save_bert(folder / "bert")
    BertModel(BertConfig.from_pretrained(start)).save_pretrained(start)  # without a head
    output = folder / "tasks.json"
    options = {"--data": folder, "--start": start, "--output": output, "--seeds": 0, "--device": "cpu"}
    monkeypatch.setattr(tasks, "MAX_TOKENS", 16)
    tasks.main([str(word) for pair in options.items() for word in pair])
    content = json.loads(output.read_text())
    assert {"machine", "versions", "date", "commit", "package"} <= set(content["machine"])
    for name, task in tasks.tasks(folder).items():
        found = content["tasks"][name]
        for kind in ("single", "one_run"):
            reached = found[kind]["reached"]
            best = (min if task.best.startswith("-") else max)(reached, key=reached.get)
            assert len(reached) == len(tasks.FACTORS) and float(best) == found[kind]["learning_rate"]
        for title in ("One model", "One run", "Deep Ensemble of 3", "Three checkpoints fused, three quarters merged"):
            assert tasks.SHOWN[name][0] in found["seeds"]["0"][title]["metrics"], (name, title)
    assert "auroc" in content["tasks"]["multi-label"]["seeds"]["0"]["One model"]["ood"]["trec"]
    assert "One run" in tasks.render(content)["tasks/regression/forums"]


def test_tags_of_social_media_are_renamed_or_left_out():
    renamed = {"B-corporation": "B-ORG", "I-person": "I-PER", "B-product": "O", "O": "O"}
    assert {tag: tasks.renamed(tag) for tag in renamed} == renamed
