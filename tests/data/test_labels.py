"""Labels become the model's: by exact name or by number; one for a row, several, a number, or one
for each word."""

import json

import datasets
import pytest
import torch
from transformers import BertConfig

from hydra_transformers import load_data
from hydra_transformers.data.batches import batches
from hydra_transformers.data.loading import classes_in
from hydra_transformers.data.rows import DataSource
from tests import tiny_tags
from tests.tiny_data import names_of


def labels_of(labels, tokenizer, classes, names=None, problem_type=None, **source):
    """What becomes of `labels` for a model with `classes`. names: of the data's classes, whose
    indices the labels are"""
    rows = datasets.Dataset.from_dict({"text": ["a film"] * len(labels), "label": labels})
    if names is not None:
        rows = rows.cast_column("label", datasets.ClassLabel(names=names))
    config = BertConfig(problem_type=problem_type, **names_of(classes))
    data = load_data(rows, config, processor=tokenizer, labelled=True, **source)
    assert [row["labels"] for row in data] == data.labels
    return data.labels


FEELINGS = ["anger", "joy", "surprise"]
EXPECTED = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
MULTI = "multi_label_classification"
GENERIC = ["LABEL_0", "LABEL_1"]
COLOURS = ["red", "green"]


@pytest.mark.parametrize(
    ("labels", "classes", "names", "expected"),
    [
        ([0, 1, 2, 2], ["a", "b", "c"], ["c", "a", "b"], [2, 0, 1, 1]),
        (["c", "a"], ["a", "b", "c"], None, [2, 0]),
        ([0, 1], ["maillot", "Maillot", "maillot, tank suit"], ["Maillot", "maillot"], [1, 0]),
        ([0, 1], ["red", "green", "pink"], ["red", "green", "blue"], [0, 1]),  # no row is blue
        ([1, 1], ["crane", "crane", "cat"], ["crane", "cat"], [2, 2]),
        ([0, 1], GENERIC, ["b", "a"], [0, 1]),  # in order, where the model has no names
        ([1.0, 0.0], ["yes", "no"], None, [1, 0]),  # as csv files have them
        ([True, False], ["yes", "no"], None, [1, 0]),
        ([True, False], ["False", "True"], None, [1, 0]),
        ([1, 0, 2], ["0", "1", "2"], None, [1, 0, 2]),
        ([0, 1, 2], ["1", "2", "3"], None, [0, 1, 2]),  # no class is called 0
        (["1", "2", "3"], ["1", "2", "3", "4"], None, [0, 1, 2]),
    ],
)
def test_classes_are_matched_by_exact_name_or_by_number(labels, classes, names, expected, tokenizer):
    assert labels_of(labels, tokenizer, classes, names) == expected


@pytest.mark.parametrize(
    ("labels", "classes", "names", "words"),
    [
        # Other spellings and synonyms are other names.
        (["Red", "green"], COLOURS, None, "data has the class 'Red', which the model does not know"),
        (["red ", "green"], COLOURS, None, "data has the class 'red ', which the model does not know"),
        (["red, rouge"], COLOURS, None, "data has the class 'red, rouge', which the model does not know"),
        (["LABEL_0"], COLOURS, None, "data has the class 'LABEL_0', which the model does not know"),
        ([0, 1], ["crane", "crane", "cat"], ["crane", "cat"], "the class 'crane', which the model has several times"),
        ([0, 1], GENERIC, ["b", "a", "c"], "has 3 classes, the model 2"),
        (["b", "a"], GENERIC, None, r"has the class 'a', which the model does not know .*set id2label"),
        # A number, or True, may be the name of another class.
        (
            [False, True],
            ["True", "False"],
            None,
            "the label False of data may be a number, or the name of the model's class 1",
        ),
        ([True], ["true", "false"], None, "the label True"),
        ([0, 1, 2], ["1", "2", "0"], None, "the label 0"),
        ([1.0, 2.0, 3.0], ["1", "2", "3", "4"], None, "the label 1 .*class 0: give labels as texts"),
        ([[1], [3]], FEELINGS, None, "data has the label 3, the classes are 0 to 2"),
        ([[1], [-1]], FEELINGS, None, "data has the label -1, the classes are 0 to 2"),
        ([1, 2], FEELINGS, None, r"row 0 of the column 'label' of data is 1: give each row a list"),
        ([["joy"], ["fear"]], FEELINGS, None, "data has the class 'fear', which the model does not know"),
        ([[0.5, 1.0, 0.0], [0.0] * 3], FEELINGS, None, "the column 'label' of data holds 0.5, which is not a class"),
        ([[float("nan"), 1.0, 0.0], [0.0] * 3], FEELINGS, None, "data has the label -1"),
    ],
)
def test_labels_that_do_not_fit_raise(labels, classes, names, words, tokenizer):
    with pytest.raises(ValueError, match=words):
        labels_of(labels, tokenizer, classes, names, problem_type=MULTI if classes is FEELINGS else None)


