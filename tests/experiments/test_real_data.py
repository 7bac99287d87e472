"""Reading, batching, changing and training on data in memory."""

import copy
import gzip
import json
import shutil
import sys
import types
from dataclasses import replace
from functools import partialmethod

import numpy as np
import PIL.Image
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)

from experiments import augmentation, from_scratch, hub_sets, settings, train_vit_cifar10
from experiments.from_scratch import Schedule, train_from_scratch
from experiments.local_files import read_images, read_texts
from experiments.methods import Comparison
from experiments.muon import Muon, orthogonal
from experiments.parallel_training import Part, Stack, attend_to_all
from experiments.rows import LengthBatches, PrepareImages, TensorRows, without_common_padding
from experiments.smallest import images, new_backbone, splits
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


# Changes


@pytest.mark.parametrize(
    "change",
    [
        augmentation.crop_and_flip,
        augmentation.turn_and_shear,
        augmentation.change_colours,
        augmentation.change_look,
        augmentation.erase,
    ],
)
def test_changes_are_random_and_keep_shape_and_range(change):
    pictures = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = pictures.clone()
    torch.manual_seed(1)
    changed = change(pictures)
    assert changed.shape == pictures.shape and changed.min() >= 0 and changed.max() <= 1 + 1e-6
    assert not torch.equal(changed, pictures) and torch.equal(pictures, before)
    torch.manual_seed(1)
    assert torch.equal(change(pictures), changed)
    assert not torch.equal(change(pictures), changed)


def test_a_crop_shows_the_image_moved_or_mirrored():
    picture = torch.arange(64.0).view(1, 1, 8, 8) / 64
    torch.manual_seed(0)
    for _ in range(20):
        crop = augmentation.crop_and_flip(picture, padding=1)
        crop = crop if crop[0, 0, 4, 3] < crop[0, 0, 4, 4] else crop.flip(-1)
        centre = crop[0, 0, 4, 4] * 64
        assert int(centre) // 8 in (3, 4, 5) and int(centre) % 8 in (3, 4, 5)


# Training from new weights


@pytest.mark.slow
def test_training_goes_on_to_the_weights_of_an_unbroken_run(tmp_path, monkeypatch):
    data, write = splits(), from_scratch._checkpoint

    def trained(name):
        torch.manual_seed(0)
        schedule = Schedule(epochs=20, batch_size=32)
        models, folders = [new_backbone() for _ in range(2)], [tmp_path / f"{name} {n}" for n in range(2)]
        return train_from_scratch(models, data.train, data.validation, schedule, folders, seed=3)

    def cut_off(*args):
        write(*args)
        raise KeyboardInterrupt

    whole = trained("whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(from_scratch, "_checkpoint", cut_off)
        trained("in parts")
    in_parts = trained("in parts")
    for model, again in zip(whole, in_parts, strict=True):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(again.state_dict()[name], tensor, msg=name)
        assert not again.training
    assert not torch.equal(whole[0].classifier.weight, whole[1].classifier.weight)


@pytest.mark.slow
def test_models_side_by_side_train_as_each_would_alone():
    schedule, rows = Schedule(epochs=1, batch_size=8, weight_decay=0.1, max_grad_norm=0.5), images(64, 0)
    torch.manual_seed(0)
    models = [new_backbone().double() for _ in range(3)]
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    alone = copy.deepcopy(models)
    rows = rows.prepared_by(lambda batch: {**batch, "pixel_values": batch["pixel_values"].double() / 255})
    stack = Stack(models)
    optimizers = from_scratch.Optimizers(stack, schedule)
    optimizers.set_rate(0.5)
    step = from_scratch.TrainingStep(stack, optimizers, rows, schedule)
    by_adamw, momenta = [], []
    for model in alone:
        named = dict(model.named_parameters())
        vectors = [parameter for parameter in named.values() if parameter.dim() <= 1]
        others = [tensor for name, tensor in named.items() if ".layers." not in name and tensor.dim() > 1]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        by_adamw.append(torch.optim.AdamW(groups, lr=1e-3 * schedule.rate(0.5)))
        matrices = [tensor for name, tensor in named.items() if ".layers." in name and tensor.dim() > 1]
        momenta.append({matrix: torch.zeros_like(matrix) for matrix in matrices})
    for _ in range(4):
        indices = torch.randint(0, 64, (3, 8))
        step(indices)
        for model, optimizer, momentum, own in zip(alone, by_adamw, momenta, indices, strict=True):
            model.zero_grad()
            model(**rows.__getitems__(own.tolist())).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            for matrix in momentum:
                momentum[matrix] = 0.95 * momentum[matrix] + 0.05 * matrix.grad
                direction = 0.05 * matrix.grad + 0.95 * momentum[matrix]
                rate = 2e-3 * schedule.rate(0.5)
                length = 0.2 * max(matrix.shape) ** 0.5
                matrix.data = (1 - 0.1 * rate) * matrix.data - rate * length * orthogonal(direction)
    stack.copy_to(models)
    for model, reference in zip(models, alone, strict=True):
        for name, tensor in reference.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, msg=name)


