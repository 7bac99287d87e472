"""What heads see: vectors, distances and discriminants against their definitions."""

import pytest
import torch
from transformers.models.bert.modeling_bert import BertSelfAttention

from experiments.heads import head_separation
from experiments.heads.head_outputs import one_member
from experiments.heads.separation import (
    DENSE,
    _read,
    _separations,
    head_vectors,
    mahalanobis_by_chance,
    principal_components,
)
from hydra_transformers.pruning import Circuit
from tests.pruning.backbones import bert, clip, family, images, rows_in_batches, texts, vit


def circuit(*ranking) -> Circuit:
    return Circuit(list(ranking), [0.5] * len(ranking), 0.5, "ood")


def test_vectors_are_what_the_first_token_has_before_the_output_projection():
    model, rows = bert(), texts(6, 0)
    seen = []
    handles = [
        module.register_forward_hook(lambda _, __, output: seen.append(output[0][:, 0]))
        for module in model.modules()
        if isinstance(module, BertSelfAttention)
    ]
    model(**rows)
    for handle in handles:
        handle.remove()
    hydra = one_member(model)
    vectors = head_vectors(hydra, _read(hydra, rows_in_batches(rows, 4), "data", 4))
    assert list(vectors) == [(layer, head) for layer in range(3) for head in range(3)]
    for (layer, head), vector in vectors.items():
        torch.testing.assert_close(vector, seen[layer][:, 8 * head : 8 * head + 8].detach())


def test_distances_are_those_of_the_paper():
    torch.manual_seed(0)
    x, y = torch.randn(40, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0]), torch.randn(30, 3).double() + 1
    [found] = _separations({(0, 0): x}, {(0, 0): y}, seed=0).values()
    difference = x.mean(dim=0) - y.mean(dim=0)
    covariance = torch.cov(x.t())
    assert found.euclidean == pytest.approx(difference.norm().item())
    assert found.relative == pytest.approx((difference.norm() / covariance.trace().sqrt()).item())
    assert found.mahalanobis == pytest.approx((difference @ covariance.inverse() @ difference).sqrt().item())


@pytest.mark.parametrize("known, foreign", [(16, 40), (20, 20), (200, 100)])
def test_chance_is_how_far_apart_samples_of_one_distribution_are(known, foreign):
    torch.manual_seed(2)
    x, y = ({(0, n): torch.randn(rows, 8, dtype=torch.float64) for n in range(1000)} for rows in (known, foreign))
    found = torch.tensor([each.mahalanobis for each in _separations(x, y, seed=0).values()])
    assert mahalanobis_by_chance(8, known, foreign) == pytest.approx(found.square().mean().sqrt().item(), rel=0.05)


def test_a_discriminant_is_not_judged_on_what_it_was_fitted_on():
    """Of two samples of one distribution a fit finds a difference in the rows that it sees, and in no others."""
    torch.manual_seed(1)
    same = {(0, head): torch.randn(80, 30, dtype=torch.float64) for head in range(20)}
    again = {head: torch.randn_like(vectors) for head, vectors in same.items()}
    aurocs = torch.tensor([each.auroc for each in _separations(same, again, seed=0).values()])
    assert 0.45 < aurocs.mean() < 0.55 and aurocs.max() < 0.7
    apart = {head: vectors + 1.5 for head, vectors in again.items()}
    assert min(each.auroc for each in _separations(same, apart, seed=0).values()) > 0.95


def test_a_head_that_always_gives_the_same_sees_nothing():
    constant = {(0, 0): torch.ones(10, 4, dtype=torch.float64)}
    [found] = _separations(constant, constant, seed=0).values()
    assert (found.euclidean, found.relative, found.mahalanobis, found.auroc) == (0, 0, 0, 0.5)
    [apart] = _separations(constant, {(0, 0): torch.zeros(10, 4, dtype=torch.float64)}, seed=0).values()
    assert apart.auroc == 1  # each set has its own


def test_where_no_token_stands_for_the_image_all_are_read():
    model, id_data, _, _ = family("siglip-classifier")
    hydra = one_member(model)
    rows = _read(hydra, id_data, "data", 13)
    vectors = head_vectors(hydra, rows)
    seen = []
    for layer in model.vision_model.encoder.layers:
        layer.self_attn.out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].mean(dim=1)))
    with torch.no_grad():
        for batch in id_data:
            model(pixel_values=batch["pixel_values"])
    layers = len(model.vision_model.encoder.layers)
    torch.testing.assert_close(vectors[1, 2], torch.cat(seen[1::layers])[:, 16:24])


