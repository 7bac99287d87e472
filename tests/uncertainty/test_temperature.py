import json
import math

import pytest
import torch
from sklearn.metrics import log_loss

from hydra_transformers.data.prediction import SavedLogits, predict
from hydra_transformers.uncertainty import TemperatureScaling, classification_metrics


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


def test_the_fitted_temperature_minimises_the_ensembles_nll():
    logits, labels = overconfident()
    (temperature,) = TemperatureScaling.fit(logits, labels).temperature
    assert 3 < temperature < 5
    best = nll(logits, labels, temperature)
    assert all(best <= nll(logits, labels, temperature * factor) for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2))


def test_a_temperature_per_member_minimises_each_members_own_nll():
    logits, labels = overconfident()
    logits = logits * torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64).view(1, 3, 1)
    scaling = TemperatureScaling.fit(logits, labels, per_member=True)
    assert len(scaling.temperature) == 3
    for member, temperature in enumerate(scaling.temperature):
        alone = logits[:, member : member + 1]
        assert TemperatureScaling.fit(alone, labels).temperature == (temperature,)
        assert all(nll(alone, labels, temperature) <= nll(alone, labels, temperature * f) for f in (0.99, 1.01))


def test_scaling_lowers_nll_and_calibration_error_and_keeps_a_single_models_predictions():
    logits, labels = overconfident(members=1)
    before = classification_metrics(logits, labels)
    after = classification_metrics(TemperatureScaling.fit(logits, labels)(logits), labels)
    assert after["nll"] < before["nll"] and after["ece"] < before["ece"]
    assert after["accuracy"] == before["accuracy"]


def test_fitting_is_deterministic_and_takes_float16():
    logits, labels = overconfident()
    half = TemperatureScaling.fit(logits.half(), labels)
    assert half.temperature == TemperatureScaling.fit(logits.half(), labels).temperature
    assert half.temperature[0] == pytest.approx(TemperatureScaling.fit(logits, labels).temperature[0], rel=1e-2)


def test_members_are_scaled_before_they_are_averaged():
    logits = torch.randn(4, 2, 3)
    scaled = TemperatureScaling([2.0, 4.0])(logits)
    torch.testing.assert_close(scaled, torch.stack([logits[:, 0] / 2, logits[:, 1] / 4], dim=1))
    wrapped = TemperatureScaling(2.0).wrap(SavedLogits())
    output = wrapped(member_logits=logits)
    torch.testing.assert_close(output.logits.exp(), (logits / 2).softmax(-1).mean(1))
    torch.testing.assert_close(predict(wrapped, {"member_logits": logits, "row": torch.arange(4)}), logits / 2)


@pytest.mark.parametrize("per_member", [False, True])
def test_labels_of_probability_0_at_every_temperature_are_refused(per_member):
    logits, labels = overconfident()
    logits[3, :, labels[3]] = -torch.inf
    with pytest.raises(ValueError, match=r"some label the probability 0 \(logit -inf\) at every temperature"):
        TemperatureScaling.fit(logits, labels, per_member)


def test_a_label_that_one_member_rules_out_is_no_obstacle():
    logits, labels = overconfident()
    logits[3, 0, labels[3]] = -torch.inf
    assert 3 < TemperatureScaling.fit(logits, labels).temperature[0] < 5


def test_a_saved_temperature_is_loaded_exactly(tmp_path):
    scaling = TemperatureScaling([1 / 3, math.pi])
    path = scaling.save(tmp_path / "model")
    assert path == tmp_path / "model" / "temperature.json"
    assert TemperatureScaling.load(tmp_path / "model").temperature == scaling.temperature
    assert [file.name for file in path.parent.iterdir()] == ["temperature.json"]
    assert json.loads(path.read_text()) == {"temperature": [1 / 3, math.pi]}


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no temperature\.json"):
        TemperatureScaling.load(tmp_path)
    for content in (b"\x80\xff\x00", b"[" * 100_000, b'{"temperature": [-1]}'):
        (tmp_path / "temperature.json").write_bytes(content)
        with pytest.raises(ValueError, match="is not a temperature file"):
            TemperatureScaling.load(tmp_path)
    (tmp_path / "temperature.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a temperature file"):
        TemperatureScaling.load(tmp_path)


def test_logits_without_a_best_temperature_give_the_edge_and_a_warning():
    labels = torch.arange(20) % 2
    always_right = torch.nn.functional.one_hot(labels, 2).double().unsqueeze(1)
    with pytest.warns(UserWarning, match="at the edge of the search range"):
        scaling = TemperatureScaling.fit(always_right, labels)
    assert scaling.temperature == pytest.approx((0.01,))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, [], [1.0, 0.0]])
def test_impossible_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="pass one positive number"):
        TemperatureScaling(temperature)


def test_unfit_fitting_data_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="is not a prediction"):
        TemperatureScaling.fit(torch.full((3, 1, 2), torch.nan), [0, 1, 0])
    with pytest.raises(ValueError, match="labels is empty"):
        TemperatureScaling.fit(torch.zeros(0, 1, 2), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match="2 temperatures, member_logits has 3 members"):
        TemperatureScaling([1.0, 2.0])(torch.zeros(1, 3, 2))
