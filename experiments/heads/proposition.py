"""Proposition 1 (section 3.2, B.1): is pruning worse on noisy data than on clean data, and do the premises hold?

Removing a head is a step d in the weights: minus its slice of the output projection. A gate z on each head scales that slice
by 1 - z, so the loss is a function of the gates: its gradient at 0 is g·d of each head, a Hessian-vector product with the
gates of a set gives H d, and gates of 1 are the pruned network. All of it is exact. Each row has its own gates, so every
number is a mean over rows with a sampling error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from hydra_transformers._io.processes import gather, gather_batches
from hydra_transformers.data.evaluation_data import EvaluationData, read_data
from hydra_transformers.data.prediction import check_chooses_one_class, classes_of
from hydra_transformers.pruning.ablation import Ablation, ablation_of
from hydra_transformers.pruning.heads import Head, heads_of, tower_and_place
from hydra_transformers.reports.table import markdown_table
from hydra_transformers.uncertainty.metrics import exact_mean
from hydra_transformers.uncertainty.paired import NORMAL_95

from .arguments import as_head_sets
from .head_outputs import one_member, watched_heads


CLEAN = "clean"
HOLDS, FAILS, UNCLEAR, NOT_REFUTED, UNKNOWN = "holds", "fails", "unclear", "not refuted", "-"


@dataclass(frozen=True)
class Estimate:
    """A mean over rows and its standard error; None for a single row, and for heads of CLIP's text tower, which all rows
    share."""

    value: float
    error: float | None = None

    @classmethod
    def of(cls, rows: Tensor) -> "Estimate":
        mean = exact_mean(rows)
        if len(rows) < 2:
            return cls(mean)
        variance = math.fsum(((rows - mean) ** 2).tolist()) / (len(rows) - 1)
        return cls(mean, math.sqrt(variance / len(rows)))

    def __sub__(self, other: "Estimate") -> "Estimate":
        """For independent rows."""
        errors = (self.error, other.error)
        return Estimate(self.value - other.value, None if None in errors else math.hypot(*errors))

    @property
    def is_clear(self) -> bool | None:
        """Whether 0 is outside the 95 % interval; None without an error."""
        return None if self.error is None else abs(self.value) > NORMAL_95 * self.error

    def __str__(self) -> str:
        """With three decimals, or five if both numbers are small."""
        decimals = 3 if max(abs(self.value), self.error or 0) >= 0.01 else 5
        return f"{self.value:+.{decimals}f}" + ("" if self.error is None else f" ± {self.error:.{decimals}f}")

    def at_least_zero(self) -> str:
        return {None: UNKNOWN, True: HOLDS if self.value >= 0 else FAILS, False: UNCLEAR}[self.is_clear]

    def equals_zero(self) -> str:
        return {None: UNKNOWN, True: FAILS, False: NOT_REFUTED}[self.is_clear]


@dataclass(frozen=True)
class LossChange:
    """What cutting out a head set does to the mean cross-entropy on one data set.

    before, after: the loss with all heads, and without the set
    change: after - before
    slope: g·d; curvature: dᵀHd; second_order: g·d + ½ dᵀHd
    rows: how many the means are over
    """

    before: float
    after: float
    change: Estimate
    slope: Estimate
    curvature: Estimate
    second_order: Estimate
    rows: int


@dataclass(frozen=True)
class Premises:
    """What Proposition 1 assumes and claims, for one head set and one noisy set.

    clean_slope: g·d on clean data, assumed to be 0: "not refuted" if its 95 % interval contains 0
    noisy_slope: g·d on noisy data, assumed to be at least 0
    curvature: dᵀ(H_noisy - H_clean)d, assumed to be at least 0; the paper asks this of every d, its proof of this one
    gap_before, gap_after: loss on noisy data less that on clean data; pruning is claimed to increase it
    gap_change: by how much it does; expected_change: the same by the second-order expansion
    """

    clean_slope: Estimate
    noisy_slope: Estimate
    curvature: Estimate
    gap_before: float
    gap_after: float
    gap_change: Estimate
    expected_change: Estimate

    def verdicts(self) -> dict[str, str]:
        """Assumption -> "holds", "fails", "unclear" (within the sampling error), for an equation "not refuted", or "-" without
        an error."""
        return {
            "g·d = 0, clean": self.clean_slope.equals_zero(),
            "g·d ≥ 0, noisy": self.noisy_slope.at_least_zero(),
            "dᵀ(H_noisy - H_clean)d ≥ 0": self.curvature.at_least_zero(),
            "claim: the gap grows": self.gap_change.at_least_zero(),
        }


@dataclass(frozen=True)
class PruningUnderNoise:
    """The result of `pruning_under_noise`.

    changes: head set -> data set ("clean" and the noisy ones) -> `LossChange`
    head_sets: head set -> its heads
    smallest_eigenvalues: with `all_directions`, noisy set -> the smallest eigenvalue of H_noisy - H_clean over all steps that
        remove heads, each head a unit; below 0 it is not positive definite
    paired: head set -> noisy set -> differences to the clean set of "change", "curvature" and "second_order". Only for paired
        rows: as many, with the same labels in the same order
    """

    changes: dict[str, dict[str, LossChange]]
    head_sets: dict[str, list[Head]]
    smallest_eigenvalues: dict[str, float] = field(default_factory=dict)
    paired: dict[str, dict[str, dict[str, Estimate]]] = field(default_factory=dict)

    @property
    def noisy_sets(self) -> list[str]:
        return [name for name in next(iter(self.changes.values())) if name != CLEAN]

    def premises(self, head_set: str, noisy: str | None = None) -> Premises:
        """Proposition 1's assumptions, as measured for a head set and a noisy set, by default the first."""
        noisy = self.noisy_sets[0] if noisy is None else noisy
        clean, other = (self.changes[head_set][data] for data in (CLEAN, noisy))
        paired = self.paired.get(head_set, {}).get(noisy, {})

        def difference(name: str) -> Estimate:
            return paired[name] if name in paired else getattr(other, name) - getattr(clean, name)

        return Premises(
            clean_slope=clean.slope,
            noisy_slope=other.slope,
            curvature=difference("curvature"),
            gap_before=other.before - clean.before,
            gap_after=other.after - clean.after,
            gap_change=difference("change"),
            expected_change=difference("second_order"),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        """The change of the loss, expected and true; then whether the assumptions hold."""
        parts = ["### Change of the loss", self._change_table(), "Means over rows, ± one standard error."]
        parts += ["### Proposition 1", self._premise_table()]
        if self.smallest_eigenvalues:
            found = ", ".join(f"{name} {value:+.3g}" for name, value in self.smallest_eigenvalues.items())
            parts.append(f"Smallest eigenvalue of H_noisy - H_clean over all removals of heads: {found}.")
        return "\n\n".join(parts) + "\n"

    def _change_table(self) -> str:
        heading = ["Heads cut out", "Number", "Data", "g·d", "dᵀHd", "g·d + ½ dᵀHd", "True change"]
        rows = [
            [head_set, str(len(self.head_sets[head_set])), data]
            + [str(each) for each in (of.slope, of.curvature, of.second_order, of.change)]
            for head_set, changes in self.changes.items()
            for data, of in changes.items()
        ]
        return markdown_table(heading, rows)

    def _premise_table(self) -> str:
        rows, titles = [], []
        for head_set in self.changes:
            for noisy in self.noisy_sets:
                premises = self.premises(head_set, noisy)
                verdicts = premises.verdicts()
                titles = list(verdicts)
                gap = f"{premises.gap_before:.3f} → {premises.gap_after:.3f}"
                rows.append([head_set, noisy, gap, *verdicts.values()])
        return markdown_table(["Heads cut out", "Noisy data", "Gap before → after", *titles], rows)

    def plot(self, folder: str | Path) -> list[Path]:
        """Writes `proposition.png`, the expected and the true change of the loss, and returns its path."""
        from .head_plots import draw_pruning_under_noise

        return draw_pruning_under_noise(self, folder)


def pruning_under_noise(
    model: PreTrainedModel,
    clean_data: Any,
    noisy_data: Any,
    head_sets: Mapping[str, Any],
    *,
    all_directions: bool = False,
    class_prompts: Mapping[str, Tensor] | None = None,
    batch_size: int = 32,
) -> PruningUnderNoise:
    """How the loss on clean and on noisy data changes when heads are cut out, and whether Proposition 1's assumptions hold.

    Args:
        model: a classifier or a CLIP model of Transformers, or a one-member Hydra of one; left as it is.
        clean_data, noisy_data: with labels: a DataLoader, a list of dict batches, or a Dataset or list of dict rows. Noisy data
            may be several sets, `{name: data}`.
        head_sets: name -> the heads to cut out: a `Circuit` (all that it ranks), a `TaylorPruning`, heads as `prune_heads`
            takes them, or a list of heads.
        all_directions: look for a removal of heads along which the noisy loss is curved less than the clean one, which the
            paper's premise rules out; needs a Hessian-vector product for each head.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        batch_size: rows per batch if data comes in rows. Second derivatives take several times the memory of training.
    """
    check_chooses_one_class(model, "model")
    hydra = one_member(model)
    sets = as_head_sets(head_sets, "head_sets", heads_of(hydra))
    loss = GatedLoss(hydra, ablation_of(hydra, class_prompts))
    noisy_sets = noisy_data if isinstance(noisy_data, Mapping) else {"noisy": noisy_data}
    if not noisy_sets or CLEAN in noisy_sets:
        count = len(noisy_sets) - (CLEAN in noisy_sets)
        raise ValueError(f'noisy_data has {count} sets beside "clean": pass at least one, of other names')
    data = {CLEAN: loss.read(clean_data, "clean_data", batch_size)}
    data |= {name: loss.read(each, f"noisy_data ({name})", batch_size) for name, each in noisy_sets.items()}
    rows = {name: loss.rows(each, sets) for name, each in data.items()}
    labels = {name: torch.cat(gather_batches([part.cpu() for part in each.labels])) for name, each in data.items()}
    pairs = [name for name in noisy_sets if torch.equal(labels[name], labels[CLEAN])]
    changes, paired = {}, {}
    for head_set in sets:
        of_data = {name: by_set[head_set] for name, by_set in rows.items()}
        changes[head_set] = {name: _loss_change(each, data[name].num_samples) for name, each in of_data.items()}
        paired[head_set] = {name: _differences(of_data[name], of_data[CLEAN]) for name in pairs}
    hessians = {name: loss.hessian(each) for name, each in data.items()} if all_directions else {}
    smallest = {
        name: float(torch.linalg.eigvalsh(hessian - hessians[CLEAN])[0])
        for name, hessian in hessians.items()
        if name != CLEAN
    }
    return PruningUnderNoise(changes, sets, smallest, paired)


Place = tuple[str, int]  # tower and layer


class GatedLoss:
    """Each row's cross-entropy as a function of gates on heads; a gate of 1 turns its head off."""

    def __init__(self, hydra: PreTrainedModel, engine: Ablation):
        self.hydra, self.engine = hydra, engine
        self.data_tower = next(iter(engine.towers))
        self.heads: dict[Place, list[int]] = {
            (name, layer): heads
            for name, tower in engine.towers.items()
            for layer, heads in enumerate(tower.heads)
            if heads
        }

    def read(self, data: Any, name: str, batch_size: int) -> EvaluationData:
        names, count, place = self.engine.input_names, self.engine.num_classes, (self.hydra.device, self.hydra.dtype)
        return read_data(data, name, names, batch_size, *place, count, classes=classes_of(self.hydra))

    def rows(self, data: EvaluationData, sets: Mapping[str, Sequence[Head]]) -> dict[str, dict[str, Tensor]]:
        """Head set -> "before", "after", "slope" and "curvature" of each row, (rows,). If all rows share a gate, slope and
        curvature are sums over batches, (batches,)."""
        of_batches = gather_batches(
            [self._batch(inputs, labels, sets) for inputs, labels in zip(data.inputs, data.labels, strict=True)]
        )
        found = {}
        for name in sets:
            found[name] = {key: torch.cat([each[name][key] for each in of_batches]) for key in of_batches[0][name]}
            if not all(value.isfinite().all() for value in found[name].values()):
                raise ValueError(
                    f"the loss on {data.name}, or a derivative of it, is no finite number without the heads of {name!r}: look "
                    "for NaN in the data and in the weights"
                )
        return found

    def _batch(
        self, inputs: Mapping[str, Tensor], labels: Tensor, sets: Mapping[str, Sequence[Head]]
    ) -> dict[str, dict[str, Tensor]]:
        values: dict[str, dict[str, Tensor]] = {}
        gates = self.gates(len(labels))
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivatives
            with torch.enable_grad():
                before = self(inputs, labels, gates)
                slopes = self._derivatives(before.sum(), gates, keep=True)
            for name, heads in sets.items():
                along = self._along(slopes, heads)
                curvature = self._along(self._derivatives(along.sum(), gates), heads)
                values[name] = {"before": before, "slope": along, "curvature": curvature}
            del slopes
        with torch.inference_mode():
            for name, heads in sets.items():
                values[name]["after"] = self(inputs, labels, self.gates(len(labels), heads))
        return {
            name: {key: value.detach().double().cpu() for key, value in of_set.items()}
            for name, of_set in values.items()
        }

    def hessian(self, data: EvaluationData) -> Tensor:
        """Second derivatives of the mean loss along the removals of all pairs of heads, (heads, heads)"""
        heads = [(place, index) for place, numbers in self.heads.items() for index in range(len(numbers))]
        total = torch.zeros(len(heads), len(heads), dtype=torch.float64)
        for inputs, labels in zip(data.inputs, data.labels, strict=True):
            gates = self.gates(len(labels))
            with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
                slopes = self._derivatives(self(inputs, labels, gates).sum(), gates, keep=True)
                for row, (place, index) in enumerate(heads):
                    second = self._derivatives(slopes[place][:, index].sum(), gates)
                    total[row] += torch.cat([each.sum(dim=0) for each in second.values()]).double().cpu()
        total = torch.stack(gather(total)).sum(dim=0)
        return (total + total.t()) / (2 * data.num_samples)

    def gates(self, rows: int, turned_off: Sequence[Head] | None = None) -> dict[Place, Tensor]:
        """(rows, heads) in the tower that reads the data, (1, heads) in the one that reads the prompts: at 0 with gradients, or
        with 1 for heads that are turned off."""
        gates = {}
        for (tower, layer), numbers in self.heads.items():
            shape = (rows if tower == self.data_tower else 1, len(numbers))
            gates[tower, layer] = torch.zeros(shape, dtype=self.hydra.dtype, device=self.hydra.device)
        if turned_off is None:
            return {place: gate.requires_grad_() for place, gate in gates.items()}
        for tower, layer, head in map(tower_and_place, turned_off):
            gates[tower, layer][:, self.heads[tower, layer].index(head)] = 1
        return gates

    def __call__(self, inputs: Mapping[str, Tensor], labels: Tensor, gates: Mapping[Place, Tensor]) -> Tensor:
        """(rows,)"""

        def gated(tower: str, layer: int, heads: Tensor) -> Tensor:
            return heads * (1 - gates[tower, layer])[:, None, :, None]

        with watched_heads(self.hydra, gated):
            *_, logits = self.engine.over([])(inputs)
        return nn.functional.cross_entropy(logits[0], labels, reduction="none")

    def _derivatives(self, value: Tensor, gates: Mapping[Place, Tensor], keep: bool = False) -> dict[Place, Tensor]:
        settings = {"create_graph": keep, "retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return dict(zip(gates, torch.autograd.grad(value, list(gates.values()), **settings), strict=True))

    def _along(self, derivatives: Mapping[Place, Tensor], heads: Sequence[Head]) -> Tensor:
        """The sum over some heads: (rows,), or (1,) for the whole batch if all rows share a gate."""
        places = list(map(tower_and_place, heads))
        parts = [derivatives[tower, layer][:, self.heads[tower, layer].index(head)] for tower, layer, head in places]
        if all(tower == self.data_tower for tower, _, _ in places):
            return torch.stack(parts).sum(dim=0)
        return torch.stack([part.sum() for part in parts]).sum(dim=0, keepdim=True)


def _loss_change(rows: Mapping[str, Tensor], count: int) -> LossChange:
    def estimate(values: Tensor) -> Estimate:
        return Estimate.of(values) if len(values) == count else Estimate(math.fsum(values.tolist()) / count)

    return LossChange(
        before=exact_mean(rows["before"]),
        after=exact_mean(rows["after"]),
        slope=estimate(rows["slope"]),
        rows=count,
        **{name: estimate(values) for name, values in _compared(rows).items()},
    )


def _compared(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values whose means are compared between data sets."""
    return {
        "change": rows["after"] - rows["before"],
        "curvature": rows["curvature"],
        "second_order": rows["slope"] + rows["curvature"] / 2,
    }


def _differences(noisy: Mapping[str, Tensor], clean: Mapping[str, Tensor]) -> dict[str, Estimate]:
    """Between paired rows, for values that each row has."""
    count, of_clean = len(clean["before"]), _compared(clean)
    return {
        name: Estimate.of(values - of_clean[name])
        for name, values in _compared(noisy).items()
        if len(values) == len(of_clean[name]) == count
    }