def test_attention_of_stacked_models_drops_what_it_is_told_to():
    states = torch.randn(2, 2, 4, 8)
    whole, dropped = (attend_to_all(None, states, states, states, None, 0.5, dropout)[0] for dropout in (0.0, 0.5))
    expected = (0.5 * states @ states.mT).softmax(-1) @ states
    torch.testing.assert_close(whole, expected.transpose(1, 2))
    assert not torch.allclose(whole, dropped)


@pytest.mark.slow
def test_compiled_layers_are_the_same_layers_and_compiled_once(monkeypatch):
    torch.manual_seed(0)
    stack, pixels = Stack([new_backbone().double() for _ in range(2)]), torch.randn(6, 3, 8, 8, dtype=torch.float64)
    stack.model.eval()

    def logits_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        logits = stack(pixels)
        return logits.detach(), torch.autograd.grad(logits.square().sum(), stack.matrices.numbers)[0]

    expected = logits_and_gradient()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=counter))
    stack.compile_layers()
    torch.testing.assert_close(logits_and_gradient(), expected)
    torch.compiler.reset()
    assert counter.frame_count == 1  # of two layers


def test_parameters_lie_in_the_order_of_the_model_within_a_shape():
    """Whatever process it is: checkpoints hold their numbers, not their names."""
    named = dict(new_backbone().named_parameters())
    for part in Stack([new_backbone()]).parts:
        for shape in set(part.shapes):
            names = [name for name in part.names if named[name].shape == shape]
            assert names == [name for name in named if name in names]


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12)])
def test_steps_of_muon_are_those_of_pytorch(shape):
    """Which computes in bfloat16."""
    torch.manual_seed(0)
    model = torch.nn.Linear(*reversed(shape), bias=False)
    part, reference = Part([model], ["weight"]), copy.deepcopy(model)
    own = Muon(part, torch.tensor(0.1), weight_decay=0.3)
    other = torch.optim.Muon(
        reference.parameters(), lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    for _ in range(3):
        reference.weight.grad = torch.randn(shape)
        part.numbers.grad = reference.weight.grad.flatten().unsqueeze(0)
        own.step()
        other.step()
    torch.testing.assert_close(part.numbers.view(shape), reference.weight.detach(), atol=0.01, rtol=0)
    assert not torch.allclose(part.numbers.view(shape), model.weight, atol=0.05)


@pytest.mark.slow
def test_new_attention_matches_tokens_with_themselves_and_their_neighbours():
    torch.manual_seed(0)
    model = settings.new_cifar10_vit().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(torch.zeros(1, 3, 32, 32), output_attentions=True).attentions
    places = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), dim=-1).view(-1, 2).double()
    distances, attention = torch.cdist(places, places), attentions[0][0].mean(dim=0)[1:, 1:]
    own, near, far = (attention[rows].mean() for rows in (distances == 0, distances == 1, distances > 4))
    assert own > 1.2 * near > 1.2 * 1.2 * far
    values, output = (getattr(model.vit.layers[0].attention, name).weight for name in ("v_proj", "o_proj"))
    assert -0.5 < (output @ values).diagonal().mean() < -0.3


