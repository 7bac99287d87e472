"""Jobs: all rows of a data set into a file, stops in between, bad rows."""

import csv
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest

from hydra_transformers.cli import main
from hydra_transformers.serving import HydraPredictor, jobs
from hydra_transformers.serving.jobs import predict_data
from tests.command_line import run
from tests.tiny_data import pictures


TEXTS = ["a good film", "bad", "a film of joy", "", "good good", "a", "of joy", "bad film", "a bad film", "joy"]


@pytest.fixture
def reviews(tmp_path) -> Path:
    """Ten rows, of which the seventh has no text."""
    file = tmp_path / "reviews.csv"
    rows = ["text,stars", *(f"{text or '(empty)'},{place}" for place, text in enumerate(TEXTS))]
    rows[7] = ",6"
    file.write_text("\n".join(rows) + "\n")
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


@pytest.mark.slow
def test_every_format_holds_the_predictors_answers_and_bad_rows_are_named(folders, reviews, tmp_path, capsys):
    texts = [row["text"] for row in read(reviews)]
    answered = [place for place in range(10) if place != 6]
    expected = HydraPredictor(folders["texts"], device="cpu")({"text": [texts[place] for place in answered]})
    for suffix in (".parquet", ".jsonl", ".csv"):
        output = tmp_path / suffix[1:] / f"answers{suffix}"
        run("predict", folders["texts"], reviews, "--output", output, "--device", "cpu", "--batch-size", 2)
        rows = read(output)
        assert [int(row["row"]) for row in rows] == answered
        assert [row["input"] for row in rows] == [texts[place] for place in answered]
        assert [row["label"] for row in rows] == expected["label"]
        assert [float(row["epistemic"]) for row in rows] == pytest.approx(expected["epistemic"], abs=1e-6)
        if suffix != ".csv":
            assert rows[0]["scores"][0].keys() == {"label", "score"} and rows[0]["abstain"] is None
        [bad] = read(output.with_name("answers.bad-rows.jsonl"))
        assert bad == {"row": 6, "input": None, "reason": "there is none"}
        assert {path.name for path in output.parent.iterdir()} == {output.name, "answers.bad-rows.jsonl"}
    captured = capsys.readouterr()
    assert "answers to 9 of 10 rows; why not the others is in" in captured.out
    assert "note: this model was not calibrated" in captured.err
    output = tmp_path / "strict.csv"
    words = ["predict", folders["texts"], reviews, "--output", output, "--device", "cpu", "--strict"]
    assert main([*map(str, words)]) == 2 and not output.exists()
    assert "row 6 cannot be answered as a text: there is none; leave --strict out" in capsys.readouterr().err
    run(*words[:-1])  # goes on from where it stopped
    assert len(read(output)) == 9


def stop_at(monkeypatch, place: int) -> list[int]:
    """Kills a job at its part number `place`; returns the list of the parts that were answered."""
    answered, answer = [], jobs.PartReader.answered

    def counted(self, part):
        if len(answered) == place:
            raise KeyboardInterrupt
        answered.append(part)
        return answer(self, part)

    monkeypatch.setattr(jobs.PartReader, "answered", counted)
    return answered


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_stopped_job_goes_on_without_losing_or_repeating_a_row(suffix, folders, reviews, tmp_path, monkeypatch):
    whole, output = tmp_path / f"whole{suffix}", tmp_path / f"answers{suffix}"
    predict_data(folders["texts"], reviews, whole, device="cpu")
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            predict_data(folders["texts"], reviews, output, device="cpu")
    parts = tmp_path / f"answers{suffix}.parts"
    assert not output.exists() and len(list(parts.glob("*.done.json"))) == 2
    (parts / f"part-00000001{suffix}").write_bytes(b"torn")  # a disk that was full, say
    answered = stop_at(monkeypatch, 100)
    finished = predict_data(folders["texts"], reviews, output, device="cpu")
    assert answered == [1, 2, 3] and (finished.rows, finished.bad_rows) == (10, 1)
    assert read(output) == read(whole) and not parts.exists()
    with pytest.raises(ValueError, match="exists already: pass another --output"):
        predict_data(folders["texts"], reviews, output, device="cpu")


