"""The protocols of vLLM and KServe, and the metrics: the answers of /predict in other forms."""

import re

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from hydra_transformers.hub.handler import Answerer, RequestError
from hydra_transformers.serving import HydraPredictor, create_app
from hydra_transformers.serving.prometheus import Metrics
from hydra_transformers.serving.protocols import Forms
from tests.serving.tiny import base64_of
from tests.tiny_data import CLASSES, pictures, save_bert


PICTURES = [base64_of(image) for image in pictures([0, 1, 2], seed=4)]
TEXTS = ["a good film", "bad", "a film of joy"]
PAIRS = [{"text": "good", "text_pair": text} for text in TEXTS]


@pytest.fixture(scope="module")
def clients(folders):
    apps = {name: create_app(HydraPredictor(folders[name], device="cpu")) for name in ("images", "texts", "clip")}
    with TestClient(apps["images"]) as images, TestClient(apps["texts"]) as texts, TestClient(apps["clip"]) as clip:
        yield {"images": images, "texts": texts, "clip": clip}


def posted(client: TestClient, path: str, body: dict) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def predicted(client: TestClient, inputs: list, **parameters) -> list[dict]:
    return posted(client, "/predict", {"inputs": inputs, "parameters": {"top_k": 5, **parameters}})


def scores_of(answer: dict, names: list[str]) -> list[float]:
    found = {each["label"]: each["score"] for each in answer["scores"]}
    return [found[name] for name in names]


def close(values: list[float]):
    return pytest.approx(values, abs=1e-6)


# vLLM


def test_classify_gives_labels_and_probabilities_in_the_order_of_the_classes(clients):
    for name, inputs, model, names in (
        ("images", PICTURES, "tiny-hydra", CLASSES),
        ("texts", TEXTS, "text-hydra", ["LABEL_0", "LABEL_1"]),
    ):
        found = posted(clients[name], "/classify", {"model": model, "input": inputs})
        assert found["object"] == "list" and found["model"] == model and set(found["usage"].values()) <= {0, None}
        for place, (item, answer) in enumerate(zip(found["data"], predicted(clients[name], inputs), strict=True)):
            assert (item["index"], item["label"], item["num_classes"]) == (place, answer["label"], len(names))
            assert item["probs"] == close(scores_of(answer, names))
            for field in ("abstain", "prediction_set"):
                assert item[field] == answer[field]
            assert item["epistemic"] == close(answer["epistemic"])
    [one] = posted(clients["texts"], "/classify", {"input": TEXTS[0]})["data"]
    assert one["label"] == found["data"][0]["label"]


def test_score_and_rerank_give_the_probability_of_the_second_class(clients):
    expected = [scores_of(answer, ["LABEL_0", "LABEL_1"])[1] for answer in predicted(clients["texts"], PAIRS)]
    for path in ("/score", "/v1/score"):
        found = posted(clients["texts"], path, {"model": "text-hydra", "text_1": "good", "text_2": TEXTS})
        assert [item["score"] for item in found["data"]] == close(expected)
    equal = posted(clients["texts"], "/score", {"text_1": ["good"] * 3, "text_2": TEXTS})
    assert [item["score"] for item in equal["data"]] == close(expected)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = posted(clients["texts"], path, {"query": "good", "documents": TEXTS, "top_n": 2})["results"]
        order = sorted(range(3), key=lambda place: -expected[place])[:2]
        assert [item["index"] for item in found] == order
        assert [item["relevance_score"] for item in found] == close([expected[place] for place in order])
        assert [item["document"] for item in found] == [{"text": TEXTS[place]} for place in order]


# KServe


def test_kserve_v1_gives_the_answers_of_predict(clients):
    instances = [PICTURES[0], {"b64": PICTURES[1]}]
    found = posted(clients["images"], "/v1/models/tiny-hydra:predict", {"instances": instances})
    expected = predicted(clients["images"], PICTURES[:2])
    assert [item["label"] for item in found["predictions"]] == [answer["label"] for answer in expected]
    assert [item["abstain"] for item in found["predictions"]] == [answer["abstain"] for answer in expected]
    assert clients["images"].get("/v1/models").json()["models"] == ["tiny-hydra"]
    assert clients["images"].get("/v1/models/tiny-hydra").json() == {"name": "tiny-hydra", "ready": True}
    body = {"instances": PICTURES, "parameters": {"candidate_labels": ["cat", "dog"]}}
    assert posted(clients["clip"], "/v1/models/clip-hydra:predict", body)["predictions"][0]["label"] in ("cat", "dog")


def tensor(data: list, name: str = "text") -> dict:
    return {"name": name, "shape": [len(data)], "datatype": "BYTES", "data": data}


