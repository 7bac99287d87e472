"""The comparison of head scores runs in its smallest form, and a method without heads to cut changes nothing."""

import json
import sys

import pytest

from benchmarks import head_scores as benchmark
from hydra_transformers.pruning import HEAD_SCORES
from tests.tiny_data import save_bert


@pytest.mark.slow
def test_every_score_is_judged_at_every_budget_clean_and_shifted(tmp_path, monkeypatch):
    output = tmp_path / "head_scores"
    options = ["--smallest", "--device", "cpu", "--output", str(output), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", [benchmark.__file__, *options])
    benchmark.main()
    report = json.loads(output.with_suffix(".json").read_text())
    rows = {row["method"]: row for row in report["rows"]}
    normalized = {f"{name}, normalized" for name in benchmark.NORMALIZED}
    assert set(rows) == {"all heads", *HEAD_SCORES, *normalized}
    for method in rows.keys() - {"all heads"}:
        assert {name: list(of_set) for name, of_set in rows[method]["accuracy"].items()} == {
            "clean": ["0", "1", "2"],
            "shifted": ["0", "1", "2"],
        }
        assert rows[method]["nll"]["clean"]["0"] == rows["all heads"]["nll"]["clean"]["0"]
        assert (rows[method]["seconds"] is None) == (method in normalized)
    # Other rows are judged; whether noise hurts, so small a model does not tell.
    assert rows["all heads"]["nll"]["clean"]["0"] != rows["all heads"]["nll"]["shifted"]["0"]
    page = output.with_suffix(".md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))
    assert "| michel |" in page and "clean, 2" in page


def test_shifted_texts_have_lost_words_and_kept_their_labels(tmp_path, monkeypatch):
    texts, labels = ["a good film of joy and more of it", "a bad film"] * 4, [1, 0] * 4
    monkeypatch.setattr(benchmark, "read_strings_of", lambda folder, name: (texts, labels))
    start = save_bert(tmp_path)
    setting = benchmark.replace(benchmark.SETTINGS["sst2-gte"], start=str(start))
    rows = benchmark.tokenized(texts, labels, benchmark.AutoTokenizer.from_pretrained(start), max_length=128)
    splits = benchmark.replace(benchmark.smallest.splits(), test=rows)
    shifted = benchmark.texts_without_words(splits, None, setting, 8)
    clean = rows.batches(8)
    assert sorted(shifted[0]["labels"].tolist()) == sorted(labels)
    assert shifted[0]["attention_mask"].sum() < clean[0]["attention_mask"].sum()
