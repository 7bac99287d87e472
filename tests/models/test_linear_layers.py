"""Packed layers taken apart into a linear layer per member: the same answers, the same checkpoints, within reach of quantisers."""

import copy

import pytest
import torch
from torch import nn

from hydra_transformers.fusion import with_linear_layers
from hydra_transformers.models.modeling_hydra import Grouped
from tests.families import BERT, CLIP, FEW, ROBERTA, VIT, for_families, images


class Int8Linear(nn.Module):
    """As quantisers leave a linear layer: codes and scales in buffers, for (rows, features) alone."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.codes * self.scale, self.bias)


class Int8Weight(torch.Tensor):
    """As torchao's: a weight of another class, which cannot be viewed or cut, with plain tensors inside."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            inputs, weight, bias = args
            return func(inputs, weight.codes * weight.scale, bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} on codes")


def replace_linear_layers(model: nn.Module) -> None:
    """Quantises every linear layer of the encoder's attention, poolers and projections; MLPs give theirs three axes."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and ".mlp." not in name:
            model.set_submodule(name, Int8Linear(module))


def quantise_weights(model: nn.Module) -> None:
    """Puts other weights into the linear layers, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            quantised = Int8Linear(module)
            module.weight = nn.Parameter(Int8Weight(quantised.codes, quantised.scale), requires_grad=False)


def tensors_of(outputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


# The same model


@for_families(FEW)
def test_outputs_are_those_of_the_hydra_which_alone_can_be_saved(family, tmp_path):
    """Ragged: members without heads, a layer without any, tuples of different widths."""
    hydra, inputs, state = family.fused(), family.inputs(), torch.get_rng_state()
    before, apart = copy.deepcopy(hydra.state_dict()), with_linear_layers(hydra)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        expected, found = tensors_of(hydra(**inputs)), tensors_of(apart(**inputs))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in hydra.state_dict().items())
    with pytest.raises(ValueError, match="cannot be saved: save the Hydra itself"):
        apart.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def packed_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Grouped)]


# Within reach


@for_families([VIT, BERT, ROBERTA, CLIP])
def test_a_quantiser_reaches_all_but_the_logits(family):
    hydra = family.fused("uniform")
    apart = with_linear_layers(hydra)
    replace_linear_layers(apart)
    codes = sum(module.codes.numel() for module in apart.modules() if isinstance(module, Int8Linear))
    logits = {"classifier", "classifier.out_proj"} & set(packed_names(hydra))
    assert packed_names(apart) == list(logits)
    packed = [hydra.get_submodule(name) for name in packed_names(hydra) if name not in logits]
    assert codes == sum(module.weight.numel() for module in packed)
    with torch.no_grad():
        expected, found = (family.ensemble_logits(model(**family.inputs())) for model in (hydra, apart))
    torch.testing.assert_close(found.exp(), expected.exp(), rtol=0, atol=0.1)
    assert not torch.equal(found, expected)


# Refusals


def test_what_cannot_be_taken_apart_is_refused():
    quantised = VIT.fused()
    quantise_weights(quantised)
    with pytest.raises(ValueError, match="is quantised or sharded"):
        with_linear_layers(quantised)
    with pytest.raises(ValueError, match="not in memory"):
        with_linear_layers(VIT.fused().to("meta"))


# Calibrated


def calibration_data() -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": images(40), "labels": torch.arange(40) % 5}]


def test_what_was_calibrated_before_it_was_quantised_decides_nothing():
    hydra = VIT.fused("uniform")
    hydra.calibrate(calibration_data(), alpha=0.2)
    assert hydra(**VIT.inputs()).prediction_set is not None
    apart = with_linear_layers(hydra)
    quantise_weights(apart)
    assert apart(**VIT.inputs()).get("prediction_set") is None
    assert hydra(**VIT.inputs()).prediction_set is not None
