"""ImageNet-C and CIFAR-C in the forms in which they are published."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, ViTForImageClassification

from hydra_transformers import evaluate_uncertainty, load_data
from hydra_transformers.data.batches import batches
from hydra_transformers.shift import load_corrupted_sets
from tests.command_line import run
from tests.tiny_data import picture_rows, pictures, save_vit


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return save_vit(tmp_path_factory.mktemp("vit"))


def loaded(vit):
    return ViTForImageClassification.from_pretrained(vit).eval()


def cifar_c(folder, corruptions=("fog", "snow")):
    """Four images of each severity; those of severity s are s times ten brighter."""
    folder.mkdir()
    labels = np.tile([0, 1, 2, 0], 5)
    arrays = np.stack([np.asarray(image) for image in pictures(labels[:4].tolist())] * 5)
    for place, name in enumerate(corruptions):
        brighter = np.repeat(np.arange(1, 6), 4)[:, None, None, None] * 10 + place
        np.save(folder / f"{name}.npy", np.minimum(255, arrays.astype(int) + brighter).astype(np.uint8))
    np.save(folder / "labels.npy", labels)
    return folder


def imagenet_c(folder, classes):
    for name in ("fog", "contrast"):
        for severity in (1, 2, 3, 4, 5):
            for number, title in enumerate(classes):
                place = folder / name / str(severity) / title
                place.mkdir(parents=True)
                for index, image in enumerate(pictures([number, number], seed=severity)):
                    image.save(place / f"{index}.png")
    return folder


def pixels_and_labels(data):
    found = list(batches(data))
    return torch.cat([batch["pixel_values"] for batch in found]), torch.cat([batch["labels"] for batch in found])


def test_arrays_of_cifar_c_are_divided_by_severity(vit, tmp_path):
    folder = cifar_c(tmp_path / "c")
    processor = AutoImageProcessor.from_pretrained(vit)
    sets = load_corrupted_sets(folder, vit)
    assert list(sets) == ["snow", "fog"], "in the order of the fifteen"
    assert all(list(sweep) == [1, 2, 3, 4, 5] for sweep in sets.values())
    arrays = np.load(folder / "fog.npy")
    for severity in (1, 4):
        pixels, labels = pixels_and_labels(sets["fog"][severity])
        images = [Image.fromarray(array) for array in arrays[4 * (severity - 1) : 4 * severity]]
        torch.testing.assert_close(pixels, processor(images, return_tensors="pt")["pixel_values"])
        assert labels.tolist() == [0, 1, 2, 0]
    few = load_corrupted_sets(folder, vit, "fog", severities=[5], limit=2)
    assert list(few) == ["fog"] and list(few["fog"]) == [5] and len(few["fog"][5]) == 2
    report = evaluate_uncertainty({"vit": loaded(vit)}, load_data(picture_rows(6), vit), corruptions=sets)
    assert set(report.severities("vit")) >= {"1", "5", "average"}


@pytest.mark.parametrize("classes", [["red", "green", "blue"], ["n01", "n02", "n03"]])
def test_class_folders_of_imagenet_c_are_classes_by_name_or_by_order(classes, vit, tmp_path):
    folder = imagenet_c(tmp_path / "c", classes)
    sets = load_corrupted_sets(folder, loaded(vit), ["fog"], processor=AutoImageProcessor.from_pretrained(vit))
    pixels, labels = pixels_and_labels(sets["fog"][3])
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2]
    assert pixels.mean(dim=(2, 3)).argmax(dim=1).tolist() == labels.tolist(), "a class is its brightest channel"


def test_the_hubs_sets_are_read_by_their_names(vit, monkeypatch):
    asked = []
    rows = picture_rows(6)

    def load(name, split):
        asked.append((name, split))
        if name.startswith("robro"):
            named = rows.add_column("corruption_name", ["fog", "fog", "snow"] * 2)
            return named.add_column("corruption_level", [1, 2, 1] * 2)
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    sets = load_corrupted_sets("cifar100-c", vit, "fog", severities=[1])
    assert asked == [("robro/cifar100-c-parquet", "train")]
    assert pixels_and_labels(sets["fog"][1])[1].tolist() == [0, 0]
    with pytest.raises(ValueError, match="no rows of snow at severity 2: its columns have changed"):
        load_corrupted_sets("cifar10-c", vit, "snow", severities=[2])
    sets = load_corrupted_sets("imagenet-c", vit, "fog", severities=[3])
    assert asked[-1] == ("Tsomaros/ImageNet-C-fog-severity_3", "validation") and len(sets["fog"][3]) == 6


@pytest.mark.slow
def test_evaluate_takes_a_folder(vit, tmp_path):
    picture_rows(12).save_to_disk(tmp_path / "rows")
    words = ["evaluate", vit, "--data", tmp_path / "rows", "--corruptions", cifar_c(tmp_path / "c")]
    run(*words, "--output", tmp_path / "out")
    assert "fog, severity 5" in (tmp_path / "out" / "report.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruptions": "rain"}, "has no rain: it has snow, fog"),
        ({"severities": [0, 1]}, r"severities is \[0, 1\]: pass some of 1 to 5"),
        ({"severities": []}, r"severities is \[\]"),
    ],
)
def test_what_a_set_does_not_have_is_refused(options, message, vit, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_corrupted_sets(cifar_c(tmp_path / "c"), vit, **options)


def test_folders_that_do_not_fit_are_refused(vit, tmp_path):
    with pytest.raises(
        ValueError, match="source is 'nowhere': pass a folder, or one of cifar10-c, cifar100-c, imagenet-c"
    ):
        load_corrupted_sets("nowhere", vit)
    short = cifar_c(tmp_path / "short")
    np.save(short / "labels.npy", np.zeros(7, dtype=int))
    with pytest.raises(ValueError, match=r"fog.npy has 20 images and labels.npy 7 labels"):
        load_corrupted_sets(short, vit, "fog")
    two = imagenet_c(tmp_path / "two", ["n01", "n02"])
    with pytest.raises(ValueError, match="2 folders that are not named after classes, and the model has 3 classes"):
        load_corrupted_sets(two, vit, "fog")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no corruptions: it has none"):
        load_corrupted_sets(tmp_path / "empty", vit)
    np.save(short / "fog.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        load_corrupted_sets(short, vit, "fog")
