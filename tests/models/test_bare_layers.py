"""Layers that run without module calls give what the modules give, and only run so where nobody could tell."""

import sys
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook

from hydra_transformers.models import bare_layers, grouped
from tests.families import CLIP, VIT, images, vit_backbone


@pytest.fixture(params=["uniform", "ragged"])
def hydra(request, family):
    """All parts shared; ragged: a member without heads in a layer, a layer without heads of any member."""
    return uniform_hydra(family) if request.param == "uniform" else family.hydra.from_pruned_members(family.members())


def uniform_hydra(family):
    pruned = [{layer: [member] for layer in range(3)} for member in range(3)]
    if family is CLIP:
        pruned = [{"vision": heads, "text": heads} for heads in pruned]
    backbones = [family.backbone(seed) for seed in range(3)]
    members = [family.hydra.from_backbone(b, heads) for b, heads in zip(backbones, pruned, strict=True)]
    return family.hydra.from_pruned_members(members)


@pytest.fixture
def bare(monkeypatch):
    """The attentions of the layers that ran bare, in order."""
    attentions = []
    for name in ("pre_norm_layer", "post_norm_layer"):
        original = getattr(bare_layers, name)

        def run(layer, *args, original=original):
            attentions.append(layer.attention)
            return original(layer, *args)

        monkeypatch.setattr(bare_layers, name, run)
    return attentions


@pytest.fixture(params=["launches", "zeros", "arithmetic"])
def cheapest(request, monkeypatch):
    """How layers run bare: as on a GPU with 16-bit numbers and few rows, with more rows, and anywhere else."""
    monkeypatch.setattr(bare_layers, "launches_take_longest", lambda states: request.param == "launches")
    monkeypatch.setattr(bare_layers, "zeros_cost_little", lambda states: request.param != "arithmetic")
    return request.param


@pytest.fixture
def launch_bound(monkeypatch):
    """As on a GPU with 16-bit numbers."""
    monkeypatch.setattr(bare_layers, "launches_take_longest", lambda states: True)
    monkeypatch.setattr(bare_layers, "zeros_cost_little", lambda states: True)


def layers_with_heads(hydra) -> list[nn.Module]:
    layers = [module for name, module in hydra.named_modules() if name.rpartition(".")[0].endswith("layers")]
    return [layer for layer in layers if not layer.attention.has_no_head]


def plain(hydra, inputs) -> torch.Tensor:
    """Where gradients are recorded, layers are called as modules."""
    with torch.enable_grad():
        return hydra(**inputs).member_logits.detach()


@torch.no_grad()
@pytest.mark.parametrize("rows", ["few", "many"])
def test_bare_layers_give_the_logits_of_the_modules(family, hydra, bare, rows, cheapest, monkeypatch):
    monkeypatch.setattr(grouped, "ROWS_FOR_ONE_PRODUCT_PER_MEMBER", 10**9 if rows == "few" else 0)
    inputs = family.inputs()
    expected = plain(hydra, inputs)
    assert not bare
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    assert sorted(map(id, bare)) == sorted(id(layer.attention) for layer in layers_with_heads(hydra))


@torch.no_grad()
@pytest.mark.parametrize("heads_to_prune", [({}, {}, {}), ({0: [1]}, {1: [0, 2]}, {})], ids=["uniform", "ragged"])
def test_projections_without_biases_run_bare(heads_to_prune, bare, cheapest):
    backbones = [vit_backbone(seed, qkv_bias=False) for seed in range(3)]
    members = [VIT.hydra.from_backbone(b, heads) for b, heads in zip(backbones, heads_to_prune, strict=True)]
    hydra, inputs = VIT.hydra.from_pruned_members(members), VIT.inputs()
    torch.testing.assert_close(hydra(**inputs).member_logits, plain(hydra, inputs), atol=1e-12, rtol=1e-10)
    assert len(bare) == 3


@torch.no_grad()
def test_where_launches_take_longest_a_layer_attends_once_whatever_its_members_keep(
    family, hydra, launch_bound, monkeypatch
):
    calls, attend = [], bare_layers.scaled_dot_product_attention
    monkeypatch.setattr(
        bare_layers, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(0) or attend(*args, **kwargs)
    )
    hydra(**family.inputs())
    assert len(calls) == len(layers_with_heads(hydra))


