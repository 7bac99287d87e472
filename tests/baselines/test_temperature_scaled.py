"""temperature_scaled: a classifier with the temperature that suits validation data."""

import pytest
import torch
from scipy.optimize import minimize_scalar

from hydra_transformers.baselines import DeepEnsemble, temperature_scaled
from hydra_transformers.cost import count_multiply_adds, count_parameters
from tests.families import VIT, images, vit_backbone


def validation(rows: int = 64) -> list[dict]:
    """Labels drawn from the model's own probabilities at temperature 2."""
    pixel_values = images(rows, seed=3)
    with torch.no_grad():
        probabilities = (vit_backbone()(pixel_values=pixel_values).logits / 2).softmax(-1)
    labels = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    return [
        {"pixel_values": part, "labels": row}
        for part, row in zip(pixel_values.split(20), labels.split(20), strict=True)
    ]


def test_the_temperature_has_the_least_validation_loss():
    model, data = vit_backbone(), validation()
    with torch.no_grad():
        logits = torch.cat([model(pixel_values=batch["pixel_values"]).logits for batch in data])
        labels = torch.cat([batch["labels"] for batch in data])
        best = minimize_scalar(
            lambda t: torch.nn.functional.cross_entropy(logits / t, labels).item(), bounds=(0.1, 20)
        )
        scaled = temperature_scaled(model, data)
        output = scaled(pixel_values=images(2))
        expected = model(pixel_values=images(2)).logits / best.x
    assert scaled.scaling.temperature == pytest.approx((best.x,), rel=1e-3)
    torch.testing.assert_close(output.member_logits[:, 0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*edge of the search")
def test_per_member_there_is_one_temperature_each():
    ensemble = DeepEnsemble([vit_backbone(0), vit_backbone(1)])
    together, apart = (temperature_scaled(ensemble, validation(), per_member=each) for each in (False, True))
    assert (len(together.scaling.temperature), len(apart.scaling.temperature)) == (1, 2)


def test_a_dataset_of_rows_is_read_in_batches():
    rows = [{"pixel_values": image, "labels": 0} for image in images(6)]
    model, seen = vit_backbone(), []
    model.register_forward_hook(lambda module, args, output: seen.append(len(output.logits)))
    with pytest.warns(UserWarning, match="edge of the search range"):
        temperature_scaled(model, torch.utils.data.Subset(rows, range(6)), batch_size=4)
    assert seen == [4, 2]


def test_a_temperature_costs_nothing():
    model = vit_backbone().float()
    scaled = temperature_scaled(model.double(), validation())
    assert count_multiply_adds(scaled) == count_multiply_adds(model)
    assert count_parameters(scaled) == count_parameters(model)
    assert scaled.device == torch.device("cpu")


def test_data_needs_labels():
    with pytest.raises(ValueError, match="data has no labels"):
        temperature_scaled(vit_backbone(), [VIT.inputs()])
