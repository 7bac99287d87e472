"""A learning rate is chosen on validation data: one member is tuned at each, and all get the
best."""

import json

import pytest
from transformers import TrainingArguments

from hydra_transformers.training import DivergedError, Recipe, finetune_members
from hydra_transformers.training.learning_rates import validation_of
from tests.training.tiny import FAMILIES, QUIET, Interrupting, assert_same_weights, tiny_dataset, tiny_members


ARGUMENTS = {"per_device_train_batch_size": 4, **QUIET}
SHORT = Recipe("short", {"max_steps": 3}, learning_rates=(1e-6, 0.03))


@pytest.fixture(scope="module")
def members():
    return tiny_members(FAMILIES["vit"])[:2]


@pytest.fixture(scope="module")
def data():
    return tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)


@pytest.fixture(scope="module")
def chosen(members, data, tmp_path_factory):
    """Two members at the better rate of the recipe's grid, and their folder."""
    folder = tmp_path_factory.mktemp("chosen")
    return finetune_members(members, SHORT, *data, folder, learning_rates="grid", **ARGUMENTS), folder


def test_all_members_get_the_rate_that_is_best_for_the_first(members, data, chosen, tmp_path):
    tuned, folder = chosen
    record = json.loads((folder / "learning-rates.json").read_text())
    losses = {rate: metrics["loss"] for rate, metrics in record["validation"].items()}
    assert record["learning_rates"] == [1e-6, 0.03] and set(losses) == {"1e-06", "0.03"}
    assert record["chosen"] == 0.03 and losses["0.03"] < losses["1e-06"]
    assert sorted(path.name for path in folder.iterdir()) == ["learning-rates.json", "member-0", "member-1"]
    alone = finetune_members(members, SHORT, *data, tmp_path, learning_rate=0.03, **ARGUMENTS)
    for expected, found in zip(alone, tuned, strict=True):
        assert_same_weights(expected, found)


def test_a_finished_choice_is_loaded_and_other_rates_are_refused(members, data, chosen):
    tuned, folder = chosen
    calm = {"output_dir": folder, **ARGUMENTS}
    again = finetune_members(members, SHORT, Interrupting(data[0], 0), data[1], learning_rates=[1e-6, 0.03], **calm)
    for expected, found in zip(tuned, again, strict=True):
        assert_same_weights(expected, found)
    with pytest.raises(ValueError, match=r"was made with learning_rates \[1e-06, 0.03\], which now is \[0.1\]"):
        finetune_members(members, SHORT, *data, learning_rates=[0.1], **calm)


def test_an_interrupted_choice_goes_on_to_the_same_weights(members, data, chosen, tmp_path):
    """Cut in the second rate's training; the first rate's is not repeated."""
    settings = {"output_dir": tmp_path, "learning_rates": "grid", **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_members(members, SHORT, Interrupting(data[0], 12 + 5), data[1], **settings)
    assert not (tmp_path / "learning-rates.json").exists() and not (tmp_path / "member-0").exists()
    rest = Interrupting(data[0], 12 + 12)  # of the second rate and the second member
    resumed = finetune_members(members, SHORT, rest, data[1], **settings)
    assert rest.reads_left == 0
    for expected, found in zip(chosen[0], resumed, strict=True):
        assert_same_weights(expected, found)


def test_a_choice_that_was_stopped_before_its_best_training_was_moved_goes_on(members, data, chosen, tmp_path):
    tuned, folder = chosen
    (tmp_path / "learning-rates.json").write_text((folder / "learning-rates.json").read_text())
    finetune_members(members[:1], SHORT, *data, tmp_path / "a", learning_rate=0.03, **ARGUMENTS)
    (tmp_path / "learning-rates").mkdir()
    (tmp_path / "a" / "member-0").rename(tmp_path / "learning-rates" / "0.03")
    settings = {"output_dir": tmp_path, "learning_rates": "grid", **ARGUMENTS}
    [found] = finetune_members(members[:1], SHORT, Interrupting(data[0], 0), data[1], **settings)
    assert_same_weights(tuned[0], found)


def test_a_rate_that_diverges_is_left_out(members, data, tmp_path):
    settings = {"output_dir": tmp_path / "some", "learning_rates": [0.01, 1e9], **ARGUMENTS}
    finetune_members(members[:1], SHORT, *data, **settings)
    record = json.loads((tmp_path / "some" / "learning-rates.json").read_text())
    assert record["chosen"] == 0.01 and "the loss is" in record["diverged"]["1e+09"]
    settings |= {"output_dir": tmp_path / "all", "learning_rates": [1e9]}
    with pytest.raises(DivergedError, match=r"diverged at each of the learning rates \[1000000000.0\]"):
        finetune_members(members[:1], SHORT, *data, **settings)


def test_the_metric_of_the_training_decides_and_among_equals_the_loss(tmp_path):
    plain = TrainingArguments(tmp_path, **QUIET)
    both = {"eval_accuracy": 0.5, "eval_loss": 2.0, "eval_runtime": 1.0}
    assert validation_of(both, plain)[:2] == (0.5, -2.0)
    assert validation_of({"eval_loss": 2.0}, plain).score == -2.0
    named = TrainingArguments(tmp_path, metric_for_best_model="loss", greater_is_better=False, **QUIET)
    assert validation_of(both, named).score == -2.0
    assert validation_of(both, named).metrics == {"accuracy": 0.5, "loss": 2.0}
    named = TrainingArguments(tmp_path, metric_for_best_model="f1", **QUIET)
    with pytest.raises(
        ValueError, match="metric_for_best_model is 'f1', which the validation has not: it has accuracy"
    ):
        validation_of(both, named)


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("sst2", {"learning_rates": "grid"}, "the recipe 'sst2' has no grid: pass a list of numbers"),
        (SHORT, {"learning_rates": "all"}, "learning_rates is 'all': pass \"grid\", or a list"),
        (SHORT, {"learning_rates": []}, r"learning_rates is \[\]: pass positive numbers"),
        (SHORT, {"learning_rates": [0.1, 0.1]}, "each of them once"),
        (SHORT, {"learning_rates": [0.1], "learning_rate": 1.0}, "learning_rate is given beside learning_rates"),
    ],
)
def test_what_leaves_no_choice_is_refused_before_any_work(recipe, arguments, message, members, data, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetune_members(members, recipe, *data, tmp_path, **arguments, **ARGUMENTS)
    assert not list(tmp_path.iterdir())


def test_members_that_were_made_without_a_choice_stay(members, data, chosen, tmp_path):
    finetune_members(members[:1], SHORT, *data, tmp_path, learning_rate=0.03, **ARGUMENTS)
    with pytest.raises(ValueError, match="member-0 was made without learning_rates: pass another output_dir"):
        finetune_members(members[:1], SHORT, *data, tmp_path, learning_rates="grid", **ARGUMENTS)
