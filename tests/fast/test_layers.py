"""Layers that run fast give what the modules give, and only run so where nobody could tell."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook

from hydra_transformers.fast import layers as fast_inference
from hydra_transformers.models import modeling_hydra
from tests.families import (
    ALBERT,
    BEIT,
    BERT,
    CLIP,
    DINOV2_GATED,
    DINOV3,
    HUBERT,
    VIT,
    WAV2VEC2,
    WAVLM,
    images,
    vit_backbone,
)


# What does not depend on the family is looked at in one.
ONE_FAMILY = pytest.mark.parametrize("family", [VIT], ids=["vit"])


@pytest.fixture(params=[VIT, BERT, CLIP, DINOV2_GATED], ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture(params=["uniform", "ragged"])
def hydra(request, family):
    """All parts shared; ragged: a member without heads in a layer, a layer without heads of any member."""
    return family.fused(request.param)


@pytest.fixture
def fast(monkeypatch):
    """The attentions of the layers that ran fast, in order."""
    for heads in ("ragged", "uniform"):
        VIT.fused(heads)  # is built once in a process, and building runs layers
    attentions = []
    for name in ("norm_first_layer", "norm_last_layer"):
        original = getattr(fast_inference, name)

        def run(layer, *args, original=original):
            attentions.append(layer.attention)
            return original(layer, *args)

        monkeypatch.setattr(fast_inference, name, run)
    return attentions


@pytest.fixture(params=["launches", "zeros", "arithmetic"])
def cheapest(request, monkeypatch):
    """How layers run fast: as on a GPU with 16-bit numbers and few rows, with more rows, and anywhere else."""
    monkeypatch.setattr(fast_inference, "launches_take_longest", lambda states: request.param == "launches")
    monkeypatch.setattr(fast_inference, "zeros_cost_little", lambda states: request.param != "arithmetic")
    return request.param


@pytest.fixture
def launch_bound(monkeypatch):
    """As on a GPU with 16-bit numbers."""
    monkeypatch.setattr(fast_inference, "launches_take_longest", lambda states: True)
    monkeypatch.setattr(fast_inference, "zeros_cost_little", lambda states: True)


def layers_with_heads(hydra) -> list[nn.Module]:
    layers = [module for name, module in hydra.named_modules() if name.rpartition(".")[0].endswith("layers")]
    return [layer for layer in layers if not layer.attention.has_no_head]


def plain(hydra, inputs) -> torch.Tensor:
    """Where gradients are recorded, layers are called as modules."""
    with torch.enable_grad():
        return hydra(**inputs).member_logits.detach()


@torch.no_grad()
@pytest.mark.parametrize("rows", ["few", "many"])
def test_fast_layers_give_the_logits_of_the_modules(family, hydra, fast, rows, cheapest, monkeypatch):
    monkeypatch.setattr(modeling_hydra, "ROWS_FOR_ONE_PRODUCT_PER_MEMBER", 10**9 if rows == "few" else 0)
    inputs = family.inputs()
    expected = plain(hydra, inputs)
    assert not fast
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    assert sorted(map(id, fast)) == sorted(id(layer.attention) for layer in layers_with_heads(hydra))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("heads", ["uniform", "ragged"])
@pytest.mark.parametrize(
    ("family", "runs"),
    [(ALBERT, 2), (WAV2VEC2, 1), (HUBERT, 1), (BEIT, 0), (WAVLM, 0), (DINOV3, 0)],
    ids=lambda each: getattr(each, "name", each),
)
def test_encoders_run_fast_unless_positions_change_the_scores(family, runs, heads, fast, cheapest):
    """runs: how many times each layer runs fast"""
    encoder, inputs = family.fused(heads).base_model, family.inputs()
    fast.clear()
    with torch.enable_grad():
        expected = encoder(**inputs).member_last_hidden_state.detach()
    assert not fast
    torch.testing.assert_close(encoder(**inputs).member_last_hidden_state, expected, atol=1e-12, rtol=1e-10)
    assert len(fast) == runs * sum(not layer.attention.has_no_head for layer in encoder.layers)


@torch.no_grad()
@pytest.mark.parametrize("heads_to_prune", [({}, {}, {}), ({0: [1]}, {1: [0, 2]}, {})], ids=["uniform", "ragged"])
def test_projections_without_biases_run_fast(heads_to_prune, fast, cheapest):
    backbones = [vit_backbone(seed, qkv_bias=False) for seed in range(3)]
    members = [VIT.hydra.from_backbone(b, heads) for b, heads in zip(backbones, heads_to_prune, strict=True)]
    hydra, inputs = VIT.hydra.from_pruned_members(members), VIT.inputs()
    fast.clear()  # building compares members with their backbones
    torch.testing.assert_close(hydra(**inputs).member_logits, plain(hydra, inputs), atol=1e-12, rtol=1e-10)
    assert len(fast) == 3


@torch.no_grad()
@ONE_FAMILY
def test_where_launches_take_longest_a_layer_attends_once_whatever_its_members_keep(
    family, hydra, launch_bound, monkeypatch
):
    calls, attend = [], fast_inference.scaled_dot_product_attention
    monkeypatch.setattr(
        fast_inference,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(0) or attend(*args, **kwargs),
    )
    hydra(**family.inputs())
    assert len(calls) == len(layers_with_heads(hydra))


@torch.no_grad()
def test_forward_mode_derivatives_go_through_the_modules(fast, launch_bound):
    hydra, inputs = VIT.fused("uniform"), VIT.inputs()
    pixels = inputs["pixel_values"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), forward_ad.dual_level():
        logits = hydra(pixel_values=forward_ad.make_dual(pixels, torch.ones_like(pixels))).member_logits
        assert forward_ad.unpack_dual(logits).tangent.norm() > 0
    assert not fast


@torch.no_grad()
def test_modules_among_fast_inference_are_given_what_the_caller_may_keep(launch_bound, fast):
    hydra, seen = VIT.fused(), []
    layers_with_heads(hydra)[1].register_forward_hook(lambda _, args, output: seen.extend((args[0], output)))
    hydra(**VIT.inputs())
    assert fast and len(seen) == 2 and not any(states.is_inference() for states in seen)


@torch.no_grad()
@pytest.mark.parametrize("at_once, blocks", [(1, 2), (4, 1)])
def test_filled_up_weights_are_gone_when_the_next_are_made(at_once, blocks, launch_bound, monkeypatch):
    hydra, made, join = VIT.fused(), [], torch.Tensor.index_select
    monkeypatch.setattr(fast_inference, "LAYERS_TO_FILL_UP", at_once)

    def joined(tensor, *args):
        block = join(tensor, *args)
        if block.dim() == 2:
            assert all(storage.expired() for storage in made)
            made.append(StorageWeakRef(block.untyped_storage()))
        return block

    monkeypatch.setattr(torch.Tensor, "index_select", joined)
    hydra(**VIT.inputs())
    assert len(made) == blocks  # of two layers: the one between has no heads


@torch.no_grad()
def test_members_that_keep_as_many_heads_run_without_a_copy_of_their_weights(launch_bound, monkeypatch):
    hydra = VIT.fused("uniform")
    monkeypatch.setattr(fast_inference.torch, "cat", lambda *_: pytest.fail("weights were copied"))
    states = torch.randn(3, 4, 5, 32, dtype=torch.float64)
    assert modeling_hydra.run_layers(hydra.vit.layers, states).shape == states.shape


@torch.no_grad()
@ONE_FAMILY
def test_changed_weights_count_at_once(family, hydra, launch_bound):
    """Nothing that is laid side by side is kept: weights may change where nobody could notice."""
    inputs = family.inputs()
    before = hydra(**inputs).member_logits
    attention = layers_with_heads(hydra)[0].attention
    for part in (attention.qkv_proj, attention.o_proj):
        part.weight.data.mul_(1.5)
        part.bias.data.add_(0.5)
    after = hydra(**inputs).member_logits
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, plain(hydra, inputs), atol=1e-12, rtol=1e-10)


@torch.no_grad()
@ONE_FAMILY
@pytest.mark.parametrize("name", ["", "attention", "attention.qkv_proj", "attention.o_proj", "mlp", "mlp.fc1"])
def test_a_hooked_layer_is_called_as_a_module_and_the_others_run_fast(family, hydra, fast, name):
    layers = layers_with_heads(hydra)
    inputs, seen = family.inputs(), []
    expected = hydra(**inputs).member_logits
    fast.clear()
    layers[1].get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    assert set(seen) == {name}
    assert len(fast) == len(layers) - 1 and layers[1].attention not in fast


@torch.no_grad()
@ONE_FAMILY
def test_no_layer_runs_fast_in_training_or_under_global_hooks(family, hydra, fast):
    hydra.train()(**family.inputs())
    assert not fast
    handle = register_module_forward_hook(lambda *_: None)
    try:
        hydra.eval()(**family.inputs())
    finally:
        handle.remove()
    assert not fast


@torch.no_grad()
@ONE_FAMILY
def test_a_global_hook_sees_every_module(family, hydra):
    """In inference as in training, so that whoever counts or records calls misses none."""

    def seen() -> list[nn.Module]:
        modules = []
        handle = register_module_forward_hook(lambda module, *_: modules.append(module))
        try:
            hydra(**family.inputs())
        finally:
            handle.remove()
        return modules

    expected = [projection for layer in layers_with_heads(hydra) for projection in layer.attention.children()]
    assert {id(module) for module in expected} <= {id(module) for module in seen()}


@torch.no_grad()
@ONE_FAMILY
@pytest.mark.parametrize("switch", ["environment", "config"])
def test_one_switch_turns_it_off(family, hydra, fast, switch, monkeypatch):
    if switch == "environment":
        monkeypatch.setenv("HYDRA_FAST_INFERENCE", "0")
    for config in (hydra.config, *(getattr(hydra.config, f"{t}_config", hydra.config) for t in ("vision", "text"))):
        config.fast_inference = switch != "config"
    hydra(**family.inputs())
    assert not fast


@torch.no_grad()
def test_the_switch_is_saved(tmp_path, fast):
    hydra = VIT.fused()
    hydra.config.fast_inference = False
    hydra.save_pretrained(tmp_path)
    VIT.hydra.from_pretrained(tmp_path)(**{"pixel_values": images().float()})
    assert not fast


@torch.no_grad()
@pytest.mark.parametrize(
    "owner, name", [(nn.modules.module, "_has_any_global_hook"), (torch._C, "_functorch")], ids=["hooks", "modes"]
)
def test_where_torch_has_lost_a_private_function_the_plain_way_is_taken(owner, name, fast, monkeypatch):
    hydra, inputs = VIT.fused("uniform"), VIT.inputs()
    expected = plain(hydra, inputs)
    monkeypatch.delattr(owner, name)
    assert fast_inference.has_modes_or_hooks()
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    assert not fast


def test_the_users_choice_of_attention_kernels_counts():
    assert fast_inference.quickly_launched_attention() is not None
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        assert fast_inference.quickly_launched_attention() is None
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert fast_inference.quickly_launched_attention() is not None


@torch.no_grad()
def test_layers_that_are_given_something_unknown_are_called(fast):
    layers, states = VIT.fused("uniform").vit.layers, torch.randn(1, 2, 5, 32, dtype=torch.float64)
    modeling_hydra.run_layers(layers, states, position_bias=None, num_items_in_batch=2)
    assert len(fast) == 3
    fast.clear()
    modeling_hydra.run_layers(layers, states, some_positions=torch.zeros(1))
    assert not fast


# Layers that are something else than they seem


def vit_hydra() -> nn.Module:
    members = [VIT.hydra.from_backbone(vit_backbone(seed), {0: [seed], 1: [3] * (seed > 0)}) for seed in range(3)]
    return VIT.hydra.from_pruned_members(members)


class Doubled(nn.Module):
    """A wrapper, with nothing of a layer's own."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return 2 * self.layer(*args, **kwargs)


