"""The server decides by the threshold of each predicted class."""

import pandas
import pytest
from fastapi.testclient import TestClient
from transformers import ViTImageProcessorPil

from hydra_transformers import load_data
from hydra_transformers.hub.handler import EndpointHandler
from hydra_transformers.models.auto import load_trained
from hydra_transformers.serving import create_app
from hydra_transformers.serving.jobs import predict_data
from hydra_transformers.uncertainty import Monitor
from tests.serving.tiny import asked, base64_of
from tests.tiny_data import picture_rows, pictures


PICTURES = pictures([0, 1, 2] * 5, seed=4)


@pytest.fixture(scope="module")
def folder(folders, tmp_path_factory):
    hydra = load_trained(folders["images"])
    folder = tmp_path_factory.mktemp("by-class") / "hydra"
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


SITES = ["north", "south", "mars"] * 5


@pytest.fixture(scope="module")
def folder_by_site(folders, tmp_path_factory):
    hydra = load_trained(folders["images"])
    folder = tmp_path_factory.mktemp("by-site") / "hydra"
    processor = ViTImageProcessorPil.from_pretrained(folders["images"])
    rows = [{**row, "site": SITES[place % 2]} for place, row in enumerate(picture_rows(90))]
    target = {"risk": {"north": 0.001, "*": 0.9}}
    hydra.calibrate(load_data(rows, processor), target=target, by="site", confidence=0.5, alpha=None)
    hydra.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_server_handler_and_jobs_decide_by_the_column(folder_by_site, tmp_path):
    folder = folder_by_site
    processor = ViTImageProcessorPil.from_pretrained(folder)
    expected = load_trained(folder).eval().predict(PICTURES, processor, groups=SITES)
    assert {row["abstain"] for row, site in zip(expected, SITES, strict=True) if site != "mars"} == {True, False}
    images = [base64_of(image) for image in PICTURES]
    with TestClient(create_app(asked(folder), monitor=tmp_path / "server.json")) as client:
        answers = client.post("/predict", json={"inputs": images, "parameters": {"groups": SITES}}).json()
        without = client.post("/predict", json={"inputs": images}).json()
        for groups in (SITES[:2], "north", [1] * len(images)):
            refused = client.post("/predict", json={"inputs": images, "parameters": {"groups": groups}})
            assert refused.status_code == 422 and "the site of each input" in refused.text
    for field in ("abstain", "reason", "threshold"):
        assert [answer[field] for answer in answers] == [row[field] for row in expected]
    assert all(answer["abstain"] for answer in without)
    handled = EndpointHandler(str(folder))({"inputs": images, "parameters": {"groups": SITES}})
    assert [answer["abstain"] for answer in handled] == [row["abstain"] for row in expected]

    rows = [{"image": image, "site": site} for image, site in zip(PICTURES, SITES, strict=True)]
    predict_data(folder, rows, tmp_path / "out.csv", monitor=tmp_path / "job.json")
    table = pandas.read_csv(tmp_path / "out.csv")
    assert table["answer"].isna().tolist() == [row["abstain"] for row in expected]
    rate = sum(row["abstain"] for row in expected) / len(PICTURES)
    assert Monitor.read(tmp_path / "job.json").state()["answered"].rate == rate
    batch = {"image": [*PICTURES, "no-such-file.png"], "site": [*SITES, "north"]}
    columns = asked(folder)(batch)
    assert columns["abstain"] == [*(row["abstain"] for row in expected), None]
    with pytest.raises(ValueError, match="has no column 'site', by which"):
        predict_data(folder, [{"image": image} for image in PICTURES], tmp_path / "other.csv")
    with pytest.raises(ValueError, match="the batch has no column 'site', by which hydra answers"):
        asked(folder)({"image": PICTURES})
    with pytest.raises(ValueError, match="row 1 of the data has nothing in the column 'site'"):
        predict_data(
            folder,
            [{"image": image, "site": "ab"[: 1 - place]} for place, image in enumerate(PICTURES[:2])],
            tmp_path / "b.csv",
        )


def test_groups_are_refused_where_a_model_answers_by_none(folder):
    image = base64_of(PICTURES[0])
    with TestClient(create_app(asked(folder))) as client:
        refused = client.post("/predict", json={"inputs": image, "parameters": {"groups": ["north"]}})
    assert refused.status_code == 422 and "this model does not answer by groups" in refused.text
