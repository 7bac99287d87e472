"""Several stages in a row: models, functions and a person, with one promise, in Python, by command and over HTTP."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hydra_transformers import load_data
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.cli import main
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.serving import Cascade, HydraPredictor, create_app, predict_data
from hydra_transformers.serving.cascade_stages import stage_of
from hydra_transformers.uncertainty import CalibratedClassifier, calibrate
from tests.serving.stages import hard_pictures, hard_rows, save_stages
from tests.serving.tiny import base64_of
from tests.tiny_data import CLASSES, SIZES


TARGET = {"risk": 0.25}
ROWS = hard_rows(400, seed=2)
PICTURES, _ = hard_pictures(30, seed=3)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The folders of two models; nobody writes into them."""
    return save_stages(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def cascade(stages, tmp_path_factory):
    """Both, and a person, calibrated and saved."""
    cascade = Cascade([*stages, "person"], device="cpu")
    cascade.calibrate(ROWS, TARGET)
    cascade.save(tmp_path_factory.mktemp("cascade"))
    return cascade


def texts(count: int, seed: int = 0) -> pandas.DataFrame:
    """Numbers in words; a text with a higher number is harder."""
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 100, count)
    labels = np.array(["even", "odd"])[random.integers(0, 2, count)]
    return pandas.DataFrame(
        {"text": [f"{label} {number}" for label, number in zip(labels, numbers, strict=True)], "label": labels}
    )


def answer_in(text: str, hardest: int) -> tuple[str, float]:
    """What a function answers: the label in a text, and another one with a number above the hardest."""
    label, number = text.split()
    is_wrong = int(number) > hardest
    return {"even": "odd", "odd": "even"}[label] if is_wrong else label, 1 - int(number) / 100


def weak(values: list[str]) -> list[tuple[str, float]]:
    return [answer_in(value, 60) for value in values]


def strong(values: list[str]) -> list[tuple[str, float]]:
    return [answer_in(value, 90) for value in values]


# Functions, and a person


def test_functions_pass_rows_on_to_a_person():
    cascade = Cascade([weak, strong, "person"])
    calibration = cascade.calibrate(texts(600), {"risk": 0.05})
    first, second = calibration.fit.thresholds
    assert 0.4 < first < 0.7 and 0.8 < second < 0.99
    easy, middle, hard = cascade.predict(["even 10", "odd 80", "odd 99"])
    assert easy == {"label": "even", "confidence": 0.9, "abstain": False, "stage": "weak", "reason": None}
    assert middle["stage"] == "strong" and middle["label"] == "odd" and not middle["abstain"]
    assert hard["stage"] == "person" and hard["abstain"] and "strong: its score is 0.99, above" in hard["reason"]
    assert Cascade([weak, strong]).names == ["weak", "strong"]
    text = str(calibration)
    assert "A person gets" in text and "not part of the promise" in text
    assert (
        calibration.fit.work == calibration.fit.stages[1].reached
        and f"takes {calibration.fit.work:.3g} calls." in text
    )
    assert "With 90 % confidence at most 5 % of all final answers are wrong" in text
    assert set(calibration.alone) == {"weak", "strong"} and calibration.alone["strong"] > calibration.alone["weak"]


def test_prices_stand_in_place_of_calls():
    cascade = Cascade([weak, strong, "person"], prices=[0.001, 0.02, 1.0])
    fit = cascade.calibrate(texts(600), {"risk": 0.05}).fit
    expected = fit.stages[0].reached * 0.001 + fit.stages[1].reached * 0.02 + (1 - fit.answered) * 1.0
    assert fit.work == pytest.approx(expected)
    assert "It takes a price of 0.001 per row." in cascade.sentences[1]
    with pytest.raises(ValueError, match=r"prices is \[1\]: pass a number of 0 or more for each of the 3 stages"):
        Cascade([weak, strong, "person"], prices=[1])


