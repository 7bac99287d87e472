"""The page opens nothing but what was sent to it, whatever a program asks of its API."""

import json
import os
import shutil
from functools import cache
from pathlib import Path

import httpx
import pytest
from transformers import Wav2Vec2FeatureExtractor

from hydra_transformers.serving.predictor import HydraPredictor
from tests.data.test_audio import tone, wav
from tests.families import WAV2VEC2
from tests.serving.tiny import asked
from tests.tiny_data import pictures


pytestmark = pytest.mark.slow

HTTP = httpx.Client(verify=False)  # one for all: each would read all certificates, and none is asked for
METAS = [{}, {"meta": {}}, {"meta": None}, {"meta": {"_type": "x"}}, {"meta": {"_type": "gradio.FileData"}}]


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A file of the server that nobody sent."""
    path = tmp_path_factory.mktemp("private") / "red.png"
    pictures([0])[0].save(path)
    return path


@pytest.fixture(scope="module")
def server(pages, folders, picture):
    page = pages.launch_page(asked(folders["images"]), picture.parent)
    yield page.local_url.rstrip("/")
    page.close(verbose=False)


@cache
def number_of(server: str, event: str) -> int:
    config = HTTP.get(f"{server}/config").json()
    return next(each["id"] for each in config["dependencies"] if [to[1] for to in each["targets"]] == [event])


def answer_to(server: str, values: list, event: str = "change") -> dict:
    """What the server says to a program that sends `values` in place of what the page sends."""
    question = {"data": values, "fn_index": number_of(server, event), "session_hash": os.urandom(8).hex()}
    joined = HTTP.post(f"{server}/gradio_api/queue/join", json=question)
    if joined.is_error:
        return {"error": None}
    data = {"session_hash": question["session_hash"]}
    with HTTP.stream("GET", f"{server}/gradio_api/queue/data", params=data, timeout=10) as events:
        for line in events.iter_lines():
            if '"process_completed"' in line:
                return json.loads(line.removeprefix("data:"))["output"]
    raise AssertionError("no answer")


def assert_refused(answer: dict) -> None:
    from hydra_transformers.serving.page import ONLY_WHAT_WAS_SENT

    assert "data" not in answer and answer["error"] in (None, ONLY_WHAT_WAS_SENT), answer


def uploaded(server: str, path: Path) -> str:
    with path.open("rb") as file:
        return HTTP.post(f"{server}/gradio_api/upload", files={"files": file}).json()[0]


@pytest.fixture(scope="module")
def cached(pages, picture):
    """Things in the folder of uploads that nobody uploaded here."""
    folder = Path(pages.gradio.utils.get_upload_folder()) / "test_page_files"
    folder.mkdir(parents=True)
    (folder / "link.png").symlink_to(picture)
    (folder / "folder").symlink_to(picture.parent)
    os.mkfifo(folder / "fifo.png")
    shutil.copy(picture, folder / "other.png")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("meta", METAS, ids=json.dumps)
def test_no_file_is_opened_that_was_not_sent(server, picture, cached, meta, tmp_path):
    os.mkfifo(tmp_path / "fifo.png")
    paths = [picture, tmp_path, tmp_path / "fifo.png", tmp_path / "none.png", "", "x.png"]
    paths += ["/etc/passwd", "/proc/self/environ", "/dev/zero", f"{cached}/../../../..{picture}"]
    paths += [cached / name for name in ("link.png", "fifo.png", "other.png", "folder/red.png")]
    paths += ["http://127.0.0.1:9/red.png", "https://example.com/red.png", "file:///etc/passwd"]
    # Metadata changes which of Gradio's classes reads a path, not how: two see all paths.
    for path in paths if meta in (METAS[0], METAS[-1]) else [picture, cached / "link.png", "/etc/passwd"]:
        assert_refused(answer_to(server, [{"path": str(path)} | meta]))


def test_what_was_sent_is_answered_until_a_link_takes_its_place(server, picture, tmp_path):
    pictures([1])[0].save(tmp_path / "green.png")
    path = uploaded(server, tmp_path / "green.png")
    for meta in METAS[:1] + METAS[-1:]:
        assert "hydra-card" in answer_to(server, [{"path": path, "orig_name": "<b>.png"} | meta])["data"][0]
    os.unlink(path)
    os.symlink(picture, path)
    try:
        assert_refused(answer_to(server, [{"path": path, "meta": {"_type": "gradio.FileData"}}]))
        assert_refused(answer_to(server, [{"path": path}]))
    finally:
        os.unlink(path)
    os.mkfifo(path)
    try:
        said = answer_to(server, [{"path": path, "orig_name": "red.png"}])["data"][0]
        assert "red.png cannot be opened: send it again." in said and "Errno" not in said
    finally:
        os.unlink(path)


def test_examples_are_answered_and_no_other_file_is_shown(server, picture):
    for index in (7, -9, "x", {"path": "/etc/passwd"}):
        assert_refused(answer_to(server, [index], "click"))
    found = answer_to(server, [0], "click")["data"][0]
    assert "hydra-card" in answer_to(server, [found])["data"][0]
    for path in (picture, "/etc/passwd"):
        assert HTTP.get(f"{server}/gradio_api/file={path}").status_code == 403


def test_a_page_of_texts_opens_and_fetches_nothing(pages, folders, picture):
    page = pages.launch_page(asked(folders["texts"]))
    try:
        for path in (str(picture), "https://example.com/red.png"):
            assert_refused(answer_to(page.local_url.rstrip("/"), [{"path": path} | METAS[-1]], "click"))
    finally:
        page.close(verbose=False)


def test_audio_is_sent_clicked_on_and_answered(pages, tmp_path):
    model = HydraPredictor(WAV2VEC2.fused().float(), Wav2Vec2FeatureExtractor(), name="tones")
    private = tmp_path / "mine" / "low.wav"
    sent = tmp_path / "high.wav"
    private.parent.mkdir()
    private.write_bytes(wav(tone(0.05)))
    sent.write_bytes(wav(tone(1.0)))
    page = pages.launch_page(model, private.parent)
    try:
        server = page.local_url.rstrip("/")
        path = uploaded(server, sent)
        shown = answer_to(server, [{"path": path, "orig_name": "high.wav"} | METAS[-1]])
        assert shown["data"][0].count('class="hydra-card"') == 1 and model.class_names[0] in shown["data"][0]
        for meta in METAS:
            assert_refused(answer_to(server, [{"path": str(private)} | meta]))
        clicked = answer_to(server, [0], "click")["data"][0]["path"]
        assert clicked != str(private) and Path(clicked).read_bytes() == private.read_bytes()
        assert "hydra-card" in answer_to(server, [{"path": clicked} | METAS[-1]])["data"][0]
    finally:
        page.close(verbose=False)
