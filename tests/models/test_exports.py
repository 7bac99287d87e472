"""Hydras in other formats: ONNX, torch.export, TorchScript, and layers that stand in for linear ones.

The members of the families keep different numbers of heads; one has none in a layer, and one layer has none at all.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_transformers import export
from hydra_transformers.exporting import FILES, RUNNERS
from hydra_transformers.models.modeling_hydra import ROWS_FOR_ONE_PRODUCT_PER_MEMBER
from tests.families import BEIT, CLIP, DEBERTA, LLAMA, MODERNBERT, SIGLIP, VIT, Family, each_of, keep_layers


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class Exportable(torch.nn.Module):
    """A model with tensors in and a tuple of tensors out, as the formats have them."""

    def __init__(self, family: Family):
        super().__init__()
        self.family = family
        self.inputs = family.inputs_in(torch.float32)
        self.hydra = family.fused().float()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.hydra(**dict(zip(self.inputs, tensors, strict=True)))
        return outputs.member_logits, self.family.ensemble_logits(outputs)

    @property
    def example(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.inputs.values())


@pytest.fixture
def model(family):
    return Exportable(family).eval()


@pytest.fixture
def shallow(model):
    """With the last layer, but for a ViT, whose layers are the common ones, ModernBERT, which has two kinds, and SigLIP, whose
    heads alone differ from those of others."""
    if model.family is not VIT:
        keep_layers(model.hydra, *{MODERNBERT: (0, 2), SIGLIP: ()}.get(model.family, (2,)))
    return model


def assert_same(found, expected) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), theirs, atol=1e-5, rtol=1e-5)


class Products(TorchDispatchMode):
    """The shapes of all factors of matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in PRODUCTS:
            self.shapes += [argument.shape for argument in args if isinstance(argument, torch.Tensor)]
        return function(*args, **kwargs or {})


@each_of([CLIP, LLAMA])
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "inference"])
def test_members_without_heads_are_in_no_product(model, gradients):
    """Formats without tensors of width zero fail on such products, or compute something else."""
    with torch.set_grad_enabled(gradients), Products() as products:
        outputs = model(*model.example)
        if gradients:
            outputs[0].sum().backward()
    assert products.shapes
    assert all(0 not in shape for shape in products.shapes)


# Each has an operation that the others do not: two towers, tables, distances, windows, keys for several heads. Audio: test_audio
@each_of([VIT, CLIP, BEIT, DEBERTA, MODERNBERT, LLAMA, SIGLIP])
@pytest.mark.slow
def test_exported_models_answer_as_the_model_does(shallow, tmp_path, monkeypatch):
    """One graph for batches of any size and texts of any length. `export` itself runs what it wrote on inputs of another size
    than it recorded, and refuses what answers otherwise."""
    hydra = shallow.hydra
    inputs = shallow.inputs
    # Both formats are made of one program, and ONNX takes three times as long. A ViT in ONNX: docs/export.md in test_conformance
    to = "onnx" if shallow.family is DEBERTA else "torch"
    load = RUNNERS[to]
    loaded = []
    monkeypatch.setitem(RUNNERS, to, lambda path: loaded.append(load(path)) or loaded[0])
    assert (export(hydra, tmp_path / "exported", to) / FILES[to]).exists()
    twice = {name: torch.cat([tensor, tensor.flip(0)]) for name, tensor in inputs.items()}
    # enough rows that a model that is not exported multiplies member by member
    many = {name: torch.cat([tensor] * (ROWS_FOR_ONE_PRODUCT_PER_MEMBER // 4)) for name, tensor in inputs.items()}
    for batch in ({name: tensor[:1] for name, tensor in inputs.items()}, twice, many):
        outputs = hydra(**batch)
        found = loaded[0](batch)
        expected = shallow.family.ensemble_logits(outputs), outputs.member_logits
        assert_same([found["logits"], found["member_logits"]], expected)


@each_of([VIT, CLIP])
@pytest.mark.slow
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "inference"])
def test_traces_for_batches_of_any_size(shallow, gradients):
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(shallow, shallow.example, check_trace=False)
    assert_same(traced(*shallow.example), shallow(*shallow.example))
    twice = tuple(torch.cat([tensor, tensor.flip(0)]) for tensor in shallow.example)
    assert_same(traced(*twice), shallow(*twice))


class ThreeAxesLinear(torch.nn.Linear):
    """A linear layer as quantised ones are: for (rows, features) or (batch, tokens, features)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states.dim() <= 3
        return super().forward(hidden_states)


@each_of([CLIP, LLAMA])
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "inference"])
def test_linear_layers_get_three_axes_at_most(family, gradients):
    hydra = family.fused()
    expected = hydra(**family.inputs()).member_logits
    replaced = 0
    for module in list(hydra.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear:
                has_bias = child.bias is not None
                dtype = child.weight.dtype
                stand_in = ThreeAxesLinear(child.in_features, child.out_features, has_bias, dtype=dtype)
                stand_in.load_state_dict(child.state_dict())
                setattr(module, name, stand_in)
                replaced += 1
    assert replaced
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(hydra(**family.inputs()).member_logits, expected)
