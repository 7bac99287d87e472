"""Without a recipe: epochs by the number of rows, an early end, the best weights, and a line that says so."""

import dataclasses

import pytest
import torch
from peft import get_peft_model

from hydra_transformers.training import (
    default_recipe,
    finetune_from_pretrained,
    finetune_members,
    lora_config,
    recipe,
)
from hydra_transformers.training.recipes import epochs_for
from tests.training.test_finetune_members import Interrupting, assert_same_weights
from tests.training.tiny import FAMILIES, QUIET, tiny_dataset, tiny_members, tiny_model


ARGUMENTS = {"per_device_train_batch_size": 12, **QUIET}


def test_the_steps_grow_with_the_square_root_of_the_rows_within_limits():
    sizes = [1, 100, 2_000, 12_500, 50_000, 200_000, 10**7]
    assert [epochs_for(rows, epochs_tried=8) for rows in sizes] == [30, 30, 30, 16, 8, 4, 1]
    assert [epochs_for(rows, epochs_tried=2) for rows in sizes] == [30, 30, 10, 4, 2, 1, 1]
    steps = [rows * epochs_for(rows, 8) for rows in sizes]
    assert steps == sorted(steps), "more rows are never fewer steps"
    with pytest.raises(ValueError, match="rows is 0"):
        epochs_for(0, 8)


@pytest.mark.parametrize(("name", "reads"), [("vit", "images"), ("bert", "texts")])
@pytest.mark.parametrize("form", ["backbone", "member"])
def test_it_is_the_named_recipe_but_for_its_length_and_its_end(name, reads, form):
    config = tiny_model(name, form).config
    for is_pretrained, kind in ((True, "finetune"), (False, "tune")):
        named = recipe(f"{kind}-{reads}")
        found = default_recipe(config, range(2_000), is_pretrained)
        assert found.epochs == epochs_for(2_000, named.epochs) and found.keep_best
        assert found.early_stopping_patience == max(3, -(-found.epochs // 3))
        same = dict.fromkeys(("name", "epochs", "keep_best", "early_stopping_patience"))
        assert dataclasses.replace(found, **same, max_steps=1) == dataclasses.replace(named, **same, max_steps=1)
    assert default_recipe(config, range(2_000), epochs=3).early_stopping_patience is None, "it could never end early"


def test_a_line_says_what_was_chosen(tmp_path, capsys):
    rows, members = tiny_dataset("vit"), tiny_members(FAMILIES["vit"])[:1]
    settings = {"train_data": rows, "validation_data": rows, "output_dir": tmp_path, **ARGUMENTS}
    finetune_members(members, **settings, num_train_epochs=1)
    line = (
        "recipe default tune-images: AdamW, 10% warm-up, cosine decay, at most 1 epoch, or until 10 validations in turn bring "
        "no better validation accuracy, the best is kept"
    )
    assert line in capsys.readouterr().out.splitlines()
    again = finetune_members(members, **settings, num_train_epochs=1)
    assert "member-0: already finished" in capsys.readouterr().out and len(again) == 1


def test_a_pre_trained_model_has_its_own_default(tmp_path, capsys):
    rows = tiny_dataset("bert", 6)
    data = {"train_data": rows, "validation_data": rows, "output_dir": tmp_path}
    finetune_from_pretrained(tiny_model("bert", "backbone"), 1, **data, max_steps=1, **ARGUMENTS)
    assert (
        "recipe default finetune-texts: AdamW, 10% warm-up, linear decay, at most 1 step," in capsys.readouterr().out
    )


def of_validation(values):
    """A `compute_metrics` that tells these accuracies, one after the other."""
    left = iter(values)
    return lambda _: {"accuracy": next(left)}


@pytest.mark.slow
def test_it_ends_early_with_the_best_weights_and_resumes_exactly(tmp_path):
    """Ten validations in turn that are no better end 30 epochs: here those after the second."""
    rows, members = tiny_dataset("vit"), tiny_members(FAMILIES["vit"])[:1]
    accuracies = [0.4, 0.9] + [0.8] * 10
    settings = {"validation_data": rows, **ARGUMENTS, "learning_rates": [0.01]}

    def tuned(folder, train, values):
        return finetune_members(
            members, None, train, output_dir=tmp_path / folder, compute_metrics=of_validation(values), **settings
        )

    [whole] = tuned("whole", rows, [*accuracies, 0.9])  # and once more for the best
    assert not torch.equal(whole.classifier.weight, members[0].classifier.weight)
    with pytest.raises(KeyboardInterrupt):
        tuned("cut", Interrupting(rows, 4 * 12 + 5), accuracies[:4])
    best = next((tmp_path / "cut").rglob("checkpoint-2"))
    assert_same_weights(type(whole).from_pretrained(best), whole)
    [resumed] = tuned("cut", rows, [*accuracies[4:], 0.9])
    assert_same_weights(whole, resumed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_data": None}, "train_data is None"),
        ({"output_dir": None}, "output_dir is None"),
        ({"train_data": iter([])}, "of unknown length, by which epochs are chosen: pass a recipe"),
        ({"members": ["clip"]}, "a hydra_clip has no classifier to train, and no default recipe"),
        ({"members": ["lora"]}, "no default recipe for members with adapters"),
    ],
)
def test_what_has_no_default_is_refused_before_any_work(change, message, tmp_path):
    rows = tiny_dataset("vit")
    settings = {"members": tiny_members(FAMILIES["vit"])[:1], "train_data": rows, "validation_data": rows}
    settings |= {"output_dir": tmp_path / "out", **change}
    if change.get("members") == ["clip"]:
        settings["members"] = [tiny_model("clip", "member")]
    elif "members" in change:
        model = tiny_model("vit", "member")
        settings["members"] = [get_peft_model(model, lora_config(model, r=2))]
    with pytest.raises(ValueError, match=message):
        finetune_members(**settings, **ARGUMENTS)
    assert not (tmp_path / "out").exists()
