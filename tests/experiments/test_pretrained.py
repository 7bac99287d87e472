"""Settings on pre-trained models: what they start from, and what they read."""

import gzip
import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertTokenizerFast, Dinov2Config, Dinov2Model

from experiments import fine_tuning_tables as tables
from experiments import pretrained
from experiments.augmentation import resized_crop_and_flip
from experiments.made_up_sets import drawings, mixed_words, noise, spliced
from experiments.rows import PrepareImages
from hydra_transformers.data.rows import DataSource


def test_dinov2_as_a_vit_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "IMAGE_SIZE", 8)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 12}
    torch.manual_seed(0)
    dinov2 = Dinov2Model(Dinov2Config(**sizes, mlp_ratio=2, layerscale_value=0.3)).eval()
    with torch.no_grad():
        dinov2.embeddings.position_embeddings.normal_()
    dinov2.save_pretrained(tmp_path)
    vit = pretrained.new_dinov2(str(tmp_path)).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        states = dinov2(images).last_hidden_state
        torch.testing.assert_close(vit.vit(images).last_hidden_state, states, atol=1e-5, rtol=1e-5)
    assert vit.classifier.out_features == pretrained.CLASSES and vit.config.image_size == 8


# Data


def write_sheet(path, images: np.ndarray) -> None:
    """Images (count, 64, 64, 3) side by side."""
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.concatenate(list(images), axis=1)).save(path, quality=95)


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    vision, small, text = tmp_path / "vision64", tmp_path / "vision", tmp_path / "text"
    for name, labels in {
        "train": [0, 1, 2],
        "held": [0, 1, 2],
        "test": [1, 2],
        "circuit_ood": [-1] * 5,
        "near": [-1],
    }.items():
        write_sheet(vision / f"{name}_0.jpg", random.integers(0, 256, (len(labels), 64, 64, 3), dtype=np.uint8))
        np.save(vision / f"{name}_labels.npy", np.array(labels))
    for name in ("mnist", "textures"):
        write_sheet(small / f"{name}.jpg", random.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8))
    text.mkdir()
    for name in pretrained.HUB_TEXTS:
        rows = [
            {"text": f"words of number {index}"} | ({"label": index % 2} if "sst2" in name else {})
            for index in range(9)
        ]
        with gzip.open(text / f"{name}.jsonl.gz", "wt") as lines:
            lines.write("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_images_are_read_from_files_and_no_set_has_rows_of_another(folder, monkeypatch):
    monkeypatch.setattr(pretrained, "CIRCUIT_ROWS", 1)
    monkeypatch.setattr(pretrained, "FAR_COUNT", 3)
    splits = pretrained.read_tiny_imagenet(folder, None)
    assert len(splits.circuit_id) == 1 and len(splits.validation) == 2
    assert len(splits.circuit_ood) == 3 and len(splits.validation_ood) == 2
    assert {name: len(rows) for name, rows in splits.ood["far"].items()} == {
        "mnist": 2,
        "textures": 2,
        "noise": 3,
        "drawings": 3,
    }
    held = [*splits.circuit_id.tensors["labels"].tolist(), *splits.validation.tensors["labels"].tolist()]
    assert sorted(held) == [0, 1, 2]
    for rows in (splits.train, splits.test, splits.ood["far"]["mnist"], splits.ood["near"]["other classes"]):
        assert rows[0]["pixel_values"].shape == (3, 112, 112)
    assert "labels" not in splits.ood["near"]["other classes"].tensors and splits.test.tensors["labels"].tolist() == [
        1,
        2,
    ]


def test_images_can_come_from_the_hub(tmp_path, monkeypatch):
    image = Image.new("RGB", (10, 10))
    labels = [*range(4), *range(4)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(4)})
    rows = datasets.Dataset.from_dict({"image": [image] * 8, "label": labels}, features=features)
    rows.save_to_disk(tmp_path / "tiny")
    source = DataSource(str(tmp_path / "tiny"))
    pixels, found = pretrained.hub_images(source, last=2)
    assert pixels.shape == (4, 3, 64, 64) and found.tolist() == [0, 1, 0, 1]
    pixels, found = pretrained.hub_images(source, 2, 3)
    assert len(pixels) == 2 and found is None
    monkeypatch.setattr(pretrained, "TINY_TRAIN", source)
    monkeypatch.setattr(pretrained, "CLASSES", 4)
    monkeypatch.setattr(pretrained, "HELD_OF_EACH", 1)
    assert pretrained.hub_training_images(is_held=True)[1].tolist() == [0, 1, 2, 3]
    assert len(pretrained.hub_training_images(is_held=False)[0]) == 4


