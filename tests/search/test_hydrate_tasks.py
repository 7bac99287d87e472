"""`hydrate` by the measure of each task."""

import copy
import json

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from hydra_transformers import evaluate_uncertainty
from hydra_transformers.reports.task_report import read_report
from hydra_transformers.search import Candidate, Design, hydrate, target_of
from hydra_transformers.search.candidates import HYDRA, MEASURES, ONE_MODEL
from hydra_transformers.search.choice import why
from tests.search.tiny import FAST


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
TAGS = ["O", "B-PER", "I-PER", "B-LOC"]


def tagger_config():
    names = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: place for place, tag in enumerate(TAGS)}}
    return BertConfig(**SIZES, **names, initializer_range=0.3)


MODELS = {
    "regression": lambda: BertForSequenceClassification(
        BertConfig(**SIZES, num_labels=2, problem_type="regression", initializer_range=0.3)
    ),
    "several labels": lambda: BertForSequenceClassification(
        BertConfig(**SIZES, num_labels=3, problem_type="multi_label_classification", initializer_range=0.3)
    ),
    "tokens": lambda: BertForTokenClassification(tagger_config()),
}


@torch.no_grad()
def models_and_rows(task, count=2, rows=90):
    """Neighbours of one model in weights, and rows that this one labels, with some noise."""
    torch.manual_seed(0)
    start = MODELS[task]().eval()
    members = []
    for _ in range(count):
        member = copy.deepcopy(start)
        for weight in member.parameters():
            weight += 0.02 * torch.randn_like(weight)
        members.append(member)
    tokens = torch.randint(1, 40, (rows, 8))
    logits = start(input_ids=tokens).logits
    if task == "regression":
        labels = logits + 0.1 * torch.randn_like(logits)
    elif task == "tokens":
        labels = logits.argmax(dim=-1)
    else:
        labels = ((logits > logits.mean(dim=0)) ^ (torch.rand(logits.shape) < 0.05)).float()
    return members, [{"input_ids": one, "labels": each} for one, each in zip(tokens, labels, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("task", MODELS)
def test_fine_tunings_are_compared_by_the_measure_of_their_task(task, tmp_path):
    models, rows = models_and_rows(task)
    foreign = [{"input_ids": torch.randint(1, 40, (8,))} for _ in range(20)]
    found = hydrate(models, data=rows, ood_data=foreign, output_dir=tmp_path / "hydra", **FAST)
    metric, title = MEASURES[task]
    assert {each.design.kind for each in found.table} == {"one model", "Deep Ensemble", "soup", "Hydra"}
    assert any(each.design.pruned_by == "circuits" for each in found.table)
    assert found.chosen.measure == title and set(found.chosen.auroc) == {"OOD"} and found.gains == {}
    assert found.chosen.accuracy == found.report.models["hydra"].metrics[metric] and f"{title} " in found.choice
    assert read_report(tmp_path / "hydra" / "evaluation" / "report.json").task == task
    record = json.loads((tmp_path / "hydra" / "candidates.json").read_text())
    assert record["chosen"] == found.chosen.name and f"{title} ↑" in found.to_markdown()
    [result] = evaluate_uncertainty({"again": found.hydra}, rows).models.values()
    assert result.metrics[metric] > 0.5


@pytest.mark.slow
def test_a_pre_trained_model_is_fine_tuned_for_numbers_first(tmp_path):
    _, rows = models_and_rows("regression", rows=320)
    rows = [row | {"labels": row["labels"][:1]} for row in rows]
    encoder = MODELS["regression"]().bert
    settings = {"problem_type": "regression", "training_arguments": {"max_steps": 2, "use_cpu": True}}
    found = hydrate(encoder, rows, num_members=2, output_dir=tmp_path / "hydra", **settings, **FAST)
    assert found.chosen.measure == "R²" and found.hydra.config.problem_type == "regression"
    assert found.hydra.num_members == 2 and found.hydra.config.decision["task"] == "regression"


@pytest.mark.parametrize(
    "task, change, sentence",
    [
        ("regression", lambda labels: torch.full_like(labels, torch.nan), "labels are not finite numbers"),
        ("several labels", lambda labels: labels * 2, r"labels\[\d, \d\] is 2.0: pass 1 where a row has the label"),
        ("several labels", lambda labels: labels * torch.tensor([0, 1, 1]), "for calibration has the label 'LABEL_0'"),
        ("tokens", lambda labels: labels + 9, "data has the tag 9: the model's tags are 0 to 3"),
        ("tokens", lambda labels: labels[:1].squeeze(), "this model classifies tokens"),
    ],
)
def test_labels_that_do_not_fit_the_task_are_refused_before_any_work(task, change, sentence, tmp_path):
    models, rows = models_and_rows(task)
    rows = [row | {"labels": change(row["labels"])} for row in rows]
    with pytest.raises(ValueError, match=sentence):
        hydrate(models, data=rows, output_dir=tmp_path / "hydra", **FAST)
    assert list(tmp_path.iterdir()) == []


def test_pairs_of_answers_are_refused(tmp_path):
    models, rows = models_and_rows("several labels")
    with pytest.raises(ValueError, match="data is pairs of answers, and hydrate divides rows with labels"):
        hydrate(models, data={"chosen": rows, "rejected": rows}, output_dir=tmp_path / "hydra", **FAST)


def test_without_intervals_differences_are_said_plainly():
    def candidate(kind, r2, time):
        return Candidate(Design(kind, 3), r2, None, None, None, time=time, measure="R²")

    one, hydra = candidate(ONE_MODEL, 0.81, 1.0), candidate(HYDRA, 0.80, 1.2)
    said = why(hydra, [one, hydra], target_of("balance", False), {})
    assert (
        "R² 80.0" in said and "But one model is no slower (1.00 times one model's time, R² 81.0): +1.0 points" in said
    )
