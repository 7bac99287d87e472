"""Fingerprints identify weights and rows, bit for bit."""

import copy

import datasets
import torch

from hydra_transformers.data.fingerprints import fingerprint_of_texts, fingerprint_of_weights, fingerprints_of_rows
from hydra_transformers.data.loading import PreparedData
from tests.families import VIT


def test_models_have_one_fingerprint_exactly_if_their_weights_are_equal():
    model = VIT.backbone()
    other = copy.deepcopy(model)
    assert fingerprint_of_weights(model) == fingerprint_of_weights(other)
    parameter = next(other.parameters())
    with torch.no_grad():
        parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(9.0, dtype=parameter.dtype))
    assert fingerprint_of_weights(model) != fingerprint_of_weights(other)


def test_a_row_has_one_fingerprint_in_every_batch_and_other_values_names_types_and_shapes_another():
    batch = {"input_ids": torch.arange(12).view(4, 3), "labels": torch.tensor([0, 1, 0, 1])}
    digests = fingerprints_of_rows(batch)
    parts = [{name: value[start : start + 2] for name, value in batch.items()} for start in (0, 2)]
    assert digests == [digest for part in parts for digest in fingerprints_of_rows(part)] and len(set(digests)) == 4

    for other in (
        {"x": torch.tensor([[1.0, 2.0 + 1e-6]])},
        {"y": torch.tensor([[1.0, 2.0]])},
        {"x": torch.tensor([[1.0, 2.0]], dtype=torch.float64)},
        {"x": torch.tensor([[[1.0], [2.0]]])},
    ):
        assert fingerprints_of_rows(other) != fingerprints_of_rows({"x": torch.tensor([[1.0, 2.0]])})


def test_texts_have_one_fingerprint_in_every_form_and_another_one_if_a_single_text_differs():
    rows = [{"text": f"film {number}", "words": [f"film {number}"]} for number in range(300)]
    forms = (rows, datasets.Dataset.from_list(rows))
    for kind, column in (("text", "text"), ("words", "words")):
        digests = {fingerprint_of_texts(PreparedData(form, None, kind, (column,))) for form in forms}
        assert len(digests) == 1
        changed = [*rows[:1], {"text": "film", "words": ["film"]}, *rows[2:]]
        assert fingerprint_of_texts(PreparedData(changed, None, kind, (column,))) not in digests
