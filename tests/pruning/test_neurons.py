"""Neurons of the MLPs: cut out exactly, scored by their definitions, saved, fused and exported."""

import copy
import inspect

import pytest
import torch
from torch import nn

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import soup
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.hub import kept_heads_map
from hydra_transformers.models.configuration_hydra import mask_of_neurons, neurons_in
from hydra_transformers.pruning import (
    NEURON_SCORES,
    lowest_neurons,
    neuron_scores,
    prune_heads,
    prune_neurons,
    to_transformers,
)
from tests.families import BERT, CLIP, DINOV2_GATED, FAMILIES, VIT, Family
from tests.pruning.backbones import family as with_data
from tests.pruning.test_head_scores import losses_of


NEURONS = {0: [1, 5, 39], 2: list(range(20))}


def neurons_for(family: Family) -> dict:
    return {"vision": NEURONS, "text": {1: [3]}} if family.has_towers else NEURONS


def own_logits(family: Family, hydra) -> torch.Tensor:
    with torch.no_grad():
        outputs = hydra(**family.inputs())
    return outputs.similarity if family.has_towers else outputs.member_logits[:, 0]


def zeroed(hydra, neurons: dict):
    """The same one-member Hydra with the neurons' columns of the second map zeroed."""
    hydra = copy.deepcopy(hydra)
    layers = hydra.base_model.layers
    for layer, of_layer in neurons.items():
        layers[layer].mlp.fc2.weight.data[:, of_layer] = 0
    return hydra


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_model_without_neurons_answers_as_one_whose_second_maps_do_not_read_them(family):
    neurons, whole = neurons_for(family), prune_heads(family.backbone())
    pruned = prune_neurons(family.backbone(), neurons)
    if family.has_towers:
        expected = copy.deepcopy(whole)
        expected.vision_model = zeroed(whole.vision_model, neurons["vision"])
        expected.text_model = zeroed(whole.text_model, neurons["text"])
    else:
        expected = zeroed(whole, neurons)
        assert [layer.mlp.fc2.in_features for layer in pruned.base_model.layers][1:] == [
            whole.base_model.layers[1].mlp.fc2.in_features,
            whole.base_model.layers[2].mlp.fc2.in_features - 20,
        ]
    torch.testing.assert_close(own_logits(family, pruned), own_logits(family, expected), rtol=0, atol=1e-10)
    assert pruned.num_parameters() < whole.num_parameters()


def test_a_model_without_neurons_computes_less():
    whole, pruned = prune_heads(VIT.backbone()), prune_neurons(VIT.backbone(), NEURONS)
    # of 5 tokens in the first layer, and of the [CLS] token in the last, two products of 32 numbers for each neuron
    assert count_multiply_adds(whole) - count_multiply_adds(pruned) == 2 * 32 * (5 * 3 + 1 * 20)


def test_heads_and_neurons_go_in_any_order_and_keep_their_numbers():
    both = prune_neurons(prune_heads(VIT.backbone(), {0: [1]}), NEURONS)
    other = prune_heads(prune_neurons(VIT.backbone(), NEURONS), {0: [1]})
    assert torch.equal(own_logits(VIT, both), own_logits(VIT, other))
    again = prune_neurons(prune_neurons(VIT.backbone(), {0: [1]}), {0: [5, 39], 2: list(range(20))})
    assert again.config.kept_neurons == both.config.kept_neurons
    with pytest.raises(ValueError, match=r"neurons_to_prune\[0\] names neuron 5: the model has the neurons \[0, 2"):
        prune_neurons(both, {0: [5]})


def test_a_saved_model_loads_as_it_was(tmp_path):
    pruned = prune_neurons(VIT.backbone(), NEURONS)
    pruned.save_pretrained(tmp_path)
    loaded = type(pruned).from_pretrained(tmp_path)
    assert loaded.config.kept_neurons == pruned.config.kept_neurons
    assert torch.equal(own_logits(VIT, loaded), own_logits(VIT, pruned))


