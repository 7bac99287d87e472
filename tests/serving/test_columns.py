"""The predictor on columns: what batch engines call."""

import pickle

import datasets
import numpy as np
import pyarrow
import pytest
from PIL import Image

from hydra_transformers.serving import BadRow, HydraPredictor
from hydra_transformers.serving.answer_columns import arrow_schema, to_columns
from hydra_transformers.uncertainty import predict_decisions
from tests.serving.tiny import asked
from tests.tiny_data import pictures


PICTURES = pictures([0, 1, 2, 1], seed=4)


@pytest.fixture(scope="module")
def images(folders) -> HydraPredictor:
    return HydraPredictor(folders["images"], device="cpu", batch_size=3)


def assert_columns(found: dict, expected: list[dict]) -> None:
    assert list(found) == [*COLUMNS, *(["truncated"] if "truncated" in expected[0] else [])]
    for name, column in found.items():
        for value, answer in zip(column, expected, strict=True):
            if name in ("score", "uncertainty", "aleatoric", "epistemic", "detector_score"):
                assert value == pytest.approx(answer[name], abs=1e-6)
            elif name not in ("scores", "reason"):
                assert value == answer[name]


COLUMNS = ["label", "score", "uncertainty", "aleatoric", "epistemic", "abstain", "detector", "detector_score"]
COLUMNS += ["threshold", "reason", "prediction_set", "scores"]


def test_columns_are_the_fields_of_predicts_answers(folders, images, tmp_path):
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
    named = HydraPredictor(texts.model, texts.processor, columns=("premise", "hypothesis"))
    assert_columns(named({"premise": columns["text"], "hypothesis": columns["text_pair"]}), expected)


def test_an_image_may_be_of_pil_an_array_bytes_or_a_path(images, tmp_path):
    image = PICTURES[0]
    image.save(tmp_path / "0.png")
    content = (tmp_path / "0.png").read_bytes()
    forms = [image, np.asarray(image), content, tmp_path / "0.png", str(tmp_path / "0.png")]
    forms += [{"bytes": content, "path": None}, {"bytes": None, "path": str(tmp_path / "0.png")}]
    found = images({"image": forms})
    assert len(set(found["label"])) == 1 and np.ptp(found["score"]) < 1e-6
    # An array of columns, as Ray and Spark pass images of one size.
    assert (
        images({"image": np.stack([np.asarray(each) for each in PICTURES])})["label"]
        == (images({"image": PICTURES})["label"])
    )


def test_a_bad_row_is_an_error_or_told_in_a_column(folders, images, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    deep = np.zeros((8, 8, 3), dtype=np.float32)
    rows = [PICTURES[0], None, tmp_path / "broken.png", "nowhere.png", deep, Image.new("I;16", (8, 8)), PICTURES[1]]
    with pytest.raises(ValueError, match="row 1 of the batch cannot be read as an image: there is none"):
        images({"image": rows})
    found = HydraPredictor(folders["images"], device="cpu", strict=False)({"image": rows})
    assert found["label"][0] and found["label"][6] and found["label"][1:6] == [None] * 5
    assert found["error"][0] is found["error"][6] is None and found["error"][3] == "there is no such file"
    assert "float32" in found["error"][4] and "I;16" in found["error"][5]
    assert [type(each) for each in images.answers(rows)] == [dict, *[BadRow] * 5, dict]


def test_a_row_that_fails_in_the_model_does_not_fail_the_others(folders, monkeypatch):
    texts = HydraPredictor(folders["texts"], device="cpu", strict=False)
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


def test_one_batch_of_images_at_a_time_is_decoded(folders, monkeypatch):
    predictor = HydraPredictor(folders["images"], device="cpu", batch_size=2)
    read, answer, waiting, most = predictor._read, predictor.answer, [], []
    monkeypatch.setattr(predictor, "_read", lambda value: waiting.append(1) or read(value))

    def counts(inputs, parameters):
        most.append(len(waiting))
        waiting.clear()
        return answer(inputs, parameters)

    monkeypatch.setattr(predictor, "answer", counts)
    assert len(predictor({"image": [*PICTURES, PICTURES[0]]})["label"]) == 5 and most == [2, 2, 1]


def test_a_predictor_is_pickled_by_its_arguments(folders, images):
    pickled = pickle.dumps(images)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert again({"image": PICTURES}) == images({"image": PICTURES}) and again.batch_size == 3
    with pytest.raises(TypeError, match="made of a model in memory"):
        pickle.dumps(HydraPredictor(images.model, images.processor))


def test_datasets_map_takes_a_predictor(images):
    """Also where a column is None in all of the first rows: none of them is refused."""
    answered = images({"image": PICTURES})
    order = sorted(range(len(PICTURES)), key=lambda place: answered["abstain"][place])
    rows = datasets.Dataset.from_dict({"image": PICTURES}, features=datasets.Features({"image": datasets.Image()}))
    rows = rows.add_column("place", list(range(len(PICTURES)))).select(order)
    features = datasets.Features({**rows.features, **images.features})
    found = rows.map(images, batched=True, batch_size=1, features=features)
    assert found["place"] == order and found["reason"][0] is None and found["reason"][-1] is not None
    for name in ("label", "abstain", "prediction_set"):
        assert list(found[name]) == [answered[name][place] for place in order]


def test_the_schema_holds_every_column(folders):
    for kind, columns in (
        ("images", {"image": PICTURES}),
        ("single", {"image": PICTURES}),
        ("texts", {"text": ["a"]}),
    ):
        predictor = HydraPredictor(folders[kind], device="cpu", strict=False)
        table = pyarrow.table(predictor(columns), schema=arrow_schema(predictor.columns))
        assert table.num_rows == len(next(iter(columns.values())))
    with pytest.raises(ValueError, match="an answer has the field 'mood', which has no column"):
        to_columns([{"mood": 1}], {"label": "string"})


def test_clip_needs_its_classes(folders, images):
    with pytest.raises(
        ValueError, match="candidate_labels is missing: clip-hydra chooses among classes that you name"
    ):
        asked(folders["clip"])({"image": PICTURES})
    clip = HydraPredictor(folders["clip"], device="cpu", candidate_labels=["cat", "dog"])
    assert set(clip({"image": PICTURES})["label"]) <= {"cat", "dog"}
    with pytest.raises(ValueError, match="candidate_labels is for CLIP and SigLIP, tiny-hydra has its own classes"):
        HydraPredictor(folders["images"], device="cpu", candidate_labels=["cat"])
    with pytest.raises(ValueError, match="the batch has no column 'image', it has photo: name it as columns="):
        images({"photo": PICTURES})
