"""Batches of every form of data: loaders, lists, rows that are padded and stacked; what is not data raises."""

import copy

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

from hydra_transformers.data.batches import batches, collate
from hydra_transformers.data.prediction import collect_member_logits, predict
from hydra_transformers.pruning import taylor_scores
from hydra_transformers.reports import evaluate_uncertainty
from tests.families import BERT, LLAMA, MODERNBERT, MPNET, for_families
from tests.tiny_data import save_bert


ROWS = [{"x": torch.full((2,), float(i)), "label": i, "name": f"row {i}"} for i in range(7)]
TEXTS = ["a good film", "bad", "a film of joy", "a bad film of a bad film", "joy", "good good"]
LABELS = [1, 0, 1, 0, 1, 1]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read.append(index)
        return self.rows[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def hugging_face_dataset():
    return Dataset.from_list([{"x": row["x"].tolist(), "label": row["label"], "name": row["name"]} for row in ROWS])


def whole(iterator):
    parts = list(iterator)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize(
    "make", [lambda: Rows(ROWS), Stream, hugging_face_dataset], ids=["torch", "stream", "datasets"]
)
def test_a_dataset_of_rows_is_collated_and_texts_are_dropped(make):
    parts = list(batches(make(), batch_size=3))
    assert [len(batch["x"]) for batch in parts] == [3, 3, 1]
    assert set(parts[0]) == {"x", "labels"}
    assert whole(parts)["labels"].tolist() == whole(parts)["x"][:, 0].tolist() == list(range(7))


def test_loaders_and_lists_bring_their_own_batches():
    loader = DataLoader(ROWS, batch_size=4)
    assert [len(batch["x"]) for batch in batches(loader, batch_size=1)] == [4, 3]
    ready = [BatchEncoding({"x": torch.zeros(5, 2), "texts": ["a"] * 5})]
    assert [set(batch) for batch in batches(ready)] == [{"x"}]
    assert [set(batch) for batch in batches(iter(ready))] == [{"x"}]


def test_a_list_of_rows_is_put_into_batches():
    for row in (
        {"x": [0.0, 1.0], "labels": 1},
        {"x": torch.zeros(2), "labels": torch.tensor(1)},
        {"input_ids": [1, 2, 3]},
        {"pixel_values": np.zeros((3, 4, 4), dtype=np.float32)},
    ):
        [first, last] = batches([row] * 5, batch_size=3)
        for name, value in row.items():
            assert first[name].shape == (3, *np.shape(value)) and last[name].shape == (2, *np.shape(value))


@pytest.mark.parametrize("as_given", [np.array, lambda mask: mask, lambda mask: [np.array(row) for row in mask]])
def test_masks_and_labels_that_are_arrays_or_lists_count(as_given):
    mask = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    inputs = {"input_ids": torch.arange(10).view(2, 5) + 2}
    [batch] = batches([{**inputs, "attention_mask": as_given(mask), "labels": [1, 0], "name": ["a", "b"], "epoch": 3}])
    assert torch.equal(batch["attention_mask"], torch.tensor(mask)) and batch["labels"].tolist() == [1, 0]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    backbone = BERT.backbone()
    expected = predict(backbone, {**inputs, "attention_mask": torch.tensor(mask)})
    assert torch.equal(predict(backbone, batch), expected)
    assert not torch.equal(predict(backbone, inputs), expected)


@pytest.mark.parametrize("name", ["label", "labels"])
def test_labels_are_kept_as_they_are(name):
    """Also between two classes, and -100 of regression."""
    [batch] = batches([{"x": [0.0, 1.0], name: label} for label in (1, 2.75, -100.0)])
    assert batch["labels"].tolist() == [1, 2.75, -100.0]
    [integers] = batches([{"x": [0.0, 1.0], name: np.int64(label)} for label in (1, 2)])
    assert integers["labels"].dtype == torch.int64


@pytest.mark.parametrize("make", [lambda: Rows(ROWS), Stream, lambda: DataLoader(ROWS, batch_size=2)])
def test_processes_share_the_batches_without_repeating_any(make):
    shares = [whole(batches(make(), 2, rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(int(x) for share in shares for x in share["x"][:, 0]) == list(range(7))
    data = Rows(ROWS)  # rows of other processes are not loaded
    list(batches(data, batch_size=2, rank=1, world_size=2))
    assert set(data.read) == {2, 3, 6}


# Tokens


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A model that calls its classes by names, and its tokenizer."""
    folder = save_bert(tmp_path_factory.mktemp("bert"))
    model = copy.deepcopy(AutoModelForSequenceClassification.from_pretrained(folder).eval())
    model.config.id2label, model.config.label2id = {0: "bad", 1: "good"}, {"bad": 0, "good": 1}
    return model, AutoTokenizer.from_pretrained(folder)


@for_families([BERT, MPNET, MODERNBERT, LLAMA])
def test_padding_changes_no_prediction(family):
    model = family.fused()
    rows = [{"input_ids": torch.arange(5, 5 + length)} for length in (3, 7, 5)]
    alone = torch.cat([predict(model, collate([row])) for row in rows])
    assert torch.allclose(predict(model, collate(rows)), alone, atol=1e-5)


def test_only_tokens_are_padded():
    rows = [{"input_ids": [1, 2], "labels": [1.0, 0.0]}, {"input_ids": [1, 2, 3], "labels": [0.0, 1.0]}]
    batch = collate(rows)
    assert batch["labels"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert batch["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.filterwarnings("ignore")
def test_tokenized_rows_may_have_names_as_labels_wherever_labels_are_needed(bert):
    model, tokenizer = bert
    rows = Dataset.from_dict({"text": TEXTS, "label": [("bad", "good")[label] for label in LABELS]})
    rows = rows.map(lambda row: tokenizer(row["text"]))
    numbers = rows.remove_columns("label").add_column("label", LABELS)
    loader = [dict(tokenizer(TEXTS, padding=True)) | {"label": list(rows["label"])}]
    assert collect_member_logits(model, rows)[1].tolist() == collect_member_logits(model, loader)[1].tolist() == LABELS
    others = rows.remove_columns("label").add_column("label", ["ugly"] * len(LABELS))
    named, numbered = (
        evaluate_uncertainty({"model": model}, data, {"far": {"others": others}}).models["model"]["data"]
        for data in (rows, numbers)
    )
    assert named == numbered
    assert taylor_scores(model, rows) == taylor_scores(model, numbers)
    assert collate(list(rows), classes=["bad", "good"])["labels"].tolist() == LABELS
    with pytest.raises(ValueError, match="the class 'ugly', which the model does not know"):
        evaluate_uncertainty(model, others)


# What is not data


IMAGE = Image.new("RGB", (8, 8))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (DataLoader([(torch.zeros(2), 0)]), TypeError, "batch 0 of data is a list, not a dict such as"),
        (Rows([(torch.zeros(2), 0)]), TypeError, "a row of data is a tuple, not a dict"),
        ({"x": torch.zeros(2)}, TypeError, r"data is a dict: .*\[batch\] for a single one"),
        (None, TypeError, "data is a NoneType: pass a DataLoader, a list of dict batches"),
        (
            [{"text": ["a", "b"]}],
            TypeError,
            r"not a batch of model inputs \(its entries: text \(list\)\): pass load_data",
        ),
        ([{"x": torch.zeros(2), "y": torch.tensor(1)}], TypeError, "batch 0 of data is not a batch"),
        (DataLoader(Rows([{"x": torch.zeros(2), "labels": 1}]), batch_size=None), TypeError, "is not a batch"),
        (
            [{"image": IMAGE, "label": 1}],
            TypeError,
            r"image \(Image\), label \(int\)\): pass load_data\(data, model\)",
        ),
        (Rows([{"x": [1.0, 2.0]}, {"x": [1.0, 2.0, 3.0]}]), ValueError, "expected sequence of length 2"),
        (
            [{"input_ids": torch.zeros(2, 3).long(), "attention_mask": [[1, 1, 1], [1, 1]]}],
            ValueError,
            "expected sequence of length 3",
        ),
        (
            [{"input_ids": [1, 2], "attention_mask": None}, {"input_ids": [1, 2], "attention_mask": [1, 0]}],
            ValueError,
            "a row of data has no numbers as its attention_mask",
        ),
    ],
)
def test_what_is_not_data_raises_and_no_mask_is_left_out(data, error, words):
    with pytest.raises(error, match=words):
        list(batches(data))
