"""Labels that the model has no class for are refused before anything is computed."""

import pytest
import torch

from hydra_transformers.pruning import extract_circuit, taylor_prune
from tests.families import images, vit_backbone


@pytest.mark.parametrize("label", [5, -100])
def test_labels_out_of_range_are_refused(label):
    data = [{"pixel_values": images().float(), "labels": torch.tensor([0, 1, label, 2])}]
    model = vit_backbone().float()
    message = f"has the label {label}: the model's classes are 0 to 4"
    with pytest.raises(ValueError, match=f"data {message}"):
        extract_circuit(model, data, objective="acc", budget=2, progress=False)
    with pytest.raises(ValueError, match=f"data {message}"):
        taylor_prune(model, data, heads_per_layer=3)
