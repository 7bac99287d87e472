"""finetune_members: members trained one by one in folders that can be picked up again."""

import copy
import dataclasses
import json
import math
import os
import random
import shutil

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from safetensors.torch import load_file, save_file
from transformers import EvalPrediction, ViTForImageClassification

from hydra_transformers import HydraViTForImageClassification
from hydra_transformers._io.folder_lock import only_writer
from hydra_transformers._io.processes import apart
from hydra_transformers.training import DivergedError, compute_accuracy, finetune_members, recipe
from hydra_transformers.training.finetune import _FineTuning
from hydra_transformers.training.run_folders import last_checkpoint
from tests.training.tiny import (
    FAMILIES,
    QUIET,
    clip_pairs,
    copy_of_weights,
    reads_to_know,
    tiny_dataset,
    tiny_members,
    tiny_model,
)


SHORT = dataclasses.replace(recipe("imagenet1k"), max_steps=6, warmup_steps=1, learning_rate_grid=(0.01, 0.1))
ARGUMENTS = {"per_device_train_batch_size": 4, **QUIET}


class Interrupting(list):
    """A dataset that interrupts the training when it has been read often enough for that."""

    def __init__(self, rows, reads: int):
        super().__init__(rows)
        self.reads_left = reads_to_know(rows) + reads

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
def unbroken_run(tmp_path_factory):
    """Two members as an undisturbed run leaves them, and their folder."""
    rows, output_dir = (tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)), tmp_path_factory.mktemp("unbroken")
    members = tiny_members(FAMILIES["vit"])[:2]
    return finetune_members(members, SHORT, *rows, output_dir=output_dir, **ARGUMENTS), output_dir


@pytest.fixture
def unbroken(unbroken_run):
    return unbroken_run[0]


@pytest.fixture
def finished(unbroken_run, tmp_path):
    """A copy of the folder of that run."""
    return shutil.copytree(unbroken_run[1], tmp_path / "finished")


def with_dropout(model):
    model.config.hidden_dropout_prob = 0.5
    return model


def assert_same_weights(first, second):
    for (name, expected), (_, found) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(expected, found), name


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_member_can_be_loaded_from_its_folder(unbroken, finished):
    assert_same_weights(HydraViTForImageClassification.from_pretrained(finished / "member-0"), unbroken[0])
    assert not list(finished.rglob("checkpoint-*"))


@pytest.mark.slow
def test_each_member_has_its_own_order_of_the_data(members, data, tmp_path):
    """The same member twice comes out differently, and the same again with the same seed."""
    twins = [members[0], members[0]]
    first = finetune_members(twins, SHORT, *data, output_dir=tmp_path / "first", seed=5, **ARGUMENTS)
    assert not torch.equal(first[0].classifier.weight, first[1].classifier.weight)
    alone = finetune_members(twins[:1], SHORT, *data, output_dir=tmp_path / "alone", seed=6, **ARGUMENTS)
    assert_same_weights(first[1], alone[0])


@pytest.mark.slow
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
    assert set(accuracies) == {"0.0", "0.1"}
    assert chosen["diverged"] == {"1000000000.0": "the loss is nan in step 3"}
    assert chosen["learning_rate"] == 0.1
    assert accuracies["0.1"] >= accuracies["0.0"] and losses["0.1"] < losses["0.0"]
    printed = capsys.readouterr().out
    assert "member-0, learning rate 0.1: training" in printed
    assert "member-0: finished, validation accuracy" in printed
    assert "member-0, learning rate 1e+09: diverged, the loss is nan in step 3" in printed
    assert not (tmp_path / "member-0" / "lr-1000000000.0" / "finished.json").exists()
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_grid_means_the_grid_of_the_recipe(members, data, tmp_path):
    settings = dataclasses.replace(SHORT, max_steps=2)
    finetune_members(members[:1], settings, *data, output_dir=tmp_path, learning_rates="grid", **ARGUMENTS)
    assert sorted(path.name for path in (tmp_path / "member-0").glob("lr-*")) == ["lr-0.01", "lr-0.1"]


def test_finished_members_are_not_trained_again(unbroken, finished, members, data, capsys):
    unreadable = Interrupting(data[0], reads=0)  # once it is known
    # A bar more or less makes no other run.
    again = finetune_members(
        members, SHORT, unreadable, data[1], output_dir=finished, **ARGUMENTS | {"logging_steps": 1}
    )
    assert_same_weights(unbroken[0], again[0])
    assert "member-0: already finished" in capsys.readouterr().out


