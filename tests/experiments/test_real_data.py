"""Reading and batching data in memory, and data sets of the Hub."""

import gzip
import json
import sys
import types
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTImageProcessorPil, ViTModel

from experiments import hub_sets, settings
from experiments.local_files import read_images, read_strings, tokenized
from experiments.methods import Comparison
from experiments.rows import LengthBatches, PrepareImages, TensorRows, as_it_is, without_common_padding
from experiments.smallest import images
from experiments.units import Unit
from hydra_transformers.data.rows import DataSource
from hydra_transformers.training import recipe
from tests.tiny_data import review_rows, save_bert


# Rows


def test_a_loader_fetches_whole_batches():
    rows = images(10, 0)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=lambda batch: batch)
    batches = list(loader)
    assert [len(batch["labels"]) for batch in batches] == [4, 4, 2]
    again = torch.cat([batch["pixel_values"] for batch in rows.batches(3)])
    torch.testing.assert_close(torch.cat([batch["pixel_values"] for batch in batches]), again)
    torch.testing.assert_close(rows[7]["pixel_values"], again[7])


def test_images_are_normalised():
    rows = TensorRows(
        {"pixel_values": torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)}, PrepareImages((0.5,) * 3, (0.25,) * 3)
    )
    assert torch.equal(rows[0]["pixel_values"], torch.full((3, 2, 2), 2.0))


def texts(lengths: list[int]) -> TensorRows:
    mask = torch.arange(16) < torch.tensor(lengths).view(-1, 1)
    ids = torch.randint(5, 50, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return TensorRows({"input_ids": ids, "attention_mask": mask.long()}, without_common_padding)


def test_cutting_off_common_padding_changes_no_logits():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)).eval()
    rows = texts([3, 7, 5])
    [batch] = rows.batches(3)
    assert batch["input_ids"].shape == (3, 7)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, model(**rows.tensors).logits)


def test_batches_by_length_hold_every_text_once_and_little_padding():
    lengths = torch.randint(1, 17, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = texts(lengths)
    batches = LengthBatches(rows, batch_size=8, seed=0)
    assert sorted(index for batch in batches.indices for index in batch) == list(range(60))
    tokens = sum(batches[index]["input_ids"].numel() for index in range(len(batches)))
    assert tokens < 1.4 * sum(lengths)
    assert LengthBatches(rows, 8, seed=0).indices == batches.indices != LengthBatches(rows, 8, seed=1).indices


def test_sorted_texts_are_the_same_texts():
    rows = texts([5, 2, 9])
    assert rows.sorted_by_length().tensors["attention_mask"].sum(1).tolist() == [2, 5, 9]


# Local files


def test_images_are_cut_out_of_their_sheets(tmp_path):
    (tmp_path / "vision").mkdir()
    for part in range(2):
        sheet = np.zeros((32, 64, 3), dtype="uint8")
        sheet[:, :32], sheet[:, 32:] = 40 + 100 * part, 80 + 100 * part
        PIL.Image.fromarray(sheet).save(tmp_path / "vision" / f"set_{part}.jpg", quality=95)
    np.save(tmp_path / "vision" / "set_labels.npy", np.array([2, 0, 1], dtype="uint8"))
    rows = read_images(tmp_path, "set", PrepareImages((0.0,) * 3, (1.0,) * 3))
    assert len(rows) == 3 and rows.tensors["labels"].tolist() == [2, 0, 1]
    means = rows.tensors["pixel_values"].float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(means, torch.tensor([40.0, 80.0, 140.0]), atol=1, rtol=0)


def test_texts_are_read_and_tokenized(tmp_path, tokenizer):
    (tmp_path / "text").mkdir()
    rows = [{"text": "good film", "label": 1}, {"text": "bad", "label": 0}]
    with gzip.open(tmp_path / "text" / "set.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    read = tokenized(*read_strings(tmp_path, "set"), tokenizer, max_length=8)
    assert read.tensors["labels"].tolist() == [1, 0]
    assert read.tensors["input_ids"].shape == (2, 8) and read.tensors["attention_mask"].sum(1).tolist() == [4, 3]


@pytest.mark.parametrize("read", [lambda folder, name: read_images(folder, name, as_it_is), read_strings])
def test_a_missing_file_is_named(read, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"set\.(jpg|jsonl\.gz) does not exist: pass the folder .* as --data"):
        read(tmp_path, "set")


# Sets of the Hub, with folders in their place


@pytest.fixture
def tokenizer(tmp_path):
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film"]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def image_set(path, count: int, labelled: bool) -> DataSource:
    import datasets
    from PIL import Image

    columns = {"image": [Image.new("RGB", (12, 12), (20 * n, 0, 0)) for n in range(count)]}
    features = {"image": datasets.Image()}
    if labelled:
        columns["label"], features["label"] = [n % 3 for n in range(count)], datasets.ClassLabel(names=["a", "b", "c"])
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).save_to_disk(path)
    return DataSource(str(path))


@pytest.fixture
def image_sets(tmp_path) -> hub_sets.HubSets:
    from PIL import Image

    (tmp_path / "benchmark_imglist" / "x").mkdir(parents=True)
    (tmp_path / "images_classic").mkdir()
    for n in range(2):
        Image.new("L", (9, 9), 100 * n).save(tmp_path / "images_classic" / f"one {n}.png")
    (tmp_path / "benchmark_imglist" / "x" / "test_far.txt").write_text("one 0.png -1\none 1.png -1\n")
    return hub_sets.HubSets(
        train=image_set(tmp_path / "train", 10, labelled=True),
        test=image_set(tmp_path / "test", 6, labelled=True),
        circuit_ood=image_set(tmp_path / "circuit", 4, labelled=False),
        ood={"far": {"listed": hub_sets.ImageList("x/test_far", "images_classic")}},
        num_labels=3,
        held_out=0,
    )


@pytest.fixture
def start(tmp_path) -> str:
    config = ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    ViTModel(config).save_pretrained(tmp_path / "start")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "start")
    return str(tmp_path / "start")


