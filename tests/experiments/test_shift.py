"""Every method is judged under shift, on rows that are the same for all, and tables tell of it."""

import json

import pytest
import torch

from experiments import hub_sets, shift_tables
from experiments.methods import Comparison
from experiments.rows import TensorRows, as_it_is
from experiments.shifted_sets import (
    IMAGE_CORRUPTIONS,
    METRICS,
    SEVERITIES,
    TEXT_CORRUPTIONS,
    shifted_images,
    shifted_texts,
)
from experiments.smallest import SMALLEST, images, new_backbone, splits
from experiments.table import table
from hydra_transformers.shift import CORRUPTIONS, corrupt
from tests.tiny_data import picture_rows, save_vit


def test_images_under_shift_are_some_test_images_as_stored(monkeypatch):
    monkeypatch.setattr("experiments.shifted_sets.ROWS", 5)
    test = images(12, seed=0)
    found = shifted_images(test, severities=(1, 5))
    assert list(found) == list(IMAGE_CORRUPTIONS) and all(CORRUPTIONS[name].kind == "image" for name in found)
    rows = found["pixelate"][5].tensors
    assert torch.equal(rows["labels"], test.tensors["labels"][::2])
    assert torch.equal(rows["pixel_values"], corrupt(test.tensors["pixel_values"][::2], "pixelate", 5))


def test_texts_under_shift_are_corrupted_before_they_are_tokenized():
    def rows_of(texts):
        return TensorRows({"input_ids": torch.tensor([[len(text)] for text in texts])}, as_it_is)

    texts = ["a film of joy and of sorrow", "bad, bad, bad"]
    found = shifted_texts(texts, rows_of)(rows_of(texts))
    assert list(found) == list(TEXT_CORRUPTIONS) and list(found["word_drops"]) == list(SEVERITIES)
    lengths = [[len(corrupt(text, "word_drops", 5))] for text in texts]
    assert found["word_drops"][5].tensors["input_ids"].tolist() == lengths


def test_a_method_is_judged_under_shift_and_judged_again_where_that_is_missing(tmp_path):
    comparison = Comparison(SMALLEST, splits(), tmp_path, "cpu", seeds=1, backbones=3)
    torch.manual_seed(0)
    model = new_backbone().eval()
    comparison.judge(0, "single", lambda: model)
    [plain, tempered] = [tmp_path / "results" / "0" / f"{name}.json" for name in ("single", "temperature")]
    first = json.loads(plain.read_text())
    assert first["shift"]["severities"] == [5] and list(first["shift"]["corruptions"]) == ["contrast"]
    assert set(first["shift"]["corruptions"]["contrast"]) == set(METRICS)
    assert first["shift"]["corruptions"]["contrast"]["nll"] != [first["id"]["nll"]]
    assert "shift" not in first["validation"] and "shift" in json.loads(tempered.read_text())
    comparison.judge(0, "single", lambda: pytest.fail("it was judged"))
    plain.write_text(json.dumps({key: value for key, value in first.items() if key != "shift"}))
    comparison.judge(0, "single", lambda: model)
    assert json.loads(plain.read_text()) == first


def run(accuracy: float, **shift) -> dict:
    return {"id": {"accuracy": accuracy, "brier": 0.5}} | shift


SHIFT = {
    "severities": [1, 5],
    "corruptions": {
        "contrast": {key: [0.5, 0.3] for key in METRICS},
        "pixelate": {key: [0.7, 0.1] for key in METRICS},
    },
}


def test_the_table_has_means_as_the_paper_and_a_dash_where_nothing_was_judged():
    assert shift_tables.shifted("nll")(run(0.9, shift=SHIFT)) == pytest.approx(0.4)
    assert shift_tables.shifted("nll", severity=1)(run(0.9, shift=SHIFT)) == pytest.approx(0.6)
    of_seed = {"a": run(0.9, shift=SHIFT, tempered=run(0.9, shift=SHIFT)), "b": run(0.8)}
    lines = shift_tables.shift_table({"0": of_seed, "1": of_seed}, {"a": "A", "b": "B"}).splitlines()
    assert lines[0].startswith("| | Acc ↑, clean | severity 1 | severity 5 | average | ECE ↓ |")
    assert lines[2:] == [
        "| A | 90.00 | 60.00 | 20.00 | 40.00 | 0.400 | 0.400 | 40.0 |",
        "| B | 80.00 | - | - | - | - | - | - |",
    ]
    assert table({"0": {"a": {}}}, {"a": "A"}, [("x", lambda run: None, ".1f")]).endswith("| A | - |")


def test_where_nothing_was_judged_the_page_says_so_in_place_of_the_table():
    assert shift_tables.shift_table({"0": {"a": run(0.9)}}, {"a": "A"}) == "Not judged yet."


def test_settings_from_the_hub_read_the_standard_corrupted_set(tmp_path, monkeypatch):
    start = str(save_vit(tmp_path / "vit"))
    rows = picture_rows(12)
    monkeypatch.setattr("hydra_transformers.data.loading.load_rows", lambda source: (rows, source.split, ""))
    monkeypatch.setattr(hub_sets, "Augmented", lambda recipe: None)
    monkeypatch.setattr(hub_sets, "CIRCUIT_ROWS", 3)
    asked = []

    def load_standard_set(name, corruptions, severities, limit):
        asked.append((name, corruptions, severities, limit))
        return {"contrast": {3: rows}}

    monkeypatch.setattr(hub_sets, "load_standard_set", load_standard_set)
    source = hub_sets.DataSource("some/pictures", "train")
    sets = hub_sets.HubSets(source, source, source, {"far": {"same": source}}, 3, held_out=6, standard="cifar100-c")
    read = hub_sets.reader(sets, None)(None, start)
    assert asked == []  # nothing is downloaded before a method is judged
    shifted = read.shift(read.test)
    assert asked == [("cifar100-c", IMAGE_CORRUPTIONS, SEVERITIES, 1_000)]
    assert shifted["contrast"][3][0]["pixel_values"].shape == (3, 8, 8)
