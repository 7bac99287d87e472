"""The examples of docs/baselines.md run."""

import pytest

from hydra_transformers import baselines, evaluate_uncertainty
from hydra_transformers.cost import compare_costs
from tests.pages import ROOT, run_python_blocks


PAGE = "docs/baselines.md"
MEMBERS = {
    "calibrated": 1,
    "mc_dropout": 10,
    "laplace": 1,
    "averaged": 1,
    "batch_ensemble": 3,
    "packed": 4,
    "mimo": 2,
    "lora_ensemble": 3,
    "shifted": 2,
}


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_python_blocks(PAGE, at_least=10)
    assert names["output"].member_logits.shape == (4, 2, 3)
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names["models"])
    models = {name: names[name] for name in MEMBERS}
    report = evaluate_uncertainty(models, names["validation"])
    assert report.num_members == MEMBERS
    assert all(cost.multiply_adds > 0 for cost in compare_costs(models).values())


def test_the_page_shows_every_public_name():
    assert all(name in (ROOT / PAGE).read_text() for name in baselines.__all__)