def test_kserve_v2_gives_tensors(clients):
    expected = predicted(clients["images"], PICTURES)
    body = {"id": "7", "inputs": [tensor(PICTURES, "image")]}
    found = posted(clients["images"], "/v2/models/tiny-hydra/infer", body)
    assert (found["model_name"], found["model_version"], found["id"]) == ("tiny-hydra", "1", "7")
    outputs = {each["name"]: each for each in found["outputs"]}
    assert outputs["label"]["data"] == [answer["label"] for answer in expected]
    assert outputs["probabilities"]["shape"] == [3, 3] and outputs["probabilities"]["data"] == close(
        [score for answer in expected for score in scores_of(answer, CLASSES)]
    )
    assert outputs["abstain"]["data"] == [answer["abstain"] for answer in expected]
    assert set(outputs["abstain"]["data"]) == {True, False}
    assert outputs["prediction_set"]["data"] == [
        name in answer["prediction_set"] for answer in expected for name in CLASSES
    ]
    about = clients["images"].get("/v2/models/tiny-hydra").json()
    for each in about["outputs"]:
        assert outputs[each["name"]]["datatype"] == each["datatype"]
        assert len(outputs[each["name"]]["shape"]) == len(each["shape"])
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny-hydra/ready"):
        assert clients["images"].get(path).status_code == 200
    pairs = [tensor(["good"] * 3), tensor(TEXTS, "text_pair")]
    body = {"inputs": pairs, "outputs": [{"name": "score"}]}
    [only] = posted(clients["texts"], "/v2/models/text-hydra/versions/1/infer", body)["outputs"]
    assert only["data"] == close([answer["score"] for answer in predicted(clients["texts"], PAIRS)])
    names = [
        each["name"]
        for each in posted(clients["texts"], "/v2/models/text-hydra/infer", {"inputs": pairs[:1]})["outputs"]
    ]
    assert "label" in names and "abstain" not in names  # it was not calibrated
    body = {"inputs": [tensor(PICTURES, "image")], "parameters": {"candidate_labels": ["cat", "dog"]}}
    outputs = posted(clients["clip"], "/v2/models/clip-hydra/infer", body)["outputs"]
    assert {each["name"]: each["shape"] for each in outputs}["probabilities"] == [3, 2]


def test_a_model_of_numbers_ranks_pairs_and_has_no_classes(folders, tmp_path):
    backbone = save_bert(tmp_path / "bert")
    config = BertConfig.from_pretrained(backbone, num_labels=1, problem_type="regression")
    torch.manual_seed(0)
    reward = BertForSequenceClassification(config)
    predictor = HydraPredictor(reward, AutoTokenizer.from_pretrained(backbone), name="reward")
    with TestClient(create_app(predictor)) as client:
        expected = [answer["scores"][0]["score"] for answer in predicted(client, PAIRS)]
        found = posted(client, "/score", {"text_1": "good", "text_2": TEXTS})
        assert [item["score"] for item in found["data"]] == close(expected)
        pairs = [tensor(["good"] * 3), tensor(TEXTS, "text_pair")]
        outputs = posted(client, "/v2/models/reward/infer", {"inputs": pairs})["outputs"]
        outputs = {each["name"]: each for each in outputs}
        assert outputs["values"]["shape"] == [3, 1] and outputs["values"]["data"] == close(expected)
        assert "label" not in outputs and "probabilities" not in outputs
        refused = client.post("/classify", json={"input": "a"})
    assert refused.status_code == 422 and "gives numbers and has no classes" in refused.json()["error"]


@pytest.mark.parametrize(
    ("client", "path", "body", "status", "sentence"),
    [
        ("texts", "/classify", {"input": "a", "model": "another"}, 404, "there is no model 'another' here"),
        ("texts", "/v1/models/another:predict", {"instances": ["a"]}, 404, "its name is text-hydra"),
        ("texts", "/classify", {"inputs": "a"}, 422, "the request has no input"),
        ("texts", "/classify", {"input": [3]}, 422, r"inputs\[0\] is a number"),
        ("texts", "/classify", [], 422, "the request is not an object"),
        ("clip", "/classify", {"input": "a"}, 422, "chooses among the candidate_labels of a request"),
        ("images", "/score", {"text_1": "a", "text_2": "b"}, 422, "gives no score to a pair of texts"),
        ("texts", "/score", {"text_1": ["a", "b"], "text_2": ["b"]}, 422, "text_1 has 2 texts and text_2 1"),
        ("texts", "/rerank", {"query": "a", "documents": ["b"], "top_n": "all"}, 422, "top_n must be"),
        ("texts", "/rerank", {"query": "a", "documents": ["b"] * 17}, 422, "inputs has 17 entries: send 1 to 16"),
        ("texts", "/v1/models/text-hydra:predict", {"instances": "a"}, 422, "instances must be a list"),
        ("texts", "/v2/models/text-hydra/infer", {"inputs": []}, 422, "inputs must be a list of tensors"),
        (
            "texts",
            "/v2/models/text-hydra/infer",
            {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a"]}]},
            422,
            "has 1 entries, and another shape",
        ),
        (
            "texts",
            "/v2/models/text-hydra/infer",
            {"inputs": [{"name": "text", "shape": [1], "datatype": "FP32", "data": [1.0]}]},
            422,
            "must be BYTES",
        ),
        (
            "texts",
            "/v2/models/text-hydra/infer",
            {"inputs": [tensor(["a"])], "outputs": [{"name": "mood"}]},
            422,
            "outputs has an unknown 'mood'",
        ),
        (
            "texts",
            "/v2/models/text-hydra/infer",
            {"inputs": [tensor(["a"])], "outputs": [{"name": []}]},
            422,
            r"outputs has an unknown '\[\]'",
        ),
        (
            "texts",
            "/v2/models/text-hydra/infer",
            {"inputs": [tensor(["a"]) | {"name": []}]},
            422,
            "inputs must be a list of tensors",
        ),
    ],
)
def test_what_a_protocol_refuses(client, path, body, status, sentence, clients):
    response = clients[client].post(path, json=body)
    assert response.status_code == status and re.search(sentence, response.json()["error"]), response.text


# Metrics


def number(text: str, name: str, **labels) -> float:
    for line in text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name} with {labels}")