def test_tied_scores_are_all_answered_or_none():
    def in_steps(values):
        return [(label, round(confidence * 4) / 4) for label, confidence in weak(values)]

    cascade = Cascade([in_steps, strong])
    fit = cascade.calibrate(texts(600), {"risk": 0.1}).fit
    assert fit.thresholds[0] in (-math.inf, 0.125, 0.375, 0.625, 0.875, math.inf)
    values = texts(300, seed=5)["text"].tolist()
    answered = {confidence: set() for _, confidence in in_steps(values)}
    for (_, confidence), answer in zip(in_steps(values), cascade.predict(values), strict=True):
        answered[confidence].add(answer["stage"] == "in_steps")
    assert all(len(kinds) == 1 for kinds in answered.values())


def test_the_promise_holds_on_new_rows():
    broken = 0
    for seed in range(20):
        cascade = Cascade([weak, strong])
        cascade.calibrate(texts(200, seed=seed), {"risk": 0.1}, seed=seed)
        new = texts(2000, seed=100 + seed)
        answers = [(answer, label) for answer, label in zip(cascade.predict(new), new["label"], strict=True)]
        wrong = [answer["label"] != label for answer, label in answers if not answer["abstain"]]
        broken += np.mean(wrong) > 0.1
    assert broken <= 5


def test_what_a_function_has_no_answer_to_is_passed_on():
    def moody(values):
        if "odd 7" in values:
            raise TimeoutError("too slow")
        return [None if value.endswith("3") else answer_in(value, 100) for value in values]

    cascade = Cascade([moody, strong])
    cascade.calibrate(texts(400), {"risk": 0.1})
    good, slow, none = cascade.predict(["even 1", "odd 7", "even 3"])
    assert [good["stage"], slow["stage"], none["stage"]] == ["moody", "strong", "strong"]
    assert cascade.sentences[0].startswith("moody has no answer to ") and "of 400 rows" in cascade.sentences[0]
    cascade = Cascade([moody, lambda values: [("even", math.nan) for _ in values]])
    cascade.calibrate(texts(400), {"risk": 0.1})
    [answer] = cascade.predict(["odd 7"])  # the second stage, which answers nothing, is not asked
    assert answer == {"error": "No stage is sure enough (moody: it failed (too slow))"}


@pytest.mark.parametrize(
    ("function", "error", "sentence"),
    [
        (lambda values: [], ValueError, "<lambda> gave 0 answers to 1 rows: return a .label, confidence. for each"),
        (lambda values: ["yes" for _ in values], ValueError, "gave 'yes': return .label, confidence."),
    ],
    ids=["too few", "no pair"],
)
def test_a_function_that_answers_otherwise_raises(function, error, sentence):
    cascade = Cascade([weak, function])
    with pytest.raises(error, match=sentence):
        cascade._ask(cascade.stages[1], ["even 1"])


# Models


def test_models_are_scored_by_their_detector_or_their_probability(stages, tmp_path):
    small, large = stages
    hydra = ViTForImageClassification.from_pretrained(small)
    processor = ViTImageProcessorPil.from_pretrained(small)
    calibrated = calibrate(hydra, load_data(ROWS, processor), target={"coverage": 0.5}, detector="entropy").model
    cascade = Cascade([HydraPredictor(calibrated, processor, "cpu", name="first"), large], device="cpu")
    assert cascade.names == ["first", "large"]
    plain = Image.new("RGB", (8, 8))
    found = cascade.stages[0].answers([*PICTURES, plain])
    expected = HydraPredictor(calibrated, processor, "cpu").answers([*PICTURES, plain])
    assert [answer.score for answer in found[:-1]] == [answer["detector_score"] for answer in expected[:-1]]
    assert {answer["abstain"] for answer in expected[:-1]} == {True, False}  # its own threshold is not changed
    assert found[-1].score == math.inf and found[-1].problem == "The image has one colour only."
    for answer, prediction in zip(
        cascade.stages[1].answers(PICTURES), HydraPredictor(large, device="cpu").answers(PICTURES), strict=True
    ):
        assert answer.score == 1 - prediction["score"] and answer.label == prediction["label"]
    with pytest.raises(ValueError, match="stage first is a model in memory: save it"):
        cascade.calibrate(ROWS, TARGET)
        cascade.save(tmp_path)


