"""finetune_members: members trained one by one in folders that can be picked up again."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EvalPrediction, ViTForImageClassification

from hydra_transformers import HydraCLIPModel, HydraViTForImageClassification, load_data
from hydra_transformers.training import DivergedError, Recipe, compute_accuracy, finetune_members, lora_config, recipe
from hydra_transformers.training.checkpoints import last_checkpoint
from tests.tiny_data import picture_rows, save_vit
from tests.training import tiny
from tests.training.tiny import Interrupting, assert_same_weights, tiny_dataset, tiny_members, tiny_model


SHORT = recipe("imagenet1k").with_arguments(max_steps=6, warmup_steps=1)
ARGUMENTS = {"per_device_train_batch_size": 4, **tiny.QUIET}


@pytest.fixture
def members():
    return tiny_members(tiny.FAMILIES["vit"])[:2]


@pytest.fixture
def data():
    return tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)


@pytest.fixture(scope="module")
def unbroken_run(tmp_path_factory):
    """Two members as an undisturbed run leaves them, and their folder."""
    rows = (tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2))
    output_dir = tmp_path_factory.mktemp("unbroken")
    members = tiny_members(tiny.FAMILIES["vit"])[:2]
    return finetune_members(members, SHORT, *rows, output_dir=output_dir, **ARGUMENTS), output_dir


@pytest.fixture
def unbroken(unbroken_run):
    return unbroken_run[0]


@pytest.fixture
def finished(unbroken_run, tmp_path):
    """A copy of the folder of that run."""
    return shutil.copytree(unbroken_run[1], tmp_path / "finished")


@pytest.mark.slow
def test_members_are_trained_and_those_passed_in_stay(members, data, tmp_path):
    before = [tiny.weights_of(member) for member in members]
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
def test_each_member_has_its_own_order_of_the_data(members, data, tmp_path):
    """The same member twice comes out differently, and the same again with the same seed."""
    twice = [members[0], members[0]]
    first = finetune_members(twice, SHORT, *data, output_dir=tmp_path / "first", seed=5, **ARGUMENTS)
    assert not torch.equal(first[0].classifier.weight, first[1].classifier.weight)
    alone = finetune_members(twice[:1], SHORT, *data, output_dir=tmp_path / "alone", seed=6, **ARGUMENTS)
    assert_same_weights(first[1], alone[0])


def test_the_order_of_the_data_and_the_rest_have_seeds_of_their_own(members, data, tmp_path):
    """As table 8 of the paper varies them; with dropout, so that the rest matters."""
    runs = {
        "equal": {"seed": [5, 5], "data_seed": [5, 5]},
        "order": {"seed": [5, 5], "data_seed": [5, 6]},
        "noise": {"seed": [5, 6], "data_seed": [5, 5]},
        "start": {"seed": 5, "data_seed": 6},
    }
    short = SHORT.with_arguments(max_steps=3)
    tuned = {
        name: finetune_members([members[0]] * 2, short, *data, tmp_path / name, **seeds, **ARGUMENTS)
        for name, seeds in runs.items()
    }
    assert_same_weights(*tuned["equal"])
    for name in ("order", "noise"):
        assert_same_weights(tuned["equal"][0], tuned[name][0])
        assert not torch.equal(tuned[name][0].classifier.weight, tuned[name][1].classifier.weight), name
    [other_order] = finetune_members(members[:1], short, *data, tmp_path / "one", seed=5, data_seed=6, **ARGUMENTS)
    assert_same_weights(tuned["order"][1], other_order)
    assert_same_weights(tuned["start"][0], other_order)
    with pytest.raises(ValueError, match="data_seed has 1 seeds for 2 members: pass one for each"):
        finetune_members(members, short, *data, tmp_path / "new", data_seed=[1], **ARGUMENTS)
    with pytest.raises(ValueError, match="member-0 was made with data_seed 6, which now is 7"):
        finetune_members(members[:1], short, *data, tmp_path / "one", seed=5, data_seed=7, **ARGUMENTS)


# Folders


def test_finished_members_are_loaded_from_their_folders_and_not_trained_again(unbroken, finished, members, data):
    assert_same_weights(HydraViTForImageClassification.from_pretrained(finished / "member-0"), unbroken[0])
    assert not list(finished.rglob("checkpoint*"))
    again = finetune_members(members, SHORT, Interrupting(data[0], 0), data[1], output_dir=finished, **ARGUMENTS)
    for expected, found in zip(unbroken, again, strict=True):
        assert_same_weights(expected, found)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_weights_of_an_unbroken_one(unbroken, members, data, tmp_path):
    """Two epochs of three steps: cut in the second epoch of the first member, and again in the
    second member."""
    broken = {"output_dir": tmp_path / "broken", **ARGUMENTS}
    for reads in (12 + 9, 2 * 12 + 1):
        with pytest.raises(KeyboardInterrupt):
            finetune_members(members, SHORT, Interrupting(data[0], reads), data[1], **broken)
    resumed = finetune_members(members, SHORT, *data, **broken)
    for expected, found in zip(unbroken, resumed, strict=True):
        assert_same_weights(expected, found)


@pytest.mark.slow
def test_a_run_that_broke_off_while_its_result_was_saved_takes_no_step_more(members, data, tmp_path, monkeypatch):
    settings = SHORT.with_arguments(max_steps=5)  # in the middle of an epoch
    unbroken = finetune_members(members[:1], settings, *data, output_dir=tmp_path / "unbroken", **ARGUMENTS)

    def save_config_only(trainer, output_dir=None, _internal_call=False):
        if _internal_call:
            return trainer._save(output_dir)
        trainer.model.config.save_pretrained(output_dir)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("transformers.Trainer.save_model", save_config_only)
        finetune_members(members[:1], settings, *data, output_dir=tmp_path / "broken", **ARGUMENTS)
    assert (tmp_path / "broken" / "member-0" / "config.json").exists()
    resumed = finetune_members(members[:1], settings, *data, output_dir=tmp_path / "broken", **ARGUMENTS)
    assert_same_weights(unbroken[0], resumed[0])


def test_a_checkpoint_is_resumed_where_it_is_whole_and_of_as_many_processes(tmp_path):
    def write(folder: str, step: int, *names: str) -> None:
        checkpoint = tmp_path / folder / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        for name in ("optimizer.pt", "scheduler.pt", *names):
            (checkpoint / name).touch()
        (checkpoint / "trainer_state.json").write_text("{}")

    write("one", 3, "rng_state.pth")
    write("two", 3, "rng_state_0.pth", "rng_state_1.pth")
    write("two", 6, "rng_state_0.pth")  # the other process was stopped first
    assert last_checkpoint(tmp_path / "one").name == last_checkpoint(tmp_path / "two", 2).name == "checkpoint-3"
    assert last_checkpoint(tmp_path / "none") is None
    write("four", 3, *(f"rng_state_{rank}.pth" for rank in range(4)))
    for folder, processes in {"one": 2, "two": 3, "four": 2}.items():
        with pytest.raises(ValueError, match=f"no checkpoint of {processes} processes: start as many as before"):
            last_checkpoint(tmp_path / folder, processes)


# Trainer knows of no family: one for each form that a head has, since a head is what is new in a
# checkpoint.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov2", "roberta", "llama", "ast"])
def test_plain_models_go_on_from_a_checkpoint_with_its_weights_and_return_to_their_best(name, tmp_path):
    """Names on disk may be older than those of the model. The checkpoint that is left is the one of
    the best epoch."""
    rows = tiny_dataset(name)
    model = tiny_model(name, "backbone", num_labels=3)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    settings = Recipe("short", {"num_train_epochs": 2, "learning_rate": 0.01, **best})
    accuracies = iter([0.9, 0.5, 0.5])  # the first epoch is the best
    arguments = {"compute_metrics": lambda _: {"accuracy": next(accuracies)}, **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_members([model], settings, Interrupting(rows, 12 + 5), rows, output_dir=tmp_path / "cut", **arguments)
    best = type(model).from_pretrained(next((tmp_path / "cut").rglob("checkpoint-*")))
    [resumed] = finetune_members([model], settings, rows, rows, output_dir=tmp_path / "cut", **arguments)
    assert_same_weights(resumed, best)


@pytest.mark.slow
def test_plain_backbones_and_clip_train_too(tmp_path):
    backbone = tiny_model("vit", "backbone")
    rows = tiny_dataset("vit")
    [tuned] = finetune_members([backbone], SHORT, rows, rows, output_dir=tmp_path / "vit", **ARGUMENTS)
    assert type(tuned) is ViTForImageClassification
    assert not torch.equal(tuned.classifier.weight, backbone.classifier.weight)
    pairs = tiny_dataset("clip")
    member = tiny_model("clip", "member")
    contrastive = dataclasses.replace(SHORT.with_arguments(label_smoothing_factor=0.0), dropout=None)
    loss = {"compute_metrics": lambda prediction: {}, "data_collator": tiny.clip_pairs}
    [tuned] = finetune_members([member], contrastive, pairs, pairs, tmp_path / "clip", **loss, **ARGUMENTS)
    losses = [model(**tiny.clip_pairs(pairs)).loss.item() for model in (member, tuned)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("form", ["backbone", "member"])
def test_clip_learns_from_pairs_and_is_judged_by_their_loss(form, tmp_path):
    """With the recipe's defaults: no collator, metric or label is passed."""
    pairs = tiny_dataset("clip")
    held = tiny_dataset("clip", 6, seed=2)
    short = recipe("clip-lit").with_arguments(num_train_epochs=4, warmup_steps=1, per_device_train_batch_size=6)
    short = short.with_arguments(per_device_eval_batch_size=6)
    models = [tiny_model("clip", form)] * 2
    rates = {"learning_rates": [1e-9, 3e-3]}
    tuned = finetune_members(models, short, pairs, held, tmp_path, **rates, **tiny.QUIET)

    def loss_of(model) -> float:
        return model.eval()(**tiny.clip_pairs(pairs)).loss.item()

    for model in tuned:
        assert loss_of(model) < loss_of(models[0])
        assert tiny.changed(tiny.weights_of(models[0]), model) >= {"text_projection.weight", "logit_scale"}
    fused = HydraCLIPModel.from_pruned_members(tuned)
    assert fused.config.vision_config.num_members == 2
    found = json.loads((tmp_path / "learning-rates.json").read_text())
    losses = {float(rate): metrics["loss"] for rate, metrics in found["validation"].items()}
    assert found["chosen"] == min(losses, key=losses.get)
    # The validation data are one batch: their loss is that of the first member, which was tuned
    # with the best rate.
    again = tuned[0].eval()(**tiny.clip_pairs(held)).loss.item()
    assert losses[found["chosen"]] == pytest.approx(again, rel=1e-5)


