"""Training equals Transformers': a Hydra of one member takes the same step as the backbone that it
is built from."""

import pytest
import torch

from hydra_transformers import AutoHydra
from tests.families import DINOV3, FAMILIES, Family, each_of


LEARNING_RATE = 1e-3
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9),
}


def loss_of(family: Family, model: torch.nn.Module) -> torch.Tensor:
    inputs = family.inputs()
    if family.has_towers:
        return -family.logits(model, **inputs).log_softmax(-1).diagonal().mean()
    if family is DINOV3:
        states = model(**inputs).last_hidden_state
        return (states - torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)).square().mean()
    labels = torch.arange(4) % family.num_classes
    return model(**inputs, labels=labels).loss


def outputs_after(family: Family, model: torch.nn.Module, optimizer: str, steps: int = 1) -> torch.Tensor:
    """What a model gives after steps on the same batch, without dropout."""
    model = model.double().eval().requires_grad_(True)
    trained = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(steps):
        trained.zero_grad()
        loss_of(family, model).backward()
        trained.step()
    with torch.no_grad():
        if family is DINOV3:
            return model(**family.inputs()).last_hidden_state
        return family.probabilities(family.logits(model, **family.inputs())).log()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@each_of([*FAMILIES, DINOV3])
def test_one_member_takes_the_steps_of_its_backbone(family, optimizer):
    backbone = family.backbone()
    hydra = AutoHydra.from_backbone(backbone)

    expected = outputs_after(family, backbone, optimizer)

    found = outputs_after(family, hydra, optimizer)
    torch.testing.assert_close(found, expected, atol=max(1e-9, 10 * family.gradient_tolerance), rtol=0)
