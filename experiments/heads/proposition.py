"""Proposition 1 (section 3.2, B.1): is pruning worse on noisy data than on clean data, and do the premises hold?

Removing a head is a step d in the weights: minus its slice of the output projection. A gate z on each head scales that slice
by 1 - z, so the loss is a function of the gates: its gradient at 0 is g·d of each head, a Hessian-vector product with the
gates of a set gives H d, and gates of 1 are the pruned network. All of it is exact. Each row has its own gates, so every
number is a mean over rows with a sampling error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from hydra_transformers.pruning.ablation import Ablation, ablation_of
from hydra_transformers.pruning.heads import Head
from hydra_transformers.reports.table import markdown_table
from hydra_transformers.uncertainty.metrics import exact_mean
from hydra_transformers.uncertainty.paired import NORMAL_95

from .outputs import Batches, one_member, watched_heads


CLEAN = "clean"
NOISY = "noisy"
HOLDS = "holds"
FAILS = "fails"
UNCLEAR = "unclear"
NOT_REFUTED = "not refuted"
UNKNOWN = "-"
PIXEL_NOISE = 0.5  # standard deviation, in the model's units
TOKEN_NOISE = 0.2  # share of tokens


@dataclass(frozen=True)
class Estimate:
    """A mean over rows and its standard error; None for a single row."""

    value: float
    error: float | None = None

    @classmethod
    def of(cls, rows: Tensor) -> "Estimate":
        mean = exact_mean(rows)
        if len(rows) < 2:
            return cls(mean)
        variance = math.fsum(((rows - mean) ** 2).tolist()) / (len(rows) - 1)
        return cls(mean, math.sqrt(variance / len(rows)))

    def __str__(self) -> str:
        """With three decimals, or five if both numbers are small."""
        decimals = 3 if max(abs(self.value), self.error or 0) >= 0.01 else 5
        return f"{self.value:+.{decimals}f}" + ("" if self.error is None else f" ± {self.error:.{decimals}f}")

    def at_least_zero(self) -> str:
        return self._told(HOLDS if self.value >= 0 else FAILS, UNCLEAR)

    def equals_zero(self) -> str:
        return self._told(FAILS, NOT_REFUTED)

    def _told(self, apart: str, within: str) -> str:
        """By whether 0 is outside the 95 % interval."""
        if self.error is None:
            return UNKNOWN
        return apart if abs(self.value) > NORMAL_95 * self.error else within


@dataclass(frozen=True)
class LossChange:
    """What cutting out a head set does to the mean cross-entropy on one data set.

    before, after: the loss with all heads, and without the set
    change: after - before
    slope: g·d; curvature: dᵀHd; second_order: g·d + ½ dᵀHd
    """

    before: float
    after: float
    change: Estimate
    slope: Estimate
    curvature: Estimate
    second_order: Estimate


@dataclass(frozen=True)
class PruningUnderNoise:
    """The result of `pruning_under_noise`.

    changes: head set -> "clean" and "noisy" -> `LossChange`
    differences: head set -> noisy less clean, row by row, of "change", "curvature" and "second_order"
    head_sets: head set -> its heads
    """

    changes: dict[str, dict[str, LossChange]]
    differences: dict[str, dict[str, Estimate]]
    head_sets: dict[str, list[Head]]

    def verdicts(self, head_set: str) -> dict[str, str]:
        """What the proposition assumes and claims -> "holds", "fails", "unclear" (within the sampling error), for an equation "not
        refuted", or "-" without an error. The paper asks the third of every d, its proof of this one."""
        clean, noisy = (self.changes[head_set][data] for data in (CLEAN, NOISY))
        differences = self.differences[head_set]
        return {
            "g·d = 0, clean": clean.slope.equals_zero(),
            "g·d ≥ 0, noisy": noisy.slope.at_least_zero(),
            "dᵀ(H_noisy - H_clean)d ≥ 0": differences["curvature"].at_least_zero(),
            "claim: the gap grows": differences["change"].at_least_zero(),
        }

    def gaps(self, head_set: str) -> tuple[float, float]:
        """Loss on noisy data less that on clean data, before and after pruning."""
        clean, noisy = (self.changes[head_set][data] for data in (CLEAN, NOISY))
        return noisy.before - clean.before, noisy.after - clean.after

    def tables(self) -> dict[str, str]:
        heading = ["Heads cut out", "Number", "Data", "g·d", "dᵀHd", "g·d + ½ dᵀHd", "True change"]
        changes = [
            [head_set, str(len(self.head_sets[head_set])), data]
            + [str(estimate) for estimate in (of.slope, of.curvature, of.second_order, of.change)]
            for head_set, of_set in self.changes.items()
            for data, of in of_set.items()
        ]
        premises = []
        titles = []
        for head_set in self.changes:
            verdicts = self.verdicts(head_set)
            titles = list(verdicts)
            premises.append([head_set, "{:.3f} → {:.3f}".format(*self.gaps(head_set)), *verdicts.values()])
        return {
            "Change of the loss": markdown_table(heading, changes) + "\n\nMeans over rows, ± one standard error.",
            "Proposition 1": markdown_table(["Heads cut out", "Gap before → after", *titles], premises),
        }


