"""Other tasks run on a few rows of each set."""

import gzip
import json
import sys

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
        pairs = [
            {
                "sentence1": words[n % 4],
                "sentence2": words[n % 3],
                "score": n % 5,
                "genre": "forum" if n % 6 == 0 else "news",
            }
            for n in range(48)
        ]
        write(tmp_path, f"stsb_{part}", pairs)
        write(tmp_path, f"goemotions_{part}", [{"text": words[n % 4], "labels": [n % 2]} for n in range(40)])
        tagged = [{"tokens": ["good", "film"], "tags": ["B-PER", "O"] if n % 2 else ["O", "B-LOC"]} for n in range(40)]
        write(tmp_path, f"wikiann_{part}", tagged)
    write(tmp_path, "wnut17_train", [{"tokens": ["bad", "film"], "tags": ["B-person", "B-product"]}] * 12)
    for name in ("amazon_snippets", "trec"):
        write(tmp_path, name, [{"text": words[n % 4]} for n in range(12)])
    write(tmp_path, "sst2_train", [{"text": words[1 + n % 2] + f" {n % 7}", "label": n % 2} for n in range(96)])
    (tmp_path / "text" / "goemotions_labels.json").write_text('["joy", "anger"]')
    return tmp_path


@pytest.mark.slow
def test_every_task_runs_and_is_written_with_its_metrics(folder, monkeypatch):
    start = save_bert(folder / "bert")
    BertModel(BertConfig.from_pretrained(start)).save_pretrained(start)  # without a head
    options = {"--data": folder, "--start": start, "--output": folder / "out", "--seeds": 0, "--device": "cpu"}
    monkeypatch.setattr(sys, "argv", ["tasks", *(str(word) for pair in options.items() for word in pair)])
    monkeypatch.setattr(tasks, "PROMPTS", 4)
    monkeypatch.setattr(tasks, "MAX_TOKENS", 16)
    tasks.main()
    content = json.loads((folder / "out" / "tasks.json").read_text())
    assert {"machine", "versions", "date", "commit", "package"} <= set(content)
    shown = {"regression": "rmse", "multi-label": "map", "tokens": "entity_f1", "rewards": "pair_accuracy"}
    for task, metric in shown.items():
        for title in ("One model", "Deep Ensemble of 3", "Hydra, three quarters merged"):
            assert metric in content["tasks"][task]["0"][title]["metrics"], (task, title)
    assert "auroc" in content["tasks"]["multi-label"]["0"]["One model"]["ood"]["trec"]
    assert "### Out of distribution: forums" in (folder / "out" / "tasks.md").read_text()


def test_tags_of_social_media_are_renamed_or_left_out():
    assert [tasks.renamed(tag) for tag in ("B-corporation", "I-person", "B-product", "O")] == [
        "B-ORG",
        "I-PER",
        "O",
        "O",
    ]