def member_logits(family: Family, hydra, members: range) -> torch.Tensor:
    with torch.no_grad():
        return hydra(**family.inputs()).member_logits[:, list(members)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fast"), [(VIT, True), (VIT, False), (CLIP, True)])
def test_members_that_differ_in_neurons_are_fused_and_taken_apart(family, fast, tmp_path):
    last = {layer: list(range(7)) for layer in range(3)}
    neurons = [neurons_for(family), family.in_every_tower(last)]
    members = [prune_neurons(family.backbone(seed), each) for seed, each in enumerate(neurons)]
    members.append(prune_heads(family.backbone(2), family.heads_to_prune[0]))
    hydra = AutoHydra.from_pruned_members(members, shared=())
    hydra.config.fast_inference = fast
    for place, member in enumerate(members):
        expected = member_logits(family, member, range(1))
        found = member_logits(family, hydra, range(place, place + 1))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        apart = hydra.member(place)
        torch.testing.assert_close(member_logits(family, apart, range(1)), expected, rtol=0, atol=1e-10)
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path)
    assert torch.equal(member_logits(family, loaded, range(3)), member_logits(family, hydra, range(3)))


def test_members_share_mlps_only_where_they_keep_the_same_neurons():
    one, two = prune_neurons(VIT.backbone(0), {1: [3]}), prune_neurons(VIT.backbone(1), {1: [4]})
    with pytest.raises(
        ValueError, match="members keep different neurons in layer 1 and share their MLPs: pass shared"
    ):
        AutoHydra.from_pruned_members([one, two])
    same = AutoHydra.from_pruned_members([one, prune_neurons(VIT.backbone(1), {1: [3]})])
    assert same.base_model.layers[1].mlp.fc1.out_features == 39
    with pytest.raises(ValueError, match="members keep different neurons in layer 1 and run this layer once"):
        AutoHydra.from_pruned_members([one, two], shared=("embeddings", "layernorm"), trunk_layers=2)
    assert AutoHydra.from_pruned_members([one, one], allow_equal=True).config.trunk_layers == 3


def test_a_mean_of_mlps_with_different_neurons_is_refused():
    members = [prune_neurons(VIT.backbone(seed), {1: [seed]}) for seed in range(2)]
    with pytest.raises(ValueError, match="models keep different neurons, so their MLPs have no mean"):
        soup(members)


def test_the_map_of_heads_counts_the_neurons():
    assert kept_heads_map(prune_neurons(VIT.backbone(), NEURONS).config).endswith(
        "MLP neurons kept of 120: member 0 97"
    )
    assert "neurons" not in kept_heads_map(prune_heads(VIT.backbone()).config)


def test_members_never_mix_where_their_neurons_differ():
    members = [prune_neurons(VIT.backbone(seed), {1: [seed]}) for seed in range(2)]
    hydra = AutoHydra.from_pruned_members(members, shared=())
    hydra(**VIT.inputs()).member_logits[:, 0].sum().backward()
    first, second = hydra.base_model.layers[1].mlp
    assert second.fc1.weight.grad is None or second.fc1.weight.grad.abs().max() == 0
    assert first.fc1.weight.grad.abs().max() > 0


def test_michel_of_a_neuron_is_the_mean_size_of_each_samples_derivative():
    model, batches, _, _ = with_data("vit")
    scores = neuron_scores(model, batches)
    assert len(scores) == 3 * 32
    for layer, neuron in ((0, 3), (2, 31)):
        changed = []
        for gate in (1 + 1e-5, 1 - 1e-5):
            scaled = copy.deepcopy(model)
            scaled.vit.layers[layer].mlp.fc2.weight.data[:, neuron] *= gate
            changed.append(losses_of(scaled, batches, None))
        expected = ((changed[0] - changed[1]) / 2e-5).abs().mean().item()
        assert scores[(layer, neuron)] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_taylor_and_magnitude_of_a_neuron_are_those_of_its_weights():
    model, batches, _, _ = with_data("vit")
    taylor, magnitude = neuron_scores(model, batches, "taylor"), neuron_scores(model, method="magnitude")
    mlp = model.vit.layers[1].mlp
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    loss = nn.functional.cross_entropy(model(rows["pixel_values"]).logits, rows["labels"])
    [gradient] = torch.autograd.grad(loss, [mlp.fc1.weight])
    expected = (mlp.fc1.weight[7] * gradient[7]).abs().mean().item()
    assert taylor[(1, 7)] == pytest.approx(expected, rel=1e-9)
    weights = torch.cat([mlp.fc1.weight[7], mlp.fc2.weight[:, 7]])
    assert magnitude[(1, 7)] == pytest.approx(weights.norm().item(), rel=1e-9)


