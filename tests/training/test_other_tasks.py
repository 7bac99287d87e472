"""Pruning by the objective of the task: multi-label classification."""

import math

import pytest
import torch

from hydra_transformers import AutoHydra
from hydra_transformers.pruning import extract_circuit, taylor_scores
from tests.families import BERT, padded_texts


FIELDS = {"num_labels": 3, "problem_type": "multi_label_classification"}


def rows(count=24, seed=0):
    """Texts with a label for each of three tokens that occurs in them."""
    inputs = padded_texts(count, seed=seed)
    labels = torch.stack([(inputs["input_ids"] % 3 == label).any(dim=1) for label in range(3)], dim=1).float()
    return [{**{name: each[row] for name, each in inputs.items()}, "labels": labels[row]} for row in range(count)]


def test_a_circuit_keeps_the_loss_low_and_taylor_follows_its_gradient():
    model = BERT.backbone(**FIELDS).double().eval()
    data = rows()
    circuit = extract_circuit(model, data, budget=2)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    labels = batch.pop("labels").double()

    def loss(heads):
        logits = AutoHydra.from_backbone(model, heads)(**batch).logits.detach()
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels))

    assert circuit.dense_score == pytest.approx(-loss({}), abs=1e-9)
    singles = {head: loss({head[-2]: [head[-1]]}) for head in [(layer, h) for layer in range(3) for h in range(4)]}
    assert tuple(circuit.ranking[0]) == min(singles, key=singles.get)
    assert circuit.scores[0] == pytest.approx(-min(singles.values()), abs=1e-9)
    scores = taylor_scores(model, [{**batch, "labels": labels}])
    assert all(math.isfinite(score) and score > 0 for score in scores.values())
