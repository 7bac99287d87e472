"""Recorded steps compute what the model does by itself."""

import copy

import pytest
import torch

from experiments import smallest
from experiments.gradients import Gradients


def gradients_of(model, batches, device="cpu") -> list[torch.Tensor]:
    compute = Gradients(model, 1.0, device)
    for batch in batches:
        compute(batch)
    return [parameter.grad.clone() for parameter in model.parameters()]


def batches(device="cpu") -> list[dict[str, torch.Tensor]]:
    rows = smallest.splits().to(device).train
    return [rows.__getitems__(list(range(start, start + size))) for start, size in ((0, 8), (8, 8), (16, 4))]


def test_gradients_are_those_of_the_last_batch_clipped():
    model = smallest.new_backbone().eval()
    found = gradients_of(model, batches())
    expected = copy.deepcopy(model)
    expected.zero_grad()
    expected(**batches()[-1]).loss.backward()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    torch.testing.assert_close(found, [parameter.grad for parameter in expected.parameters()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_compute_the_same_gradients():
    model = smallest.new_backbone().eval().cuda()
    expected = gradients_of(copy.deepcopy(model).float(), [batches("cuda")[-1]])  # not recorded
    found = gradients_of(model, [*batches("cuda"), *batches("cuda")], "cuda")
    for mine, theirs in zip(found, expected, strict=True):  # in bfloat16
        assert (mine - theirs).norm() < 0.05 * max(theirs.norm(), 0.01)
