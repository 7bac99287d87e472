"""Dropout in training: where the backbone has it, as often, and drawn anew for each member."""

import copy

import pytest
import torch
from torch import nn

from tests.families import BERT, ELECTRA, VIT, Family, each_of


P = 0.5


def with_every_dropout(family: Family, **others: float) -> nn.Module:
    """A backbone each of whose fields of dropout says something else."""
    backbone = family.backbone()
    config = copy.deepcopy(backbone.config)
    found = 0
    config.dtype = None
    towers = [getattr(config, name) for name in ("vision_config", "text_config") if hasattr(config, name)]
    for each in (config, *towers):
        # But for layers that are left out as a whole: then there are fewer dropouts.
        fields = [name for name in vars(each) if "drop" in name and "layerdrop" not in name and name not in others]
        # A field that BERT reads and others do not, though their configs take any.
        for name in sorted({*fields, "classifier_dropout"}):
            found += 1
            setattr(each, name, 0.2 + found / 100)
        for name, value in others.items():
            setattr(each, name, value)
    built = type(backbone)(config).double()
    built.load_state_dict(backbone.state_dict())
    built.set_attn_implementation("eager")
    return built.train()


def one_member(family: Family, backbone: nn.Module) -> nn.Module:
    hydra = family.hydra.from_backbone(backbone)
    hydra.set_attn_implementation("eager")
    return hydra.train()


@torch.no_grad()
def test_dropouts_sit_where_those_of_the_backbone_do(family, monkeypatch):
    """Each in turn gives zeros, and the others what they get: logits tell where it is."""
    backbone = with_every_dropout(family, drop_path_rate=0.0)
    hydra = one_member(family, backbone)
    inputs = family.inputs()

    def zeroed(model: nn.Module) -> list[tuple[float, torch.Tensor]]:
        """For each dropout, how often it drops, and the logits without what it passes on."""
        probabilities = []
        found = []

        def dropout(
            states: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> torch.Tensor:
            assert training
            if p == 0:
                return states
            probabilities.append(p)
            return torch.zeros_like(states) if len(probabilities) - 1 == len(found) else states

        monkeypatch.setattr(nn.functional, "dropout", dropout)
        while not found or len(found) < len(probabilities):
            probabilities.clear()
            outputs = model(**inputs)
            logits = outputs.member_logits[:, 0] if model is hydra else family.ensemble_logits(outputs)
            found.append((probabilities[len(found)], logits))
        return found

    theirs = zeroed(backbone)
    ours = zeroed(hydra)
    assert [p for p, _ in ours] == [p for p, _ in theirs]
    for (_, found), (_, expected) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


FAMILIES = each_of([VIT, BERT])
# One more that maps its embeddings to another width after it has dropped from them.
AND_PROJECTED = each_of([VIT, BERT, ELECTRA])


def fused(family, p: float, members: int = 3):
    backbone = family.backbone(hidden_dropout_prob=p, attention_probs_dropout_prob=0.0)
    pruned = [family.hydra.from_backbone(backbone, heads) for heads in family.heads_to_prune[:members]]
    return family.hydra.from_pruned_members(pruned, allow_equal=True)


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
@pytest.mark.parametrize(("p", "training"), [(P, False), (0.0, True), (0.0, False)])
def test_without_dropout_there_is_one_state_for_all_members(family, p, training):
    inputs = family.inputs()
    hydra = fused(family, p).train(training)
    assert len(first_states(hydra, inputs)) == 1
    expected = fused(family, 0.0).eval()(**inputs).member_logits
    torch.testing.assert_close(hydra(**inputs).member_logits, expected)
