"""The server: predictions as by `predict`, limits, metrics; wrong requests are in test_hostile_requests.py."""

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient
from transformers import AutoTokenizer, CLIPProcessor, ViTImageProcessorPil

from hydra_transformers.models.auto import load_trained
from hydra_transformers.serving import create_app, server
from hydra_transformers.serving.answerer import Answerer
from tests.serving.tiny import asked, base64_of
from tests.tiny_data import pictures


FIELDS = {"detector", "detector_score", "threshold", "reason", "label", "score", "uncertainty", "aleatoric"}
FIELDS |= {"epistemic", "abstain", "prediction_set", "scores"}
PICTURES = pictures([0, 1, 2], seed=4)
ENCODED = [base64_of(image) for image in PICTURES]


def predicted(client: TestClient, inputs, **parameters):
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
    hydra = load_trained(folders["images"])
    processor = ViTImageProcessorPil.from_pretrained(folders["images"])
    found = predicted(clients["vit"], ENCODED)
    assert_same(found, hydra.predict(PICTURES, processor))
    assert {answer["abstain"] for answer in found} == {True, False}
    assert all(answer["abstain"] == (answer["detector_score"] > answer["threshold"]) for answer in found)
    one = predicted(clients["vit"], "data:image/png;base64," + ENCODED[0], top_k=1)
    assert_same([one], hydra.predict(PICTURES[:1], processor, top_k=1))


def test_texts_are_answered_as_by_predict(folders, clients):
    hydra = load_trained(folders["texts"])
    tokenizer = AutoTokenizer.from_pretrained(folders["texts"])
    texts = ["a good film", "", "bad " * 300, {"text": "a film", "text_pair": "of joy"}]
    found = predicted(clients["bert"], texts)
    assert_same(found, hydra.predict(texts, tokenizer))
    assert found[0]["abstain"] is None and found[0]["prediction_set"] is None  # it was not calibrated
    assert found[1]["reason"] == "The text is empty." and found[2]["truncated"] and not found[0]["truncated"]
    assert_same([predicted(clients["bert"], texts[3])], hydra.predict(texts[3:], tokenizer))


def test_clip_chooses_among_the_labels_of_the_request(folders, clients):
    hydra = load_trained(folders["clip"])
    processor = CLIPProcessor.from_pretrained(folders["clip"])
    parameters = {"candidate_labels": ["red", "green"], "hypothesis_template": "a {}."}
    found = predicted(clients["clip"], ENCODED, **parameters)
    assert_same(found, hydra.predict(PICTURES, processor, **parameters))


def test_many_at_once_are_each_answered_as_alone(clients):
    alone = [predicted(clients["vit"], image) for image in ENCODED]
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda place: predicted(clients["vit"], ENCODED[place % 3]), range(24)))
    assert_same(found, [alone[place % 3] for place in range(24)])


def test_managed_containers_find_the_same_under_their_own_names(clients):
    client = clients["vit"]
    assert client.get("/ping").json() == client.get("/health").json() and client.get("/ping").status_code == 200
    request = {"inputs": ENCODED, "parameters": {"top_k": 2}}
    answered = client.post("/invocations", json=request)
    assert answered.status_code == 200 and answered.json() == client.post("/predict", json=request).json()
    assert client.post("/invocations", json={"inputs": "/etc/passwd"}).status_code == 422


# Limits


class Held(Answerer):
    """Answers when it is let. Has no number for one text, and no answer for another."""

    def __init__(self, may_answer: bool = True):
        super().__init__(None, None, "text")
        self.may_answer = threading.Event()
        self.is_asked = threading.Event()
        if may_answer:
            self.may_answer.set()

    def answer(self, inputs, parameters):
        self.is_asked.set()
        assert self.may_answer.wait(10)
        if "fail" in inputs:
            raise RuntimeError("secret")
        answers = [{"label": text, "score": math.nan if text == "nan" else 1.0, "scores": []} for text in inputs]
        return [answer for answer in answers if answer["label"] != "lost"]


def test_more_requests_than_may_wait_are_told_to_come_again():
    held = Held(may_answer=False)
    with TestClient(create_app(held, max_queue=1)) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.post, "/predict", json={"inputs": "a"})
        assert held.is_asked.wait(10)
        response = client.post("/predict", json={"inputs": "b"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json() == {"error": "1 requests wait already: try again"}
        held.may_answer.set()
        assert first.result().json()["label"] == "a"
        assert client.post("/predict", json={"inputs": "b"}).status_code == 200


def test_a_failure_of_the_model_is_told_without_its_words_and_nobody_gets_the_answer_of_another():
    with TestClient(create_app(Held())) as client:
        for inputs in ("fail", ["lost", "a"]):
            response = client.post("/predict", json={"inputs": inputs})
            assert response.status_code == 500 and "secret" not in response.text and list(response.json()) == ["error"]
        assert client.post("/predict", json={"inputs": "a"}).json()["label"] == "a"
        numbers = client.post("/predict", json={"inputs": ["nan", "a"]}).json()
    assert [answer["score"] for answer in numbers] == [None, 1.0], "JSON has no NaN"


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


def test_clients_with_slow_bodies_keep_nobody_out_and_leave_no_traceback(caplog):
    app = create_app(Held(), max_queue=2)

    async def talk():
        ends = asyncio.Event()
        async with app.router.lifespan_context(app):
            slow = [asyncio.create_task(posted(app, [b"{"], ends)) for _ in range(70)]
            await asyncio.sleep(0)
            quick = await posted(app, [b'{"inputs": ', b'"a"}'])
            assert not any(task.done() for task in slow)
            ends.set()
            return quick, await asyncio.gather(*slow)

    assert asyncio.run(talk()) == (200, [400] * 70) and app.state.requests == 0 and not caplog.records


def test_slow_bodies_have_a_limit_in_time_and_all_together_in_memory(monkeypatch):
    monkeypatch.setattr(server, "SECONDS_FOR_BODY", 0.01)
    app = create_app(Held(), max_queue=2, max_body=100)

    async def talk():
        return await asyncio.gather(*(posted(app, [b"{" * 90], asyncio.Event()) for _ in range(3)))

    assert asyncio.run(talk()) == [408, 408, 503]
    assert asyncio.run(talk()) == [408, 408, 503], "what is held is let go"


# Metrics


def number(text: str, name: str, **labels) -> float:
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name} with {labels}")


def test_metrics_count_requests_inputs_and_refusals(folders):
    with TestClient(create_app(asked(folders["images"]))) as client:
        answers = predicted(client, ENCODED)
        assert client.post("/predict", json={"inputs": "no image"}).status_code == 422
        answers.append(predicted(client, base64_of(PICTURES[0].resize((1, 1)).resize((8, 8)))))
        text = client.get("/metrics").text
    assert number(text, "hydra_requests_total", status=200) == 2
    assert number(text, "hydra_requests_total", status=422) == 1
    assert number(text, "hydra_inputs_total") == 4
    assert number(text, "hydra_epistemic_nats_total") == pytest.approx(sum(each["epistemic"] for each in answers))
    assert number(text, "hydra_abstentions_total") == sum(answer["abstain"] for answer in answers)
    assert number(text, "hydra_request_seconds_count") == number(text, "hydra_request_seconds_bucket", le="+Inf") == 3
