"""The one-pass kernels give what the plain modules give; on a machine without CUDA they are the plain modules."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from hydra_transformers.fast import kernels
from tests.families import VIT, images


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 0.04), (torch.float16, 0.005)]


@pytest.fixture(autouse=True)
def every_size_is_worth_a_kernel(monkeypatch):
    monkeypatch.setattr(kernels, "ELEMENTS_WORTH_A_KERNEL", dict.fromkeys(kernels.ELEMENTS_WORTH_A_KERNEL, 1))


def states(device, dtype, columns=768):
    return torch.randn(3, 10, columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("columns", [768, 100])
def test_layer_norms_equal_the_modules(device, dtype, tolerance, columns):
    norm = nn.LayerNorm(columns, eps=1e-12).to(device, dtype)
    norm.weight.normal_()
    norm.bias.normal_()
    x, branch = states(device, dtype, columns), states(device, dtype, columns).flip(0)
    before, after = (1 + torch.rand(3, columns)).to(x), torch.rand(columns).to(x)
    close = partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
    close(kernels.layer_norm(norm, x), norm(x))
    close(kernels.layer_norm(norm, x, after), norm(x + after))
    for residual in (x, x[:1]):  # or states that are still the same for all members
        total, normed = kernels.add_and_layer_norm(norm, residual, branch.clone())
        torch.testing.assert_close(total, residual + branch)
        close(normed, norm(residual + branch))
        total, normed = kernels.add_and_layer_norm(norm, residual, branch.clone(), before, after)
        expected = residual + branch + before.unsqueeze(1)
        close(total, expected + after)
        close(normed, norm(expected))


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("name", ["gelu", "quick_gelu"])
def test_activations_equal_the_modules(device, dtype, tolerance, name):
    x = states(device, dtype)
    expected = ACT2FN[name](x.clone())
    torch.testing.assert_close(kernels.activate(ACT2FN[name], x), expected, atol=tolerance, rtol=tolerance)


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
def test_a_hydra_on_cuda_gives_the_logits_of_the_cpu(dtype, tolerance):
    hydra = VIT.fused()
    expected = hydra(images()).member_logits
    logits = hydra.to("cuda", dtype)(images().to("cuda", dtype)).member_logits
    torch.testing.assert_close(logits.cpu().double(), expected, atol=tolerance, rtol=tolerance)
