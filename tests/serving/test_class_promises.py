"""The server decides by the threshold of each predicted class."""

import pandas
import pytest
from fastapi.testclient import TestClient
from transformers import ViTImageProcessorPil

from hydra_transformers import load_data
from hydra_transformers.models.auto import load_trained
from hydra_transformers.serving import create_app
from hydra_transformers.serving.jobs import predict_data
from hydra_transformers.uncertainty import Monitor
from tests.serving.tiny import asked, base64_of
from tests.tiny_data import picture_rows, pictures


PICTURES = pictures([0, 1, 2] * 5, seed=4)


@pytest.fixture(scope="module")
def folder(folders, tmp_path_factory):
    hydra, folder = load_trained(folders["images"]), tmp_path_factory.mktemp("by-class") / "hydra"
    processor = ViTImageProcessorPil.from_pretrained(folders["images"])
    target = {"risk": {"green": 0.001, "*": 0.9}}
    hydra.calibrate(load_data(picture_rows(90), processor), target=target, confidence=0.5, alpha=None)
    hydra.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_server_and_jobs_decide_like_the_model(folder, tmp_path):
    expected = load_trained(folder).eval().predict(PICTURES, ViTImageProcessorPil.from_pretrained(folder))
    assert {row["abstain"] for row in expected} == {True, False}
    assert all(row["abstain"] and row["threshold"] == "-inf" for row in expected if row["label"] == "green")
    with TestClient(create_app(asked(folder), monitor=tmp_path / "server.json")) as client:
        answers = client.post("/predict", json={"inputs": [base64_of(image) for image in PICTURES]}).json()
    assert [answer["abstain"] for answer in answers] == [row["abstain"] for row in expected]
    assert [answer["reason"] for answer in answers] == [row["reason"] for row in expected]
    rows = [{"image": image} for image in PICTURES]
    predict_data(folder, rows, tmp_path / "out.csv", monitor=tmp_path / "job.json")
    table = pandas.read_csv(tmp_path / "out.csv")
    assert table["answer"].isna().tolist() == [row["abstain"] for row in expected]
    for name in ("server", "job"):
        monitor = Monitor.read(tmp_path / f"{name}.json")
        assert monitor.state()["answered"].rows == len(PICTURES)
        assert monitor.state()["answered"].rate == sum(row["abstain"] for row in expected) / len(PICTURES)