@dataclasses.dataclass(frozen=True)
class Counted:
    """A change of images that leaves a note each time."""

    name: str
    notes: list = dataclasses.field(repr=False, compare=False)

    def __call__(self, image):
        self.notes.append(self.name)
        return image


def test_training_images_are_changed_as_the_recipe_says_and_others_are_not(tmp_path):
    """Four rows for training, two for validation, one epoch; a change that the data have already is
    left."""
    torch.manual_seed(0)
    vit = ViTForImageClassification.from_pretrained(save_vit(tmp_path / "vit"))
    rows = load_data(picture_rows(4), vit)
    held = load_data(picture_rows(2, seed=1), vit)
    notes = []
    short = Recipe("short", {"num_train_epochs": 1}, image_change=Counted("recipe", notes))
    finetune_members([vit], short, rows, held, tmp_path / "members", **tiny.QUIET)
    assert notes == ["recipe"] * 4
    own = dataclasses.replace(rows, change=Counted("own", notes))
    finetune_members([vit], short, own, held, tmp_path / "own", **tiny.QUIET)
    assert notes[4:] == ["own"] * 4
    assert rows.change is None

    other = dataclasses.replace(short, image_change=Counted("other", notes))
    with pytest.raises(ValueError, match=r"member-0 was made with image_change .*recipe.*, which now is .*other"):
        finetune_members([vit], other, rows, held, tmp_path / "members", **tiny.QUIET)
    with pytest.raises(ValueError, match=r"member-0 was made with image_change .*recipe.*, which now is None"):
        without = dataclasses.replace(short, image_change=None)
        finetune_members([vit], without, rows, held, tmp_path / "members", **tiny.QUIET)
    finetune_members([vit], None, rows, held, tmp_path / "usual", num_train_epochs=1, **tiny.QUIET)
    record = json.loads((tmp_path / "usual" / "member-0" / "finetune.json").read_text())
    assert record["image_change"] == "CropAndFlip(least_share=0.7)"


