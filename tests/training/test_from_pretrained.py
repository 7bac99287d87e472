"""finetune_from_pretrained: several fine-tunings of one pre-trained model, ready to be fused."""

import dataclasses
import json
import re

import pytest
import torch
from transformers import BertForMaskedLM

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import average_members
from hydra_transformers.data.fingerprints import fingerprint_of_weights
from hydra_transformers.pruning import draw_members, extract_circuit
from hydra_transformers.training import (
    finetune_from_pretrained,
    finetune_members,
    hydra_from_pretrained,
    recipe,
    tune_jointly,
)
from hydra_transformers.training.from_pretrained import shortened, shortened_arguments, with_new_classifiers
from tests.families import GEMMA
from tests.training.test_finetune_members import Interrupting, assert_same_weights
from tests.training.tiny import FAMILIES, QUIET, copy_of_weights, tiny_dataset, tiny_members, tiny_model


CLASSIFIERS = [name for name, family in FAMILIES.items() if not family.has_towers]
SHORT = dataclasses.replace(recipe("finetune-images"), epochs=2)
ARGUMENTS = {"per_device_train_batch_size": 4, **QUIET}
NAMES = ["red", "green", "blue"]


@pytest.fixture
def data():
    return tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)


@pytest.mark.parametrize(
    ("name", "has_head"), [(name, False) for name in CLASSIFIERS] + [(name, True) for name in ("vit", "bert", "llama")]
)
def test_only_the_classifier_is_new_and_each_member_has_its_own(name, has_head, tmp_path):
    pretrained = tiny_model(name, "backbone")
    pretrained = pretrained if has_head else pretrained.base_model
    before = copy_of_weights(pretrained)
    members = with_new_classifiers(pretrained, 2, ["a", "b", "c", "d"], seed=3)
    prefix = FAMILIES[name].hydra.base_model_prefix
    encoder = dict(getattr(pretrained, prefix, pretrained).named_parameters())
    for member in members:
        assert list(member.config.id2label.values()) == ["a", "b", "c", "d"] and member.config.num_labels == 4
        for parameter_name, parameter in getattr(member, prefix).named_parameters():
            assert torch.equal(parameter, encoder[parameter_name])
    new = {
        each for each, value in members[0].named_parameters() if not torch.equal(value, members[1].get_parameter(each))
    }
    assert new and all(re.match(r"(head\.|score|pooler\.|projector|.*classifier).*weight$", each) for each in new)
    assert all(torch.equal(before[each], parameter) for each, parameter in pretrained.named_parameters())
    pretrained.save_pretrained(tmp_path)
    for member, loaded in zip(members, with_new_classifiers(tmp_path, 2, ["a", "b", "c", "d"], seed=3), strict=True):
        assert_same_weights(member, loaded)
    assert_same_weights(members[1], with_new_classifiers(pretrained, 1, ["a", "b", "c", "d"], seed=4)[0])


