"""The engine makes exactly the choices of Algorithm 1, and leaves the model alone."""

import copy

import pytest
import torch

from hydra_transformers.pruning import Circuit, extract_circuit, prune_heads
from tests.pruning.backbones import NAMES, family, rows_in_batches, vit
from tests.pruning.reference import algorithm_1, output_projections, score_of, zero_slice


@pytest.mark.parametrize("objective", ["acc", "ood", "avg"])
@pytest.mark.parametrize("name", NAMES)
def test_the_ranking_is_that_of_algorithm_1(name, objective):
    model, id_batches, ood_batches, prompts = family(name)
    ranking, scores = algorithm_1(model, id_batches, ood_batches, objective, 3, prompts)
    circuit = extract_circuit(
        model, id_batches, ood_batches, objective, budget=3, class_prompts=prompts, progress=False
    )
    assert circuit.ranking == ranking
    assert circuit.scores == pytest.approx(scores, abs=1e-11)
    assert circuit.dense_score == pytest.approx(
        score_of(model, id_batches, ood_batches, objective, prompts), abs=1e-11
    )


def test_float32_gives_the_ranking_of_algorithm_1():
    model, id_batches, ood_batches, _ = family("vit", torch.float32)
    ranking, _ = algorithm_1(model, id_batches, ood_batches, "avg", 3)
    assert extract_circuit(model, id_batches, ood_batches, "avg", budget=3, progress=False).ranking == ranking


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_only_heads_of_the_named_tower_compete(tower):
    model, id_batches, ood_batches, prompts = family("clip")
    ranking, _ = algorithm_1(model, id_batches, ood_batches, "avg", 3, prompts, towers=(tower,))
    circuit = extract_circuit(
        model, id_batches, ood_batches, "avg", budget=3, class_prompts=prompts, towers=(tower,), progress=False
    )
    assert circuit.ranking == ranking
    assert {head[0] for head in circuit.ranking} == {tower}


def test_layers_that_lost_every_head_are_no_obstacle():
    model, id_batches, ood_batches, _ = family("vit")
    ranking, _ = algorithm_1(model, id_batches, ood_batches, "ood", 8)
    circuit = extract_circuit(model, id_batches, ood_batches, "ood", budget=8, progress=False)
    assert circuit.ranking == ranking


def test_a_pruned_hydra_goes_on_from_the_heads_it_has():
    model, id_batches, ood_batches, _ = family("bert")
    zeroed = copy.deepcopy(model)
    for head in ((0, 1), (2, 0), (2, 2)):
        zero_slice(zeroed, head)
    ranking, _ = algorithm_1(zeroed, id_batches, ood_batches, "avg", 4)
    # The reference also tries the zeroed heads again, which changes nothing; the pruned model does not have them.
    expected = [head for head in ranking if head not in ((0, 1), (2, 0), (2, 2))][:1]
    hydra = prune_heads(model, {0: [1], 2: [0, 2]})
    circuit = extract_circuit(hydra, id_batches, ood_batches, "avg", budget=1, progress=False)
    assert circuit.ranking == expected
    assert circuit.dense_score == pytest.approx(score_of(zeroed, id_batches, ood_batches, "avg"), abs=1e-11)


def test_the_score_is_what_the_pruned_model_scores():
    model, id_batches, _, _ = family("vit")
    circuit = extract_circuit(model, id_batches, objective="acc", budget=3, progress=False)
    pruned = prune_heads(model, circuit.heads_to_prune(2))
    assert score_of(pruned, id_batches, None, "acc") == pytest.approx(circuit.scores[1], abs=1e-11)


@pytest.mark.parametrize("memory_gib", [1e-9, 1.0])
def test_how_many_candidates_run_together_leaves_no_trace(memory_gib):
    model, id_batches, ood_batches, prompts = family("clip")
    arguments = {"budget": 3, "class_prompts": prompts, "progress": False}
    expected = extract_circuit(model, id_batches, ood_batches, "avg", **arguments)
    assert extract_circuit(model, id_batches, ood_batches, "avg", memory_gib=memory_gib, **arguments) == expected


def test_more_prompts_than_fit_in_one_pass_give_the_same_circuit(monkeypatch):
    model, id_batches, ood_batches, prompts = family("clip")
    arguments = {"budget": 3, "class_prompts": prompts, "progress": False}
    expected = extract_circuit(model, id_batches, ood_batches, "avg", **arguments)
    monkeypatch.setattr("hydra_transformers.pruning.ablation.PROMPTS_PER_PASS", 2)
    assert extract_circuit(model, id_batches, ood_batches, "avg", **arguments) == expected


def test_batches_leave_no_trace():
    model, id_batches, ood_batches, _ = family("vit")
    rows = [
        {name: torch.cat([batch[name] for batch in data]) for name in data[0]} for data in (id_batches, ood_batches)
    ]
    regrouped = [rows_in_batches(data, 11) for data in rows]
    expected = extract_circuit(model, id_batches, ood_batches, "avg", budget=3, progress=False)
    assert extract_circuit(model, *regrouped, "avg", budget=3, progress=False) == expected


def test_the_attention_backend_does_not_matter():
    model, id_batches, ood_batches, _ = family("bert")
    expected = extract_circuit(model, id_batches, ood_batches, "avg", budget=3, progress=False)
    model.set_attn_implementation("eager")
    assert extract_circuit(model, id_batches, ood_batches, "avg", budget=3, progress=False).ranking == expected.ranking


