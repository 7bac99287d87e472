"""The engine makes exactly the choices of Algorithm 1, and leaves the model alone."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from hydra_transformers.pruning import Circuit, extract_circuit, extraction, prune_heads, taylor_prune
from hydra_transformers.pruning.objectives import SampleValues, objective_scores
from tests.pruning.backbones import CLASSES, family, rows_in_batches, vit
from tests.pruning.reference import algorithm_1, judge, logits_of, output_projections, zero_slice


def extract(model, id_batches, ood_batches=None, objective="avg", budget=3, prompts=None, **settings) -> Circuit:
    settings |= {"class_prompts": prompts}
    return extract_circuit(model, id_batches, ood_batches, objective, budget=budget, **settings)


def check_against_algorithm_1(model, id_batches, ood_batches, prompts, objective="avg", budget=3, **settings):
    """The circuit, compared with the reference; `settings` are of both."""
    ranking, scores = algorithm_1(model, id_batches, ood_batches, objective, budget, prompts, **settings)
    circuit = extract(model, id_batches, ood_batches, objective, budget, prompts, **settings)
    assert circuit.ranking == ranking
    assert circuit.scores == pytest.approx(scores, abs=1e-11)
    return circuit


# The objective decides how logits are scored and the family how they are computed: "avg" uses both scores, so the other
# two are tested with three families. So is a third removal, and with "avg" a short last batch. Of the other families, those
# whose attention or way through the layers differs.
SPECIAL = ("albert", "mpnet", "deberta-v2", "beit", "wavlm", "wav2vec2", "modernbert", "qwen2", "gemma3", "siglip")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "objective"),
    [(name, objective) for name in ("vit", "bert", "clip") for objective in ("acc", "ood", "avg")]
    + [(name, "avg") for name in SPECIAL],
)
def test_the_ranking_is_that_of_algorithm_1(name, objective):
    is_other = name in SPECIAL
    batch = 25 if is_other or objective != "avg" else 13
    budget = 2 if is_other else 3
    model, id_batches, ood_batches, prompts = family(name, batch=batch)
    circuit = check_against_algorithm_1(model, id_batches, ood_batches, prompts, objective, budget)
    dense_score, _ = judge(model, id_batches, ood_batches, objective, prompts)
    assert circuit.dense_score == pytest.approx(dense_score, abs=1e-11)


@pytest.mark.parametrize(
    ("name", "settings", "competes"),
    [
        ("clip", {"towers": ("vision",)}, lambda head: head[0] == "vision"),
        ("clip", {"towers": ("text",)}, lambda head: head[0] == "text"),
        ("clip", {"trunk_layers": 1}, lambda head: head[-2] >= 1),
        ("vit", {"trunk_layers": 1}, lambda head: head[-2] >= 1),
        ("vit", {"objective": "ood", "budget": 8}, lambda head: True),  # layers without heads do not stop it
    ],
)
def test_only_heads_of_the_named_tower_and_behind_the_trunk_compete(name, settings, competes):
    circuit = check_against_algorithm_1(*family(name, batch=25), **settings)
    assert all(map(competes, circuit.ranking))
    assert circuit.made_from["trunk_layers"] == settings.get("trunk_layers")


def test_a_pruned_hydra_goes_on_from_the_heads_it_has():
    model, id_batches, ood_batches, _ = family("bert", batch=25)
    zeroed = copy.deepcopy(model)
    for head in ((0, 1), (2, 0), (2, 2)):
        zero_slice(zeroed, head)
    ranking, _ = algorithm_1(zeroed, id_batches, ood_batches, "avg", 4)
    # The reference also tries the zeroed heads again, which changes nothing; the pruned model does not have them.
    expected = [head for head in ranking if head not in ((0, 1), (2, 0), (2, 2))][:1]
    circuit = extract(prune_heads(model, {0: [1], 2: [0, 2]}), id_batches, ood_batches, budget=1)
    assert circuit.ranking == expected
    assert circuit.dense_score == pytest.approx(judge(zeroed, id_batches, ood_batches, "avg")[0], abs=1e-11)


def test_the_score_is_what_the_pruned_model_scores():
    model, id_batches, _, _ = family("vit")
    circuit = extract(model, id_batches, objective="acc")
    pruned = prune_heads(model, circuit.heads_to_prune(2))
    assert judge(pruned, id_batches, None, "acc")[0] == pytest.approx(circuit.scores[1], abs=1e-11)


def test_candidates_and_prompts_that_run_together_do_not_change_the_circuit(monkeypatch):
    model, id_batches, ood_batches, prompts = family("clip")
    expected = extract(model, id_batches, ood_batches, prompts=prompts)
    for memory_gib in (1e-9, 1.0):
        monkeypatch.setattr(extraction, "CPU_MEMORY_GIB", memory_gib)
        assert extract(model, id_batches, ood_batches, prompts=prompts) == expected
    monkeypatch.setattr("hydra_transformers.pruning.ablation.PROMPTS_PER_PASS", 2)
    assert extract(model, id_batches, ood_batches, prompts=prompts) == expected


def test_batches_loaders_backends_and_what_an_objective_does_not_need_do_not_matter():
    def never():
        raise AssertionError("the OOD data was read")
        yield

    model, id_batches, ood_batches, _ = family("vit")
    expected = extract(model, id_batches, ood_batches)
    assert extract(model, iter(id_batches), iter(ood_batches)) == expected, "data is read once"
    whole = [{key: torch.cat([batch[key] for batch in data]) for key in data[0]} for data in (id_batches, ood_batches)]
    assert extract(model, *(rows_in_batches(data, 11) for data in whole)) == expected
    rows = [dict(zip(whole[0], row, strict=True)) for row in zip(*whole[0].values(), strict=True)]
    assert extract(model, DataLoader(rows, batch_size=8), ood_batches) == expected
    unlabelled = [{"pixel_values": batch["pixel_values"]} for batch in id_batches]
    assert extract(model, unlabelled, ood_batches, "ood") == extract(model, id_batches, ood_batches, "ood")
    assert extract(model, id_batches, never(), "acc") == extract(model, id_batches, None, "acc")
    model.set_attn_implementation("eager")
    assert extract(model, id_batches, ood_batches).ranking == expected.ranking


def test_float32_gives_the_ranking_of_algorithm_1_and_bfloat16_is_evaluated_in_bfloat16():
    model, id_batches, ood_batches, _ = family("vit", torch.float32)
    ranking, _ = algorithm_1(model, id_batches, ood_batches, "avg", 3)
    wide = extract(model, id_batches, ood_batches)
    assert wide.ranking == ranking
    circuit = extract(model.bfloat16(), id_batches, ood_batches, budget=1)
    assert circuit.made_from["dtype"] == "bfloat16"
    # One flipped prediction is 0.02 of the score.
    assert circuit.dense_score == pytest.approx(wide.dense_score, abs=0.05)


@pytest.mark.parametrize("name", ["vit", "clip"])
@pytest.mark.parametrize("method", ["circuit", "taylor"])
def test_the_model_is_unchanged_bit_for_bit(name, method):
    model, id_batches, ood_batches, prompts = family(name)
    model.train()
    first, second, *others = model.parameters()
    first.grad = torch.ones_like(first)
    second.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    backend = model.config._attn_implementation
    if method == "circuit":
        extract(model, id_batches, ood_batches, budget=2, prompts=prompts)
    else:
        taylor_prune(model, id_batches, heads_per_layer=1, class_prompts=prompts)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first)) and first.requires_grad and not second.requires_grad
    assert all(parameter.requires_grad and parameter.grad is None for parameter in others)
    assert all(module.training for module in model.modules()) and model.config._attn_implementation == backend


# Ties


def saturated(name):
    """A family with six samples of either kind, on which no head's removal changes a prediction or the order of confidence."""
    model, id_batches, _, prompts = family(name, samples=60, batch=60)
    with torch.no_grad():
        for projection in output_projections(model).values():
            projection.weight *= 0.01  # heads that change little
    logits = logits_of(model, id_batches, prompts)
    by_confidence = logits.softmax(-1).amax(-1).argsort()
    known, unknown = (
        {key: value[rows] for key, value in id_batches[0].items()} for rows in (by_confidence[-6:], by_confidence[:6])
    )
    del unknown["labels"]
    wrong = torch.arange(6) % 3 == 0
    known["labels"] = (logits.argmax(-1)[by_confidence[-6:]] + wrong) % CLASSES
    return model, [known], [unknown], prompts