@torch.no_grad()
def test_inference_mode_stays_inside_of_the_layers(family, launch_bound, monkeypatch):
    hydra, modes, norm = uniform_hydra(family), [], bare_layers._norm
    monkeypatch.setattr(
        bare_layers, "_norm", lambda *args: modes.append(torch.is_inference_mode_enabled()) or norm(*args)
    )
    outputs, run = [], bare_layers.run_layers
    monkeypatch.setattr(
        sys.modules[type(hydra).__module__],
        "run_layers",
        lambda *args, **kwargs: outputs.append(run(*args, **kwargs)) or outputs[-1],
    )
    hydra(**family.inputs())
    assert modes and all(modes)
    assert outputs and not any(states.is_inference() for states in outputs)
    with torch.enable_grad():  # what came out may go into a graph
        weight = torch.ones((), dtype=outputs[0].dtype, requires_grad=True)
        (outputs[0] * weight).sum().backward()


@torch.no_grad()
def test_forward_mode_derivatives_go_through_the_modules(bare, launch_bound):
    hydra, inputs = uniform_hydra(VIT), VIT.inputs()
    pixels = inputs["pixel_values"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), forward_ad.dual_level():
        logits = hydra(pixel_values=forward_ad.make_dual(pixels, torch.ones_like(pixels))).member_logits
        assert forward_ad.unpack_dual(logits).tangent.norm() > 0
    assert not bare


@torch.no_grad()
def test_modules_among_bare_layers_are_given_what_the_caller_may_keep(launch_bound, bare):
    hydra, seen = VIT.hydra.from_pruned_members(VIT.members()), []
    layers_with_heads(hydra)[1].register_forward_hook(lambda _, args, output: seen.extend((args[0], output)))
    hydra(**VIT.inputs())
    assert bare and len(seen) == 2 and not any(states.is_inference() for states in seen)


@torch.no_grad()
def test_weights_of_a_few_layers_with_as_many_heads_are_joined_at_once(launch_bound, bare, monkeypatch):
    """Layers 0 to 4 keep three heads, 5 and 6 two, 7 different numbers; 2 is called as a module."""
    pruned = [{layer: [member] for layer in range(5)} for member in range(3)]
    for member, heads in enumerate(pruned):
        heads |= {5: [0, member + 1], 6: [0, member + 1], 7: list(range(member))}
    backbone = vit_backbone(0, num_hidden_layers=8)
    members = [VIT.hydra.from_backbone(backbone, heads) for heads in pruned]
    hydra, inputs, joined = VIT.hydra.from_pruned_members(members), VIT.inputs(), []
    join = bare_layers.joined_at_once
    monkeypatch.setattr(
        bare_layers, "joined_at_once", lambda layers, *biases: joined.append(len(layers)) or join(layers, *biases)
    )
    layers_with_heads(hydra)[2].register_forward_hook(lambda *_: None)
    torch.testing.assert_close(hydra(**inputs).member_logits, plain(hydra, inputs), atol=1e-12, rtol=1e-10)
    assert joined == [2, 2, 2] and len(bare) == 7
    layers_with_heads(hydra)[2]._forward_hooks.clear()
    joined.clear()
    torch.testing.assert_close(hydra(**inputs).member_logits, plain(hydra, inputs), atol=1e-12, rtol=1e-10)
    assert joined == [bare_layers.LAYERS_JOINED_AT_ONCE, 1, 2]


@torch.no_grad()
def test_joined_weights_are_gone_when_the_next_are_made(launch_bound, monkeypatch):
    pruned = [{layer: [member] for layer in range(8)} for member in range(3)]
    backbone, made, join = vit_backbone(0, num_hidden_layers=8), [], torch.cat
    hydra = VIT.hydra.from_pruned_members([VIT.hydra.from_backbone(backbone, heads) for heads in pruned])

    def joined(tensors, *args, **kwargs):
        block = join(tensors, *args, **kwargs)
        if len(tensors) == 3 * bare_layers.LAYERS_JOINED_AT_ONCE and tensors[0].dim() == 3:
            assert all(storage.expired() for storage in made)
            made.append(StorageWeakRef(block.untyped_storage()))
        return block

    monkeypatch.setattr(bare_layers.torch, "cat", joined)
    hydra(**VIT.inputs())
    assert len(made) == 2


@torch.no_grad()
def test_changed_weights_count_at_once(family, hydra, launch_bound):
    """Nothing that is laid side by side is kept: weights may change where nobody could notice."""
    inputs = family.inputs()
    before = hydra(**inputs).member_logits
    attention = layers_with_heads(hydra)[0].attention
    for part in (attention.q_proj, attention.v_proj, attention.o_proj):
        part.weight.data.mul_(1.5)
        part.bias.data.add_(0.5)
    after = hydra(**inputs).member_logits
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, plain(hydra, inputs), atol=1e-12, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", ["", "attention", "attention.q_proj", "attention.o_proj", "mlp", "mlp.fc1"])
def test_a_hooked_layer_is_called_as_a_module_and_the_others_run_bare(family, hydra, bare, name):
    layers = layers_with_heads(hydra)
    inputs, seen = family.inputs(), []
    expected = hydra(**inputs).member_logits
    bare.clear()
    layers[1].get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    assert seen == [name]
    assert len(bare) == len(layers) - 1 and layers[1].attention not in bare


