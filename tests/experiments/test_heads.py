"""What is said of heads: every number against its definition, in float64."""

import math
from itertools import combinations

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.bert.modeling_bert import BertSelfAttention

from experiments import analysis
from experiments.heads.outputs import one_member
from experiments.heads.overlap import compare_head_sets, divergence
from experiments.heads.proposition import pruning_under_noise
from experiments.heads.separation import _separations, head_vectors
from tests.families import HEAD_DIM, VIT
from tests.pruning.backbones import bert, images, rows_in_batches, texts


HEADS = [(0, 1), (2, 0), (2, 3)]
EVERY = [(layer, head) for layer in range(3) for head in range(3)]


def labelled_images(rows: int, seed: int, spread: float = 1.0) -> list[dict]:
    labels = torch.randint(5, (rows,), generator=torch.Generator().manual_seed(seed))
    return rows_in_batches({"pixel_values": images(rows, seed, spread), "labels": labels}, 4)


# Proposition 1


def test_slope_and_curvature_are_those_of_the_output_projections_weights():
    model = VIT.backbone(num_labels=5)
    data = labelled_images(6, 0)
    found = pruning_under_noise(model, data, data, {"some": HEADS}).changes["some"]["clean"]

    steps: dict[str, torch.Tensor] = {}  # what is added to a weight when the heads are cut out
    for layer, head in HEADS:
        name = f"{VIT.outputs[''].format(layer)}.weight"
        weight = model.get_parameter(name).detach()
        columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
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


# What heads see


def test_vectors_are_what_the_first_token_has_before_the_output_projection():
    model = bert()
    rows = texts(6, 0)
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
    x = torch.randn(40, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0])
    y = torch.randn(30, 3).double() + 1
    [found] = _separations({(0, 0): x}, {(0, 0): y}, seed=0).values()
    difference = x.mean(dim=0) - y.mean(dim=0)
    covariance = torch.cov(x.t())
    assert found.euclidean == pytest.approx(difference.norm().item())
    assert found.relative == pytest.approx((difference.norm() / covariance.trace().sqrt()).item())
    assert found.mahalanobis == pytest.approx((difference @ covariance.inverse() @ difference).sqrt().item())


# Which go, and how many


def test_chance_levels_are_means_over_all_pairs_of_sets():
    a = EVERY[:3]
    b = EVERY[2:6]
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


@pytest.mark.slow
def test_the_whole_study_runs_without_data_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["analysis", "--smallest", "--device", "cpu"])
    analysis.main()
    output = capsys.readouterr().out
    for title in ("Accuracy (%)", "In common (by chance)", "Known data and noise", "Proposition 1"):
        assert f"## {title}\n" in output
    assert not list(tmp_path.iterdir())
