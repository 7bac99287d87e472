"""Taylor scores are |W · G| of the whole calibration set; pruning leaves the model alone."""

import copy
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from hydra_transformers._io import progress
from hydra_transformers.pruning import prune_heads, taylor_prune, taylor_scores
from tests.pruning.backbones import family, rows_in_batches
from tests.pruning.reference import output_projections


NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("Wqkv",),
)


def projections(model, layer) -> list[torch.nn.Linear]:
    """q, k and v of a layer, by (layer,) or (tower, layer); one map where they are one."""
    output = output_projections(model)[layer]
    block = next(
        module
        for name, module in model.named_modules()
        if re.fullmatch(rf".*layer(s|_groups)?\.{layer[-1]}", name)
        and any(each is output for each in module.modules())
    )
    found = [(name.rpartition(".")[2], module) for name, module in block.named_modules()]
    return next([dict(found)[name] for name in names] for names in NAMES if all(name in dict(found) for name in names))


def hand_written_score(model, batches, prompts, layer, head, head_dim=8) -> float:
    """One forward over all rows at once, then equation by equation."""
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    labels = rows.pop("labels")
    output = model(**rows, **(prompts or {}))
    logits = output.logits if prompts is None else output.logits_per_image
    log_probabilities = logits - logits.exp().sum(dim=-1, keepdim=True).log()
    loss = -sum(log_probabilities[row, label] for row, label in enumerate(labels)) / len(labels)
    weights = [projection.weight for projection in projections(model, layer)]
    gradients = torch.autograd.grad(loss, weights)
    if len(weights) == 1:
        weights, gradients = (joint.chunk(3) for [joint] in (weights, gradients))
    means = []
    for weight, gradient in zip(weights, gradients, strict=True):
        # Where heads share keys and values, a head counts the rows that it reads.
        readers = len(weights[0]) // len(weight)
        rows_of_head = range(head // readers * head_dim, (head // readers + 1) * head_dim)
        total = sum((weight[row] * gradient[row]).abs().sum().item() for row in rows_of_head)
        means.append(total / (head_dim * weight.shape[1]))
    return sum(means) / 3


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("vit", [(0, 0), (1, 2), (2, 1)]),
        ("bert", [(0, 1), (1, 0), (2, 2)]),
        ("clip", [("vision", 0, 1), ("vision", 1, 0), ("text", 0, 0), ("text", 1, 1)]),
        *((name, [(0, 3), (1, 0), (2, 2)]) for name in ("deberta-v2", "distilbert", "modernbert", "qwen2", "wavlm")),
        ("siglip", [("vision", 0, 3), ("text", 2, 2)]),
    ],
)
def test_scores_are_those_of_a_hand_written_computation(name, heads):
    model, batches, _, prompts = family(name)
    towers = None if prompts is None else ("vision", "text")
    scores = taylor_scores(model, batches, class_prompts=prompts, towers=towers)
    assert len(scores) == {"vit": 9, "bert": 9, "clip": 8}.get(name, 12 if prompts is None else 24)
    for head in heads:
        expected = hand_written_score(model, batches, prompts, head[:-1], head[-1])
        assert scores[head] == pytest.approx(expected, rel=1e-9)


def test_clip_prunes_its_vision_tower_by_default():
    model, batches, _, prompts = family("clip")
    assert {head[0] for head in taylor_scores(model, batches, class_prompts=prompts)} == {"vision"}
    pruning = taylor_prune(model, batches, heads_per_layer=1, class_prompts=prompts)
    assert list(pruning.heads_to_prune) == ["vision"]
    assert prune_heads(model, pruning.heads_to_prune).config.kept_heads["text"] == [[[0, 1]], [[0, 1]]]


def test_layers_are_pruned_one_after_the_other_with_fresh_scores():
    model, batches, _, _ = family("vit")
    pruned = {}
    scores = {}
    for layer in range(3):
        so_far = taylor_scores(prune_heads(model, pruned), batches)
        of_layer = {head: score for head, score in so_far.items() if head[0] == layer}
        scores |= of_layer
        pruned[layer] = sorted(head for _, head in sorted(of_layer, key=of_layer.get)[:1])
    pruning = taylor_prune(model, batches, heads_per_layer=2)
    assert pruning.heads_to_prune == pruned
    assert pruning.scores == pytest.approx(scores, rel=1e-9)
    dense = taylor_scores(model, batches)
    assert pruning.scores[(0, 0)] == pytest.approx(dense[(0, 0)], rel=1e-9)
    assert pruning.scores[(2, 0)] != pytest.approx(dense[(2, 0)], rel=1e-6), "the scores are the old ones"


def test_the_global_scope_prunes_the_lowest_scores_of_the_whole_model_and_a_trunk_keeps_its_heads():
    model, batches, _, _ = family("vit")
    scores = taylor_scores(model, batches)
    pruning = taylor_prune(model, batches, heads_per_layer=2, scope="global")
    lowest = sorted(scores, key=scores.get)[:3]
    assert {(layer, head) for layer, heads in pruning.heads_to_prune.items() for head in heads} == set(lowest)
    assert pruning.scores == scores
    together = taylor_prune(model, batches, heads_per_layer=1, scope="global", trunk_layers=1)
    assert {layer for layer, _ in together.scores} == {1, 2}
    assert sum(map(len, together.heads_to_prune.values())) == 4
    by_layer = taylor_prune(model, batches, heads_per_layer=1, trunk_layers=1)
    assert sorted(by_layer.heads_to_prune) == [1, 2]
    assert all(by_layer.scores[1, head] == pytest.approx(scores[1, head], rel=1e-9) for head in range(3))


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_a_log_says_how_many_gradients_are_left(name, capsys, monkeypatch):
    """Each look at the clock is six seconds later."""
    seconds = itertools.count(step=6)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    model, batches, _, prompts = family(name)
    layers = model.config.vision_config.num_hidden_layers if prompts else model.config.num_hidden_layers
    taylor_scores(model, batches, class_prompts=prompts)
    assert f"Taylor scores: {len(batches)} gradients in " in capsys.readouterr().err
    taylor_prune(model, batches, heads_per_layer=1, class_prompts=prompts)
    count = layers * len(batches)
    lines = capsys.readouterr().err
    assert re.search(rf"^Taylor scores: 2 of {count} gradients, ", lines, re.M)
    assert re.search(rf"^Taylor scores: {count} gradients in ", lines, re.M)


def test_layers_with_no_more_heads_than_asked_for_lose_none():
    model, batches, _, _ = family("vit")
    assert taylor_prune(model, batches, heads_per_layer=3).heads_to_prune == {}
    hydra = prune_heads(model, {0: [0, 2], 1: [0, 1, 2]})
    pruning = taylor_prune(hydra, batches, heads_per_layer=2)
    assert list(pruning.heads_to_prune) == [2] and len(pruning.heads_to_prune[2]) == 1


def test_neither_the_batch_size_nor_half_precision_matters():
    model, batches, _, _ = family("vit", torch.float32)
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    expected = taylor_scores(model, batches)
    for size in (4, 25):
        assert taylor_scores(model, rows_in_batches(rows, size)) == pytest.approx(expected, rel=1e-4)
    rounded = copy.deepcopy(model).bfloat16()
    assert taylor_scores(rounded, batches) == pytest.approx(taylor_scores(rounded.float(), batches), rel=1e-4)
