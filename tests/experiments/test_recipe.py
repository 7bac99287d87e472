"""The study of recipes: its steps are HydraTrainer's, it runs, and its tables say what its rows say."""

import json

import numpy as np
import pytest
import torch

from experiments import judging, recipe, recipe_table
from experiments.recorded_steps import RecordedSteps, disagreement, with_mixed_labels
from experiments.rows import TensorRows, as_it_is
from hydra_transformers import AutoHydra, HydraTrainer, HydraTrainingArguments
from tests.training.tiny import QUIET, assert_same_weights, tiny_dataset, tiny_model


def hydra_of(name: str = "vit", **options):
    return AutoHydra.from_backbone(tiny_model(name, "backbone"), num_labels=3, trunk_layers=1, **options)


def test_recorded_steps_are_those_of_hydra_trainer(tmp_path):
    """With all rows in one batch, whose order then changes nothing."""
    rows = tiny_dataset("vit", 12)
    tensors = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    expected = hydra_of(num_members=2)
    found = hydra_of(num_members=2)
    rates = {"learning_rate": 1e-3, "layer_decay": 0.7}
    arguments = HydraTrainingArguments(
        tmp_path,
        num_train_epochs=4,
        per_device_train_batch_size=12,
        classifier_learning_rate=3e-3,
        save_strategy="no",
        **rates,
        **QUIET,
    )
    HydraTrainer(expected, arguments, train_dataset=rows).train()
    steps = RecordedSteps(found, "cpu")
    steps.train(TensorRows(tensors, as_it_is), seed=0, epochs=4, batch_size=12, classifier_rate=3e-3, **rates)
    for (name, weight), other in zip(expected.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-4, atol=1e-6, msg=name)
    again = RecordedSteps(found, "cpu")
    assert_same_weights(again.model, found)


def test_texts_are_mixed_by_their_embeddings():
    model = hydra_of("bert", num_members=1).eval()
    steps = RecordedSteps(model, "cpu")
    rows = tiny_dataset("bert", 4)
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    plain = with_mixed_labels(batch, is_mixed=False)
    torch.testing.assert_close(steps.loss(plain), model(**batch).loss)
    torch.manual_seed(0)
    mixed = with_mixed_labels(batch, is_mixed=True)
    # A share of 1 leaves the first texts as they are, and a share of 0 the others.
    for share, order in ((1.0, torch.arange(4)), (0.0, mixed["partners"])):
        one_of_both = {**mixed, "share": torch.tensor(share)}
        swapped = {name: tensor[order] for name, tensor in batch.items()}
        torch.testing.assert_close(steps.loss(one_of_both), model(**swapped).loss)
    assert disagreement(torch.zeros(2, 1, 3), torch.zeros(2, 1, 3)) == 0


def test_tables_show_the_means_over_seeds_and_count_trainings():
    setting = recipe.SETTINGS["tiny-imagenet"]
    measured = {"aurc": 0.05, "nll_with_temperature": 0.8, "calibrated_answered": 0.6}
    measured |= {f"{group}_{score}_auroc": 0.8 for group in ("near", "far") for score in ("msp", "energy")}

    def row(kind: str, accuracy: float, plan: recipe.Plan, **about) -> dict:
        values = measured | {"accuracy": accuracy}
        return {"kind": kind, "plan": recipe.asdict(plan), "validation": values, "test": values} | about

    one_run = recipe.Plan(members=3, trunk=11, runs=2)
    rows = [
        row("training", 0.78, recipe.Plan(seed=0), seed=0, work=90),
        row("training", 0.80, recipe.Plan(seed=1), seed=1, work=90),
        row("training", 0.70, recipe.with_recipe(recipe.Plan(), mixing=0.0), seed=0, work=90),
        row("training", 0.81, one_run, seed=0, work=96),
        row("fused", 0.82, one_run, count=2, merged=11, work=100),
        row("ensemble", 0.83, one_run, count=2),
    ]
    content = {
        "what": "recipe",
        "rows": rows,
        "machine": {"machine": "a machine", "versions": "versions", "date": "a day"},
        "usual": recipe.asdict(setting.usual),
        "recipe_of_budgets": recipe.asdict(setting.usual),
        "epochs_of_one_training": 8,
        "work_of_one_model": 100,
    }
    tables = recipe_table.render(content)
    lines = dict(line.strip("| ").split(" | ", 1) for line in tables["dial"].splitlines()[2:])
    assert lines["One model, 12 epochs"].startswith("1.5 | 1.00 | 2 | 79.0 ± 1.4")
    assert lines["One run of 3 members, 11 layers shared, 12 epochs"].startswith("1.4 | 0.96 | 1 | 81.0")
    fused = lines["**2 runs of 3 members, 11 layers shared, 12 epochs each, fused**"]
    assert fused.startswith("2.9 | 1.00 | 1 | 82.0")
    ensemble = lines["Deep Ensemble of 2 runs of 3 members, 11 layers shared, 12 epochs each"]
    assert ensemble.startswith("2.9 | 1.92 | 1 | 83.0")
    # Front pages: of runs only those that share most layers, of several seeds their mean.
    assert "trained" not in tables["summary"] and "Deep Ensemble" not in tables["summary"]
    one_run_line = "| Hydra: one run of three members, `finetune(runs=1)` | 1.4 | 0.96 | 81.0 % | 50.0 | 0.800 |"
    assert one_run_line in tables["summary"].splitlines() and one_run_line not in tables["front"].splitlines()
    assert "mixing in 0% of the steps" in tables["ingredients"] and "| 0.85 | 78.0 / 0.800 |" in tables["rates"]


