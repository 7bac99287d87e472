"""The handler that is published with a model: what an Inference Endpoint calls."""

import ast
import io
import json
from pathlib import Path

import pytest
from transformers import ViTImageProcessorPil

from hydra_transformers.hub import handler as published
from hydra_transformers.hub import publishing
from hydra_transformers.hub.handler import EndpointHandler, RequestError
from hydra_transformers.models.auto import INPUTS, load_trained
from hydra_transformers.serving import answerer
from tests.fresh_process import run_without_package
from tests.serving.tiny import base64_of, save_image_models
from tests.tiny_data import pictures


PICTURES = pictures([0, 1, 2], seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As `push` fills a repository."""
    saved = save_image_models(tmp_path_factory.mktemp("vit"))[0]
    staged = tmp_path_factory.mktemp("repository")
    publishing._stage(staged, load_trained(saved), ViTImageProcessorPil.from_pretrained(saved), None)
    return staged


def test_it_answers_as_predict_whatever_an_image_comes_as(folder):
    handler = EndpointHandler(str(folder))
    expected = load_trained(folder).predict(PICTURES, ViTImageProcessorPil.from_pretrained(folder), top_k=2)
    file = io.BytesIO()
    PICTURES[2].save(file, "PNG")
    found = handler({"inputs": [PICTURES[0], base64_of(PICTURES[1]), file.getvalue()], "parameters": {"top_k": 2}})
    assert [each["label"] for each in found] == [each["label"] for each in expected]
    assert [each["score"] for each in found] == pytest.approx([each["score"] for each in expected], abs=1e-5)
    assert [each["abstain"] for each in found] == [each["abstain"] for each in expected]
    assert handler({"inputs": PICTURES[0]})["label"] == expected[0]["label"]
    with pytest.raises(RequestError, match="the request has no inputs"):
        handler({"text": "a"})


def statements(module) -> list[str]:
    """Return what stands in a module, but for its docstring and imports, without comments and places."""
    _, *body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    return [ast.dump(node) for node in body if not isinstance(node, (ast.Import, ast.ImportFrom))]


def test_the_server_answers_with_the_same_code():
    only_published = [node for node in statements(published) if node not in statements(answerer)]
    assert [node.split("'")[1] for node in only_published] == ["KINDS", "PROCESSORS", "EndpointHandler"]
    both = [node for node in statements(published) if node in statements(answerer)]
    assert both == statements(answerer) and len(both) > 15


def test_it_reads_what_the_package_reads():
    assert published.KINDS == INPUTS


IN_AN_ENDPOINT = """
import sys
folder, request = sys.argv[1:]
sys.path.insert(0, folder)
import json
from handler import EndpointHandler
print(json.dumps(EndpointHandler(folder)(json.loads(request))))
"""


@pytest.mark.slow
def test_it_needs_nothing_but_the_files_beside_it(folder, tmp_path):
    request = {"inputs": [base64_of(image) for image in PICTURES]}
    result = run_without_package(IN_AN_ENDPOINT, folder, json.dumps(request), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    expected = EndpointHandler(str(folder))(request)
    assert [(one["label"], one["abstain"]) for one in found] == [(one["label"], one["abstain"]) for one in expected]
    assert [each["epistemic"] for each in found] == pytest.approx([each["epistemic"] for each in expected], abs=1e-6)


@pytest.mark.parametrize(
    "content, is_replaced",
    [(b"# mine\n", False), (publishing.HANDLER.read_bytes() + b"# older\n", True), (None, True)],
)
def test_a_handler_of_the_owners_own_is_not_replaced(content, is_replaced, hub, tmp_path):
    (tmp_path / "handler.py").write_bytes(publishing.HANDLER.read_bytes())
    hub.files = {} if content is None else {"handler.py": content}
    publishing._leave_own_handler(hub, "me/tiny", tmp_path)
    assert (tmp_path / "handler.py").exists() is is_replaced
