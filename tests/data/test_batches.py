"""Batches of every form of data: loaders, lists, rows that are padded and stacked; what is not data
raises."""

import numpy as np
import pytest
import torch
from datasets import Dataset, Value
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForSequenceClassification, BatchEncoding, DataCollatorWithPadding

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import temperature_scaled
from hydra_transformers.data.batches import batches, collate
from hydra_transformers.data.prediction import predict
from hydra_transformers.pruning import draw_members, extract_circuit, taylor_scores
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import Detector, calibrate, predict_uncertainty
from tests.families import BERT, LLAMA, MODERNBERT, MPNET, each_of


ROWS = [{"x": torch.full((2,), float(i)), "label": i, "name": f"row {i}"} for i in range(7)]
TEXTS = ["a good film", "bad", "a film of joy", "a bad film of a bad film", "joy", "good good", "film", "of a bad joy"]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows
        self.read = []

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


@pytest.mark.parametrize("make", [lambda: Rows(ROWS), Stream, hugging_face_dataset])
def test_a_dataset_of_rows_is_collated_and_texts_are_dropped(make):
    parts = list(batches(make(), batch_size=3))
    assert [len(batch["x"]) for batch in parts] == [3, 3, 1]
    assert set(parts[0]) == {"x", "labels"}
    assert whole(parts)["labels"].tolist() == whole(parts)["x"][:, 0].tolist() == list(range(7))


def test_loaders_and_lists_bring_their_own_batches_and_rows_of_a_list_are_put_into_some():
    loader = DataLoader(ROWS, batch_size=4)
    assert [len(batch["x"]) for batch in batches(loader, batch_size=1)] == [4, 3]
    ready = [BatchEncoding({"x": torch.zeros(5, 2), "texts": ["a"] * 5})]
    assert [set(batch) for batch in batches(ready)] == [{"x"}]
    assert [set(batch) for batch in batches(iter(ready))] == [{"x"}]
    for row in (  # a list may hold rows, too
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


@each_of([BERT, MPNET, MODERNBERT, LLAMA])
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


COUNT = 64  # texts of different lengths in each batch
LABELS = [row % 3 % 2 for row in range(COUNT)]


@pytest.fixture(scope="module")
def model(bert):
    return AutoModelForSequenceClassification.from_pretrained(bert).eval()


@pytest.fixture(scope="module")
def forms(tokenizer):
    """The same rows: padded by hand, as `dataset.map(tokenize)` leaves them, in a DataLoader."""
    texts = [TEXTS[row * row % len(TEXTS)] for row in range(COUNT)]
    rows = Dataset.from_dict({"text": texts, "label": LABELS}).map(lambda row: tokenizer(row["text"]))
    by_hand = []
    for part in (slice(0, 32), slice(32, COUNT)):
        inputs = tokenizer(texts[part], padding=True, return_tensors="pt")
        by_hand.append({**inputs, "labels": torch.tensor(LABELS[part])})
    numbers = rows.remove_columns("text")
    collator = DataCollatorWithPadding(tokenizer)
    return {"by hand": by_hand, "rows": rows, "loader": DataLoader(numbers, batch_size=32, collate_fn=collator)}


def judged(model, data):
    [result] = evaluate_uncertainty(model, data, {"far": {"same": data}}).models.values()
    return result["data"] | result["same (far)"]


READERS = {
    "predict_uncertainty": lambda model, data: predict_uncertainty(model, data).total.tolist(),
    "evaluate_uncertainty": judged,
    "calibrate": lambda model, data: calibrate(AutoHydra.from_backbone(model), data).settings["temperature"],
    "temperature_scaled": lambda model, data: temperature_scaled(model, data).scaling.temperature,
    "detectors": lambda model, data: Detector("energy").score(model, data).tolist(),
    "taylor_scores": lambda model, data: list(taylor_scores(model, data).values()),
    "extract_circuit": lambda model, data: extract_circuit(model, data, data, "avg", budget=2).scores,
    "draw_members": lambda model, data: [
        member.config.kept_heads
        for member in draw_members(model, data=data, heads_per_layer=2, num_members=2, allow_equal=True)
    ],
}
SLOW = ("draw_members", "extract_circuit")
NEED_NO_LABELS = ("predict_uncertainty", "detectors")


@pytest.mark.filterwarnings("ignore")  # tiny models know little
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in READERS]
)
def test_tokenized_rows_and_loaders_are_read_as_batches_padded_by_hand(name, model, forms):
    padded, rows, loader = (READERS[name](model, forms[form]) for form in ("by hand", "rows", "loader"))
    for values in (rows, loader):
        torch.testing.assert_close(values, padded, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in READERS if name not in NEED_NO_LABELS])
def test_labels_that_are_names_raise_where_labels_are_needed(name, model, forms):
    names = forms["rows"].cast_column("label", Value("string"))
    with pytest.raises(ValueError, match="no labels"):
        READERS[name](model, names)
    evaluate_uncertainty(model, forms["rows"], {"far": {"others": names}})


# What is not data


IMAGE = Image.new("RGB", (8, 8))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (DataLoader([(torch.zeros(2), 0)]), TypeError, "batch 0 of data is a list, not a dict such as"),
        (Rows([(torch.zeros(2), 0)]), TypeError, "a row of data is a tuple, not a dict"),
        ({"x": torch.zeros(2)}, TypeError, r"data is a dict: .*\[batch\] for a single one"),
        (None, TypeError, "data is a NoneType: pass a DataLoader, a list of dict batches"),
        ([{"text": ["a", "b"]}], TypeError, r"not a batch of .* \(its entries: text \(list\)\): pass load_data"),
        ([{"x": torch.zeros(2), "y": torch.tensor(1)}], TypeError, "batch 0 of data is not a batch"),
        (DataLoader(Rows([{"x": torch.zeros(2), "labels": 1}]), batch_size=None), TypeError, "is not a batch"),
        ([{"image": IMAGE, "label": 1}], TypeError, r"image \(Image\), label \(int\)\): pass load_data\(data"),
        (Rows([{"x": [1.0, 2.0]}, {"x": [1.0, 2.0, 3.0]}]), ValueError, "expected sequence of length 2"),
        (
            [{"x": torch.zeros(2, 3), "attention_mask": [[1, 1, 1], [1, 1]]}],
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
