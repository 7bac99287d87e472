"""Wrong requests, and small ones that would cost much, get a sentence; none disturbs others."""

import base64
import json
import random
import re
import threading

import pytest
from PIL import Image
from transformers import CLIPProcessor
from transformers.image_utils import load_image

from hydra_transformers.models.auto import load_trained
from hydra_transformers.serving.answerer import (
    MOST_CHARACTERS,
    MOST_LABELS,
    MOST_PIXELS,
    Answerer,
    RequestError,
    read_image,
)
from tests.serving.tiny import base64_of
from tests.tiny_data import pictures, save_clip


JSON = {"content-type": "application/json"}
GOOD = base64_of(pictures([0])[0])
SIDE = int(MOST_PIXELS**0.5) + 1


def labels(*names: str, **parameters) -> dict:
    return {"inputs": GOOD, "parameters": {"candidate_labels": list(names), **parameters}}


IMAGES = {
    "half of a file": GOOD[:120] + "====",
    "a path": "/etc/passwd",
    "a URL": "https://example.com/a.png",
    "a file URL": "file:///etc/passwd",
    "a data URL without data": "data:image/png",
    "no letters of base64": "ü" * 8,
    "nothing": "",
    "a format with a language inside": base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n").decode(),
}
REFUSED = [
    *[("vit", {"inputs": [GOOD, image]}, 422, "inputs[1] is ") for image in IMAGES.values()],
    (
        "vit",
        {"inputs": base64_of(Image.new("1", (SIDE, SIDE)))},
        422,
        f"inputs[0] has {SIDE:,} x {SIDE:,} pixels, too many",
    ),
    ("vit", {"inputs": [base64_of(Image.new("1", (SIDE // 2, SIDE // 2)))] * 5}, 422, "too many"),
    (
        "vit",
        {"inputs": base64_of(Image.new("RGB", (101, 1)))},
        422,
        "has 101 x 1 pixels: send one at most 100 times as long",
    ),
    ("vit", {"inputs": base64_of(Image.new("I;16", (8, 8), 300))}, 422, "has the mode I;16, of more than 256 levels"),
    ("vit", [], 422, "the request has no inputs"),
    ("vit", {"input": GOOD}, 422, "the request has no inputs"),
    ("vit", {"inputs": GOOD, "path": "x"}, 422, "unknown field 'path'"),
    ("vit", {"inputs": []}, 422, "inputs has 0 entries: send 1 to 16"),
    ("vit", {"inputs": [GOOD] * 17}, 422, "inputs has 17 entries"),
    ("vit", {"inputs": 3}, 422, "inputs[0] is not a text: send an image in base64"),
    ("vit", {"inputs": None}, 422, "inputs[0] is not a text"),
    ("vit", {"inputs": {"text": "a"}}, 422, "inputs[0] is not a text"),
    ("vit", {"inputs": GOOD, "parameters": []}, 422, "parameters is not an object"),
    *[("vit", {"inputs": GOOD, "parameters": {"top_k": k}}, 422, "top_k must be") for k in (0, True, None)],
    ("vit", labels("a"), 422, "parameters has an unknown 'candidate_labels'"),
    ("bert", {"inputs": ["a", ["b"]]}, 422, "inputs[1] is not a text, or"),
    ("bert", {"inputs": {"text": "a", "text_pair": 1}}, 422, "inputs[0] is not a text, or"),
    ("bert", {"inputs": "\ud800"}, 422, "inputs[0] is not a text, or has half a character"),
    (
        "bert",
        {"inputs": ["a" * MOST_CHARACTERS, "b"]},
        422,
        "inputs[1] has 1 characters, too many: send at most 1,000,000",
    ),
    ("clip", {"inputs": GOOD}, 422, "candidate_labels must be a list of 1 to 1,000 texts"),
    ("clip", labels("a", " "), 422, "candidate_labels must be"),
    ("clip", labels("\ud800"), 422, "candidate_labels must be"),
    ("clip", labels("a", "a"), 422, "names a label twice"),
    ("clip", labels("a" * 90), 422, "which makes"),
    ("clip", labels("a" * 1_001), 422, "texts of at most 1,000 characters"),
    ("clip", labels(*map(str, range(MOST_LABELS + 1))), 422, "candidate_labels must be"),
    ("clip", labels("a", hypothesis_template="{0.__class__}"), 422, "hypothesis_template must be"),
    (
        "clip",
        labels("a", hypothesis_template="a" * 1_000 + "{}"),
        422,
        "hypothesis_template must be a text of at most",
    ),
    *[
        ("vit", body, 400, "the request is not valid JSON")
        for body in (b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"nul", b'{"inputs": ' + b"9" * 5000 + b"}")
    ],
    ("vit", {"inputs": "A" * 10_000_000}, 413, "larger than 10,000,000 bytes"),
    ("vit", (b"A" * 10**6 for _ in range(11)), 413, "larger than 10,000,000 bytes"),  # no length is told
]
REFUSED = [(*row, JSON) for row in REFUSED]
REFUSED += [("vit", {}, 415, "Content-Type: application/json", {"content-type": "text/plain"})]
REFUSED += [("vit", {}, 422, "the request has no inputs", JSON | {"content-length": "9" * 5000})]


@pytest.mark.parametrize(("client", "body", "status", "sentence", "headers"), REFUSED)
def test_wrong_requests_are_told_why(client, body, status, sentence, headers, clients):
    is_json = isinstance(body, (dict, list))
    content = json.dumps(body) if is_json else body  # lone surrogates as \ud800, as a client may send them
    response = clients[client].post("/predict", content=content, headers=headers)
    assert response.status_code == status
    assert list(response.json()) == ["error"] and sentence in response.json()["error"]
    assert "\n" not in response.json()["error"]
    assert clients[client].get("/health").json() == {"status": "ok", "requests": 0}


def test_nothing_else_is_served(clients):
    assert clients["vit"].get("/predict").status_code == 405
    for path in (
        "/",
        "/docs",
        "/openapi.json",
        "/redoc",
        "/../etc/passwd",
        "/model.safetensors",
        "/classify",
        "/v2/models/tiny-hydra/infer",
    ):
        assert clients["vit"].get(path).status_code == 404


ODD = [None, True, 0, -1, 2, 3.5, 10**400, "", "a", "\ud800", "\0", "{}", [], {}, [[]], [None], ["a", "b"], ["a"] * 17]
ODD += [{"text": "a", "text_pair": None}, {"b64": 1}, {"name": []}, "data:image/png;base64,AAAA", {"top_k": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "vit", "clip"])
def test_every_wrong_body_gets_a_sentence(kind, clients):
    """Drawn at random; thousands of others were tried by hand."""
    draw = random.Random(0)
    client = clients[kind]
    usual = {"candidate_labels": ["a", "b"]}
    for _ in range(150):
        body = {"inputs": draw.choice(ODD), "parameters": usual if draw.random() < 0.5 else draw.choice(ODD)}
        response = client.post("/predict", content=json.dumps(body), headers=JSON)
        assert response.status_code in (200, 400, 422), body
        assert response.status_code == 200 or re.fullmatch(r'\{"error":".{10,400}"\}', response.text), response.text
    assert client.get("/health").json() == {"status": "ok", "requests": 0}


def test_texts_of_nothing_are_refused_where_the_tokenizer_adds_no_token():
    answerer = Answerer(None, None, "text")
    half = "a" * (MOST_CHARACTERS // 2)
    assert len(answerer.read({"inputs": [half, {"text": half, "text_pair": ""}]})[0]) == 2
    for nothing in ("", " \n", {"text": "", "text_pair": " "}):
        with pytest.raises(RequestError, match=r"inputs\[0\] is empty"):
            answerer.read({"inputs": nothing})


def test_an_image_of_so_many_pixels_that_pillow_refuses_it_is_told_why(monkeypatch):
    bomb = base64_of(Image.new("1", (100, 100)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4_000)
    with pytest.raises(RequestError, match=r"^inputs\[0\] has 4,000 pixels or more, too many: send at most"):
        read_image(bomb, "inputs[0]")


def test_images_are_turned_as_they_ask_for_and_no_broken_word_on_that_fails_the_model(tmp_path):
    quarter = Image.Exif()
    path = tmp_path / "mine.jpg"
    quarter[0x0112] = 6
    for exif, size in ((quarter, (4, 8)), (b"Exif\x00\x00garbage", (8, 4))):
        Image.new("RGB", (8, 4), "red").save(path, exif=exif)
        sent = base64.b64encode(path.read_bytes()).decode()
        image = read_image(sent, "inputs[0]")
        assert load_image(image).size == image.size == size  # as the pipeline reads it


def test_labels_are_measured_without_the_tokenizer_that_answers(tmp_path):
    """One of two threads would find the other's padding and cutting, and labels that are too long would pass."""
    folder = save_clip(tmp_path)
    clip = Answerer(load_trained(folder), CLIPProcessor.from_pretrained(folder), "zero-shot")
    tokenizer = clip.processor.tokenizer
    problems = []

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
