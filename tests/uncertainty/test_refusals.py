"""What would give a wrong answer is refused with one sentence, and before long work."""

import math
from functools import partial

import pytest
import torch
from PIL import Image

from hydra_transformers import evaluate_uncertainty
from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.uncertainty import (
    Abstention,
    Detector,
    TemperatureScaling,
    calibrate,
    classification_metrics,
    decompose,
    ood_metrics,
    predict_decisions,
    predict_uncertainty,
)
from hydra_transformers.uncertainty.conformal import fit_sets
from hydra_transformers.uncertainty.features import collect_answers
from hydra_transformers.uncertainty.multi_label import multi_label_metrics
from hydra_transformers.uncertainty.regression import regression_metrics
from hydra_transformers.uncertainty.rewards import preference_metrics
from hydra_transformers.uncertainty.temperature import best_temperature
from tests import tiny_tags
from tests.families import CLIP, padded_texts
from tests.uncertainty.answers import saved
from tests.uncertainty.test_detectors import TEST, TRAIN, fitted
from tests.uncertainty.test_tasks import calibrated, data_of, hydra_of, plain_model


NAN = torch.full((3, 1, 3), math.nan)
ZEROS = torch.zeros(3, 1, 3)
RULED_OUT = torch.tensor([[[0.0, -math.inf]]] * 3)
OUTPUT = HydraClassifierOutput(logits=torch.zeros(2, 3), member_logits=torch.zeros(2, 2, 3))
REGRESSION = {"num_labels": 2, "problem_type": "regression"}


class Never(torch.nn.Module):
    """A model that must not be asked to predict."""

    def forward(self, member_logits: torch.Tensor) -> None:
        raise AssertionError("it was asked to predict")


def rule(scores=(0.1, 0.2, 0.3), correct=(1, 1, 0), ood_scores=None, **target):
    return Abstention.fit(list(scores), correct, ood_scores, **target)


def sets(logits=ZEROS, labels=(0, 1, 2)):
    return fit_sets(logits, labels, 0.1)


def new_reward_model(**fields):
    return type(hydra_of("reward"))(type(hydra_of("reward").config)(**fields))


def changed(name, change, **options):
    """`calibrate` on rows whose labels are changed."""
    rows = [row | {"labels": change(row["labels"])} for row in data_of(name)]
    return calibrate(hydra_of(name), rows, **{"target": {"coverage": 0.7}} | options)