@pytest.mark.slow
def test_what_was_cut_off_while_it_was_saved_is_saved_with_its_trained_weights(tmp_path, monkeypatch):
    data, schedule, write = splits(), Schedule(epochs=1, batch_size=32), from_scratch.written_whole
    folders = [tmp_path / str(n) for n in range(2)]

    def train(count=2, seed=0):
        torch.manual_seed(0)
        models = [new_backbone() for _ in range(count)]
        return train_from_scratch(models, data.train, data.validation, schedule, folders[:count], seed)

    def cut_off(folder):
        return write(folder) if folder == folders[0] else (_ for _ in ()).throw(KeyboardInterrupt)

    whole = [model.classifier.weight.clone() for model in train()]
    for folder in folders:
        shutil.rmtree(folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(from_scratch, "written_whole", cut_off)
        train()
    folders.append(tmp_path / "2")
    with pytest.raises(ValueError, match="another number of models: remove it to start again"):
        train(count=3)
    with pytest.raises(ValueError, match="another seed: remove it to start again"):
        train(seed=1)
    for model, weight, folder in zip(train(), whole, folders, strict=False):
        assert torch.equal(model.classifier.weight, weight)
        assert torch.equal(type(model).from_pretrained(folder).classifier.weight, weight)


def test_a_trained_model_is_loaded_and_one_of_another_schedule_refused(tmp_path):
    data, folder = splits(), tmp_path / "model"

    def trained(epochs):
        schedule = Schedule(epochs=epochs, batch_size=32)
        [model] = train_from_scratch([new_backbone()], data.train, data.validation, schedule, [folder], seed=0)
        return model

    first, again = trained(1), trained(1)
    assert torch.equal(first.classifier.weight, again.classifier.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ValueError, match="model comes from another schedule: remove it to start again"):
        trained(2)


def test_the_learning_rate_warms_up_and_decays_to_zero():
    schedule = Schedule(epochs=1, learning_rate=1.0, warmup_share=0.1)
    assert schedule.rate(0) == 0 and schedule.rate(0.05) == pytest.approx(0.5) and schedule.rate(0.1) == 1
    assert schedule.rate(0.55) == pytest.approx(0.5) and schedule.rate(1) == pytest.approx(0)


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
    read = read_texts(tmp_path, "set", tokenizer, max_length=8)
    assert read.tensors["labels"].tolist() == [1, 0]
    assert read.tensors["input_ids"].shape == (2, 8) and read.tensors["attention_mask"].sum(1).tolist() == [4, 3]


@pytest.mark.slow
def test_the_recipe_of_the_image_backbones_leads_from_files_to_a_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "vision").mkdir()
    for name in ("cifar10_train", "cifar10_test", "tinyimagenet_objects", "mnist", "textures"):
        sheet = torch.randint(0, 256, (32, 80 * 32, 3), dtype=torch.uint8).numpy()
        PIL.Image.fromarray(sheet).save(tmp_path / "vision" / f"{name}.jpg")
        if name.startswith("cifar10"):
            np.save(tmp_path / "vision" / f"{name}_labels.npy", np.arange(80) % 10)
    monkeypatch.setattr(settings, "CIRCUIT_ROWS", 6)
    monkeypatch.setattr(train_vit_cifar10, "CIFAR10_SCHEDULE", Schedule(epochs=1, batch_size=16))
    output = tmp_path / "vit"
    command = ["train_vit_cifar10.py", "--data", str(tmp_path), "--output", str(output), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", command)
    train_vit_cifar10.main()
    assert "test accuracy 0." in capsys.readouterr().out
    assert ViTForImageClassification.from_pretrained(output).config.id2label[9] == "truck"
    read = settings.read_cifar10(tmp_path, None)
    assert [len(part) for part in (read.train, read.circuit_id, read.validation, read.test)] == [72, 6, 2, 80]
    row = read.train.part(slice(1)).tensors["pixel_values"].float()
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (settings.CIFAR10_MEAN, settings.CIFAR10_STD))
    torch.manual_seed(0)
    mildly, strongly = (
        255 * (torch.stack([rows[0]["pixel_values"] for _ in range(50)]) * std + mean)
        for rows in (settings.changed_images(read.train, augmentation.crop_and_flip), read.train)
    )
    colours = set(row.unique().tolist())
    assert set(mildly.round().unique().tolist()) <= colours  # cropped and mirrored
    assert not set(strongly.round().unique().tolist()) <= colours


@pytest.mark.parametrize("read", [read_images, read_texts])
def test_a_missing_file_is_named(read, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"set\.(jpg|jsonl\.gz) does not exist: pass the folder .* as --data"):
        read(tmp_path, "set", None)


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
    short = replace(settings.SETTINGS["sst2"].member_recipe, epochs=1)
    setting = replace(
        settings.SETTINGS["sst2"],
        read=hub_sets.reader(sets, short),
        start=str(save_bert(tmp_path / "start")),
        train_backbones=settings.finetuned(short, 8),
        member_recipe=short,
        heads_to_prune=2,
        heads_per_layer=3,
        heads_to_rank=4,
        budgets=(1,),
        member_batch=8,
    )
    splits = setting.read(None, setting.start)
    units = [Unit("backbone", index) for index in range(3)]
    units += [Unit("circuit", 0, objective) for objective in ("avg", "ood", "acc")]
    for unit in (*units, Unit("member", 0, "circ-ood"), Unit("judge", 0, "untuned")):
        Comparison(setting, splits, tmp_path / "runs", "cpu", seeds=1, backbones=3).run(unit)
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "runs/results/0").glob("*.json")}
    assert results["hydra-circ-zero-shot"]["num_members"] == results["deep-ensembles"]["num_members"] == 3
    assert results["single"]["id"]["num_samples"] == 12