@pytest.mark.parametrize(
    ("name", "objective"), [("vit", "acc"), ("vit", "ood"), ("vit", "avg"), ("bert", "avg"), ("clip", "avg")]
)
def test_where_scores_tie_the_margin_decides_as_in_algorithm_1(name, objective):
    circuit = check_against_algorithm_1(*saturated(name), objective)
    assert min(circuit.tied) > 1, "a score without ties tests nothing here"


def test_three_saturated_objectives_give_three_members():
    model, id_batches, ood_batches, _ = saturated("bert")
    circuits = [extract(model, id_batches, ood_batches, objective, 4) for objective in ("acc", "ood", "avg")]
    assert min(min(circuit.tied) for circuit in circuits) > 1
    assert len({frozenset(circuit.ranking) for circuit in circuits}) == 3


def test_ties_go_to_the_lower_layer_and_head_and_to_the_vision_tower():
    model = vit()
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([1.0, 0, 0, 0, 0]))
    batch = {"pixel_values": torch.zeros(4, 3, 8, 8, dtype=torch.float64), "labels": torch.zeros(4, dtype=torch.long)}
    with pytest.warns(UserWarning, match="all 4 samples of data are of class 0"):
        circuit = extract(model, [batch], objective="acc", budget=4)
    assert circuit.ranking == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert circuit.scores == [1.0] * 4
    assert circuit.tied == [9, 8, 7, 6]

    model, id_batches, _, prompts = family("clip")
    with torch.no_grad():
        model.visual_projection.weight.zero_()
    circuit = extract(model, id_batches, objective="acc", budget=5, prompts=prompts)
    assert circuit.ranking[:4] == [("vision", 0, 0), ("vision", 0, 1), ("vision", 1, 0), ("vision", 1, 1)]
    assert circuit.ranking[4] == ("text", 0, 0)


