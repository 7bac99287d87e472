"""Laplace approximations of linear maps with Kronecker factors (Ritter et al., 2018; Daxberger et
al., 2021).

The weights W (outputs, inputs) of y = W a are normal around the trained ones. The precision is the
generalized Gauss-Newton matrix of the loss, Σ_n (a_n a_nᵀ) ⊗ Λ_n with Λ_n its second derivative in
y_n, plus the prior precision λ. The sum of products is approximated by A ⊗ B, with A = n^-1/2 Σ a
aᵀ and B = n^-1/2 Σ Λ. This is exact for one row, and if Λ is the same for all.

In the eigenbases of A and B the precision is diagonal: (outputs, inputs), one number for each pair.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ..models.ensembling import at_least_float32


LOG_RANGE = (math.log(1e-12), math.log(1e12))  # where the prior precision is searched


class Factors:
    """Sums Σ a aᵀ and Σ Λ over batches, in float64."""

    def __init__(self, inputs: int, outputs: int, device: torch.device | str):
        self.rows = 0
        self.of_inputs = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.of_outputs = torch.zeros(outputs, outputs, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor, second_derivatives: Tensor) -> None:
        """Add a batch.

        inputs: (rows, inputs)
        second_derivatives: (outputs, outputs), summed over these rows
        """
        inputs = inputs.double()
        self.rows += len(inputs)
        self.of_inputs += inputs.t() @ inputs
        self.of_outputs += second_derivatives.double()

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        root = math.sqrt(self.rows)
        return self.of_inputs / root, self.of_outputs / root


def second_derivatives_of_softmax(logits: Tensor) -> Tensor:
    """Return Σ diag(p) − p pᵀ over the rows of logits (rows, classes).

    These are the second derivatives of the cross-entropy in its logits, for any labels.
    """
    probabilities = logits.double().softmax(dim=-1)
    return probabilities.sum(dim=0).diag() - probabilities.t() @ probabilities


def second_derivatives_of_similarity(embeddings: Tensor, targets: Tensor, scale: Tensor | float) -> Tensor:
    """Return Σ_n t² J_n Yᵀ (diag p_n − p_n p_nᵀ) Y J_n over embeddings g (rows, dim).

    This is the Gauss-Newton form of the cross-entropy of softmax(t ĝ Yᵀ) in g, with ĝ = g / ‖g‖ and
    J = (I − ĝ ĝᵀ) / ‖g‖. Multiplied out, it needs no matrix per row.

    targets: Y, unit vectors (targets, dim)
    scale: t
    """
    embeddings = embeddings.double()
    targets = targets.double()
    lengths = embeddings.norm(dim=-1, keepdim=True)
    units = embeddings / lengths  # ĝ
    weights = lengths.squeeze(1) ** -2  # (rows,), from the two J
    cosines = units @ targets.t()  # (rows, targets)
    probabilities = (scale * cosines).softmax(dim=-1)
    means = probabilities @ targets  # Yᵀ p: (rows, dim)

    # M ĝ with M = Yᵀ (diag p − p pᵀ) Y: (rows, dim)
    weighted_cosines = probabilities * cosines
    along = weighted_cosines @ targets - means * weighted_cosines.sum(dim=-1, keepdim=True)

    # (I − ĝ ĝᵀ) M (I − ĝ ĝᵀ) = M − ĝ (M ĝ)ᵀ − (M ĝ) ĝᵀ + ĝ (ĝᵀ M ĝ) ĝᵀ, summed over the rows
    middle = (targets.t() * (weights @ probabilities)) @ targets - (means.t() * weights) @ means
    crossed = (units.t() * weights) @ along
    lengths_along = weights * (units * along).sum(dim=-1)
    twice = (units.t() * lengths_along) @ units
    return scale**2 * (middle - crossed - crossed.t() + twice)


class KroneckerPosterior(nn.Module):
    """The distribution of a linear map's weights.

    inputs, outputs: the map's sizes; a bias is the weight of one more input that is always 1
    form: "sum" for the precision τ A ⊗ B + λ; "factors" for (√τ A + √λ) ⊗ (√τ B + √λ), as in
        BayesVLM

    Before it is fitted the prior precision is infinite, so the weights are certain.
    """

    def __init__(self, inputs: int, outputs: int, form: str = "sum"):
        super().__init__()
        self.form = form
        for side, size in (("input", inputs), ("output", outputs)):
            self.register_buffer(f"{side}_basis", torch.eye(size))
            self.register_buffer(f"{side}_eigenvalues", torch.zeros(size))
        self.register_buffer("prior_precision", torch.tensor(math.inf))
        self.register_buffer("pseudo_count", torch.tensor(1.0))

    def fit(
        self,
        input_factor: Tensor,
        output_factor: Tensor,
        weight: Tensor,
        prior_precision: float | None = None,
        pseudo_count: float = 1.0,
    ) -> dict[str, Tensor]:
        """Return new values of the buffers, for `set`.

        Nothing changes here, so that several posteriors can be set together.

        input_factor, output_factor: A (inputs, inputs) and B (outputs, outputs)
        weight: the trained weights (outputs, inputs)
        prior_precision: λ; None for the one with the highest evidence
        pseudo_count: τ, how many times the data count
        """
        if not pseudo_count > 0 or not (prior_precision is None or prior_precision > 0):
            raise ValueError(f"prior_precision {prior_precision!r}, pseudo_count {pseudo_count!r}: pass numbers > 0")
        of_inputs, input_basis = _eigen(input_factor)
        of_outputs, output_basis = _eigen(output_factor)
        if prior_precision is None:
            squared_length = float(weight.double().square().sum())
            prior_precision = best_prior_precision(of_inputs, of_outputs, squared_length, self.form, pseudo_count)
        return {
            "input_eigenvalues": of_inputs,
            "input_basis": input_basis,
            "output_eigenvalues": of_outputs,
            "output_basis": output_basis,
            "prior_precision": torch.tensor(prior_precision, dtype=torch.float64),
            "pseudo_count": torch.tensor(pseudo_count, dtype=torch.float64),
        }

    def set(self, fitted: dict[str, Tensor]) -> None:
        """Take the values that `fit` returned."""
        for name, value in fitted.items():
            getattr(self, name).copy_(value)

    def precisions(self) -> Tensor:
        """Return the precisions (outputs, inputs), in the eigenbases."""
        return precisions_of(
            at_least_float32(self.input_eigenvalues),
            at_least_float32(self.output_eigenvalues),
            at_least_float32(self.prior_precision),
            self.form,
            at_least_float32(self.pseudo_count),
        )

    def output_variance(self, inputs: Tensor) -> Tensor:
        """Return the variance of each output, (rows, outputs), for inputs (rows, inputs)."""
        along = at_least_float32(inputs) @ at_least_float32(self.input_basis)
        of_eigenvectors = along.square() @ (1 / self.precisions()).t()  # of B
        return of_eigenvectors @ at_least_float32(self.output_basis).square().t()

    def sample(self, count: int, seed: int) -> Tensor:
        """Draw differences from the trained weights, (count, outputs, inputs).

        They are the same on every device.
        """
        shape = (count, len(self.output_eigenvalues), len(self.input_eigenvalues))
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
        deviations = noise.to(self.input_basis) / self.precisions().sqrt()
        return at_least_float32(self.output_basis) @ deviations @ at_least_float32(self.input_basis).t()


def _eigen(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, none below zero, and eigenvectors."""
    if not factor.isfinite().all():
        raise ValueError("a Kronecker factor is not finite: check the model's weights and the data")
    values, vectors = torch.linalg.eigh(factor.double().cpu())
    return values.clamp(min=0), vectors


