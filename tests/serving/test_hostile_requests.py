"""Requests that are small and would cost much, or that would disturb others: refused with a sentence, or kept apart."""

import asyncio
import base64
import io
import json
import math
import random
import re
import threading

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from transformers import CLIPProcessor
from transformers.image_utils import load_image

from hydra_transformers.hub.handler import (
    MAX_ASPECT_RATIO,
    MOST_CHARACTERS,
    MOST_OF_A_LABEL,
    Answerer,
    RequestError,
    read_image,
)
from hydra_transformers.models.auto import load_trained
from hydra_transformers.serving import HydraPredictor, create_app
from hydra_transformers.serving.page_inputs import read_file
from tests.serving.tiny import base64_of
from tests.tiny_data import save_clip


def test_a_slender_image_is_refused_that_a_processor_would_scale_up_to_gigabytes(tmp_path):
    """1 x 100,000 pixels are a file of 300 bytes; with the short side scaled to 224 they are 5 billion."""
    image = Image.new("RGB", (MAX_ASPECT_RATIO + 1, 1))
    with pytest.raises(RequestError, match=r"inputs\[3\] has 101 x 1 pixels: send one at most 100 times as long"):
        read_image(base64_of(image), "inputs[3]")
    image.rotate(90, expand=True).save(tmp_path / "tall.png")
    with pytest.raises(
        RequestError, match=r"tall\.png has 1 x 101 pixels: send one at most 100 times as long as wide"
    ):
        read_file(tmp_path / "tall.png", "images")
    assert read_image(base64_of(Image.new("RGB", (MAX_ASPECT_RATIO, 1))), "inputs[0]").size == (MAX_ASPECT_RATIO, 1)


def test_an_image_of_so_many_pixels_that_pillow_refuses_it_is_told_why(monkeypatch):
    bomb = base64_of(Image.new("1", (100, 100)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4_000)
    with pytest.raises(
        RequestError, match=r"^inputs\[0\] has 4,000 pixels or more, too many: send at most 25,000,000$"
    ):
        read_image(bomb, "inputs[0]")


def test_images_of_more_levels_than_a_model_reads_are_refused(tmp_path):
    """PIL would make white of all that is above the 255th level."""
    path = tmp_path / "deep.png"
    Image.new("I;16", (8, 8), 300).save(path)
    with pytest.raises(RequestError, match=r"inputs\[2\] has the mode I;16, of more than 256 levels"):
        read_image(base64.b64encode(path.read_bytes()).decode(), "inputs[2]")
    with pytest.raises(RequestError, match=r"^deep\.png has the mode I;16, of more than 256 levels"):
        read_file(path, "images")


def jpeg(exif: bytes | Image.Exif) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 4), "red").save(file, "JPEG", exif=exif)
    return file.getvalue()


def test_images_are_turned_as_they_ask_for_and_no_broken_word_on_that_fails_the_model(tmp_path):
    quarter = Image.Exif()
    quarter[0x0112] = 6
    for exif, size in ((quarter, (4, 8)), (b"Exif\x00\x00garbage", (8, 4))):
        (tmp_path / "mine.jpg").write_bytes(jpeg(exif))
        for image in (
            read_image(base64.b64encode(jpeg(exif)).decode(), "inputs[0]"),
            read_file(tmp_path / "mine.jpg", "images"),
        ):
            assert load_image(image).size == image.size == size  # as the pipeline reads it


