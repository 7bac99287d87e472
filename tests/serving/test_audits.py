"""`predict --audit`, `watch --labels` and `calibrate --add`: answer, audit, watch, calibrate again."""

import json

import pandas
import pytest
from transformers import AutoTokenizer

from hydra_transformers import load_data
from hydra_transformers.cli import main
from hydra_transformers.models.auto import load_trained
from hydra_transformers.serving import audit_files, jobs
from hydra_transformers.serving.jobs import predict_data
from hydra_transformers.uncertainty import Monitor
from hydra_transformers.uncertainty.audits import draw_for_audit
from tests.tiny_data import WORDS


def rows_of(count):
    """Texts of three words, an id with zeros before it, and a column that has the name of ours."""
    texts = [
        " ".join(WORDS[5 + (7 * row + place * (row // 5 + 1)) % (len(WORDS) - 5)] for place in range(3))
        for row in range(count)
    ]
    return pandas.DataFrame({"text": texts, "id": [f"{row:05d}" for row in range(count)], "audit": ["theirs"] * count})


@pytest.fixture(scope="module")
def model(folders, tmp_path_factory):
    """A Hydra of texts that is calibrated for a risk, and the labels that are right for its rows."""
    folder = tmp_path_factory.mktemp("audited") / "calibrated"
    hydra = load_trained(folders["texts"])
    tokenizer = AutoTokenizer.from_pretrained(folders["texts"])
    rows = rows_of(200)
    names = [answer["label"] for answer in hydra.predict(list(rows["text"]), tokenizer)]
    data = load_data(rows[["text"]].assign(label=names), hydra.config, processor=tokenizer)
    hydra.calibrate(data, target={"risk": 0.2}, alpha=0.2)
    hydra.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    rows_of(400).to_csv(tmp_path / "texts.csv", index=False)
    return tmp_path / "texts.csv"


def fill_in(file, wrong_every):
    """Label the audited rows as a reviewer does: every so manieth answer is wrong."""
    table = pandas.read_csv(file, dtype=str, keep_default_na=False)
    is_wrong = [place % wrong_every == 0 for place in range(len(table))]
    names = sorted(set(table["prediction"]) | {"other"})
    table["reviewed_label"] = [
        next(name for name in names if name != prediction) if wrong else prediction
        for prediction, wrong in zip(table["prediction"], is_wrong, strict=True)
    ]
    table.to_csv(file, index=False)
    return is_wrong


def run(*words):
    assert main([str(word) for word in words]) == 0


def test_the_loop_of_answers_audit_promise_and_calibration(model, data, tmp_path, capsys):
    answers = tmp_path / "answers.csv"
    monitor = tmp_path / "monitor.json"
    again = tmp_path / "again"
    run("predict", model, data, "--column", "text", "--output", answers, "--audit", 0.4, "--monitor", monitor)
    table = pandas.read_csv(answers, dtype=str, keep_default_na=False)
    to_review = pandas.read_csv(tmp_path / "answers.audit.csv", dtype=str, keep_default_na=False)
    assert f"answers.audit.csv: {len(to_review)} of these answers to be checked" in capsys.readouterr().out
    marked = table[table["audit"] == "True"]
    assert marked["row"].tolist() == to_review["row"].tolist() and 60 < len(marked) < 220
    assert (marked["answer"] != "").all() and marked["id"].tolist() == to_review["id"].tolist()
    assert set(table["input_audit"]) == {"theirs"}
    assert list(to_review) == [
        "row",
        "text",
        "id",
        "input_audit",
        "prediction",
        "reviewed_label",
        "audit_code",
        "audit_id",
    ]
    answered = table[table["answer"] != ""]["row"].astype(int)
    drawn = draw_for_audit(to_review["audit_id"][0], answered, 0.4)
    assert answered[drawn].astype(str).tolist() == marked["row"].tolist()

    wrong = fill_in(tmp_path / "answers.audit.csv", wrong_every=2)
    for _ in range(2):  # counts once
        run("watch", monitor, "--labels", tmp_path / "answers.audit.csv")
    shown = capsys.readouterr()
    assert f"{len(wrong)} audited answers are labelled" in shown.out and "Wrong answers: broken." in shown.out
    assert "labels that no audited row has as its prediction" not in shown.err
    state = Monitor.read(tmp_path / "monitor.labels.json").state()
    assert state["risk"].rows == len(wrong) and state["inputs"].rows == 0
    assert Monitor.read(monitor).state()["risk"].rows == 0, "its process may write it at any time"
    run("watch", monitor)
    assert "Wrong answers: broken." in capsys.readouterr().out

    words = ["calibrate", model, "--add", tmp_path / "answers.audit.csv", "--risk", 0.7, "--output", again]
    run(*words, "--verbose")
    before, after = (json.loads((folder / "config.json").read_text())["decision"] for folder in (model, again))
    assert after["threshold"] <= before["threshold"] and after["validation"]["risk"] == 0.7
    assert f"Of {len(wrong)} audited answers" in capsys.readouterr().out
    run("predict", again, "some text", "--json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["threshold"] == after["threshold"]
    other = [*words[:-1], tmp_path / "other"]
    other[1] = again
    assert main([str(word) for word in other]) == 2
    assert "is of another calibration than the model" in capsys.readouterr().err


def test_a_stopped_job_draws_the_same_rows_and_another_seed_draws_others(model, data, tmp_path, monkeypatch):
    def drawn(name, **settings):
        finished = predict_data(model, data, tmp_path / name, column="text", audit=0.3, **settings)
        rows = pandas.read_csv((tmp_path / name).with_suffix(".audit.csv"))["row"].tolist()
        assert finished.audited == len(rows) > 0
        return rows

    whole = drawn("whole.jsonl")
    assert whole == [row["row"] for row in map(json.loads, (tmp_path / "whole.jsonl").open()) if row["audit"]]
    assert drawn("other.jsonl", audit_seed=1) != whole
    monkeypatch.setattr(jobs, "ROWS_PER_PART", 128)
    link = jobs.os.link
    monkeypatch.setattr(jobs.os, "link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # when the reviewers' file is there, and the output is not
        drawn("stopped.jsonl")
    assert (tmp_path / "stopped.audit.csv").exists() and not (tmp_path / "stopped.jsonl").exists()
    monkeypatch.setattr(jobs.os, "link", link)
    first = pandas.read_csv(tmp_path / "stopped.audit.csv")["row"].tolist()
    assert drawn("stopped.jsonl") == first


def test_what_cannot_be_audited_is_refused_before_anything_is_predicted(model, folders, data, tmp_path, capsys):
    def refused(*words):
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    job = ["predict", model, data, "--column", "text", "--output", tmp_path / "a.csv"]
    assert "share between 0 and 1" in refused(*job, "--audit", 3)
    uncalibrated = ["predict", folders["texts"], data, "--column", "text", "--output", tmp_path / "a.csv"]
    assert "audit is for calibrated models" in refused(*uncalibrated, "--audit", 0.1)
    assert "--audit is for a data set" in refused("predict", model, "a text", "--audit", 0.1)
    (tmp_path / "a.audit.csv").write_text("mine")
    assert "a.audit.csv exists already" in refused(*job, "--audit", 0.1)
    assert (tmp_path / "a.audit.csv").read_text() == "mine" and not (tmp_path / "a.csv").exists()
    other = [*job[:-1], tmp_path / "b.csv", "--audit", 0.1, "--monitor"]
    assert "b.audit.csv, which is monitor: pass another output" in refused(*other, tmp_path / "." / "b.audit.csv")
    own = tmp_path / "c.audit.csv"
    rows_of(20).to_csv(own, index=False)
    words = ["predict", model, own, "--column", "text", "--output", tmp_path / "c.csv", "--audit", 0.1]
    assert "c.audit.csv, which is the data" in refused(*words)
    assert pandas.read_csv(own)["audit"].tolist() == ["theirs"] * 20
    assert not list(tmp_path.glob("b.*")) and not list(tmp_path.glob("c.csv*"))
    calibrate = ["calibrate", model, "--output", tmp_path / "new"]
    assert "--add lowers the threshold" in refused(*calibrate, "--add", data, "--coverage", 0.9)
    assert "there are no rows: pass --data" in refused(*calibrate, "--risk", 0.1)
    assert "pass the file that predict --audit wrote" in refused(*calibrate, "--risk", 0.1, "--add", data)
    assert "--labels is for one file" in refused("watch", "a.json", "b.json", "--labels", data)


@pytest.mark.parametrize("target", [{"missed": 0.5, "label": "LABEL_1"}, {"cost": {"wrong": 20, "review": 1}}, None])
def test_a_promise_that_audits_tell_nothing_of_is_named_before_anything_is_predicted(
    target, folders, data, tmp_path, monkeypatch
):
    hydra = load_trained(folders["texts"])
    tokenizer = AutoTokenizer.from_pretrained(folders["texts"])
    rows = rows_of(200)
    names = [answer["label"] for answer in hydra.predict(list(rows["text"]), tokenizer)]
    hydra.calibrate(load_data(rows[["text"]].assign(label=names), hydra.config, processor=tokenizer), target=target)
    said = []
    monkeypatch.setattr(audit_files.logger, "warning", said.append)
    monkeypatch.setattr(jobs.Job, "predicted", lambda *_: said.append("predicted") or pytest.fail("early"))
    with pytest.raises(pytest.fail.Exception):
        predict_data(hydra, data, tmp_path / "a.csv", column="text", audit=0.3, processor=tokenizer)
    assert "promises no share of wrong answers" in said[0] and said[1:] == ["predicted"]


def test_a_model_that_promises_a_risk_is_audited_without_a_warning(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(audit_files.logger, "warning", pytest.fail)
    predict_data(model, data, tmp_path / "a.csv", column="text", audit=0.3)
