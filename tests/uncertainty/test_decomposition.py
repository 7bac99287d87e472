import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import BertConfig, BertForSequenceClassification

from hydra_transformers import HydraBertForSequenceClassification
from hydra_transformers.data.prediction import SavedLogits, predict
from hydra_transformers.uncertainty import TemperatureScaling, decompose, ood_score, predict_uncertainty


PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, database=None)
FIELDS = ("mean_probabilities", "prediction", "confidence", "total", "aleatoric", "epistemic", "disagreement")


def member_logits(max_batch=5, max_members=4, max_classes=5):
    shapes = st.tuples(st.integers(1, max_batch), st.integers(1, max_members), st.integers(2, max_classes))
    return shapes.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=st.floats(-300, 300, width=32)))


def binary_entropy(p):
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def logits_of(*probabilities):
    """One sample's member logits from the members' probabilities."""
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_worked_example_of_two_members():
    parts = decompose(logits_of([0.9, 0.1], [0.3, 0.7]))
    torch.testing.assert_close(parts.mean_probabilities, torch.tensor([[0.6, 0.4]], dtype=torch.float64))
    assert parts.prediction.tolist() == [0]
    assert parts.confidence.item() == pytest.approx(0.6)
    assert parts.total.item() == pytest.approx(binary_entropy(0.6))
    assert parts.aleatoric.item() == pytest.approx((binary_entropy(0.9) + binary_entropy(0.3)) / 2)
    assert parts.epistemic.item() == pytest.approx(0.6730116670 - (0.3250829734 + 0.6108643021) / 2)
    assert parts.disagreement.item() == 1


@pytest.mark.parametrize(
    ("votes", "share"), [([0, 0, 0], 0), ([0, 0, 1], 2 / 3), ([0, 1, 2], 1), ([0, 0, 1, 1], 4 / 6)]
)
def test_disagreement_is_the_share_of_differing_pairs(votes, share):
    logits = torch.nn.functional.one_hot(torch.tensor([votes]), 3).double()
    assert decompose(logits).disagreement.item() == pytest.approx(share)


def test_one_member_has_exactly_zero_epistemic_uncertainty_and_disagreement():
    parts = decompose(torch.randn(50, 1, 1000))
    assert (parts.epistemic == 0).all() and (parts.disagreement == 0).all()
    torch.testing.assert_close(parts.total, parts.aleatoric)


def test_float16_logits_of_thousands_of_classes_are_decomposed_in_float64():
    logits = (8 * torch.randn(4, 3, 20000, generator=torch.Generator().manual_seed(0))).half()
    parts = decompose(logits)
    reference = logits.double().softmax(-1).mean(1)
    torch.testing.assert_close(parts.mean_probabilities, reference)
    torch.testing.assert_close(parts.total, -(reference * reference.log()).sum(-1))
    assert parts.total.dtype == torch.float64


@PROPERTY
@given(member_logits(), st.randoms(use_true_random=False), st.floats(-100, 100))
def test_the_parts_add_up_in_bounds_whatever_the_order_of_members_and_a_members_shift(logits, random, shift):
    parts = decompose(logits)
    classes = logits.shape[2]
    torch.testing.assert_close(parts.total, parts.aleatoric + parts.epistemic, rtol=0, atol=1e-12)
    assert (parts.epistemic >= 0).all() and (parts.aleatoric >= 0).all()
    assert (parts.total <= math.log(classes) + 1e-12).all()
    assert (parts.epistemic <= math.log(logits.shape[1]) + 1e-12).all()
    assert (parts.confidence <= 1).all() and (parts.confidence >= 1 / classes - 1e-12).all()
    assert (parts.disagreement >= 0).all() and (parts.disagreement <= 1).all()
    order = random.sample(range(logits.shape[1]), logits.shape[1])
    ordered = decompose(logits[:, order])
    for name in ("total", "aleatoric", "epistemic", "disagreement"):
        torch.testing.assert_close(getattr(parts, name), getattr(ordered, name), rtol=0, atol=1e-12)
    logits[:, 0] += shift
    torch.testing.assert_close(parts.total, decompose(logits).total, rtol=0, atol=1e-9)


