import math
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, binom

from hydra_transformers.models.task import prediction_sets
from hydra_transformers.uncertainty.conformal import fit_sets, sets_sentence


def draw(rows, seed=0, classes=7, members=3, strength=1.5):
    """Logits that know the label, of classes that are not all as frequent nor as easy."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(rows, generator=generator) ** 1.5 * classes).long()
    logits = torch.randn(rows, 1, classes, generator=generator) + 0.5 * torch.randn(
        rows, members, classes, generator=generator
    )
    logits[torch.arange(rows), :, labels] += strength * (1 + labels.unsqueeze(1)) / 3
    return logits, labels


def mean_probabilities(logits):
    return logits.double().softmax(-1).mean(1)


def covered(sets, labels):
    """How many sets hold the right class."""
    return int(sets.gather(1, labels.unsqueeze(1)).sum())


def plain_threshold(scores, alpha):
    """The smallest score that at least (1 - alpha)(n + 1) scores do not exceed, infinity being one more of them."""
    ordered = [*sorted(scores), math.inf]
    return next(q for k, q in enumerate(ordered, start=1) if k >= (1 - alpha) * len(ordered) - 1e-9)


@pytest.mark.parametrize(
    ("rows", "alpha", "rank"), [(9, 0.1, 9), (99, 0.1, 90), (9, 0.7, 3), (99, 0.29, 71), (10, 0.1, 10)]
)
def test_the_quantile_counts_rows_as_alpha_was_written(rows, alpha, rank):
    right = torch.linspace(3, 1, rows)
    logits = torch.stack([right, torch.zeros(rows)], dim=1).unsqueeze(1)
    assert fit_sets(logits, [0] * rows, alpha) == pytest.approx(1 - float(right[rank - 1].double().sigmoid()))


def test_too_few_rows_give_full_sets_and_a_warning():
    note = "alpha=0.1 takes at least 9 calibration rows, there are 8: every set holds every class"
    with pytest.warns(UserWarning, match=note):
        threshold = fit_sets(*draw(8), 0.1)
    assert prediction_sets(mean_probabilities(draw(20, seed=1)[0]), threshold).all()
    assert note in sets_sentence(0.1, 8, threshold)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_sets(*draw(9), 0.1)


def test_a_model_that_is_always_right_or_always_wrong():
    labels = torch.arange(40) % 4
    right = 30.0 * torch.nn.functional.one_hot(labels, 4).unsqueeze(1)
    sure, unsure = (
        prediction_sets(mean_probabilities(logits), fit_sets(logits, labels, 0.1))
        for logits in (right, right.roll(1, dims=-1))
    )
    assert covered(sure, labels) == 40 and (sure.sum(dim=1) == 1).all()
    assert covered(unsure, labels) >= 36 and unsure.sum() > 40


def test_sets_are_those_of_the_definition_and_never_empty(monkeypatch):
    (logits, labels), (new, _) = draw(240), draw(150, seed=1)
    expected = plain_threshold((1 - mean_probabilities(logits))[torch.arange(240), labels].tolist(), 0.2)
    threshold = fit_sets(logits, labels, 0.2)
    assert threshold == pytest.approx(expected, abs=1e-12)
    monkeypatch.setattr("hydra_transformers.uncertainty.conformal.ROWS_PER_PASS", 7)
    assert fit_sets(logits, labels, 0.2) == threshold
    probabilities = mean_probabilities(new)
    plain = 1 - probabilities <= threshold
    plain[torch.arange(150), probabilities.argmax(1)] |= ~plain.any(1)
    # in doubt a class is in the set
    sets = prediction_sets(probabilities, threshold)
    is_near = (1 - probabilities - threshold).abs() < 1e-5
    assert torch.equal(sets[~is_near], plain[~is_near]) and (sets >= plain).all() and not sets.all()
    one_by_one = [prediction_sets(row, threshold) for row in probabilities.split(1)]
    assert torch.equal(torch.cat(one_by_one), sets)


def test_coverage_holds_over_many_splits():
    rows = 60
    tests = 60
    alpha = 0.2
    splits = 300
    logits, labels = draw(splits * (rows + tests), seed=7)
    counts = []
    for part, of in zip(logits.split(rows + tests), labels.split(rows + tests), strict=True):
        threshold = fit_sets(part[:rows], of[:rows], alpha)
        new = mean_probabilities(part[rows:])
        counts.append(covered(1 - new <= threshold, of[rows:]))
        # filling up empty sets loses nothing
        assert covered(prediction_sets(new, threshold), of[rows:]) >= counts[-1]
    # Without ties the number of covered test rows is beta-binomial: k = ceil(61 * 0.8) = 49 of 60 + 1.
    law = betabinom(tests, 49, 61 - 49)
    mean = law.mean()
    error = law.std() / math.sqrt(splits)
    assert abs(np.mean(counts) - mean) < 4 * error
    assert mean / tests >= 1 - alpha
    assert np.std(counts) == pytest.approx(law.std(), rel=0.2)


def test_the_guarantee_says_what_breaks_it_and_a_shift_does():
    threshold = fit_sets(*draw(2000, strength=3), 0.1)
    sentence = sets_sentence(0.1, 2000, threshold)
    assert "For at least 90 % of the rows the prediction set holds the right class" in sentence
    assert "exchangeable with the 2000 calibration rows. Nothing holds under distribution shift." in sentence
    new, of = draw(2000, strength=0, seed=1)
    assert covered(prediction_sets(mean_probabilities(new), threshold), of) < binom.ppf(1e-6, 2000, 0.9)