@pytest.fixture
def torchvision(monkeypatch):
    """In place of torchvision: changes that leave a trace."""

    class Painted:
        def __init__(self, **settings):
            self.settings = settings

        def __call__(self, image):
            from PIL import Image

            return Image.new("RGB", image.size, (255, 255, 255))

    transforms = types.SimpleNamespace(RandomResizedCrop=Painted, RandomHorizontalFlip=Painted, RandAugment=Painted)
    module = types.ModuleType("torchvision")
    module.transforms = transforms
    monkeypatch.setitem(sys.modules, "torchvision", module)


def test_sets_of_the_hub_become_splits_and_training_images_alone_are_changed(image_sets, start, tmp_path, torchvision):
    read = hub_sets.reader(image_sets, recipe("imagenet1k"))(tmp_path, start)
    assert (len(read.train), len(read.validation), len(read.test)) == (10, 1, 5)
    assert (read.train[0]["pixel_values"] == 1).all() and not (read.test[0]["pixel_values"] == 1).all()
    assert read.train[4]["labels"] == 1 and "labels" not in read.circuit_ood[0]
    listed = read.ood["far"]["listed"]
    assert [round(float(listed[n]["pixel_values"].mean()), 2) for n in range(2)] == [-1.0, -0.22]


def test_held_out_rows_are_for_circuits_and_validation(image_sets, start, tmp_path, torchvision, monkeypatch):
    monkeypatch.setattr(hub_sets, "CIRCUIT_ROWS", 3)
    read = hub_sets.reader(replace(image_sets, held_out=5), recipe("cifar100"))(tmp_path, start)
    assert [len(part) for part in (read.circuit_id, read.validation, read.train, read.test)] == [3, 2, 5, 6]
    assert [read.circuit_id[0]["labels"], read.validation[0]["labels"], read.train[0]["labels"]] == [0, 0, 2]


def test_a_missing_list_of_openood_is_named(image_sets, start, torchvision):
    with pytest.raises(FileNotFoundError, match="OpenOOD's list x/test_far is not in None: pass the folder"):
        hub_sets.reader(image_sets, recipe("imagenet1k"))(None, start)


def test_training_on_images_says_that_it_needs_torchvision(image_sets, start, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="needs torchvision: pip install torchvision"):
        hub_sets.reader(image_sets, recipe("imagenet1k"))(tmp_path, start)


def test_the_papers_settings_prune_as_the_paper_does():
    of_paper = {name: settings.SETTINGS[name] for name in ("imagenet1k", "cifar100", "sst2")}
    assert {name: each.heads_to_prune for name, each in of_paper.items()} == {
        "imagenet1k": 48,
        "cifar100": 24,
        "sst2": 72,
    }
    assert {name: each.heads_per_layer for name, each in of_paper.items()} == {
        "imagenet1k": 8,
        "cifar100": 10,
        "sst2": 6,
    }
    for each in of_paper.values():
        assert 12 * (12 - each.heads_per_layer) == each.heads_to_prune


@pytest.mark.slow
def test_a_setting_of_the_hub_runs_from_its_backbones_to_results(tmp_path, monkeypatch):
    """SST-2's, with a tiny BERT and folders in place of the Hub."""
    monkeypatch.setattr(hub_sets, "CIRCUIT_ROWS", 8)
    for name, count in {"train": 40, "test": 12}.items():
        review_rows(count).save_to_disk(tmp_path / name)
    review_rows(10).remove_columns("label").save_to_disk(tmp_path / "other")
    train, test, other = (DataSource(str(tmp_path / name)) for name in ("train", "test", "other"))
    sets = replace(
        hub_sets.SST2, train=train, test=test, circuit_ood=other, ood={"far": {"other": other}}, held_out=16
    )
    short = settings.SETTINGS["sst2"].member_recipe.with_arguments(num_train_epochs=1)
    setting = replace(
        settings.SETTINGS["sst2"],
        read=hub_sets.reader(sets, short),
        start=str(save_bert(tmp_path / "start")),
        backbone_recipe=short,
        member_recipe=short,
        heads_to_prune=2,
        heads_per_layer=3,
        heads_to_rank=4,
        budgets=(1,),
        batch_size=8,
    )
    splits = setting.read(None, setting.start)
    units = [Unit("backbone", index) for index in range(3)]
    units += [Unit("circuit", 0, objective) for objective in ("avg", "ood", "acc")]
    for unit in (*units, Unit("member", 0, "circ-ood"), Unit("judge", 0, "untuned"), Unit("judge", 0, "zero-shot")):
        Comparison(setting, splits, tmp_path / "runs", "cpu", seeds=1, backbones=3).run(unit)
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "runs/results/0").glob("*.json")}
    assert results["hydra-circ-zero-shot"]["num_members"] == results["deep-ensembles"]["num_members"] == 3
    assert results["single"]["id"]["num_samples"] == 12
