"""Jobs: a data set comes back as its table with the answers; stops in between, bad rows, users' files."""

import csv
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import datasets
import pandas
import pyarrow.parquet
import pytest

from hydra_transformers.serving import HydraPredictor, jobs, predict_data, predictor
from tests.command_line import run
from tests.tiny_data import pictures


TEXTS = ["a good film", "bad", "a film of joy", "(empty)", "good good", "a", None, "bad film", "a bad film", "joy"]


@pytest.fixture
def reviews(tmp_path) -> Path:
    """Ten rows, of which the seventh has no text."""
    file = tmp_path / "reviews.csv"
    file.write_text("\n".join(["text,stars", *(f"{text or ''},{place}" for place, text in enumerate(TEXTS))]) + "\n")
    return file


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(jobs, "ROWS_PER_PART", 3)


def read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in path.read_text().splitlines()]


# The table


def test_columns_of_several_types_come_back_as_they_were(folders, tmp_path):
    ids = [1, "x", None, True, {"a": [1, "b"]}, "1", 2.5]
    nested = [{"k": value} for value in ids]
    data = tmp_path / "rows.jsonl"
    rows = zip(ids, nested, strict=True)
    data.write_text("".join(json.dumps({"text": "a film", "id": one, "answer": two}) + "\n" for one, two in rows))
    written = {}
    for suffix in (".jsonl", ".csv", ".parquet"):
        predict_data(folders["texts"], data, tmp_path / f"a{suffix}", device="cpu")
        written[suffix] = read(tmp_path / f"a{suffix}")
    assert [row["id"] for row in written[".jsonl"]] == ids
    assert [row["input_answer"] for row in written[".jsonl"]] == nested
    assert [row["id"] for row in written[".csv"]] == ["1", "x", "", "True", '{"a": [1, "b"]}', "1", "2.5"]
    in_json = [None if row["id"] is None else json.loads(row["id"]) for row in written[".parquet"]]
    assert in_json == ids


