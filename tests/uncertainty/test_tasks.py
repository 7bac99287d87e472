"""One contract for all tasks: calibrated, decided, saved, loaded, measured and predicted alike."""

import copy
import json
import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from hydra_transformers import AutoHydra
from hydra_transformers.models.task import TASKS as TASKS_OF_MODELS
from hydra_transformers.uncertainty import CalibratedClassifier, calibrate, predict_decisions
from hydra_transformers.uncertainty.calibration import halves_of
from hydra_transformers.uncertainty.features import without_decision
from hydra_transformers.uncertainty.tasks import TASKS, task_fit_of
from tests import tiny_tags
from tests.tiny_data import SIZES, names_of


WORDS = len(tiny_tags.PIECES)
FIELDS = {
    "single_label_classification": {"num_labels": 3},
    "multi_label_classification": {"num_labels": 3, "problem_type": "multi_label_classification"},
    "regression": {"num_labels": 2, "problem_type": "regression"},
    "token_classification": names_of(tiny_tags.TAGS),
    "reward": {"num_labels": 1, "problem_type": "regression"},
}
OUTPUTS = ("logits", "member_logits", "detector_score", "abstain", "prediction_set", "interval")
NAMES = tuple(TASKS_OF_MODELS)

all_tasks = pytest.mark.parametrize("name", list(NAMES))


