"""EnsembleLoss against cross-entropies written out by hand."""

import pytest
import torch
from torch.nn import functional as F

from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.training import EnsembleLoss
from tests.training.tiny import tiny_model


LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 3, 4, 1])
OUTPUTS = HydraClassifierOutput(logits=LOGITS.mean(1), member_logits=LOGITS)


def smoothed_nll(log_probabilities: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Mean over (samples, classes) of the cross-entropy with targets (1 - e) * one-hot + e /
    classes."""
    targets = (1 - smoothing) * F.one_hot(LABELS, 5) + smoothing / 5
    return -(targets * log_probabilities).sum(-1).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_of_the_members_cross_entropies_or_that_of_the_mean_probability(smoothing):
    loss = EnsembleLoss("members", smoothing)(OUTPUTS, LABELS)
    by_hand = sum(smoothed_nll(LOGITS[:, member].log_softmax(-1), smoothing) for member in range(3)) / 3
    torch.testing.assert_close(loss, by_hand)
    loss = EnsembleLoss("ensemble", smoothing)(OUTPUTS, LABELS)
    torch.testing.assert_close(loss, smoothed_nll(LOGITS.softmax(-1).mean(1).log(), smoothing))


@pytest.mark.parametrize("kind", ["members", "ensemble"])
def test_a_model_without_members_has_its_plain_cross_entropy_and_ignored_labels_do_not_count(kind):
    loss = EnsembleLoss(kind, 0.1)({"logits": LOGITS[:, 0]}, LABELS)
    torch.testing.assert_close(loss, F.cross_entropy(LOGITS[:, 0], LABELS, label_smoothing=0.1))
    labels = LABELS.clone()
    labels[1] = -100
    rows = [0, 2, 3]
    some = HydraClassifierOutput(member_logits=LOGITS[rows])
    torch.testing.assert_close(EnsembleLoss(kind, 0.1)(OUTPUTS, labels), EnsembleLoss(kind, 0.1)(some, LABELS[rows]))


def test_the_loss_of_parts_of_a_batch_adds_up():
    loss = EnsembleLoss("members", 0.1)
    parts = [HydraClassifierOutput(member_logits=LOGITS[rows]) for rows in (slice(0, 1), slice(1, 4))]
    total = loss(parts[0], LABELS[:1], num_items_in_batch=4) + loss(parts[1], LABELS[1:], torch.tensor(4))
    torch.testing.assert_close(total, loss(OUTPUTS, LABELS))


@pytest.mark.parametrize("kind", ["members", "ensemble"])
def test_without_smoothing_it_is_the_loss_of_the_model(kind):
    model = tiny_model("vit", "fused").double()
    model.config.ensemble_loss = kind
    batch = {"pixel_values": torch.randn(4, 3, 8, 8, dtype=torch.float64), "labels": LABELS}
    outputs = model(**batch)
    torch.testing.assert_close(EnsembleLoss(kind)(outputs, LABELS), outputs.loss)


def test_labels_of_another_problem_and_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"labels are torch.float32 of shape \(4, 5\).*needs 4 class indices"):
        EnsembleLoss()(OUTPUTS, torch.zeros(4, 5))
    with pytest.raises(ValueError, match="kind is 'mean': pass"):
        EnsembleLoss("mean")
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.0: pass"):
        EnsembleLoss(label_smoothing=1.0)
