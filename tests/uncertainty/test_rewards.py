"""Reward models and rerankers: how members become one score, preferences, and a score too low to answer."""

import copy
import math
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import DeepEnsemble, MCDropout
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import calibrate
from hydra_transformers.uncertainty.rewards import preference_metrics
from tests.families import bert_backbone
from tests.tiny_data import save_bert


TEXTS = torch.randint(5, 38, (60, 6), generator=torch.Generator().manual_seed(0))
RELEVANT = torch.arange(60) % 2


@cache
def _built() -> torch.nn.Module:
    return AutoHydra.from_pruned_members([bert_backbone(seed, num_labels=1) for seed in range(3)], shared=()).eval()


def reward_model(aggregate: str | None = None) -> torch.nn.Module:
    model = copy.deepcopy(_built())
    model.config.aggregate = aggregate
    return model


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (None, lambda scores: scores.mean(1)),
        ("mean", lambda scores: scores.mean(1)),
        ("min", lambda scores: scores.min(1).values),
        ("mean-2std", lambda scores: scores.mean(1) - 2 * scores.std(1, correction=0)),
        ("mean-0.5std", lambda scores: scores.mean(1) - 0.5 * scores.std(1, correction=0)),
    ],
)
@torch.no_grad()
def test_logits_are_put_together_as_the_config_says(aggregate, expected, tmp_path):
    """In float64, against the members apart; set on a loaded model, and saved."""
    model = reward_model(aggregate)
    apart = torch.stack([bert_backbone(seed, num_labels=1)(input_ids=TEXTS).logits for seed in range(3)], dim=1)
    assert torch.allclose(model(input_ids=TEXTS).logits, expected(apart), rtol=0, atol=1e-10)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.aggregate == aggregate
    assert torch.equal(loaded(input_ids=TEXTS).logits, model(input_ids=TEXTS).logits)
    other = type(model).from_pretrained(tmp_path, dtype=torch.float64, aggregate="min")
    assert torch.equal(other(input_ids=TEXTS).logits, other(input_ids=TEXTS).member_logits.amin(1))


def test_one_member_and_equal_members_have_finite_gradients():
    model = reward_model("mean-2std").member(0).train()
    model.config.aggregate = "mean-2std"
    model(input_ids=TEXTS[:4]).logits.sum().backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


def test_preferences_are_counted_plainly():
    chosen = torch.tensor([[2.0, 3.0], [1.0, 0.0], [0.0, 5.0], [1.0, 1.0]])
    rejected = torch.tensor([[0.0, 0.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
    found = preference_metrics(chosen, rejected)
    assert found["pair_accuracy"] == (1 + 0 + 1 + 0.5) / 4
    # Margins spread by 0.5, 0.5, 2.5 and 0; the second and the last are not right.
    assert found["wrong_pairs_auroc"] == pytest.approx((0 + 0 + 0.5 + 0) / 4)
    assert preference_metrics(chosen, rejected, "min")["pair_accuracy"] == (1 + 0 + 0 + 0.5) / 4
    assert math.isnan(preference_metrics(chosen[:1], rejected[:1])["wrong_pairs_auroc"])


def test_reports_judge_pairs():
    model = reward_model("min").float()
    data = {"chosen": [{"input_ids": TEXTS[:30]}], "rejected": [{"input_ids": TEXTS[30:]}]}
    report = evaluate_uncertainty({"Hydra": model}, data)
    with torch.no_grad():
        scores = model(input_ids=TEXTS).logits.squeeze(1)
    expected = (scores[:30] > scores[30:]).float().mean().item()
    assert report.models["Hydra"]["data"]["pair_accuracy"] == pytest.approx(expected)
    assert "Pair accuracy" in str(report)
    compared = evaluate_uncertainty({"Hydra": model, "plain": bert_backbone(0, num_labels=1).float()}, data)
    assert compared.models["plain"]["data"]["spread"] == 0 and compared.models["Hydra"] == report.models["Hydra"]
    assert model.member(0).config.aggregate == "min"
    with pytest.raises(TypeError, match="has no pairs, by which a reward model is measured"):
        evaluate_uncertainty(model, [{"input_ids": TEXTS}])
    data["rejected"] = [{"input_ids": TEXTS[30:50]}]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        evaluate_uncertainty(model, data)


def test_texts_of_a_table_are_pairs_only_if_it_has_both_columns(tmp_path):
    model = reward_model("min").float()
    model.config.name_or_path = str(save_bert(tmp_path))
    pairs = pd.DataFrame({"chosen": ["a good film", "joy"], "rejected": ["bad", "bad film"]})
    answers = {name: [answer["score"] for answer in model.predict(pairs[name])] for name in pairs}
    margin = np.subtract(answers["chosen"], answers["rejected"]).mean()
    for data in (pairs, pairs.to_dict("records")):
        report = evaluate_uncertainty({"Hydra": model}, data)
        assert report.models["Hydra"]["data"]["margin"] == pytest.approx(margin, abs=1e-6)
    with pytest.raises(ValueError, match="has no pairs, by which a reward model is measured"):
        evaluate_uncertainty(model, pairs[["chosen"]])


def test_low_scores_are_not_answered_and_another_aggregate_undoes_that(tmp_path):
    model = reward_model("min").float()
    rows = [{"input_ids": TEXTS, "labels": RELEVANT}]
    calibration = calibrate(model, rows, target={"coverage": 0.8})
    out = model(input_ids=TEXTS)
    scores = out.logits.squeeze(1)
    threshold = -calibration.abstention.threshold
    assert torch.equal(out.abstain, ~(scores >= threshold))
    assert (~out.abstain)[RELEVANT.bool()].float().mean() >= 0.8
    assert "count as nothing relevant" in str(calibration)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded(input_ids=TEXTS).abstain, out.abstain)
    loaded.config.aggregate = "mean"
    assert loaded(input_ids=TEXTS).abstain is None


def test_ensembles_of_reward_models_abstain_too():
    """They have no config of their own, and answer as the one inside says."""
    model = reward_model("min").float()
    rows = [{"input_ids": TEXTS, "labels": RELEVANT}]
    for ensemble in (DeepEnsemble([model, model]), MCDropout(model, 2, p=0.1, seed=0)):
        calibration = calibrate(ensemble.eval(), rows, target={"coverage": 0.8})
        answer = calibration.model.eval()(input_ids=TEXTS)
        assert torch.equal(answer.abstain, -answer.logits[:, 0] > calibration.abstention.threshold)
        assert answer.abstain.any() and not answer.abstain[RELEVANT == 1].all()
