"""The server: answers as `predict`, limits, and requests that it refuses."""

import asyncio
import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from transformers import AutoTokenizer, CLIPProcessor, ViTImageProcessorPil

from hydra_transformers.cli import main
from hydra_transformers.cli.serve import predictor_of
from hydra_transformers.hub.handler import MOST_LABELS, MOST_PIXELS, Answerer
from hydra_transformers.models.auto import load_trained
from hydra_transformers.serving import create_app, server
from hydra_transformers.serving.metrics import CAUSES, Metrics
from tests.serving.tiny import base64_of
from tests.tiny_data import CLASSES, pictures


FIELDS = {
    "detector",
    "detector_score",
    "threshold",
    "reason",
    "label",
    "score",
    "uncertainty",
    "aleatoric",
    "epistemic",
    "abstain",
    "prediction_set",
    "scores",
}
PATHS = {"/", "/health", "/metrics", "/predict"}
PICTURES = pictures([0, 1, 2], seed=4)


def app_of(folder, **limits):
    return create_app(predictor_of(str(folder), device="cpu"), **limits)


@pytest.fixture(scope="module")
def clients(folders):
    with (
        TestClient(app_of(folders["images"])) as vit,
        TestClient(app_of(folders["texts"])) as bert,
        TestClient(app_of(folders["clip"])) as clip,
    ):
        yield {"vit": vit, "bert": bert, "clip": clip}


def asked(client: TestClient, inputs, **parameters):
    response = client.post("/predict", json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response.json()


def assert_same(found: list[dict], expected: list[dict]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() and one.keys() - {"truncated"} == FIELDS
        for name in ("label", "abstain", "detector", "threshold", "prediction_set"):
            assert one[name] == other[name]
        assert (one["reason"] is None) is not bool(one["abstain"])
        for name in ("score", "uncertainty", "aleatoric", "epistemic"):
            assert one[name] == pytest.approx(other[name], abs=1e-5)
        assert [each["label"] for each in one["scores"]] == [each["label"] for each in other["scores"]]


# Answers


def test_images_are_answered_as_by_predict(folders, clients):
    hydra, processor = load_trained(folders["images"]), ViTImageProcessorPil.from_pretrained(folders["images"])
    expected = hydra.predict(PICTURES, processor)
    found = asked(clients["vit"], [base64_of(image) for image in PICTURES])
    assert_same(found, expected)
    assert {answer["abstain"] for answer in found} == {True, False}
    assert all(answer["abstain"] == (answer["detector_score"] > answer["threshold"]) for answer in found)
    one = asked(clients["vit"], "data:image/png;base64," + base64_of(PICTURES[0]), top_k=1)
    assert_same([one], hydra.predict(PICTURES[:1], processor, top_k=1))


def test_texts_are_answered_as_by_predict(folders, clients):
    hydra, tokenizer = load_trained(folders["texts"]), AutoTokenizer.from_pretrained(folders["texts"])
    texts = ["a good film", "", "bad " * 300, {"text": "a film", "text_pair": "of joy"}]
    found = asked(clients["bert"], texts)
    assert_same(found, hydra.predict(texts, tokenizer))
    assert found[0]["abstain"] is None and found[0]["prediction_set"] is None  # it was not calibrated
    assert found[1]["reason"] == "The text is empty." and found[2]["truncated"] and not found[0]["truncated"]
    assert_same([asked(clients["bert"], texts[3])], hydra.predict(texts[3:], tokenizer))


def test_clip_chooses_among_the_labels_of_the_request(folders, clients):
    hydra, processor = load_trained(folders["clip"]), CLIPProcessor.from_pretrained(folders["clip"])
    parameters = {"candidate_labels": ["red", "green"], "hypothesis_template": "a {}."}
    found = asked(clients["clip"], [base64_of(image) for image in PICTURES], **parameters)
    assert_same(found, hydra.predict(PICTURES, processor, **parameters))


def test_many_at_once_are_each_answered_as_alone(clients):
    encoded = [base64_of(image) for image in PICTURES]
    alone = [asked(clients["vit"], image) for image in encoded]
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda place: asked(clients["vit"], encoded[place % 3]), range(24)))
    assert_same(found, [alone[place % 3] for place in range(24)])