def test_neighbours_may_begin_with_the_same_classifier():
    pretrained = tiny_model("vit", "backbone")
    four, own = with_new_classifiers(pretrained, 4, classifiers=2), with_new_classifiers(pretrained, 2)
    for place, member in enumerate(four):
        assert_same_weights(member, own[place // 2])


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification", "token_classification"])
def test_only_members_that_choose_one_class_begin_with_classifiers_of_their_own(problem_type):
    pretrained = tiny_model("bert", "backbone")
    first, second = with_new_classifiers(pretrained, 2, ["a", "b"], problem_type=problem_type)
    assert_same_weights(first, second)
    own = with_new_classifiers(pretrained, 2, ["a", "b"], problem_type=problem_type, classifiers=2)[1]
    assert not torch.equal(first.classifier.weight, own.classifier.weight)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"classifiers": 0}, "classifiers is 0: pass a number from 1 to 3, of fine-tunings"),
        ({"classifiers": 7, "trainings": 6}, "classifiers is 7: pass a number from 1 to 6, of fine-tunings"),
        ({"classifiers": 3, "trainings": 1.5}, "classifiers is 3: pass 1, for restarts of one run have one"),
    ],
)
def test_more_classifiers_than_fine_tunings_are_refused(wrong, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        finetune_from_pretrained(tiny_model("vit", "backbone"), 3, **wrong)


def test_drawing_classifiers_leaves_no_trace_in_the_random_numbers():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with_new_classifiers(tiny_model("vit", "backbone"), 1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_fine_tunings_with_a_trunk_are_fused_with_it(data, tmp_path):
    pretrained, frozen = tiny_model("vit", "backbone"), dataclasses.replace(SHORT, epochs=1, trunk_layers=2)
    tuned = finetune_from_pretrained(pretrained, 2, frozen, *data, output_dir=tmp_path, class_names=NAMES, **ARGUMENTS)
    for each in tuned:
        for name, parameter in each.base_model.named_parameters():
            is_frozen = name.startswith(("embeddings.", "layers.0.", "layers.1."))
            if "k_proj.bias" not in name:
                assert torch.equal(parameter, pretrained.base_model.get_parameter(name)) == is_frozen, name
    assert AutoHydra.from_pruned_members(tuned).config.trunk_layers == 2
    again = finetune_from_pretrained(pretrained, 2, frozen, *data, output_dir=tmp_path, class_names=NAMES, **ARGUMENTS)
    assert_same_weights(tuned[0], again[0])
    with pytest.raises(ValueError, match=r"holds another fine-tuning \(other recipe"):
        other = dataclasses.replace(frozen, trunk_layers=1)
        finetune_from_pretrained(pretrained, 2, other, *data, output_dir=tmp_path, class_names=NAMES, **ARGUMENTS)


@pytest.mark.slow
def test_fine_tunings_differ_and_can_be_fused_and_pruned_each_by_its_own_circuit(data, tmp_path):
    pretrained = tiny_model("vit", "backbone").base_model
    tuned = finetune_from_pretrained(pretrained, 3, SHORT, *data, output_dir=tmp_path, class_names=NAMES, **ARGUMENTS)
    assert [type(each).__name__ for each in tuned] == ["ViTForImageClassification"] * 3
    for name, start in pretrained.named_parameters():
        ends = [dict(each.base_model.named_parameters()).get(name) for each in tuned]
        if ends[0] is not None and "k_proj.bias" not in name:
            assert not any(torch.equal(start, end) for end in ends), name
            assert not torch.equal(ends[0], ends[1]), name
    assert AutoHydra.from_pruned_members(tuned).config.id2label == {0: "red", 1: "green", 2: "blue"}
    again = AutoHydra.from_pruned_members([tmp_path / f"member-{place}" for place in range(3)])
    assert_same_weights(AutoHydra.from_pruned_members(tuned), again)
    circuits = [extract_circuit(each, data[1], budget=2, progress=False) for each in tuned]
    members = draw_members(tuned, circuits=circuits, budget=2)
    after = finetune_members(members, "tune-images", *data, output_dir=tmp_path / "after", **ARGUMENTS)
    hydra = AutoHydra.from_pruned_members(after)
    assert hydra.num_members == 3
    for place, circuit in enumerate(circuits):
        lost = {
            (layer, head)
            for layer, heads in enumerate(hydra.config.kept_heads)
            for head in set(range(4)) - set(heads[place])
        }
        assert lost == set(circuit.ranking[:2])


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(data, tmp_path):
    pretrained = tiny_model("vit", "backbone")
    whole = {"output_dir": tmp_path / "unbroken", "class_names": NAMES, **ARGUMENTS}
    unbroken = finetune_from_pretrained(pretrained, 2, SHORT, *data, **whole)
    pretrained.save_pretrained(tmp_path / "pretrained")
    broken = {"output_dir": tmp_path / "broken", "class_names": NAMES, **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_from_pretrained(tmp_path / "pretrained", 2, SHORT, Interrupting(data[0], 12 + 9), data[1], **broken)
    resumed = finetune_from_pretrained(tmp_path / "pretrained", 2, SHORT, *data, **broken)
    for first, second in zip(unbroken, resumed, strict=True):
        assert_same_weights(first, second)
    with pytest.raises(ValueError, match="holds another fine-tuning"):
        finetune_from_pretrained(pretrained, 2, SHORT, *data, seed=1, **broken)


# Trainer knows of no family: one for each form that a head has, since a head is what is new in a checkpoint.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit", "dinov2", "bert", "roberta", "distilbert", "modernbert", "llama", "ast", "siglip-classifier"]
)
def test_plain_models_go_on_from_a_checkpoint_with_its_weights_and_return_to_their_best(name, tmp_path):
    """Names on disk may be older than those of the model. The checkpoint that is left is the one of the best epoch."""
    rows, model = tiny_dataset(name), tiny_model(name, "backbone", num_labels=3)
    settings = dataclasses.replace(
        recipe("finetune-images"), epochs=2, learning_rate=0.01, classifier_learning_rate=None, keep_best=True
    )
    accuracies = iter([0.9, 0.5, 0.9])  # the first epoch is the best
    arguments = {"compute_metrics": lambda _: {"accuracy": next(accuracies)}, **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        finetune_members([model], settings, Interrupting(rows, 12 + 5), rows, output_dir=tmp_path / "cut", **arguments)
    best = type(model).from_pretrained(next((tmp_path / "cut").rglob("checkpoint-*")))
    accuracies = iter([0.5, 0.9])
    [resumed] = finetune_members([model], settings, rows, rows, output_dir=tmp_path / "cut", **arguments)
    assert_same_weights(resumed, best)
    if name == "vit":
        accuracies = iter([0.9, 0.5, 0.9])
        [unbroken] = finetune_members([model], settings, rows, rows, output_dir=tmp_path / "whole", **arguments)
        assert_same_weights(unbroken, best)


@pytest.mark.slow
def test_members_of_different_backbones_are_fine_tuned_each_from_its_own_weights(data, tmp_path):
    members = [tiny_members(FAMILIES["vit"], seed=seed)[0] for seed in range(2)]
    still = dataclasses.replace(recipe("imagenet1k"), max_steps=1, warmup_steps=0, dropout=None)
    tuned = finetune_members(members, still, *data, output_dir=tmp_path, learning_rates=[0.0], **ARGUMENTS)
    for member, found in zip(members, tuned, strict=True):
        assert_same_weights(member, found)


def test_a_language_model_lends_its_encoder(tmp_path):
    model = BertForMaskedLM(tiny_model("bert", "backbone").config)
    model.save_pretrained(tmp_path)
    first, second = with_new_classifiers(model, 2), with_new_classifiers(tmp_path, 2)
    assert_same_weights(first[1], second[1])
    assert not torch.equal(first[0].bert.pooler.dense.weight, first[1].bert.pooler.dense.weight)
    assert torch.equal(first[0].bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)


def test_half_precision_on_disk_is_trained_in_float32(tmp_path):
    tiny_model("vit", "backbone").half().save_pretrained(tmp_path)
    assert with_new_classifiers(tmp_path, 1)[0].dtype == torch.float32


def test_what_a_model_computes_from_its_config_is_not_rounded_with_its_weights(tmp_path):
    """The scale of Gemma's words, which is no whole number here, and frequencies of positions."""
    backbone = GEMMA.backbone(hidden_size=24).bfloat16()
    backbone.save_pretrained(tmp_path)
    from_disk, from_memory = with_new_classifiers(tmp_path, 1)[0].model, with_new_classifiers(backbone, 1)[0].model
    assert from_disk.embed_tokens.embed_scale == torch.tensor(24.0).sqrt()
    assert from_memory.dtype == torch.bfloat16
    assert torch.equal(from_memory.rotary_emb.inv_freq, from_disk.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("pretrained", "arguments", "sentence"),
    [
        (
            lambda: tiny_model("clip", "backbone").text_model,
            {},
            r"pretrained \(CLIPTextModel\) is a clip_text_model: pass",
        ),
        (
            lambda: tiny_model("vit", "member"),
            {},
            "is a hydra_vit: pass a pre-trained model, one of albert, audio-spectrogram-transformer, beit",
        ),
        (lambda: tiny_model("vit", "backbone"), {"num_members": 0}, "num_members is 0"),
        (lambda: tiny_model("vit", "backbone"), {"class_names": ["a", "a"]}, "class_names is .*different names"),
        (lambda: tiny_model("vit", "backbone"), {"class_names": "red"}, "class_names is 'red'"),
    ],
)
def test_what_cannot_be_fine_tuned_gets_one_sentence(pretrained, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        with_new_classifiers(pretrained(), **{"num_members": 2} | arguments)


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nothing"):
        with_new_classifiers(tmp_path / "nothing", 2)


def test_a_checkpoint_that_lacks_a_part_of_the_encoder_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_model("vit", "backbone").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "layer.1" in name or "layers.1" in name)
    save_file(
        {name: value for name, value in weights.items() if name != lost},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        ValueError, match=r"has no vit.layers.1.* of the right shape: pass a model that is pre-trained"
    ):
        with_new_classifiers(tmp_path, 1)


def steps_of(folder) -> int:
    return json.loads((folder / "lr-0.0001" / "trainer_state.json").read_text())["global_step"]


@pytest.mark.slow
def test_members_of_one_run_go_on_from_its_half_and_take_what_is_left_of_the_trainings(data, tmp_path, capsys):
    """12 rows in batches of 2: 6 steps an epoch, 48 in a training; half of it, and a third for each of three restarts."""
    pretrained, eight = tiny_model("vit", "backbone"), recipe("finetune-images")
    arguments = {"output_dir": tmp_path, "trainings": 1.5, "seed": 5} | ARGUMENTS | {"per_device_train_batch_size": 2}
    members = finetune_from_pretrained(pretrained, 3, eight, *data, **arguments)
    assert "one run of 1.5 trainings: a common start of 0.5, then 3 restarts of 0.333" in capsys.readouterr().out
    steps = [steps_of(tmp_path / name) for name in ("start/member-0", "member-0", "member-1", "member-2")]
    assert steps == [24, 16, 16, 16] and sum(steps) == 1.5 * 48
    start = type(members[0]).from_pretrained(tmp_path / "start" / "member-0")
    again = finetune_members(
        [start],
        dataclasses.replace(eight, epochs=8 / 3),
        *data,
        tmp_path / "by hand",
        seed=7,
        **ARGUMENTS | {"per_device_train_batch_size": 2},
    )
    assert_same_weights(again[0], members[1])
    assert len({fingerprint_of_weights(member) for member in members}) == 3
    hydra = AutoHydra.from_pruned_members(members, trunk_layers=1)
    assert hydra.num_members == 3
    for member, loaded in zip(
        members, finetune_from_pretrained(pretrained, 3, eight, *data, **arguments), strict=True
    ):
        assert_same_weights(member, loaded)


@pytest.mark.slow
def test_twice_the_trainings_make_better_members_and_one_call_the_whole_hydra(data, tmp_path):
    pretrained, arguments = tiny_model("vit", "backbone"), {"seed": 5, **ARGUMENTS}
    short = dataclasses.replace(recipe("tune-images"), epochs=1)
    heads = {"class_names": NAMES, "classifiers": 2}
    four = finetune_from_pretrained(pretrained, 4, SHORT, *data, tmp_path / "four", **heads, **arguments)
    budget = {"trainings": 4, "tuning_recipe": short, "trunk_layers": 0.5, **heads}
    hydra = hydra_from_pretrained(pretrained, 2, SHORT, *data, tmp_path / "one call", **budget, **arguments)
    finetuned = tmp_path / "one call" / "finetuned"
    members = finetune_from_pretrained(pretrained, 2, SHORT, *data, finetuned, trainings=4, **heads, **arguments)
    for member, expected in zip(members, average_members(four, into=2), strict=True):
        assert_same_weights(member, expected)
    merged, teacher = (AutoHydra.from_pruned_members(members, trunk_layers=depth) for depth in (1, 0))
    expected = tune_jointly(merged, short, *data, tmp_path / "by hand", teacher, **arguments)
    assert hydra.num_members == 2 and hydra.config.trunk_layers == 1
    assert_same_weights(hydra, expected)
    again = hydra_from_pretrained(pretrained, 2, SHORT, *data, tmp_path / "one call", **budget, **arguments)
    assert_same_weights(again, hydra)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"output_dir": None}, "output_dir is None"),
        ({"num_members": 1}, "num_members is 1"),
        ({"trunk_layers": 9}, "trunk_layers is 9, of 3 layers"),
        ({"trunk_layers": 0}, "trunk_layers is 0, of 3 layers"),
        ({"trunk_layers": 0.25}, "trunk_layers is 0.25, of 3 layers: pass a whole number from 1 to 3"),
        ({"classifiers": 4}, "classifiers is 4: pass a number from 1 to 3"),
        ({"tuning_recipe": "long"}, "there is no recipe 'long'"),
        ({"problem_type": "regression"}, "a teacher is for one class per row"),
        ({"trainings": 4}, "trainings is 4: pass .* a multiple of it such as 6"),
    ],
)
def test_what_one_call_cannot_do_is_refused_before_any_training(wrong, sentence, data, tmp_path):
    given = {"num_members": 3, "output_dir": tmp_path} | wrong
    with pytest.raises(ValueError, match=sentence):
        hydra_from_pretrained(tiny_model("vit", "backbone"), train_data=data[0], validation_data=data[1], **given)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("trainings", "members"), [(0.5, 3), (3, 3), (2.0, 2)])
