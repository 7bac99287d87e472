"""Answers of models of several labels: pipelines, columns, a process without the package, ONNX."""

import json

import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer

from hydra_transformers.serving import HydraPredictor, predict_data
from hydra_transformers.uncertainty import decompose
from tests.fresh_process import run_without_package
from tests.serving.tiny import text_hydra
from tests.tiny_data import WORDS, names_of, save_bert


FEELINGS = ["anger", "joy", "surprise"]
TEXTS = ["a film of joy", "a bad film", "good", "a bad bad film of joy"]
PARTS = {"uncertainty": "total", "aleatoric": "aleatoric", "epistemic": "epistemic"}


@torch.no_grad()
def batch_for(hydra, tokenizer, count=60):
    """Texts with labels that are mostly the model's own."""
    generator = torch.Generator().manual_seed(0)
    words = [[WORDS[5:][place] for place in row] for row in torch.randint(6, (count, 5), generator=generator).tolist()]
    inputs = tokenizer([" ".join(each) for each in words], padding=True, return_tensors="pt")
    logits = hydra(**inputs).logits
    flipped = torch.rand(logits.shape, generator=generator) < 0.1
    return {**inputs, "labels": ((logits > logits.mean(dim=0)) ^ flipped).float()}


def saved(folder, layers=2, **calibration):
    """A Hydra of several labels with its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(save_bert(folder))
    settings = {"problem_type": "multi_label_classification", "num_hidden_layers": layers, **names_of(FEELINGS)}
    hydra = text_hydra(**settings)
    if calibration:
        hydra.calibrate([batch_for(hydra, tokenizer)], **calibration)
    hydra.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return hydra, tokenizer


@torch.no_grad()
def outputs_of(hydra, tokenizer):
    return hydra(**tokenizer(TEXTS, padding=True, return_tensors="pt"))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A folder, and the calibrated Hydra and tokenizer in it."""
    folder = tmp_path_factory.mktemp("labels")
    return folder, *saved(folder, layers=1, alpha=0.3, target={"coverage": 0.5})


def test_answers_name_the_labels_and_how_unsure_each_is(calibrated):
    _, hydra, tokenizer = calibrated
    outputs = outputs_of(hydra, tokenizer)
    settings = hydra.config.decision
    parts = decompose(outputs.member_logits, "multi_label_classification")
    yes = outputs.logits.double() >= torch.tensor(settings["log_odds"], dtype=torch.float64)
    for row, answer in enumerate(hydra.predict(TEXTS, tokenizer, top_k=None)):
        assert set(answer["labels"]) == {FEELINGS[place] for place in range(3) if yes[row, place]}
        assert set(answer["prediction_set"]) == {FEELINGS[at] for at in range(3) if outputs.prediction_set[row, at]}
        assert set(answer["labels"]) <= set(answer["prediction_set"])
        assert answer["abstain"] == outputs.abstain[row].item() and answer["detector"] == "entropy"
        for each in answer["scores"]:
            place = FEELINGS.index(each["label"])
            assert each["score"] == pytest.approx(outputs.logits[row, place].sigmoid().item(), abs=1e-5)
            for name, part in PARTS.items():
                assert each[name] == pytest.approx(getattr(parts, part)[row, place].item(), abs=1e-5)
        assert answer["uncertainty"] == pytest.approx(sum(each["uncertainty"] for each in answer["scores"]), abs=1e-9)


def test_without_calibration_labels_are_those_of_at_least_one_half(tmp_path):
    hydra, tokenizer = saved(tmp_path)
    [answer] = hydra.predict(TEXTS[:1], tokenizer)
    assert answer["labels"] == [each["label"] for each in answer["scores"] if each["score"] >= 0.5]
    assert answer["abstain"] is None and answer["prediction_set"] is None


def test_a_table_names_all_labels_however_many_scores_it_holds(calibrated, tmp_path):
    model = calibrated[0]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    expected = HydraPredictor(model, device="cpu", top_k=None)({"text": TEXTS})
    predict_data(model, tmp_path / "texts.jsonl", tmp_path / "a.parquet", top_k=1, device="cpu")
    for place, row in enumerate(pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()):
        labels = expected["labels"][place]
        assert row["answer"] == (None if expected["abstain"][place] else ", ".join(labels) or "no label")
        assert row["labels"] == labels and row["why"] == expected["reason"][place]
        assert [each["label"] for each in row["scores"]] == [expected["scores"][place][0]["label"]]
        assert row["scores"][0].keys() == {"label", "score", *PARTS}


@pytest.mark.slow
def test_a_process_without_the_package_decides_alike(calibrated, tmp_path):
    folder, hydra, tokenizer = calibrated
    outputs = outputs_of(hydra, tokenizer)
    program = """
import sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
folder, texts = sys.argv[1], sys.argv[2:]
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    # The tokenizer is plain; left out, Transformers would ask whether to trust the model's config.
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    outputs = model(**tokenizer(texts, padding=True, return_tensors="pt"))
answers = pipeline("hydra-text-classification", folder, trust_remote_code=True)(texts)
print([outputs.prediction_set.tolist(), outputs.abstain.tolist(), [sorted(each["labels"]) for each in answers]])
"""
    result = run_without_package(program, folder, *TEXTS, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    labels = [sorted(answer["labels"]) for answer in hydra.predict(TEXTS, tokenizer)]
    expected = [outputs.prediction_set.tolist(), outputs.abstain.tolist(), labels]
    assert result.stdout.strip().splitlines()[-1] == str(expected)


@pytest.mark.slow
def test_an_exported_model_decides_alike(calibrated, tmp_path):
    from hydra_transformers.exporting import FILES, RUNNERS, export

    _, hydra, tokenizer = calibrated
    run = RUNNERS["torch"](export(hydra, tmp_path / "exported", "torch", processor=tokenizer) / FILES["torch"])
    found = run(dict(tokenizer(TEXTS, padding=True, return_tensors="pt")))
    outputs = outputs_of(hydra, tokenizer)
    for name in ("prediction_set", "abstain"):
        assert torch.equal(found[name], outputs[name]), name
