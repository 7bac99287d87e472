"""Every score of heads is what its definition says, and all come by one interface."""

import copy
import inspect

import pytest
import torch
from torch import nn

from hydra_transformers.pruning import ablated, extract_circuit, head_scores, lowest_heads, prune_heads, taylor_scores
from hydra_transformers.pruning.scores import HEAD_SCORES
from tests.families import bert_backbone, padded_texts
from tests.pruning.backbones import family, rows_in_batches
from tests.pruning.reference import logits_of, output_projections, restore_slice, zero_slice


def losses_of(model, batches, prompts) -> torch.Tensor:
    labels = torch.cat([batch["labels"] for batch in batches])
    return nn.functional.cross_entropy(logits_of(model, batches, prompts), labels, reduction="none")


def losses_with_gate(model, head: tuple, gate: float, batches, prompts) -> torch.Tensor:
    """Of each sample, with the head's slice of the output projection times `gate`."""
    model = copy.deepcopy(model)
    output_projections(model)[head[:-1]].weight.data[:, 8 * head[-1] : 8 * head[-1] + 8] *= gate
    return losses_of(model, batches, prompts)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("vit", [(0, 0), (2, 1)]),
        ("bert", [(0, 1), (2, 2)]),
        ("clip", [("vision", 0, 1), ("vision", 1, 0), ("text", 0, 0), ("text", 1, 1)]),
    ],
)
def test_michel_is_the_mean_size_of_each_samples_derivative_in_a_gate(name, heads):
    model, batches, _, prompts = family(name)
    towers = ("vision", "text") if name == "clip" else None
    scores = head_scores(model, batches, "michel", class_prompts=prompts, towers=towers)
    step = 1e-5
    for head in heads:
        above, below = (losses_with_gate(model, head, 1 + sign * step, batches, prompts) for sign in (1, -1))
        expected = ((above - below) / (2 * step)).abs().mean().item()
        assert scores[head] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_leave_one_out_is_how_much_the_loss_rises_without_the_head(name):
    model, batches, _, prompts = family(name)
    scores = head_scores(model, batches, "leave_one_out", class_prompts=prompts)
    dense = losses_of(model, batches, prompts).mean()
    for head in list(scores)[::3]:
        before = zero_slice(model, head)
        without = losses_of(model, batches, prompts).mean()
        restore_slice(model, head, before)
        assert scores[head] == pytest.approx((without - dense).item(), rel=1e-6, abs=1e-9)


def test_leave_one_out_takes_a_metric_and_models_of_other_problems():
    model = bert_backbone(num_labels=1)
    rows = padded_texts(8)
    rows["labels"] = torch.arange(8).double()

    def negative_distance(logits, labels):
        return -(logits.squeeze(-1) - labels).abs().mean()

    for metric, error in ((None, torch.square), (negative_distance, torch.abs)):
        scores = head_scores(model, [rows], "leave_one_out", **({} if metric is None else {"metric": metric}))
        with torch.no_grad():
            inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
            dense = error(model(**inputs).logits[:, 0] - rows["labels"]).mean()
            with ablated(model, {1: [2]}):
                without = error(model(**inputs).logits[:, 0] - rows["labels"]).mean()
        assert scores[(1, 2)] == pytest.approx((without - dense).item(), rel=1e-5)


def test_a_circuit_scores_heads_by_when_they_go():
    model, batches, _, _ = family("vit")
    circuit = extract_circuit(model, batches, budget=4)
    scores = head_scores(model, batches, "circuit", budget=4)
    assert sorted(scores, key=scores.get)[:4] == circuit.ranking
    assert sorted(scores.values()) == [0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert lowest_heads(scores, 4) == circuit.heads_to_prune()


def test_random_scores_differ_by_seed_alone():
    model, _, _, _ = family("vit")
    first, again, other = (head_scores(model, method="random", seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first.keys() == other.keys()


@pytest.mark.slow
def test_every_method_has_a_score_for_every_head_and_changes_nothing():
    model, batches, _, prompts = family("clip")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    heads = [("vision", layer, head) for layer in (0, 1) for head in (0, 1)]
    for method, function in HEAD_SCORES.items():
        options = {"budget": 2} if "budget" in inspect.signature(function).parameters else {}
        scores = head_scores(model, batches, method, class_prompts=prompts, towers=("vision",), **options)
        assert list(scores) == heads, method
        if method == "taylor":
            assert scores == taylor_scores(model, batches, class_prompts=prompts)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_pruned_model_has_scores_for_the_heads_it_has():
    model, batches, _, _ = family("bert")
    pruned = prune_heads(model, {0: [0], 1: [0, 1, 2]})
    heads = [(0, 1), (0, 2), (2, 0), (2, 1), (2, 2)]
    for method in ("michel", "oba", "leave_one_out"):
        assert list(head_scores(pruned, batches, method)) == heads


def test_michel_does_not_depend_on_the_batches_and_normalized_has_the_norm_one_in_every_layer():
    model, batches, _, _ = family("vit")
    plain = head_scores(model, batches)
    scores = head_scores(model, batches, normalize=True)
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    assert head_scores(model, rows_in_batches(rows, 6)) == pytest.approx(plain, rel=1e-9)
    for layer in range(3):
        of_layer = torch.tensor([plain[(layer, head)] for head in range(3)])
        values = torch.tensor([scores[(layer, head)] for head in range(3)])
        torch.testing.assert_close(values, of_layer / of_layer.norm())


def test_the_lowest_heads_are_chosen_over_all_layers_or_in_each():
    scores = {(0, 0): 3.0, (0, 1): 0.5, (1, 0): 1.0, (1, 1): 1.0}
    assert lowest_heads(scores, 2) == {0: [1], 1: [0]}
    assert lowest_heads(scores, heads_per_layer=1) == {0: [1], 1: [0]}
    assert lowest_heads(scores, 0) == {} == lowest_heads(scores, heads_per_layer=2)
    assert lowest_heads({("vision", 0, 1): 1.0, ("text", 0, 0): 0.0}, 1) == {"text": {0: [0]}}