def plain_model(name: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    cls = BertForTokenClassification if name == "token_classification" else BertForSequenceClassification
    sizes = {"initializer_range": 0.5, **SIZES, "vocab_size": WORDS, "max_position_embeddings": 16}
    return cls(BertConfig(**sizes, **FIELDS[name])).eval()


@cache
def _hydra(name: str) -> torch.nn.Module:
    hydra = AutoHydra.from_pruned_members([plain_model(name, seed) for seed in range(3)], shared=())
    hydra.config.aggregate = "mean-2std" if name == "reward" else None
    return hydra


def hydra_of(name: str) -> torch.nn.Module:
    return copy.deepcopy(_hydra(name))


@cache
def data_of(name: str, count: int = 60, seed: int = 0) -> list[dict]:
    """Rows whose labels are mostly what the Hydra predicts."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": torch.randint(5, WORDS, (count, 6), generator=generator)}
    inputs["attention_mask"] = torch.ones(count, 6, dtype=torch.long)
    with torch.no_grad():
        logits = _hydra(name)(**inputs).logits
    noise = torch.randn(logits.shape, generator=generator) * logits.std()
    labels = {
        "multi_label_classification": (logits + noise > 0).float(),
        "regression": logits + noise,
        "reward": (logits + noise > logits.mean()).float(),
    }.get(name, (logits + noise).argmax(dim=-1))
    return [{"labels": labels[row], **{key: value[row] for key, value in inputs.items()}} for row in range(count)]


def batch_of(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    rows = data_of(name, seed=seed)
    return {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}


def calibrated(name: str, model=None, **options):
    return calibrate(model or hydra_of(name), data_of(name), **{"target": {"coverage": 0.7}, **options})


def test_each_task_has_its_class_and_knows_its_models():
    assert tuple(TASKS) == NAMES
    for name in NAMES:
        assert task_fit_of(hydra_of(name)).name == name
        task = task_fit_of(hydra_of(name))
        assert task.title and task.metrics and task.columns
    assert task_fit_of(plain_model("token_classification")).name == "token_classification"
    assert task_fit_of(plain_model("reward")).name == "regression"  # a plain model has no aggregate


@all_tasks
def test_a_calibrated_hydra_decides_and_says_what_was_fitted(name):
    with torch.no_grad():
        before = hydra_of(name)(**batch_of(name))
    calibration = calibrated(name)
    hydra = calibration.model
    with torch.no_grad():
        out = hydra(**batch_of(name))
        with hydra.uncalibrated():
            without = hydra(**batch_of(name))
    assert torch.equal(before.logits, without.logits) and without.abstain is None
    threshold = calibration.settings["threshold"]
    assert torch.equal(out.abstain, ~(out.detector_score <= threshold)) and 0 < out.abstain.sum() < out.abstain.numel()
    assert calibration.abstention.coverage >= 0.7 and calibration.rows == (30, 30)
    assert hydra.config.decision["sentences"] == calibration.sentences and str(calibration) == "\n".join(
        calibration.sentences
    )
    assert hydra.config.decision["task"] == name
    assert hydra.train()(**batch_of(name)).abstain is None


@all_tasks
def test_saved_is_loaded_with_the_code_of_decisions(name, tmp_path):
    hydra = calibrated(name).model.eval()
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = hydra(**batch_of(name))
        theirs = loaded(**batch_of(name))
    for field in OUTPUTS:
        assert (field in ours) == (field in theirs)
        assert field not in ours or torch.equal(ours[field], theirs[field]), field
    added = {path.name for path in tmp_path.glob("*.py")}
    with hydra.uncalibrated():
        hydra.save_pretrained(tmp_path / "uncalibrated")
    before = {path.name for path in (tmp_path / "uncalibrated").glob("*.py")}
    tasks = {f"{path.partition('.')[0]}.py" for path in TASKS_OF_MODELS.values()}
    of_decisions = {"decision.py", "decision_settings.py", "detection.py", "fixed_dtype.py", "weights_digest.py"}
    assert added == before | of_decisions | tasks


@all_tasks
def test_other_models_are_wrapped_saved_and_loaded(name, tmp_path):
    model = plain_model(name)
    if name == "reward":
        model.config.aggregate = "mean"
    target = None if name == "regression" else {"coverage": 0.7}  # one member has no width to abstain by
    classifier = calibrated(name, model, target=target).model.eval()
    classifier.save(tmp_path)
    loaded = CalibratedClassifier.load(model, tmp_path).eval()
    with torch.no_grad():
        ours = classifier(**batch_of(name))
        theirs = loaded(**batch_of(name))
    assert ours.detector_score is not None and torch.equal(ours.detector_score, theirs.detector_score)
    other = plain_model(name, seed=5)
    other.config.aggregate = model.config.aggregate if name == "reward" else None
    with torch.no_grad():
        assert CalibratedClassifier.load(other, tmp_path).eval()(**batch_of(name)).abstain is None


@all_tasks
def test_metrics_are_those_of_the_table_with_what_is_decided(name):
    inside, decision = without_decision(calibrated(name).model.eval())
    task = task_fit_of(inside)
    data = data_of(name, seed=1)
    data = {"chosen": data, "rejected": data_of(name, seed=2)} if name == "reward" else data
    answers, labels = task.collect(inside, data, 16)
    plain = task.measure(answers, labels)
    decided = task.measure(answers, labels, task.decide(decision, answers))
    assert set(plain) < set(decided) <= set(task.metrics) | {"accuracy"}
    assert 0 < decided["answered"] < 1
    assert task.scores(answers).shape == (60,)
    if name != "reward":
        assert set(task.measure(answers, None, task.decide(decision, answers))) <= set(decided)


@all_tasks
def test_predictions_have_the_columns_of_the_task(name):
    hydra = calibrated(name).model.eval()
    predictions = predict_decisions(hydra, ["annabelle smith went to paris .", "paris"], tiny_tags.tokenizer())
    for prediction in predictions:
        assert set(prediction) == {*task_fit_of(hydra).columns, "truncated"}
        assert prediction["abstain"] in (True, False) and prediction["threshold"] == hydra.config.decision["threshold"]


def test_a_reward_model_says_that_a_score_is_too_low():
    hydra = calibrated("reward").model.eval()
    threshold = -hydra.decision.settings.threshold
    [prediction] = predict_decisions(hydra, ["annabelle smith went to paris ."], tiny_tags.tokenizer())
    expected = f"The score is {prediction['score']:.3g}, below the threshold {threshold:.3g}."
    assert prediction["abstain"] is True and prediction["reason"] == expected


@pytest.mark.parametrize("mine, other", pairwise((*NAMES, NAMES[0])))
def test_a_decision_of_another_task_is_not_applied(mine, other, tmp_path):
    hydra = hydra_of(mine)
    settings = calibrated(other).settings
    hydra.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["decision"] = settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = type(hydra).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert not loaded.is_calibrated and loaded(**batch_of(mine)).abstain is None
    # nor where its digest is that of these weights
    loaded.decision.remember(loaded)
    loaded.decision.compare_again()
    assert not loaded.is_calibrated


@all_tasks
def test_rows_on_the_threshold_do_not_move_by_rounding(name):
    """It lies between two scores of the fitting rows: scores that are rounded otherwise select the same rows."""
    calibration = calibrated(name)
    hydra = calibration.model.eval()
    threshold = calibration.settings["threshold"]
    rows = data_of(name)
    abstained = []
    for size in (60, 7, 1):
        batches = [rows[start : start + size] for start in range(0, 60, size)]
        with torch.no_grad():
            outputs = [
                hydra(**{key: torch.stack([row[key] for row in batch]) for key in ("input_ids", "attention_mask")})
                for batch in batches
            ]
        abstained.append(torch.cat([out.abstain for out in outputs]))
        scores = torch.cat([out.detector_score for out in outputs]).flatten().double()
        assert (scores - threshold).abs().min() > 1e-6 * scores.abs().max()
    assert all(torch.equal(abstained[0], other) for other in abstained)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "single_label_classification"])
def test_a_detector_of_single_label_models_is_refused(name):
    with pytest.raises(ValueError, match="detector is for single-label classification, this is "):
        calibrated(name, detector="energy")


@pytest.mark.parametrize("half", [0, 1])
@all_tasks
def test_a_prediction_that_is_not_a_number_is_refused_in_both_halves(name, half, monkeypatch):
    hydra = hydra_of(name)
    task = task_fit_of(hydra)
    task.set_detector("msp")
    rows = task.collect_rows(data_of(name), 32)
    rows.answers[halves_of(rows.labels, 0)[half][0]] = math.nan
    monkeypatch.setattr(type(task), "collect_rows", lambda *_: rows)
    with pytest.raises(ValueError, match=r"is not a prediction|not NaN"):
        calibrate(hydra, data_of(name), target={"coverage": 0.7})
