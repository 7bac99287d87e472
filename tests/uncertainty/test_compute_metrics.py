"""The metrics inside Trainer and `evaluate`."""

import evaluate
import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from hydra_transformers.uncertainty import (
    StreamingComputeMetrics,
    classification_metrics,
    compute_metrics,
    diversity_metrics,
    ood_metrics,
)
from hydra_transformers.uncertainty.evaluate_metrics import ClassificationMetrics, DiversityMetrics, OODMetrics


GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(0, 2, (40, 3, 5)).astype(np.float32)
LABELS = GENERATOR.integers(0, 5, 40)
EXPECTED = classification_metrics(LOGITS, LABELS) | diversity_metrics(LOGITS)
MEAN_LOGITS = torch.tensor(LOGITS).softmax(-1).mean(1).log().numpy()


def test_member_logits_are_found_among_trainers_predictions():
    hidden_states = (np.zeros((40, 9, 8)), np.zeros((40, 9, 8)))
    for predictions in (LOGITS, (MEAN_LOGITS, LOGITS), (MEAN_LOGITS, np.zeros((40, 3, 8)), LOGITS, hidden_states)):
        assert compute_metrics(EvalPrediction(predictions, LABELS)) == EXPECTED


def test_logits_alone_are_one_member():
    metrics = compute_metrics(EvalPrediction(MEAN_LOGITS, LABELS))
    assert metrics["mutual_information"] == metrics["disagreement"] == 0
    for name in ("accuracy", "brier", "nll", "ece", "aece", "aurc"):
        assert metrics[name] == pytest.approx(EXPECTED[name], rel=1e-5), name


class MembersForImageClassification(ViTForImageClassification):
    """A plain ViT that answers as three members."""

    def forward(self, pixel_values, labels=None, **kwargs):
        output = super().forward(pixel_values, labels=labels)
        output["member_logits"] = output.logits.unsqueeze(1) * torch.tensor([1.0, 2.0, -1.0]).view(1, 3, 1)
        return output


@pytest.mark.parametrize("streamed", [False, True])
def test_trainer_reports_the_metrics(tmp_path, streamed):
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=4,
        patch_size=2,
        num_labels=5,
    )
    model = MembersForImageClassification(config)
    rows = [{"pixel_values": torch.randn(3, 4, 4), "labels": i % 5} for i in range(21)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            tmp_path, per_device_eval_batch_size=4, batch_eval_metrics=streamed, report_to=[], use_cpu=True
        ),
        eval_dataset=rows,
        compute_metrics=StreamingComputeMetrics() if streamed else compute_metrics,
    )
    with torch.no_grad():
        expected = model.eval()(torch.stack([row["pixel_values"] for row in rows])).member_logits
    labels = [row["labels"] for row in rows]
    for _ in range(2):  # the second evaluation starts afresh
        metrics = trainer.evaluate()
        for name, value in (classification_metrics(expected, labels) | diversity_metrics(expected)).items():
            assert metrics[f"eval_{name}"] == pytest.approx(value, abs=1e-4), name


def test_evaluate_metrics_take_batches_and_combine(tmp_path):
    combined = evaluate.combine([ClassificationMetrics(cache_dir=tmp_path), DiversityMetrics(cache_dir=tmp_path)])
    for start in range(0, 40, 7):
        combined.add_batch(predictions=LOGITS[start : start + 7], references=LABELS[start : start + 7])
    assert combined.compute() == EXPECTED


def test_evaluate_metrics_compute_at_once_sample_by_sample_and_from_tensors(tmp_path):
    metric = ClassificationMetrics(cache_dir=tmp_path)
    assert metric.compute(predictions=torch.tensor(LOGITS), references=LABELS.tolist()) == classification_metrics(
        LOGITS, LABELS
    )
    diversity = DiversityMetrics(cache_dir=tmp_path)
    for logits, label in zip(LOGITS, LABELS, strict=True):
        metric.add(prediction=logits, reference=label)
        diversity.add(prediction=logits)
    assert metric.compute() == classification_metrics(LOGITS, LABELS)
    assert diversity.compute() == diversity_metrics(LOGITS)


def test_evaluate_stores_a_few_numbers_per_sample_not_the_logits(tmp_path):
    metric = ClassificationMetrics(cache_dir=tmp_path)
    metric.add_batch(predictions=GENERATOR.normal(size=(50, 2, 3000)), references=np.zeros(50, dtype=int))
    metric.writer.write_examples_on_file()
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 50_000
    assert metric.compute()["accuracy"] <= 1


def test_evaluate_ood_metrics(tmp_path):
    scores, is_ood = GENERATOR.normal(size=30), np.arange(30) % 2
    metric = OODMetrics(cache_dir=tmp_path)
    metric.add_batch(predictions=scores[:11], references=is_ood[:11])
    metric.add_batch(predictions=scores[11:], references=is_ood[11:])
    assert metric.compute() == ood_metrics(scores[is_ood == 0], scores[is_ood == 1])
    with pytest.raises(ValueError, match="must be 1"):
        metric.compute(predictions=[0.1, 0.2], references=[0, 2])