def test_it_tells_what_it_is_and_that_it_is_well(folders, clients):
    about = clients["vit"].get("/")
    assert about.json()["labels"] == CLASSES and about.json()["calibrated"] and about.json()["members"] == 3
    assert about.json()["model"] == "tiny-hydra" and str(folders["images"].parent) not in about.text
    assert clients["bert"].get("/").json()["calibrated"] is False
    assert clients["clip"].get("/").json()["kind"] == "zero-shot"
    health = clients["vit"].get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "requests": 0})


# What is refused

GOOD = base64_of(PICTURES[0])
BROKEN = {
    "half of a file": base64_of(PICTURES[0])[:120] + "====",
    "a path": "/etc/passwd",
    "a URL": "https://example.com/a.png",
    "a file URL": "file:///etc/passwd",
    "a data URL without data": "data:image/png",
    "no letters of base64": "ü" * 8,
    "nothing": "",
    "a format with a language inside": base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n").decode(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_image_is_refused(name, clients):
    response = clients["vit"].post("/predict", json={"inputs": [GOOD, BROKEN[name]]})
    assert response.status_code == 422
    assert response.json()["error"].startswith("inputs[1] is ") and "\n" not in response.json()["error"]


def test_a_small_file_that_unfolds_to_too_many_pixels_is_refused(clients):
    side = int(MOST_PIXELS**0.5) + 1
    bomb = base64_of(Image.new("1", (side, side)))
    assert len(bomb) < 20_000
    response = clients["vit"].post("/predict", json={"inputs": bomb})
    assert (
        response.status_code == 422
        and f"inputs[0] has {side:,} x {side:,} pixels, too many: send at most 25,000,000" in response.json()["error"]
    )
    quarter = base64_of(Image.new("1", (side // 2, side // 2)))
    response = clients["vit"].post("/predict", json={"inputs": [quarter] * 5})  # the limit is of the whole request
    assert response.status_code == 422 and "too many with the images before it" in response.json()["error"]


REFUSED = [
    ("vit", [], "the request has no inputs"),
    ("vit", {"input": GOOD}, "the request has no inputs"),
    ("vit", {"inputs": GOOD, "path": "x"}, "unknown field 'path'"),
    ("vit", {"inputs": []}, "inputs has 0 entries: send 1 to 16"),
    ("vit", {"inputs": [GOOD] * 17}, "inputs has 17 entries"),
    ("vit", {"inputs": 3}, "inputs[0] is a number: send an image in base64"),
    ("vit", {"inputs": None}, "inputs[0] is null"),
    ("vit", {"inputs": {"text": "a"}}, "inputs[0] is an object"),
    ("vit", {"inputs": GOOD, "parameters": []}, "parameters is a list"),
    ("vit", {"inputs": GOOD, "parameters": {"top_k": 0}}, "top_k must be a whole number from 1 on"),
    ("vit", {"inputs": GOOD, "parameters": {"top_k": True}}, "top_k must be"),
    ("vit", {"inputs": GOOD, "parameters": {"top_k": None}}, "top_k must be"),
    (
        "vit",
        {"inputs": GOOD, "parameters": {"candidate_labels": ["a"]}},
        "parameters has an unknown 'candidate_labels'",
    ),
    ("bert", {"inputs": ["a", ["b"]]}, "inputs[1] is a list: send a text"),
    ("bert", {"inputs": {"text": "a", "text_pair": 1}}, "inputs[0] is an object: send a text"),
    ("bert", {"inputs": "\ud800"}, "inputs[0] has half a character"),
    ("clip", {"inputs": GOOD}, "candidate_labels must be a list of 1 to 1,000 texts"),
    ("clip", {"inputs": GOOD, "parameters": {"candidate_labels": ["a", " "]}}, "candidate_labels must be"),
    ("clip", {"inputs": GOOD, "parameters": {"candidate_labels": ["\ud800"]}}, "candidate_labels must be"),
    ("clip", {"inputs": GOOD, "parameters": {"candidate_labels": ["a", "a"]}}, "names a label twice"),
    ("clip", {"inputs": GOOD, "parameters": {"candidate_labels": ["a" * 90]}}, "which makes"),
    (
        "clip",
        {"inputs": GOOD, "parameters": {"candidate_labels": [str(n) for n in range(MOST_LABELS + 1)]}},
        "candidate_labels must be",
    ),
    (
        "clip",
        {"inputs": GOOD, "parameters": {"candidate_labels": ["a"], "hypothesis_template": "{0.__class__}"}},
        "hypothesis_template must be",
    ),
]


@pytest.mark.parametrize("kind, request_of, sentence", REFUSED, ids=[each[2] for each in REFUSED])
def test_requests_that_cannot_be_answered_are_told_why(kind, request_of, sentence, clients):
    body = json.dumps(request_of)  # lone surrogates as \ud800, as a client may send them
    response = clients[kind].post("/predict", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert list(response.json()) == ["error"] and sentence in response.json()["error"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"nul", b'{"inputs": ' + b"9" * 5000 + b"}"]
)
def test_what_is_no_json_is_refused(body, clients):
    response = clients["vit"].post("/predict", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()) == (400, {"error": "the request is not valid JSON"})


def test_other_ways_and_types_are_refused(clients):
    client = clients["vit"]
    response = client.post("/predict", content="{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415 and "Content-Type: application/json" in response.json()["error"]
    assert client.get("/predict").status_code == 405
    for path in ("/redoc", "/../etc/passwd", "/model.safetensors"):
        assert client.get(path).status_code == 404


def test_the_api_has_a_page_about_itself_that_can_be_left_out(clients):
    assert "swagger" in clients["vit"].get("/docs").text
    api = clients["vit"].get("/openapi.json").json()
    assert api["info"]["title"] == "tiny-hydra" and set(api["paths"]) == PATHS
    request = api["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(request["properties"]) == {"inputs", "parameters"}
    with TestClient(create_app(Answerer(None, None, "text"), docs=False)) as client:
        assert [client.get(path).status_code for path in ("/docs", "/openapi.json")] == [404, 404]


# Limits


def test_requests_that_are_too_large_are_refused_before_they_are_read(folders):
    with TestClient(app_of(folders["images"], max_body=1000)) as client:
        response = client.post("/predict", json={"inputs": "A" * 1000})
        assert response.status_code == 413 and "larger than 1,000 bytes" in response.json()["error"]
        headers = {"content-type": "application/json"}
        parts = (b"A" * 100 for _ in range(20))  # no length is told
        assert client.post("/predict", content=parts, headers=headers).status_code == 413
        length = headers | {"content-length": "9" * 5000}
        assert client.post("/predict", content=b"{}", headers=length).status_code == 413
        assert client.get("/health").json() == {"status": "ok", "requests": 0}


class Held(Answerer):
    """Answers when it is let."""

    def __init__(self):
        super().__init__(None, None, "text")
        self.may_answer, self.is_asked = threading.Event(), threading.Event()

    def answer(self, inputs, parameters):
        self.is_asked.set()
        assert self.may_answer.wait(10)
        if "fail" in inputs:
            raise RuntimeError("secret")
        return [{"label": text, "scores": []} for text in inputs]


def test_more_requests_than_may_wait_are_told_to_come_again():
    held = Held()
    with TestClient(create_app(held, max_queue=1)) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.post, "/predict", json={"inputs": "a"})
        assert held.is_asked.wait(10)
        response = client.post("/predict", json={"inputs": "b"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json() == {"error": "1 requests wait already: try again"}
        held.may_answer.set()
        assert first.result().json() == {"label": "a", "scores": []}
        assert client.post("/predict", json={"inputs": "b"}).status_code == 200


def test_a_failure_of_the_model_is_told_without_its_words():
    held = Held()
    held.may_answer.set()
    with TestClient(create_app(held)) as client:
        response = client.post("/predict", json={"inputs": "fail"})
        assert response.status_code == 500 and "secret" not in response.text
        assert client.post("/predict", json={"inputs": "a"}).status_code == 200


# The command


def test_the_command_refuses_what_it_cannot_serve(folders, capsys):
    assert main(["serve", str(folders["texts"]), "--port", "70000"]) == 2
    assert "Invalid value for '--port'" in capsys.readouterr().err
    assert torch.is_grad_enabled()


# Metrics


def number(text: str, name: str, **labels) -> float:
    for line in text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name} with {labels}")


def test_metrics_count_requests_inputs_and_refusals(folders):
    with TestClient(app_of(folders["images"])) as client:
        answers = asked(client, [base64_of(image) for image in PICTURES])
        assert client.post("/predict", json={"inputs": "no image"}).status_code == 422
        answers.append(asked(client, base64_of(PICTURES[0].resize((1, 1)).resize((8, 8)))))
        text = client.get("/metrics").text
    assert number(text, "hydra_requests_total", status=200, model="tiny-hydra") == 2
    assert number(text, "hydra_requests_total", status=422) == 1
    assert number(text, "hydra_inputs_total") == 4
    assert number(text, "hydra_epistemic_nats_total") == pytest.approx(sum(each["epistemic"] for each in answers))
    refused = {cause: number(text, "hydra_refused_total", cause=cause) for cause in CAUSES}
    assert sum(refused.values()) == sum(answer["abstain"] for answer in answers) and refused["empty"] == 1
    assert number(text, "hydra_request_seconds_count") == number(text, "hydra_request_seconds_bucket", le="+Inf") == 3
    assert number(text, "hydra_requests_in_flight") == 0


def test_refusals_are_counted_by_their_cause():
    metrics = Metrics("m")
    reasons = ["msp is 0.6, above the threshold 0.2.", "msp of 'Rome' is 0.6, above the threshold 0.2."]
    reasons += ["The score is 0.1, below the threshold 0.2.", "Every label is too close to its threshold."]
    reasons += ["The text is empty.", "The answer is not a number.", "The image has one colour only."]
    metrics.count_answers([{"abstain": True, "reason": reason, "epistemic": None} for reason in reasons])
    metrics.count_answers([{"abstain": False, "reason": None, "epistemic": 0.5}])
    text = metrics.text().decode()
    assert [number(text, "hydra_refused_total", cause=cause) for cause in CAUSES] == [4, 2, 1]
    assert number(text, "hydra_inputs_total") == 8 and number(text, "hydra_epistemic_nats_total") == 0.5


# Bodies


async def posted(app, parts: list[bytes], ends: asyncio.Event | None = None) -> int:
    """The status that a client gets who sends these parts of a body, and goes away once `ends` is set."""
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages += [{"type": "http.request", "body": b"", "more_body": False}] if ends is None else []
    sent = []

    async def receive():
        if messages:
            return messages.pop(0)
        await (ends or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"]


def test_clients_with_slow_bodies_keep_nobody_out():
    held = Held()
    held.may_answer.set()
    app = create_app(held, max_queue=2)

    async def talk():
        ends = asyncio.Event()
        async with app.router.lifespan_context(app):
            slow = [asyncio.create_task(posted(app, [b"{"], ends)) for _ in range(70)]
            await asyncio.sleep(0)
            quick = await posted(app, [b'{"inputs": ', b'"a"}'])
            assert not any(task.done() for task in slow)
            ends.set()
            return quick, await asyncio.gather(*slow)

    assert asyncio.run(talk()) == (200, [400] * 70) and app.state.requests == 0


def test_slow_bodies_have_a_limit_in_time_and_all_together_in_memory(monkeypatch):
    monkeypatch.setattr(server, "SECONDS_FOR_BODY", 0.01)
    app = create_app(Held(), max_queue=2, max_body=100)

    async def talk():
        return await asyncio.gather(*(posted(app, [b"{" * 90], asyncio.Event()) for _ in range(3)))

    assert asyncio.run(talk()) == [408, 408, 503]
    assert asyncio.run(talk()) == [408, 408, 503], "what is held is let go"


def test_large_responses_are_written_outside_of_the_event_loop(monkeypatch):
    threads = []
    monkeypatch.setattr(server, "as_json", lambda answers: threads.append(threading.current_thread()) or answers)
    held = Held()
    held.may_answer.set()
    app = create_app(held)

    async def talk():
        async with app.router.lifespan_context(app):
            await posted(app, [b'{"inputs": "a"}'])
            return threading.current_thread()

    assert asyncio.run(talk()) not in threads and len(threads) == 1
