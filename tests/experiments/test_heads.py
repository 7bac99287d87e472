"""What is said of heads: every number against its definition, in float64."""

import copy
import math
from itertools import combinations

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.bert.modeling_bert import BertSelfAttention

from experiments import analysis
from experiments.heads.outputs import one_member
from experiments.heads.overlap import compare_head_sets, divergence
from experiments.heads.proposition import FAILS, HOLDS, NOT_REFUTED, UNCLEAR, Estimate, pruning_under_noise
from experiments.heads.separation import DENSE, _separations, head_separation, head_vectors, mahalanobis_by_chance
from experiments.heads.sweep import sweep_budgets
from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.heads import as_heads_to_prune
from hydra_transformers.reports import evaluate_uncertainty
from tests.families import HEAD_DIM, VIT
from tests.pruning.backbones import bert, family, images, rows_in_batches, texts, vit


HEADS = [(0, 1), (2, 0), (2, 3)]
EVERY = [(layer, head) for layer in range(3) for head in range(3)]


def labelled_images(rows: int, seed: int, spread: float = 1.0) -> list[dict]:
    labels = torch.randint(5, (rows,), generator=torch.Generator().manual_seed(seed))
    return rows_in_batches({"pixel_values": images(rows, seed, spread), "labels": labels}, 4)


@torch.no_grad()
def losses(model, data) -> torch.Tensor:
    """Of each row."""
    found = []
    for batch in data:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        found.append(nn.functional.cross_entropy(logits, batch["labels"], reduction="none"))
    return torch.cat(found)


# Proposition 1


def test_slope_and_curvature_are_those_of_the_output_projections_weights():
    model = VIT.backbone(num_labels=5)
    data = labelled_images(6, 0)
    found = pruning_under_noise(model, data, data, {"some": HEADS}).changes["some"]["clean"]

    steps: dict[str, torch.Tensor] = {}  # what is added to a weight when the heads are cut out
    for layer, head in HEADS:
        name = f"{VIT.outputs[''].format(layer)}.weight"
        weight, columns = model.get_parameter(name).detach(), slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        steps.setdefault(name, torch.zeros_like(weight))[:, columns] = -weight[:, columns]
    weights = [model.get_parameter(name) for name in steps]
    with sdpa_kernel(SDPBackend.MATH):
        loss = torch.stack([model(**batch).loss * len(batch["labels"]) for batch in data]).sum() / 6
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        slope = sum((gradient * step).sum() for gradient, step in zip(gradients, steps.values(), strict=True))
        products = torch.autograd.grad(slope, weights)
    curvature = sum((product * step).sum() for product, step in zip(products, steps.values(), strict=True))
    assert found.slope.value == pytest.approx(slope.item(), rel=1e-9)
    assert found.curvature.value == pytest.approx(curvature.item(), rel=1e-9)
    assert found.second_order.value == pytest.approx(found.slope.value + found.curvature.value / 2, rel=1e-9)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_losses_are_those_of_the_whole_and_of_the_pruned_network(name):
    model, data, _, _ = family(name)
    before = copy.deepcopy(model.train().state_dict())
    found = pruning_under_noise(model, data, data, {"some": EVERY[1:3]}).changes["some"]["clean"]
    assert model.training and all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    pruned = prune_heads(model, as_heads_to_prune(EVERY[1:3]))
    assert found.before == pytest.approx(losses(model.eval(), data).mean().item(), rel=1e-9)
    assert found.after == pytest.approx(losses(pruned, data).mean().item(), rel=1e-9)


