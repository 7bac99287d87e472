"""The examples of docs/fine-tuning.md run, and its table is that of the recipes."""

import pytest

from hydra_transformers.training import recipe
from tests.pages import ROOT, run_python_blocks


PAGE = "docs/fine-tuning.md"


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_python_blocks(PAGE, at_least=5)
    assert (tmp_path / "runs" / "members" / "member-2" / "model.safetensors").exists()
    assert type(names["merged"]).__name__ == "HydraViTForImageClassification"


def test_the_table_of_the_page_shows_the_recipes():
    rows = {row.split("|")[1].strip(): row for row in (ROOT / PAGE).read_text().splitlines() if row.startswith("|")}
    for name, column in {"imagenet1k": 2, "cifar100": 3}.items():
        settings = recipe(name)
        grid = ", ".join(str(rate) for rate in settings.learning_rate_grid)
        assert rows["learning rate"].split("|")[column].strip() == f"best of {grid}"
        assert rows["length"].split("|")[column].strip() == f"{settings.max_steps:,} steps"
        assert rows["warm-up, then"].split("|")[column].strip().startswith(f"{settings.warmup_steps:,} steps, cosine")


def test_the_table_of_our_own_recipes_shows_them():
    text = (ROOT / PAGE).read_text()
    rows = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in text.splitlines()
        if row.startswith("|")
    }
    names = ["finetune-images", "finetune-texts", "tune-images", "tune-texts"]
    assert "| | `" + "` | `".join(names) + "` |" in text
    for column, name in enumerate(names):
        settings = recipe(name)
        rates = [
            f"{rate:.0e}".replace("e-0", "e-") for rate in (settings.learning_rate, settings.classifier_learning_rate)
        ]
        assert rows["AdamW, learning rate"][column] == f"{rates[0]}, classifier {rates[1]}"
        assert rows["weight decay"][column] == str(settings.weight_decay)
        assert rows["10 % warm-up, then"][column] == f"{settings.schedule} to zero" and settings.warmup_steps == 0.1
        assert rows["epochs"][column] == str(settings.epochs)