def test_a_calibrated_hydra_keeps_its_own_decision(folders, stages):
    predictor = HydraPredictor(folders["images"], device="cpu")
    before = predictor.answers(PICTURES)
    cascade = Cascade([predictor, stages[1]], device="cpu")
    found = cascade.stages[0].answers(PICTURES)
    assert [answer.score for answer in found] == [answer["detector_score"] for answer in before]
    assert predictor.answers(PICTURES) == before and {answer["abstain"] for answer in before} == {True, False}


def test_each_row_is_answered_by_the_first_stage_that_is_sure(cascade):
    fit = cascade.fit
    by_stage = [stage.answers(PICTURES) for stage in cascade.stages]
    for row, answer in enumerate(cascade.predict(PICTURES)):
        sure = [
            stage for stage, threshold in zip(by_stage, fit.thresholds, strict=True) if stage[row].score <= threshold
        ]
        assert answer["abstain"] == (not sure)
        assert answer["label"] == (sure or by_stage)[0 if sure else -1][row].label
        assert answer["stage"] == (cascade.names[by_stage.index(sure[0])] if sure else "person")
    assert {answer["stage"] for answer in cascade.predict(PICTURES)} == {"small", "large", "person"}


def test_work_is_that_of_the_stages_that_are_asked(cascade, stages):
    each = count_multiply_adds(ViTForImageClassification.from_pretrained(stages[0]))
    assert [stage.work for stage in cascade.fit.stages] == [each, pytest.approx(cascade.fit.stages[1].reached * each)]
    assert 0 < cascade.fit.stages[1].reached < 1 and cascade.fit.work < 2 * each
    assert any("multiply-adds per row" in sentence for sentence in cascade.sentences)


def test_work_is_counted_at_the_size_that_the_processor_hands_over():
    config = Dinov2Config(image_size=32, patch_size=4, num_labels=3, **SIZES)
    model = Dinov2ForImageClassification(config)
    works = []
    for size in (8, 16):
        processor = ViTImageProcessorPil(size={"height": size, "width": size})
        works.append(stage_of((model, processor), device="cpu").work())
    assert works[0] < works[1] < count_multiply_adds(model)
    ensemble = DeepEnsemble([model, Dinov2ForImageClassification(config)])
    assert stage_of((ensemble, processor), device="cpu").work() == count_multiply_adds(ensemble)


