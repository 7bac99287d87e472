"""How far apart single heads see known and foreign data (B.2, question 1)."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hydra_transformers._io.processes import gather_batches
from hydra_transformers.data.evaluation_data import read_data
from hydra_transformers.models.modeling_hydra_decoders import last_token
from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.head_maps import HeadMap
from hydra_transformers.pruning.heads import Head, as_heads_to_prune, check_count, has_two_towers, head_at, heads_of
from hydra_transformers.pruning.objectives import auroc_of_confidence
from hydra_transformers.reports.table import markdown_table

from .arguments import as_head_set, as_order, check_are_named, foreign_sets
from .head_outputs import one_member, watched_heads
from .sweep import DENSE


RIDGE = 0.01  # added to the diagonal of the discriminant's covariance, times the mean variance
MOST_POINTS = 300  # of a set in a picture

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


MEASURES = tuple(each.name for each in fields(Separation))


@dataclass(frozen=True)
class Picture:
    """A head's outputs along the two directions in which they vary most: (rows, 2) of known and of foreign data."""

    known: list[list[float]]
    foreign: list[list[float]]
    explained: float


@dataclass(frozen=True)
class HeadSeparation:
    """The result of `head_separation`.

    networks: network ("all heads", and the pruned ones) -> foreign set -> head -> `Separation`
    chance: foreign set -> the Mahalanobis distance expected of a head that sees no difference, for this number of rows
    ranking: the heads in the order of their removal
    pictures: head -> `Picture` against the first foreign set, for the heads that go first and last
    """

    networks: dict[str, dict[str, dict[Head, Separation]]]
    chance: dict[str, float]
    ranking: list[Head] = field(default_factory=list)
    pictures: dict[Head, Picture] = field(default_factory=dict)

    @property
    def foreign_sets(self) -> list[str]:
        return list(self.networks[DENSE])

    @property
    def last_layer(self) -> int:
        return max(head[-2] for head in self._dense())

    def _dense(self) -> dict[Head, Separation]:
        return self.networks[DENSE][self.foreign_sets[0]]

    def mean(self, network: str, foreign: str, heads: Sequence[Head] | None = None) -> Separation | None:
        """Over those of the heads that a network has, by default all; None over none."""
        of_heads = self.networks[network][foreign]
        chosen = [of_heads[head] for head in (of_heads if heads is None else heads) if head in of_heads]
        if not chosen:
            return None
        return Separation(*(math.fsum(getattr(each, name) for each in chosen) / len(chosen) for name in MEASURES))

    def by_importance(self, count: int) -> dict[str, list[Head]]:
        """The `count` heads that go first (at most half of all) and of the others those that go last: heads that were never
        ranked, the last layer's first, then the end of the ranking."""
        first = self.ranking[: min(count, len(self._dense()) // 2)]
        never = [head for head in self._dense() if head not in set(self.ranking)]
        others = [head for head in never[::-1] + self.ranking[::-1] if head not in set(first)]
        return {"go first": first, "go last": others[:count]}

    def to_dict(self) -> dict[str, Any]:
        """Without the pictures."""
        return {
            "networks": {
                network: {
                    foreign: [[*head, *(getattr(each, name) for name in MEASURES)] for head, each in of_heads.items()]
                    for foreign, of_heads in sets.items()
                }
                for network, sets in self.networks.items()
            },
            "columns": ["tower", "layer", "head", *MEASURES][-len(next(iter(self._dense()))) - len(MEASURES) :],
            "chance": self.chance,
            "ranking": self.ranking,
        }

    def to_markdown(self) -> str:
        """The last layer (the paper's table 5) and all layers; AUROC by layer, and by place in the ranking."""
        parts = []
        for foreign in self.foreign_sets:
            parts += [f"### Known data and {foreign}", self._network_table(foreign)]
            parts.append(f"Mahalanobis by chance: {self.chance[foreign]:.2f}.")
        parts += ["### AUROC by layer, all heads", self._layer_table()]
        if self.ranking:
            parts += ["### AUROC by when heads go", self._ranking_table()]
        return "\n\n".join(parts) + "\n"

    def _network_table(self, foreign: str) -> str:
        rows = []
        for network, sets in self.networks.items():
            kept = list(sets[foreign])
            if network != DENSE:
                rows.append(self._row(f"{DENSE}, those that {network} keeps", DENSE, foreign, kept))
            rows.append(self._row(network, network, foreign, kept))
        heading = ["Network", "Heads of the last layer", "Euclid", "Euclid / spread", "Mahalanobis", "AUROC"]
        return markdown_table([*heading, "Heads", "AUROC of all layers"], rows)

    def _row(self, title: str, network: str, foreign: str, heads: Sequence[Head]) -> list[str]:
        last = [head for head in heads if head[-2] == self.last_layer]
        of_last, of_all = self.mean(network, foreign, last), self.mean(network, foreign, heads)
        distances = ["-"] * 3
        if of_last is not None:
            distances = [f"{value:.2f}" for value in (of_last.euclidean, of_last.relative, of_last.mahalanobis)]
        return [title, str(len(last)), *distances, _percent(of_last), str(len(heads)), _percent(of_all)]

    def _layer_table(self) -> str:
        heading = ["Layer", *(f"{foreign}: {what}" for foreign in self.foreign_sets for what in ("mean", "best head"))]
        rows = []
        for layer in sorted({head[-2] for head in self._dense()}):
            row = [str(layer)]
            for foreign in self.foreign_sets:
                of_layer = {
                    head: each.auroc for head, each in self.networks[DENSE][foreign].items() if head[-2] == layer
                }
                best = max(of_layer, key=of_layer.__getitem__)
                mean = math.fsum(of_layer.values()) / len(of_layer)
                row += [f"{100 * mean:.1f}", f"{100 * of_layer[best]:.1f} (head {best[-1]})"]
            rows.append(row)
        return markdown_table(heading, rows)

    def _ranking_table(self) -> str:
        ranked = set(self.ranking)
        half = len(self.ranking) // 2
        groups = {
            f"first {half} to go": self.ranking[:half],
            f"next {len(self.ranking) - half} to go": self.ranking[half:],
            "never ranked": [head for head in self._dense() if head not in ranked],
        }
        rows = []
        for name, heads in groups.items():
            means = (self.mean(DENSE, foreign, heads) for foreign in self.foreign_sets)
            rows.append([name, str(len(heads)), *map(_percent, means)])
        return markdown_table(["Heads", "Number", *self.foreign_sets], rows)

    def head_map(self, foreign: str | None = None) -> HeadMap:
        """The AUROC of each head."""
        foreign = self.foreign_sets[0] if foreign is None else foreign
        aurocs = {head: each.auroc for head, each in self.networks[DENSE][foreign].items()}
        return HeadMap({f"AUROC against {foreign}": aurocs}, low=0.5, high=1.0)

    def _repr_html_(self) -> str:
        return self.head_map()._repr_html_()

    def plot(self, folder: str | Path) -> list[Path]:
        """Writes `heads_auroc.png`, a map for each foreign set, and with a ranking `heads_pca.png`, the heads that go first and
        last; returns their paths."""
        from .head_plots import draw_separation

        return draw_separation(self, folder)


def _percent(mean: Separation | None) -> str:
    return "-" if mean is None else f"{100 * mean.auroc:.1f}"


def head_separation(
    model: PreTrainedModel,
    data: Any,
    ood_data: Any,
    *,
    pruned: Mapping[str, Any] | None = None,
    ranking: Any = None,
    pictured: int = 6,
    batch_size: int = 32,
    seed: int = 0,
) -> HeadSeparation:
    """How well the outputs of each single head tell foreign data from known data.

    A head's output is read before the output projection: at the first token, for causal language models at the last
    one, and for SigLIP's images, which have no such token, as the mean over patches. All outputs are kept in memory.

    Args:
        model: an image or text classifier or a CLIP model of Transformers, or a one-member Hydra of one; left as it is. For
            CLIP, the heads of the vision tower are analysed.
        data: known data: a DataLoader, a list of dict batches, or a Dataset or list of dict rows. Labels are not read.
        ood_data: foreign data, or several sets as `{name: data}`.
        pruned: name -> heads to cut out (see `pruning_under_noise`): the remaining heads are compared in the pruned and in the
            whole network, which tells "bad heads left out" from "heads changed".
        ranking: a `Circuit`, scores or a list of heads: which heads go first and last.
        pictured: how many of each to picture.
        seed: for the halves that discriminants are fitted and tested on.
    """
    check_count(pictured, "pictured", 0, 10**6, "pictures are drawn one by one")
    hydra = one_member(model)
    heads = heads_of(hydra, ["vision"] if has_two_towers(hydra) else None)
    if pruned is not None:
        check_are_named(pruned, "pruned", "heads")
    everything = heads_of(hydra)
    sets = {name: as_head_set(given, f"pruned[{name!r}]", everything) for name, given in (pruned or {}).items()}
    if DENSE in sets:
        raise ValueError(f"pruned has a set named {DENSE!r}, which is the whole network: choose another name")
    order = [] if ranking is None else as_order(ranking, "ranking", everything)
    order = [head for head in order if head in set(heads)]
    foreign = foreign_sets(ood_data)
    known = _read(hydra, data, "data", batch_size)
    others = {name: _read(hydra, each, f"ood_data ({name})", batch_size) for name, each in foreign.items()}
    rows, head_dim = known.num_samples, head_dim_of(hydra)
    check_are_enough_rows(head_dim, rows, {name: each.num_samples for name, each in others.items()})

    networks, vectors = {}, {}
    for network in (DENSE, *sets):
        cut = hydra if network == DENSE else one_member(prune_heads(model, as_heads_to_prune(sets[network])))
        of_known = head_vectors(cut, known)
        of_others = {name: head_vectors(cut, each) for name, each in others.items()}
        networks[network] = {name: _separations(of_known, each, seed) for name, each in of_others.items()}
        if network == DENSE:
            vectors = {"known": of_known, "foreign": next(iter(of_others.values()))}
    chance = {name: mahalanobis_by_chance(head_dim, rows, each.num_samples) for name, each in others.items()}
    result = HeadSeparation(networks, chance, order)
    if order:
        chosen = [head for some in result.by_importance(pictured).values() for head in some]
        result.pictures.update({head: principal_components(*(of[head] for of in vectors.values())) for head in chosen})
    return result


def check_are_enough_rows(head_dim: int, known: int, foreign: Mapping[str, int]) -> None:
    """Refuses too few rows for a covariance, or for both halves of a discriminant."""
    least = head_dim + 3
    if known < least:
        raise ValueError(f"data has {known} rows, and heads have {head_dim} dimensions: pass {least} rows or more")
    for name, rows in foreign.items():
        if rows < 4:
            raise ValueError(f"ood_data ({name}) has {rows} rows: pass at least 4, to fit and to test on")


def head_dim_of(hydra: PreTrainedModel) -> int:
    return next(iter(_encoder(hydra).layers)).attention.head_dim


def _encoder(hydra: PreTrainedModel) -> PreTrainedModel:
    """The tower that reads the data."""
    return hydra.vision_model if has_two_towers(hydra) else hydra.base_model


def _read(hydra: PreTrainedModel, data: Any, name: str, batch_size: int) -> Any:
    names = inspect.signature(_encoder(hydra).forward).parameters
    names = [each for each in names if each not in ("first_token_only", "members_only", "kwargs")]
    return read_data(data, name, names, batch_size, hydra.device, hydra.dtype, None)


def head_vectors(hydra: PreTrainedModel, data: Any) -> Vectors:
    """The outputs of each head of a one-member Hydra for every row, at the token that `head_separation` reads; those of the last
    time, where a layer runs several times."""
    encoder, of_batches = _encoder(hydra), []

    def keep(tower: str, layer: int, outputs: Tensor) -> None:
        numbers = encoder.config.kept_heads[layer][0]
        rows = torch.arange(len(outputs), device=outputs.device)
        of_row = outputs.mean(dim=1) if token is None else outputs[rows, token]  # (rows, heads, head_dim)
        for number, output in zip(numbers, of_row.double().cpu().unbind(dim=1), strict=True):
            of_batches[-1][head_at(tower, layer, number)] = output

    with watched_heads(hydra, keep), torch.inference_mode():
        for inputs in data.inputs:
            token = _token_to_read(encoder, inputs)
            of_batches.append({})
            encoder(**inputs)
    of_batches = gather_batches(of_batches)
    vectors = {head: torch.cat([each[head] for each in of_batches]) for head in of_batches[0]}
    if not all(vector.isfinite().all() for vector in vectors.values()):
        raise ValueError(f"heads give no finite numbers for {data.name}: look for NaN in the data and in the weights")
    return vectors


def _token_to_read(encoder: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor | int | None:
    """The token's position, one for all rows or one for each; None to read all tokens."""
    if not encoder.has_pooled_token:
        return None
    if not encoder.pools_last_token:
        return 0
    if "input_ids" not in inputs:
        return -1
    padding = -1 if encoder.config.pad_token_id is None else encoder.config.pad_token_id  # -1 is no token
    return last_token(inputs["input_ids"], inputs.get("attention_mask"), padding)


def _separations(known: Vectors, foreign: Vectors, seed: int) -> dict[Head, Separation]:
    """All heads at once."""
    if not known:
        return {}
    x, y = (torch.stack(list(each.values())) for each in (known, foreign))  # (heads, rows, head_dim)
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


def mahalanobis_by_chance(dim: int, known: int, foreign: int) -> float:
    """The root mean square Mahalanobis distance of two samples of one normal distribution. The inverse of the estimated
    covariance is too large by (known - 1) / (known - dim - 2) on average."""
    return math.sqrt(dim * (1 / known + 1 / foreign) * (known - 1) / (known - dim - 2))


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


def principal_components(known: Tensor, foreign: Tensor) -> Picture:
    """(rows, dim) each, along the two directions in which both sets together vary most; each set counts the same."""
    rows = [
        each[torch.linspace(0, len(each) - 1, min(len(each), MOST_POINTS)).round().long()] for each in (known, foreign)
    ]
    centre = (known.mean(dim=0) + foreign.mean(dim=0)) / 2
    scatter = sum((each - centre).t() @ (each - centre) / len(each) for each in (known, foreign))
    variances, directions = torch.linalg.eigh(scatter)
    axes = directions[:, -2:].flip(1)
    explained = float(variances[-2:].sum() / variances.sum()) if variances.sum() > 0 else 0.0
    return Picture(*(((each - centre) @ axes).tolist() for each in rows), explained=explained)
