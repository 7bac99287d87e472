"""Circuits by a metric of the user's own: any function of logits and labels, any problem."""

import pytest
import torch
from transformers import BertForSequenceClassification

from hydra_transformers.hub.card import describe_circuit
from hydra_transformers.pruning import Circuit, extract_circuit
from tests.families import bert_backbone, padded_texts
from tests.pruning.backbones import family
from tests.pruning.reference import algorithm_1, logits_of


def f1_of_class_1(logits: torch.Tensor, labels: torch.Tensor) -> float:
    chosen = logits.argmax(-1) == 1
    wanted = labels == 1
    return (2 * (chosen & wanted).sum() / (chosen.sum() + wanted.sum())).item()


def negative_error(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -(logits.squeeze(-1) - labels).square().mean()


def greedy(model, batches, metric, budget: int) -> tuple[list, list]:
    """The greedy loop as it is written, on a plain model with zeroed slices."""
    labels = torch.cat([batch["labels"] for batch in batches])

    def judge(model, *_) -> tuple[float]:
        return (float(metric(logits_of(model, batches, None), labels)),)

    return algorithm_1(model, batches, None, None, budget, judge=judge)


@pytest.fixture
def regression() -> tuple[BertForSequenceClassification, list[dict]]:
    model = bert_backbone(num_labels=1)
    rows = padded_texts(9)
    with torch.no_grad():
        rows["labels"] = model(**rows).logits.squeeze(-1) + 0.3 * torch.randn(9, generator=torch.manual_seed(0))
    return model, [{name: value[part] for name, value in rows.items()} for part in (slice(5), slice(5, 9))]


@pytest.mark.slow
def test_the_circuit_of_a_metric_is_that_of_the_plain_loop(regression, tmp_path):
    for model, batches, metric in ((*family("bert")[:2], f1_of_class_1), (*regression, negative_error)):
        circuit = extract_circuit(model, batches, objective=metric, budget=2)
        ranking, scores = greedy(model, batches, metric, 2)
        assert circuit.ranking == ranking
        assert circuit.scores == pytest.approx(scores, rel=1e-6, abs=1e-9)
    assert (circuit.objective, circuit.made_from["metric"], circuit.chance_from) == ("metric", "negative_error", None)
    circuit.save(tmp_path / "circuit.json")
    assert Circuit.load(tmp_path / "circuit.json") == circuit
    assert circuit.plot(tmp_path / "circuit.png").stat().st_size > 1_000
    assert describe_circuit(circuit) == "objective: negative_error, 9 samples"


def test_a_stopped_run_goes_on_and_another_metric_of_the_same_name_is_refused(regression, tmp_path):
    model, batches = regression
    settings = {"budget": 3, "checkpoint": tmp_path / "run.json"}
    whole = extract_circuit(model, batches, objective=negative_error, budget=3)
    extract_circuit(model, batches, objective=negative_error, **settings | {"budget": 2})
    assert extract_circuit(model, batches, objective=negative_error, **settings) == whole

    def other(logits, labels):
        return 2 * negative_error(logits, labels)

    with pytest.raises(ValueError, match="with other metric"):
        extract_circuit(model, batches, objective=other, **settings)
    other.__qualname__ = "negative_error"
    with pytest.raises(ValueError, match="whose metric of this name gave"):
        extract_circuit(model, batches, objective=other, **settings)


def test_the_metric_reads_every_sample_at_once_on_the_cpu(regression):
    model, batches = regression
    seen = []

    def metric(logits, labels):
        seen.append((tuple(logits.shape), logits.device.type, labels.tolist()))
        return 0.0

    circuit = extract_circuit(model, batches, objective=metric, budget=1)
    assert set(map(str, seen)) == {str(((9, 1), "cpu", torch.cat([batch["labels"] for batch in batches]).tolist()))}
    assert circuit.ranking == [(0, 0)] and circuit.tied == [12], "of equal heads the first in order goes"