def test_equal_scores_are_equal_to_the_last_digit():
    """5/13 + 60/117 = 6/13 + 51/117, and 1.864 - 1.845 = 1.881 - 1.862: sums of floats differ."""
    correct = torch.arange(13) < torch.tensor([[5], [6]])
    known = torch.tensor([[1.864] * 13, [1.881] * 13], dtype=torch.float64)
    unknown = torch.tensor([[1.845] * 9, [1.862] * 9], dtype=torch.float64)
    first, second = objective_scores("ood", SampleValues(known), SampleValues(unknown))
    assert first == second == (1.0, 0.019)
    # Of 117 pairs, 60 are in order for the first and 51 for the second.
    known = torch.arange(13.0).expand(2, 13)
    unknown = torch.tensor([[-1.0] * 4 + [4.5] + [20.0] * 4, [-1.0] * 3 + [0.5] + [20.0] * 5])
    scores = objective_scores("avg", SampleValues(known, correct, torch.zeros(2, 13)), SampleValues(unknown))
    assert scores[0].value == scores[1].value == 105 / 234


# The result


CIRCUIT = Circuit([(2, 1), (0, 3)], [0.9, 0.8], 1.0, "acc", checks=[(2, True)], tied=[1, 4])


def test_a_saved_circuit_is_the_circuit_also_without_a_count_of_ties(tmp_path):
    model, id_batches, ood_batches, prompts = family("clip")
    circuit = extract(model, id_batches, ood_batches, prompts=prompts, mode="shortlist")
    circuit.save(tmp_path / "folder" / "circuit.json")
    assert Circuit.load(tmp_path / "folder" / "circuit.json") == circuit
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["circuit.json"]
    fields = CIRCUIT.to_dict()
    del fields["tied"]
    older = Circuit.from_dict(fields)
    assert older.tied is None and older.first(1).tied is None and older.ranking == CIRCUIT.ranking


def test_heads_to_prune_are_the_first_of_the_ranking_and_the_best_budget_removes_what_costs_nothing():
    circuit = Circuit([(2, 1), (0, 3), (2, 0)], [0.9, 0.8, 0.7], 1.0, "acc")
    assert circuit.heads_to_prune(2) == {0: [3], 2: [1]}
    assert circuit.heads_to_prune() == {0: [3], 2: [0, 1]}
    clip_circuit = Circuit([("text", 0, 1), ("vision", 1, 0)], [0.9, 0.8], 1.0, "acc")
    assert clip_circuit.heads_to_prune() == {"vision": {1: [0]}, "text": {0: [1]}}
    for scores, best in (([0.9, 1.2, 1.1], 2), ([1.1, 0.9, 1.1], 3), ([1.0, 0.9, 0.8], 1), ([0.9, 0.8, 0.7], 0)):
        assert replace(circuit, scores=scores).best_budget == best


NO_HEADS = "its ranking is not a list of different heads"
NO_SCORES = "its scores are not one number for each of its 2"


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        ("{}", "its fields are others, 'ranking'"),
        ("[1, 2]", "its fields are others"),
        ("[" * 100_000, "nested too deep"),
        ("{", "Expecting"),
        *(({"ranking": [[2, 1], other]}, NO_HEADS) for other in ([2, 1], [-1, 0], ["vision", 0, 3], [0, 1.5], [0])),
        ({"ranking": [["vision", 2, 1], ["audio", 0, 3]]}, NO_HEADS),
        ({"ranking": [2, 1]}, "its fields are others"),
        *(({"scores": scores}, NO_SCORES) for scores in ([0.9], [0.9, "0.8"])),
        ({"scores": [0.9, float("nan")]}, "its scores are not finite"),
        ({"dense_score": None}, NO_SCORES),
        ({"tied": [1]}, "its tied is not one count for each of its 2 heads"),
        ({"objective": "f1", "mode": "fast"}, "its objective is 'f1', its mode 'fast'"),
        ({"author": "me"}, "its fields are others, .*author"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_anything_but_a_circuit_is_refused_with_the_reason(content, flaw, tmp_path):
    text = json.dumps(CIRCUIT.to_dict() | content) if isinstance(content, dict) else content
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=rf"other\.json is not a circuit \(.*{flaw}.*\): pass a file that Circuit"):
        Circuit.load(tmp_path / "other.json")
