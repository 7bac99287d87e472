"""`--monitor`: the server, `predict` and `watch` count what a calibrated model does."""

import itertools
import json

import pytest
from fastapi.testclient import TestClient

from hydra_transformers.cli import main
from hydra_transformers.serving import create_app, jobs, metrics
from hydra_transformers.serving.jobs import predict_data
from hydra_transformers.uncertainty import Monitor
from tests.serving.tiny import asked, base64_of
from tests.tiny_data import pictures


PICTURES = pictures([0, 1, 2] * 4, seed=4)


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    for number, image in enumerate(PICTURES):
        image.save(tmp_path / "data" / f"{number}.png")
    (tmp_path / "data" / "none.png").write_bytes(b"no image")
    rows = [
        f"{path.name}," for path in (tmp_path / "data").iterdir()
    ]  # a column with the name of a token classifier's
    (tmp_path / "data" / "metadata.csv").write_text("\n".join(["file_name,entities", *rows]))
    return tmp_path / "data"


def test_a_server_counts_its_predictions_and_shows_the_promises(folders, tmp_path):
    file = tmp_path / "monitor.json"
    for _ in range(2):  # the second goes on
        with TestClient(create_app(asked(folders["images"]), monitor=file)) as client:
            inputs = [base64_of(image) for image in PICTURES]
            answers = client.post("/predict", json={"inputs": inputs}).json()
            promises = client.get("/health").json()["promises"]
            shown = client.get("/metrics").text
    assert promises == {name: state.status for name, state in Monitor.read(file).state().items()}
    state = Monitor.read(file).state()
    assert state["inputs"].rows == 2 * len(PICTURES)
    assert state["answered"].rate == sum(answer["abstain"] for answer in answers) / len(answers)
    assert all(f'promise="{name}"' in shown for name in promises)


def test_two_servers_with_one_file_answer_and_do_not_overwrite_each_other(folders, tmp_path, monkeypatch, caplog):
    file = tmp_path / "monitor.json"
    body = {"inputs": [base64_of(image) for image in PICTURES]}
    monkeypatch.setattr(metrics.time, "monotonic", itertools.count(step=2.0).__next__)  # each save is due
    first, second = (metrics.WatchedPromises(asked(folders["images"]).model, file) for _ in range(2))
    with TestClient(create_app(asked(folders["images"]))) as client:
        answers = client.post("/predict", json=body).json()
    for watched in (first, second, second):
        watched.count(answers)
    assert Monitor.read(file).state()["inputs"].rows == len(PICTURES)
    assert second.monitor.state()["inputs"].rows == 2 * len(PICTURES)
    assert sum("cannot be saved" in record.message for record in caplog.records) == 2


def test_a_job_counts_each_row_once_even_if_it_was_stopped(folders, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "ROWS_PER_PART", 5)
    written = []
    write = jobs.write_atomically

    def stop_at_second(path, content):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(path)
        return write(path, content)

    settings = {"monitor": tmp_path / "monitor.json"}
    monkeypatch.setattr(jobs, "write_atomically", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        predict_data(folders["images"], data, tmp_path / "out.jsonl", **settings)
    monkeypatch.setattr(jobs, "write_atomically", write)
    predict_data(folders["images"], data, tmp_path / "out.jsonl", **settings)
    predict_data(folders["images"], data, tmp_path / "again.jsonl", **settings)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    state = Monitor.read(tmp_path / "monitor.json").state()
    assert state["inputs"].rows == len(PICTURES)  # not the broken file
    refused = sum(row["abstain"] for row in rows if row["prediction"] is not None)
    assert state["answered"].rate == refused / len(PICTURES)
    assert main(["watch", str(tmp_path / "monitor.json"), str(tmp_path / "monitor.json")]) == 0
    assert "Share answered: not known yet." in capsys.readouterr().out


def test_files_that_are_not_of_a_monitor_are_refused(folders, data, tmp_path, capsys):
    wrong = str(folders["images"] / "config.json")
    assert main(["watch", wrong]) == 2 and "not the state of a monitor" in capsys.readouterr().err
    words = ["predict", str(folders["images"]), str(data), "--output", str(tmp_path / "out.csv")]
    assert main([*words, "--monitor", wrong]) == 2
    assert "not the state of a monitor" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none.json")]) == 2