def test_a_function_gets_images_that_the_model_reads(stages, tmp_path):
    seen = []

    def ask(values):
        seen.extend(values)
        return [("red", 0.5) for _ in values]

    cascade = Cascade([stages[0], ask], device="cpu")
    cascade.calibrate(ROWS.select(range(100)), {"risk": 0.9})
    assert len(seen) == 100 and {type(value).__name__ for value in seen} == {"Image"}
    PICTURES[0].save(tmp_path / "one.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    found = cascade.predict([str(tmp_path / "one.png"), str(tmp_path / "broken.png")])
    assert found[0]["label"] in CLASSES and "it cannot be read" in found[1]["error"]


# Files


def test_saved_and_loaded_it_predicts_the_same(cascade, stages):
    expected = cascade.predict(PICTURES)
    file = cascade._loading["file"]
    content = json.loads(Path(file).read_text())
    assert [stage["name"] for stage in content["stages"]] == ["small", "large", "person"]
    assert content["stages"][0]["source"].endswith("/small") and content["stages"][0]["source"].startswith("..")
    assert content["sentences"] == cascade.sentences and content["fit"]["risk"] == 0.25
    loaded = Cascade.load(file, device="cpu")
    assert loaded.predict(PICTURES) == expected and loaded.fit == cascade.fit
    again = pickle.loads(pickle.dumps(loaded))
    assert again.predict(PICTURES) == expected
    rows = [{"image": image, "label": 0} for image in PICTURES]
    assert loaded.predict(rows) == expected
    with pytest.raises(TypeError, match="holds models in memory: save it first"):
        pickle.dumps(Cascade(stages, device="cpu"))


def test_functions_are_passed_when_it_is_loaded(tmp_path):
    cascade = Cascade([weak, strong])
    cascade.calibrate(texts(300), {"risk": 0.1})
    cascade.save(tmp_path)
    content = json.loads((tmp_path / "cascade.json").read_text())
    assert content["stages"][0]["source"].endswith("test_cascade:weak")
    with pytest.raises(ValueError, match=r"as stage weak: pass functions=\{'weak': ...\}"):
        Cascade.load(tmp_path, {"strong": strong})
    loaded = Cascade.load(tmp_path, {"weak": weak, "strong": strong})
    values = texts(20, seed=9)["text"].tolist()
    assert loaded.predict(values) == cascade.predict(values)


def test_a_changed_model_is_refused(stages, tmp_path):
    copied = tmp_path / "copied"
    model = ViTForImageClassification.from_pretrained(stages[0])
    processor = ViTImageProcessorPil.from_pretrained(stages[0])
    model.save_pretrained(copied)
    processor.save_pretrained(copied)
    cascade = Cascade([copied, stages[1]], device="cpu")
    cascade.calibrate(ROWS, TARGET)
    cascade.save(copied)
    assert json.loads((copied / "cascade.json").read_text())["stages"][0]["source"] == "."
    assert Cascade.load(copied, device="cpu").predict(PICTURES) == cascade.predict(PICTURES)
    with torch.no_grad():
        model.classifier.bias += 0.01
    model.save_pretrained(copied)
    with pytest.raises(ValueError, match="copied is not the model that was calibrated as stage copied"):
        Cascade.load(copied, device="cpu")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: [],
        lambda content: content | {"version": 9},
        lambda content: content | {"stages": content["stages"][:1]},
        lambda content: content | {"stages": content["stages"] * 3},
        lambda content: content | {"fit": content["fit"] | {"thresholds": ["inf", "much"]}},
        lambda content: content | {"fit": {}},
        lambda content: content | {"fit": content["fit"] | {"thresholds": [0.9, 0.9]}},
        lambda content: content | {"fit": content["fit"] | {"risk": 0.01}},
        lambda content: content | {"columns": None},
        lambda content: content | {"stages": [{"kind": "folder"}, *content["stages"][1:]]},
        lambda content: {name: value for name, value in content.items() if name != "sentences"},
    ],
)
def test_a_damaged_file_is_refused(cascade, tmp_path, change):
    content = json.loads(Path(cascade._loading["file"]).read_text())
    (tmp_path / "cascade.json").write_text(json.dumps(change(content)))
    with pytest.raises(
        ValueError, match=r"cascade\.json is not a whole cascade .*: calibrate the stages together again"
    ):
        Cascade.load(tmp_path)
    (tmp_path / "cascade.json").write_text("{")
    with pytest.raises(ValueError, match="is not a whole cascade"):
        Cascade.load(tmp_path)


# Commands, jobs and servers