def test_metrics_count_requests_inputs_and_refusals(folders):
    with TestClient(create_app(HydraPredictor(folders["images"], device="cpu"))) as client:
        answers = predicted(client, PICTURES)
        posted(client, "/classify", {"input": PICTURES[:1]})
        assert client.post("/predict", json={"inputs": "no image"}).status_code == 422
        empty = pictures([0])[0].resize((1, 1)).resize((8, 8))
        posted(client, "/predict", {"inputs": base64_of(empty)})
        response = client.get("/metrics")
    text = response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert number(text, "hydra_requests_total", path="/predict", status=200) == 2
    assert number(text, "hydra_requests_total", path="/predict", status=422) == 1
    assert number(text, "hydra_requests_total", path="/classify", status=200) == 1
    assert number(text, "hydra_inputs_total") == 5
    refused = [*answers, answers[0]]
    by_cause = {
        cause: number(text, "hydra_refused_total", cause=cause) for cause in ("detector", "empty", "not_a_number")
    }
    assert by_cause["detector"] + by_cause["empty"] == sum(answer["abstain"] for answer in refused) + 1
    assert by_cause["not_a_number"] == 0 and by_cause["detector"] >= sum(answer["abstain"] for answer in refused)
    assert number(text, "hydra_request_seconds_count") == number(text, "hydra_request_seconds_bucket", le="+Inf") == 4
    assert number(text, "hydra_requests_in_flight") == 0
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) hydra_\w+ .+|hydra_\w+\{(\w+=\"[^\"]*\",?)+\} [0-9.]+", line), line


def test_refusals_are_counted_by_their_cause():
    metrics = Metrics("m")
    reasons = ["msp is 0.6, above the threshold 0.2.", "msp of 'Rome' is 0.6, above the threshold 0.2."]
    reasons += ["The score is 0.1, below the threshold 0.2.", "Every label is too close to its threshold."]
    reasons += ["The text is empty.", "The answer is not a number.", "The image has one colour only."]
    metrics.count_answers([{"abstain": True, "reason": reason, "epistemic": None} for reason in reasons])
    metrics.count_answers([{"abstain": False, "reason": None, "epistemic": 0.5}])
    assert metrics.refused == {"detector": 4, "empty": 2, "not_a_number": 1}
    assert metrics.inputs == 8 and metrics.epistemic == 0.5


def test_entities_are_asked_for_elsewhere():
    forms = Forms("tagger", ["O", "B-PER"], "tokens")
    for read, body in (
        (forms.read_classify, {"input": "a"}),
        (forms.read_score, {"text_1": "a", "text_2": "b"}),
        (forms.read_tensors, {"inputs": [tensor(["a"])]}),
    ):
        with pytest.raises(RequestError, match=r"tagger (finds entities|gives no score)"):
            read(body)
    assert forms.read_instances({"instances": ["a"]})["inputs"] == ["a"]


def test_names_in_metrics_are_escaped():
    answerer = Answerer(None, None, "text")
    answerer.about = {"model": 'a "quoted" name'}
    with TestClient(create_app(answerer)) as client:
        assert r'model="a \"quoted\" name"' in client.get("/metrics").text


# A guardrail


@pytest.mark.slow
def test_nemo_guardrails_asks_a_hydra_by_configuration(folders, tmp_path):
    """With the real client, where it is installed."""
    pytest.importorskip("nemoguardrails", reason="nemoguardrails is not installed")
    import asyncio
    import socket
    import threading
    import time

    import uvicorn
    from nemoguardrails import RailsConfig
    from nemoguardrails.library.hf_classifier.actions import _classify_and_check

    from tests.pages import ROOT

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    predictor = HydraPredictor(folders["texts"], device="cpu")
    server = uvicorn.Server(uvicorn.Config(create_app(predictor), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        [block] = re.findall(r"```yaml\n(rails:.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)
        labels = predictor({"text": TEXTS})["label"]
        block = block.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}").replace("my-hydra", "text-hydra")
        block = block.replace("toxic", labels[0]).replace("0.8", "0.01")
        config = RailsConfig.from_content(yaml_content=f"models: []\n{block}")
        allowed = [asyncio.run(_classify_and_check("hydra", text, config)) for text in TEXTS]
        assert allowed == [label != labels[0] for label in labels] and not allowed[0]
    finally:
        server.should_exit = True
        thread.join(10)
