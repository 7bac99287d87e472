import json
import math
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, binom

from hydra_transformers.uncertainty import ConformalSets


VARIANTS = {
    "lac": {"method": "lac"},
    "aps": {"method": "aps"},
    "aps, randomised": {"method": "aps", "randomised": True},
    "raps": {"method": "raps", "k_reg": 1, "penalty": 0.1},
    "raps, randomised": {"method": "raps", "k_reg": 1, "penalty": 0.1, "randomised": True},
}


def draw(rows, seed=0, classes=5, members=3, strength=1.5):
    """Logits that know the label, of classes that are not all as frequent nor as easy."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(rows, generator=generator) ** 1.5 * classes).long()
    logits = torch.randn(rows, 1, classes, generator=generator) + 0.5 * torch.randn(
        rows, members, classes, generator=generator
    )
    logits[torch.arange(rows), :, labels] += strength * (1 + labels.unsqueeze(1)) / 3
    return logits, labels


def plain_scores(logits, variant, u=1.0):
    """s(x, c) row by row and class by class, from the definitions."""
    logits = logits.double().numpy()
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = (exponentials / exponentials.sum(-1, keepdims=True)).mean(1)
    if variant["method"] == "lac":
        return 1 - probabilities
    scores = np.zeros_like(probabilities)
    for row, p in enumerate(probabilities):
        for c in range(len(p)):
            better = [d for d in range(len(p)) if p[d] > p[c] or (p[d] == p[c] and d < c)]
            scores[row, c] = sum(p[d] for d in better) + (u if np.isscalar(u) else u[row]) * p[c]
            if variant["method"] == "raps":
                scores[row, c] += variant["penalty"] * max(0, len(better) + 1 - variant["k_reg"])
    return scores


def plain_threshold(scores, alpha):
    """The smallest score that at least (1 - alpha)(n + 1) scores do not exceed, infinity being one more of them."""
    ordered = [*sorted(scores), math.inf]
    return next(q for k, q in enumerate(ordered, start=1) if k >= (1 - alpha) * len(ordered) - 1e-9)


# --- Against the definitions


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("name", ["lac", "aps", "raps"])
def test_sets_are_those_of_the_definition(name, by_class):
    variant = VARIANTS[name]
    (logits, labels), (new, _) = draw(240), draw(150, seed=1)
    fitted = ConformalSets.fit(logits, labels, 0.2, by_class=by_class, allow_empty=True, **variant)
    own = plain_scores(logits, variant)[np.arange(240), labels.numpy()]
    groups = [own[labels.numpy() == c] for c in range(5)] if by_class else [own]
    thresholds = [plain_threshold(group, 0.2) for group in groups]
    assert fitted.thresholds == pytest.approx(thresholds, abs=1e-12)
    expected = plain_scores(new, variant) <= np.array(thresholds)
    assert fitted.sets(new).numpy().tolist() == expected.tolist()
    assert not expected.all() and expected.any()


def test_randomised_sets_count_the_last_class_in_part():
    variant = VARIANTS["aps, randomised"]
    (logits, labels), (new, _) = draw(2000), draw(2000, seed=1)
    fitted = ConformalSets.fit(logits, labels, seed=3, **variant)
    scores, full = fitted._scores(new), plain_scores(new, variant)
    probabilities = new.double().softmax(-1).mean(1)
    u = 1 - ((torch.tensor(full) - scores) / probabilities)
    assert (u - u[:, :1]).abs().max() < 1e-6  # one number per row
    u = u.mean(1)
    assert u.min() >= -1e-9 and u.max() < 1
    counts = u.clamp(min=0).mul(10).long().bincount(minlength=10)
    assert ((counts - 200).square() / 200).sum() < 28  # chi-square of 9 degrees: uniform
    assert abs(np.corrcoef(u, probabilities.max(1).values)[0, 1]) < 0.08


@pytest.mark.parametrize(
    ("rows", "alpha", "rank"), [(9, 0.1, 9), (99, 0.1, 90), (9, 0.7, 3), (99, 0.29, 71), (10, 0.1, 10)]
)
def test_the_quantile_counts_rows_as_alpha_was_written(rows, alpha, rank):
    right = torch.linspace(3, 1, rows)
    logits = torch.stack([right, torch.zeros(rows)], dim=1).unsqueeze(1)
    fitted = ConformalSets.fit(logits, [0] * rows, alpha)
    assert fitted.thresholds == pytest.approx([1 - float(right[rank - 1].double().sigmoid())])


def test_ties_of_the_probability_go_to_the_lower_class():
    even = torch.zeros(40, 1, 4)
    fitted = ConformalSets.fit(even, [0] * 20 + [1] * 20, 0.3, "aps")
    assert fitted.sets(even[:1]).tolist() == [[True, True, False, False]]


# --- The promise


@pytest.mark.parametrize("name", VARIANTS)
def test_coverage_holds_over_many_splits(name):
    rows, tests, alpha, splits = 60, 60, 0.2, 300
    logits, labels = draw(splits * (rows + tests), seed=7)
    parts = zip(logits.split(rows + tests), labels.split(rows + tests), strict=True)
    covered = []
    for number, (part, of) in enumerate(parts):
        fitted = ConformalSets.fit(part[:rows], of[:rows], alpha, seed=number, allow_empty=True, **VARIANTS[name])
        covered.append(fitted.counts(part[rows:], of[rows:])[1])
    # Without ties the number of covered test rows is beta-binomial: k = ceil(61 * 0.8) = 49 of 60 + 1.
    law = betabinom(tests, 49, 61 - 49)
    mean, error = law.mean(), law.std() / math.sqrt(splits)
    assert abs(np.mean(covered) - mean) < 4 * error
    assert mean / tests >= 1 - alpha
    assert np.std(covered) == pytest.approx(law.std(), rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_coverage_by_class_holds_for_each_class_over_many_splits(name):
    rows, tests, alpha, splits = 300, 200, 0.2, 100
    logits, labels = draw(splits * (rows + tests), seed=8)
    covered, seen, laws = np.zeros(5), np.zeros(5), []
    for part, of in zip(logits.split(rows + tests), labels.split(rows + tests), strict=True):
        fitted = ConformalSets.fit(part[:rows], of[:rows], alpha, by_class=True, allow_empty=True, **VARIANTS[name])
        holds = fitted.sets(part[rows:]).gather(1, of[rows:].unsqueeze(1)).squeeze(1)
        for c in range(5):
            calibrating, tested = int((of[:rows] == c).sum()), int((of[rows:] == c).sum())
            rank = math.ceil(round((calibrating + 1) * 0.8, 9))
            laws.append((tested, rank, calibrating + 1 - rank))
            covered[c] += int(holds[of[rows:] == c].sum())
            seen[c] += tested
    expected, variance = (each.reshape(splits, 5).sum(axis=0) for each in betabinom.stats(*np.transpose(laws)))
    assert (np.abs(covered - expected) < 4 * np.sqrt(variance)).all()
    assert (expected / seen >= 1 - alpha).all()


def test_sets_for_all_classes_miss_the_hard_ones_and_sets_by_class_do_not():
    logits, labels = draw(6000, seed=2)
    new, of = draw(6000, seed=3)
    hard = of == 0
    together, by_class = (ConformalSets.fit(logits, labels, 0.1, by_class=each) for each in (False, True))
    assert together.coverage_and_size(new[hard], of[hard])["coverage"] < 0.86
    assert by_class.coverage_and_size(new[hard], of[hard])["coverage"] == pytest.approx(0.9, abs=0.03)


def test_lac_has_the_smallest_sets_and_the_penalty_cuts_the_tails():
    logits = 2 * torch.randn(8000, 1, 30, generator=torch.Generator().manual_seed(0))
    labels = logits.squeeze(1).softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    settings = {"lac": {}, "aps": {"randomised": True}, "raps": {"randomised": True}}
    fitted = {
        name: ConformalSets.fit(logits[:4000], labels[:4000], 0.1, name, allow_empty=True, **each)
        for name, each in settings.items()
    }
    told = {name: each.coverage_and_size(logits[4000:], labels[4000:]) for name, each in fitted.items()}
    assert all(each["coverage"] == pytest.approx(0.9, abs=0.02) for each in told.values())
    assert told["lac"]["mean_size"] < min(told["aps"]["mean_size"], told["raps"]["mean_size"])
    largest = {name: int(each.sets(logits[4000:]).sum(1).max()) for name, each in fitted.items()}
    assert largest["raps"] < largest["aps"]
    assert (fitted["raps"].k_reg, fitted["raps"].penalty) == (5, 0.01)


# --- Small and odd cases


@pytest.mark.parametrize("name", VARIANTS)
def test_too_few_rows_give_full_sets_and_a_warning(name):
    logits, labels = draw(8)
    with pytest.warns(
        UserWarning, match=r"alpha=0.1 takes at least 9 calibration rows, there are 8: every set holds every"
    ):
        fitted = ConformalSets.fit(logits, labels, 0.1, **VARIANTS[name])
    assert fitted.sets(draw(20, seed=1)[0]).all()
    assert "every set holds every class" in fitted.sentence
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ConformalSets.fit(*draw(9), 0.1, **VARIANTS[name])


def test_classes_of_few_rows_are_in_every_set_and_named():
    logits, labels = draw(200)
    labels[labels == 3] = 2
    labels[:4] = 3
    with pytest.warns(UserWarning, match=r"1 of 5 classes have fewer and are in every set: 3\.$"):
        fitted = ConformalSets.fit(logits, labels, 0.1, by_class=True)
    assert fitted.thresholds[3] == math.inf and max(t for c, t in enumerate(fitted.thresholds) if c != 3) < 1
    assert fitted.sets(draw(50, seed=1)[0])[:, 3].all()


def test_empty_sets_get_the_likeliest_class():
    logits, labels = draw(400, strength=6)
    new, of = draw(400, strength=0, seed=1)
    bare = ConformalSets.fit(logits, labels, 0.2, allow_empty=True)
    filled = ConformalSets.fit(logits, labels, 0.2)
    empty = ~bare.sets(new).any(1)
    assert 20 < empty.sum() < 400
    assert (filled.sets(new)[empty].sum(1) == 1).all()
    assert (filled.sets(new)[empty].int().argmax(1) == new[empty].double().softmax(-1).mean(1).argmax(1)).all()
    assert (filled.sets(new)[~empty] == bare.sets(new)[~empty]).all()
    assert filled.coverage_and_size(new, of)["coverage"] >= bare.coverage_and_size(new, of)["coverage"]


def test_a_model_that_is_always_right_or_always_wrong():
    labels = torch.arange(40) % 4
    right = 30.0 * torch.nn.functional.one_hot(labels, 4).unsqueeze(1)
    wrong = right.roll(1, dims=-1)
    sure = ConformalSets.fit(right, labels)
    assert sure.coverage_and_size(right, labels) == {"coverage": 1, "mean_size": 1, "single_class": 1}
    unsure = ConformalSets.fit(wrong, labels)
    assert unsure.coverage_and_size(wrong, labels)["coverage"] >= 0.9
    assert unsure.coverage_and_size(wrong, labels)["mean_size"] > 1


def test_coverage_and_size_count():
    logits, labels = draw(300)
    fitted = ConformalSets.fit(logits, labels)
    new, of = draw(7, seed=1)
    sets = fitted.sets(new)
    told = fitted.coverage_and_size(new, of)
    assert told["coverage"] == pytest.approx(np.mean([bool(sets[i, of[i]]) for i in range(7)]))
    assert told["mean_size"] == pytest.approx(sets.sum().item() / 7)
    assert told["single_class"] == pytest.approx((sets.sum(1) == 1).double().mean().item())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_has_the_same_set_in_any_batch(name):
    fitted = ConformalSets.fit(*draw(100), seed=5, **VARIANTS[name])
    new, _ = draw(60, seed=1)
    one_by_one = torch.cat([fitted.sets(row) for row in new.flip(0).split(1)]).flip(0)
    assert torch.equal(fitted.sets(new), one_by_one)
    assert fitted.sets(new[:0]).shape == (0, 5) and fitted.sets(new).dtype == torch.bool
    assert fitted == ConformalSets.fit(*draw(100), seed=5, **VARIANTS[name])


def test_more_rows_than_one_pass_holds_change_nothing(monkeypatch):
    logits, labels = draw(100)
    whole = ConformalSets.fit(logits, labels, method="aps")
    monkeypatch.setattr("hydra_transformers.uncertainty.conformal.ROWS_PER_PASS", 7)
    assert ConformalSets.fit(logits, labels, method="aps") == whole
    assert whole.sets(logits).shape == (100, 5)


def test_the_seed_changes_randomised_sets_alone():
    logits, labels = draw(300)
    first, second = (ConformalSets.fit(logits, labels, method="aps", randomised=True, seed=seed) for seed in (0, 1))
    assert first.thresholds != second.thresholds
    plain = [ConformalSets.fit(logits, labels, method="aps", seed=seed).thresholds for seed in (0, 1)]
    assert plain[0] == plain[1]


def test_other_types_of_numbers_are_taken():
    logits, labels = draw(200)
    half = logits.half()
    from_array = ConformalSets.fit(half.double().numpy(), labels.numpy().astype("int32"))
    assert ConformalSets.fit(half, labels) == from_array
    assert torch.equal(from_array.sets(half), from_array.sets(half.tolist()))


@pytest.mark.filterwarnings("ignore:alpha=")
@pytest.mark.parametrize("rows", [5, 300])
def test_json_gives_the_same_sets_back(rows):
    for variant, by_class in product(VARIANTS.values(), (False, True)):
        fitted = ConformalSets.fit(*draw(rows), by_class=by_class, **variant)
        read = ConformalSets.from_dict(json.loads(json.dumps(fitted.to_dict(), allow_nan=False)))
        assert read == fitted
        assert torch.equal(read.sets(draw(20, seed=1)[0]), fitted.sets(draw(20, seed=1)[0]))


@pytest.mark.parametrize(
    "change",
    [
        {"thresholds": [0.1, 0.2]},
        {"thresholds": ["x"]},
        {"thresholds": ["nan"]},
        {"method": "x"},
        {"method": "raps"},
        {"more": 1},
    ],
)
def test_what_are_no_sets_is_refused(change):
    content = ConformalSets.fit(*draw(50)).to_dict() | change
    with pytest.raises(ValueError, match="are no conformal sets: pass what to_dict gave"):
        ConformalSets.from_dict(content)


def test_the_guarantee_says_what_breaks_it():
    fitted = ConformalSets.fit(*draw(50))
    assert "For at least 90 % of the rows the set holds the right class" in fitted.sentence
    assert "exchangeable with the 50 calibration rows. Nothing holds under distribution shift." in fitted.sentence
    assert "of the rows of each class" in ConformalSets.fit(*draw(900), by_class=True).guarantee


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0}, "alpha is 0: pass a share between 0 and 1"),
        ({"alpha": 1.0}, "alpha is 1.0: pass a share"),
        ({"alpha": 90}, "alpha is 90: pass a share"),
        ({"alpha": math.nan}, "alpha is nan: pass a share"),
        ({"method": "best"}, "unknown method 'best': choose one of lac, aps, raps"),
        ({"randomised": True}, "lac has nothing to randomise"),
        ({"k_reg": 2}, "k_reg and penalty belong to raps, method is 'lac'"),
        ({"method": "raps"}, "k_reg is 5, there are 3 classes: pass a whole number from 0 to 2"),
        ({"method": "raps", "k_reg": 1, "penalty": -1}, "penalty is -1: pass a positive number"),
        ({"labels": [0, 1, 3]}, r"labels\[2\] is 3, member_logits has 3 classes"),
        ({"labels": [0, -1, 2]}, r"labels\[1\] is -1"),
        ({"labels": [0, 1]}, "labels has 2 rows, member_logits has 3"),
        ({"labels": [[1, 0, 1]] * 3}, "a multi-label model decides on each label by itself"),
        ({"labels": [0.0, 1.0, 2.0]}, "pass integer class indices"),
        ({"member_logits": torch.zeros(3, 3)}, r"member_logits has shape \(3, 3\)"),
        ({"member_logits": torch.full((3, 1, 3), torch.nan)}, "is not a prediction"),
        ({"member_logits": torch.zeros(3, 1, 1)}, "has 1 class"),
        ({"member_logits": torch.zeros(0, 1, 3), "labels": torch.zeros(0, dtype=torch.long)}, "labels is empty"),
    ],
)
def test_unfit_arguments_are_refused_with_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        ConformalSets.fit(**{"member_logits": torch.zeros(3, 1, 3), "labels": [0, 1, 2], **arguments})


def test_unfit_logits_are_refused_by_fitted_sets():
    fitted = ConformalSets.fit(*draw(50))
    with pytest.raises(ValueError, match="member_logits has 4 classes, the sets were fitted for 5"):
        fitted.sets(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="is not a prediction"):
        fitted.sets(torch.full((2, 1, 5), torch.nan))
    with pytest.raises(ValueError, match="there are no samples"):
        fitted.coverage_and_size(torch.zeros(0, 1, 5), torch.zeros(0, dtype=torch.long))


def test_a_shift_breaks_the_promise():
    fitted = ConformalSets.fit(*draw(2000, strength=3))
    new, of = draw(2000, strength=0, seed=1)
    covered = fitted.counts(new, of)[1]
    assert covered < binom.ppf(1e-6, 2000, 0.9)