def test_names_become_indices_in_every_form_of_data(tokenizer, tmp_path):
    config = BertConfig(**names_of(["bad", "good"]))
    rows = [{"text": "a", "label": name} for name in ("good", "bad")]
    table = datasets.Dataset.from_list(rows)
    table.to_csv(tmp_path / "rows.csv")
    for form in (rows, table, table.to_pandas(), tmp_path / "rows.csv"):
        assert [row["labels"] for row in load_data(form, config, processor=tokenizer)] == [1, 0]
    with pytest.raises(ValueError, match="the class 'ugly', which the model does not know"):
        list(load_data([*rows, {"text": "a", "label": "ugly"}], config, processor=tokenizer))


def test_every_number_is_a_label_of_regression(tokenizer):
    """Also -1, of hidden labels, -100, which losses of classes leave out, and whole ones, whose
    loss fails in Transformers 5.17."""
    numbers = [-100, 2.5, -1, 0]
    config = BertConfig(problem_type="regression", num_labels=1)
    for kept in (numbers, [-100, 2, -1, 0]):
        rows = [{"text": "a film", "label": number} for number in kept]
        [batch] = batches(load_data(rows, config, processor=tokenizer))
        assert batch["labels"].tolist() == kept and batch["labels"].is_floating_point()
    with pytest.raises(ValueError, match=r"row 1 of data has nan in the column 'label', .* give every row a number"):
        load_data([rows[0], {"text": "a", "label": float("nan")}], config, processor=tokenizer)


@pytest.mark.parametrize(
    "labels", [[["joy", "surprise"], [], ["anger"]], [[1, 2], [], [0]], [[0, 1, 1], [0, 0, 0], [1, 0, 0]], EXPECTED]
)
def test_lists_of_names_or_numbers_and_vectors_mean_the_same(labels, tokenizer, tmp_path):
    assert labels_of(labels, tokenizer, FEELINGS, problem_type=MULTI) == EXPECTED
    config = BertConfig(problem_type=MULTI, **names_of(FEELINGS))
    plain = [{"text": "a", "label": label} for label in labels]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    for rows in (plain, tmp_path / "rows.jsonl"):
        assert load_data(rows, config, processor=tokenizer).labels == EXPECTED


@pytest.mark.parametrize("cells", [["joy|surprise", "", "anger"], ["1| 2", "", "0"]])
def test_cells_list_their_labels_where_a_separator_is_named(cells, tokenizer, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "".join(f"a film,{cell}\n" for cell in cells))
    config = BertConfig(problem_type=MULTI, **names_of(FEELINGS))
    assert load_data(file, config, processor=tokenizer, label_separator="|").labels == EXPECTED
    assert classes_in(DataSource(str(file), label_separator="|"))[1] == MULTI
    assert classes_in(DataSource(str(file))) == (sorted({*cells, None} - {"", None}), None)
    with pytest.raises(ValueError, match=r'give each row a list of labels, .* label_separator="\|"'):
        load_data(file, config, processor=tokenizer)


def test_a_sequence_of_class_labels_is_found_and_matched_by_name(tokenizer):
    feature = datasets.Sequence(datasets.ClassLabel(names=["surprise", "joy", "anger"]))
    features = datasets.Features({"text": datasets.Value("string"), "feelings": feature})
    rows = datasets.Dataset.from_dict({"text": ["a"] * 3, "feelings": [[1, 0], [], [2]]}, features=features)
    in_order = [[1.0, 1.0, 0.0], [0.0] * 3, [0.0, 0.0, 1.0]]
    generic = [f"LABEL_{index}" for index in range(3)]
    for classes, expected in ((FEELINGS, EXPECTED), (generic, in_order)):
        config = BertConfig(problem_type=MULTI, **names_of(classes))
        assert load_data(rows, config, processor=tokenizer).labels == expected


# Words and tags


