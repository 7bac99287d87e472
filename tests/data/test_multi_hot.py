"""Rows with several labels, in every form that files and data sets have them in."""

import json

import datasets
import pytest
from transformers import AutoTokenizer, BertConfig

from hydra_transformers import load_data
from hydra_transformers.data.loading import classes_in
from hydra_transformers.data.rows import DataSource
from tests.tiny_data import names_of, save_bert


FEELINGS = ["anger", "joy", "surprise"]
EXPECTED = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_bert(tmp_path_factory.mktemp("bert")))


def labels_of(data, tokenizer, classes=FEELINGS, **source):
    config = BertConfig(problem_type="multi_label_classification", **names_of(classes))
    found = load_data(data, config, processor=tokenizer, **source)
    assert [row["labels"] for row in found] == found.labels
    return found.labels


def rows_of(labels, feature=None):
    features = None if feature is None else datasets.Features({"text": datasets.Value("string"), "labels": feature})
    return datasets.Dataset.from_dict({"text": ["a film"] * len(labels), "labels": labels}, features=features)


@pytest.mark.parametrize(
    "labels",
    [
        [["joy", "surprise"], [], ["anger"]],
        [[1, 2], [], [0]],
        [[0, 1, 1], [0, 0, 0], [1, 0, 0]],
        [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
    ],
)
def test_lists_of_names_or_numbers_and_vectors_mean_the_same(labels, tokenizer, tmp_path):
    assert labels_of(rows_of(labels), tokenizer) == EXPECTED
    plain = [{"text": "a film", "labels": each} for each in labels]
    assert labels_of(plain, tokenizer) == EXPECTED
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in plain))
    assert labels_of(file, tokenizer) == EXPECTED


@pytest.mark.parametrize(
    "cells",
    [
        ["joy|surprise", "", "anger"],
        ["joy; surprise", "", "anger"],
        ['"joy, surprise"', "", "anger"],
        ["1|2", "", "0"],
        ['"[""joy"", ""surprise""]"', "[]", '"[""anger""]"'],
        ['"[0, 1, 1]"', '"[0, 0, 0]"', '"[1, 0, 0]"'],
    ],
)
def test_cells_of_csv_files_list_their_labels(cells, tokenizer, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,labels\n" + "".join(f"a film,{cell}\n" for cell in cells))
    assert labels_of(file, tokenizer) == EXPECTED


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["joy|surprise", "", "anger"], (FEELINGS, "multi_label_classification")),
        (["", "joy|surprise", "anger"], (FEELINGS, "multi_label_classification")),
        (['"[""joy"", ""surprise""]"', "[]", '"[""anger""]"'], (FEELINGS, "multi_label_classification")),
        (['"tench, Tinca tinca"', "[perch]"], (["[perch]", "tench, Tinca tinca"], None)),  # names
    ],
)
def test_a_new_model_is_made_for_the_labels_that_cells_list(cells, expected, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,labels\n" + "".join(f"a film,{cell}\n" for cell in cells))
    assert classes_in(DataSource(str(file))) == expected


def test_a_sequence_of_class_labels_is_found_and_matched_by_name(tokenizer):
    names = ["surprise", "Joy", "anger"]
    rows = rows_of([[1, 0], [], [2]], datasets.Sequence(datasets.ClassLabel(names=names)))
    rows = rows.rename_column("labels", "feelings")
    assert labels_of(rows, tokenizer) == EXPECTED
    assert labels_of(rows, tokenizer, labels_in_order=True) == [[1.0, 1.0, 0.0], [0.0] * 3, [0.0, 0.0, 1.0]]
    generic = [f"LABEL_{index}" for index in range(3)]
    assert labels_of(rows, tokenizer, generic) == [[1.0, 1.0, 0.0], [0.0] * 3, [0.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    "labels, sentence",
    [
        ([[1], [3]], "row 1 of data has the label 3, the model has the labels 0 to 2"),
        ([[1], [-1]], "row 1 of data has the label -1, the model has the labels 0 to 2"),
        (
            [1, 2],
            r"row 0 of the column 'labels' of data is 1: the model decides on several labels, give each row a list",
        ),
        ([["joy"], ["fear"]], "data has the class 'fear', which the model does not know"),
        ([[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]], "row 0 of the column 'labels' of data has 0.5 among its labels"),
        ([[float("nan"), 1.0, 0.0], [0.0, 0.0, 0.0]], "has nan among its labels"),
    ],
)
def test_labels_that_do_not_fit_get_a_sentence(labels, sentence, tokenizer):
    with pytest.raises(ValueError, match=sentence):
        labels_of([{"text": "a film", "labels": each} for each in labels], tokenizer)


def test_a_cell_that_is_no_list_gets_a_sentence(tokenizer, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,labels\na film,[joy\na film,joy\n")
    with pytest.raises(ValueError, match=r"row 0 of the column 'labels' of .* is '\[joy', which is no list in JSON"):
        labels_of(file, tokenizer)
