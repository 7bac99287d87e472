"""A folder of tiny models and data sets that commands work on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
from transformers import BertForSequenceClassification, ViTForImageClassification, ViTModel

from hydra_transformers import AutoHydra
from hydra_transformers.cli import main
from tests.tiny_data import grey_rows, picture_rows, pictures, review_rows, save_bert, save_clip, save_vit


@pytest.fixture(scope="session")
def workplace(tmp_path_factory) -> Path:
    """Checkpoints vit, two and three of one model, an encoder, a Hydra of them, BERT, CLIP, and data."""
    folder = tmp_path_factory.mktemp("workplace")
    vit = ViTForImageClassification.from_pretrained(save_vit(folder / "vit"))
    for seed, name in enumerate(("two", "three"), start=1):
        shutil.copytree(folder / "vit", folder / name)
        generator = torch.Generator().manual_seed(seed)
        other = ViTForImageClassification.from_pretrained(folder / "vit")
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        other.save_pretrained(folder / name)
    ViTModel.from_pretrained(folder / "vit", add_pooling_layer=False).save_pretrained(
        shutil.copytree(folder / "vit", folder / "encoder", ignore=shutil.ignore_patterns("*.safetensors"))
    )
    save_vit(folder / "cats", ["cat", "dog", "bird"])
    save_bert(folder / "bert")
    BertForSequenceClassification.from_pretrained(folder / "bert").bert.save_pretrained(
        shutil.copytree(folder / "bert", folder / "bert-encoder", ignore=shutil.ignore_patterns("*.safetensors"))
    )
    reward = AutoHydra.from_backbone(folder / "bert-encoder", num_members=2, num_labels=1, problem_type="regression")
    reward.config.aggregate = "mean"
    reward.save_pretrained(shutil.copytree(folder / "bert", folder / "reward"))
    save_clip(folder / "clip")
    members = [ViTForImageClassification.from_pretrained(folder / name) for name in ("vit", "two", "three")]
    AutoHydra.from_pruned_members(members).save_pretrained(shutil.copytree(folder / "vit", folder / "hydra"))
    AutoHydra.from_backbone(vit, {0: [1]}).save_pretrained(folder / "one-of-two" / "member-0")
    (folder / "one-of-two" / "prune.json").write_text('{"members": 2}')
    picture_rows(60).save_to_disk(folder / "pictures")
    picture_rows(30, names=["blue", "red", "green"]).save_to_disk(folder / "reordered")
    picture_rows(12).filter(lambda row: row["label"] == 0).save_to_disk(folder / "red")
    parts = {"train": picture_rows(24), "validation": picture_rows(24, seed=1), "test": picture_rows(12, seed=2)}
    datasets.DatasetDict(parts).save_to_disk(folder / "splits")
    grey_rows(16).save_to_disk(folder / "grey")
    review_rows(60).to_csv(folder / "reviews.csv", index=False)
    review_rows(8).save_to_disk(folder / "reviews")
    pictures([0])[0].save(folder / "0.png")
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:60])
    (folder / "file").write_text("")
    (folder / "empty").mkdir()
    (folder / "reported" / "plots").mkdir(parents=True)
    (folder / "reported" / "report.md").write_text("mine")
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("")
    return folder


@pytest.fixture
def fails(capsys) -> Callable[..., str]:
    """Runs a command that the user called wrongly, and returns its one sentence."""

    def run(*words) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1, lines
        return lines[0]

    return run