@pytest.mark.slow
def test_adapters_of_peft_models_are_trained_saved_and_resumed(data, tmp_path):
    """The weights below stay, the result can be merged, and an interrupted run goes on to the same
    adapters."""
    peft = pytest.importorskip("peft")

    def adapted(seed=0):
        torch.manual_seed(0)
        model = tiny_model("vit", "backbone")
        torch.manual_seed(seed)
        return peft.get_peft_model(model, lora_config(model, r=2))

    calm = Recipe("lora", {"num_train_epochs": 2, "learning_rate": 0.05})
    [whole] = finetune_members([adapted()], calm, *data, output_dir=tmp_path / "whole", **ARGUMENTS)
    trained = tiny.changed(tiny.weights_of(adapted()), whole)
    assert trained and all("lora_" in name or "modules_to_save" in name for name in trained)
    assert (tmp_path / "whole" / "member-0" / "adapter_model.safetensors").exists()
    with pytest.raises(KeyboardInterrupt):
        finetune_members([adapted()], calm, Interrupting(data[0], 12 + 9), data[1], tmp_path / "cut", **ARGUMENTS)
    # A script that is started again draws its adapters anew, and goes on with those of its
    # checkpoint.
    [resumed] = finetune_members([adapted(seed=1)], calm, *data, output_dir=tmp_path / "cut", **ARGUMENTS)
    assert_same_weights(resumed, whole)
    batch = torch.stack([row["pixel_values"] for row in data[1]])
    expected = whole.eval()(batch).logits
    merged = whole.merge_and_unload()
    assert type(merged) is ViTForImageClassification
    torch.testing.assert_close(merged(batch).logits, expected, rtol=1e-4, atol=1e-5)
    other = tiny_model("vit", "backbone")
    two = peft.get_peft_model(other, lora_config(other), adapter_name="mine")
    with pytest.raises(ValueError, match=r"members\[0\] has the adapters mine: pass one adapter"):
        finetune_members([two], calm, *data, output_dir=tmp_path / "other", **ARGUMENTS)