def test_accuracy_does_not_look_at_the_ood_data():
    def never():
        raise AssertionError("the OOD data was read")
        yield

    model, id_batches, _, _ = family("vit")
    circuit = extract_circuit(model, id_batches, never(), "acc", budget=1, progress=False)
    assert circuit.made_from["ood_data"] is None


def test_separability_needs_no_labels():
    model, id_batches, ood_batches, _ = family("vit")
    unlabelled = [{"pixel_values": batch["pixel_values"]} for batch in id_batches]
    expected = extract_circuit(model, id_batches, ood_batches, "ood", budget=2, progress=False)
    assert extract_circuit(model, unlabelled, ood_batches, "ood", budget=2, progress=False) == expected


def test_data_is_read_once():
    model, id_batches, ood_batches, _ = family("vit")
    expected = extract_circuit(model, id_batches, ood_batches, "avg", budget=2, progress=False)
    assert extract_circuit(model, iter(id_batches), iter(ood_batches), "avg", budget=2, progress=False) == expected


def test_bfloat16_is_evaluated_in_bfloat16():
    model, id_batches, ood_batches, _ = family("vit", torch.float32)
    circuit = extract_circuit(model, id_batches, ood_batches, "avg", budget=1, dtype=torch.bfloat16, progress=False)
    halved = [
        [{**batch, "pixel_values": batch["pixel_values"].bfloat16()} for batch in data]
        for data in (id_batches, ood_batches)
    ]
    lower = copy.deepcopy(model).bfloat16()
    assert circuit.made_from["dtype"] == "bfloat16"
    # One flipped prediction is 0.02 of the score.
    assert circuit.dense_score == pytest.approx(score_of_bfloat16(lower, *halved), abs=0.05)


def score_of_bfloat16(model, id_batches, ood_batches) -> float:
    class Float(torch.nn.Module):
        def forward(self, **inputs):
            output = model(**inputs)
            output.logits = output.logits.float()
            return output

    return score_of(Float(), id_batches, ood_batches, "avg")


@pytest.mark.parametrize("name", ["vit", "bert", "clip"])
def test_the_model_handed_in_is_unchanged_bit_for_bit(name):
    model, id_batches, ood_batches, prompts = family(name)
    model.train()
    next(iter(output_projections(model).values())).weight.requires_grad_(False)
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    needs_gradient = [parameter.requires_grad for parameter in model.parameters()]
    backend = model.config._attn_implementation

    extract_circuit(model, id_batches, ood_batches, "avg", budget=2, class_prompts=prompts, progress=False)

    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == needs_gradient
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert model.config._attn_implementation == backend


def test_ties_go_to_the_lower_layer_and_head():
    model = vit()
    with torch.no_grad():
        model.classifier.weight.zero_()
    batch = {"pixel_values": torch.zeros(4, 3, 8, 8, dtype=torch.float64), "labels": torch.zeros(4, dtype=torch.long)}
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([1.0, 0, 0, 0, 0]))
    circuit = extract_circuit(model, [batch], objective="acc", budget=4, progress=False)
    assert circuit.ranking == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert circuit.scores == [1.0] * 4


def test_ties_go_to_the_vision_tower():
    model, id_batches, _, prompts = family("clip")
    with torch.no_grad():
        model.visual_projection.weight.zero_()
    for batch in id_batches:
        batch["labels"].zero_()
    circuit = extract_circuit(model, id_batches, objective="acc", budget=5, class_prompts=prompts, progress=False)
    assert circuit.ranking[:4] == [("vision", 0, 0), ("vision", 0, 1), ("vision", 1, 0), ("vision", 1, 1)]
    assert circuit.ranking[4] == ("text", 0, 0)


def test_a_saved_circuit_is_the_circuit(tmp_path):
    model, id_batches, ood_batches, prompts = family("clip")
    circuit = extract_circuit(
        model,
        id_batches,
        ood_batches,
        "avg",
        budget=3,
        class_prompts=prompts,
        mode="shortlist",
        check_every=2,
        progress=False,
    )
    circuit.save(tmp_path / "folder" / "circuit.json")
    assert Circuit.load(tmp_path / "folder" / "circuit.json") == circuit
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["circuit.json"]


def test_heads_to_prune_are_the_first_of_the_ranking():
    circuit = Circuit([(2, 1), (0, 3), (2, 0)], [0.9, 0.8, 0.7], 1.0, "acc")
    assert circuit.heads_to_prune(2) == {0: [3], 2: [1]}
    assert circuit.heads_to_prune() == {0: [3], 2: [0, 1]}
    clip_circuit = Circuit([("text", 0, 1), ("vision", 1, 0)], [0.9, 0.8], 1.0, "acc")
    assert clip_circuit.heads_to_prune() == {"vision": {1: [0]}, "text": {0: [1]}}
    with pytest.raises(ValueError, match="budget is 4: this circuit ranks 3 heads"):
        circuit.heads_to_prune(4)


@pytest.mark.parametrize(
    "scores, best", [([0.9, 1.2, 1.1], 2), ([1.1, 0.9, 1.1], 3), ([1.0, 0.9, 0.8], 1), ([0.9, 0.8, 0.7], 0)]
)
def test_the_best_budget_removes_as_many_heads_as_cost_nothing(scores, best):
    assert Circuit([(2, 1), (0, 3), (2, 0)], scores, 1.0, "acc").best_budget == best


def test_another_json_file_is_no_circuit(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is no circuit"):
        Circuit.load(tmp_path / "other.json")
