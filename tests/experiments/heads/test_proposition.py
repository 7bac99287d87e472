"""Proposition 1: every number against its definition, in float64."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.heads import PruningUnderNoise, pruning_under_noise
from experiments.heads.proposition import FAILS, HOLDS, NOT_REFUTED, UNCLEAR, Estimate
from hydra_transformers.pruning import prune_heads, taylor_prune
from hydra_transformers.pruning.heads import as_heads_to_prune, attention_of, tower_and_place
from tests.families import HEAD_DIM, VIT
from tests.pruning.backbones import family, images, rows_in_batches, vit


HEADS = [(0, 1), (2, 0), (2, 3)]


def labelled_images(rows: int, seed: int, spread: float = 1.0) -> list[dict]:
    labels = torch.randint(5, (rows,), generator=torch.Generator().manual_seed(seed))
    return rows_in_batches({"pixel_values": images(rows, seed, spread), "labels": labels}, 4)


def mean_loss(model, data) -> torch.Tensor:
    """Of a plain Transformers model."""
    rows = sum(len(batch["labels"]) for batch in data)
    losses = [model(**batch).loss * len(batch["labels"]) for batch in data]
    return torch.stack(losses).sum() / rows


def step_of(model, heads) -> dict[str, torch.Tensor]:
    """By name of a weight what is added to it when `heads` are cut out."""
    steps = {}
    for layer, head in heads:
        name = f"{VIT.outputs[''].format(layer)}.weight"
        weight = model.get_parameter(name).detach()
        columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        steps.setdefault(name, torch.zeros_like(weight))[:, columns] = -weight[:, columns]
    return steps


def test_slope_and_curvature_are_those_of_the_output_projections_weights():
    model = VIT.backbone(num_labels=5)
    data = labelled_images(6, 0)
    found = pruning_under_noise(model, data, data, {"some": HEADS}).changes["some"]["clean"]

    steps = step_of(model, HEADS)
    weights = [model.get_parameter(name) for name in steps]
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(mean_loss(model, data), weights, create_graph=True)
        slope = sum((gradient * step).sum() for gradient, step in zip(gradients, steps.values(), strict=True))
        products = torch.autograd.grad(slope, weights)
    curvature = sum((product * step).sum() for product, step in zip(products, steps.values(), strict=True))
    assert found.slope.value == pytest.approx(slope.item(), rel=1e-9)
    assert found.curvature.value == pytest.approx(curvature.item(), rel=1e-9)
    assert found.second_order.value == pytest.approx(found.slope.value + found.curvature.value / 2, rel=1e-9)


@pytest.mark.parametrize("name", ["vit", "bert", "clip"])
def test_it_agrees_with_finite_differences_and_with_the_pruned_network(name):
    model, id_data, _, prompts = family(name)
    heads = [("vision", 0, 1), ("text", 1, 0)] if name == "clip" else [(0, 1), (2, 0)]
    options = {"class_prompts": prompts} if prompts else {}
    found = pruning_under_noise(model, id_data, id_data, {"some": heads}, **options).changes["some"]["clean"]

    def loss_at(part: float) -> float:
        """With the output projections of the heads scaled by 1 - part."""
        hydra = prune_heads(model)
        for tower, layer, head in map(tower_and_place, heads):
            attention = attention_of(hydra, tower, layer)
            rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            with torch.no_grad():
                attention.o_proj.weight[rows] *= 1 - part
        return mean_cross_entropy(hydra, id_data, prompts)

    step = 1e-3
    low, middle, high = loss_at(-step), loss_at(0), loss_at(step)
    assert found.before == pytest.approx(middle, rel=1e-9)
    assert found.slope.value == pytest.approx((high - low) / (2 * step), rel=1e-4, abs=1e-7)
    assert found.curvature.value == pytest.approx((high - 2 * middle + low) / step**2, rel=1e-3, abs=1e-5)
    pruned = prune_heads(model, as_heads_to_prune(heads))
    assert found.after == pytest.approx(mean_cross_entropy(pruned, id_data, prompts), rel=1e-9)
    assert found.change.value == pytest.approx(found.after - found.before)
    assert (found.slope.error is None) == (name == "clip")  # a head that reads the prompts belongs to every row


@torch.no_grad()
def mean_cross_entropy(hydra, data, prompts=None) -> float:
    losses = []
    for batch in data:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        output = hydra(**inputs, **(prompts or {}))
        logits = output.logits_per_image if prompts else output.logits
        losses.append(nn.functional.cross_entropy(logits, batch["labels"], reduction="none"))
    return torch.cat(losses).mean().item()


def test_the_smallest_eigenvalue_is_that_of_the_whole_matrix_of_head_removals():
    model = vit(layers=2, heads=2)
    clean, noisy = labelled_images(5, 0), labelled_images(5, 1, spread=2.0)
    every = [(layer, head) for layer in range(2) for head in range(2)]
    pairs = {f"{a} {b}": [every[a], every[b]] for a in range(4) for b in range(a)}
    singles = {str(a): [every[a]] for a in range(4)}
    found = pruning_under_noise(model, clean, noisy, singles | pairs, all_directions=True)
    difference = torch.zeros(4, 4, dtype=torch.float64)
    for a in range(4):
        difference[a, a] = found.premises(str(a)).curvature.value
    for a in range(4):
        for b in range(a):  # of a sum of two, their own curvatures and twice what they have in common
            both = found.premises(f"{a} {b}").curvature.value
            difference[a, b] = difference[b, a] = (both - difference[a, a] - difference[b, b]) / 2
    smallest = torch.linalg.eigvalsh(difference)[0].item()
    assert found.smallest_eigenvalues["noisy"] == pytest.approx(smallest, rel=1e-8)
    assert "Smallest eigenvalue" in found.to_markdown()


def test_errors_are_those_of_means_over_rows_whatever_the_batches():
    model = vit()
    rows = {key: torch.cat([batch[key] for batch in labelled_images(9, 2)]) for key in ("pixel_values", "labels")}
    noisy = labelled_images(7, 3)
    found = [
        pruning_under_noise(model, rows_in_batches(rows, size), noisy, {"one": [(1, 1)]}).changes["one"]["clean"]
        for size in (2, 9)
    ]
    for name in ("slope", "curvature", "second_order", "change"):
        one, other = (getattr(each, name) for each in found)
        assert one.value == pytest.approx(other.value, rel=1e-9) and one.error == pytest.approx(other.error, rel=1e-9)
    assert Estimate.of(torch.tensor([1.0, 2.0, 3.0])) == Estimate(2.0, pytest.approx(math.sqrt(1 / 3)))


def test_errors_of_differences_know_which_rows_are_pairs():
    model, clean = vit(), labelled_images(8, 2)
    noise = {"same": clean, "other": labelled_images(8, 3)}
    found = pruning_under_noise(model, clean, noise, {"one": [(1, 1)]})
    same, other = found.premises("one", "same"), found.premises("one", "other")
    assert same.gap_change.error == same.curvature.error == same.expected_change.error == 0
    both = found.changes["one"]["clean"].change, found.changes["one"]["other"].change
    assert other.gap_change.error == pytest.approx(math.hypot(*(each.error for each in both)))

    doubled = [{**batch, "pixel_values": 2 * batch["pixel_values"]} for batch in clean]
    paired = pruning_under_noise(model, clean, doubled, {"one": [(1, 1)]}).premises("one").gap_change
    changes = []
    for data in (clean, doubled):  # row by row
        rows = [{name: value[row : row + 1] for name, value in batch.items()} for batch in data for row in range(4)]
        pruned = prune_heads(model, {1: [1]})
        changes.append([mean_cross_entropy(pruned, [row]) - mean_cross_entropy(model, [row]) for row in rows])
    expected = Estimate.of(torch.tensor(changes[1]).double() - torch.tensor(changes[0]).double())
    assert (paired.value, paired.error) == pytest.approx((expected.value, expected.error), rel=1e-5)


def test_premises_hold_fail_or_cannot_be_told():
    clear, not_clear = Estimate(0.5, 0.1), Estimate(-0.1, 0.1)
    assert (clear.at_least_zero(), not_clear.at_least_zero(), Estimate(-0.5, 0.1).at_least_zero()) == (
        HOLDS,
        UNCLEAR,
        FAILS,
    )
    assert Estimate(1.0).at_least_zero() == Estimate(-1.0).at_least_zero() == "-"  # no error, no verdict
    assert Estimate.of(torch.tensor([2.0])) == Estimate(2.0, None)  # a single row says nothing of others
    assert (clear.equals_zero(), not_clear.equals_zero(), Estimate(1.0).equals_zero()) == (FAILS, NOT_REFUTED, "-")


@pytest.fixture(scope="module")
def found() -> PruningUnderNoise:
    model = vit(dtype=torch.float32)
    clean = [{**batch, "pixel_values": batch["pixel_values"].float()} for batch in labelled_images(12, 4)]
    noisy = {"weak": clean, "strong": [{**batch, "pixel_values": 2 * batch["pixel_values"]} for batch in clean]}
    pruning = taylor_prune(model, clean, heads_per_layer=2)
    return pruning_under_noise(model, clean, noisy, {"Taylor": pruning, "by hand": {0: [1], 2: [0]}})


def test_equal_data_leaves_the_gap_at_nothing(found):
    premises = found.premises("Taylor", "weak")
    assert premises.gap_before == premises.gap_after == premises.gap_change.value == premises.curvature.value == 0
    assert found.premises("Taylor").gap_change.value == 0  # the first noisy set, where none is named
    strong = found.premises("by hand", "strong")
    assert strong.gap_change.value == pytest.approx(strong.gap_after - strong.gap_before)


def test_tables_and_pictures_have_every_set(found, tmp_path):
    text = found.to_markdown()
    assert text.count("| Taylor | 3 |") == text.count("| by hand | 2 |") == 3  # clean, weak, strong
    assert "| Taylor | strong |" in text and "claim: the gap grows" in text
    [path] = found.plot(tmp_path)
    assert path.name == "proposition.png" and path.read_bytes()[:4] == b"\x89PNG"


def test_small_changes_have_more_decimals():
    assert (str(Estimate(0.5, 0.001)), str(Estimate(-0.0012)), str(Estimate(0.0, 0.002))) == (
        "+0.500 ± 0.001",
        "-0.00120",
        "+0.00000 ± 0.00200",
    )


def test_the_model_is_left_as_it_was():
    model = vit().train()
    before = copy.deepcopy(model.state_dict())
    pruning_under_noise(model, labelled_images(4, 5), labelled_images(4, 6), {"one": [(0, 0)]})
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "head_sets, noisy, sentence",
    [
        ([(0, 1)], [], r"head_sets is a list: pass \{name: heads\}"),
        ({"far": [(9, 0)]}, [], r"head_sets\['far'\] has the head \(9, 0\), which the model does not have"),
        ({"none": {}}, [], r"head_sets\['none'\] names no head"),
        ({"scores": {(0, 1): 0.5}}, [], "is a dict of scores"),
        ({"twice": [(0, 1), (0, 1)]}, [], "twice"),
        ({"one": [(0, 1)]}, {"clean": []}, "of other names"),
        ({"one": [(0, 1)]}, [{"pixel_values": images(2, 0)}], r"noisy_data \(noisy\) has no labels"),
        (
            {"one": [(0, 1)]},
            labelled_images(4, 0, math.nan),
            r"the loss on noisy_data \(noisy\).* is no finite number",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(head_sets, noisy, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        pruning_under_noise(vit(), labelled_images(4, 5), noisy, head_sets)