def test_a_column_of_several_types_is_not_read(folders, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a good film"}\n{"text": 5}\n')
    with pytest.raises(ValueError, match=r"the column 'text' of .* has values of several types, and .* reads texts"):
        predict_data(folders["texts"], data, tmp_path / "a.jsonl", column="text", device="cpu")


def test_columns_of_bytes_are_left_out_with_a_word(folders, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(jobs.logger, "warning", said.append)
    pandas.DataFrame({"text": ["a film"] * 4, "raw": [b"1"] * 4}).to_parquet(tmp_path / "rows.parquet")
    predict_data(folders["texts"], tmp_path / "rows.parquet", tmp_path / "a.jsonl", device="cpu")
    assert said == ["the output leaves out columns of bytes: raw"] and "raw" not in read(tmp_path / "a.jsonl")[0]


@pytest.mark.slow
def test_every_format_holds_the_table_with_the_answers(folders, reviews, tmp_path, capsys):
    good = [place for place in range(10) if place != 6]
    expected = HydraPredictor(folders["texts"], device="cpu")({"text": [TEXTS[place] for place in good]})
    for suffix in (".parquet", ".jsonl", ".csv"):
        output = tmp_path / suffix[1:] / f"answers{suffix}"
        run("predict", folders["texts"], reviews, "--output", output, "--batch-size", 2)
        rows = read(output)
        assert list(rows[0])[:6] == ["row", "text", "stars", "answer", "prediction", "why"]
        assert [int(row["row"]) for row in rows] == [int(row["stars"]) for row in rows] == list(range(10))
        assert [row["text"] or None for row in rows] == TEXTS
        assert [rows[place]["answer"] for place in good] == expected["label"]
        assert [rows[place]["prediction"] for place in good] == expected["label"]
        found = [float(rows[place]["epistemic"]) for place in good]
        assert found == pytest.approx(expected["epistemic"], abs=1e-6)
        bad = rows[6]
        assert not bad["answer"] and not bad["prediction"] and not bad["score"]
        assert bad["why"] == "It cannot be read: there is none."
        assert os.listdir(output.parent) == [output.name]
    captured = capsys.readouterr()
    assert "answers to 9 of 10 rows; row 6 cannot be read, see the column why" in captured.out
    assert "\nRead from the data: text.\n" in captured.out
    assert "note: this model was not calibrated" in captured.err


@pytest.mark.slow
def test_an_abstaining_model_has_a_prediction_and_no_answer(folders, tmp_path):
    data = tmp_path / "pictures"
    table = tmp_path / "table"
    data.mkdir()
    images = pictures([0, 1, 2, 1], seed=4)
    for number, image in enumerate(images):
        image.save(data / f"{number}.png")
    (data / "4.png").write_bytes(b"no image")
    shutil.copytree(data, table)
    lines = ["file_name,score", *(f"{number}.png,7" for number in range(5))]
    (table / "metadata.csv").write_text("\n".join(lines) + "\n")
    features = datasets.Features({"photo": datasets.Image()})
    saved = datasets.Dataset.from_dict({"photo": images}, features=features)
    saved.save_to_disk(tmp_path / "saved")
    expected = HydraPredictor(folders["images"], device="cpu")({"image": images})
    assert set(expected["abstain"]) == {True, False}
    sources = {"a": data, "b": tmp_path / "saved", "c": table, "d": saved}
    for name, source in sources.items():
        output = tmp_path / f"{name}.parquet"
        finished = predict_data(folders["images"], source, output, device="cpu")
        rows = read(output)
        assert [row["prediction"] for row in rows[:4]] == expected["label"]
        assert [row["why"] for row in rows[:4]] == expected["reason"]
        for row, label, abstain in zip(rows, expected["label"], expected["abstain"], strict=False):
            assert row["answer"] == (None if abstain else label)
        assert finished.bad_rows == ([4] if name in "ac" else [])
        if name == "a":
            assert [Path(row["image"]).name for row in rows] == [f"{number}.png" for number in range(5)]
        if name == "c":  # a column of the data that has a name of ours
            assert [row["input_score"] for row in rows] == [7] * 5 and rows[0]["score"] == expected["score"][0]
            assert rows[4]["why"] == "It cannot be read: it is not an image file, or a broken one."


def test_rows_of_a_dataframe_or_a_list_are_answered(folders, tmp_path):
    table = pandas.DataFrame({"text": TEXTS[:5], "when": pandas.Timestamp("2024-05-06")}, index=range(5, 10))
    for number, rows in enumerate((table, table.to_dict("records"))):
        predict_data(folders["texts"], rows, tmp_path / f"{number}.jsonl", device="cpu")
        found = read(tmp_path / f"{number}.jsonl")
        assert [row["row"] for row in found] == list(range(5)) and found[0]["when"].startswith("2024-05-06")


def test_columns_that_are_not_read_are_copied_as_they_stand(folders, tmp_path):
    """Two long ids became equal where a cell of their column was empty, and 00003 became 3."""
    ids = [
        "00003",
        "12E5",
        "1E400",
        "9007199254740993",
        "9007199254740992",
        "",
        "NA",
        " a ",
        'a "b"',
        "a\r\nb",
        "é;\t|",
    ]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=";").writerows([["id", "text"], *([cell, "NA"] for cell in ids)])
    for suffix in (".csv", ".jsonl", ".parquet"):
        finished = predict_data(folders["texts"], tmp_path / "a.csv", tmp_path / f"b{suffix}", device="cpu")
        rows = read(tmp_path / f"b{suffix}")
        assert [row["id"] or "" for row in rows] == ids and not finished.bad_rows
        assert all(row["text"] == "NA" and row["prediction"] for row in rows)


def test_columns_of_all_rows_are_kept_and_values_of_several_types_are_named(folders, tmp_path):
    rows = [{"text": "a"}, {"text": "b", "id": 7}]
    predict_data(folders["texts"], rows, tmp_path / "a.jsonl", device="cpu")
    assert [row["id"] for row in read(tmp_path / "a.jsonl")] == [None, 7]
    frame = pandas.DataFrame({"text": ["a", "b", None], "id": ["x", 7, float("nan")]})
    for data in (frame, frame.to_dict("records")):
        with pytest.raises(ValueError, match=r"column 'id' of data has values of several types \(int, str\)"):
            predict_data(folders["texts"], data, tmp_path / "b.jsonl", device="cpu")


def test_classes_of_the_data_have_their_names(folders, tmp_path):
    """As the model's classes beside them, which may be in another order."""
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["-", "+"]),
            "several": datasets.Sequence(datasets.ClassLabel(names=["x", "y"])),
        }
    )
    columns = {"text": ["good", "bad", "a"], "label": [1, 0, -1], "several": [[0, 1], [], [1]]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    predict_data(folders["texts"], rows, tmp_path / "a.jsonl", device="cpu")
    found = read(tmp_path / "a.jsonl")
    assert [row["input_label"] if "input_label" in row else row["label"] for row in found] == ["+", "-", None]
    assert [row["several"] for row in found] == [["x", "y"], [], ["y"]]


def test_a_model_in_memory_predicts_for_a_data_set(folders, reviews, tmp_path):
    loaded = HydraPredictor(folders["texts"], device="cpu")
    predict_data(folders["texts"], reviews, tmp_path / "a.jsonl", device="cpu")
    predict_data(loaded.model, reviews, tmp_path / "b.jsonl")  # with the processor beside its folder
    predict_data(loaded.model, reviews, tmp_path / "c.jsonl", processor=loaded.processor)
    contents = [(tmp_path / f"{name}.jsonl").read_text() for name in "abc"]
    assert contents[0] == contents[1] == contents[2]
    with pytest.raises(ValueError, match="model is in memory: save it with its processor, and pass its folder"):
        predict_data(loaded.model, reviews, tmp_path / "d.jsonl", engine="ray")


def test_blank_lines_are_bad_rows_and_shift_nothing(folders, tmp_path):
    """A join by `row` would get answers to other texts."""
    (tmp_path / "texts.csv").write_text("text\na good film\n\nbad\n\n\njoy\n")
    finished = predict_data(folders["texts"], tmp_path / "texts.csv", tmp_path / "answers.csv", device="cpu")
    assert finished.bad_rows == [1, 3, 4]
    rows = [(int(row["row"]), row["text"], bool(row["answer"])) for row in read(tmp_path / "answers.csv")]
    texts = ["a good film", "", "bad", "", "", "joy"]
    assert rows == [(number, text, bool(text)) for number, text in enumerate(texts)]


def test_images_that_cannot_be_read_are_named(folders, tmp_path):
    for number, image in enumerate(pictures([0, 1], seed=4)):
        image.save(tmp_path / f"{number}.png")
    content = [(tmp_path / f"{number}.png").read_bytes() for number in range(2)]
    nested = [[{"a": [1]}], [], None, [None], [{"a": []}]]
    images = [content[0], b"no image", None, b"", content[1]]
    pyarrow.parquet.write_table(pyarrow.table({"photo": images, "rest": nested}), tmp_path / "bytes.parquet")
    for suffix in (".csv", ".parquet"):
        output = tmp_path / f"a{suffix}"
        finished = predict_data(folders["images"], tmp_path / "bytes.parquet", output, column="photo", device="cpu")
        assert finished.bad_rows == [1, 2, 3]
    assert [row["rest"] for row in read(output)] == nested


def test_one_batch_of_images_is_decoded_at_a_time_and_a_part_is_written_before_the_next_is_read(
    folders, tmp_path, monkeypatch
):
    rows = datasets.Dataset.from_dict({"image": pictures([0, 1, 2] * 4)})
    most = 0
    decoded = []
    read_image = predictor._image_of
    answer = HydraPredictor.answer

    def counted(*arguments):
        parts = len(list(tmp_path.glob("*.parts/part-*")))
        assert len(decoded) < 2 and parts == started // 3
        decoded.append(read_image(*arguments))
        return decoded[-1]

    def answered(self, inputs, parameters):
        nonlocal most, started
        most = max(most, len(decoded))
        started = started + len(inputs)
        decoded.clear()
        return answer(self, inputs, parameters)

    started = 0
    monkeypatch.setattr(predictor, "_image_of", counted)
    monkeypatch.setattr(HydraPredictor, "answer", answered)
    predict_data(folders["images"], rows, tmp_path / "a.csv", device="cpu", batch_size=2)
    assert (most, started) == (2, 12)


# Stops


def stop_at(monkeypatch, place: int) -> list[int]:
    """Stops a job at its part number `place`; returns the list of the parts that were predicted."""
    predicted = []
    predict = jobs.Job.predicted

    def counted(self, part):
        if len(predicted) == place:
            raise KeyboardInterrupt
        predicted.append(part)
        return predict(self, part)

    monkeypatch.setattr(jobs.Job, "predicted", counted)
    return predicted


def stopped(monkeypatch, place: int, model, data, output, **settings) -> Path:
    """The folder with the parts of a job that was stopped."""
    with monkeypatch.context() as patch:
        stop_at(patch, place)
        with pytest.raises(KeyboardInterrupt):
            predict_data(model, data, output, device="cpu", **settings)
    [folder] = output.parent.glob(f"{output.name}.*.parts")
    return folder


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_stopped_job_goes_on_without_losing_or_repeating_a_row(suffix, folders, reviews, tmp_path, monkeypatch):
    whole = tmp_path / f"whole{suffix}"
    output = tmp_path / f"answers{suffix}"
    predict_data(folders["texts"], reviews, whole, device="cpu")
    parts = stopped(monkeypatch, 3, folders["texts"], reviews, output)
    assert not output.exists() and len(list(parts.iterdir())) == 3
    (parts / "part-00000001.parquet").write_bytes(b"torn")
    content = bytearray((parts / "part-00000002.parquet").read_bytes())
    content[60] ^= 1  # a bit of the data
    (parts / "part-00000002.parquet").write_bytes(content)
    (parts / "mine.txt").write_text("a user's")
    os.link(parts / "mine.txt", parts / f"joined{suffix}")  # as if its job had been killed, and its output moved
    predicted = stop_at(monkeypatch, 100)
    finished = predict_data(folders["texts"], reviews, output, device="cpu")
    assert predicted == [1, 2, 3] and (finished.rows, finished.bad_rows) == (10, [6])
    assert output.read_bytes() == whole.read_bytes()
    assert [path.name for path in parts.iterdir()] == ["mine.txt"] and (parts / "mine.txt").read_text() == "a user's"
    with pytest.raises(ValueError, match="exists already: pass another --output"):
        predict_data(folders["texts"], reviews, output, device="cpu")


def killed_in_a_process(number: int, is_before: bool, work) -> bool:
    """Runs `work` in a copy of this process that dies at its step `number`, before or behind it; False if it had fewer.

    A step is a file that gets its name, or a folder that is removed.
    """
    child = os.fork()
    if child == 0:
        steps = 0

        def deadly(function):
            def step(*args, **options):
                nonlocal steps
                steps += 1
                if is_before and steps == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                found = function(*args, **options)
                if steps == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

            return step

        os.replace, os.link, Path.rmdir = deadly(os.replace), deadly(os.link), deadly(Path.rmdir)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_job_that_is_killed_at_any_step_goes_on_without_losing_or_repeating_a_row(
    folders, reviews, tmp_path, monkeypatch
):
    """As by kill -9: nothing is tidied up."""
    model = folders["texts"]
    whole = tmp_path / "whole.jsonl"
    predict_data(model, reviews, whole, device="cpu")
    reader = jobs.Job(str(model), jobs.DataSource(str(reviews)), {"device": "cpu"}, 3)
    contents = [reader.predicted(part) for part in range(4)]
    predicted = []
    monkeypatch.setattr(jobs, "Job", lambda **_: reader)
    monkeypatch.setattr(reader, "predicted", lambda part: predicted.append(part) or contents[part])
    for number in range(1, 7):  # four parts, the output, the removal
        for is_before in (True, False):
            output = tmp_path / f"{number}-{is_before}" / "answers.jsonl"
            work = lambda output=output: predict_data(model, reviews, output, device="cpu")  # noqa: E731
            assert killed_in_a_process(number, is_before, work)
            predicted.clear()
            if output.exists():  # it is whole
                with pytest.raises(ValueError, match="exists already"):
                    work()
            else:
                assert work().bad_rows == [6]
                assert predicted == list(range(number - is_before, 4)), "what was done is not done again"
                assert not list(output.parent.glob("*/*"))
            assert output.read_bytes() == whole.read_bytes()
    assert not killed_in_a_process(7, True, lambda: predict_data(model, reviews, tmp_path / "a.jsonl", device="cpu"))


@pytest.mark.parametrize("has_links", [True, False])
def test_users_files_stay_also_one_that_appears_meanwhile(has_links, folders, reviews, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    names = [
        "plain.csv.parts",
        ".plain.csv.1234.tmp",
        "plain.csv.0123456789ab.parts",
    ]  # a user's, with names like ours
    for name in names:
        (tmp_path / name).write_text("mine")
    predict_data(folders["texts"], reviews, tmp_path / "plain.csv", device="cpu")
    assert len(read(tmp_path / "plain.csv")) == 10
    assert {path.name for path in tmp_path.iterdir()} == {"reviews.csv", "plain.csv", *names}
    output = tmp_path / "answers.csv"
    write = jobs.write_tables

    def slow(path, tables):
        write(path, tables)
        output.write_text("a user's")

    monkeypatch.setattr(jobs, "write_tables", slow)
    with pytest.raises(ValueError, match=r"answers\.csv exists already"):
        predict_data(folders["texts"], reviews, output, device="cpu")
    with pytest.raises(ValueError, match=r"answers\.csv exists already"):  # nor is it taken for the finished file
        predict_data(folders["texts"], reviews, output, device="cpu")
    assert output.read_text() == "a user's"


def test_other_data_another_model_and_other_settings_start_anew(folders, reviews, tmp_path, monkeypatch, caplog):
    model = shutil.copytree(folders["texts"], tmp_path / "model")
    output = tmp_path / "answers.jsonl"
    parts = stopped(monkeypatch, 1, model, reviews, output)

    def starts_anew(**settings) -> bool:
        caplog.clear()
        with monkeypatch.context() as patch:
            predicted = stop_at(patch, 1)
            with pytest.raises(KeyboardInterrupt):
                predict_data(settings.pop("model", model), reviews, output, device="cpu", **settings)
        found = set(output.parent.glob("answers.jsonl.*.parts")) - {parts}
        for folder in found:
            shutil.rmtree(folder)
        assert bool(found) == ("is of another model, data or settings" in caplog.text)
        return bool(found) and predicted == [0]

    assert not starts_anew()
    assert starts_anew(top_k=1) and starts_anew(model=folders["texts"].parent / "bert")
    settings = (model / "tokenizer_config.json").read_text()
    (model / "tokenizer_config.json").write_text(json.dumps(json.loads(settings) | {"do_lower_case": False}))
    assert starts_anew()
    (model / "tokenizer_config.json").write_text(settings)
    reviews.write_text(reviews.read_text().replace("joy", "bad"))
    assert starts_anew()


def test_a_folder_called_data_is_not_taken_for_rows_in_memory(folders, tmp_path, monkeypatch):
    """A job on other rows would go on with the answers of the first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows = [pandas.DataFrame({"text": TEXTS[start : start + 5]}) for start in (0, 1)]
    found = [jobs.Job(str(folders["texts"]), jobs.DataSource(part), {"device": "cpu"}, 3) for part in rows]
    assert found[0].folder_for(tmp_path / "a.csv") != found[1].folder_for(tmp_path / "a.csv")
    predict_data(folders["texts"], rows[0], tmp_path / "data" / "a.csv", device="cpu")


def test_images_that_changed_start_anew(folders, tmp_path):
    def folder_of_parts() -> Path:
        job = jobs.Job(str(folders["images"]), jobs.DataSource(str(tmp_path / "data")), {"device": "cpu"}, 3)
        return job.folder_for(tmp_path / "a.csv")

    (tmp_path / "data").mkdir()
    pictures([0], seed=4)[0].save(tmp_path / "data" / "0.png")
    before = folder_of_parts()
    assert folder_of_parts() == before
    pictures([2], seed=5)[0].resize((9, 9)).save(tmp_path / "data" / "0.png")
    assert folder_of_parts() != before


def test_a_folder_wins_over_a_data_set_of_its_name_on_the_hub(folders, reviews, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imdb").mkdir()
    reviews.rename(tmp_path / "imdb" / "reviews.csv")
    assert predict_data(folders["texts"], "imdb", "answers.csv", device="cpu").rows == 10


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"output": "answers.txt"}, ValueError, r"pass a file that ends in \.parquet, \.jsonl, \.csv"),
        ({"data": "."}, ValueError, "inside the data"),
        ({"engine": "dask"}, ValueError, "engine is .dask.: pass local or ray"),
        ({"engine": "ray"}, ImportError, r"engine='ray' \(--engine ray\) needs Ray: pip install 'ray\[data,serve\]"),
        ({"data": "none.csv"}, ValueError, r"none\.csv cannot be read: it has no rows"),
        ({"data": "./nowhere"}, ValueError, "there is no folder or file"),
        ({"output": "reviews.csv"}, ValueError, r"reviews\.csv exists already"),
        (
            {"model": "images", "column": "text"},
            ValueError,
            "'text' holds texts, and .* reads images: for paths, call",
        ),
    ],
)
def test_what_cannot_be_a_job_raises_an_error(change, error, words, folders, reviews, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.csv").write_text("text,stars\n")
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "hydra_transformers.serving.ray_engine", raising=False)
    arguments = {"data": "reviews.csv", "output": "answers.csv", "device": "cpu"}
    with pytest.raises(error, match=words):
        predict_data(**arguments | change | {"model": folders[change.get("model", "texts")]})
    assert {path.name for path in tmp_path.iterdir()} == {"none.csv", "reviews.csv"}
