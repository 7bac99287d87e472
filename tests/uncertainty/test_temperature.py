import warnings

import pytest
import torch
from sklearn.metrics import log_loss

from hydra_transformers.data.prediction import SavedLogits, predict
from hydra_transformers.models.ensembling import log_mean_probability
from hydra_transformers.uncertainty import TemperatureScaling, decompose
from hydra_transformers.uncertainty.temperature import best_temperature, fit_temperature


def overconfident(samples=600, members=3, classes=5, factor=4.0, seed=0):
    """Labels drawn from softmax(z), logits then blown up by `factor`: its best temperature is near `factor`."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(samples, 1, classes, generator=generator, dtype=torch.float64)
    labels = logits.squeeze(1).softmax(-1).multinomial(1, generator=generator).squeeze(1)
    noise = 0.3 * torch.randn(samples, members, classes, generator=generator, dtype=torch.float64)
    return factor * (logits + noise), labels


def nll(logits, labels, temperature):
    mean = (logits / torch.as_tensor(temperature).view(1, -1, 1)).softmax(-1).mean(1)
    return log_loss(labels, mean, labels=range(logits.shape[-1]))


def pooled_answer(logits, temperature):
    return (logits.softmax(-1).mean(1).log() / temperature).softmax(-1)


def pooled_nll(logits, labels, temperature):
    return log_loss(labels, pooled_answer(logits, temperature), labels=range(logits.shape[-1]))


# Pooled first


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.5, 6.0])
@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_the_mean_of_the_members_is_the_pooled_answer_with_the_temperature(members, temperature):
    logits = 6 * torch.randn(200, members, 7, generator=torch.Generator().manual_seed(members), dtype=torch.float64)
    scaled = TemperatureScaling(temperature)(logits)
    expected = pooled_answer(logits, temperature)
    torch.testing.assert_close(scaled.softmax(-1).mean(1), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(log_mean_probability(scaled), expected.log(), atol=1e-9, rtol=1e-9)
    parts = decompose(scaled)
    torch.testing.assert_close(parts.total, torch.special.entr(expected).sum(-1), atol=1e-10, rtol=0)
    torch.testing.assert_close(parts.aleatoric + parts.epistemic, parts.total, atol=1e-10, rtol=0)
    assert (parts.epistemic >= 0).all()
    # The energy of each member is what it was divided by the temperature alone.
    torch.testing.assert_close(scaled.logsumexp(-1), (logits / temperature).logsumexp(-1), atol=1e-9, rtol=0)


def test_a_single_model_and_a_temperature_of_1_are_left_bit_for_bit_as_they_were():
    logits = torch.randn(20, 3, 4)
    assert torch.equal(TemperatureScaling(1.0)(logits), logits)
    assert torch.equal(TemperatureScaling(2.5)(logits[:, :1]), logits[:, :1] / 2.5)


def test_sure_members_that_contradict_each_other_share_what_the_temperature_moves():
    sure = torch.tensor([[[60.0, 0.0], [60.0, 0.0], [0.0, 60.0]]], dtype=torch.float64)
    found = TemperatureScaling(2.0)(sure).softmax(-1)[0]
    answer = torch.tensor([2.0, 1.0]).double().sqrt() / (2**0.5 + 1)
    torch.testing.assert_close(found.mean(0), answer, atol=1e-10, rtol=0)
    torch.testing.assert_close(found[2], torch.tensor([0.0, 1.0]).double(), atol=1e-10, rtol=0)
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=0)


def test_pooled_logits_and_their_gradients_stay_finite():
    logits = torch.tensor([[[200.0, 0.0, -200.0], [-200.0, 0.0, 200.0]], [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]])
    logits.requires_grad_()
    scaled = TemperatureScaling(0.7)(logits)
    scaled.sum().backward()
    assert scaled.isfinite().all() and logits.grad.isfinite().all()
    ruled_out = torch.tensor([[[1.0, 0.0, -torch.inf], [0.0, 2.0, -torch.inf]]])
    found = TemperatureScaling(2.0)(ruled_out)
    assert found.softmax(-1)[..., 2].eq(0).all() and found[..., :2].isfinite().all()
    nothing = torch.full((1, 2, 3), torch.nan)
    assert TemperatureScaling(2.0)(nothing).isnan().all()


def test_logits_without_a_best_temperature_give_the_edge_and_a_warning():
    labels = torch.arange(20) % 2
    always_right = torch.nn.functional.one_hot(labels, 2).double().unsqueeze(1)
    with pytest.warns(UserWarning, match="at the edge of the search range"):
        scaling = TemperatureScaling.fit(always_right, labels)
    assert scaling.temperature == pytest.approx(0.01)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        assert fit_temperature(always_right, labels) == 1.0
    assert [str(one.message) for one in noted] == [
        "the validation logits are all right, so that no temperature is better than those below it: it stays 1"
    ]
    useless = always_right.flip(0) * 0 + torch.tensor([[3.0, -3.0]])
    with pytest.warns(UserWarning, match=r"at the edge of the search range \(100\)"):
        assert fit_temperature(useless, labels) == pytest.approx(100)


@pytest.mark.parametrize(("pooled", "nll"), [(True, pooled_nll), (False, nll)], ids=["pooled", "members"])
def test_the_fitted_temperature_minimises_the_ensembles_nll(pooled, nll):
    logits, labels = overconfident()
    temperature = best_temperature(logits, labels, pooled)
    assert 3 < temperature < 5
    best = nll(logits, labels, temperature)
    assert all(best <= nll(logits, labels, temperature * factor) for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2))
    if pooled:
        assert TemperatureScaling.fit(logits, labels).temperature == temperature
        found = TemperatureScaling(temperature)(logits).softmax(-1).mean(1)
        assert log_loss(labels, found, labels=range(5)) == pytest.approx(best, abs=1e-10)


def test_a_wrapped_model_has_the_temperature():
    logits = torch.randn(4, 2, 3)
    wrapped = TemperatureScaling(2.0).wrap(SavedLogits())
    torch.testing.assert_close(wrapped(member_logits=logits).logits.exp(), pooled_answer(logits, 2.0))
    found = predict(wrapped, {"member_logits": logits, "row": torch.arange(4)})
    torch.testing.assert_close(found, TemperatureScaling(2.0)(logits))