def test_finished_members_are_loaded_while_another_process_does_the_same(unbroken, finished, members, data):
    same = {"output_dir": finished, **ARGUMENTS}
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    with only_writer(finished):
        again = finetune_members(members, SHORT, *data, **same)
        with pytest.raises(ValueError, match=r"member-0 holds another fine-tuning \(other arguments\)"):
            finetune_members(members, SHORT, *data, seed=7, **same)
        with pytest.raises(RuntimeError, match="finished is being written by"):  # a third member would be trained
            finetune_members([*members, members[0]], SHORT, *data, **same)
        (finished / "member-1" / "finished.json").unlink()
        with pytest.raises(RuntimeError, match="finished is being written by"):
            finetune_members(members, SHORT, *data, **same)
    for expected, found in zip(unbroken, again, strict=True):
        assert_same_weights(expected, found)
    left = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert left.items() <= before.items(), "nothing is written"


@pytest.mark.slow
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


@pytest.mark.slow
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
    last = tmp_path / "broken" / "member-0" / "lr-0.01" / "checkpoint-3"
    (last / "scheduler.pt").rename(last / "elsewhere")
    with pytest.raises(ValueError, match=r"checkpoint-3 has no scheduler\.pt, without which"):
        finetune_members(members[:1], SHORT, *data, output_dir=tmp_path / "broken", **ARGUMENTS)
    (last / "elsewhere").rename(last / "scheduler.pt")
    for step, state in {5: None, 6: b'{"global_step": 6, "max', 7: b"\xff", 8: b"[]"}.items():
        cut_off = tmp_path / "broken" / "member-0" / "lr-0.01" / f"checkpoint-{step}"
        cut_off.mkdir()
        (cut_off / "model.safetensors").write_bytes(b"half")
        if state is not None:
            (cut_off / "trainer_state.json").write_bytes(state)
    resumed = finetune_members(members[:1], SHORT, *data, output_dir=tmp_path / "broken", **ARGUMENTS)
    assert_same_weights(unbroken[0], resumed[0])


@pytest.mark.slow
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


