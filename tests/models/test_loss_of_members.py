"""`config.ensemble_loss` holds with Trainer: label smoothing there is computed from `logits`, and must not replace it."""

import logging

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils.logging import warning_once

from hydra_transformers.training import EnsembleLoss
from tests.families import VIT, images


LABELS = torch.tensor([0, 1, 2, 3])


def hydra_vit(members: int = 3, **fields):
    """Members without randomness, so that a loss can be computed twice."""
    backbones = [VIT.backbone(seed, hidden_dropout_prob=0.0, **fields).float() for seed in range(members)]
    return VIT.hydra.from_pruned_members(backbones, shared=(), allow_equal=True)


class Losses(TrainerCallback):
    def __init__(self):
        self.of_steps = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.of_steps += [logs["loss"]] if "loss" in logs else []


def loss_of_one_step(hydra, folder, compute_loss_func=None, **arguments) -> float:
    rows = [{"pixel_values": image.float(), "labels": label} for image, label in zip(images(), LABELS, strict=True)]
    settings = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 4, "report_to": "none"}
    losses = Losses()
    arguments = TrainingArguments(folder, use_cpu=True, save_strategy="no", disable_tqdm=True, **settings, **arguments)
    Trainer(hydra, arguments, train_dataset=rows, compute_loss_func=compute_loss_func, callbacks=[losses]).train()
    return losses.of_steps[0]


def logits_of(hydra, kind: str) -> list[torch.Tensor]:
    """What is trained: each member's logits, or the ensemble's."""
    with torch.no_grad():
        outputs = hydra(images().float())
    return [outputs.logits] if kind == "ensemble" else list(outputs.member_logits.unbind(1))


@pytest.mark.parametrize(
    "members, kind, smoothing, loss_function",
    [
        (3, "members", 0.0, None),
        (3, "members", 0.1, EnsembleLoss(label_smoothing=0.1)),
        (1, "members", 0.1, None),
        (3, "ensemble", 0.1, None),
    ],
)
def test_trainer_trains_the_members_or_where_it_is_configured_the_ensemble(
    members, kind, smoothing, loss_function, tmp_path
):
    hydra = hydra_vit(members)
    hydra.config.ensemble_loss = kind
    losses = [cross_entropy(logits, LABELS, label_smoothing=smoothing) for logits in logits_of(hydra, kind)]
    found = loss_of_one_step(hydra, tmp_path, loss_function, label_smoothing_factor=smoothing)
    assert found == pytest.approx(torch.stack(losses).mean().item(), abs=1e-4)


def test_trainers_own_label_smoothing_is_stopped_before_the_first_step(tmp_path):
    hydra = hydra_vit()
    before = {name: tensor.clone() for name, tensor in hydra.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"config.ensemble_loss is 'members'.*use HydraTrainer"):
        loss_of_one_step(hydra, tmp_path, label_smoothing_factor=0.1)
    assert all(torch.equal(hydra.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_loop_that_trains_the_logits_is_told(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    warning_once.cache_clear()
    hydra = hydra_vit().train()
    cross_entropy(hydra(images().float()).member_logits.flatten(0, 1), LABELS.repeat_interleave(3)).backward()
    hydra(images().float(), labels=LABELS).loss.backward()
    assert "ensemble_loss" not in caplog.text
    cross_entropy(hydra(images().float()).logits, LABELS).backward()
    assert "config.ensemble_loss is 'members'" in caplog.text
