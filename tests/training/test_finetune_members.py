"""finetune_members: members trained one by one in folders that can be picked up again."""

import dataclasses
import json
import os

import pytest
import torch
from transformers import ViTForImageClassification

from hydra_transformers import HydraViTForImageClassification
from hydra_transformers.training import finetune_members, recipe
from tests.training.tiny import (
    FAMILIES,
    QUIET,
    clip_pairs,
    copy_of_weights,
    tiny_dataset,
    tiny_members,
    tiny_model,
)


SHORT = dataclasses.replace(recipe("imagenet1k"), max_steps=6, warmup_steps=1, learning_rate_grid=(0.01, 0.1))
ARGUMENTS = {"per_device_train_batch_size": 4, **QUIET}


class Interrupting(list):
    """A dataset that interrupts the training when it has been read often enough."""

    def __init__(self, rows, reads: int):
        super().__init__(rows)
        self.reads_left = reads

    def __getitem__(self, index):
        self.reads_left -= 1
        if self.reads_left < 0:
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.fixture
def members():
    return tiny_members(FAMILIES["vit"])[:2]


@pytest.fixture
def data():
    return tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Two members as an undisturbed run leaves them."""
    rows, output_dir = (tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)), tmp_path_factory.mktemp("unbroken")
    return finetune_members(tiny_members(FAMILIES["vit"])[:2], SHORT, *rows, output_dir=output_dir, **ARGUMENTS)


def assert_same_weights(first, second):
    for (name, expected), (_, found) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(expected, found), name


def test_members_are_trained_and_those_passed_in_stay(members, data, tmp_path):
    before = [copy_of_weights(member) for member in members]
    modes = [member.training for member in members]
    tuned = finetune_members(members, SHORT, *data, output_dir=tmp_path, **ARGUMENTS)
    assert [type(member) for member in tuned] == [HydraViTForImageClassification] * 2
    for member, weights, found in zip(members, before, tuned, strict=True):
        assert all(torch.equal(weights[name], parameter) for name, parameter in member.named_parameters())
        assert all(parameter.requires_grad for parameter in member.parameters())
        assert found.config.kept_heads == member.config.kept_heads
        assert not torch.equal(found.classifier.weight, member.classifier.weight)
        assert torch.equal(found.vit.embeddings.cls_token, member.vit.embeddings.cls_token)
        assert found.config.hidden_dropout_prob == member.config.hidden_dropout_prob
    assert [member.training for member in members] == modes
    HydraViTForImageClassification.from_pruned_members(tuned)


def test_a_member_can_be_loaded_from_its_folder(members, data, tmp_path):
    tuned = finetune_members(members[:1], SHORT, *data, output_dir=tmp_path, **ARGUMENTS)
    assert_same_weights(HydraViTForImageClassification.from_pretrained(tmp_path / "member-0"), tuned[0])
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_each_member_has_its_own_order_of_the_data(members, data, tmp_path):
    """The same member twice comes out differently, and the same again with the same seed."""
    twins = [members[0], members[0]]
    first = finetune_members(twins, SHORT, *data, output_dir=tmp_path / "first", seed=5, **ARGUMENTS)
    assert not torch.equal(first[0].classifier.weight, first[1].classifier.weight)
    alone = finetune_members(twins[:1], SHORT, *data, output_dir=tmp_path / "alone", seed=6, **ARGUMENTS)
    assert_same_weights(first[1], alone[0])


def test_the_order_of_the_data_can_have_a_seed_apart(members, data, tmp_path):
    """Without dropout the order is all that is random: the same data_seed gives the same weights, another seed or not."""

    calm = dataclasses.replace(SHORT, dropout=0.0)

    def tuned(name, **seeds):
        return finetune_members(members[:1], calm, *data, output_dir=tmp_path / name, **seeds, **ARGUMENTS)[0]

    plain, other_noise = tuned("plain", seed=5), tuned("noise", seed=6, data_seed=5)
    other_order = tuned("order", seed=5, data_seed=6)
    assert_same_weights(plain, other_noise)
    assert not torch.equal(plain.classifier.weight, other_order.classifier.weight)


def test_the_learning_rate_is_chosen_by_validation(members, data, tmp_path, capsys):
    """A learning rate of 0 leaves a member as it is, one of 1e9 destroys it."""
    rates = [0.0, 0.1, 1e9]
    finetune_members(members[:1], SHORT, *data, output_dir=tmp_path, learning_rates=rates, **ARGUMENTS)
    chosen = json.loads((tmp_path / "member-0" / "finished.json").read_text())
    accuracies = {rate: metrics["eval_accuracy"] for rate, metrics in chosen["validation"].items()}
    losses = {rate: metrics["eval_loss"] for rate, metrics in chosen["validation"].items()}
    assert set(accuracies) == {"0.0", "0.1", "1000000000.0"}
    assert chosen["learning_rate"] == 0.1
    assert accuracies["0.1"] >= accuracies["0.0"] and losses["0.1"] < losses["0.0"]
    printed = capsys.readouterr().out
    assert "member-0, learning rate 0.1: training" in printed
    assert "member-0: finished, validation accuracy" in printed


def test_grid_means_the_grid_of_the_recipe(members, data, tmp_path):
    settings = dataclasses.replace(SHORT, max_steps=2)
    finetune_members(members[:1], settings, *data, output_dir=tmp_path, learning_rates="grid", **ARGUMENTS)
    assert sorted(path.name for path in (tmp_path / "member-0").glob("lr-*")) == ["lr-0.01", "lr-0.1"]


def test_finished_members_are_not_trained_again(members, data, tmp_path, capsys):
    tuned = finetune_members(members[:1], SHORT, *data, output_dir=tmp_path, **ARGUMENTS)
    unreadable = Interrupting(data[0], reads=0)
    # A bar more or less makes no other run.
    again = finetune_members(
        members[:1], SHORT, unreadable, data[1], output_dir=tmp_path, **ARGUMENTS | {"logging_steps": 1}
    )
    assert_same_weights(tuned[0], again[0])
    assert "member-0: already finished" in capsys.readouterr().out


@pytest.mark.parametrize("interrupt_after", [6, 12 + 9, 2 * 12 + 1])
def test_an_interrupted_run_goes_on_to_the_weights_of_an_unbroken_one(
    interrupt_after, unbroken, members, data, tmp_path, capsys
):
    """Two epochs of three steps: cut in the first, in the second, and in the second member."""
    broken = {"output_dir": tmp_path / "broken", **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_members(members, SHORT, Interrupting(data[0], interrupt_after), data[1], **broken)
    resumed = finetune_members(members, SHORT, *data, **broken)
    assert ("going on from checkpoint-3" in capsys.readouterr().out) == (interrupt_after == 12 + 9)
    for expected, found in zip(unbroken, resumed, strict=True):
        assert_same_weights(expected, found)


def test_a_run_that_broke_off_after_its_last_step_takes_no_step_more(members, data, tmp_path, monkeypatch):
    settings = dataclasses.replace(SHORT, max_steps=5)  # in the middle of an epoch
    unbroken = finetune_members(members[:1], settings, *data, output_dir=tmp_path / "unbroken", **ARGUMENTS)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("transformers.Trainer.save_model", save_checkpoints_only)
        finetune_members(members[:1], settings, *data, output_dir=tmp_path / "broken", **ARGUMENTS)
    resumed = finetune_members(members[:1], settings, *data, output_dir=tmp_path / "broken", **ARGUMENTS)
    assert_same_weights(unbroken[0], resumed[0])


def save_checkpoints_only(trainer, output_dir=None, _internal_call=False):
    """Stands in for `Trainer.save_model`: saves checkpoints, and stops where the finished model would be saved."""
    if not _internal_call:
        raise KeyboardInterrupt
    trainer._save(output_dir)


def test_a_checkpoint_that_was_cut_off_is_not_resumed_from(unbroken, members, data, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        finetune_members(
            members[:1], SHORT, Interrupting(data[0], 21), data[1], output_dir=tmp_path / "broken", **ARGUMENTS
        )
    for step, state in {5: None, 6: '{"global_step": 6, "max'}.items():
        cut_off = tmp_path / "broken" / "member-0" / "lr-0.01" / f"checkpoint-{step}"
        cut_off.mkdir()
        (cut_off / "model.safetensors").write_bytes(b"half")
        if state is not None:
            (cut_off / "trainer_state.json").write_text(state)
    resumed = finetune_members(members[:1], SHORT, *data, output_dir=tmp_path / "broken", **ARGUMENTS)
    assert_same_weights(unbroken[0], resumed[0])


def test_early_stopping_counts_on_where_a_run_broke_off(data, tmp_path):
    """Accuracies 0.5, 0.4, 0.3 stop sst2 after three epochs, also when it breaks off in the third."""
    rows = tiny_dataset("bert")
    model = tiny_model("bert", "member")
    accuracies = {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.2, 5: 0.1}
    evaluations = []

    def falling(prediction):
        evaluations.append(accuracies[len(evaluations) + 1])
        return {"accuracy": evaluations[-1]}

    arguments = {"compute_metrics": falling, "per_device_train_batch_size": 12, "output_dir": tmp_path, **QUIET}
    with pytest.raises(KeyboardInterrupt):
        finetune_members([model], "sst2", Interrupting(rows, 30), tiny_dataset("bert", 6), **arguments)
    assert evaluations == [0.5, 0.4]
    finetune_members([model], "sst2", rows, tiny_dataset("bert", 6), **arguments)
    assert len(evaluations) == 4  # the third epoch, and the chosen one at the end


def test_plain_backbones_and_clip_train_too(tmp_path):
    backbone = tiny_model("vit", "backbone")
    rows = tiny_dataset("vit")
    [tuned] = finetune_members([backbone], SHORT, rows, rows, output_dir=tmp_path / "vit", **ARGUMENTS)
    assert type(tuned) is ViTForImageClassification
    assert not torch.equal(tuned.classifier.weight, backbone.classifier.weight)

    pairs = tiny_dataset("clip")
    contrastive = dataclasses.replace(SHORT, label_smoothing=0.0, dropout=None, metric="loss", keep_best=True)
    member = tiny_model("clip", "member")
    [tuned] = finetune_members(
        [member], contrastive, pairs, pairs, output_dir=tmp_path / "clip", data_collator=clip_pairs, **ARGUMENTS
    )
    losses = [model(**clip_pairs(pairs)).loss.item() for model in (member, tuned)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("change", "different"),
    [
        ({"recipe": dataclasses.replace(SHORT, label_smoothing=0.2)}, "recipe"),
        ({"seed": 1}, "arguments"),
        ({"per_device_train_batch_size": 3}, "arguments"),
        ({"learning_rates": [0.5]}, "learning_rates"),
        ({"train_dataset": tiny_dataset("vit", 9)}, "rows"),
        ({"members": [tiny_model("vit", "backbone")]}, "member"),
    ],
)
def test_a_folder_with_another_run_is_refused(change, different, members, data, tmp_path):
    same = {"members": members[:1], "recipe": SHORT, "output_dir": tmp_path}
    same |= {"train_dataset": data[0], "eval_dataset": data[1], **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_members(**same | {"train_dataset": Interrupting(data[0], 0)})
    with pytest.raises(ValueError, match=rf"member-0 holds another fine-tuning \(other {different}\)"):
        finetune_members(**same | change)


def test_a_folder_with_something_else_is_refused(members, data, tmp_path):
    os.makedirs(tmp_path / "member-0")
    (tmp_path / "member-0" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than a fine-tuning"):
        finetune_members(members, SHORT, *data, output_dir=tmp_path, **ARGUMENTS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"members": []}, ValueError, "members has no models"),
        ({"members": torch.nn.Linear(1, 1)}, TypeError, "members is a Linear: pass a list of pruned members"),
        ({"members": [torch.nn.Linear(1, 1)]}, TypeError, r"members\[0\] is a Linear"),
        ({"eval_dataset": None}, ValueError, "eval_dataset is None"),
        ({"learning_rates": "best"}, ValueError, "learning_rates is 'best': pass \"grid\""),
        ({"learning_rates": []}, ValueError, "no learning rates to choose from"),
        ({"learning_rate": 0.1}, ValueError, r"learning_rate cannot be passed .*: pass learning_rates=\[\.\.\.\]"),
        ({"label_smoothing_factor": 0.2}, ValueError, r"pass dataclasses\.replace\(recipe, label_smoothing="),
        ({"recipe": "mnist"}, ValueError, "no recipe 'mnist'"),
        (
            {"compute_metrics": lambda prediction: {"f1": 1.0}},
            KeyError,
            "'eval_accuracy', which is not found in the evaluation metrics",
        ),
        (
            {"compute_metrics": lambda prediction: {"f1": 1.0}, "eval_strategy": "no"},
            ValueError,
            "no eval_accuracy, which imagenet1k chooses by",
        ),
    ],
)
def test_bad_input_is_refused(arguments, error, message, members, data, tmp_path):
    good = {"members": members, "recipe": dataclasses.replace(SHORT, max_steps=2), "output_dir": tmp_path}
    good |= {"train_dataset": data[0], "eval_dataset": data[1], **ARGUMENTS}
    with pytest.raises(error, match=message):
        finetune_members(**good | arguments)