@pytest.mark.slow
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
        ({"per_device_train_batch_size": 3}, "arguments, rows_per_step"),
        ({"learning_rates": [0.5]}, "learning_rates"),
        ({"train_data": tiny_dataset("vit", 9)}, "train_data"),
        ({"train_data": tiny_dataset("vit", seed=3)}, "train_data"),
        ({"validation_data": tiny_dataset("vit", 6, seed=3)}, "validation_data"),
        ({"members": [tiny_model("vit", "backbone")]}, "member"),
        ({"members": [with_dropout(tiny_members(FAMILIES["vit"])[0])]}, "member"),
    ],
)
def test_a_folder_with_another_run_is_refused(change, different, members, data, tmp_path):
    same = {"members": members[:1], "recipe": SHORT, "output_dir": tmp_path}
    same |= {"train_data": data[0], "validation_data": data[1], **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_members(**same | {"train_data": Interrupting(data[0], 0)})
    with pytest.raises(ValueError, match=rf"member-0 holds another fine-tuning \(other {different}\)"):
        finetune_members(**same | change)


def test_a_run_that_masks_sounds_in_another_way_is_another(tmp_path):
    member, rows = tiny_model("wav2vec2", "backbone"), tiny_dataset("wav2vec2")
    arguments = {"recipe": SHORT, "validation_data": rows, "output_dir": tmp_path, **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_members([member], train_data=Interrupting(rows, 0), **arguments)
    member.config.mask_time_prob = 0.5
    with pytest.raises(ValueError, match=r"member-0 holds another fine-tuning \(other member\)"):
        finetune_members([member], train_data=rows, **arguments)


@pytest.mark.parametrize("name", ["members.json", "member-0/run.json"])
def test_a_broken_record_is_named(name, members, data, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("[")
    with pytest.raises(ValueError, match=f"{name} is broken: remove"):
        finetune_members(members[:1], SHORT, *data, output_dir=tmp_path, **ARGUMENTS)


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
        ({"validation_data": None}, ValueError, "validation_data is None"),
        ({"learning_rates": "best"}, ValueError, "learning_rates is 'best': pass \"grid\""),
        ({"learning_rates": []}, ValueError, "no learning rates to choose from"),
        ({"learning_rates": [0.1, float("nan")]}, ValueError, "learning_rates has nan: a learning rate is a finite"),
        ({"learning_rates": [float("inf")]}, ValueError, "learning_rates has inf: a learning rate is a finite"),
        ({"learning_rates": [-0.1]}, ValueError, "learning_rates has -0.1: a learning rate is .* not negative"),
        ({"train_data": []}, ValueError, "train_data has no rows"),
        ({"validation_data": []}, ValueError, "validation_data has no rows"),
        ({"save_only_model": True}, ValueError, "save_only_model cannot be passed"),
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
    good |= {"train_data": data[0], "validation_data": data[1], **ARGUMENTS}
    with pytest.raises(error, match=message):
        finetune_members(**good | arguments)
    if "compute_metrics" not in arguments:
        assert not list(tmp_path.iterdir())


# Trainings that diverge


def of_nan(rows: list[dict]) -> list[dict]:
    return [{**row, "pixel_values": torch.full_like(row["pixel_values"], torch.nan)} for row in rows]


def nothing_is_finished(folder) -> bool:
    """Checkpoints apart, there are neither marks nor weights."""
    models = [path for path in folder.rglob("model.safetensors") if not path.parent.name.startswith("checkpoint-")]
    return not models and not list(folder.rglob("finished.json"))


def test_a_training_that_diverges_is_named_and_never_finished(members, data, tmp_path):
    broken = {"learning_rates": [1e9, 1e12], "output_dir": tmp_path, **ARGUMENTS}
    for _ in range(2):  # called again, it does not find itself finished
        with pytest.raises(
            DivergedError, match=r"member-0 diverged \(the loss is nan in step \d at learning rate 1e\+09; .*1e\+12"
        ):
            finetune_members(members, SHORT, *data, **broken)
        assert nothing_is_finished(tmp_path)


def test_a_loss_that_is_no_number_ends_training_and_validation(members, data, tmp_path):
    with pytest.raises(
        DivergedError, match=r"the loss is nan in step 1 at learning rate 0\.01.*: pass lower learning_rates"
    ):
        finetune_members(members, SHORT, of_nan(data[0]), data[1], output_dir=tmp_path / "train", **ARGUMENTS)
    with pytest.raises(DivergedError, match=r"eval_loss is nan after step 3 at learning rate 0\.01"):
        finetune_members(members, SHORT, data[0], of_nan(data[1]), output_dir=tmp_path / "eval", **ARGUMENTS)
    late = {"output_dir": tmp_path / "late", **ARGUMENTS, "eval_strategy": "no"}
    with pytest.raises(DivergedError, match="eval_loss is nan after step 6"):
        finetune_members(members, SHORT, data[0], of_nan(data[1]), **late)
    assert nothing_is_finished(tmp_path / "train") and nothing_is_finished(tmp_path / "late")


def test_weights_that_are_no_numbers_are_not_saved(members, data, tmp_path):
    """A weight that no answer depends on: neither loss shows it."""
    last = members[0].config.num_labels - 1
    rows = [{**row, "labels": min(row["labels"], 1)} for row in data[0]]
    broken = copy.deepcopy(members[0])
    with torch.no_grad():
        broken.classifier.bias[last] = -torch.inf
    settings = dataclasses.replace(SHORT, label_smoothing=0.0)
    with pytest.raises(DivergedError, match="weights are not finite after step 3"):
        finetune_members([broken], settings, rows, rows, output_dir=tmp_path, **ARGUMENTS)
    assert nothing_is_finished(tmp_path)


def test_a_metric_that_is_no_number_is_not_a_result(members, data, tmp_path):
    lost = {"compute_metrics": lambda prediction: {"accuracy": float("nan")}, "output_dir": tmp_path, **ARGUMENTS}
    with pytest.raises(DivergedError, match="eval_accuracy is nan after the last step"):
        finetune_members(members, SHORT, *data, **lost)
    assert nothing_is_finished(tmp_path)


def test_the_accuracy_of_answers_that_are_no_numbers_is_none():
    labels = np.array([0, 1])
    assert compute_accuracy(EvalPrediction(np.eye(2), labels)) == {"accuracy": 1.0}
    assert math.isnan(compute_accuracy(EvalPrediction(np.full((2, 2), np.nan), labels))["accuracy"])


# Folders


def test_other_data_of_the_same_length_is_refused_where_a_fine_tuning_has_finished(finished, members, data):
    same = {"output_dir": finished, **ARGUMENTS}
    other = tiny_dataset("vit", seed=7)
    with pytest.raises(ValueError, match=r"member-0 holds another fine-tuning \(other train_data\): pass another"):
        finetune_members(members, SHORT, other, data[1], **same)
    relabelled = [{**row, "labels": (row["labels"] + 1) % 3} for row in data[1]]
    with pytest.raises(ValueError, match=r"member-0 holds another fine-tuning \(other validation_data\)"):
        finetune_members(members, SHORT, data[0], relabelled, **same)
    finetune_members(members, SHORT, copy.deepcopy(data[0]), copy.deepcopy(data[1]), **same)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_that_draws_anew_each_time_is_known_again(workers, members, data, tmp_path):
    same = {"output_dir": tmp_path, "dataloader_num_workers": workers, **ARGUMENTS}
    [first] = finetune_members(members[:1], SHORT, Augmented(data[0]), data[1], **same)
    [again] = finetune_members(members[:1], SHORT, Augmented(data[0]), data[1], **same | {"dataloader_num_workers": 0})
    assert_same_weights(first, again)
    with pytest.raises(ValueError, match="other train_data"):
        finetune_members(members[:1], SHORT, Augmented(tiny_dataset("vit", seed=7)), data[1], **same)


class Augmented(list):
    """Rows with noise that is drawn when they are read."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {**row, "pixel_values": row["pixel_values"] + torch.randn(3, 8, 8) + random.random() + np.random.rand()}


def test_what_a_killed_process_left_of_a_file_does_not_hold_a_folder(members, data, tmp_path):
    (tmp_path / "member-0").mkdir()
    (tmp_path / "member-0" / ".run.json.4242.tmp").write_text("{")
    finetune_members(members[:1], SHORT, *data, output_dir=tmp_path, **ARGUMENTS)


def test_members_may_join_and_not_leave(finished, members, data):
    same = {"output_dir": finished, **ARGUMENTS}
    shutil.rmtree(finished / "member-1")
    (finished / "members.json").write_text('{"members": 1}')
    assert len(finetune_members(members, SHORT, *data, **same)) == 2
    with pytest.raises(ValueError, match="holds 2 members, and these are 1: pass another output_dir"):
        finetune_members(members[:1], SHORT, *data, **same)


@pytest.mark.slow
def test_an_unfinished_run_does_not_go_on_with_other_batches(members, data, tmp_path, monkeypatch):
    """Twice the processes make batches of twice the rows."""
    same = {"output_dir": tmp_path, **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_members(members[:1], SHORT, Interrupting(data[0], 21), data[1], **same)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"\(other rows_per_step\)"):
        patch.setattr("transformers.TrainingArguments.train_batch_size", 8)
        finetune_members(members[:1], SHORT, *data, **same)
    tuned = finetune_members(members[:1], SHORT, *data, **same)
    with monkeypatch.context() as patch:  # a finished one takes no further step
        patch.setattr("transformers.TrainingArguments.train_batch_size", 8)
        assert_same_weights(tuned[0], finetune_members(members[:1], SHORT, *data, **same)[0])


def test_a_checkpoint_without_the_random_numbers_of_every_process_is_not_whole(tmp_path):
    for step, ranks in {3: 2, 6: 1}.items():
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text("{}")
        for rank in range(ranks):
            (checkpoint / f"rng_state_{rank}.pth").touch()
    assert last_checkpoint(tmp_path, processes=2).name == "checkpoint-3"
    assert last_checkpoint(tmp_path).name == "checkpoint-6"


def test_weights_that_a_folder_lacks_are_not_drawn_at_random(finished, members, data):
    file = finished / "member-0" / "model.safetensors"
    weights = load_file(file)
    del weights["classifier.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"member-0 has no weights for classifier\.weight: remove that folder"):
        finetune_members(members, SHORT, *data, output_dir=finished, **ARGUMENTS)
    file.write_bytes(b"half")
    with pytest.raises(ValueError, match=r"the weights in .*member-0 are broken \(.*\): remove that folder"):
        finetune_members(members, SHORT, *data, output_dir=finished, **ARGUMENTS)


@pytest.mark.slow
def test_a_learning_rate_of_its_own_resumes_and_changes_the_classifier(members, data, tmp_path):
    def train(factor: float, folder: str, train_data) -> torch.Tensor:
        own = dataclasses.replace(SHORT, classifier_learning_rate=factor * SHORT.learning_rate)
        [member] = finetune_members(members[:1], own, train_data, data[1], tmp_path / folder, **ARGUMENTS)
        return (
            member.classifier.weight if hasattr(member.classifier, "weight") else next(member.classifier.parameters())
        )

    whole = train(5.0, "whole", data[0])
    with pytest.raises(KeyboardInterrupt):
        train(5.0, "broken", Interrupting(data[0], 16))
    assert torch.equal(train(5.0, "broken", data[0]), whole)
    assert not torch.equal(train(1.0, "plain", data[0]), whole)


def test_a_process_that_trains_its_own_members_takes_its_own_gpu_and_no_other(tmp_path, monkeypatch):
    own, chosen = torch.device("cuda:1"), []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with apart(own):
        process = _FineTuning(SHORT, [0.1], {}, [], False, own).process(tmp_path, {"per_device_train_batch_size": 4})
        assert (process.device, process.n_gpu, process.world_size, process.train_batch_size) == (own, 1, 1, 4)
        assert PartialState().device == chosen[-1] == own
    assert os.environ["WORLD_SIZE"] == "2" and "ACCELERATE_TORCH_DEVICE" not in os.environ


def test_what_processes_divide_is_members_or_batches(members, data, tmp_path):
    with pytest.raises(ValueError, match="divide is 'rows': pass 'members' or 'batches'"):
        finetune_members(members, SHORT, *data, output_dir=tmp_path, divide="rows", **ARGUMENTS)
