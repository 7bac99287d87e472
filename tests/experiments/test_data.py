"""What experiments read: rows, files, and that no set has rows of another."""

import gzip
import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, Dinov2Config, Dinov2Model

from experiments import pretrained
from experiments.local_files import read_images, read_strings
from experiments.rows import TensorRows, as_it_is, without_common_padding
from hydra_transformers.data.rows import DataSource


# Rows


def texts(lengths: list[int]) -> TensorRows:
    mask = torch.arange(32) < torch.tensor(lengths).view(-1, 1)
    ids = torch.randint(5, 50, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return TensorRows({"input_ids": ids, "attention_mask": mask.long()}, without_common_padding)


def test_cutting_off_common_padding_changes_no_logits():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)).eval()
    rows = texts([3, 7, 5])
    [batch] = rows.batches(3)
    assert batch["input_ids"].shape == (3, 16)  # lengths in steps of 16
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, model(**rows.tensors).logits)
    assert rows.sorted_by_length().tensors["attention_mask"].sum(1).tolist() == [3, 5, 7]


# Files


def write_sheet(path, pictures: np.ndarray) -> None:
    """Images (count, side, side, 3) side by side."""
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.concatenate(list(pictures), axis=1)).save(path, quality=95)


def test_images_are_cut_out_of_their_sheets(tmp_path):
    for part in range(2):
        sheet = np.stack([np.full((32, 32, 3), value + 100 * part, dtype="uint8") for value in (40, 80)])
        write_sheet(tmp_path / "vision" / f"set_{part}.jpg", sheet)
    np.save(tmp_path / "vision" / "set_labels.npy", np.array([2, 0, 1], dtype="uint8"))
    rows = read_images(tmp_path, "set", as_it_is)
    assert len(rows) == 3 and rows.tensors["labels"].tolist() == [2, 0, 1]
    means = rows.tensors["pixel_values"].float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(means, torch.tensor([40.0, 80.0, 140.0]), atol=1, rtol=0)
    for read in (lambda folder, name: read_images(folder, name, as_it_is), read_strings):
        with pytest.raises(FileNotFoundError, match=r"other\.(jpg|jsonl\.gz) does not exist: pass the folder"):
            read(tmp_path, "other")


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    sets = {"train": [0, 1, 2], "held": [0, 1, 2], "test": [1, 2], "circuit_ood": [-1] * 5, "near": [-1]}
    for name, labels in sets.items():
        pictures = random.integers(0, 256, (len(labels), 64, 64, 3), dtype=np.uint8)
        write_sheet(tmp_path / "vision64" / f"{name}_0.jpg", pictures)
        np.save(tmp_path / "vision64" / f"{name}_labels.npy", np.array(labels))
    for name in ("mnist", "textures"):
        write_sheet(tmp_path / "vision" / f"{name}.jpg", random.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8))
    (tmp_path / "text").mkdir()
    for name in pretrained.HUB_TEXTS:
        labels = [{"label": index % 2} if "sst2" in name else {} for index in range(9)]
        rows = [{"text": f"words of number {index}"} | label for index, label in enumerate(labels)]
        with gzip.open(tmp_path / "text" / f"{name}.jsonl.gz", "wt") as lines:
            lines.write("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_images_are_read_from_files_and_no_set_has_rows_of_another(folder, monkeypatch):
    monkeypatch.setattr(pretrained, "CIRCUIT_ROWS", 1)
    monkeypatch.setattr(pretrained, "FAR_COUNT", 3)
    splits = pretrained.read_tiny_imagenet(folder, None)
    parts = (splits.circuit_id, splits.validation, splits.circuit_ood, splits.validation_ood)
    assert [len(rows) for rows in parts] == [1, 2, 3, 2]
    sizes = {"mnist": 2, "textures": 2, "noise": 3, "drawings": 3}
    assert {name: len(rows) for name, rows in splits.ood["far"].items()} == sizes
    held = [*splits.circuit_id.tensors["labels"].tolist(), *splits.validation.tensors["labels"].tolist()]
    assert sorted(held) == [0, 1, 2] and splits.test.tensors["labels"].tolist() == [1, 2]
    near = splits.ood["near"]["other classes"]
    assert "labels" not in near.tensors and near[0]["pixel_values"].shape == (3, 112, 112)


def test_texts_are_read_from_files_or_the_hub(folder, tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "words", "of", "number"]))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "tokenizer")
    tokenizer = str(tmp_path / "tokenizer")
    for name, value in {"HELD_ROWS": 6, "CIRCUIT_ROWS": 4, "TEXT_CIRCUIT_ROWS": 3}.items():
        monkeypatch.setattr(pretrained, name, value)
    splits = pretrained.read_sst2(folder, tokenizer)
    parts = (splits.train, splits.validation, splits.circuit_id, splits.circuit_ood, splits.validation_ood)
    assert [len(rows) for rows in parts] == [3, 2, 3, 3, 5]
    assert {group: len(sets) for group, sets in splits.ood.items()} == {"near": 2, "far": 3}
    for name, source in pretrained.HUB_TEXTS.items():
        columns = {source.column: ["words of number"] * 9, "label": [0, 1, 0] * 3}
        datasets.Dataset.from_dict(columns).save_to_disk(folder / "hub" / name)
        local = DataSource(str(folder / "hub" / name), column=source.column)
        monkeypatch.setitem(pretrained.HUB_TEXTS, name, local)
    assert len(pretrained.read_sst2(None, tokenizer).train) == 3


def test_dinov2_as_a_vit_computes_the_same(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 12}
    torch.manual_seed(0)
    dinov2 = Dinov2Model(Dinov2Config(**sizes, mlp_ratio=2, layerscale_value=0.3)).eval()
    with torch.no_grad():
        dinov2.embeddings.position_embeddings.normal_()
    dinov2.save_pretrained(tmp_path)
    vit = pretrained.new_dinov2(str(tmp_path), size=8).eval()
    pictures = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        states = dinov2(pictures).last_hidden_state
        torch.testing.assert_close(vit.vit(pictures).last_hidden_state, states, atol=1e-5, rtol=1e-5)
    assert vit.classifier.out_features == pretrained.CLASSES and vit.config.image_size == 8
