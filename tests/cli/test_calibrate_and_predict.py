"""`calibrate` and `predict` on the command line."""

import io
import json
import shutil

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CLIPProcessor,
    ViTImageProcessorPil,
)
from transformers.utils import logging

from hydra_transformers.cli import main
from hydra_transformers.data.prediction import ZeroShotClassifier
from hydra_transformers.models.auto import load_trained
from hydra_transformers.reports import Report
from hydra_transformers.uncertainty import CalibratedClassifier, predict_decisions
from tests.command_line import run
from tests.tiny_data import CLASSES, grey_rows, picture_rows, pictures, review_rows, save_bert, save_clip, save_vit


pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    save_vit(folder / "vit")
    save_bert(folder / "bert")
    save_clip(folder / "clip")
    picture_rows(60).save_to_disk(folder / "pictures")
    picture_rows(24, names=["blue", "red", "green"]).save_to_disk(folder / "fewer-pictures")
    grey_rows(20).save_to_disk(folder / "grey")
    grey_rows(10).save_to_disk(folder / "fewer-grey")
    data = ["--data", folder / "fewer-pictures", "--ood-data", folder / "fewer-grey"]
    run("prune", folder / "vit", *data, "--budget", 4, "--output", folder / "pruned")
    run("fuse", folder / "pruned", "--output", folder / "hydra")
    for number, image in enumerate(pictures([0, 1, 2], seed=4)):
        image.save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:60])
    return folder


@pytest.fixture(scope="module")
def calibrated(workplace):
    data = ["--data", workplace / "pictures", "--coverage", 0.5, "--alpha", 0.2]
    run("calibrate", workplace / "hydra", *data, "--output", workplace / "calibrated")
    return workplace / "calibrated"


# calibrate


def test_calibrate_writes_the_model_with_all_that_belongs_to_it(workplace, calibrated, tmp_path, capsys):
    names = {path.name for path in calibrated.iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "fuse.json", "circuits"} <= names
    assert {path.name for path in (workplace / "hydra").iterdir()} <= names
    model = AutoModelForImageClassification.from_pretrained(calibrated).eval()
    assert model.is_calibrated and model.config.decision["sets"]["method"] == "lac"
    assert load_trained(workplace / "hydra").config.decision is None  # the input stays as it was
    data = ["--data", workplace / "pictures", "--ood-data", workplace / "grey", "--tpr", 0.5]
    more = ["--detector", "mahalanobis", "--training-data", workplace / "pictures", "--sets", "none"]
    run("calibrate", workplace / "hydra", *data, *more, "--output", tmp_path / "other")
    told = capsys.readouterr().out
    decision = load_trained(tmp_path / "other").config.decision
    assert decision["detector"]["name"] == "mahalanobis" and decision["sets"] is None
    assert all(sentence in told for sentence in decision["sentences"]) and len(decision["sentences"]) == 3
    run("calibrate", calibrated, "--data", workplace / "pictures", "--output", tmp_path / "again")
    assert load_trained(tmp_path / "again").config.decision["threshold"] is None  # calibrated anew


@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_a_plain_classifier_is_saved_with_its_decision_beside_it(kind, workplace, tmp_path, capsys):
    if kind == "bert":
        review_rows(60).save_to_disk(tmp_path / "reviews")
    data = ["--data", workplace / "pictures" if kind == "vit" else tmp_path / "reviews", "--alpha", 0.2]
    rule = ["--coverage", 0.5, "--detector", "mahalanobis" if kind == "vit" else "gen"]
    order = ["--labels-in-order"] if kind == "bert" else []
    run("calibrate", workplace / kind, *data, *rule, *order, "--output", tmp_path / "decided")
    names = {path.name for path in (tmp_path / "decided").iterdir()}
    assert {path.name for path in (workplace / kind).iterdir()} | {"decision.safetensors"} == names
    assert load_trained(tmp_path / "decided").config.model_type == kind  # whoever knows nothing of it loads it as ever
    capsys.readouterr()
    inputs = [workplace / f"{number}.png" for number in range(3)] if kind == "vit" else ["a good film", "bad", "joy"]
    run("predict", tmp_path / "decided", *inputs, "--json")
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    model = CalibratedClassifier.load(load_trained(tmp_path / "decided"), tmp_path / "decided")
    processor = (ViTImageProcessorPil if kind == "vit" else AutoTokenizer).from_pretrained(workplace / kind)
    expected = predict_decisions(model, inputs, processor)
    assert [each["abstain"] for each in found] == [each["abstain"] for each in expected]
    assert None not in [each["abstain"] for each in found] and "not calibrated" not in captured.err
    assert [each["prediction_set"] for each in found] == [each["prediction_set"] for each in expected]
    run("evaluate", tmp_path / "decided", *data[:2], *order, "--output", tmp_path / "evaluation")
    result = Report.from_json(tmp_path / "evaluation" / "report.json").models["decided"]
    assert "answered" in result["data"] and "set_size" in result["data"]


