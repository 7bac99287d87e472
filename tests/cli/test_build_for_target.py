"""`build --target`: what is named on the command line reaches `hydrate`."""

import shutil
from functools import partial

import pytest
import torch
from transformers import AutoModelForImageClassification, ViTForImageClassification, ViTModel

from hydra_transformers import search
from hydra_transformers.cli import main
from tests.tiny_data import grey_rows, picture_rows, save_vit


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    save_vit(folder / "one")
    other = ViTForImageClassification.from_pretrained(shutil.copytree(folder / "one", folder / "two"))
    with torch.no_grad():
        other.classifier.weight += 0.1 * torch.randn(other.classifier.weight.shape)
    other.save_pretrained(folder / "two")
    ViTModel.from_pretrained(folder / "one").save_pretrained(shutil.copytree(folder / "one", folder / "encoder"))
    picture_rows(600).save_to_disk(folder / "pictures")
    grey_rows(10).save_to_disk(folder / "grey")
    return folder


def words(workplace, output, *more, models=("encoder",)):
    parts = [
        "build",
        *(workplace / model for model in models),
        "--data",
        workplace / "pictures",
        "--output",
        output,
        *more,
    ]
    return [str(part) for part in parts]


@pytest.mark.slow
def test_a_pre_trained_model_and_a_target(workplace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "hydrate", partial(search.hydrate, seconds=0.0))
    command = words(workplace, tmp_path / "hydra", "--target", "balance", "--members", 2, "--max-steps", 2)
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "20 rows of data are for the search" in said and "Tried in turn: " in said and "Deep Ensemble of 2" in said
    assert "evaluate" in said and "--part test" in said
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "hydra")
    assert hydra.num_members == 2 and list(hydra.config.id2label.values()) == ["red", "green", "blue"]
    assert (tmp_path / "hydra" / "candidates.md").exists()
    assert (tmp_path / "hydra" / "preprocessor_config.json").exists()
    assert main([*command, "--seed", "1"]) == 2
    assert "holds the steps of another hydration" in capsys.readouterr().err


def given_to_hydrate(command, monkeypatch, tmp_path):
    given = {}

    class Found:
        def to_markdown(self):
            return "table"

    monkeypatch.setattr(search, "hydrate", lambda *models, **rest: given.update(rest, models=models) or Found())
    assert main(command) == 0
    return given


def test_several_fine_tunings_are_taken_as_they_are(workplace, tmp_path, monkeypatch):
    more = [
        "--target",
        "cost=1.3",
        "--time-limit",
        "1.5",
        "--near",
        f"grey={workplace / 'grey'}",
        "--ood-data",
        workplace / "grey",
    ]
    given = given_to_hydrate(words(workplace, tmp_path / "hydra", *more, models=("one", "two")), monkeypatch, tmp_path)
    assert given["models"] == ([str(workplace / "one"), str(workplace / "two")],) and given["target"] == {"cost": 1.3}
    assert len(given["data"]) == 600 and "train_data" not in given
    assert set(given["ood_data"]) == {"near", "OOD"} and len(given["ood_data"]["near"]["grey"]) == 10
    assert given["num_members"] == 3 and given["card"] == {} and given["time_limit"] == 1.5


def test_the_parts_of_the_data_are_apart_and_only_training_images_change(workplace, tmp_path, monkeypatch):
    command = words(workplace, tmp_path / "hydra", "--target", "accuracy_within=1", "--max-steps", 3)
    given = given_to_hydrate(command, monkeypatch, tmp_path)
    assert (len(given["train_data"]), len(given["data"])) == (480, 60) and given["ood_data"] is None
    assert given["train_data"].change is not None and given["data"].change is None
    assert given["recipe"].max_steps == given["tuning_recipe"].max_steps == 3
    assert given["class_names"] == ["red", "green", "blue"] and given["target"] == {"accuracy_within": 1.0}