ABSTENTION = [
    (lambda: rule(), "pass one of risk, coverage, tpr"),
    (lambda: rule(risk=0.1, coverage=0.9), "pass one of risk, coverage, tpr"),
    (lambda: rule(risk=0.1, correct=None), "a risk is fitted on correct"),
    (lambda: rule(tpr=0.9), "a tpr is fitted on ood_scores"),
    (lambda: rule(coverage=1.0), "coverage is 1.0: pass a share"),
    (lambda: rule(risk=math.nan), "risk is nan: pass a share"),
    (lambda: rule(risk="5 %"), "risk is '5 %': pass a share"),
    (lambda: rule(risk=0.1, confidence=95), "confidence is 95: pass a share"),
    (lambda: rule([0.1, math.nan, 0.2], coverage=0.5), "scores has shape .*: pass a number, not NaN"),
    (lambda: rule([], coverage=0.5), r"scores has shape \(0,\)"),
    (lambda: rule(risk=0.5, correct=[1, 0]), "pass True or False for each of 3"),
    (lambda: rule(risk=0.5, correct=[1.0, math.nan, 0]), "pass True or False"),
    (lambda: rule(tpr=0.5, ood_scores=[0.1, math.nan]), "ood_scores has shape .*: pass a number, not NaN"),
    (lambda: rule(tpr=0.9, ood_scores=[0.1, -math.inf]), "too many of ood_scores are -inf"),
    (lambda: rule(range(200), [0] * 200, risk=0.05), "no threshold keeps the risk at 0.05: the lowest is 1"),
    (lambda: rule(range(200), [0] * 200, risk=0.05, confidence=0.95), "cannot be guaranteed .* on these 200 rows"),
    (lambda: rule(range(20), [1] * 20, coverage=0.95, confidence=0.95), "on 20 rows: pass at least 59"),
    (lambda: rule([0.0], [1], range(58), tpr=0.95, confidence=0.95), "tpr=0.95 .* on 58 rows: pass at least 59"),
]
NUMBERS = [
    (lambda: sets(labels=[0, 1, 3]), "labels has 3: pass class indices from 0 to 2"),
    (lambda: sets(labels=[0, 1]), r"of shape \(2,\): pass class indices, \(3,\)"),
    (lambda: sets(labels=[0.0, 1.0, 2.0]), "labels is torch.float32"),
    (lambda: sets(NAN), r"member_logits\[0, 0\] is not a prediction"),
    (lambda: decompose(torch.zeros(4, 3)), r"member_logits has shape \(4, 3\): pass \(batch, members, classes\)"),
    (lambda: decompose(torch.zeros(4, 0, 3)), r"member_logits has shape \(4, 0, 3\)"),
    (lambda: decompose(torch.zeros(4, 2, 1)), "with at least 2 classes"),
    (lambda: decompose(torch.tensor([[[0.0, math.inf]]])), r"member_logits\[0, 0\] is not a prediction"),
    (lambda: decompose(torch.full((1, 1, 3), -math.inf)), "every class at -inf"),
    (lambda: decompose(OUTPUT), r"is a model's output: pass outputs\.member_logits"),
    (lambda: decompose(ZEROS, problem_type="regression"), "problem_type is 'regression': pass one of"),
    (lambda: predict_uncertainty(SavedLogits(), []), "no batches"),
    (lambda: classification_metrics(ZEROS, [-100, 0, 0]), "labels has -100"),
    (lambda: classification_metrics(ZEROS, [[0, 1]] * 3), r"of shape \(3, 2\)"),
    (lambda: ood_metrics([1.0], []), r"ood_scores has shape \(0,\)"),
    (lambda: ood_metrics([1.0, math.nan], [0.0]), "id_scores has shape .*: pass a number, not NaN"),
    (lambda: multi_label_metrics(ZEROS, torch.zeros(3, dtype=torch.long)), r"0 or 1 for each, \(3, 3\)"),
    (lambda: regression_metrics(ZEROS, torch.full((3, 3), math.nan)), "pass finite values"),
    (lambda: preference_metrics(NAN[..., 0], NAN[..., 0]), "finite numbers of one shape"),
    (lambda: best_temperature(NAN, [0, 1, 0]), "is not a prediction"),
    (lambda: best_temperature(RULED_OUT, [0, 1, 0]), "the probability 0"),
    (lambda: TemperatureScaling(0.0), "pass a positive number"),
    (lambda: TemperatureScaling(math.nan), "pass a positive number"),
]
DETECTORS = [
    (lambda: Detector("odin"), "unknown detector 'odin': choose one of msp"),
    (lambda: Detector({"model": "knn"}), "unknown detector {'model': 'knn'}"),
    (lambda: Detector("msp", k=3), "msp has no k, which is of knn"),
    (lambda: Detector("knn")(*TEST[:2]), "knn is not fitted: call fit"),
    (lambda: Detector("mahalanobis").fit_answers(*TRAIN[:2]), "data has no labels, and mahalanobis learns"),
    (lambda: Detector("mahalanobis").fit_answers(*TRAIN[:2], TRAIN[2] + 1), "has 4: pass class indices"),
    (lambda: fitted("mahalanobis", (TRAIN[0], torch.ones_like(TRAIN[1]), TRAIN[2])), "do not vary within classes"),
    (lambda: fitted("knn", [part[:20] for part in TRAIN]), "k is 50, data has 20 rows"),
    (
        lambda: collect_answers(SavedLogits(), saved(4, 1, 0)),
        "logits of SavedLogits are not the outputs of a linear map",
    ),
    (lambda: Detector("knn", k=0).fit_answers(*TRAIN[:2]), "k is 0, data has .* rows: pass a k from 1 on"),
    (lambda: fitted("knn")(TEST[0]), "knn reads features: pass member_features"),
    (lambda: fitted("knn")(TEST[0], TEST[1][:9]), "knn reads features: pass member_features"),
    (lambda: fitted("knn")(TEST[0], TEST[1] * math.nan), "finite numbers"),
    (lambda: fitted("knn")(TEST[0], TEST[1][..., :5]), "fitted on .*'dim': 6.*, these have .*'dim': 5"),
    (lambda: fitted("mahalanobis")(TEST[0][..., :3], TEST[1]), "fitted on .*'classes': 4.*'classes': 3"),
    (lambda: Detector("energy")(TEST[0] * math.nan), "is not a prediction"),
    (lambda: Detector("energy").score(plain_model("multi_label_classification"), []), "made for multi-label"),
    (lambda: Detector("energy").score(plain_model("regression"), []), "made for regression"),
]
# Of `calibrate` and `evaluate_uncertainty`, before anything is predicted
BEFORE = [
    (partial(calibrate, Never(), saved(40, 1, 0), **options), words)
    for options, words in (
        ({"target": {"recall": 0.9}}, "pass one of risk, coverage, tpr"),
        ({"target": {"risk": 5}}, "risk is 5: pass a share between 0 and 1"),
        ({"alpha": 0}, "alpha is 0: pass a share between 0 and 1"),
        ({"target": {"tpr": 0.9}}, "ood_data is missing"),
        ({"confidence": 0.9}, "confidence has no effect without a target: pass one"),
        ({"ood_data": [{}]}, "ood_data has no effect without a target: pass one"),
        ({"detector": "best"}, "unknown detector 'best'"),
        ({"target": {"tpr": 0.9}, "ood_data": torch.zeros(3)}, "ood_data is a Tensor: pass a DataLoader"),
    )
] + [
    (partial(evaluate_uncertainty, {"one": Never(), "two": Never()}, saved(40, 1, 0), score=score), words)
    for score, words in (
        ("knn", "knn is not fitted"),
        (fitted("knn"), "score is knn, fitted on one model: evaluate each by itself"),
    )
]
TASKS = [
    (lambda: calibrate(SavedLogits(), saved(8, 1, 0)), "data has 8 rows: pass at least 20"),
    (lambda: calibrate(SavedLogits(), [{"member_logits": ZEROS}]), "data has no labels"),
    (lambda: calibrate(CLIP.backbone(), [CLIP.inputs()]), "calibrate a ZeroShotClassif"),
    (
        lambda: calibrated("single_label_classification", target={"risk": 0.001}, confidence=0.999),
        "on these 30 rows.*half of data, 30 rows",
    ),
    (lambda: changed("multi_label_classification", lambda label: label * 0), "no row of data has the label 'LABEL_0'"),
    (lambda: changed("multi_label_classification", torch.argmax), "0 or 1 for each"),
    (lambda: changed("regression", lambda label: label * math.nan), "pass finite values"),
    (lambda: changed("regression", lambda label: label[:1]), "pass finite values"),
    (lambda: calibrated("regression", alpha=0.001), "pass at least 2000 rows"),
    (lambda: calibrated("regression", alpha=None), "alpha is None"),
    (lambda: calibrated("regression", target={"risk": -1}), "largest mean absolute error"),
    (lambda: calibrated("regression", target={"risk": 1e-9}), "no threshold keeps the risk at 1e-09"),
    (lambda: calibrated("regression", target={"risk": 1}, confidence=0.9), "leave confidence out"),
    (lambda: calibrated("regression", plain_model("regression")), "model has one member"),
    (lambda: calibrated("reward", target=None), "target is missing"),
    (lambda: changed("reward", lambda label: label + 1), "labels are not 1 for relevant rows and 0 for others"),
    (lambda: changed("reward", torch.ones_like), "labels are not 1 for relevant rows and 0 for others"),
    (lambda: changed("token_classification", lambda tags: tags[0]), "this model classifies tokens"),
    (lambda: changed("token_classification", lambda tags: tags + 9), "the model's tags are 0 to 4, or -100"),
    (lambda: calibrated("token_classification", alpha=0.2), "alpha is for sets and intervals"),
    (lambda: new_reward_model(num_labels=1, aggregate="median"), "aggregate is 'median': use 'mean'"),
    (lambda: new_reward_model(num_labels=3, aggregate="min"), "which is for a single score"),
]
PIPELINES = [
    (lambda: hydra_of("regression").predict("a film"), "inputs is a str: pass a list of texts, images or audio"),
    (lambda: hydra_of("regression").predict(["a film"]), "the model was not loaded from anywhere: pass the"),
    (
        lambda: tiny_tags.fused().predict([3], tiny_tags.tokenizer()),
        "an input is a int: pass a text, or a list of words",
    ),
    (
        lambda: tiny_tags.fused().predict(["a"], tiny_tags.tokenizer(), aggregation_strategy="simple"),
        "not a parameter",
    ),
    (lambda: CLIP.fused().predict([Image.new("RGB", (8, 8))]), "candidate_labels is missing"),
    (lambda: predict_decisions(torch.nn.Linear(2, 2), ["a"]), "Linear without a model of Transformers inside"),
    (lambda: predict_decisions(ZeroShotClassifier(CLIP.backbone(), padded_texts(3)), ["a"]), "pass candidate_labels="),
]


@pytest.mark.parametrize("call, words", ABSTENTION + NUMBERS + DETECTORS + BEFORE + TASKS + PIPELINES)
def test_it_is_refused_with_a_sentence(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()
