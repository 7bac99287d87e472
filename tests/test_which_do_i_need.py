"""The examples of docs/which-do-i-need.md run, and the times of docs/pruning.md are those of benchmarks/results."""

import json

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from hydra_transformers.uncertainty import calibrate
from tests.pages import ROOT, run_python_blocks


PAGE = "docs/which-do-i-need.md"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.slow
def test_the_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_python_blocks(PAGE, at_least=5)
    assert "Best: " in capsys.readouterr().out
    assert names["fused"].config.trunk_layers == 3 and names["hydra"].num_members == names["best"].num_members == 3
    assert names["outputs"].abstain.any() and names["hydra"].is_calibrated


def test_the_times_of_circuits_are_seconds_per_removal_times_removals():
    measured = json.loads((RESULTS / "circuit_extraction_cpu.json").read_text())
    halfway = measured["states"][-1]
    budget = measured["preset"]["budget"]
    page = (ROOT / "docs/pruning.md").read_text()
    for way in ("exact", "shortlist", "naive"):
        assert f" {halfway[way]['seconds_per_removal'] * budget / 60:.1f} min " in page, way


def test_a_decision_around_a_model_that_predicts_decides_at_once():
    """As the page has it: without another `eval()`."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(image_size=4, patch_size=4, num_labels=2, **sizes)).eval()
    rows = [{"pixel_values": torch.randn(40, 3, 4, 4), "labels": torch.arange(40) % 2}]
    decided = calibrate(model, rows, target={"coverage": 0.5}).model
    with torch.no_grad():
        assert decided(pixel_values=torch.randn(3, 3, 4, 4)).abstain.shape == (3,)
        assert decided.train()(pixel_values=torch.randn(3, 3, 4, 4)).abstain is None