WORDS = ["annabelle", "smith", "paris"]
TAGS = ["B-PER", "I-PER", "B-LOC"]
NUMBERS = [1, 2, 3]  # of these tags in the model
NONE = -100  # of no tag


def load_words(rows, **settings):
    return load_data(rows, tiny_tags.backbone(), processor=tiny_tags.tokenizer(), **settings)


def word_features(**names):
    lists = {name: datasets.Sequence(datasets.ClassLabel(names=tags)) for name, tags in names.items()}
    return datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), **lists})


def test_the_first_token_of_a_word_carries_its_tag_and_padding_none():
    data = load_words([{"tokens": WORDS, "ner_tags": TAGS}, {"tokens": ["paris"], "ner_tags": ["B-LOC"]}])
    # [CLS] anna ##bel ##le smith paris [SEP]
    assert data[0]["input_ids"] == [2, 5, 6, 7, 8, 11, 3]
    assert data[0]["labels"] == [NONE, 1, NONE, NONE, 2, 3, NONE]
    [batch] = batches(data)
    assert batch["labels"][1].tolist() == [NONE, 3, *[NONE] * 5]
    assert batch["attention_mask"][1].tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert torch.isfinite(tiny_tags.fused()(**batch).loss)


def test_tags_are_names_numbers_or_classes_in_any_order(tmp_path):
    features = word_features(tags=["B-LOC", "I-LOC", "O", "B-PER", "I-PER"])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"tokens": WORDS, "ner_tags": TAGS}) + "\n")
    forms = [
        [{"tokens": WORDS, "ner_tags": NUMBERS}],
        datasets.Dataset.from_dict({"tokens": [WORDS], "tags": [TAGS]}, features=features),
        str(tmp_path / "rows.jsonl"),
        datasets.Dataset.from_list([{"id": 7, "tokens": WORDS, "ner_tags": NUMBERS}]),
    ]
    for rows in forms:
        assert load_words(rows).labels == [NUMBERS]
    assert load_words([{"tokens": WORDS, "ner_tags": [1, NONE, 3]}]).labels == [[1, NONE, 3]]
    assert "labels" not in load_words([{"tokens": WORDS, "ner_tags": TAGS}], labelled=False)[0]
    assert load_words([{"tokens": WORDS}])[0]["word_starts"] == [0, 1, 0, 0, 1, 1, 0]
    named = [{"a": WORDS, "b": WORDS, "pos": [0, 0, 0], "ner": NUMBERS}]
    assert load_words(named, column="a", label="ner").labels == [NUMBERS]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"tokens": WORDS, "ner_tags": [*TAGS, "O"]}], "row 0 of data has 3 words and 4 tags: give every word one"),
        ([{"tokens": WORDS, "ner_tags": [1, 2, 5]}], "data has the label 5, the classes are 0 to 4"),
        ([{"tokens": WORDS, "ner_tags": [1, 2, -1]}], "data has the label -1"),
        ([{"tokens": WORDS, "ner_tags": ["B-PER", "I-PER", "B-ORG"]}], "'B-ORG', which the model does not know"),
        ([{"tokens": WORDS, "label": 1}], "no column of tags among tokens, label"),
        ([{"text": "annabelle", "ner_tags": TAGS}], "no column of words among text, ner_tags"),
        ([{"first": WORDS, "second": WORDS}], "more than one column of words"),
    ],
)
def test_tags_that_do_not_fit_raise(rows, words):
    with pytest.raises(ValueError, match=words):
        load_words(rows, labelled=True)


def test_parts_are_the_splits_that_have_tags():
    """Also where a set has several columns of tags, as CoNLL 2003, and never the last class for a
    hidden tag."""
    features = word_features(pos_tags=["NN", "VB"], ner_tags=tiny_tags.TAGS)

    def rows(count, tags=TAGS):
        columns = {"tokens": [WORDS] * count, "pos_tags": [[0, 0, 0]] * count, "ner_tags": [tags] * count}
        return datasets.Dataset.from_dict(columns, features=features)

    splits = datasets.DatasetDict({"train": rows(40), "validation": rows(5), "test": rows(7)})
    assert [len(load_words(splits, part=part)) for part in ("training", "validation", "test")] == [40, 5, 7]
    splits["test"] = rows(7, [-1, -1, -1])  # without tags it tests nothing
    assert [len(load_words(splits, part=part)) for part in ("training", "test")] == [36, 4]
    with pytest.raises(ValueError, match="data has the label -1, the classes are 0 to 4"):
        load_words(splits, split="test")
