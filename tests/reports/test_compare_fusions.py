"""Members that were really trained: fusing is chosen where it keeps their quality, and not where it loses it."""

import copy

import pytest
import torch

from hydra_transformers import AutoHydra, compare_fusions
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.reports import evaluate_uncertainty
from tests.families import CLIP, RAGGED, VIT
from tests.reports.tasks import CASES


SMALL = {"num_hidden_layers": 2, "num_labels": 3, "initializer_range": 0.1}
SMALL |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PATTERNS = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(9))


def pictures(rows, seed):
    """Noise on the pattern of the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=generator)
    return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator) + 0.5 * PATTERNS[labels], "labels": labels}


def fresh(seed):
    """As Transformers initialises it: what `families` gives is too wild to be trained."""
    config = VIT.backbone(**SMALL).config
    torch.manual_seed(seed)
    return type(VIT.backbone())(config)


def trained(model, seed, steps, rate):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    for step in range(steps):
        model(**pictures(64, 1000 * seed + step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


DATA = [pictures(100, 10**6 + batch) for batch in range(4)]


@pytest.fixture(scope="module")
def pretrained():
    return trained(fresh(0), 9, steps=60, rate=2e-3)


@pytest.fixture(scope="module")
def fine_tuned(pretrained):
    return [trained(copy.deepcopy(pretrained), seed, 10, 1e-4) for seed in (1, 2, 3)]


@pytest.mark.slow
def test_fine_tuned_models_are_fused_with_the_least_work(fine_tuned):
    noise = [{"pixel_values": 3 * torch.randn(80, 3, 8, 8, generator=torch.Generator().manual_seed(1))}]
    comparison = compare_fusions(fine_tuned, DATA, noise, batch_size=50)
    names = [f"member {index}" for index in range(3)] + ["ensemble", "soup"]
    assert list(comparison.report.models) == [*names, *(f"fused, {n} of 2 layers merged" for n in (0, 1))]
    assert comparison.best.trunk_layers == 1
    hydra = comparison.best.build()
    assert hydra.num_members == 3 and hydra.config.trunk_layers == 1
    again = evaluate_uncertainty({"hydra": hydra}, DATA).models["hydra"]["data"]["accuracy"]
    assert again == comparison.report.models[comparison.best.name]["data"]["accuracy"] > 0.8
    single = AutoHydra.from_backbone(fine_tuned[0])
    assert [comparison.work[name] for name in ("member 0", "soup", "ensemble")] == [1, 1, 3]
    assert comparison.work[comparison.best.name] == count_multiply_adds(hydra) / count_multiply_adds(single)
    text = str(comparison)
    assert text.splitlines()[-1] == comparison.sentence and comparison.sentence in comparison.to_markdown()
    gain = comparison.report.gains(comparison.best.name, "ensemble")["accuracy"].change
    values = [f"{100 * each:+.1f}" for each in (gain.difference, gain.low, gain.high)]
    assert "{} ({} to {})".format(*values) in text and "Against the ensemble (95 %)" in text and "Work" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fused.*no better")
def test_where_fusing_loses_accuracy_the_ensemble_stays(pretrained):
    """Networks that were trained apart are good alone, and their mean is not."""
    members = [pretrained, *(trained(fresh(seed), seed, steps=60, rate=2e-3) for seed in (4, 5))]
    comparison = compare_fusions(members, DATA)
    ensemble = comparison.report.models["ensemble"]["data"]["accuracy"]
    for way in ("fused, 0 of 2 layers merged", "fused, 1 of 2 layers merged"):
        assert comparison.report.models[way]["data"]["accuracy"] < ensemble - 0.05
        assert comparison.report.gains(way, "ensemble")["accuracy"].verdict == "worse"
    assert comparison.best.name == "ensemble" and "do not fuse them" in str(comparison)
    hydra = comparison.best.build()
    assert not hydra.config.shared and hydra.num_members == 3


@pytest.mark.filterwarnings("ignore:.*no better than")
def test_members_with_other_heads_have_no_soup_and_no_merged_layers():
    members = [VIT.hydra.from_backbone(VIT.backbone(seed).float(), heads) for seed, heads in enumerate(RAGGED)]
    comparison = compare_fusions(members, CASES[0].data)
    fused = [name for name in comparison.work if "fused" in name]
    assert "soup" not in comparison.work and fused == ["fused, 0 of 3 layers merged"]


@pytest.mark.parametrize(
    ("members", "error", "words"),
    [
        ([], ValueError, "members is empty"),
        ("run", TypeError, "members is a str: pass a list of members"),
        ([VIT.backbone()], ValueError, "members has one member: pass two or more"),
        ([CLIP.backbone(), CLIP.backbone(1)], TypeError, "members are CLIPModels: pass models with a classification"),
    ],
)
def test_refusals(members, error, words):
    with pytest.raises(error, match=words):
        compare_fusions(members, CASES[0].data)