def test_differences_and_their_errors_are_those_of_pairs_of_rows_whatever_the_batches():
    model, clean = vit(), labelled_images(8, 2)
    doubled = [{**batch, "pixel_values": 2 * batch["pixel_values"]} for batch in clean]
    whole = [{key: torch.cat([batch[key] for batch in data]) for key in clean[0]} for data in (clean, doubled)]
    pruned = prune_heads(model, {1: [1]})
    changes = [losses(pruned, data) - losses(model, data) for data in (clean, doubled)]
    expected = Estimate.of((changes[1] - changes[0]).double())
    for data in ((clean, doubled), ([whole[0]], [whole[1]])):
        result = pruning_under_noise(model, *data, {"one": [(1, 1)]})
        found = result.differences["one"]["change"]
        assert (found.value, found.error) == pytest.approx((expected.value, expected.error), rel=1e-5)
        gaps = result.gaps("one")
        assert found.value == pytest.approx(gaps[1] - gaps[0])
    same = pruning_under_noise(model, clean, clean, {"one": [(1, 1)]})
    assert same.gaps("one") == (0, 0) and same.differences["one"]["curvature"] == Estimate(0, 0)


def test_premises_hold_fail_or_cannot_be_told():
    clear, not_clear = Estimate(0.5, 0.1), Estimate(-0.1, 0.1)
    verdicts = [each.at_least_zero() for each in (clear, not_clear, Estimate(-0.5, 0.1))]
    assert verdicts == [HOLDS, UNCLEAR, FAILS]
    assert (clear.equals_zero(), not_clear.equals_zero()) == (FAILS, NOT_REFUTED)
    assert Estimate(1.0).at_least_zero() == Estimate(1.0).equals_zero() == "-"  # no error, no verdict
    assert Estimate.of(torch.tensor([2.0])) == Estimate(2.0, None)  # a single row says nothing of others
    assert Estimate.of(torch.tensor([1.0, 2.0, 3.0])) == Estimate(2.0, pytest.approx(math.sqrt(1 / 3)))


def test_other_rows_and_numbers_that_are_not_finite_are_refused():
    clean = labelled_images(4, 5)
    with pytest.raises(ValueError, match="pass the same rows in the same order"):
        pruning_under_noise(vit(), clean, labelled_images(4, 6), {"one": [(0, 1)]})
    broken = [{**batch, "pixel_values": batch["pixel_values"] * math.nan} for batch in clean]
    with pytest.raises(ValueError, match=r"the loss on noisy data.* is not finite"):
        pruning_under_noise(vit(), clean, broken, {"one": [(0, 1)]})
    with pytest.raises(ValueError, match="outputs of heads are not finite"):
        head_separation(vit(), clean, {"broken": broken}, {})


# What heads see


def test_vectors_are_what_the_first_token_has_before_the_output_projection():
    model, rows = bert(), texts(6, 0)
    seen = []
    for module in model.modules():
        if isinstance(module, BertSelfAttention):
            module.register_forward_hook(lambda _, __, output: seen.append(output[0][:, 0]))
    hydra = one_member(bert())
    model(**rows)
    vectors = head_vectors(hydra, rows_in_batches(rows, 4))
    assert list(vectors) == EVERY
    for (layer, head), vector in vectors.items():
        torch.testing.assert_close(vector, seen[layer][:, 8 * head : 8 * head + 8].detach())


def test_distances_are_those_of_the_paper():
    torch.manual_seed(0)
    x, y = torch.randn(40, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0]), torch.randn(30, 3).double() + 1
    [found] = _separations({(0, 0): x}, {(0, 0): y}, seed=0).values()
    difference, covariance = x.mean(dim=0) - y.mean(dim=0), torch.cov(x.t())
    assert found.euclidean == pytest.approx(difference.norm().item())
    assert found.relative == pytest.approx((difference.norm() / covariance.trace().sqrt()).item())
    assert found.mahalanobis == pytest.approx((difference @ covariance.inverse() @ difference).sqrt().item())


def test_samples_of_one_distribution_are_as_far_apart_as_chance_says_and_not_told_apart():
    """A discriminant finds a difference in the rows that it was fitted on, and in no others."""
    torch.manual_seed(2)
    x, y = ({(0, n): torch.randn(rows, 8, dtype=torch.float64) for n in range(1000)} for rows in (40, 20))
    found = _separations(x, y, seed=0).values()
    distances, aurocs = (torch.tensor([getattr(each, name) for each in found]) for name in ("mahalanobis", "auroc"))
    assert mahalanobis_by_chance(8, 40, 20) == pytest.approx(distances.square().mean().sqrt().item(), rel=0.05)
    assert 0.48 < aurocs.mean() < 0.52
    apart = {head: vectors + 3 for head, vectors in y.items()}
    assert min(each.auroc for each in _separations(x, apart, seed=0).values()) > 0.95


