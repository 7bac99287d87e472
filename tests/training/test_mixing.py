"""Mixed inputs: what becomes of images and labels, and that the loss counts both labels exactly."""

import copy

import pytest
import torch
from torch.nn import functional as F

from hydra_transformers import AutoHydra, HydraTrainer, HydraTrainingArguments
from hydra_transformers.training.losses import EnsembleLoss
from hydra_transformers.training.mixing import MixedLabels, cut_and_paste, draw_share, mix_inputs
from tests.training.tiny import QUIET, assert_same_weights, tiny_dataset, tiny_model


def hydra_of(name: str = "vit", **options):
    return AutoHydra.from_backbone(tiny_model(name, "backbone"), **{"num_members": 3, "num_labels": 3} | options)


def trainer_for(model, folder, name: str = "vit", **options) -> HydraTrainer:
    usual = {"per_device_train_batch_size": 4, "num_train_epochs": 3, "save_strategy": "epoch", "learning_rate": 1e-3}
    rows = {key: options.pop(key) for key in ("train_dataset", "compute_loss_func") if key in options}
    rows = {"train_dataset": tiny_dataset(name)} | rows
    return HydraTrainer(model=model, args=HydraTrainingArguments(folder, **usual | QUIET | options), **rows)


def batch_of_images(rows: int = 6, side: int = 8) -> dict[str, torch.Tensor]:
    # Each image has one value, by which it is known again.
    images = torch.arange(1.0, rows + 1).view(rows, 1, 1, 1).expand(rows, 3, side, side).clone()
    return {"pixel_values": images, "labels": torch.arange(rows) % 3}


def test_each_pixel_is_of_the_two_images_whose_labels_count_by_their_shares():
    batch = batch_of_images()
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        mixed = mix_inputs(batch)
        labels = mixed["labels"]
        assert torch.equal(labels.first, batch["labels"])
        images = mixed["pixel_values"]
        # By cutmix a pixel is of one image, by mixup of both: on average the share is the same.
        kinds = {len(image.unique()) for image in images}
        seen |= kinds
        first = batch["pixel_values"].mean(dim=(1, 2, 3))
        other = (images.mean(dim=(1, 2, 3)) - labels.share * first) / max(1 - labels.share, 1e-12)
        if labels.share < 0.99:
            places = other.round().long() - 1
            torch.testing.assert_close(other, places + 1.0, atol=1e-3, rtol=0)
            assert sorted(places.tolist()) == list(range(6)), "every image is mixed in once"
            assert torch.equal(labels.second, batch["labels"][places])
    assert seen == {1, 2}, "both kinds of mixing were drawn"


def test_the_share_that_is_left_is_the_area_that_is_left():
    torch.manual_seed(0)
    images = torch.zeros(2, 3, 10, 12)
    others = torch.ones(2, 3, 10, 12)
    for share in (0.0, 0.3, 0.9, 1.0):
        mixed, left = cut_and_paste(images, others, share)
        assert mixed.mean().item() == pytest.approx(1 - left)
    assert not images.any(), "the batch itself stays as it is"


def test_shares_are_drawn_from_the_beta_distribution():
    torch.manual_seed(0)
    for alpha in (0.2, 1.0):
        shares = torch.tensor([draw_share(alpha) for _ in range(4000)])
        assert shares.mean().item() == pytest.approx(0.5, abs=0.03)
        assert shares.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.01)


@pytest.mark.parametrize("kind", ["members", "ensemble"])
def test_the_loss_of_mixed_labels_is_the_cross_entropy_with_soft_targets(kind):
    torch.manual_seed(0)
    member_logits = torch.randn(5, 3, 4, dtype=torch.float64)
    first = torch.randint(4, (5,))
    second = torch.randint(4, (5,))
    share = 0.3
    weights = torch.rand(4, dtype=torch.float64)
    outputs = {"member_logits": member_logits}
    found = EnsembleLoss(kind, class_weights=weights)(outputs, MixedLabels(first, second, share), torch.tensor(20))
    targets = share * F.one_hot(first, 4) + (1 - share) * F.one_hot(second, 4)
    logs = member_logits.log_softmax(-1)
    if kind == "ensemble":
        logs = member_logits.softmax(-1).mean(1, keepdim=True).log()
    by_row = -(targets.unsqueeze(1) * weights * logs).sum(-1).mean(1)
    torch.testing.assert_close(found, by_row.sum() / 20)


def test_several_labels_are_averaged_for_the_models_own_loss():
    batch = batch_of_images()
    batch["labels"] = F.one_hot(batch["labels"], 3).float()
    torch.manual_seed(3)
    mixed = mix_inputs(batch)["labels"]
    assert mixed.shape == (6, 3) and mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.sum(1), torch.ones(6))
    assert not torch.equal(mixed, batch["labels"])


def test_trainer_mixes_in_the_first_share_of_the_steps_and_never_when_it_evaluates(tmp_path):
    trainer = trainer_for(hydra_of(), tmp_path, mixing=0.5)
    trainer.state.max_steps = 10
    rows = tiny_dataset("vit", 6)
    batch = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
    plain = trainer_for(copy.deepcopy(trainer.model), tmp_path).compute_loss(trainer.model.eval(), dict(batch))
    for step, is_training, is_mixed in ((0, True, True), (4, True, True), (5, True, False), (0, False, False)):
        trainer.state.global_step = step
        trainer.model.train(is_training)
        found = trainer.compute_loss(trainer.model, dict(batch))
        assert (found.item() != pytest.approx(plain.item(), rel=1e-6)) == is_mixed, (step, is_training)


@pytest.mark.parametrize("kind", ["one class", "several"])
def test_a_training_with_mixing_resumes_to_the_same_weights(kind, tmp_path):
    options = {"mixing": 0.75}
    rows = tiny_dataset("vit")
    problem = {}
    if kind == "several":
        rows = [{**row, "labels": F.one_hot(torch.tensor(row["labels"]), 3).float()} for row in rows]
        problem = {"problem_type": "multi_label_classification"}
    whole = hydra_of(**problem)
    resumed = copy.deepcopy(whole)
    trainer_for(whole, tmp_path, train_dataset=rows, **options).train()
    first = trainer_for(resumed, tmp_path, train_dataset=rows, **options)
    first.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(resumed, whole)


def test_what_cannot_be_mixed_gets_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="mixing is for models that classify images: leave it out for a HydraBert"):
        trainer_for(hydra_of("bert"), tmp_path, "bert", mixing=0.5)
    numbers = hydra_of(num_labels=1, problem_type="regression")
    with pytest.raises(ValueError, match="leave it out for a regression"):
        trainer_for(numbers, tmp_path, mixing=0.5)
    with pytest.raises(ValueError, match="leave compute_loss_func out"):
        trainer_for(hydra_of(), tmp_path, mixing=0.5, compute_loss_func=lambda *_, **__: 0)
