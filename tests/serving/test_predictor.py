"""The predictor: columns for batch engines, answers with members for the page."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.serving import HydraPredictor
from hydra_transformers.serving.answers import answer_text, arrow_schema, check_fields, prediction_text, to_table
from hydra_transformers.uncertainty import calibrate, predict_decisions
from tests.serving.tiny import asked
from tests.tiny_data import CLASSES, picture_rows, pictures


PICTURES = pictures([0, 1, 2, 1], seed=4)
TEXTS = ["a film of joy", "a bad film", "good"]
NUMBERS = ("score", "uncertainty", "aleatoric", "epistemic", "detector_score")


@pytest.fixture(scope="module")
def images(folders) -> HydraPredictor:
    return HydraPredictor(folders["images"], device="cpu", batch_size=3)


# Columns


def assert_columns(found: dict, expected: list[dict]) -> None:
    assert set(found) == {*expected[0], "error"}
    assert found.pop("error") == [None] * len(expected)
    for name, column in found.items():
        for value, answer in zip(column, expected, strict=True):
            if name in NUMBERS:
                assert value == pytest.approx(answer[name], abs=1e-6)
            elif name not in ("scores", "reason"):
                assert value == answer[name]


def test_columns_are_the_fields_of_predicts_answers(folders, images):
    expected = predict_decisions(images.model, PICTURES, images.processor)
    assert_columns(images({"image": PICTURES, "other": [1, 2, 3, 4]}), expected)
    assert {answer["abstain"] for answer in expected} == {True, False}
    texts = HydraPredictor(folders["texts"], device="cpu")
    rows = ["a good film", "", "bad " * 300]
    assert_columns(texts({"text": rows}), predict_decisions(texts.model, rows, texts.processor))
    pairs = [{"text": "a film", "text_pair": "of joy"}, {"text": "bad", "text_pair": "good"}]
    columns = {name: [pair[name] for pair in pairs] for name in ("text", "text_pair")}
    expected = predict_decisions(texts.model, pairs, texts.processor)
    assert_columns(texts(columns), expected)
    named = HydraPredictor(texts.model, texts.processor, column=("premise", "hypothesis"))
    assert_columns(named({"premise": columns["text"], "hypothesis": columns["text_pair"]}), expected)


def test_an_image_may_be_of_pil_an_array_bytes_or_a_path(images, tmp_path):
    image = PICTURES[0]
    image.save(tmp_path / "0.png")
    content = (tmp_path / "0.png").read_bytes()
    forms = [image, np.asarray(image), content, tmp_path / "0.png", str(tmp_path / "0.png")]
    forms += [{"bytes": content, "path": None}, {"bytes": None, "path": str(tmp_path / "0.png")}]
    found = images({"image": forms})
    assert len(set(found["label"])) == 1 and np.ptp(found["score"]) < 1e-6
    # An array of columns, as Ray passes images of one size.
    stacked = images({"image": np.stack([np.asarray(each) for each in PICTURES])})
    assert stacked["label"] == images({"image": PICTURES})["label"]


def test_a_bad_row_is_named_in_a_column(folders, images, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    deep = np.zeros((8, 8, 3), dtype=np.float32)
    rows = [PICTURES[0], None, tmp_path / "broken.png", "nowhere.png", deep, Image.new("I;16", (8, 8)), PICTURES[1]]
    found = images({"image": rows})
    assert found["label"][0] and found["label"][6] and found["label"][1:6] == [None] * 5
    assert found["error"][0] is found["error"][6] is None and found["error"][3] == "there is no such file"
    assert "float32" in found["error"][4] and "I;16" in found["error"][5]
    assert ["error" in answer for answer in images.answers(rows)] == [False, *[True] * 5, False]
    texts = HydraPredictor(folders["texts"], device="cpu")
    rows = ["good", None, 3, ["a"], {"text": "a", "text_pair": None}]
    assert texts({"text": rows})["error"] == [None, "there is none", "it is a int", "it is a list", "there is none"]


def test_a_row_that_fails_in_the_model_does_not_fail_the_others(folders, monkeypatch):
    texts = HydraPredictor(folders["texts"], device="cpu")
    answer = texts.answer

    def fails(inputs, parameters):
        if "bad" in inputs:
            raise RuntimeError("no such\nword")
        return answer(inputs, parameters)

    monkeypatch.setattr(texts, "answer", fails)
    with pytest.raises(RuntimeError, match="no such"):  # all rows fail: the model is to blame
        texts({"text": ["bad", "bad"]})
    assert texts({"text": ["good", "bad", "film"]})["error"] == [None, "no such word", None]
    # Now it is known to answer: the rows are to blame, until it does not answer those of before, either.
    assert texts({"text": ["bad", "bad"]})["error"] == ["no such word"] * 2
    monkeypatch.setattr(texts, "answer", lambda inputs, parameters: {}["lost"])
    for rows in (["good", "film"], ["good"]):
        with pytest.raises(KeyError, match="lost"):
            texts({"text": rows})


def test_a_predictor_is_pickled_by_its_arguments(images):
    pickled = pickle.dumps(images)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert again({"image": PICTURES}) == images({"image": PICTURES}) and again.batch_size == 3
    with pytest.raises(TypeError, match="holds a model in memory: save it, and pass its folder"):
        pickle.dumps(HydraPredictor(images.model, images.processor))


def test_datasets_map_takes_a_predictor(images):
    """Also where a column is None in all of the first rows: the model abstains on none of them."""
    answered = images({"image": PICTURES})
    order = sorted(range(len(PICTURES)), key=lambda place: answered["abstain"][place])
    rows = datasets.Dataset.from_dict({"image": PICTURES}, features=datasets.Features({"image": datasets.Image()}))
    rows = rows.add_column("place", list(range(len(PICTURES)))).select(order)
    features = datasets.Features({**rows.features, **images.features})
    found = rows.map(images, batched=True, batch_size=1, features=features)
    assert found["place"] == order and found["reason"][0] is None and found["reason"][-1] is not None
    for name in ("label", "abstain", "prediction_set"):
        assert list(found[name]) == [answered[name][place] for place in order]


ENTITIES = [{"word": "Anna", "entity_group": "PER", "abstain": False}, {"word": "x", "entity_group": "LOC"}]


@pytest.mark.parametrize(
    ("answer", "prediction", "sure"),
    [
        ({"label": "cat", "abstain": None}, "cat", "cat"),
        ({"label": "cat", "abstain": True}, "cat", None),
        ({"label": "a", "labels": ["a", "b"], "abstain": False}, "a, b", "a, b"),
        ({"label": "a", "labels": [], "abstain": False}, "no label", "no label"),
        ({"label": "a", "labels": [], "abstain": True}, "no label", None),
        ({"interval": None, "scores": [{"label": "x", "score": 0.1}], "abstain": None}, "0.1", "0.1"),
        (
            {"interval": None, "scores": [{"label": n, "score": 2.0} for n in "xy"], "abstain": True},
            "x 2.0, y 2.0",
            None,
        ),
        ({"entities": [], "abstain": False}, "no entity", "no entity"),
        ({"entities": [], "abstain": True}, "no entity", None),  # the text is empty
        (
            {"entities": [ENTITIES[0], ENTITIES[1] | {"abstain": True}], "abstain": True},
            "Anna (PER), x (LOC)",
            "Anna (PER)",
        ),
        ({"entities": [ENTITIES[1] | {"abstain": True}], "abstain": True}, "x (LOC)", None),
    ],
)
def test_an_answer_is_the_prediction_unless_the_model_abstains(answer, prediction, sure):
    answer = {"reason": None, "scores": [], **answer}
    assert (prediction_text(answer), answer_text(answer)) == (prediction, sure)


def test_a_table_holds_every_column_and_no_field_is_lost(folders):
    for kind, columns in (
        ("images", {"image": PICTURES}),
        ("single", {"image": PICTURES}),
        ("texts", {"text": ["a"]}),
    ):
        predictor = HydraPredictor(folders[kind], device="cpu")
        table = to_table(predictor.answers([*next(iter(columns.values())), None]), predictor.columns)
        assert table.column_names[:3] == ["answer", "prediction", "why"] and "label" not in table.column_names
        assert table["why"][-1].as_py() == "It cannot be read: there is none." and not table["prediction"][-1].is_valid
        assert arrow_schema(predictor.columns).names == list(predictor.columns)
    with pytest.raises(ValueError, match="the field 'mood', which is not among the columns of their task"):
        check_fields([{"mood": 1}], {"label": "string"})


def test_clip_needs_its_classes(folders, images):
    with pytest.raises(ValueError, match="candidate_labels is missing: clip-hydra chooses among classes"):
        asked(folders["clip"])({"image": PICTURES})
    with pytest.raises(ValueError, match="clip-hydra chooses among classes"):
        asked(folders["clip"]).answer_with_members(PICTURES[0])
    clip = HydraPredictor(folders["clip"], device="cpu", candidate_labels=["cat", "dog"])
    assert set(clip({"image": PICTURES})["label"]) <= {"cat", "dog"}
    with pytest.raises(ValueError, match="candidate_labels is for CLIP and SigLIP, tiny-hydra has its own"):
        HydraPredictor(folders["images"], device="cpu", candidate_labels=["cat"])
    with pytest.raises(ValueError, match="the batch has no column 'image', it has photo: name it as column="):
        images({"photo": PICTURES})


# Answers with members


def assert_says(answer: dict, expected: dict) -> None:
    """expected: what `predict_decisions` says with all scores"""
    assert answer.keys() == expected.keys() | {"members"}
    assert all(answer[name] == expected[name] for name in expected if name != "scores")
    found = {each["label"]: each["score"] for each in answer["scores"]}
    assert found == pytest.approx({each["label"]: each["score"] for each in expected["scores"]}, abs=1e-6)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    mean = torch.tensor(answer["members"], dtype=torch.float64).mean(dim=0)
    assert mean.tolist() == pytest.approx(list(found.values()), abs=1e-12)


def test_it_says_what_predict_says_with_each_members_probabilities(folders, images):
    expected = predict_decisions(images.model, PICTURES, images.processor, top_k=None)
    answers = [images.answer_with_members(image) for image in PICTURES]
    for answer, each in zip(answers, expected, strict=True):
        assert_says(answer, each)
    assert {answer["abstain"] for answer in answers} == {True, False}
    pixel_values = images.processor(PICTURES[0], return_tensors="pt").pixel_values
    with torch.no_grad():
        members = images.model(pixel_values).member_logits[0].double().softmax(-1)
    order = [CLASSES.index(each["label"]) for each in answers[0]["scores"]]
    assert torch.allclose(torch.tensor(answers[0]["members"], dtype=torch.float64), members[:, order], atol=1e-6)


def test_texts_a_plain_model_and_a_baseline_are_asked_alike(folders):
    texts = asked(folders["texts"])
    single = asked(folders["single"])
    for text, expected in zip(TEXTS, predict_decisions(texts.model, TEXTS, texts.processor, top_k=None), strict=True):
        assert_says(texts.answer_with_members(text), expected)
    answer = single.answer_with_members(PICTURES[1])
    assert_says(answer, predict_decisions(single.model, PICTURES[1:2], single.processor, top_k=None)[0])
    assert len(answer["members"]) == 1 and answer["epistemic"] == 0 and answer["abstain"] is None
    assert (texts.reads, single.reads) == ("texts", "images")
    ensemble = HydraPredictor(DeepEnsemble([single.model, single.model]), single.processor, name="ensemble")
    assert len(ensemble.answer_with_members(PICTURES[1])["members"]) == 2


def test_a_calibrated_clip_keeps_its_classes(folders):
    clip = asked(folders["clip"])
    image = PICTURES[1]
    prompts = clip.processor(text=[f"A photo of a {name}." for name in CLASSES], padding=True, return_tensors="pt")
    pixels = [clip.processor(images=row["image"], return_tensors="pt").pixel_values[0] for row in picture_rows(24)]
    rows = [{"pixel_values": each, "labels": row["label"]} for each, row in zip(pixels, picture_rows(24), strict=True)]
    classifier = ZeroShotClassifier(clip.model, prompts, CLASSES)
    decided = calibrate(classifier, rows, target={"coverage": 0.5}).model
    model = HydraPredictor(decided, clip.processor)
    assert not model.needs_classes and model.class_names == CLASSES and len(model.calibration["sentences"]) == 4
    assert_says(model.answer_with_members(image), predict_decisions(decided, [image], clip.processor, top_k=None)[0])


def test_users_at_once_get_their_own_answers(folders, images):
    """A tokenizer that pads and cuts fails, or mixes them up, where two threads use it."""
    for model, values in ((asked(folders["texts"]), TEXTS), (images, PICTURES[:3])):
        alone = [model.answer_with_members(value) for value in values]
        with ThreadPoolExecutor(4) as users:
            assert list(users.map(model.answer_with_members, values * 6)) == alone * 6