@pytest.mark.parametrize("problem_type", [None, "regression", "multi_label_classification"])
def test_a_plain_model_that_chooses_no_class_is_asked_with_its_decision(problem_type, tmp_path, capsys):
    is_number = problem_type != "multi_label_classification"
    model = AutoModelForSequenceClassification.from_pretrained(
        save_bert(tmp_path / "bert"),
        num_labels=1 if is_number else 2,
        problem_type=problem_type,
        ignore_mismatched_sizes=True,
    )
    model.save_pretrained(tmp_path / "bert")
    texts = ["a good film", "a bad film", "of joy"] * 20
    labels = [0.1 * (row % 7) if is_number else [row % 2] for row in range(len(texts))]
    rows = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    run("calibrate", tmp_path / "bert", "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "decided")
    run("predict", tmp_path / "decided", tmp_path / "rows.jsonl", "--output", tmp_path / "answers.jsonl")
    [first, *others] = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert first["interval" if is_number else "prediction_set"] is not None and len(others) == 59
    assert "not calibrated" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "hydra-clip"])
def test_clip_is_calibrated_for_the_classes_of_the_data(kind, workplace, tmp_path, capsys):
    if kind == "hydra-clip" and not (workplace / kind).exists():
        run("fuse", workplace / "clip", workplace / "clip", "--allow-equal", "--output", workplace / kind)
    data = ["--data", workplace / "pictures"]
    run("calibrate", workplace / kind, *data, "--coverage", 0.5, "--sets", "aps", "--output", tmp_path / "decided")
    capsys.readouterr()
    paths = [workplace / f"{number}.png" for number in range(3)]
    run("predict", tmp_path / "decided", *paths, "--json")
    found = answers(capsys)
    run("predict", tmp_path / "decided", *paths, "--json", "--labels", *CLASSES)
    assert answers(capsys) == found and all(each["label"] in CLASSES for each in found)
    assert all(isinstance(each["abstain"], bool) and each["prediction_set"] for each in found)
    # as in Python, by the same prompts
    clip, processor = load_trained(tmp_path / "decided"), CLIPProcessor.from_pretrained(workplace / "clip")
    prompts = processor(text=[f"A photo of a {name}." for name in CLASSES], padding=True, return_tensors="pt")
    classifier = CalibratedClassifier.load(ZeroShotClassifier(clip, prompts, CLASSES), tmp_path / "decided")
    for one, other in zip(found, predict_decisions(classifier, paths, processor), strict=True):
        assert (one["label"], one["abstain"], one["prediction_set"]) == (
            other["label"],
            other["abstain"],
            other["prediction_set"],
        )
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)
    with pytest.raises(ValueError, match=r"the decision is about other classes \(red, green, blue\)"):
        CalibratedClassifier.load(clip, tmp_path / "decided")
    assert main(["predict", str(tmp_path / "decided"), str(paths[0]), "--labels", "red", "blue"]) == 2
    assert "was calibrated for red, green, blue: leave --labels out" in capsys.readouterr().err
    run("evaluate", tmp_path / "decided", *data, "--output", tmp_path / "evaluation")
    result = Report.from_json(tmp_path / "evaluation" / "report.json").models["decided"]
    assert 0 < result["data"]["answered"] < 1 and "set_size" in result["data"]
    other = ["--data", workplace / "fewer-pictures"]  # the same names in another order
    capsys.readouterr()
    run("evaluate", tmp_path / "decided", *other, "--output", tmp_path / "without")
    assert "is evaluated without its decision: the decision is about other classes (red, green, blue)" in (
        capsys.readouterr().err
    )
    result = Report.from_json(tmp_path / "without" / "report.json").models["decided"]
    assert not {"answered", "set_size"} & set(result["data"])
    if kind == "hydra-clip":
        assert main(["push", str(tmp_path / "decided"), "me/decided"]) == 2  # there is no Hub here
        assert "is published without its decision" in capsys.readouterr().err


def test_a_decision_beside_other_weights_is_told_and_left_out(workplace, tmp_path, capsys):
    data = ["--data", workplace / "pictures", "--coverage", 0.5]
    run("calibrate", workplace / "vit", *data, "--output", tmp_path / "decided")
    model = load_trained(tmp_path / "decided")
    with torch.no_grad():
        model.classifier.weight.add_(0.1)
    model.save_pretrained(tmp_path / "decided")
    logging.get_logger().warning_once.cache_clear()  # whatever was told before
    run("predict", tmp_path / "decided", workplace / "0.png", "--json")
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["abstain"] is None
    assert "the weights have changed since this model was calibrated" in captured.err


def test_a_calibration_that_fails_leaves_nothing(workplace, tmp_path, capsys):
    command = ["calibrate", workplace / "hydra", "--data", workplace / "pictures", "--limit", 10]
    assert main([*map(str, command), "--output", str(tmp_path / "out")]) == 2
    assert "data has 10 rows: pass at least 20" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


# predict


