"""Baselines go through `finetune_members` like any member: by a recipe, and on from where they were."""

import pytest
import torch
from safetensors.torch import load_file

from hydra_transformers.baselines import MIMO, BatchEnsemble, MIMOCollator
from hydra_transformers.training import Recipe, finetune_members
from hydra_transformers.training.parameter_groups import PARTS, places
from tests.training.tiny import QUIET, tiny_dataset, tiny_model


SHORT = Recipe("short", {"max_steps": 3, "warmup_steps": 1, "learning_rate": 0.01}, trainable=PARTS)
ARGUMENTS = {"per_device_train_batch_size": 4, **QUIET}


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_what_a_baseline_adds_belongs_to_the_part_that_it_changes(name):
    model = tiny_model(name, "backbone")
    found = places(BatchEnsemble(model, num_members=2))
    assert found["model.classifier.input_factors"].part == "classifier"
    layer = {"vit": "vit.layers.1.attention.q_proj", "bert": "bert.encoder.layer.1.attention.self.query"}[name]
    assert found[f"model.{layer}.biases"] == found[f"model.{layer}.weight"] == places(model)[f"{layer}.weight"]
    mimo = MIMO(model, num_members=2)
    reading = "embeddings.mixing" if name == "bert" else f"model.{mimo.projection}.weight"
    assert places(mimo)[reading].part == "embeddings"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batch-ensemble", "mimo"])
def test_fine_tuned_by_a_recipe_it_is_what_was_saved(kind, tmp_path):
    rows = tiny_dataset("vit")
    model = tiny_model("vit", "backbone")
    if kind == "mimo":
        baseline = MIMO(model, num_members=2)
        options = {"data_collator": MIMOCollator(2, repetitions=2)}
    else:
        baseline = BatchEnsemble(model, num_members=2)
        options = {}
    [tuned] = finetune_members([baseline], SHORT, rows, rows, tmp_path, **options, **ARGUMENTS)
    assert type(tuned) is type(baseline) and not tuned.training
    still = [name for name, tensor in tuned.state_dict().items() if torch.equal(tensor, baseline.state_dict()[name])]
    assert [name for name in still if not name.endswith(".bias")] == []
    saved = load_file(tmp_path / "member-0" / "model.safetensors")
    torch.testing.assert_close(saved, dict(tuned.state_dict()), rtol=0, atol=0)
    [again] = finetune_members([baseline], SHORT, rows, rows, tmp_path, **options, **ARGUMENTS)
    torch.testing.assert_close(again.state_dict(), tuned.state_dict(), rtol=0, atol=0)
