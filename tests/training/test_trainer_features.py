"""What Trainer offers works with Hydras: resuming, mixed precision, gradient checkpointing, accumulation."""

import dataclasses
import shutil

import pytest
import torch
from transformers import TrainingArguments

from hydra_transformers.training import recipe
from hydra_transformers.training.trainer import FiniteTrainer
from tests.training.tiny import QUIET, changed, copy_of_weights, tiny_dataset, tiny_model, tiny_trainer


SETTINGS = {
    "vit": dataclasses.replace(recipe("imagenet1k"), max_steps=6, warmup_steps=1, learning_rate=0.1),
    "bert": dataclasses.replace(
        recipe("sst2"), epochs=2, learning_rate=0.01, early_stopping_patience=None, keep_best=False
    ),
    "clip": dataclasses.replace(recipe("imagenet1k"), max_steps=6, warmup_steps=1, dropout=None, label_smoothing=0.0),
}


def trained(name, form, output_dir, resume=None, **overrides):
    """The model after the recipe's few steps, dropout included."""
    model = tiny_model(name, form)
    settings = SETTINGS[name]
    overrides = {"per_device_train_batch_size": 4, "save_strategy": "no", **overrides}
    trainer = tiny_trainer(
        name,
        model,
        settings.training_arguments(output_dir, eval_strategy="no", **QUIET, **overrides),
        callbacks=settings.callbacks(),
        compute_loss_func=None if name == "clip" else settings.loss(),
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("vit", "fused"), ("bert", "member"), ("clip", "fused")])
def test_resuming_from_a_checkpoint_gives_the_weights_of_an_unbroken_run(name, form, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    unbroken = trained(name, form, tmp_path, **saving)
    checkpoints = sorted(tmp_path.glob("checkpoint-*"))
    shutil.rmtree(checkpoints[-1])
    resumed = trained(name, form, tmp_path, resume=True, **saving)
    for (parameter, expected), found in zip(unbroken.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found), parameter


@pytest.mark.slow
@pytest.mark.parametrize("form", ["member", "fused"])
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_gradient_checkpointing_changes_nothing(name, form, tmp_path):
    plain = trained(name, form, tmp_path)
    checkpointed = trained(name, form, tmp_path, gradient_checkpointing=True)
    for (parameter, expected), found in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=parameter)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_bfloat16_trains_the_same_parameters_close_by(name, tmp_path):
    before = copy_of_weights(tiny_model(name, "fused"))
    full = trained(name, "fused", tmp_path)
    half = trained(name, "fused", tmp_path, bf16=True)
    keys = {parameter for parameter in before if "k_proj.bias" in parameter}
    assert changed(before, half) - keys == changed(before, full) - keys
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float32}
    moved = torch.cat([(p - before[n]).flatten() for n, p in full.named_parameters()])
    moved_half = torch.cat([(p - before[n]).flatten() for n, p in half.named_parameters()])
    assert torch.nn.functional.cosine_similarity(moved, moved_half, dim=0) > 0.9


def test_accumulated_batches_of_a_member_make_the_same_steps(tmp_path, monkeypatch):
    # Without dropout, which draws another mask for every part of a batch.
    monkeypatch.setitem(SETTINGS, "vit", dataclasses.replace(SETTINGS["vit"], dropout=None))
    whole = trained("vit", "member", tmp_path, per_device_train_batch_size=6)
    parts = trained("vit", "member", tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    for (parameter, expected), found in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=parameter)


def test_accumulated_batches_count_by_their_labels_in_models_that_give_means(tmp_path):
    """BERT of Transformers is told how many labels there are, and divides by those of each batch alone."""
    model, rows = tiny_model("bert", "backbone").eval(), tiny_dataset("bert", 6)
    whole = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    expected = model(**whole).loss
    trainer = FiniteTrainer(model=model, args=TrainingArguments(tmp_path, **QUIET))
    parts = [{name: tensor[rows] for name, tensor in whole.items()} for rows in (slice(0, 4), slice(4, 6))]
    losses = [trainer.compute_loss(model, dict(part), num_items_in_batch=torch.tensor(6)) for part in parts]
    torch.testing.assert_close(sum(losses), expected)


def test_copies_of_a_row_count_once_and_differ_by_dropout(tmp_path):
    """Three copies without dropout have the gradient of one, also where batches are accumulated; with dropout each is another."""
    model = tiny_model("bert", "backbone", hidden_dropout_prob=0.1).double()
    arguments = TrainingArguments(tmp_path, **QUIET)
    rows = tiny_dataset("bert", 4)
    batch = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
    batch["labels"] = torch.tensor([row["labels"] for row in rows])
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    trainers = {count: FiniteTrainer(model=model, args=arguments, repetitions=count) for count in (1, 3)}
    found = {}
    for count, trainer in trainers.items():
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 2
        for each in dropouts:
            each.p = 0.0
        model.zero_grad()
        trainer.training_step(model, dict(batch), 8)
        found[count] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for one, three in zip(*found.values(), strict=True):
        torch.testing.assert_close(three, one, rtol=1e-10, atol=1e-12)
    for each in dropouts:
        each.p = 0.5
    seen = []
    model.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    trainers[3].training_step(model, dict(batch), 8)
    assert seen[0].shape == (12, 3) and len({tuple(row) for row in seen[0][:3].tolist()}) == 3
    with pytest.raises(ValueError, match="the batch has no labels"):
        trainers[3].training_step(model, {"input_ids": batch["input_ids"]})
    with pytest.raises(ValueError, match="the model has no dropout"):
        FiniteTrainer(model=tiny_model("vit", "backbone", hidden_dropout_prob=0.0), args=arguments, repetitions=2)
