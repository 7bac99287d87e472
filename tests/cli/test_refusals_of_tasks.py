"""Labels that do not fit a model's task: one sentence, from a file on the command line as in Python."""

import json
import re

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertForTokenClassification

from hydra_transformers import AutoHydra
from tests.command_line import call, run
from tests.tiny_data import SIZES, WORDS, names_of, save_bert


KINDS = {
    "numbers": (BertForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}),
    "labels": (
        BertForSequenceClassification,
        {"problem_type": "multi_label_classification", **names_of(["anger", "joy", "calm"])},
    ),
    "tags": (BertForTokenClassification, names_of(["O", "B-FILM", "I-FILM"])),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hydra of each task, and a pre-trained model."""
    folder = tmp_path_factory.mktemp("tasks")
    tokenizer = AutoTokenizer.from_pretrained(save_bert(folder / "bert"))
    for name, (model_class, fields) in KINDS.items():
        torch.manual_seed(0)
        config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **fields, **SIZES)
        AutoHydra.from_pruned_members([model_class(config) for _ in range(2)]).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def write(folder, rows, name="rows"):
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder / f"{name}.jsonl"


@pytest.fixture
def refused(capsys):
    """The sentence of a command that fails, the last line behind what readers of files show."""

    def last_line(*words) -> str:
        capsys.readouterr()
        assert call(*words) == 2
        return capsys.readouterr().err.splitlines()[-1]

    return last_line


def texts(labels):
    return [{"text": "a good film", "label": label} for label in labels]


@pytest.mark.parametrize(
    "model, rows, sentence",
    [
        (
            "numbers",
            texts([0.5] * 59 + [[1, 2]]),
            "and the model is made for regression: give every row a number",
        ),
        (
            "numbers",
            texts([0.5] * 59 + [float("nan")]),
            "row 59 of .* has nan in the column 'label', and the model is made for",
        ),
        ("labels", texts([["joy"]] * 60), "no row of data has the label 'anger', 'calm'"),
        ("labels", texts([[0, 2]] * 59 + [[3]]), "row 59 of .* has the label 3, the model has the labels 0 to 2"),
        ("labels", texts([1] * 60), "the model decides on several labels, give each row a list of its labels"),
        ("tags", [{"tokens": ["a", "film"], "tags": ["O"]}] * 60, "has 2 words and 1 tags: give every word one"),
        (
            "tags",
            [{"tokens": ["a", "film"], "tags": [0, 7]}] * 60,
            "row 0 of .* has the tag 7, the model has the tags 0 to 2",
        ),
    ],
)
def test_labels_that_do_not_fit_the_task_get_a_sentence(model, rows, sentence, folder, tmp_path, refused):
    data = ["--data", write(tmp_path, rows), "--split", "train", "--device", "cpu"]
    said = refused("calibrate", folder / model, *data, "--output", tmp_path / "out")
    assert re.search(sentence, said), said
    assert not (tmp_path / "out").exists()


def test_whole_numbers_are_classes_unless_one_says_that_they_are_numbers(folder, tmp_path, capsys, refused):
    rows = write(tmp_path, texts([1, 2, 3, 4, 5] * 20))
    train = ["finetune", folder / "bert", "--data", rows, "--members", 1, "--max-steps", 1]
    run(*train, "--output", tmp_path / "classes")
    said = capsys.readouterr().out
    assert "The labels are whole numbers, taken as 6 classes: pass --regression if they are numbers" in said
    run(*train, "--regression", "--variance", "--output", tmp_path / "numbers")
    assert "numbers, label (regression)" in capsys.readouterr().out
    config = json.loads((tmp_path / "numbers" / "member-0" / "config.json").read_text())
    assert (
        config["problem_type"] == "regression" and config["predicts_variance"] and config["id2label"] == {"0": "label"}
    )
    assert "--variance is for numbers, and the labels are classes" in refused(
        *train, "--variance", "--output", tmp_path / "x"
    )
    words = write(tmp_path, texts(["good", "bad"] * 50), "words")
    said = refused(*train[:3], words, *train[4:], "--regression", "--output", tmp_path / "y")
    assert "has 'good' in the column 'label', and the model is made for regression" in said