def pruning_under_noise(
    model: PreTrainedModel, clean_data: Batches, noisy_data: Batches, head_sets: Mapping[str, Sequence[Head]]
) -> PruningUnderNoise:
    """How the loss on clean and on noisy data changes when heads are cut out, and whether Proposition 1's assumptions hold.

    clean_data, noisy_data: with labels; the same rows in the same order, so that differences are of pairs
    """
    hydra = one_member(model)
    loss = GatedLoss(hydra, ablation_of(hydra, None))
    data = {CLEAN: clean_data, NOISY: noisy_data}
    if not torch.equal(*(torch.cat([batch["labels"] for batch in batches]) for batches in data.values())):
        raise ValueError("noisy_data has other labels than clean_data: pass the same rows in the same order")
    rows = {name: loss.rows(batches, name, head_sets) for name, batches in data.items()}
    changes = {head_set: {name: _loss_change(rows[name][head_set]) for name in data} for head_set in head_sets}
    differences = {}
    for head_set in head_sets:
        clean, noisy = (_compared(rows[name][head_set]) for name in data)
        differences[head_set] = {name: Estimate.of(values - clean[name]) for name, values in noisy.items()}
    return PruningUnderNoise(changes, differences, {name: list(heads) for name, heads in head_sets.items()})


class GatedLoss:
    """Each row's cross-entropy as a function of gates on heads; a gate of 1 turns its head off."""

    def __init__(self, hydra: PreTrainedModel, engine: Ablation):
        self.hydra = hydra
        self.engine = engine
        [tower] = engine.towers.values()
        self.heads: dict[int, list[int]] = {layer: heads for layer, heads in enumerate(tower.heads) if heads}

    def rows(
        self, data: Batches, name_of_data: str, sets: Mapping[str, Sequence[Head]]
    ) -> dict[str, dict[str, Tensor]]:
        """Head set -> "before", "after", "slope" and "curvature" of each row, (rows,)."""
        batches = [self._batch(batch, sets) for batch in data]
        found = {}
        for name in sets:
            found[name] = {key: torch.cat([of_batch[name][key] for of_batch in batches]) for key in batches[0][name]}
            if not all(value.isfinite().all() for value in found[name].values()):
                raise ValueError(
                    f"the loss on {name_of_data} data, or a derivative of it, is not finite without the heads of {name!r}: look "
                    "for NaN in the data and in the weights"
                )
        return found

    def _batch(self, batch: Mapping[str, Tensor], sets: Mapping[str, Sequence[Head]]) -> dict[str, dict[str, Tensor]]:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels = batch["labels"]
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

    def gates(self, rows: int, turned_off: Sequence[Head] | None = None) -> dict[int, Tensor]:
        """(rows, heads) of each layer: at 0 with gradients, or with 1 for heads that are turned off."""
        gates = {
            layer: torch.zeros(rows, len(numbers), dtype=self.hydra.dtype, device=self.hydra.device)
            for layer, numbers in self.heads.items()
        }
        if turned_off is None:
            return {layer: gate.requires_grad_() for layer, gate in gates.items()}
        for layer, head in turned_off:
            gates[layer][:, self.heads[layer].index(head)] = 1
        return gates

    def __call__(self, inputs: Mapping[str, Tensor], labels: Tensor, gates: Mapping[int, Tensor]) -> Tensor:
        """(rows,)"""

        def gated(layer: int, heads: Tensor) -> Tensor:
            return heads * (1 - gates[layer])[:, None, :, None]

        with watched_heads(self.hydra, gated):
            *_, logits = self.engine.over([])(inputs)
        return nn.functional.cross_entropy(logits[0], labels, reduction="none")

    def _derivatives(self, value: Tensor, gates: Mapping[int, Tensor], keep: bool = False) -> dict[int, Tensor]:
        settings = {"create_graph": keep, "retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return dict(zip(gates, torch.autograd.grad(value, list(gates.values()), **settings), strict=True))

    def _along(self, derivatives: Mapping[int, Tensor], heads: Sequence[Head]) -> Tensor:
        """The sum over some heads: (rows,)"""
        parts = [derivatives[layer][:, self.heads[layer].index(head)] for layer, head in heads]
        return torch.stack(parts).sum(dim=0)


def _loss_change(rows: Mapping[str, Tensor]) -> LossChange:
    return LossChange(
        before=exact_mean(rows["before"]),
        after=exact_mean(rows["after"]),
        slope=Estimate.of(rows["slope"]),
        **{name: Estimate.of(values) for name, values in _compared(rows).items()},
    )


def _compared(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values whose means are compared between data sets."""
    return {
        "change": rows["after"] - rows["before"],
        "curvature": rows["curvature"],
        "second_order": rows["slope"] + rows["curvature"] / 2,
    }


def with_noise(data: Batches, seed: int = 0) -> Batches:
    """Data with Gaussian noise on `pixel_values`, or a share of `input_ids` replaced by others of the batch; the first and the last
    token of a text stay."""
    generator = torch.Generator().manual_seed(seed)
    noisy = []
    for batch in data:
        if "input_ids" in batch:
            noisy.append(batch | {"input_ids": _replaced(batch["input_ids"], batch["attention_mask"], generator)})
        else:
            pixels = batch["pixel_values"]
            noise = torch.randn(pixels.shape, generator=generator).to(pixels.device, pixels.dtype)
            noisy.append(batch | {"pixel_values": pixels + PIXEL_NOISE * noise})
    return noisy


def _replaced(input_ids: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    mask = mask.bool().cpu()
    rows = torch.arange(len(input_ids))
    inner = mask.clone()
    inner[rows, mask.int().argmax(dim=1)] = False
    inner[rows, mask.shape[1] - 1 - mask.int().flip(1).argmax(dim=1)] = False
    words = input_ids.cpu()[inner]
    chosen = inner & (torch.rand(inner.shape, generator=generator) < TOKEN_NOISE)
    drawn = torch.randint(max(1, len(words)), (int(chosen.sum()),), generator=generator)
    replaced = input_ids.cpu().clone()
    replaced[chosen] = words[drawn]
    return replaced.to(input_ids.device)
