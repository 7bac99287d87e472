"""Weights that are not the numbers a model computes with: quantised, adapted, sharded. They are refused, not copied."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hydra_transformers.models.auto import check_has_no_adapters
from hydra_transformers.pruning import draw_members, prune_heads, taylor_scores
from hydra_transformers.training import lora_config
from tests.families import AST, BERT, CLIP, HUBERT, VIT, WAV2VEC2, WAVLM, each_of, images


class Int8Weight(torch.Tensor):
    """As torchao's: a weight of another class, which cannot be viewed or cut, with plain tensors inside."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor):
        self.codes = codes
        self.scale = scale

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


def in_int8(model) -> None:
    """As bitsandbytes: the weights are codes, the config says nothing."""
    for module in model.modules():
        for name in ("weight",):
            weight = module._parameters.get(name)
            if weight is not None and weight.dim() == 2 and weight.numel():
                codes = (weight.detach() * 100).to(torch.int8)
                module._parameters[name] = nn.Parameter(codes, requires_grad=False)


def in_codes_of_another_class(model) -> None:
    codes = Int8Weight(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1))
    weight = next(module for module in model.modules() if getattr(module, "weight", None) is not None)
    weight._parameters["weight"] = nn.Parameter(codes, requires_grad=False)


def in_float8(model) -> None:
    owner = next(module for module in model.modules() if getattr(module, "weight", None) is not None)
    owner._parameters["weight"] = nn.Parameter(owner.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


def as_transformers_says(model) -> None:
    model.is_quantized = True


WAYS = [in_int8, in_codes_of_another_class, in_float8, as_transformers_says]


@pytest.mark.parametrize("quantise", WAYS, ids=lambda way: way.__name__)
@each_of([VIT, CLIP])
def test_quantised_models_are_refused(family, quantise):
    backbone = family.backbone()
    hydra = family.fused()
    for model in (backbone, hydra):
        quantise(model)
    sentence = r"is quantised or sharded.*load it without, or pass model.dequantize\(\)"
    for build in (
        lambda: family.hydra.from_backbone(backbone),
        lambda: family.hydra.from_pruned_members([backbone, family.backbone(1)]),
        lambda: prune_heads(backbone),
        lambda: hydra.member(0),
    ):
        with pytest.raises(ValueError, match=sentence):
            build()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("family", [WAV2VEC2, HUBERT, WAVLM, AST, BERT, VIT], ids=lambda family: family.name)
def test_linear_maps_in_int8_of_torch_give_nearly_the_same_logits(family):
    hydra = family.fused().float().eval()
    quantised = torch.ao.quantization.quantize_dynamic(hydra, {nn.Linear}, dtype=torch.qint8)
    inputs = family.inputs()
    with torch.no_grad():
        assert torch.allclose(quantised(**inputs).logits, hydra(**inputs).logits, atol=0.05)


def test_a_part_that_was_replaced_is_named():
    """As `torch.ao.quantization.quantize_dynamic` does: the new part has no parameters."""
    hydra = VIT.fused()
    hydra.vit.layers[0].mlp.fc1 = nn.Identity()
    with pytest.raises(ValueError, match=r"has no parameter '.*mlp.fc1.weight'.*pass it as it was before"):
        hydra.member(0)


@pytest.mark.parametrize("family, targets", [(BERT, ["query"]), (CLIP, ["q_proj"])], ids=["bert", "clip"])
def test_adapters_are_merged_first(family, targets):
    adapted = get_peft_model(family.backbone(), LoraConfig(r=2, target_modules=targets))
    merge = r"has adapters: pass the result of merge_and_unload\(\)"
    for model in (adapted, adapted.get_base_model()):
        with pytest.raises(ValueError, match=rf"members\[0\] .*{merge}"):
            family.hydra.from_pruned_members([model])
        with pytest.raises(ValueError, match=merge):
            family.hydra.from_backbone(model)
        with pytest.raises(ValueError, match=merge):
            prune_heads(model)
    family.hydra.from_backbone(adapted.merge_and_unload())


def test_adapted_hydras_are_merged_first():
    adapted = get_peft_model(VIT.members()[0], lora_config(VIT.members()[0]))
    data = [{"pixel_values": images(), "labels": torch.tensor([0, 1, 2, 3])}]
    for use in (
        lambda model: VIT.hydra.from_pruned_members([model]),
        lambda model: taylor_scores(model, data),
        lambda model: draw_members(model, data=data, heads_per_layer=1, num_members=2),
    ):
        for model in (adapted, adapted.get_base_model()):
            with pytest.raises(ValueError, match="has adapters: pass"):
                use(model)
    check_has_no_adapters(adapted.merge_and_unload(), "model")


def test_what_was_calibrated_before_it_was_quantised_decides_nothing():
    hydra = VIT.fused("uniform")
    hydra.calibrate([{"pixel_values": images(40), "labels": torch.arange(40) % 5}], alpha=0.2)
    assert hydra(**VIT.inputs()).prediction_set is not None
    for module in hydra.modules():
        if type(module) is nn.Linear:
            scale = module.weight.detach().abs().amax(dim=1, keepdim=True) / 127
            codes = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = nn.Parameter(Int8Weight(codes, scale), requires_grad=False)
    assert hydra(**VIT.inputs()).get("prediction_set") is None
