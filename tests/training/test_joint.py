"""tune_jointly and Teacher: a fused Hydra learns from another model, each member for itself."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.data.prediction import predict
from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.training import Teacher, default_recipe, finetune_members, recipe, tune_jointly
from hydra_transformers.training.losses import EnsembleLoss, TeacherLoss
from tests.training.test_finetune_members import Interrupting, assert_same_weights
from tests.training.tiny import FAMILIES, QUIET, tiny_dataset, tiny_members, tiny_model


TUNE = replace(recipe("tune-images"), epochs=4, learning_rate=1e-3, classifier_learning_rate=1e-3)
ARGUMENTS = {"per_device_train_batch_size": 4, **QUIET}


@pytest.fixture
def data():
    return tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)


@pytest.fixture
def hydra_and_teacher():
    members = tiny_members(FAMILIES["vit"])
    return AutoHydra.from_pruned_members(members), AutoHydra.from_pruned_members(members, shared=())


def batch_of(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows])}


def test_the_loss_is_that_of_hinton_for_each_member_towards_the_teachers_mean():
    generator = torch.Generator().manual_seed(0)
    logits, taught = (torch.randn(4, 3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    labels, teacher = torch.tensor([0, 3, 4, -100]), Teacher(torch.nn.Identity(), temperature=3.0, label_share=0.4)
    loss = TeacherLoss(teacher)
    loss.target = (taught / 3).softmax(-1).mean(1)
    found = loss(HydraClassifierOutput(member_logits=logits), labels)
    by_hand = torch.zeros((), dtype=torch.float64)
    for member in range(3):
        from_labels = F.cross_entropy(logits[:3, member], labels[:3])
        target = (taught[:3] / 3).softmax(-1).mean(1)
        from_teacher = -(target * (logits[:3, member] / 3).log_softmax(-1)).sum(-1).mean()
        by_hand += (0.4 * from_labels + 0.6 * 9 * from_teacher) / 3
    torch.testing.assert_close(found, by_hand, rtol=1e-10, atol=0)
    again = loss(HydraClassifierOutput(member_logits=logits), labels)
    torch.testing.assert_close(again, EnsembleLoss()(HydraClassifierOutput(member_logits=logits), labels))


def test_parts_of_a_batch_add_up():
    logits = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target, labels = logits.flip(0).softmax(-1).mean(1), torch.tensor([0, 2, 1, 1])
    loss = TeacherLoss(Teacher(torch.nn.Identity()))

    def of(rows: slice, items: int | None = None) -> torch.Tensor:
        loss.target = target[rows]
        return loss(HydraClassifierOutput(member_logits=logits[rows]), labels[rows], items)

    torch.testing.assert_close(of(slice(0, 1), 4) + of(slice(1, 4), 4), of(slice(0, 4)))


def test_a_teacher_answers_with_the_mean_of_its_members_whatever_it_is(hydra_and_teacher, data):
    _, unmerged = hydra_and_teacher
    batch = batch_of(data[0])
    expected = (predict(unmerged, batch) / 2).softmax(-1).mean(1)
    unmerged.train()
    torch.testing.assert_close(Teacher(unmerged).probabilities(batch), expected)
    assert unmerged.training
    ensemble = DeepEnsemble([unmerged.member(index) for index in range(3)])
    torch.testing.assert_close(Teacher(ensemble).probabilities(batch), expected)
    plain = tiny_model("vit", "backbone")
    torch.testing.assert_close(Teacher(plain).probabilities(batch), (predict(plain, batch)[:, 0] / 2).softmax(-1))


def test_a_teacher_on_the_cpu_is_moved_to_the_training_and_back(hydra_and_teacher, monkeypatch):
    _, model = hydra_and_teacher
    places = []
    monkeypatch.setattr(model, "to", places.append)
    with pytest.raises(KeyboardInterrupt), Teacher(model).moved_to("cuda:1"):
        raise KeyboardInterrupt
    assert places == ["cuda:1", "cpu"]


@pytest.mark.slow
def test_a_hydra_comes_closer_to_its_teacher_and_both_given_stay_as_they_were(hydra_and_teacher, data, tmp_path):
    hydra, teacher = hydra_and_teacher
    before = [copy.deepcopy(model.state_dict()) for model in (hydra, teacher)]
    taught = Teacher(teacher, label_share=0.0)
    tuned = tune_jointly(hydra, TUNE, *data, output_dir=tmp_path, teacher=taught, **ARGUMENTS)
    assert type(tuned) is type(hydra) and tuned.num_members == 3
    target = taught.probabilities(batch_of(data[0]))

    def distance(model) -> float:
        log_probabilities = (predict(model, batch_of(data[0])) / 2).log_softmax(-1)
        return -(target.unsqueeze(1) * log_probabilities).sum(-1).mean().item()

    assert distance(tuned) < distance(hydra)
    for model, state in zip((hydra, teacher), before, strict=True):
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@pytest.mark.slow
def test_the_teacher_answers_in_the_precision_of_the_training(hydra_and_teacher, data, tmp_path):
    hydra, teacher = hydra_and_teacher
    found = set()
    teacher.classifier.register_forward_hook(lambda module, inputs, output: found.add(output.dtype))
    tune_jointly(hydra, replace(TUNE, epochs=1), *data, output_dir=tmp_path, teacher=teacher, bf16=True, **ARGUMENTS)
    assert found == {torch.bfloat16}


@pytest.mark.slow
def test_an_interrupted_tuning_goes_on_to_the_same_weights_and_another_teacher_is_refused(
    hydra_and_teacher, data, tmp_path
):
    hydra, teacher = hydra_and_teacher
    train, validation = data
    unbroken = tune_jointly(hydra, TUNE, *data, output_dir=tmp_path / "unbroken", teacher=teacher, **ARGUMENTS)
    folder = {"output_dir": tmp_path / "broken", **ARGUMENTS}
    with pytest.raises(KeyboardInterrupt):
        tune_jointly(hydra, TUNE, Interrupting(train, 18), validation, teacher=teacher, **folder)
    for other in (None, Teacher(teacher, temperature=4.0), hydra):
        with pytest.raises(ValueError, match="another fine-tuning \\(other teacher\\)"):
            tune_jointly(hydra, TUNE, *data, teacher=other, **folder)
    assert_same_weights(tune_jointly(hydra, TUNE, *data, teacher=teacher, **folder), unbroken)


def test_without_a_recipe_the_rows_decide_how_long_it_is(hydra_and_teacher, data, tmp_path, capsys):
    """As on the command line: `finetune HYDRA --teacher TEACHER` takes the same recipe."""
    (hydra, teacher), (train, validation) = hydra_and_teacher, data
    with pytest.raises(KeyboardInterrupt):
        tune_jointly(hydra, None, Interrupting(train, 1), validation, tmp_path, teacher, **ARGUMENTS)
    expected = default_recipe(hydra.config, train)
    line = f"recipe default tune-images: {expected.summary(expected.training_arguments(tmp_path, **ARGUMENTS))}"
    assert line in capsys.readouterr().out.splitlines() and "at most 30 epochs" in line


def test_what_cannot_be_taught_gets_one_sentence(hydra_and_teacher, data, tmp_path):
    hydra, teacher = hydra_and_teacher
    folder = {"output_dir": tmp_path, **ARGUMENTS}
    with pytest.raises(TypeError, match="of one member: pass a fused Hydra"):
        tune_jointly(hydra.member(0), TUNE, *data, teacher=teacher, **folder)
    names = list(teacher.config.id2label.values())
    teacher.config.id2label = dict(enumerate(reversed(names)))
    with pytest.raises(ValueError, match="pass a teacher for the same classes in the same order"):
        finetune_members([hydra], TUNE, *data, teacher=teacher, **folder)
    with pytest.raises(TypeError, match="teacher is a str: pass a model"):
        tune_jointly(hydra, TUNE, *data, teacher="teacher", **folder)
    with pytest.raises(ValueError, match="label_share is 2"):
        Teacher(teacher, label_share=2)
    assert not any(tmp_path.iterdir())
