"""The examples of docs/fine-tuning.md run, and its table is that of the recipes."""

import pytest

from hydra_transformers.training import recipe
from tests.pages import ROOT, run_python_blocks


PAGE = "docs/fine-tuning.md"


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_python_blocks(PAGE, at_least=4)
    assert names["trainer"].model.num_members == 3
    assert (tmp_path / "runs" / "members" / "member-2" / "model.safetensors").exists()
    assert type(names["merged"]).__name__ == "HydraViTForImageClassification"


def test_the_table_of_the_page_shows_the_recipes():
    rows = {row.split("|")[1].strip(): row for row in (ROOT / PAGE).read_text().splitlines() if row.startswith("|")}
    for name, column in {"imagenet1k": 2, "cifar100": 3}.items():
        settings = recipe(name)
        grid = ", ".join(str(rate) for rate in settings.learning_rates)
        assert rows["learning rate"].split("|")[column].strip() == f"best of {grid}"
        assert rows["length"].split("|")[column].strip() == f"{settings.arguments['max_steps']:,} steps"
        assert (
            rows["warm-up, then"]
            .split("|")[column]
            .strip()
            .startswith(f"{settings.arguments['warmup_steps']:,} steps, cosine")
        )
