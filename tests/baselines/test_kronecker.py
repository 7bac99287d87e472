"""Kronecker factors of a linear map against brute force: whole Gauss-Newton matrices, in float64."""

import math

import pytest
import torch
from torch import nn

from hydra_transformers.baselines.kronecker import (
    Factors,
    KroneckerPosterior,
    precisions_of,
    probit_logits,
    second_derivatives_of_similarity,
    second_derivatives_of_softmax,
)


INPUTS = 4
OUTPUTS = 3


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gauss_newton(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Σ Jᵀ Λ J of the cross-entropy, for W flattened row by row: by autograd, and Λ by autograd of the loss in the logits."""
    total = torch.zeros(weight.numel(), weight.numel(), dtype=torch.float64)
    for row in rows:
        jacobian = torch.autograd.functional.jacobian(lambda new, row=row: new.view_as(weight) @ row, weight.flatten())
        logits = weight @ row
        hessian = torch.autograd.functional.hessian(lambda z: nn.functional.cross_entropy(z, torch.tensor(1)), logits)
        total += jacobian.t() @ hessian @ jacobian
    return total


def factors_of(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factors = Factors(INPUTS, OUTPUTS, "cpu")
    for part in rows.split(4):
        factors.add(part, second_derivatives_of_softmax(part @ weight.t()))
    return factors.scaled()


def test_the_factors_are_the_whole_matrix_for_one_row_and_where_the_curvature_is_the_same_for_all():
    row = numbers(1, INPUTS)
    rows = numbers(9, INPUTS)
    weight = numbers(OUTPUTS, INPUTS, seed=1)
    for data, of in ((row, weight), (rows, torch.zeros_like(weight))):
        product = torch.kron(*reversed(factors_of(data, of)))
        torch.testing.assert_close(product, gauss_newton(data, of), rtol=1e-10, atol=1e-12)
    ratio = torch.kron(*reversed(factors_of(rows, weight))).trace() / gauss_newton(rows, weight).trace()
    assert 0.5 < ratio < 2 and ratio != pytest.approx(1, rel=1e-3)  # an approximation, of the same size


def fitted(form: str, **options) -> tuple[KroneckerPosterior, torch.Tensor]:
    """A posterior, and its covariance by inverting the whole precision."""
    rows = numbers(9, INPUTS)
    weight = numbers(OUTPUTS, INPUTS, seed=1)
    input_factor, output_factor = factors_of(rows, weight)
    posterior = KroneckerPosterior(INPUTS, OUTPUTS, form).double()
    posterior.set(posterior.fit(input_factor, output_factor, weight, **options))
    prior = float(posterior.prior_precision)
    count = options.get("pseudo_count", 1.0)
    one = torch.eye(OUTPUTS, dtype=torch.float64)
    other = torch.eye(INPUTS, dtype=torch.float64)
    if form == "sum":
        precision = count * torch.kron(output_factor, input_factor) + prior * torch.kron(one, other)
    else:
        grown = [count**0.5 * part + prior**0.5 * eye for part, eye in ((output_factor, one), (input_factor, other))]
        precision = torch.kron(*grown)
    return posterior, precision.inverse()


@pytest.mark.parametrize("form", ["sum", "factors"])
def test_variances_and_samples_are_those_of_the_inverted_precision(form):
    posterior, covariance = fitted(form, prior_precision=0.7, pseudo_count=2.0)
    rows = numbers(5, INPUTS, seed=2)
    maps = torch.stack([torch.kron(torch.eye(OUTPUTS, dtype=torch.float64), row.unsqueeze(0)) for row in rows])
    expected = maps @ covariance @ maps.mT  # (rows, outputs, outputs)
    torch.testing.assert_close(posterior.output_variance(rows), expected.diagonal(0, 1, 2), rtol=1e-9, atol=1e-12)
    assert KroneckerPosterior(INPUTS, OUTPUTS, form).output_variance(rows.float()).abs().max() == 0  # unset
    drawn = posterior.sample(40_000, seed=0)
    assert torch.equal(drawn[:5], posterior.sample(40_000, seed=0)[:5])
    torch.testing.assert_close(drawn.flatten(1).t().cov(), covariance, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("form", ["sum", "factors"])
def test_the_prior_precision_has_the_highest_evidence(form):
    posterior, covariance = fitted(form)
    best = float(posterior.prior_precision)
    eigenvalues = posterior.input_eigenvalues, posterior.output_eigenvalues
    length = float(numbers(OUTPUTS, INPUTS, seed=1).square().sum())

    def evidence(prior: float) -> float:
        log_determinant = float(precisions_of(*eigenvalues, prior, form).log().sum())
        return 0.5 * (12 * math.log(prior) - prior * length - log_determinant)

    by_hand = 0.5 * (12 * math.log(best) - best * length + torch.logdet(covariance).item())
    assert evidence(best) == pytest.approx(by_hand, rel=1e-9)
    for factor in (0.01, 0.5, 0.9, 1.1, 2, 100):
        assert evidence(best * factor) < evidence(best)


def test_the_curvature_of_a_similarity_is_that_of_autograd():
    embeddings = numbers(5, 6)
    scale = 7.0
    targets = nn.functional.normalize(numbers(4, 6, seed=1), dim=-1)
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for embedding in embeddings:

        def logits(g: torch.Tensor) -> torch.Tensor:
            return scale * (g / g.norm()) @ targets.t()

        jacobian = torch.autograd.functional.jacobian(logits, embedding)
        p = logits(embedding).softmax(-1)
        expected += jacobian.t() @ (p.diag() - torch.outer(p, p)) @ jacobian
    found = second_derivatives_of_similarity(embeddings, targets, scale)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_probit_logits_have_about_the_mean_probability():
    means = numbers(1, 5)
    variances = 0.5 + numbers(1, 5, seed=1).square()
    drawn = means + variances.sqrt() * numbers(50_000, 5, seed=2)
    expected = drawn.softmax(-1).mean(dim=0)
    found = probit_logits(means, variances).softmax(-1)[0]
    assert (found - expected).abs().max() < 0.04
    assert (means.softmax(-1)[0] - expected).abs().max() > 2 * (found - expected).abs().max()
    assert torch.equal(probit_logits(means, torch.zeros_like(means)), means)
