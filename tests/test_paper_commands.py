"""The commands of README's second door and of docs/paper.md run, with a small model and local images under their names."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from experiments.paper import __main__ as paper
from hydra_transformers import AutoHydra
from tests.command_line import parsed, run
from tests.pages import ROOT
from tests.tiny_data import CLASSES, pictures, save_vit


SECTIONS = {"README.md": "## The paper's system", "docs/paper.md": "# The paper", "docs/pruning.md": "# Pruning"}


def command_lines(page: str) -> list[list[str]]:
    """The words of the page's commands, without comments."""
    section = (ROOT / page).read_text().partition(SECTIONS[page])[2].partition("\n## What is supported")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line.strip()]


def save_vit_of_many_heads(folder: Path) -> None:
    """Few heads would leave three circuits no choice."""
    save_vit(folder)
    config = ViTConfig.from_pretrained(folder)
    config.num_hidden_layers = 4
    config.num_attention_heads = 8
    torch.manual_seed(0)
    ViTForImageClassification(config).save_pretrained(folder)


def image_folder(folder: Path, count: int, seed: int = 0) -> None:
    labels = [number % len(CLASSES) for number in range(count)]
    for number, picture in enumerate(pictures(labels, seed)):
        place = folder / CLASSES[labels[number]]
        place.mkdir(parents=True, exist_ok=True)
        picture.save(place / f"{number}.png")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/paper.md"])
def test_members_are_pruned_tuned_and_fused_as_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_vit_of_many_heads(tmp_path / "my-vit")
    for split, rows in (("train", 12), ("validation", 30), ("test", 8)):
        image_folder(tmp_path / "cifar100" / split, rows)
    image_folder(tmp_path / "zh-plus" / "tiny-imagenet" / "test", 30, seed=1)
    commands = [words[1:] for words in command_lines(page) if words[0] == "hydra-transformers"]
    assert [words[0] for words in commands] == ["prune", "finetune", "fuse", "push"]
    for words in commands[:3]:
        few = ["--set", "max_steps=2", "--set", "warmup_steps=1"] if words[0] == "finetune" else []
        run(*words, *few)
    hydra = AutoHydra.from_pretrained("my-hydra")
    assert hydra.num_members == 3
    assert parsed(commands[3])["folder"] == Path("my-hydra")


@pytest.mark.parametrize("page", SECTIONS)
def test_every_command_of_the_page_has_the_options_that_there_are(page):
    for words in command_lines(page):
        if words[0] == "hydra-transformers":
            assert parsed(words[1:])
        elif words[:3] == ["python", "-m", "experiments.paper"]:
            assert paper.parsed(words[3:])


@pytest.mark.parametrize("page", SECTIONS)
def test_heads_are_not_chosen_on_test_rows(page):
    """`prune` reads the test split by default."""
    [prune] = [words[1:] for words in command_lines(page) if words[1:2] == ["prune"]]
    values = parsed(prune)
    assert values["split"] == "validation" and values["limit"]
