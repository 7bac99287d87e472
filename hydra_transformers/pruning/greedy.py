"""The greedy loop of Algorithm 1, and its checkpoint."""

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .._io.files import parse_json, write_atomically
from .._io.processes import from_first_process, gather_batches, gather_samples, rank_and_world_size
from .._io.progress import progress_bar
from ..data.evaluation_data import EvaluationData
from ..models.modeling_hydra import at_least_float32
from .ablation import Ablate, Ablation
from .circuits import LAST_DIGITS, Circuit
from .heads import Head
from .objectives import (
    METRIC,
    Metric,
    SampleValues,
    Score,
    chance_score,
    metric_scores,
    objective_scores,
    sample_values,
)


SHORT_SETTINGS = (
    "objective",
    "mode",
    "model",
    "dtype",
    "towers",
    "trunk_layers",
    "shortlist",
    "check_every",
    "ties_by",
    "score",
    "metric",
)


class GreedySearch:
    """The greedy loop: a circuit that grows, and what is known of the heads that are left."""

    def __init__(
        self,
        engine: Ablation,
        id_set: EvaluationData,
        ood_set: EvaluationData | None,
        circuit: Circuit,
        metric: Metric | None = None,
    ):
        self.engine, self.id_set, self.ood_set, self.circuit = engine, id_set, ood_set, circuit
        self.metric = metric
        # What each head's removal did to the score when it was last evaluated; the short list is made from it.
        self.effects: dict[Head, Score] = {}

    def run(
        self, budget: int, checkpoint: str | os.PathLike | None, progress: bool, tolerance: float | None = None
    ) -> None:
        """Removes heads until there are `budget`, or the score has fallen by more than `tolerance`."""
        is_first_process = rank_and_world_size()[0] == 0
        done = min(len(self.circuit.ranking), budget)
        name, is_shown = f"circuit ({self.circuit.objective})", progress and is_first_process
        with progress_bar(budget, name, "head", is_shown, initial=done) as bar:
            while len(self.circuit.ranking) < end_of(self.circuit, budget, tolerance):
                self.remove_one()
                if checkpoint is not None and is_first_process:
                    write_atomically(checkpoint, self.state())
                bar.set_postfix(score=f"{self.circuit.scores[-1]:.4f}", refresh=False)
                bar.update()

    def remove_one(self) -> None:
        """One removal: evaluate the candidates, take the best, cut it out."""
        circuit, removal = self.circuit, len(self.circuit.ranking) + 1
        shortlist = self._shortlist()
        candidates = shortlist if self._is_shortlisted(removal) else self.engine.heads
        scores, current = self.evaluate(candidates)
        if removal == 1:
            circuit.dense_score = current.value
        if circuit.mode == "shortlist":
            self.effects |= {head: score.over(current) for head, score in scores.items()}
        best = _best(scores)
        if circuit.mode == "shortlist" and removal > 1 and candidates is self.engine.heads:
            circuit.checks.append((removal, _best({head: scores[head] for head in shortlist}) == best))
        self._mark_chance(removal, scores[best].value)
        circuit.ranking.append(best)
        circuit.scores.append(scores[best].value)
        circuit.tied.append(sum(score.value == scores[best].value for score in scores.values()))
        self._cut(best)

    def _is_shortlisted(self, removal: int) -> bool:
        return self.circuit.mode == "shortlist" and (removal - 1) % self.circuit.made_from["check_every"] != 0

    def _shortlist(self) -> list[Head]:
        """The candidates whose removal cost least, in order; before anything was evaluated, all heads."""
        if not self.effects:
            return self.engine.heads
        by_effect = sorted(self.engine.heads, key=self.effects.__getitem__, reverse=True)
        chosen = set(by_effect[: self.circuit.made_from["shortlist"]])
        return [head for head in self.engine.heads if head in chosen]

    def _cut(self, head: Head) -> None:
        self.engine.remove(head)
        self.effects.pop(head, None)

    def _mark_chance(self, removal: int, best_score: float) -> None:
        if self.circuit.objective == METRIC:
            return  # what guessing scores by it is not known
        chance = chance_score(self.circuit.objective, self.engine.num_classes)
        if self.circuit.chance_from is not None or best_score > chance:
            return
        self.circuit.chance_from = removal
        warnings.warn(
            f"at removal {removal} no candidate scores better than chance ({best_score:.4f}, chance is {chance:.4f}): "
            "the ranking from here on means little",
            stacklevel=5,
        )

    @torch.inference_mode()
    def evaluate(self, candidates: Sequence[Head]) -> tuple[dict[Head, Score], Score]:
        """The score without each of `candidates`, and that of the model as it is."""
        ablate = self.engine.over(candidates)
        if self.metric is not None:
            scores = metric_scores(self.metric, *self._logits_and_labels(ablate, candidates))
            return dict(zip(candidates, scores[:-1], strict=True)), scores[-1]
        id_values = self._sample_values(ablate, self.id_set, candidates)
        ood_values = None if self.ood_set is None else self._sample_values(ablate, self.ood_set, candidates)
        scores = objective_scores(self.circuit.objective, id_values, ood_values)
        return dict(zip(candidates, scores[:-1], strict=True)), scores[-1]

    def _sample_values(self, ablate: Ablate, data: EvaluationData, candidates: Sequence[Head]) -> SampleValues:
        """The values of all samples (candidates + 1, samples); the last row is the model as it is."""
        batches = []
        for inputs, labels in zip(data.inputs, data.labels, strict=True):
            score = self.circuit.made_from.get("score") or "msp"
            of_batch = zip(*(sample_values(logits, labels, score) for logits in ablate(inputs)), strict=True)
            batches.append([None if parts[0] is None else torch.cat(parts) for parts in of_batch])
        if not batches:
            empty = torch.zeros(len(candidates) + 1, 0, device="cpu")
            batches = [[empty, empty.bool(), empty] if data.has_labels else [empty, None, None]]
        values = SampleValues(
            *(
                None if parts[0] is None else gather_samples(torch.cat(parts, dim=1), data.batch_sizes)
                for parts in zip(*batches, strict=True)
            )
        )
        _check_finite(values.confidence, candidates, data.name, len(self.circuit.ranking))
        return values

    def _logits_and_labels(self, ablate: Ablate, candidates: Sequence[Head]) -> tuple[Tensor, Tensor]:
        """The logits of all samples (candidates + 1, samples, classes), the last row the model as it is, and their labels."""
        logits, labels = [], []
        for inputs, of_batch in zip(self.id_set.inputs, self.id_set.labels, strict=True):
            logits.append(torch.cat([at_least_float32(part).cpu() for part in ablate(inputs)]))
            labels.append(of_batch.cpu())
        all_logits = torch.cat(gather_batches(logits), dim=1)
        _check_finite(all_logits.flatten(1), candidates, self.id_set.name, len(self.circuit.ranking))
        return all_logits, torch.cat(gather_batches(labels))

    def state(self) -> str:
        """All that a checkpoint needs to go on from here."""
        return json.dumps({"circuit": self.circuit.to_dict(), "effects": list(self.effects.items())}, indent=1)

    def resume(self, path: str | os.PathLike) -> None:
        """Goes on from the checkpoint at `path` where there is one; refuses one that another run left."""
        is_first_process = rank_and_world_size()[0] == 0
        content = from_first_process(Path(path).read_bytes() if is_first_process and Path(path).exists() else None)
        if content is None:
            return
        try:
            state = parse_json(content)
            circuit = Circuit.from_dict(state["circuit"])
            effects = {tuple(head): Score(*effect) for head, effect in state["effects"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint {path} cannot be read as that of an extraction: pass another path, or delete it if it is broken"
            ) from error
        _check_same_run(circuit, self.circuit, path)
        self.circuit, self.effects = circuit, effects
        for head in circuit.ranking:
            self.engine.remove(head)
        if self.metric is not None and circuit.ranking:
            self._check_same_metric(path)

    def _check_same_metric(self, path: str | os.PathLike) -> None:
        """Refuses a metric that has the name of another: its value must be that of the last removal."""
        _, current = self.evaluate([])
        if not math.isclose(current.value, self.circuit.scores[-1], rel_tol=1e-3, abs_tol=1e-6):
            raise ValueError(
                f"checkpoint {path} belongs to another run, whose metric of this name gave {self.circuit.scores[-1]:g} where "
                f"this one gives {current.value:g}: delete it or pass another path"
            )


def end_of(circuit: Circuit, budget: int, tolerance: float | None) -> int:
    """How many removals a run ends after, as far as the circuit tells: the budget, or the first removal that left the score
    more than `tolerance` below the best before it."""
    if tolerance is None:
        return budget
    best = circuit.dense_score
    for removal, score in enumerate(circuit.scores[:budget], start=1):
        if best - score > tolerance + LAST_DIGITS:
            return removal
        best = max(best, score)
    return budget


def _best(scores: Mapping[Head, Score]) -> Head:
    """The head with the highest score; of several, the one with the widest margin, then the first in order."""
    return max(scores, key=scores.__getitem__)


def _check_finite(confidence: Tensor, candidates: Sequence[Head], name: str, removed: int) -> None:
    is_nan = confidence.isnan().any(dim=1).tolist()
    if is_nan[-1]:
        raise ValueError(
            f"the model's logits on {name} are NaN with {removed} heads removed: check its weights and dtype"
        )
    if any(is_nan):
        head = candidates[is_nan.index(True)]
        raise ValueError(f"without head {head} the logits on {name} are NaN, so it has no score: try a wider dtype")


def _check_same_run(found: Circuit, wanted: Circuit, path: str | os.PathLike) -> None:
    """Refuses a checkpoint with a sentence about the first thing that differs."""
    differing = {
        "objective": (found.objective, wanted.objective),
        "mode": (found.mode, wanted.mode),
        **{key: (found.made_from.get(key), value) for key, value in json.loads(json.dumps(wanted.made_from)).items()},
    }
    for name, (theirs, ours) in differing.items():
        if theirs != ours:
            detail = f" ({theirs!r} there, {ours!r} here)" if name in SHORT_SETTINGS else ""
            raise ValueError(
                f"checkpoint {path} belongs to another run, with other {name}{detail}: delete it or pass another path"
            )
