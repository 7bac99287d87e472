"""Words and tags: columns are found, tags matched, and the first token of each word carries its tag."""

import json

import datasets
import pytest
import torch

from hydra_transformers.data import load_data
from hydra_transformers.data.batches import batches
from tests import tiny_tags


WORDS, TAGS = ["annabelle", "smith", "paris"], ["B-PER", "I-PER", "B-LOC"]
NUMBERS = [1, 2, 3]  # of these tags in the model
NONE = -100


def load(rows, **settings):
    return load_data(rows, tiny_tags.backbone(), processor=tiny_tags.tokenizer(), **settings)


def test_the_first_token_of_a_word_carries_its_tag():
    found = load([{"tokens": WORDS, "ner_tags": TAGS}])
    # [CLS] anna ##bel ##le smith paris [SEP]
    assert found[0]["input_ids"] == [2, 5, 6, 7, 8, 11, 3]
    assert found[0]["labels"] == [NONE, 1, NONE, NONE, 2, 3, NONE]


def test_tags_are_names_numbers_or_classes_in_any_order(tmp_path):
    other = ["B-LOC", "I-LOC", "O", "B-PER", "I-PER"]
    features = datasets.Features(
        {
            "words": datasets.Sequence(datasets.Value("string")),
            "tags": datasets.Sequence(datasets.ClassLabel(names=other)),
        }
    )
    as_classes = datasets.Dataset.from_dict({"words": [WORDS], "tags": [TAGS]}, features=features)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"tokens": WORDS, "ner_tags": TAGS}) + "\n")
    forms = [
        [{"tokens": WORDS, "ner_tags": NUMBERS}],
        as_classes,
        str(tmp_path / "rows.jsonl"),
        datasets.Dataset.from_list([{"id": 7, "tokens": WORDS, "ner_tags": NUMBERS}]),
    ]
    for rows in forms:
        assert load(rows).labels == [NUMBERS]
    assert load([{"tokens": WORDS, "ner_tags": [1, NONE, 3]}])[0]["labels"] == [NONE, 1, NONE, NONE, NONE, 3, NONE]
    assert "labels" not in load([{"tokens": WORDS, "ner_tags": TAGS}], labelled=False)[0]
    assert "labels" not in load([{"tokens": WORDS}])[0]
    named = [{"a": WORDS, "b": WORDS, "pos": [0, 0, 0], "ner": NUMBERS}]
    assert load(named, text="a", label="ner").labels == [NUMBERS]


def test_batches_are_padded_with_tokens_that_no_loss_counts():
    rows = load([{"tokens": WORDS, "ner_tags": TAGS}, {"tokens": ["paris"], "ner_tags": ["B-LOC"]}])
    [batch] = batches(rows)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 7)
    assert batch["labels"][1].tolist() == [NONE, 3, *[NONE] * 5]
    assert batch["attention_mask"][1].tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert torch.isfinite(tiny_tags.fused()(**batch).loss)


@pytest.mark.parametrize(
    "rows, sentence",
    [
        ([{"tokens": WORDS, "ner_tags": [*TAGS, "O"]}], "row 0 of data has 3 words and 4 tags: give every word one"),
        ([{"tokens": WORDS, "ner_tags": [1, 2, 5]}], "row 0 of data has the tag 5, the model has the tags 0 to 4"),
        ([{"tokens": WORDS, "ner_tags": [1, 2, -1]}], "row 0 of data has the tag -1"),
        (
            [{"tokens": WORDS, "ner_tags": ["B-PER", "I-PER", "B-ORG"]}],
            "the class 'B-ORG', which the model does not know",
        ),
        (
            [{"tokens": WORDS, "label": 1}],
            "'label' of data has one label for each row, and this model classifies tokens",
        ),
        ([{"text": "annabelle", "ner_tags": TAGS}], "no column of words among text, ner_tags"),
        ([{"first": WORDS, "second": WORDS}], "more than one column of words"),
    ],
)
def test_tags_that_do_not_fit_are_refused(rows, sentence):
    with pytest.raises(ValueError, match=sentence):
        load(rows, labelled=True)


def test_parts_are_the_splits_that_have_tags():
    """Also where a set has several columns of tags, as CoNLL 2003."""
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "pos_tags": datasets.Sequence(datasets.ClassLabel(names=["NN", "VB"])),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=tiny_tags.TAGS)),
        }
    )

    def rows(count, tags=TAGS):
        columns = {"tokens": [WORDS] * count, "pos_tags": [[0, 0, 0]] * count, "ner_tags": [tags] * count}
        return datasets.Dataset.from_dict(columns, features=features)

    splits = datasets.DatasetDict({"train": rows(40), "validation": rows(5), "test": rows(7)})
    assert [len(load(splits, part=part)) for part in ("training", "validation", "test")] == [40, 5, 7]
    splits["test"] = rows(7, [-1, -1, -1])  # without tags it tests nothing
    assert [len(load(splits, part=part)) for part in ("training", "test")] == [36, 4]