def test_texts_without_end_are_refused_and_texts_of_nothing():
    answerer = Answerer(None, None, "text")
    half = "a" * (MOST_CHARACTERS // 2)
    assert len(answerer.read({"inputs": [half, {"text": half, "text_pair": ""}]})[0]) == 2
    with pytest.raises(RequestError, match=r"inputs has 1,000,001 characters: send at most 1,000,000"):
        answerer.read({"inputs": [half, {"text": half, "text_pair": "b"}]})
    for nothing in ("", " \n", {"text": "", "text_pair": " "}):
        with pytest.raises(RequestError, match=r"inputs\[0\] is empty"):
            answerer.read({"inputs": nothing})


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = save_clip(tmp_path_factory.mktemp("clip"))
    return Answerer(load_trained(folder), CLIPProcessor.from_pretrained(folder), "zero-shot")


def test_labels_and_templates_do_not_multiply_to_gigabytes(clip):
    with pytest.raises(RequestError, match="hypothesis_template must be a text of at most 1,000 characters"):
        clip.read_parameters({"candidate_labels": ["a"], "hypothesis_template": "a" * MOST_OF_A_LABEL + "{}"})
    with pytest.raises(RequestError, match="texts of at most 1,000 characters"):
        clip.read_parameters({"candidate_labels": ["a" * (MOST_OF_A_LABEL + 1)]})


def test_labels_are_measured_without_the_tokenizer_that_answers(clip):
    """One of two threads would find the other's padding and cutting, and labels that are too long would pass."""
    tokenizer, problems = clip.processor.tokenizer, []

    def answers():
        for _ in range(100):
            try:
                tokenizer(["a" * 30, "a"] * 10, padding=True, truncation=True, max_length=20, return_tensors="pt")
            except ValueError as error:
                problems.append(error)

    def reads():
        for _ in range(100):
            try:
                clip.read_parameters({"candidate_labels": ["b" * 90, *"acdefghij"]})
                problems.append("too long, and not refused")
            except RequestError as error:
                assert "which makes" in str(error)

    threads = [threading.Thread(target=each) for each in (answers, reads, reads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_who_goes_away_while_sending_leaves_no_place_taken_and_no_traceback(caplog):
    app = create_app(Answerer(None, None, "text"))
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent = []

    async def receive():
        return next(parts)

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 400 and app.state.requests == 0 and not caplog.records


class Odd(Answerer):
    """Gives no number for one text, and no answer for another."""

    def __init__(self):
        super().__init__(None, None, "text")

    def answer(self, inputs, parameters):
        answers = [{"label": text, "score": math.nan if text == "nan" else 1.0, "scores": []} for text in inputs]
        return [answer for answer in answers if answer["label"] != "lost"]


def test_a_number_that_json_does_not_have_is_null():
    with TestClient(create_app(Odd())) as client:
        response = client.post("/predict", json={"inputs": ["nan", "a"]})
    assert response.status_code == 200 and [each["score"] for each in response.json()] == [None, 1.0]


def test_nobody_gets_the_answer_of_another():
    with TestClient(create_app(Odd())) as client:
        response = client.post("/predict", json={"inputs": ["lost", "a"]})
        assert response.status_code == 500 and list(response.json()) == ["error"]
        assert client.post("/predict", json={"inputs": "a"}).json()["label"] == "a"


ODD = [None, True, 0, -1, 2, 3.5, 10**400, "", "a", "\ud800", "\0", "{}", [], {}, [[]], [None], ["a", "b"], ["a"] * 17]
ODD += [{"text": "a", "text_pair": None}, {"b64": 1}, {"name": []}, "data:image/png;base64,AAAA", {"top_k": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["texts", "images", "clip"])
def test_every_wrong_body_gets_a_sentence(kind, folders):
    """Drawn at random; thousands of others were tried by hand."""
    draw, predictor = random.Random(0), HydraPredictor(folders[kind], device="cpu")
    usual = {"candidate_labels": ["a", "b"]}
    with TestClient(create_app(predictor), raise_server_exceptions=False) as client:
        for _ in range(150):
            body = {"inputs": draw.choice(ODD), "parameters": usual if draw.random() < 0.5 else draw.choice(ODD)}
            response = client.post("/predict", content=json.dumps(body), headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 422), body
            assert response.status_code == 200 or re.fullmatch(r'\{"error":".{10,400}"\}', response.text), (
                response.text
            )
        assert client.get("/health").json() == {"status": "ok", "requests": 0}
        assert client.get("/metrics").status_code == 200