def answers(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_predict_prints_the_pipelines_answers(workplace, calibrated, capsys):
    paths = [workplace / f"{number}.png" for number in range(3)]
    capsys.readouterr()
    run("predict", calibrated, *paths, "--json", "--batch-size", 2, "--top-k", 1)
    found = answers(capsys)
    assert [each.pop("input") for each in found] == [str(path) for path in paths]
    expected = load_trained(calibrated).predict(paths, ViTImageProcessorPil.from_pretrained(calibrated), top_k=1)
    for one, other in zip(found, expected, strict=True):
        assert one["label"] == other["label"] and one["abstain"] is other["abstain"]
        assert one["prediction_set"] == other["prediction_set"] and len(one["scores"]) == 1
        assert all(one[name] == other[name] for name in ("detector", "threshold")) and (
            (one["reason"] is None) is not one["abstain"]
        )
        assert one["uncertainty"] == pytest.approx(other["uncertainty"], abs=1e-5)
    run("predict", calibrated, *paths)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["input", "answer", "score", "total", "epistemic", "may", "be", "why"] and len(rows) == 3
    for row, answer in zip(rows, expected, strict=True):
        chosen = ", ".join(answer["prediction_set"])
        assert (
            ("I don't know" in row) is answer["abstain"] and row.endswith(answer["reason"] or chosen) and chosen in row
        )
    assert any(answer["reason"] for answer in expected)


def test_texts_come_from_stdin_too(workplace, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a bad film\n\na film of joy\r\n"))
    run("predict", workplace / "bert", "good", "-", "--json")
    captured = capsys.readouterr()
    assert [json.loads(line)["input"] for line in captured.out.splitlines()] == ["good", "a bad film", "a film of joy"]
    assert captured.err.strip() == "note: this model was not calibrated, so it never abstains and has no sets"


def test_a_text_may_be_longer_than_the_name_of_a_file(workplace, capsys):
    capsys.readouterr()
    run("predict", workplace / "bert", "a good film " * 50, "--json")
    [answer] = answers(capsys)
    assert answer["truncated"] and answer["label"]


def test_clip_chooses_among_labels(workplace, capsys):
    run("predict", workplace / "clip", workplace / "0.png", "--labels", *CLASSES, "--json")
    [answer] = answers(capsys)
    assert answer["label"] in CLASSES and answer["abstain"] is None and answer["epistemic"] == 0


def test_a_broken_image_is_named_and_the_others_are_answered(workplace, calibrated, capsys):
    capsys.readouterr()
    Image.new("I;16", (8, 8), 300).save(workplace / "deep.png")  # of which PIL would make a white one
    names = ["0.png", "broken.png", "nowhere.png", "deep.png", "1.png"]
    assert main(["predict", str(calibrated), *(str(workplace / name) for name in names), "--json"]) == 2
    captured = capsys.readouterr()
    assert [json.loads(line)["input"][-5:] for line in captured.out.splitlines()] == ["0.png", "1.png"]
    first, second, third, last = captured.err.splitlines()
    assert third.startswith(f"{workplace / 'deep.png'} cannot be read as an image: it has the mode I;16")
    assert first.startswith(f"{workplace / 'broken.png'} cannot be read as an image: ")
    assert second == f"{workplace / 'nowhere.png'} cannot be read as an image: there is no such file"
    assert last == "hydra-transformers predict: 3 of 5 images could not be read, the others are answered"


def test_other_commands_take_a_calibrated_model(workplace, calibrated, tmp_path, capsys):
    data = ["--data", workplace / "pictures", "--far", f"grey={workplace / 'grey'}"]
    run("evaluate", calibrated, *data, "--output", tmp_path / "evaluation")
    result = Report.from_json(tmp_path / "evaluation" / "report.json").models["calibrated"]
    # At least half were answered of the rows that the threshold was fitted on, which are half of these.
    assert 0.25 <= result["data"]["answered"] < 1 and 0 <= result["grey (far)"]["refused"] <= 1
    assert result["data"]["set_coverage"] >= 0.7 and result["data"]["set_size"] >= 1
    told = (tmp_path / "evaluation" / "report.md").read_text()
    assert "threshold: grey refused" in told and "at the threshold, " in told and "## Prediction sets" in told
    run("info", calibrated)
    run("card", shutil.copytree(calibrated, tmp_path / "copy"))
    assert "### Decision" in (tmp_path / "copy" / "README.md").read_text()


# What goes wrong


def test_empty_stdin_is_told(workplace, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["predict", str(workplace / "bert"), "-"]) == 2
    assert "stdin has no lines: pass a text, or an image or audio file, on each" in capsys.readouterr().err


def not_a_number(name: str):
    raise AssertionError(f"{name} is no JSON")


def test_what_is_no_number_is_null(tmp_path, capsys):
    folder = save_bert(tmp_path)
    broken = load_trained(folder)
    with torch.no_grad():
        broken.classifier.bias.fill_(torch.nan)
    broken.save_pretrained(folder)
    capsys.readouterr()
    run("predict", folder, "a film", "joy", "--json", "--device", "cpu")
    lines = [json.loads(line, parse_constant=not_a_number) for line in capsys.readouterr().out.splitlines()]
    assert [line["input"] for line in lines] == ["a film", "joy"]
    assert {line["score"] for line in lines} == {None}