def double_as_subclass(hydra):
    kind = type(hydra.vit.layers[1])
    subclass = type("Subclass", (kind,), {"forward": lambda self, *args, **kw: 2 * kind.forward(self, *args, **kw)})
    hydra.vit.layers[1].__class__ = subclass


def double_as_wrapper(hydra):
    hydra.vit.layers[1] = Doubled(hydra.vit.layers[1])


def keep_three_tokens(hydra):
    hydra.vit.layers[0].register_forward_hook(lambda module, args, output: output[:, :, :3])


def tie_layers(hydra):
    hydra.vit.layers[0] = hydra.vit.layers[2]


def turn_a_weight_into_a_tensor(hydra):
    fc1 = hydra.vit.layers[0].mlp.fc1
    weight = fc1.weight.detach()
    del fc1.weight
    fc1.weight = weight


class Scaled(nn.Linear):
    """An adapter of its own kind, as a child that nobody declared."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features)
        self.load_state_dict(layer.state_dict())
        self.double()
        self.scale = nn.LayerNorm(layer.out_features).double()

    def forward(self, states):
        return self.scale(super().forward(states))


def scale_a_branch(hydra):
    hydra.vit.layers[1].mlp.fc2 = Scaled(hydra.vit.layers[1].mlp.fc2)


def patch_a_forward(hydra):
    layer = hydra.vit.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def see_no_later_tokens(hydra):
    hydra.vit.layers[2].attention.is_causal = True


def hang_a_child_into_the_attention(hydra):
    attention = hydra.vit.layers[1].attention
    attention.scale = nn.Linear(32, 32).double()
    forward = attention.forward
    attention.forward = lambda states, *args, **kwargs: forward(attention.scale(states), *args, **kwargs)


class OfItsOwnKind(nn.Parameter):
    """As quantised and distributed weights are."""


def give_a_weight_of_its_own_kind(hydra):
    fc1 = hydra.vit.layers[0].mlp.fc1
    fc1.weight = OfItsOwnKind(fc1.weight.detach())


CHANGES = [
    scale_a_branch,
    hang_a_child_into_the_attention,
    patch_a_forward,
    see_no_later_tokens,
    give_a_weight_of_its_own_kind,
    double_as_subclass,
    double_as_wrapper,
    keep_three_tokens,
    tie_layers,
    turn_a_weight_into_a_tensor,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers_do_as_they_were_told(change, fast):
    hydra, inputs = vit_hydra(), VIT.inputs()
    fast.clear()
    change(hydra)
    expected = plain(hydra, inputs)
    with torch.no_grad():
        torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    assert len(fast) == (3 if change is tie_layers else 2)


@torch.no_grad()
def test_what_is_changed_after_a_first_run_counts(fast):
    """The parts of a layer are remembered, and looked at each time."""
    hydra, inputs = vit_hydra(), VIT.inputs()
    fast.clear()
    before = hydra(**inputs).member_logits
    scale_a_branch(hydra)
    changed = hydra(**inputs).member_logits
    assert not torch.allclose(changed, before)
    torch.testing.assert_close(changed, plain(hydra, inputs), atol=1e-12, rtol=1e-10)
    assert len(fast) == 3 + 2


class DoubledMaps(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        return 2 * result if function is nn.functional.linear else result


class DoubledNorms(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        return 2 * result if function is nn.functional.layer_norm else result


@pytest.mark.parametrize("who", ["a mode", "a subclass"])
def test_functions_that_mean_something_else_are_called_by_the_modules(who, fast):
    hydra, inputs, mode = vit_hydra(), VIT.inputs(), nullcontext()
    fast.clear()
    if who == "a mode":
        mode = DoubledMaps()
    else:
        inputs = {name: tensor.as_subclass(DoubledNorms) for name, tensor in inputs.items()}
    with mode:
        expected = plain(hydra, inputs)
        with torch.no_grad():
            torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    assert not fast


@torch.no_grad()
def test_a_default_device_is_no_other_meaning(fast):
    with torch.device("cpu"):
        vit_hydra()(**VIT.inputs())
    assert fast


def test_tied_layers_see_every_token_but_in_the_last_place():
    hydra, inputs = vit_hydra(), VIT.inputs()
    tie_layers(hydra)
    with torch.enable_grad():
        every_token = hydra(**inputs, output_hidden_states=True).member_logits
        torch.testing.assert_close(hydra(**inputs).member_logits, every_token, atol=1e-12, rtol=1e-10)


@pytest.mark.slow
@torch.no_grad()
def test_a_layer_that_is_compiled_by_itself_is_called():
    hydra, graphs = vit_hydra(), []
    hydra.vit.layers[1].compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    hydra(**VIT.inputs())
    torch.compiler.reset()
    assert graphs


@pytest.mark.slow
@torch.no_grad()
def test_a_run_on_fake_tensors_leaves_nothing_behind():
    hydra, inputs = vit_hydra(), VIT.inputs()
    expected = plain(hydra, inputs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        hydra(**{name: torch.empty_like(value) for name, value in inputs.items()})
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)


class MemberLogits(nn.Module):
    def __init__(self, hydra: nn.Module):
        super().__init__()
        self.hydra = hydra

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.hydra(pixel_values).member_logits


@torch.no_grad()
def test_ragged_members_can_be_mapped_and_traced():
    model, pixel_values = MemberLogits(VIT.fused()).eval(), images()
    expected = model(pixel_values)
    mapped = torch.func.vmap(lambda pixels: model(pixels[None])[0])(pixel_values)
    torch.testing.assert_close(mapped, expected, atol=1e-12, rtol=1e-10)
    traced = torch.jit.trace(model, (pixel_values[:2],), check_trace=False)
    torch.testing.assert_close(traced(pixel_values), expected, atol=1e-12, rtol=1e-10)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_layer_projects_q_k_and_v_at_once():
    hydra = VIT.fused("all")
    products = []

    def count(graph, inputs):
        products.extend(node for node in graph.graph.nodes if node.target in (torch.bmm, torch.baddbmm))
        return graph.forward

    compiled = torch.compile(hydra, fullgraph=True, backend=count)
    torch.testing.assert_close(compiled(images()).member_logits, hydra(images()).member_logits)
    torch.compiler.reset()
    # q, k, v together and o of the first two layers; q, then k and v, then o of the last one; the classifier
    assert len(products) == 2 + 2 + 3 + 1