def test_arrays_keep_the_rows_and_where_calibration_lands():
    torch.manual_seed(0)
    labels = {name: torch.randint(2, (400,)) for name in ("validation", "test")}
    logits = {}
    for name, of_rows in labels.items():
        sure = 4 * torch.rand(400) * torch.where(torch.rand(400) < 0.9, 1, -1)
        logits[name] = torch.stack([sure * (of_rows == 0), sure * (of_rows == 1)], dim=1).unsqueeze(1)
    arrays = judging.arrays_of(logits, labels)
    assert arrays["test_correct"].tolist() == (logits["test"][:, 0].argmax(-1) == labels["test"]).tolist()
    confidence = logits["test"][:, 0].softmax(-1).amax(-1)
    torch.testing.assert_close(1 - torch.tensor(arrays["test_doubt"]).float(), confidence, atol=3e-4, rtol=0)
    values = judging.answered_as_calibrated(logits, labels)
    assert len(arrays["draws_wrong"]) == judging.DRAWS
    assert float(arrays["draws_answered"].mean()) == pytest.approx(values["calibrated_answered"], abs=1e-6)
    assert float(arrays["draws_wrong"].mean()) == pytest.approx(values["calibrated_errors"], abs=1e-6)


@pytest.mark.slow
def test_several_runs_make_an_ensemble_fused_models_and_a_soup(monkeypatch):
    monkeypatch.setattr(judging, "DRAWS", 2)
    study = recipe.Study(recipe.SETTINGS["smallest"], None, None, "cpu")
    plan = recipe.with_recipe(recipe.Plan(runs=2), epochs=1, batch_size=32)
    rows = list(study.rows_of(plan))
    assert {row["kind"] for row in rows} == {"training", "ensemble", "fused", "fused apart", "soup"}
    trained = [row for row in rows if row["kind"] == "training"]
    assert [row["seed"] for row in trained] == [0, 1] and trained[0]["test"] != trained[1]["test"]


@pytest.mark.slow
def test_what_the_results_file_has_is_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setitem(recipe.GROUPS, "runs", lambda usual: [usual])
    output = tmp_path / "results.json"
    options = ["--setting", "smallest", "--output", str(output), "--device", "cpu", "--workers", "1"]
    options += ["--groups", "runs", "--usual", json.dumps({"epochs": 1, "batch_size": 32})]
    recipe.main(options)
    before = output.read_text()
    assert [row["kind"] for row in json.loads(before)["rows"]] == ["training"]
    arrays = np.load(output.with_suffix(".npz"))
    assert (
        len(arrays["0/test_doubt"]) == len(arrays["0/test_correct"]) and len(arrays["0/draws_wrong"]) == judging.DRAWS
    )
    recipe.main(options)
    assert output.read_text() == before