def test_a_model_is_decomposed_in_one_call_whatever_the_batches():
    logits = torch.randn(10, 3, 4)
    whole = decompose(logits)
    parts = predict_uncertainty(SavedLogits(), [{"member_logits": part} for part in logits.split(3)])
    for name in FIELDS:
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    softened = predict_uncertainty(TemperatureScaling(3.0).wrap(SavedLogits()), [{"member_logits": logits}])
    torch.testing.assert_close(softened.total, decompose(TemperatureScaling(3.0)(logits)).total)
    with pytest.raises(ValueError, match="no batches"):
        predict_uncertainty(SavedLogits(), [])


@PROPERTY
@given(member_logits())
def test_a_label_is_decomposed_as_two_classes_are(logits):
    parts = decompose(logits, problem_type="multi_label_classification")
    for label in range(logits.shape[2]):
        no_and_yes = np.stack([np.zeros(logits.shape[:2]), logits[:, :, label]], axis=-1)
        expected = decompose(no_and_yes)  # of which a tie is no
        for name in ("total", "aleatoric", "epistemic", "confidence", "prediction", "disagreement"):
            torch.testing.assert_close(getattr(parts, name)[:, label], getattr(expected, name), rtol=0, atol=1e-12)
        yes = expected.mean_probabilities[:, 1]
        torch.testing.assert_close(parts.mean_probabilities[:, label], yes, rtol=0, atol=1e-12)


@pytest.mark.parametrize("logit", [torch.inf, -torch.inf, 1e4])
def test_a_certain_label_has_no_uncertainty(logit):
    parts = decompose(torch.full((1, 2, 1), logit), problem_type="multi_label_classification")
    assert parts.total.item() == parts.epistemic.item() == 0 and parts.prediction.item() == (logit > 0)


def bert_of(problem_type, num_labels=3, hydra=True):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    config = BertConfig(
        **sizes, vocab_size=20, num_labels=num_labels, problem_type=problem_type, initializer_range=0.5
    )
    backbone = BertForSequenceClassification(config)
    members = [HydraBertForSequenceClassification.from_backbone(backbone, {0: [m], 1: [m + 1]}) for m in range(3)]
    return HydraBertForSequenceClassification.from_pruned_members(members) if hydra else backbone


TEXTS = [{"input_ids": torch.arange(12).view(4, 3), "labels": torch.zeros(4, dtype=torch.long)}]


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_multi_label_model_is_decomposed_by_what_its_config_says(num_labels, wrapped):
    hydra = bert_of("multi_label_classification", num_labels)
    member_logits = predict(hydra, TEXTS[0])
    model = TemperatureScaling(1.0).wrap(hydra) if wrapped else hydra
    parts = predict_uncertainty(model, TEXTS)
    torch.testing.assert_close(parts.mean_probabilities, member_logits.double().sigmoid().mean(1))
    assert parts.epistemic.shape == (4, num_labels) and (parts.epistemic > 0).all()
    answer = hydra(input_ids=TEXTS[0]["input_ids"]).logits.sigmoid().double()
    torch.testing.assert_close(parts.mean_probabilities, answer, rtol=0, atol=1e-6)


LOGITS = torch.tensor([[[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]]], dtype=torch.float64)
MEAN = LOGITS.softmax(-1).mean(1)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("msp", 1 - MEAN.max()),
        ("entropy", -(MEAN * MEAN.log()).sum()),
        ("max_logit", -(2.0 + 1.0) / 2),
        ("energy", -(LOGITS[0, 0].exp().sum().log() + LOGITS[0, 1].exp().sum().log()) / 2),
        ("mutual_information", decompose(LOGITS).epistemic),
        ("disagreement", 1.0),
    ],
)
def test_ood_scores_reduce_over_members_as_documented(method, expected):
    assert ood_score(LOGITS, method).item() == pytest.approx(float(expected))


def test_probabilities_of_exactly_0_and_1_give_no_nan():
    parts = decompose(torch.tensor([[[0.0, -torch.inf], [0.0, -torch.inf]], [[0.0, -torch.inf], [-torch.inf, 0.0]]]))
    assert parts.mean_probabilities.tolist() == [[1, 0], [0.5, 0.5]]
    assert parts.total.tolist() == pytest.approx([0, math.log(2)])
    assert all(getattr(parts, name).isfinite().all() for name in FIELDS)