@pytest.fixture
def tokenizer(tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "words", "of", "number"]))
    BertTokenizerFast(str(vocabulary)).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_texts_are_read_from_files_or_the_hub(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(pretrained, "HELD_ROWS", 6)
    monkeypatch.setattr(pretrained, "CIRCUIT_ROWS", 4)
    monkeypatch.setattr(pretrained, "TEXT_CIRCUIT_ROWS", 3)
    splits = pretrained.read_sst2(folder, tokenizer)
    assert [len(rows) for rows in (splits.train, splits.validation, splits.circuit_id)] == [3, 2, 3]
    assert len(splits.circuit_ood) == 3 and len(splits.validation_ood) == 5
    assert {group: set(sets) for group, sets in splits.ood.items()} == {
        "near": {"amazon", "spliced"},
        "far": {"trec", "rte", "mixed words"},
    }
    for name, source in pretrained.HUB_TEXTS.items():
        columns = {source.text: ["words of number"] * 9, "label": [0, 1, 0] * 3}
        datasets.Dataset.from_dict(columns).save_to_disk(folder / "hub" / name)
        local = DataSource(str(folder / "hub" / name), text=source.text)
        monkeypatch.setitem(pretrained.HUB_TEXTS, name, local)
    assert len(pretrained.read_sst2(None, tokenizer).train) == 3


def test_made_up_sets_are_the_same_every_time_and_not_all_alike():
    for make in (noise, drawings):
        images = make(5, 32, seed=1)
        assert images.shape == (5, 3, 32, 32) and images.dtype == torch.uint8
        assert torch.equal(images, make(5, 32, seed=1)) and not torch.equal(images, make(5, 32, seed=2))
        assert len({image.float().mean().item() for image in images}) == 5
    texts = ["one two three four", "five six", "seven eight nine"]
    joined = spliced(texts, seed=0)
    assert joined == spliced(texts, seed=0) and [text.split()[0] for text in joined] == ["one", "five", "seven"]
    assert all(text not in texts for text in joined)
    mixed = mixed_words(texts, seed=0)
    assert [len(text.split()) for text in mixed] == [4, 2, 3]
    assert {word for text in mixed for word in text.split()} <= {word for text in texts for word in text.split()}


def test_crops_are_enlarged_and_keep_most_of_the_image():
    images = torch.arange(8.0).view(1, 1, 1, 8).expand(64, 3, 8, 8)
    torch.manual_seed(0)
    crops = resized_crop_and_flip(images, size=16)
    assert crops.shape == (64, 3, 16, 16)
    widths = (crops[:, 0, 0, 0] - crops[:, 0, 0, -1]).abs()
    assert (widths > 5.0).all() and widths.max() <= 7.5
    rises = crops[:, 0, 0, -1] > crops[:, 0, 0, 0]
    assert 0 < rises.sum() < 64  # some are mirrored


def test_images_are_brought_to_a_size():
    prepare = PrepareImages((0.0,) * 3, (1.0,) * 3, size=12)
    batch = {"pixel_values": torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)}
    torch.testing.assert_close(prepare(batch)["pixel_values"], torch.ones(2, 3, 12, 12))


# Tables


def test_near_and_far_count_the_same():
    near, far = {"a": {"auroc": 0.6}}, {"b": {"auroc": 0.7}, "c": {"auroc": 0.9}}
    run = {"ood": {"msp": {"near": near, "far": far}}}
    assert tables.auroc()(run) == pytest.approx(70.0)
    assert tables.auroc(group="far")(run) == pytest.approx(80.0)
