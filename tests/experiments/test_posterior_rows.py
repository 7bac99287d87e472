"""The rows of OBA and of Laplace on the last layer."""

import pytest

from experiments.methods import Comparison
from experiments.smallest import SMALLEST, splits
from experiments.units import Unit, units_of
from hydra_transformers.pruning.oba import ranked_weights


@pytest.mark.slow
def test_laplace_and_oba_are_judged_and_zeros_stay_in_training(tmp_path):
    comparison = Comparison(SMALLEST, splits(), tmp_path, "cpu", seeds=1, backbones=3)
    rows = dict(comparison.untuned(0)) | dict(comparison.zero_shot(0))
    laplace, sparse = rows["last-layer-laplace"](), rows["oba-zero-shot"]()
    assert 0 < float(laplace.posterior.prior_precision) < float("inf")
    zeros = [weight == 0 for weight in ranked_weights(sparse)]
    # two heads of 4 x 16 x 4 weights
    assert sum(int(each.sum()) for each in zeros) == 2 * 4 * 16 * 4
    tuned = comparison.member(Unit("member", 0, "oba"))
    assert type(tuned) is type(sparse)
    trained = zip(ranked_weights(tuned), ranked_weights(sparse), zeros, strict=True)
    assert all((weight != before).any() and (weight[zero] == 0).all() for weight, before, zero in trained)
    assert Unit("member", 0, "oba") in units_of(SMALLEST, seeds=1, backbones=3)