def test_a_budget_without_restarts_or_enough_for_whole_fine_tunings_is_refused(trainings, members, data, tmp_path):
    with pytest.raises(ValueError, match=f"trainings is {trainings}: pass more than 0.5 and less than {members}"):
        finetune_from_pretrained(
            tiny_model("vit", "backbone"), members, SHORT, *data, output_dir=tmp_path, trainings=trainings
        )


def test_a_restart_keeps_the_share_of_its_warm_up_and_the_length_that_arguments_name():
    steps = shortened(recipe("cifar100"), 1 / 3)
    assert (steps.max_steps, round(steps.warmup_steps)) == (3_333, 167)
    epochs = shortened(recipe("sst2"), 0.5)
    assert (epochs.epochs, epochs.warmup_steps, epochs.early_stopping_patience) == (3.5, 0.1, None)
    counted = dataclasses.replace(recipe("sst2"), warmup_steps=100)
    assert shortened(counted, 0.5).warmup_steps == 50
    # Less than one step would be read as a share of all steps.
    assert shortened(dataclasses.replace(counted, warmup_steps=1), 0.5).warmup_steps == 0
    found = shortened_arguments({"max_steps": 30, "num_train_epochs": 4, "warmup_steps": 9, "seed": 3}, 1 / 3)
    assert found == {"max_steps": 10, "num_train_epochs": 4 / 3, "warmup_steps": 3, "seed": 3}
