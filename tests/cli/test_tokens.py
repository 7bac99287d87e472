"""Classifiers of tokens through every command: from words and tags in a file to entities with a promise."""

import json

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from hydra_transformers.hub import create_model_card
from hydra_transformers.serving.predictor import HydraPredictor
from tests import tiny_tags
from tests.command_line import run


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The folder after finetune, fuse and calibrate."""
    folder = tmp_path_factory.mktemp("tokens")
    tiny_tags.backbone(initializer_range=0.1).bert.save_pretrained(folder / "encoder")
    tiny_tags.tokenizer().save_pretrained(folder / "encoder")
    for name, count, seed in (("train", 160, 0), ("held-out", 300, 1), ("test", 60, 2)):
        lines = [json.dumps(row) for row in tiny_tags.rows(count, seed)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    train = ["finetune", folder / "encoder", "--data", folder / "train.jsonl", "--members", 2, "--max-steps", 60]
    run(*train, "--learning-rates", 3e-3, "--output", folder / "members")
    run("fuse", folder / "members", "--output", folder / "hydra")
    calibrate = ["calibrate", folder / "hydra", "--data", folder / "held-out.jsonl", "--split", "train", "--risk", 0.4]
    run(*calibrate, "--confidence", 0.9, "--device", "cpu", "--output", folder / "calibrated")
    return folder


@pytest.mark.slow
def test_the_calibrated_model_says_what_it_promises(steps, capsys):
    model = AutoModelForTokenClassification.from_pretrained(steps / "calibrated")
    assert model.num_members == 2 and model.config.id2label[0].startswith(("B-", "I-", "O"))
    assert "of the answered entities are wrong" in " ".join(model.config.decision["sentences"])
    run("evaluate", steps / "calibrated", "--data", steps / "test.jsonl", "--split", "train", "--device", "cpu")
    assert "Entity F1" in capsys.readouterr().out


@pytest.mark.slow
def test_predict_names_entities(steps, capsys):
    run("predict", steps / "calibrated", "annabelle smith went to paris .", "--device", "cpu")
    said = capsys.readouterr().out
    assert "annabelle smith (PER" in said or "annabelle (PER" in said
    run("predict", steps / "calibrated", "annabelle went to paris .", "--json", "--device", "cpu")
    answer = json.loads(capsys.readouterr().out)
    assert {each["word"] for each in answer["entities"]} <= {"annabelle", "went", "to", "paris", "."}
    output = steps / "answers.jsonl"
    run("predict", steps / "calibrated", steps / "test.jsonl", "--output", output, "--device", "cpu")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 60 and rows[0]["tokens"] == tiny_tags.rows(60, 2)[0]["tokens"]
    for row in rows:
        named = [each for each in row["entities"] if not each["abstain"]]
        assert (row["answer"] or "").count("(") == len(named) and row["prediction"].count("(") == len(row["entities"])


@pytest.mark.slow
def test_the_predictor_reads_columns_of_texts_and_of_words(steps):
    predictor = HydraPredictor(steps / "calibrated", device="cpu", strict=False)
    text = "annabelle went to paris ."
    columns = predictor({"text": [text, None]})
    assert columns["entities"][0] == predictor({"tokens": [text.split()]})["entities"][0]
    assert columns["error"][1] == "there is none" and predictor.about["kind"] == "tokens"


@pytest.mark.slow
def test_an_exported_model_marks_tokens(steps):
    onnxruntime = pytest.importorskip("onnxruntime")
    run("export", steps / "calibrated", "--to", "onnx", "--output", steps / "onnx")
    model = AutoModelForTokenClassification.from_pretrained(steps / "calibrated").eval()
    inputs = AutoTokenizer.from_pretrained(steps / "calibrated")(
        ["annabelle smith went", "paris"], padding=True, return_tensors="pt"
    )
    session = onnxruntime.InferenceSession(steps / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wanted = [each.name for each in session.get_inputs()]
    found = dict(zip(names, session.run(names, {name: inputs[name].numpy() for name in wanted}), strict=True))
    with torch.no_grad():
        expected = model(**inputs)
    torch.testing.assert_close(torch.as_tensor(found["logits"]), expected.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.as_tensor(found["abstain"]), expected.abstain)


@pytest.mark.slow
def test_the_card_has_a_snippet_that_runs(steps):
    model = AutoModelForTokenClassification.from_pretrained(steps / "calibrated")
    text = str(create_model_card(model, repo_id="me/tags"))
    assert "pipeline_tag: token-classification" in text and "AutoModelForTokenClassification" in text
    [code] = [part.partition("```")[0] for part in text.split("```python\n")[1:] if "outputs = model" in part][:1]
    exec(code.replace("me/tags", str(steps / "calibrated")), {})


@pytest.mark.slow
def test_a_search_goes_by_the_f1_of_entities(steps):
    search = [
        "--target",
        "balance",
        "--data",
        steps / "many.jsonl",
        "--max-steps",
        2,
        "--members",
        2,
        "--output",
        steps / "built",
    ]
    (steps / "many.jsonl").write_text("\n".join(json.dumps(row) for row in tiny_tags.rows(800, 3)))
    run("build", steps / "encoder", *search)
    [first, *_] = json.loads((steps / "built" / "candidates.json").read_text())["candidates"]
    assert first["measure"] == "entity F1" and 0 <= first["accuracy"] <= 1
