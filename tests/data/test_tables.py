"""csv and tsv files: every cell is its text, the separator is found, and a first line without names
is questioned."""

import csv
import json
import os

import pandas as pd
import pytest
from transformers import BertConfig

from hydra_transformers import load_data
from hydra_transformers.data import tables
from hydra_transformers.data.loading import classes_in
from hydra_transformers.data.rows import DataSource, load_rows
from tests.tiny_data import names_of


def written(path, content, encoding="utf-8"):
    path.write_bytes(content.encode(encoding))
    return str(path)


def rows_of(path, **source) -> list[dict]:
    rows = load_rows(DataSource(path, **source)).rows
    return [dict(row) for row in rows]


def labels_of(path, tokenizer, classes, **settings) -> list:
    return load_data(path, BertConfig(**names_of(classes)), processor=tokenizer, labelled=True, **settings).labels


# Cells


CELLS = [
    "00003",
    "12E5",
    "1E400",
    "9007199254740993",
    "9007199254740992",
    "NA",
    "None",
    "null",
    "nan",
    "N/A",
    "True",
    " padded ",
    'a "quoted" word',
    'say ""',
    "two\nlines",
    "two\r\nlines",
    "a, b",
    "a; b\t| c",
    "2020-01-01",
    "naïve café",
    "日本語",
    "\U0001f600",
    "'",
    "#",
    "=1+1",
    "x" * 200_000,
]


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("separator", tables.SEPARATORS)
def test_every_cell_is_its_text(separator, is_large, tmp_path, monkeypatch):
    """Also where another cell of the column is empty, and in files that are kept on disk."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    if is_large:
        monkeypatch.setattr(tables, "MOST_BYTES_IN_MEMORY", 0)
        monkeypatch.setattr(tables, "CHARACTERS_PER_BATCH", 100)
    path = tmp_path / "cells.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([["id", "text"], *([cell, f"text {cell}"] for cell in CELLS), ["", "empty"]])
    for _ in range(2):
        rows = rows_of(path)
        assert [row["id"] for row in rows] == [*CELLS, None]
        assert [row["text"] for row in rows] == [*(f"text {cell}" for cell in CELLS), "empty"]
    assert (tmp_path / "cache").exists() == is_large


def test_columns_of_numbers_are_not_texts_and_texts_may_be_numbers(tokenizer, tmp_path):
    path = written(tmp_path / "a.csv", "id,score,code,flag,comment\n1,0.5,007,True,good\n2,,1,false,NA\n")
    data = load_data(path, tokenizer, labelled=False)
    assert data.columns == ("comment",) and data[1]["input_ids"] == tokenizer("NA")["input_ids"]
    assert load_data(path, tokenizer, column="code", labelled=False)[0]["input_ids"] == tokenizer("007")["input_ids"]
    path = written(tmp_path / "b.csv", "id,text\n1,5\n2,7\n")
    assert load_data(path, tokenizer).columns == ("text",)


# Separators and encodings


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text;label\na, b;1\n"),
        ("a.csv", "text\tlabel\na, b\t1\n"),
        ("a.csv", "text|label\r\na, b|1\r\n"),
        ("a.csv", 'label,text\n1,"a, b"\n'),
        ("a.csv", "\ufefftext;label\na, b;1\n"),
        ("a.tsv", 'text,label\n"a, b",1\n'),
        ("a.tsv", "text\tlabel\na, b\t1"),
        ("a.csv", 'text,"label;"\n"a, b",1'.replace(";", "")),
    ],
)
def test_the_separator_is_found(name, content, tmp_path):
    [row] = rows_of(written(tmp_path / name, content))
    assert row == {"text": "a, b", "label": "1"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text;label,kind\na;1\nb,2\n", "may have commas or semicolons between its columns"),
        ("text^label\ngood^1\nbad^0\n", "has one column, and '\\^' in every line"),
        (
            "text,label\na film,1\na, film,0\n",
            "line 3 of .* has 3 cells, .* names 2 columns .commas are between them.",
        ),
        ("text,label\na\nfilm,0\n", "line 2 of .* has 1 cells, and its first line names 2"),
        ('text,label\n"a" film,1\n', 'cannot be read from line 2 on .*each " inside is written twice'),
        ('text,label\na,1\n"a film,1\nbad,0\n', "cannot be read from line 3 on .unexpected end of data"),
        ("text,text\na,b\n", "has two columns 'text': rename one"),
        ("text,label\na,1\ntext,label\nb,0\n", "line 3 of .* has the names of the columns again: remove it"),
        ("t\0e\0x\0t\0", "has zero bytes"),
        ("\ntext,label\na,1\n", "the first line of .* is blank"),
        ('"text" ,label\na,1\n', "cannot be read from line 1 on"),
        ("text\na\rb\nc\n", "cannot be read from line 2 on .it has a carriage return.: .* into double quotes"),
    ],
)
def test_a_file_whose_columns_are_in_doubt_raises(content, words, tmp_path):
    with pytest.raises(ValueError, match=words) as raised:
        rows_of(written(tmp_path / "a.csv", content))
    assert "\n" not in str(raised.value)


def test_lines_end_where_all_lines_end(tmp_path):
    """Not at other signs that Unicode counts as the end of a line."""
    odd = "a\u2028b\x0bc\x0cd\x1ce\x85f"
    for content in (f"text\r{odd}\rb", f"text\n{odd}\nb\n", f'text\r\n{odd}\r\n"b"\r\n'):
        assert [row["text"] for row in rows_of(written(tmp_path / "a.csv", content))] == [odd, "b"]


@pytest.mark.parametrize(("encoding", "text"), [("latin-1", "café"), ("cp1252", "it\u2019s"), ("utf-16", "film")])
def test_the_error_names_the_encoding_to_try(encoding, text, tmp_path):
    path = written(tmp_path / "a.csv", f"text,label\ngood,1\n{text},0\n", encoding)
    with pytest.raises(
        ValueError, match=f"not written in utf-8.*: try {encoding}, with `iconv -f .*encoding='{encoding}'"
    ):
        rows_of(path)
    frame = pd.read_csv(path, encoding=encoding, dtype=str, keep_default_na=False)
    assert rows_of(frame)[1]["text"] == text


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"PK\x03\x04\x00\xff\xfe")
    with pytest.raises(ValueError, match="is not a text file: write the table as csv in utf-8"):
        rows_of(tmp_path / "a.csv")


# The first line


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a film,positive\nbad,negative\ngood,positive\n", "'positive' is also a cell below it"),
        ("a film,0.25\nbad,0.5\n", "'0.25' is a number, as the cells below it"),
        ("I love this film very much,x\nbad,y\n", "'I love this film very much' is a text"),
        ("Great film.\nbad\n", "'Great film.' is a text"),
        ("great film\nbad\n", "'great film' is a text"),
    ],
)
def test_a_first_line_that_looks_like_a_row_is_questioned(content, why, tmp_path):
    path = written(tmp_path / "a.csv", content)
    with pytest.raises(
        ValueError, match=rf"looks like a row and not like names of columns \({why}\): put names on top"
    ):
        rows_of(path)
    first = content.split("\n")[0].split(",")[0]
    assert len(rows_of(path, column=first)) == content.count("\n") - 1, "who names a column of it confirms it"


def test_names_of_columns_are_not_questioned(tmp_path):
    for header in ("text,1", "what did you like most about it?,label", "customer message,kind", "0,1", ",comment"):
        content = f"{header}\ngood film,3\nbad,4\n"
        assert len(rows_of(written(tmp_path / "a.csv", content))) == 2


# Labels


@pytest.mark.parametrize(
    ("cells", "classes", "expected"),
    [
        ("0 1 1", ["negative", "positive"], [0, 1, 1]),
        ("1.0 0.0 1.0", ["negative", "positive"], [1, 0, 1]),
        ("True False TRUE", ["no", "yes"], [1, 0, 1]),
        ("1 3 2", ["1", "2", "3"], [0, 2, 1]),
        ("1 2 1", ["1", "2", "3"], [0, 1, 0]),
        ("0 1 2", ["1", "2", "3"], [0, 1, 2]),  # no class is called 0
        ("0 1 2", ["2", "1", "0"], [2, 1, 0]),
        ("007 7 7", ["007", "7"], [0, 1, 1]),
        ("None x None", ["None", "x"], [0, 1, 0]),
        ("nan NA nan", ["NA", "nan"], [1, 0, 1]),
    ],
)
def test_numbers_of_a_csv_file_are_the_names_of_classes_or_their_indices(
    cells, classes, expected, tokenizer, tmp_path
):
    content = "text,label\n" + "".join(f"a film,{cell}\n" for cell in cells.split())
    assert labels_of(written(tmp_path / "a.csv", content), tokenizer, classes) == expected


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("0 1 0 1", (["LABEL_0", "LABEL_1"], None)),
        ("1 2 10 2", (["1", "2", "10"], None)),
        ("0 2 5 0", (["0", "2", "5"], None)),
        ("7001 7002 7001 7002", (["7001", "7002"], None)),
        ("True False True False", (["False", "True"], None)),
        ("01 02 01 02", (["01", "02"], None)),
        ("0.5 1.25 1.25 2", (["label"], "regression")),
    ],
)
def test_classes_of_a_csv_file(cells, expected, tmp_path):
    content = "text,label\n" + "".join(f"a film,{cell}\n" for cell in cells.split())
    assert classes_in(DataSource(written(tmp_path / "a.csv", content))) == expected


def test_the_files_of_a_folder_are_read_in_the_same_way(tokenizer, tmp_path):
    """Numbers of one split are names, where another split has words."""
    written(tmp_path / "train.csv", "text;label\nNA;1\nfilm;x\n")
    written(tmp_path / "test.csv", "label,text\n1,00003\n1,nan\n")
    train, test = (rows_of(tmp_path, split=split) for split in ("train", "test"))
    assert train == [{"text": "NA", "label": "1"}, {"text": "film", "label": "x"}]
    assert test == [{"label": "1", "text": "00003"}, {"label": "1", "text": "nan"}]
    assert labels_of(tmp_path, tokenizer, ["x", "1"], split="test") == [1, 1]
    with pytest.raises(ValueError, match="has no split 'tset': it has train, test; part='validation'"):
        rows_of(tmp_path, split="tset")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    written(hidden / "train.csv", "text,label\n" + "a,1\nb,0\n" * 10)
    written(hidden / "test.csv", "text,label\na,-1\nb,-1\n")
    assert len(load_data(hidden, tokenizer, part="test")) == 2, "a test split of -1 has no labels"


# Content, not time


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_that_was_replaced_is_read_anew_whatever_its_time(name, is_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / name

    def save(text):
        frame = pd.DataFrame({"text": [text, "b"]})
        writers = {".csv": frame.to_csv, ".parquet": frame.to_parquet}
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps({"text": row}) + "\n" for row in (text, "b")))
        else:
            writers[path.suffix](path, index=False)
        os.utime(path, (1_000_000_000, 1_000_000_000))

    fingerprints = []
    for text in ("good", "evil", "good"):
        save(text)
        rows = load_rows(DataSource(path.parent if is_folder else path)).rows
        assert rows[0]["text"] == text
        fingerprints.append(rows._fingerprint)
    assert fingerprints[0] == fingerprints[2] != fingerprints[1], "by which a prediction that was stopped goes on"


# JSON

DATES = ["2020-01-01", "2021-02-03T04:05:06Z", None]
LONG = [12345678901234567890123, 12345678901234567890124, 7]


@pytest.mark.parametrize("is_array", [False, True])
def test_dates_and_long_numbers_of_json_files_are_kept_as_they_stand(is_array, tmp_path):
    """Dates became times, and two long ids the same float."""
    values = {"when": DATES, "nested": [[date] for date in DATES], "score": [0.5, 1e300, None], "text": DATES[:2] * 2}
    if not is_array:  # of an array `datasets` refuses them
        values["id"] = LONG
    rows = [{name: cells[row] for name, cells in values.items()} for row in range(3)]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(rows) if is_array else "\n\n".join(map(json.dumps, rows)))
    found = rows_of(path)
    expected = [row | ({} if is_array else {"id": str(row["id"])}) for row in rows]
    assert found == expected and list(found[0]) == list(rows[0])
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]))
    path.rename(tmp_path / "train.jsonl")
    assert rows_of(tmp_path, split="test")[0]["when"] == DATES[0]


@pytest.mark.parametrize("is_array", [False, True])
def test_json_values_stay_as_they_were_written(is_array, tmp_path):
    kinds = [1, "1", "true", True, "x", None, {"day": "2020-01-01", "b": [1, "2"]}]
    rows = [{"day": f"2020-01-0{place + 1}", "kinds": value} for place, value in enumerate(kinds)]
    file = tmp_path / ("rows.json" if is_array else "rows.jsonl")
    file.write_text(json.dumps(rows) if is_array else "".join(json.dumps(row) + "\n" for row in rows))
    found = load_rows(DataSource(file)).rows
    assert [found[place] for place in range(len(found))] == rows
    only_dates = tmp_path / "dates.jsonl"
    only_dates.write_text('{"day": "2020-01-01"}\n{"day": "2021-01-01"}\n')
    assert list(load_rows(DataSource(only_dates)).rows["day"]) == ["2020-01-01", "2021-01-01"]


def test_a_column_of_words_without_a_name_on_top_is_questioned(tmp_path):
    words = written(tmp_path / "words.csv", "joy\nbad\ngood\n")
    with pytest.raises(ValueError, match=r"looks like a row .* \('joy' is one word, as every cell below it\)"):
        load_rows(DataSource(words))
    assert rows_of(words, column="joy") == [{"joy": "bad"}, {"joy": "good"}]
    assert rows_of(written(tmp_path / "named.csv", "text\nbad\ngood\n")) == [{"text": "bad"}, {"text": "good"}]
    assert len(rows_of(written(tmp_path / "texts.csv", "comment\nbad\na good film\n"))) == 2
