import math
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, binom

from hydra_transformers.models.decision_single_label_classification import prediction_sets, set_scores
from hydra_transformers.uncertainty import ConformalSets
from hydra_transformers.uncertainty.conformal import count_sets, summarize_sets


METHODS = ("lac", "aps", "raps")


def draw(rows, seed=0, classes=7, members=3, strength=1.5):
    """Logits that know the label, of classes that are not all as frequent nor as easy."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(rows, generator=generator) ** 1.5 * classes).long()
    logits = torch.randn(rows, 1, classes, generator=generator) + 0.5 * torch.randn(
        rows, members, classes, generator=generator
    )
    logits[torch.arange(rows), :, labels] += strength * (1 + labels.unsqueeze(1)) / 3
    return logits, labels


def plain_scores(logits, method):
    """s(x, c) row by row and class by class, from the definitions."""
    logits = logits.double().numpy()
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = (exponentials / exponentials.sum(-1, keepdims=True)).mean(1)
    if method == "lac":
        return 1 - probabilities
    scores = np.zeros_like(probabilities)
    for row, p in enumerate(probabilities):
        for c in range(len(p)):
            better = [d for d in range(len(p)) if p[d] > p[c] or (p[d] == p[c] and d < c)]
            scores[row, c] = sum(p[d] for d in better) + p[c]
            if method == "raps":
                scores[row, c] += 0.01 * max(0, len(better) + 1 - 5)
    return scores


def plain_threshold(scores, alpha):
    """The smallest score that at least (1 - alpha)(n + 1) scores do not exceed, infinity being one more of them."""
    ordered = [*sorted(scores), math.inf]
    return next(q for k, q in enumerate(ordered, start=1) if k >= (1 - alpha) * len(ordered) - 1e-9)


# --- Against the definitions


@pytest.mark.parametrize(
    ("rows", "alpha", "rank"), [(9, 0.1, 9), (99, 0.1, 90), (9, 0.7, 3), (99, 0.29, 71), (10, 0.1, 10)]
)
def test_the_quantile_counts_rows_as_alpha_was_written(rows, alpha, rank):
    right = torch.linspace(3, 1, rows)
    logits = torch.stack([right, torch.zeros(rows)], dim=1).unsqueeze(1)
    fitted = ConformalSets.fit(logits, [0] * rows, alpha)
    assert fitted.threshold == pytest.approx(1 - float(right[rank - 1].double().sigmoid()))


def test_ties_of_the_probability_go_to_the_lower_class():
    even = torch.zeros(40, 1, 4)
    fitted = ConformalSets.fit(even, [0] * 20 + [1] * 20, 0.3, "aps")
    assert fitted.sets(even[:1]).tolist() == [[True, True, False, False]]


# --- Small and odd cases


@pytest.mark.parametrize("name", METHODS)
def test_too_few_rows_give_full_sets_and_a_warning(name):
    logits, labels = draw(8)
    with pytest.warns(
        UserWarning, match=r"alpha=0.1 takes at least 9 calibration rows, there are 8: every set holds every"
    ):
        fitted = ConformalSets.fit(logits, labels, 0.1, name)
    assert fitted.sets(draw(20, seed=1)[0]).all()
    assert "every set holds every class" in fitted.sentence
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ConformalSets.fit(*draw(9), 0.1, name)


def test_a_model_that_is_always_right_or_always_wrong():
    labels = torch.arange(40) % 4
    right = 30.0 * torch.nn.functional.one_hot(labels, 4).unsqueeze(1)
    wrong = right.roll(1, dims=-1)
    sure = ConformalSets.fit(right, labels)
    assert summarize_sets([count_sets(sure.sets(right), labels)]) == {"coverage": 1, "mean_size": 1, "single_class": 1}
    unsure = ConformalSets.fit(wrong, labels)
    measured = summarize_sets([count_sets(unsure.sets(wrong), labels)])
    assert measured["coverage"] >= 0.9 and measured["mean_size"] > 1


@pytest.mark.parametrize("name", METHODS)
def test_a_row_has_the_same_set_in_any_batch(name):
    fitted = ConformalSets.fit(*draw(100), method=name)
    new, _ = draw(60, seed=1)
    one_by_one = torch.cat([fitted.sets(row) for row in new.flip(0).split(1)]).flip(0)
    assert torch.equal(fitted.sets(new), one_by_one)
    assert fitted.sets(new[:0]).shape == (0, 7) and fitted.sets(new).dtype == torch.bool
    assert fitted == ConformalSets.fit(*draw(100), method=name)


@pytest.mark.parametrize("name", METHODS)
def test_sets_are_those_of_the_definition_and_never_empty(name):
    (logits, labels), (new, _) = draw(240), draw(150, seed=1)
    fitted = ConformalSets.fit(logits, labels, 0.2, name)
    threshold = plain_threshold(plain_scores(logits, name)[np.arange(240), labels.numpy()], 0.2)
    assert fitted.threshold == pytest.approx(threshold, abs=1e-12)
    expected = plain_scores(new, name) <= threshold
    likeliest = new.double().softmax(-1).mean(1).argmax(1)
    expected[np.arange(150), likeliest] |= ~expected.any(1)
    assert fitted.sets(new).numpy().tolist() == expected.tolist()
    assert not expected.all()
    # the model itself decides alike, and in doubt for the class
    ours = prediction_sets(new.double().softmax(-1).mean(1), name, fitted.threshold)
    is_near = (set_scores(new.double().softmax(-1).mean(1), name) - fitted.threshold).abs() < 1e-5
    assert torch.equal(ours[~is_near], fitted.sets(new)[~is_near]) and (ours >= fitted.sets(new)).all()


@pytest.mark.parametrize("name", METHODS)
def test_coverage_holds_over_many_splits(name):
    rows, tests, alpha, splits = 60, 60, 0.2, 300
    logits, labels = draw(splits * (rows + tests), seed=7)
    covered = []
    for part, of in zip(logits.split(rows + tests), labels.split(rows + tests), strict=True):
        fitted = ConformalSets.fit(part[:rows], of[:rows], alpha, name)
        scores = set_scores(part[rows:].double().softmax(-1).mean(1), name)
        scores = scores.gather(1, of[rows:].unsqueeze(1)).squeeze(1)
        covered.append(int((scores <= fitted.threshold).sum()))
        assert count_sets(fitted.sets(part[rows:]), of[rows:])[1] >= covered[-1]  # filling up empty sets loses nothing
    # Without ties the number of covered test rows is beta-binomial: k = ceil(61 * 0.8) = 49 of 60 + 1.
    law = betabinom(tests, 49, 61 - 49)
    mean, error = law.mean(), law.std() / math.sqrt(splits)
    assert abs(np.mean(covered) - mean) < 4 * error
    assert mean / tests >= 1 - alpha
    assert np.std(covered) == pytest.approx(law.std(), rel=0.2)


def test_the_guarantee_says_what_breaks_it_and_a_shift_does():
    fitted = ConformalSets.fit(*draw(2000, strength=3))
    assert "For at least 90 % of the rows the set holds the right class" in fitted.sentence
    assert "exchangeable with the 2000 calibration rows. Nothing holds under distribution shift." in fitted.sentence
    new, of = draw(2000, strength=0, seed=1)
    assert count_sets(fitted.sets(new), of)[1] < binom.ppf(1e-6, 2000, 0.9)