# Refusals


def test_a_folder_with_something_else_or_with_other_heads_is_refused(finished, members, data, tmp_path):
    (tmp_path / "mine" / "member-1").mkdir(parents=True)
    (tmp_path / "mine" / "member-1" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="member-1 holds something else than a training"):
        finetune_members(members, SHORT, *data, output_dir=tmp_path / "mine", **ARGUMENTS)
    assert not (tmp_path / "mine" / "member-0").exists()
    with pytest.raises(ValueError, match="member-0 was made with other starting weights"):
        finetune_members(members[1:], SHORT, *data, output_dir=finished, **ARGUMENTS)


def test_weights_that_a_folder_lacks_are_not_drawn_at_random(finished, members, data):
    file = finished / "member-0" / "model.safetensors"
    weights = load_file(file)
    del weights["classifier.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"member-0 has no weights for classifier\.weight: remove that folder"):
        finetune_members(members, SHORT, *data, output_dir=finished, **ARGUMENTS)


def test_a_training_that_diverges_is_never_finished(members, data, tmp_path):
    broken = {"learning_rate": 1e9, "output_dir": tmp_path, **ARGUMENTS}
    for _ in range(2):  # called again, it does not find itself finished
        with pytest.raises(DivergedError, match="the loss is nan in step"):
            finetune_members(members, SHORT, *data, **broken)
        assert not list(tmp_path.glob("member-*/*.safetensors"))


def test_the_accuracy_of_logits_that_are_not_numbers_is_none():
    labels = np.array([0, 1])
    assert compute_accuracy(EvalPrediction(np.eye(2), labels)) == {"accuracy": 1.0}
    tokens = EvalPrediction(np.stack([np.eye(2), np.eye(2)]), np.array([[0, -100], [1, 1]]))
    assert compute_accuracy(tokens) == {"accuracy": 2 / 3}
    assert math.isnan(compute_accuracy(EvalPrediction(np.full((2, 2), np.nan), labels))["accuracy"])