def test_a_gate_counts_with_the_neuron_it_gates():
    model = DINOV2_GATED.backbone()
    mlp = prune_heads(model).base_model.layers[0].mlp
    inner = mlp.fc2.in_features
    weights = torch.cat([mlp.fc1.weight[3], mlp.fc1.weight[inner + 3], mlp.fc2.weight[:, 3]])
    assert neuron_scores(model, method="magnitude")[(0, 3)] == pytest.approx(weights.norm().item(), rel=1e-9)


def test_every_method_scores_every_neuron_of_a_pruned_model():
    model, batches, _, prompts = with_data("clip")
    pruned = prune_neurons(model, {"vision": {0: [0, 2]}})
    expected = [("vision", 0, neuron) for neuron in range(32) if neuron not in (0, 2)]
    expected += [("vision", 1, neuron) for neuron in range(32)]
    for method, function in NEURON_SCORES.items():
        options = {"seed": 1} if "seed" in inspect.signature(function).parameters else {}
        assert list(neuron_scores(pruned, batches, method, class_prompts=prompts, **options)) == expected, method


def test_the_lowest_neurons_leave_one_in_each_layer():
    scores = {(0, 0): 1.0, (0, 1): 2.0, (1, 0): 9.0, (1, 4): 8.0}
    assert lowest_neurons(scores, 1) == {0: [0]}
    assert lowest_neurons(scores, 2) == {0: [0], 1: [4]}
    assert lowest_neurons(scores, neurons_per_layer=1) == {0: [0], 1: [4]}
    with pytest.raises(ValueError, match="budget is 3: 2 neurons can go"):
        lowest_neurons(scores, 3)
    with pytest.raises(ValueError, match=r"neurons_to_prune\[0\] names all neurons of the layer: leave at least one"):
        prune_neurons(VIT.backbone(), {0: range(40)})


@pytest.mark.parametrize("family", [VIT, CLIP, DINOV2_GATED], ids=lambda family: family.name)
def test_a_plain_model_takes_them_back_as_zeros(family):
    pruned = prune_neurons(prune_heads(family.backbone(), family.heads_to_prune[0]), neurons_for(family))
    plain = to_transformers(pruned, fill_up=True)
    with torch.no_grad():
        answers = family.logits(plain, **family.inputs())
    torch.testing.assert_close(answers, own_logits(family, pruned), rtol=0, atol=1e-10)


def test_equal_numbers_of_neurons_make_a_smaller_plain_model():
    scores = neuron_scores(BERT.backbone(), method="magnitude")
    pruned = prune_neurons(BERT.backbone(), lowest_neurons(scores, neurons_per_layer=24))
    plain = to_transformers(pruned)
    assert plain.config.intermediate_size == 24
    with torch.no_grad():
        torch.testing.assert_close(plain(**BERT.inputs()).logits, own_logits(BERT, pruned), rtol=0, atol=1e-10)
    with pytest.raises(
        ValueError, match=r"the layers keep 37, 40, 20 neurons, and those of a plain Bert.* equally many"
    ):
        to_transformers(prune_neurons(BERT.backbone(), NEURONS))
    equal = {layer: [0] for layer in range(3)}
    with pytest.raises(ValueError, match="cannot have 47 of its 48 neurons: its config has no intermediate_size"):
        to_transformers(prune_neurons(DINOV2_GATED.backbone(), equal))


def test_a_config_that_no_model_has_is_refused():
    config = prune_heads(VIT.backbone()).config
    for kept_neurons, problem in (
        ([["ff"]], "kept_neurons is not a list of 1 for each of 3 layers"),
        ([["0"]] * 3, r"kept_neurons\[0\]\[0\] is '0': give a hexadecimal number above 0"),
        ([["ff"], ["xy"], ["1"]], r"kept_neurons\[1\]\[0\] is 'xy'"),
        ([["1" + "0" * 10]] * 3, "names neuron 40: the backbone has neurons 0 to 39"),
    ):
        with pytest.raises(ValueError, match=problem):
            type(config)(**config.to_dict() | {"kept_neurons": kept_neurons})


def test_a_mask_is_its_neurons():
    assert neurons_in(mask_of_neurons([0, 3, 40])) == [0, 3, 40]
    assert mask_of_neurons([0, 1, 2, 3]) == "f"
