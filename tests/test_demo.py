"""The demo runs from end to end, on data that its steps share fairly."""

import contextlib
import io

import pytest
from PIL import Image
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hydra_transformers.cli import main
from hydra_transformers.demo import OUT_OF_SCOPE, SENTENCES, line_of, read_splits
from hydra_transformers.reports import Report


def test_no_sentence_is_used_for_two_purposes_and_intents_are_balanced():
    splits = read_splits()
    assert set(splits) == {"train", "validation", "test", OUT_OF_SCOPE}
    texts = [row["text"] for rows in splits.values() for row in rows]
    assert len(set(texts)) == len(texts) == 800 and not set(texts) & set(SENTENCES)
    for name in ("train", "validation", "test"):
        labels = [row["label"] for row in splits[name]]
        assert len(set(labels)) == 20 and {labels.count(label) for label in labels} == {len(labels) // 20}


def test_a_refusal_is_told_with_its_reason():
    answer = {"label": "timer", "score": 0.4, "abstain": True, "reason": "too unsure"}
    assert line_of("why", answer).endswith("I don't know (timer?): too unsure")
    assert line_of("why", answer | {"abstain": False}).endswith("timer, 0.40")


@pytest.mark.slow
def test_the_demo_leaves_a_calibrated_model_a_report_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(Report, "plot", lambda *_: [])
    printed = io.StringIO()
    errors = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        assert main(["demo", "--fast", "--output", str(tmp_path / "out")]) == 0
    told = printed.getvalue()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").eval()
    assert model.is_calibrated and model.num_members == 3 and model.config.trunk_layers == 5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    for sentence, answer in zip(SENTENCES, model.predict(list(SENTENCES), tokenizer), strict=True):
        assert line_of(sentence, answer) in told
    assert Report.from_json(tmp_path / "out" / "report.json").models["Hydra"]["data"]["num_samples"] == 160
    assert Image.open(tmp_path / "out" / "decision.png").size == (1350, 510)
    assert told.index("3. Ask it") < told.index("4. Evaluate"), "the answers come first"
    assert "step 4 of 4, loss" in errors.getvalue(), "a log has a line for each epoch"
    assert "hydra-transformers app" in told and "hydra-transformers predict" in told