def test_python_the_command_and_the_server_say_the_same(stages, tmp_path, capsys):
    small, large = map(str, stages)
    ROWS.save_to_disk(tmp_path / "rows")
    output = str(tmp_path / "both")
    words = [
        "calibrate",
        small,
        "--then",
        large,
        "--then",
        "person",
        "--data",
        str(tmp_path / "rows"),
        "--risk",
        "0.25",
    ]
    assert main([*words, "--output", output]) == 0
    printed = capsys.readouterr().out
    assert "With 90 % confidence at most 25 % of all final answers are wrong" in printed
    assert f"predict {output} --then {large} --then person" in printed

    # In Python.
    cascade = Cascade.load(output, device="cpu")
    assert cascade.names == ["small", "large", "person"]
    expected = cascade.predict(PICTURES)
    in_memory = Cascade([*stages, "person"], device="cpu")
    in_memory.calibrate(load_data(tmp_path / "rows", small), TARGET)
    assert in_memory.predict(PICTURES) == expected

    # The command, for a data set and for files.
    rows = tmp_path / "pictures"
    rows.mkdir()
    for number, image in enumerate(PICTURES):
        image.save(rows / f"{number:02d}.png")
    then = ["--then", large, "--then", "person"]
    assert main(["predict", output, str(rows), *then, "--output", str(tmp_path / "out.csv")]) == 0
    table = pandas.read_csv(tmp_path / "out.csv")
    assert table["stage"].tolist() == [answer["stage"] for answer in expected]
    assert table["prediction"].tolist() == [answer["label"] for answer in expected]
    assert table["answer"].isna().tolist() == [answer["abstain"] for answer in expected]
    assert np.allclose(table["confidence"], [answer["confidence"] for answer in expected])
    capsys.readouterr()
    assert main(["predict", output, str(rows / "00.png"), *then, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stage"] == expected[0]["stage"]
    assert main(["predict", output, str(rows / "00.png"), *then]) == 0
    assert expected[0]["stage"] in capsys.readouterr().out

    # The server.
    with TestClient(create_app(cascade, max_batch=40)) as client:
        answers = client.post("/predict", json={"inputs": [base64_of(image) for image in PICTURES]}).json()
        refused = client.post("/predict", json={"inputs": base64_of(PICTURES[0]), "parameters": {"top_k": 3}})
    for answer, prediction in zip(answers, expected, strict=True):
        assert answer | {"confidence": 0} == prediction | {"confidence": 0}
        assert answer["confidence"] == pytest.approx(prediction["confidence"])
    assert refused.status_code == 422 and "a cascade has none" in refused.json()["error"]


@pytest.fixture
def saved(cascade, stages, tmp_path):
    """The first model with the file of the cascade beside it, as the command writes it."""
    folder = tmp_path / "both"
    ViTForImageClassification.from_pretrained(stages[0]).save_pretrained(folder)
    ViTImageProcessorPil.from_pretrained(stages[0]).save_pretrained(folder)
    content = json.loads(Path(cascade._loading["file"]).read_text())
    content["stages"][0]["source"] = "."
    content["stages"][1]["source"] = str(stages[1])
    (folder / "cascade.json").write_text(json.dumps(content))
    return folder


def test_other_stages_and_none_get_a_sentence(saved, stages, capsys):
    small, large = map(str, stages)

    def said(*words) -> str:
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    PICTURES[0].save(saved.parent / "one.png")
    photo = saved.parent / "one.png"
    assert main(["predict", str(saved), str(photo), "--then", large, "--then", "person"]) == 0
    together = "was calibrated together with large, person: pass these, each as --then"
    assert together in said("predict", saved, photo) and together in said("serve", saved)
    assert "not then" in said("predict", saved, photo, "--then", large)
    assert "is not the model that was calibrated as stage large" in said(
        "predict", saved, photo, "--then", small, "--then", "person"
    )
    assert "calibrate the two together: hydra-transformers calibrate" in said("predict", small, photo, "--then", large)
    assert "--add is for one model" in said(
        "calibrate", saved, "--add", photo, "--risk", 0.1, "--output", saved.parent / "out"
    )


def test_what_a_cascade_cannot_do_is_told(cascade, stages, tmp_path):
    data = [{"image": image} for image in PICTURES]
    with pytest.raises(ValueError, match="monitor is for one model, and this is a cascade"):
        predict_data(cascade, data, tmp_path / "out.csv", monitor=tmp_path / "monitor.json")
    with pytest.raises(ValueError, match="audit is for one model"):
        predict_data(cascade, data, tmp_path / "out.csv", audit=0.1)
    with pytest.raises(ValueError, match="top_k is for one model"):
        predict_data(cascade, data, tmp_path / "out.csv", top_k=3)
    with pytest.raises(ValueError, match="monitor is for one model"):
        create_app(cascade, monitor=tmp_path / "monitor.json")
    with pytest.raises(ValueError, match="a cascade promises a risk"):
        Cascade(stages, device="cpu").calibrate(ROWS, {"coverage": 0.9})
    with pytest.raises(ValueError, match="risk is 5: pass a share"):
        Cascade(stages, device="cpu").calibrate(ROWS, {"risk": 5})
    with pytest.raises(ValueError, match="no thresholds yet"):
        Cascade(stages, device="cpu").predict(PICTURES)
    with pytest.raises(ValueError, match=r"cannot be guaranteed .* the lowest that can be is [0-9]+ %"):
        Cascade(stages, device="cpu").calibrate(ROWS, {"risk": 0.01})


def test_stages_that_do_not_fit_are_refused(folders, stages, tmp_path):
    small, large = stages
    with pytest.raises(ValueError, match="pass a list of two or more"):
        Cascade([small])
    with pytest.raises(ValueError, match="'person' before others"):
        Cascade(["person", small])
    with pytest.raises(ValueError, match="stages has 5 that answer"):
        Cascade([weak] * 5)
    assert Cascade([weak, weak, "person"]).names == ["weak", "weak 2", "person"]
    with pytest.raises(TypeError, match="a stage is a int"):
        Cascade([weak, 3])
    with pytest.raises(ValueError, match="reads texts, and small reads images"):
        Cascade([small, folders["texts"]], device="cpu")
    with pytest.raises(ValueError, match="has no classes of its own"):
        Cascade([folders["clip"], small], device="cpu")
    other = ViTForImageClassification.from_pretrained(small)
    other.config.id2label = {0: "cat", 1: "dog", 2: "bird"}
    with pytest.raises(ValueError, match=r"has other classes \(cat, dog, bird\) than small"):
        Cascade([small, (other, ViTImageProcessorPil.from_pretrained(small))], device="cpu")
    multi = ViTForImageClassification.from_pretrained(small, problem_type="multi_label_classification")
    with pytest.raises(ValueError, match="is for multi-label classification: a cascade is of single-label"):
        Cascade([(multi, ViTImageProcessorPil.from_pretrained(small)), large], device="cpu")


def test_stages_that_were_calibrated_by_class_are_refused(stages):
    model = ViTForImageClassification.from_pretrained(stages[1])
    processor = ViTImageProcessorPil.from_pretrained(stages[1])
    rows = [{**row, "site": "ab"[place % 2]} for place, row in enumerate(ROWS)]
    for options in ({"target": {"risk": {"red": 0.5, "*": 0.6}}}, {"target": {"risk": 0.6}, "by": "site"}):
        calibrated = calibrate(model, load_data(rows, processor), confidence=0.5, alpha=None, **options).model
        assert isinstance(calibrated, CalibratedClassifier)
        with pytest.raises(ValueError, match="was calibrated by class or group, and a cascade has one promise"):
            Cascade([(calibrated, processor), stages[1]], device="cpu")


def test_labels_are_compared_by_name(stages):
    names = [CLASSES[label] for label in ROWS["label"]]
    frame = pandas.DataFrame({"photo": list(ROWS["image"]), "colour": names})
    by_name = Cascade(stages, device="cpu").calibrate(frame, TARGET, column="photo", label="colour").fit
    assert by_name == Cascade(stages, device="cpu").calibrate(ROWS, TARGET).fit
