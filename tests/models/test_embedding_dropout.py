"""Members share their embeddings, and each drops from them for itself."""

import pytest
import torch
from torch import nn

from tests.families import BERT, ELECTRA, VIT


P = 0.5
FAMILIES = pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
# One more that maps its embeddings to another width after it has dropped from them.
AND_PROJECTED = pytest.mark.parametrize("family", [VIT, BERT, ELECTRA], ids=lambda family: family.name)


def fused(family, p: float, members: int = 3):
    backbone = family.backbone(hidden_dropout_prob=p, attention_probs_dropout_prob=0.0)
    pruned = [family.hydra.from_backbone(backbone, heads) for heads in family.heads_to_prune[:members]]
    return family.hydra.from_pruned_members(pruned)


def first_states(hydra, inputs) -> torch.Tensor:
    """What the first layer gets: (members or 1, batch, tokens, hidden)."""
    seen = []
    handle = hydra.base_model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    torch.manual_seed(0)
    hydra(**inputs)
    handle.remove()
    [states] = seen
    return states


def count_embeddings(hydra) -> list:
    """Grows by one with every time that something is embedded."""
    calls = []
    for module in hydra.base_model.embeddings.children():
        if not isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_: calls.append(1))
            return calls
    raise AssertionError("embeddings without a part to watch")


@FAMILIES
def test_each_member_draws_a_mask_of_its_own(family):
    inputs = family.inputs()
    hydra = fused(family, P).train()
    calls = count_embeddings(hydra)
    states = first_states(hydra, inputs)
    assert len(states) == 3 and len(calls) == 1  # embedded once, dropped from three times
    embedded = first_states(fused(family, P).eval(), inputs)[0]
    masks = states != 0
    for member in range(3):
        torch.testing.assert_close(states[member], masks[member] * embedded / (1 - P))
        assert 0.4 < masks[member].double().mean() < 0.6
        # Masks drawn apart agree in half of their places.
        agreement = (masks[member] == masks[(member + 1) % 3]).double().mean()
        assert 0.4 < agreement < 0.6


@AND_PROJECTED
def test_the_gradient_of_shared_embeddings_is_the_sum_over_the_members(family):
    hydra = fused(family, P).train()
    states = first_states(hydra, family.inputs())
    [weight] = [
        parameter for name, parameter in hydra.named_parameters() if name.endswith("position_embeddings.weight")
    ] or [hydra.base_model.embeddings.position_embeddings]
    parts = [torch.autograd.grad(states[member].sum(), weight, retain_graph=True)[0] for member in range(3)]
    [whole] = torch.autograd.grad(states.sum(), weight)
    torch.testing.assert_close(whole, sum(parts))
    assert not torch.equal(parts[0], parts[1])


@AND_PROJECTED
@pytest.mark.parametrize(("p", "training"), [(P, False), (0.0, True), (0.0, False)])
def test_without_dropout_there_is_one_state_for_all_members(family, p, training):
    inputs = family.inputs()
    hydra = fused(family, p).train(training)
    assert len(first_states(hydra, inputs)) == 1
    expected = fused(family, 0.0).eval()(**inputs).member_logits
    torch.testing.assert_close(hydra(**inputs).member_logits, expected)


@FAMILIES
def test_a_member_alone_drops_as_plain_dropout_does(family):
    member = fused(family, P, members=1)
    embedded = first_states(member.eval(), family.inputs())
    states = first_states(member.train(), family.inputs())
    torch.manual_seed(0)
    torch.testing.assert_close(states, nn.functional.dropout(embedded, P), rtol=0, atol=0)


@AND_PROJECTED
def test_a_fused_hydra_with_dropout_is_saved_and_loaded(family, tmp_path):
    hydra = fused(family, P)
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path, dtype=hydra.dtype).train()
    assert len(first_states(loaded, family.inputs())) == 3
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**family.inputs()).logits, hydra.eval()(**family.inputs()).logits)
