"""Heads that are turned off for a while: the model answers as if they were cut out, and is then as it was."""

import pytest
import torch

from hydra_transformers.pruning import ablated, prune_heads
from tests.families import ALBERT, BERT, CLIP, DEBERTA_V2, LLAMA, MODERNBERT, VIT, WHISPER, Family, each_of


HEADS = {0: [1], 2: [0, 3], 1: [0, 1, 2, 3]}


def heads_for(family: Family) -> dict:
    return {"vision": HEADS, "text": {2: [2]}} if family.has_towers else HEADS


def logits(family: Family, model) -> torch.Tensor:
    with torch.no_grad():
        return family.logits(model, **family.inputs())


@each_of([VIT, BERT, CLIP, ALBERT, DEBERTA_V2, LLAMA, MODERNBERT, WHISPER])
def test_an_ablated_model_answers_as_one_with_zeroed_slices_and_as_a_pruned_one(family):
    model = family.backbone()
    heads = heads_for(family)
    before = logits(family, model)
    expected = logits(family, family.ablate(model, heads))
    assert (expected - before).abs().max() > 1e-3
    with ablated(model, heads) as same:
        assert same is model
        assert torch.equal(logits(family, model), expected)
    assert torch.equal(logits(family, model), before)
    hydra = family.hydra.from_backbone(model)
    with ablated(hydra, heads), torch.no_grad():
        answers = family.ensemble_logits(hydra(**family.inputs()))
    pruned = prune_heads(model, heads)
    with torch.no_grad():
        torch.testing.assert_close(answers, family.ensemble_logits(pruned(**family.inputs())), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_backend_is_ablated_alike(backend):
    model = BERT.backbone().float()
    expected = logits(BERT, BERT.ablate(model, HEADS))
    model.set_attn_implementation(backend)
    with ablated(model, HEADS):
        torch.testing.assert_close(logits(BERT, model), expected, rtol=0, atol=1e-5)


def test_a_pruned_model_is_ablated_by_the_numbers_of_its_backbone():
    model = prune_heads(VIT.backbone(), {0: [0, 2]})
    with ablated(model, {0: [3]}):
        answers = logits(VIT, model)
    torch.testing.assert_close(answers, logits(VIT, prune_heads(model, {0: [3]})), rtol=0, atol=1e-12)


def test_blocks_can_be_nested_and_end_with_an_exception():
    model = VIT.backbone()
    before = logits(VIT, model)
    both = logits(VIT, VIT.ablate(model, {0: [1], 1: [2]}))
    with ablated(model, {0: [1]}):
        one = logits(VIT, model)
        with pytest.raises(RuntimeError, match="stop"), ablated(model, {0: [1], 1: [2]}):
            assert torch.equal(logits(VIT, model), both)
            raise RuntimeError("stop")
        assert torch.equal(logits(VIT, model), one)
    assert torch.equal(logits(VIT, model), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_gradients_are_those_of_the_ablated_model_and_none_reach_the_heads():
    model = VIT.backbone()
    with ablated(model, {0: [1]}):
        VIT.logits(model, **VIT.inputs()).sum().backward()
    reference = VIT.ablate(VIT.backbone(), {0: [1]})
    VIT.logits(reference, **VIT.inputs()).sum().backward()
    values = model.vit.layers[0].attention.v_proj.weight.grad
    assert torch.equal(values, reference.vit.layers[0].attention.v_proj.weight.grad)
    assert values[8:16].abs().max() == 0 and values[:8].abs().max() > 0