def test_pruned_networks_stand_beside_the_same_heads_of_the_whole_one():
    known, other = (rows_in_batches({"pixel_values": images(rows, seed)}, 16) for rows, seed in ((30, 0), (20, 1)))
    found = head_separation(vit(), known, {"other": other, "same": known}, {"circuit": [(0, 1), (2, 0), (1, 2)]})
    whole, cut = found.networks[DENSE]["other"], found.networks["circuit"]["other"]
    assert len(whole) == 9 and set(whole) - set(cut) == {(0, 1), (2, 0), (1, 2)}
    assert all(cut[0, head] == whole[0, head] for head in (0, 2))  # nothing before the first layer was cut
    assert cut[2, 1] != whole[2, 1]
    assert all(each.mahalanobis == each.euclidean == 0 for each in found.networks[DENSE]["same"].values())
    mean = found.mean(DENSE, "other", [(0, 0), (1, 1)])
    assert mean.auroc == pytest.approx((whole[0, 0].auroc + whole[1, 1].auroc) / 2)
    table = found.tables()["Known data and other"]
    assert "| all heads, those that circuit keeps | 2 |" in table and "| circuit | 2 |" in table


# Which go, and how many


def test_chance_levels_are_means_over_all_pairs_of_sets():
    a, b = EVERY[:3], EVERY[2:6]
    [pair] = compare_head_sets(EVERY, {"a": a, "b": b}).pairs.values()
    others = list(combinations(EVERY, 4))  # against one fixed set: all are alike by symmetry
    commons = [len(set(a) & set(other)) for other in others]
    overlaps = [common / (7 - common) for common in commons]
    assert pair.common == 1 and pair.sizes == (3, 4)
    assert pair.common_by_chance == pytest.approx(sum(commons) / len(others))
    assert pair.overlap_by_chance == pytest.approx(sum(overlaps) / len(others))
    assert pair.p_value == pytest.approx(sum(common >= 1 for common in commons) / len(others))
    assert divergence(a, a) == 0 and divergence(a, EVERY[3:6]) == pytest.approx(math.log(2))
    assert divergence(a, EVERY[2:5]) == pytest.approx(2 / 3 * math.log(2))  # (1 - f) ln 2 for the share f in common
    assert divergence([(0,), (0,), (1,)], [(0,), (2,)]) == pytest.approx(jensenshannon([2, 1, 0], [1, 0, 1]) ** 2)


def test_a_point_is_what_the_pruned_network_reaches():
    model, data, ood, _ = family("vit", torch.float32)
    orders = {"circuit": [[(1, 0), (2, 2), (0, 1)]], "random": [EVERY, EVERY[::-1]]}
    found = sweep_budgets(model, data, {"other": ood}, orders, [3, 6])
    pruned = prune_heads(model, {1: [0], 2: [2], 0: [1]})
    [expected] = evaluate_uncertainty(pruned, data, {"far": {"other": ood}}).models.values()
    [point] = [point for point in found.points if point.order == "circuit"]
    for name in ("accuracy", "ece", "nll"):
        assert getattr(point, name) == expected["data"][name]
    assert point.auroc == expected["other (far)"]["auroc"]
    assert list(found.values("circuit", "nll")) == [0, 3]  # it ranks no six
    assert [len(draws) for draws in found.values("random", "nll").values()] == [1, 2, 2]
    assert "| Of 9 heads go | 0 | 3 | 6 |" in found.tables()["AUROC (%)"]


@pytest.mark.slow
def test_the_whole_study_runs_without_data_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["analysis", "--smallest", "--device", "cpu"])
    analysis.main()
    output = capsys.readouterr().out
    for title in ("Accuracy (%)", "In common (by chance)", "Known data and noise", "Proposition 1"):
        assert f"## {title}\n" in output
    assert not list(tmp_path.iterdir())