def precisions_of(
    of_inputs: Tensor,
    of_outputs: Tensor,
    prior_precision: Tensor | float,
    form: str,
    pseudo_count: Tensor | float = 1.0,
) -> Tensor:
    """Return the eigenvalues of the precision, (outputs, inputs).

    of_inputs, of_outputs: those of A (inputs,) and B (outputs,)
    """
    if form == "sum":
        return pseudo_count * torch.outer(of_outputs, of_inputs) + prior_precision
    data = pseudo_count**0.5
    prior = prior_precision**0.5
    return torch.outer(data * of_outputs + prior, data * of_inputs + prior)


def best_prior_precision(
    of_inputs: Tensor, of_outputs: Tensor, squared_length: float, form: str, pseudo_count: float = 1.0
) -> float:
    """Return the λ with the highest evidence ½ (P log λ − λ ‖W‖² − log det).

    For P weights, ‖W‖² = squared_length and the determinant of the precision. The slope in log λ
    falls from end to end, so it is found by bisection.
    """

    def slope(prior_precision: float) -> float:
        """Return twice d evidence / d log λ.

        It is the number of weights that the data determine, less λ ‖W‖².
        """
        if form == "sum":
            data = pseudo_count * torch.outer(of_outputs, of_inputs)
            determined = float((data / (data + prior_precision)).sum())
        else:
            data = math.sqrt(pseudo_count)
            prior = math.sqrt(prior_precision)
            free_inputs = float((prior / (data * of_inputs + prior)).sum())
            free_outputs = float((prior / (data * of_outputs + prior)).sum())
            rows = len(of_outputs)
            columns = len(of_inputs)
            determined = rows * columns - 0.5 * (rows * free_inputs + columns * free_outputs)
        return determined - prior_precision * squared_length

    low, high = LOG_RANGE
    if slope(math.exp(low)) <= 0 or slope(math.exp(high)) >= 0:
        raise ValueError(
            "no prior precision has the highest evidence: the data say nothing about these weights, or all weights "
            "are zero; pass prior_precision, or more data"
        )
    for _ in range(100):
        middle = (low + high) / 2
        if slope(math.exp(middle)) > 0:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def probit_logits(means: Tensor, variances: Tensor) -> Tensor:
    """Return mean / √(1 + π/8 · variance).

    Their softmax is about the mean softmax of normal logits (MacKay, 1992).
    """
    return means / (1 + math.pi / 8 * variances).sqrt()


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Turn autocast off, for small products that need more digits than it keeps."""
    # The meta device has none. torch 2.11 cannot compile the question.
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device.type)
    if has_autocast:
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