def killed_in_a_process(number: int, is_before: bool, work) -> bool:
    """Runs `work` in a copy of this process that dies at its step `number`, before or behind it; False if it had fewer.

    A step is a file that gets its name, or the removal of the parts.
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

        os.replace, jobs.shutil.rmtree = deadly(os.replace), deadly(jobs.shutil.rmtree)
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
    predict_data(model, reviews, tmp_path / "whole.jsonl", device="cpu")
    reader = jobs.PartReader(str(model), jobs.DataSource(str(reviews)), {"device": "cpu"}, 3)
    tables, identity = [reader.answered(part) for part in range(4)], jobs.identity_of(reader)
    answered = []
    monkeypatch.setattr(jobs, "PartReader", lambda *_: reader)
    monkeypatch.setattr(jobs, "identity_of", lambda _: identity)
    monkeypatch.setattr(reader, "answered", lambda part: answered.append(part) or tables[part])
    kills = 0
    for number in range(1, 100):
        for is_before in (True, False):
            output = tmp_path / f"{number}-{is_before}" / "answers.jsonl"
            work = lambda output=output: predict_data(model, reviews, output, device="cpu")  # noqa: E731
            if not killed_in_a_process(number, is_before, work):
                assert kills == 2 * 12  # the identity, four parts and their records, bad rows, answers, the removal
                return
            kills += 1
            answered.clear()
            if (number, is_before) == (12, False):  # all was done
                with pytest.raises(ValueError, match="exists already"):
                    work()
            else:
                finished = work()
                assert (finished.rows, finished.bad_rows) == (10, 1)
                done = max(0, number - (2 if is_before else 1)) // 2
                assert answered == list(range(min(done, 4), 4)), "what was done is not done again"
            assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
            bad = [
                folder / f"{name}.bad-rows.jsonl" for folder, name in ((output.parent, "answers"), (tmp_path, "whole"))
            ]
            assert bad[0].read_bytes() == bad[1].read_bytes()
            assert {path.name for path in output.parent.iterdir()} == {output.name, bad[0].name}


def test_a_job_that_was_stopped_takes_no_file_of_another_for_its_own(folders, reviews, tmp_path, monkeypatch):
    output = tmp_path / "answers.csv"
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            predict_data(folders["texts"], reviews, output, device="cpu")
    output.write_text("of somebody else")
    with pytest.raises(ValueError, match=r"answers\.csv exists already"):
        predict_data(folders["texts"], reviews, output, device="cpu")
    assert output.read_text() == "of somebody else"
    output.unlink()
    (tmp_path / "answers.csv.parts" / "part-00000002.done.json").write_text("[]")
    assert predict_data(folders["texts"], reviews, output, device="cpu").rows == 10
    (tmp_path / "a.csv.parts").mkdir()
    (tmp_path / "a.csv.parts" / "job.json").write_text("{")  # torn: it says nothing about the parts
    (tmp_path / "a.csv.parts" / "part-00000000.csv").write_text("0,")
    with pytest.raises(ValueError, match="holds other files: remove it"):
        predict_data(folders["texts"], reviews, tmp_path / "a.csv", device="cpu")


def test_strict_refuses_bad_rows_that_an_earlier_run_went_past(folders, reviews, tmp_path, monkeypatch):
    output = tmp_path / "answers.csv"
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            predict_data(folders["texts"], reviews, output, device="cpu")
    with pytest.raises(ValueError, match="row 6 cannot be answered as a text: there is none; leave --strict out"):
        predict_data(folders["texts"], reviews, output, device="cpu", strict=True)
    assert predict_data(folders["texts"], reviews, output, device="cpu").bad_rows == 1


def test_large_files_of_parquet_have_few_row_groups(folders, reviews, tmp_path, monkeypatch):
    for most, groups in ((2**26, 1), (0, 4)):
        monkeypatch.setattr(jobs, "BYTES_PER_ROW_GROUP", most)
        predict_data(folders["texts"], reviews, tmp_path / f"{most}.parquet", device="cpu")
        assert pyarrow.parquet.ParquetFile(tmp_path / f"{most}.parquet").num_row_groups == groups
    tables = [pyarrow.parquet.read_table(tmp_path / f"{most}.parquet") for most in (2**26, 0)]
    assert tables[0].equals(tables[1])


def test_a_worker_refuses_another_model_or_other_rows_than_the_first_process_has(folders, reviews):
    model, source = str(folders["texts"]), {"data": str(reviews)}
    reader = jobs.PartReader(model, jobs.DataSource(**source), {"device": "cpu"}, 3)
    same = {"source": source, "settings": {"device": "cpu"}, "rows_per_part": 3, "rows": 10}
    same["digest"] = jobs.identity_of(reader)["model"]
    assert jobs.reader_of_worker(model, **same).answered(1).equals(reader.answered(1))
    with pytest.raises(RuntimeError, match=r"a worker finds another .*bert than the process that was started"):
        jobs.reader_of_worker(str(folders["texts"].parent / "bert"), **same)
    with pytest.raises(RuntimeError, match=r"a worker finds another .*reviews\.csv than"):
        jobs.reader_of_worker(model, **{**same, "rows": 9})


def test_a_stopped_job_refuses_other_data_another_model_and_other_settings(folders, reviews, tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    with monkeypatch.context() as patch:
        stop_at(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            predict_data(folders["texts"], reviews, output, device="cpu")
    with pytest.raises(ValueError, match="its settings changed since: remove the folder"):
        predict_data(folders["texts"], reviews, output, device="cpu", top_k=1)
    with pytest.raises(ValueError, match="its model changed since"):
        predict_data(folders["texts"].parent / "bert", reviews, output, device="cpu")
    reviews.write_text(reviews.read_text().replace("joy", "bad"))
    with pytest.raises(ValueError, match="its data changed since"):
        predict_data(folders["texts"], reviews, output, device="cpu")


def test_a_stopped_job_refuses_a_tokenizer_that_reads_words_differently(folders, reviews, tmp_path, monkeypatch):
    model, output = shutil.copytree(folders["texts"], tmp_path / "model"), tmp_path / "answers.jsonl"
    with monkeypatch.context() as patch:
        stop_at(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            predict_data(model, reviews, output, device="cpu")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": False}))
    with pytest.raises(ValueError, match="its model changed since"):
        predict_data(model, reviews, output, device="cpu")


@pytest.mark.parametrize("data", ["paths.jsonl", "."], ids=["table", "folder of tables"])
def test_a_stopped_job_refuses_images_that_changed_although_the_table_of_their_paths_did_not(
    data, folders, tmp_path, monkeypatch
):
    tables, image, output = tmp_path / "tables", tmp_path / "0.png", tmp_path / "answers.jsonl"
    tables.mkdir()
    pictures([0], seed=4)[0].save(image)
    (tables / "paths.jsonl").write_text(json.dumps({"file": "../0.png"}) + "\n")
    with monkeypatch.context() as patch:
        stop_at(patch, 0)
        with pytest.raises(KeyboardInterrupt):
            predict_data(folders["images"], tables / data, output, image="file", device="cpu")
    pictures([2], seed=5)[0].resize((9, 9)).save(image)
    with pytest.raises(ValueError, match="its data changed since"):
        predict_data(folders["images"], tables / data, output, image="file", device="cpu")


def test_a_part_is_written_before_the_next_one_is_read(folders, reviews, tmp_path, monkeypatch):
    """So memory does not grow with the rows."""
    output, answer, seen = tmp_path / "answers.parquet", jobs.PartReader.answered, []

    def looks(self, part):
        seen.append(len(list(output.with_name("answers.parquet.parts").glob("*.done.json"))))
        return answer(self, part)

    monkeypatch.setattr(jobs.PartReader, "answered", looks)
    predict_data(folders["texts"], reviews, output, device="cpu")
    assert seen == [0, 1, 2, 3]


@pytest.mark.slow
def test_images_of_a_folder_of_a_saved_set_and_of_paths_in_a_table(folders, tmp_path):
    data = tmp_path / "pictures"
    data.mkdir()
    images = pictures([0, 1, 2, 1], seed=4)
    for number, image in enumerate(images):
        image.save(data / f"{number}.png")
    (data / "4.png").write_bytes(b"no image")
    expected = HydraPredictor(folders["images"], device="cpu")({"image": images})
    features = datasets.Features({"photo": datasets.Image()})
    datasets.Dataset.from_dict({"photo": images}, features=features).save_to_disk(tmp_path / "saved")
    table = tmp_path / "paths.jsonl"
    table.write_text("".join(json.dumps({"file": f"pictures/{number}.png"}) + "\n" for number in range(5)))
    for name, source, column in (("a", data, None), ("b", tmp_path / "saved", None), ("c", table, "file")):
        output = tmp_path / f"{name}.parquet"
        predict_data(folders["images"], source, output, image=column, device="cpu")
        found = read(output)
        assert [row["label"] for row in found] == expected["label"]
        assert [row["abstain"] for row in found] == expected["abstain"]
        assert [row["prediction_set"] for row in found] == expected["prediction_set"]
        if name != "b":
            assert [Path(row["input"]).name for row in found] == [f"{number}.png" for number in range(4)]
            [bad] = read(tmp_path / f"{name}.bad-rows.jsonl")
            assert bad["row"] == 4 and "cannot identify image file" in bad["reason"]


def test_images_that_cannot_be_read_are_named_with_the_reason_and_one_path_too_long_stops_nothing(folders, tmp_path):
    content = [path.read_bytes() for path in save_pictures(tmp_path, 2)]
    nested = [[{"a": [1]}], [], None, [None], [{"a": []}]]  # a column that nobody reads
    images = [content[0], b"no image", None, b"", content[1]]
    pyarrow.parquet.write_table(pyarrow.table({"photo": images, "rest": nested}), tmp_path / "bytes.parquet")
    finished = predict_data(
        folders["images"], tmp_path / "bytes.parquet", tmp_path / "a.jsonl", image="photo", device="cpu"
    )
    assert [row["row"] for row in read(finished.output)] == [0, 4]
    broken = "cannot identify image file: it is none, or broken"
    assert [bad["reason"] for bad in read(finished.bad_rows_file)] == [broken, "there is none", broken]
    names = ["0.png", "", "gone.png", "x." + "x" * 5000, "a\0b", None, ".", "1.png"]
    table = tmp_path / "paths.jsonl"
    table.write_text("".join(json.dumps({"file": name}) + "\n" for name in names))
    finished = predict_data(folders["images"], table, tmp_path / "b.jsonl", image="file", device="cpu")
    assert [row["row"] for row in read(finished.output)] == [0, 7]
    missing = "there is no such file"
    assert [bad["reason"] for bad in read(finished.bad_rows_file)] == [missing] * 4 + ["there is none", missing]


def save_pictures(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(count)]
    for path, image in zip(paths, pictures([0, 1, 2] * count, seed=4), strict=False):
        image.save(path)
    return paths


def test_data_without_rows_and_of_one_row(folders, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "none.parquet")
    (tmp_path / "none.csv").write_text("text,stars\n")
    (tmp_path / "one.csv").write_text("text,stars\ngood,1\n")
    for name in ("none.parquet", "none.csv"):
        with pytest.raises(ValueError, match=f"{name} has no rows"):
            predict_data(folders["texts"], tmp_path / name, tmp_path / "a.csv", device="cpu")
    assert predict_data(folders["texts"], tmp_path / "one.csv", tmp_path / "a.csv", device="cpu").rows == 1
    assert len(read(tmp_path / "a.csv")) == 1


def test_a_folder_wins_over_a_data_set_of_its_name_on_the_hub(folders, reviews, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imdb").mkdir()
    reviews.rename(tmp_path / "imdb" / "reviews.csv")
    assert predict_data(folders["texts"], "imdb", "answers.csv", device="cpu").rows == 10
    with pytest.raises(ValueError, match="there is no folder or file"):
        predict_data(folders["texts"], "./nowhere", "more.csv", device="cpu")


def test_what_cannot_be_a_job_is_refused(folders, reviews, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"pass a file that ends in \.parquet, \.jsonl, \.csv"):
        predict_data(folders["texts"], reviews, tmp_path / "answers.txt")
    with pytest.raises(ValueError, match="inside the data"):
        predict_data(folders["texts"], tmp_path, tmp_path / "answers.csv")
    with pytest.raises(ValueError, match="engine is 'spark': pass one of local, ray"):
        predict_data(folders["texts"], reviews, tmp_path / "answers.csv", engine="spark")
    with pytest.raises(ValueError, match="workers is 2, which is for engine='ray'"):
        predict_data(folders["texts"], reviews, tmp_path / "answers.csv", workers=2)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "hydra_transformers.serving.ray_engine", raising=False)
    with pytest.raises(ImportError, match=r"engine='ray' \(--engine ray\) needs Ray: pip install 'ray\[data,serve\]"):
        predict_data("nowhere", reviews, tmp_path / "answers.csv", engine="ray")