@torch.no_grad()
def test_no_layer_runs_bare_in_training_or_under_global_hooks(family, hydra, bare):
    hydra.train()(**family.inputs())
    assert not bare
    handle = register_module_forward_hook(lambda *_: None)
    try:
        hydra.eval()(**family.inputs())
    finally:
        handle.remove()
    assert not bare


@torch.no_grad()
def test_the_choice_of_attention_kernels_is_given_back(family, hydra, launch_bound, monkeypatch):
    monkeypatch.setattr(bare_layers, "is_alone", lambda: True)
    backends, seen = torch.backends.cuda, []
    attend = bare_layers.scaled_dot_product_attention

    def broken(*args, **kwargs):
        seen.append((backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()))
        if len(seen) == 2:
            raise RuntimeError("broken")
        return attend(*args, **kwargs)

    monkeypatch.setattr(bare_layers, "scaled_dot_product_attention", broken)
    before = backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled()
    with pytest.raises(RuntimeError, match="broken"):
        hydra(**family.inputs())
    assert seen == [(False, False, True)] * 2
    assert (backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled()) == before
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION), bare_layers.quick_attention():
        assert backends.flash_sdp_enabled()


@torch.no_grad()
def test_the_choice_of_attention_kernels_is_left_alone_where_other_threads_run(
    hydra, family, launch_bound, monkeypatch
):
    monkeypatch.setattr(bare_layers, "quick_attention", lambda: pytest.fail("switched"))
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        hydra(**family.inputs())
    finally:
        waiting.set()
        thread.join()


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


def drop_attention(hydra):
    hydra.vit.layers[1].dropout.register_forward_hook(lambda module, args, output: 0 * output)


def keep_three_tokens(hydra):
    hydra.vit.layers[0].register_forward_hook(lambda module, args, output: output[:, :, :3])


def tie_layers(hydra):
    hydra.vit.layers[0] = hydra.vit.layers[2]


def turn_a_weight_into_a_tensor(hydra):
    fc1 = hydra.vit.layers[0].mlp.fc1
    weight = fc1.weight.detach()
    del fc1.weight
    fc1.weight = weight


CHANGES = [
    double_as_subclass,
    double_as_wrapper,
    drop_attention,
    keep_three_tokens,
    tie_layers,
    turn_a_weight_into_a_tensor,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers_do_as_they_were_told(change):
    hydra, inputs = vit_hydra(), VIT.inputs()
    change(hydra)
    expected = plain(hydra, inputs)
    with torch.no_grad():
        torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)


def test_tied_layers_see_every_token_but_in_the_last_place():
    hydra, inputs = vit_hydra(), VIT.inputs()
    tie_layers(hydra)
    with torch.enable_grad():
        every_token = hydra(**inputs, output_hidden_states=True).member_logits
        torch.testing.assert_close(hydra(**inputs).member_logits, every_token, atol=1e-12, rtol=1e-10)


@torch.no_grad()
def test_a_layer_that_is_compiled_by_itself_is_called():
    hydra, graphs = vit_hydra(), []
    hydra.vit.layers[1].compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    hydra(**VIT.inputs())
    torch.compiler.reset()
    assert graphs


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
    model, pixel_values = MemberLogits(VIT.hydra.from_pruned_members(VIT.members())).eval(), images()
    expected = model(pixel_values)
    mapped = torch.func.vmap(lambda pixels: model(pixels[None])[0])(pixel_values)
    torch.testing.assert_close(mapped, expected, atol=1e-12, rtol=1e-10)
    traced = torch.jit.trace(model, (pixel_values[:2],), check_trace=False)
    torch.testing.assert_close(traced(pixel_values), expected, atol=1e-12, rtol=1e-10)


@torch.no_grad()
def test_a_compiled_layer_projects_q_k_and_v_at_once():
    hydra = VIT.hydra.from_pruned_members([vit_backbone(seed) for seed in range(3)])
    products = []

    def count(graph, inputs):
        products.extend(node for node in graph.graph.nodes if node.target in (torch.bmm, torch.baddbmm))
        return graph.forward

    compiled = torch.compile(hydra, fullgraph=True, backend=count)
    torch.testing.assert_close(compiled(images()).member_logits, hydra(images()).member_logits)
    torch.compiler.reset()
    # q, k, v and o of the second layer; q, then k and v, then o of the last one; o of the first; the classifier
    assert len(products) == 2 + 3 + 1 + 1
