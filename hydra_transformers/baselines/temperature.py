"""Temperature scaling (Guo et al., 2017) in one call."""

from typing import Any

from torch import nn

from ..prediction import collect_member_logits
from ..uncertainty.temperature import TemperatureScaledClassifier, TemperatureScaling


def temperature_scaled(
    model: nn.Module, validation_data: Any, batch_size: int = 32, per_member: bool = False
) -> TemperatureScaledClassifier:
    """The model with the temperature that suits the validation data best; the model itself stays as it is.

    model: a Hugging Face classifier, a Hydra or another baseline
    validation_data: labelled, as `evaluate_uncertainty` takes it: a DataLoader, a list of dict batches or a Dataset of rows
    batch_size: rows per batch, where the data is a Dataset of rows
    per_member: one temperature per member in place of one for all, see `TemperatureScaling.fit`

    The temperature is `temperature_scaled(...).scaling`.
    """
    member_logits, labels = collect_member_logits(model, validation_data, batch_size)
    if labels is None:
        raise ValueError("validation_data has no labels: add a column labels (or label) with class indices")
    return TemperatureScaling.fit(member_logits, labels, per_member).wrap(model)
