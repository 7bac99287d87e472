"""Heads that predict a variance: noise of the data beside the members' disagreement."""

import pytest
import torch
from torch.nn import functional as F

from hydra_transformers import AutoHydra, evaluate_uncertainty
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.hub import create_model_card
from hydra_transformers.pruning import extract_circuit, taylor_scores
from hydra_transformers.training import with_variance
from hydra_transformers.uncertainty import calibrate, predict_uncertainty
from tests.families import FAMILIES, bert_backbone, for_families, padded_texts
from tests.fresh_process import run_without_package


OUTPUTS = 2


def backbones(count=3, outputs=OUTPUTS):
    return [bert_backbone(seed, num_labels=outputs, problem_type="regression").double() for seed in range(count)]


@torch.no_grad()
def members_of(models):
    """With variances that depend on the text."""
    members = [with_variance(model) for model in models]
    for seed, member in enumerate(members):
        rows = member.classifier.weight[member.config.num_labels :]
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)) / 10)
        member.classifier.bias[member.config.num_labels :] = -0.5 * seed
    return members


@torch.no_grad()
def apart(models, members, inputs):
    """Plain Transformers code: means and variances (batch, members, outputs)."""
    means = torch.stack([model(**inputs).logits for model in models], dim=1)
    pooled = [model.bert(**inputs).pooler_output for model in models]
    heads = [member.classifier for member in members]
    logs = [F.linear(p, h.weight[OUTPUTS:], h.bias[OUTPUTS:]) for p, h in zip(pooled, heads, strict=True)]
    return means, torch.stack(logs, dim=1).exp()


def labelled(hydra, count=60, seed=0):
    inputs = padded_texts(count, seed=seed)
    with torch.no_grad():
        logits = hydra(**inputs).logits
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)).to(logits)
    return [{**inputs, "labels": logits + 0.3 * noise}]


@torch.no_grad()
def test_a_fused_model_splits_variance_as_its_members_apart_do():
    models, inputs = backbones(), padded_texts()
    members = members_of(models)
    means, variances = apart(models, members, inputs)
    hydra = AutoHydra.from_pruned_members(members, shared=()).eval()
    outputs = hydra(**inputs)
    exact = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(outputs.member_logits, means, **exact)
    torch.testing.assert_close(outputs.member_variances, variances, **exact)
    torch.testing.assert_close(outputs.logits, means.mean(dim=1), **exact)
    for model in (hydra, DeepEnsemble(members)):
        found = predict_uncertainty(model.eval(), [inputs])
        torch.testing.assert_close(found.aleatoric, variances.mean(dim=1), **exact)
        torch.testing.assert_close(found.epistemic, means.var(dim=1, correction=0), **exact)
        torch.testing.assert_close(found.variance, found.aleatoric + found.epistemic, **exact)
    torch.testing.assert_close(hydra.member(1)(**inputs).member_variances[:, 0], variances[:, 1], **exact)
    torch.testing.assert_close(with_variance(models[0])(**inputs).logits, means[:, 0], **exact)


@pytest.mark.parametrize("kind", ["members", "ensemble"])
def test_the_loss_is_the_gaussian_likelihood_of_each_member_or_of_their_mixture(kind):
    models, inputs = backbones(), padded_texts()
    members = members_of(models)
    means, variances = apart(models, members, inputs)
    hydra = AutoHydra.from_pruned_members(members, shared=())
    hydra.config.ensemble_loss = kind
    labels = torch.randn(len(means), OUTPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if kind == "members":
        own = zip(means.unbind(1), variances.unbind(1), strict=True)
        expected = sum(F.gaussian_nll_loss(mean, labels, variance) for mean, variance in own) / 3
    else:
        total = variances.mean(dim=1) + means.var(dim=1, correction=0)
        expected = F.gaussian_nll_loss(means.mean(dim=1), labels, total)
    torch.testing.assert_close(hydra.eval()(**inputs, labels=labels).loss, expected, rtol=0, atol=1e-10)
    halved = hydra(**inputs, labels=labels, num_items_in_batch=2 * labels.numel()).loss
    torch.testing.assert_close(halved, expected / 2, rtol=0, atol=1e-10)


def test_gradients_of_one_members_variance_stay_with_it():
    hydra = AutoHydra.from_pruned_members(members_of(backbones()), shared=())
    hydra.eval()(**padded_texts()).member_variances[:, 0].sum().backward()
    own, *others = hydra.classifier.weight.grad.split(2 * OUTPUTS)
    assert own[OUTPUTS:].any() and not own[:OUTPUTS].any() and not any(each.any() for each in others)


def test_intervals_are_scaled_by_the_whole_spread_and_saved(tmp_path):
    hydra = AutoHydra.from_pruned_members(members_of(backbones()), shared=()).eval()
    [batch] = labelled(hydra)
    sentences = hydra.calibrate([batch], alpha=0.2, target={"coverage": 0.8}).sentences
    assert "80 %" in " ".join(sentences)
    labels = batch.pop("labels")
    outputs, settings = hydra(**batch), hydra.config.decision
    parts = predict_uncertainty(hydra, [batch])
    half = torch.tensor(settings["factors"]) * (parts.variance.sqrt() + torch.tensor(settings["floors"]))
    expected = torch.stack([parts.mean - half, parts.mean + half], dim=-1)
    torch.testing.assert_close(outputs.interval, expected, rtol=1e-5, atol=1e-5)
    assert outputs.abstain.any() and not outputs.abstain.all() and outputs.member_logits.shape[1] == 3
    assert "the noise that each member expects" in str(create_model_card(hydra, repo_id="me/numbers"))
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path, dtype=torch.float64).eval()
    again = loaded(**batch)
    assert torch.equal(again.interval, outputs.interval) and torch.equal(
        again.member_variances, outputs.member_variances
    )
    report = evaluate_uncertainty({"Hydra": hydra}, [{**batch, "labels": labels}])
    assert report.num_members == {"Hydra": 3} and report.models["Hydra"]["data"]["spread"] == pytest.approx(
        parts.variance.sqrt().mean().item()
    )