@pytest.fixture(scope="module")
def found():
    model = vit()
    known = rows_in_batches({"pixel_values": images(30, 0)}, 16)
    foreign = {"other": rows_in_batches({"pixel_values": images(20, 1, 0.5)}, 16), "same": known}
    ranking = circuit((0, 1), (2, 0), (1, 2))
    return head_separation(model, known, foreign, pruned={"circuit": ranking}, ranking=ranking, pictured=2)


def test_pruned_networks_stand_beside_the_same_heads_of_the_whole_one(found):
    whole, cut = found.networks[DENSE]["other"], found.networks["circuit"]["other"]
    assert len(whole) == 9 and set(whole) - set(cut) == {(0, 1), (2, 0), (1, 2)}
    assert all(cut[0, head] == whole[0, head] for head in (0, 2))  # nothing before the first layer was cut
    assert cut[2, 1] != whole[2, 1]
    table = found.to_markdown()
    assert "| all heads, those that circuit keeps | 2 |" in table and "| circuit | 2 |" in table
    assert "| first 1 to go | 1 |" in table and "| never ranked | 6 |" in table


def test_means_are_over_the_heads_that_are_named(found):
    of_heads = found.networks[DENSE]["other"]
    mean = found.mean(DENSE, "other", [(0, 0), (1, 1)])
    assert mean.auroc == pytest.approx((of_heads[0, 0].auroc + of_heads[1, 1].auroc) / 2)
    assert found.mean(DENSE, "other", []) is None
    assert all(each.mahalanobis == each.euclidean == 0 for each in found.networks[DENSE]["same"].values())


def test_heads_that_were_never_ranked_go_last(found):
    groups = found.by_importance(2)
    assert groups == {"go first": [(0, 1), (2, 0)], "go last": [(2, 2), (2, 1)]}
    assert set(found.pictures) == {(0, 1), (2, 0), (2, 2), (2, 1)}
    assert found.by_importance(9)["go first"] == found.ranking and len(found.by_importance(9)["go last"]) == 6
    assert len(found.pictures[0, 1].known) == 30 and len(found.pictures[0, 1].foreign) == 20


def test_pictures_and_maps_are_made(found, tmp_path):
    assert [path.name for path in found.plot(tmp_path)] == ["heads_auroc.png", "heads_pca.png"]
    assert found._repr_html_().count("<rect") == 9
    assert "pictures" not in found.to_dict() and len(found.to_dict()["networks"][DENSE]["other"]) == 9


def test_principal_components_are_those_of_both_sets_together():
    torch.manual_seed(2)
    x = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([5.0, 2.0, 0.1, 0.1])
    picture = principal_components(x, x + 1e-9)
    _, values, directions = torch.linalg.svd(x - x.mean(dim=0), full_matrices=False)
    expected = ((x - x.mean(dim=0)) @ directions[:2].t()).abs()
    torch.testing.assert_close(torch.tensor(picture.known, dtype=torch.float64).abs(), expected, atol=1e-6, rtol=1e-6)
    assert picture.explained == pytest.approx((values[:2].square().sum() / values.square().sum()).item())


def test_of_clip_it_is_the_vision_tower():
    _, id_data, ood_data, _ = family("clip")
    found = head_separation(clip(), id_data, ood_data, pruned={"both": [("vision", 0, 0), ("text", 0, 1)]})
    assert list(found.networks[DENSE]["foreign data"]) == [
        ("vision", layer, head) for layer in range(2) for head in range(2)
    ]
    assert len(found.networks["both"]["foreign data"]) == 3
    columns = ["layer", "head", "euclidean", "relative", "mahalanobis", "auroc"]
    assert found.to_dict()["columns"] == ["tower", *columns]
    assert head_separation(vit(), id_data, ood_data).to_dict()["columns"] == columns


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"ood_data": None}, "ood_data is None"),
        ({"data": [{"pixel_values": images(5, 0)}]}, "5 rows, and heads have 8 dimensions: pass 11"),
        ({"pictured": -1}, "pictured is -1"),
        ({"ood_data": [{"pixel_values": images(2, 0)}]}, r"ood_data \(foreign data\) has 2 rows"),
        ({"ranking": [(7, 7)]}, r"ranking has the head \(7, 7\)"),
        ({"pruned": {DENSE: [(0, 0)]}}, "choose another name"),
        ({"ood_data": {"near": {"one": []}, "far": {"one": []}}}, "a name in two groups"),
        (
            {"ood_data": [{"pixel_values": images(8, 1) * float("nan")}]},
            r"no finite numbers for ood_data \(foreign data\)",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(options, sentence):
    data = {"data": [{"pixel_values": images(20, 0)}], "ood_data": [{"pixel_values": images(8, 1)}]}
    with pytest.raises(ValueError, match=sentence):
        head_separation(vit(), **(data | options))
