"""The metrics inside Trainer and `evaluate`."""

import evaluate
import numpy as np
import pytest
import torch
from datasets import Features
from transformers import EvalPrediction, Trainer, TrainingArguments

from hydra_transformers.data.prediction import predict
from hydra_transformers.uncertainty import classification_metrics, compute_metrics, ood_metrics
from hydra_transformers.uncertainty.evaluate_metrics import ClassificationMetrics, DiversityMetrics, OODMetrics
from hydra_transformers.uncertainty.metrics import diversity_metrics
from tests.families import VIT, images


GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(0, 2, (40, 3, 5)).astype(np.float32)
LABELS = GENERATOR.integers(0, 5, 40)
EXPECTED = classification_metrics(LOGITS, LABELS) | diversity_metrics(LOGITS)
MEAN_LOGITS = torch.tensor(LOGITS).softmax(-1).mean(1).log().numpy()


def test_member_logits_are_found_among_trainers_predictions():
    hidden_states = (np.zeros((40, 9, 8)), np.zeros((40, 9, 8)))
    for predictions in (LOGITS, (MEAN_LOGITS, LOGITS), (MEAN_LOGITS, np.zeros((40, 3, 8)), LOGITS, hidden_states)):
        assert compute_metrics(EvalPrediction(predictions, LABELS)) == EXPECTED


HYDRA_ROWS = [{"pixel_values": image, "labels": i % 5} for i, image in enumerate(images(21))]


def hydra_trainer(folder, metrics, **arguments):
    hydra = VIT.fused().float()
    arguments = TrainingArguments(
        folder, per_device_eval_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True, **arguments
    )
    return Trainer(
        model=hydra, args=arguments, train_dataset=HYDRA_ROWS, eval_dataset=HYDRA_ROWS, compute_metrics=metrics
    )


def metrics_of(model):
    member_logits = predict(model, {"pixel_values": torch.stack([row["pixel_values"] for row in HYDRA_ROWS])})
    labels = [row["labels"] for row in HYDRA_ROWS]
    return classification_metrics(member_logits, labels) | diversity_metrics(member_logits)


def test_trainer_reports_the_diversity_of_a_hydra(tmp_path):
    trainer = hydra_trainer(tmp_path, compute_metrics)
    expected = metrics_of(trainer.model)
    assert expected["mutual_information"] > 0.001
    metrics = trainer.evaluate(ignore_keys=[])
    for name, value in expected.items():
        assert metrics[f"eval_{name}"] == pytest.approx(value, abs=1e-4), name
    with pytest.warns(UserWarning, match="logits without member_logits"):
        metrics = trainer.evaluate()
    assert "eval_mutual_information" not in metrics and "eval_disagreement" not in metrics
    assert metrics["eval_nll"] == pytest.approx(expected["nll"], abs=1e-4)


def test_a_function_written_for_plain_models_gets_the_logits_of_a_hydra(tmp_path):
    def accuracy(prediction):
        logits, labels = prediction
        assert logits.shape == (21, 5)
        return {"accuracy": float((logits.argmax(-1) == labels).mean())}

    trainer = hydra_trainer(tmp_path, accuracy)
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(metrics_of(trainer.model)["accuracy"])
    assert trainer.predict(HYDRA_ROWS).predictions.shape == (21, 5)


def test_evaluate_metrics_take_batches(tmp_path):
    scores = GENERATOR.normal(size=30)
    is_ood = np.arange(30) % 2
    detection = ood_metrics(scores[is_ood == 0], scores[is_ood == 1])
    cases = [(ClassificationMetrics, LOGITS, LABELS, classification_metrics(LOGITS, LABELS))]
    for kind, predictions, references, expected in [*cases, (OODMetrics, scores, is_ood, detection)]:
        metric = kind(cache_dir=tmp_path)
        for start in range(0, len(references), 7):
            batch = slice(start, start + 7)
            metric.add_batch(predictions=predictions[batch], references=references[batch])
        assert metric.compute() == expected


def test_evaluate_combines_them_with_metrics_of_others(tmp_path):
    class Rows(evaluate.Metric):
        def _info(self):
            return evaluate.MetricInfo("", "", Features(ClassificationMetrics.columns))

        def _compute(self, predictions, references):
            return {"rows": len(references)}

    kinds = (ClassificationMetrics, DiversityMetrics, Rows)
    metrics = evaluate.combine([kind(cache_dir=str(tmp_path / kind.__name__)) for kind in kinds])
    found = metrics.compute(predictions=LOGITS, references=LABELS)
    expected = classification_metrics(LOGITS, LABELS) | diversity_metrics(LOGITS)
    assert found == expected | {"rows": len(LABELS)}