def test_a_single_member_abstains_and_a_deep_ensemble_decides_as_the_hydra():
    members = members_of(backbones())
    hydra = AutoHydra.from_pruned_members(members, shared=()).eval()
    [batch] = data = labelled(hydra)
    inputs, options = {name: batch[name] for name in batch if name != "labels"}, {"target": {"coverage": 0.8}}
    member = hydra.member(0).eval()
    member.calibrate(data, **options)
    with torch.no_grad():
        alone = member(**inputs).abstain
    assert alone.any() and not alone.all()  # by the variance that it predicts
    hydra.calibrate(data, **options)
    ensemble = calibrate(DeepEnsemble(members), data, **options).model.eval()
    with torch.no_grad():
        expected, found = hydra(**inputs), ensemble(**inputs)
    assert torch.equal(found.abstain, expected.abstain) and expected.abstain.any()
    torch.testing.assert_close(found.interval, expected.interval, rtol=0, atol=1e-6)


def test_circuits_and_taylor_scores_go_by_the_likelihood():
    [member] = members_of(backbones(1))
    data = labelled(member)
    circuit = extract_circuit(member, data, budget=1)
    with torch.no_grad():
        assert circuit.dense_score == pytest.approx(-member.eval()(**data[0]).loss.item(), abs=1e-9)
    assert all(score > 0 for score in taylor_scores(member, data).values())


@pytest.mark.slow
@for_families([family for family in FAMILIES if hasattr(family.hydra, "encode_and_classify")])
@torch.no_grad()
def test_every_family_has_such_a_head(family):
    """In float64."""
    models = [family.backbone(seed) for seed in range(2)]
    for model in models:
        model.config.problem_type = "regression"
    hydra = family.hydra.from_pruned_members([with_variance(model) for model in models], shared=()).eval()
    outputs = hydra(**family.inputs())
    means = torch.stack([model(**family.inputs()).logits for model in models], dim=1)
    torch.testing.assert_close(outputs.member_logits, means, rtol=0, atol=1e-10)
    assert outputs.member_variances.shape == means.shape and (outputs.member_variances == 1).all()


@pytest.mark.slow
def test_a_process_without_the_package_and_an_exported_model_answer_alike(tmp_path):
    from hydra_transformers.export import FILES, RUNNERS, export

    hydra = AutoHydra.from_pruned_members(members_of(backbones()), shared=()).float().eval()
    hydra.calibrate(labelled(hydra), alpha=0.2)
    hydra.save_pretrained(tmp_path / "hydra")
    inputs = {"input_ids": torch.arange(1, 13).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    with torch.no_grad():
        outputs = hydra(**inputs)
    program = """
import sys, torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    outputs = model(input_ids=torch.arange(1, 13).view(2, 6), attention_mask=torch.ones(2, 6, dtype=torch.long))
torch.save([outputs.member_variances, outputs.interval], sys.argv[2])
"""
    result = run_without_package(program, tmp_path / "hydra", tmp_path / "answers.pt", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    for found, expected in zip(
        torch.load(tmp_path / "answers.pt"), (outputs.member_variances, outputs.interval), strict=True
    ):
        # The other process computes by oneDNN, which rounds differently.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    run = RUNNERS["torch"](export(hydra, tmp_path / "exported", "torch") / FILES["torch"])
    found = run(inputs)
    torch.testing.assert_close(found["member_variances"], outputs.member_variances, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["interval"], outputs.interval, rtol=1e-4, atol=1e-4)
