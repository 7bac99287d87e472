"""What is written from the Hub is read by the experiments."""

import datasets
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from PIL import Image

from experiments import public_sets
from experiments.local_files import read_images, read_strings
from experiments.rows import as_it_is


def grey(value: int, side: int) -> Image.Image:
    return Image.new("RGB", (side, side), (value, value, value))


def hub(sets: dict):
    """Stand in for `load_dataset` with sets by name, configuration and split."""

    def load_dataset(name, config=None, split=None):
        return sets[name, config, split]

    return load_dataset


def test_tiny_imagenet_is_split_by_classes_and_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(public_sets, "CLASSES", 2)
    monkeypatch.setattr(public_sets, "HELD_OF_EACH", 1)
    monkeypatch.setattr(public_sets, "LEARNED_OF_EACH", 2)
    monkeypatch.setattr(public_sets, "UNKNOWN_CLASSES", 1)
    monkeypatch.setattr(public_sets, "TILES_OF_A_SHEET", 3)
    monkeypatch.setattr(public_sets, "TILES_IN_A_ROW", 3)
    labels = [0, 1, 2, 0, 1, 0, 1, 3, 0, 1]
    rows = Dataset.from_list([{"image": grey(20 * n, 64), "label": label} for n, label in enumerate(labels)])
    name = public_sets.TINY_TRAIN.name
    monkeypatch.setattr(datasets, "load_dataset", hub({(name, None, "train"): rows, (name, None, "valid"): rows}))
    public_sets.main(["--output", str(tmp_path), "--only", "vision64"])

    def read(part: str) -> tuple[list[int] | None, list[int]]:
        found = read_images(tmp_path, part, as_it_is, side=64).tensors
        labels = found.get("labels")
        brightness = found["pixel_values"].float().mean(dim=(1, 2, 3)).div(20).round().int().tolist()
        return None if labels is None else labels.tolist(), brightness

    assert read("held") == ([0, 1], [0, 1])
    assert read("train") == ([0, 1, 0, 1], [3, 4, 5, 6])  # in two sheets
    assert (tmp_path / "vision64" / "train_1.jpg").exists()
    assert read("test")[0] == [0, 1, 0, 1, 0, 1, 0, 1]
    for part, number in (("circuit_ood", 2), ("near", 7)):
        labels, brightness = read(part)
        assert labels is None and brightness[0] == number


def test_texts_get_their_names_and_messages_out_of_scope_a_file_of_their_own(tmp_path, monkeypatch):
    intents = ClassLabel(names=["transfer", "oos"])
    features = Features({"text": Value("string"), "intent": intents})
    clinc = Dataset.from_dict({"text": ["send money", "who won?"], "intent": [0, 1]}, features=features)
    tags = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=["O", "B-PER"]))})
    entities = Dataset.from_dict({"tokens": [["Ann", "runs"]], "ner_tags": [[1, 0]]}, features=tags)
    emotions = Features({"text": Value("string"), "labels": Sequence(ClassLabel(names=["joy", "anger"]))})
    felt = Dataset.from_dict({"text": ["well done"], "labels": [[0]]}, features=emotions)
    sets = {}
    for name, source in public_sets.PLAIN_TEXTS.items():
        columns = source.columns
        plain = Dataset.from_dict({columns["text"]: ["a film"] * 2, columns.get("label", "label"): [0, 1]})
        sets[source.name, source.config, source.split] = felt if name.startswith("goemotions") else plain
    sets |= {(source.name, source.config, source.split): clinc for source in public_sets.INTENT_SETS.values()}
    sets |= {(source.name, source.config, source.split): entities for source in public_sets.ENTITY_SETS.values()}
    monkeypatch.setattr(datasets, "load_dataset", hub(sets))
    public_sets.main(["--output", str(tmp_path), "--only", "text"])

    assert read_strings(tmp_path, "sst2_train") == (["a film", "a film"], [0, 1])
    assert read_strings(tmp_path, "rte") == (["a film", "a film"], [None, None])
    assert read_strings(tmp_path, "clinc150_val") == (["send money"], ["transfer"])
    assert read_strings(tmp_path, "clinc150_oos_val") == (["who won?"], ["oos"])
    assert not (tmp_path / "text" / "clinc150_oos_train.jsonl.gz").exists()
    assert (tmp_path / "text" / "goemotions_labels.json").read_text() == '["joy", "anger"]'
    first = (tmp_path / "text" / "wikiann_train.jsonl.gz").read_bytes()
    public_sets.main(["--output", str(tmp_path), "--only", "text"])
    assert (tmp_path / "text" / "wikiann_train.jsonl.gz").read_bytes() == first


@pytest.mark.parametrize("count", [1, 100, 101])
def test_a_sheet_has_a_hundred_tiles_in_a_row(count):
    sheet = public_sets.sheet_of([grey(50, 4)] * count, side=8)
    assert sheet.size == (800, 8 * -(-count // 100))
    pixels = torch.tensor(list(sheet.convert("L").getdata()))
    assert int((pixels > 0).sum()) == count * 64
