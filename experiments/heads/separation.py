"""How far apart single heads see known and out-of-distribution data (B.2, question 1; table 5)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.heads import Head, as_heads_to_prune
from hydra_transformers.pruning.objectives import auroc_of_confidence
from hydra_transformers.reports.table import markdown_table

from .outputs import Batches, one_member, watched_heads


DENSE = "all heads"
RIDGE = 0.01  # added to the diagonal of the discriminant's covariance, times the mean variance

Vectors = dict[Head, Tensor]  # (rows, head_dim) each, float64, on the CPU


@dataclass(frozen=True)
class Separation:
    """How far apart a head sees two data sets.

    euclidean: the distance of the means
    relative: the same, divided by the root of the known data's total variance
    mahalanobis: the distance of the means by the known data's covariance, where that is not 0
    auroc: of a linear discriminant, fitted on one half of the rows and tested on the other, mean of both ways
    """

    euclidean: float
    relative: float
    mahalanobis: float
    auroc: float


MEASURES = tuple(field.name for field in fields(Separation))


@dataclass(frozen=True)
class HeadSeparation:
    """The result of `head_separation`.

    networks: network ("all heads", and the pruned ones) -> OOD set -> head -> `Separation`
    chance: OOD set -> the Mahalanobis distance expected of a head that sees no difference, for this number of rows
    """

    networks: dict[str, dict[str, dict[Head, Separation]]]
    chance: dict[str, float]

    def mean(self, network: str, ood: str, heads: Sequence[Head]) -> Separation | None:
        """Over those of the heads that a network has; None over none."""
        of_heads = self.networks[network][ood]
        chosen = [of_heads[head] for head in heads if head in of_heads]
        if not chosen:
            return None
        return Separation(*(math.fsum(getattr(one, name) for one in chosen) / len(chosen) for name in MEASURES))

    def tables(self) -> dict[str, str]:
        """The last layer (the paper's table 5) and all layers."""
        tables = {}
        for ood in self.networks[DENSE]:
            chance = f"\n\nMahalanobis by chance: {self.chance[ood]:.2f}."
            tables[f"Known data and {ood}"] = self._network_table(ood) + chance
        return tables

    def _network_table(self, ood: str) -> str:
        rows = []
        for network, sets in self.networks.items():
            kept = list(sets[ood])
            if network != DENSE:
                rows.append(self._row(f"{DENSE}, those that {network} keeps", DENSE, ood, kept))
            rows.append(self._row(network, network, ood, kept))
        heading = ["Network", "Heads of the last layer", "Euclid", "Euclid / spread", "Mahalanobis", "AUROC"]
        return markdown_table([*heading, "Heads", "AUROC of all layers"], rows)

    def _row(self, title: str, network: str, ood: str, heads: Sequence[Head]) -> list[str]:
        last_layer = max(layer for layer, _ in self.networks[DENSE][ood])
        last = [head for head in heads if head[0] == last_layer]
        of_last = self.mean(network, ood, last)
        of_all = self.mean(network, ood, heads)
        distances = ["-"] * 3
        if of_last is not None:
            distances = [f"{value:.2f}" for value in (of_last.euclidean, of_last.relative, of_last.mahalanobis)]
        return [title, str(len(last)), *distances, _percent(of_last), str(len(heads)), _percent(of_all)]


def _percent(mean: Separation | None) -> str:
    return "-" if mean is None else f"{100 * mean.auroc:.1f}"


def head_separation(
    model: PreTrainedModel,
    data: Batches,
    ood_data: Mapping[str, Batches],
    pruned: Mapping[str, Sequence[Head]],
    seed: int = 0,
) -> HeadSeparation:
    """How well the outputs of each single head, before the output projection at the first token, tell OOD data from known data.

    pruned: name -> heads to cut out: the remaining heads are compared in the pruned and in the whole network, which tells "bad
        heads left out" from "heads changed"
    seed: for the halves that discriminants are fitted and tested on
    """
    networks = {}
    chance = {}
    for network in (DENSE, *pruned):
        hydra = one_member(prune_heads(model, as_heads_to_prune(pruned[network])) if network in pruned else model)
        known = head_vectors(hydra, data)
        networks[network] = {}
        for name, batches in ood_data.items():
            others = head_vectors(hydra, batches)
            networks[network][name] = _separations(known, others, seed)
            rows, dim = next(iter(known.values())).shape
            chance[name] = mahalanobis_by_chance(dim, rows, len(next(iter(others.values()))))
    return HeadSeparation(networks, chance)


def head_vectors(hydra: PreTrainedModel, data: Batches) -> Vectors:
    """The outputs of each head of a one-member Hydra for every row, at the first token."""
    encoder = hydra.base_model
    of_batches = []

    def keep(layer: int, outputs: Tensor) -> None:
        numbers = encoder.config.kept_heads[layer][0]
        for number, output in zip(numbers, outputs[:, 0].double().cpu().unbind(dim=1), strict=True):
            of_batches[-1][layer, number] = output

    with watched_heads(hydra, keep), torch.inference_mode():
        for batch in data:
            of_batches.append({})
            encoder(**{name: value for name, value in batch.items() if name != "labels"})
    vectors = {head: torch.cat([of_batch[head] for of_batch in of_batches]) for head in of_batches[0]}
    if not all(vector.isfinite().all() for vector in vectors.values()):
        raise ValueError("outputs of heads are not finite: look for NaN in the data and in the weights")
    return vectors


def _separations(known: Vectors, ood: Vectors, seed: int) -> dict[Head, Separation]:
    """All heads at once."""
    if not known:
        return {}
    x, y = (torch.stack(list(each.values())) for each in (known, ood))  # (heads, rows, head_dim)
    difference = y.mean(dim=1) - x.mean(dim=1)
    covariance = _covariance(x)
    inverse = torch.linalg.pinv(covariance, rtol=1e-10, hermitian=True)
    mahalanobis = torch.einsum("hi,hij,hj->h", difference, inverse, difference).clamp(min=0).sqrt()
    euclidean = difference.norm(dim=-1)
    spread = covariance.diagonal(dim1=-2, dim2=-1).sum(dim=-1).sqrt()
    columns = euclidean, euclidean / spread.clamp(min=torch.finfo(x.dtype).tiny), mahalanobis, _aurocs(x, y, seed)
    return {
        head: Separation(*values)
        for head, *values in zip(known, *(column.tolist() for column in columns), strict=True)
    }


def mahalanobis_by_chance(dim: int, known: int, ood: int) -> float:
    """The root mean square Mahalanobis distance of two samples of one normal distribution. The inverse of the estimated
    covariance is too large by (known - 1) / (known - dim - 2) on average."""
    return math.sqrt(dim * (1 / known + 1 / ood) * (known - 1) / (known - dim - 2))


def _covariance(x: Tensor) -> Tensor:
    """(heads, rows, dim) -> (heads, dim, dim)"""
    centred = x - x.mean(dim=1, keepdim=True)
    return centred.transpose(1, 2) @ centred / max(1, x.shape[1] - 1)


def _aurocs(x: Tensor, y: Tensor, seed: int) -> Tensor:
    """Of a linear discriminant per head, fitted on one half of the rows and tested on the other, both ways: (heads,)"""
    generator = torch.Generator().manual_seed(seed)
    halves = [each[:, torch.randperm(each.shape[1], generator=generator)].tensor_split(2, dim=1) for each in (x, y)]
    aurocs = []
    for fit, test in ((0, 1), (1, 0)):
        direction = _discriminant(halves[0][fit], halves[1][fit])
        confidences = [-torch.einsum("hrd,hd->hr", half[test], direction) for half in halves]
        aurocs.append(torch.tensor([float(share) for share in auroc_of_confidence(*confidences)]))
    return torch.stack(aurocs).mean(dim=0)


def _discriminant(x: Tensor, y: Tensor) -> Tensor:
    """Fisher's, (heads, dim): the second set has the higher values."""
    within = (_covariance(x) + _covariance(y)) / 2
    scale = within.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    scale = torch.where(scale > 0, scale, 1.0)  # two constant sets differ along their difference
    within = within + RIDGE * scale[:, None, None] * torch.eye(x.shape[-1], dtype=x.dtype)
    return torch.linalg.solve(within, (y.mean(dim=1) - x.mean(dim=1)).unsqueeze(-1)).squeeze(-1)
