"""Circuit extraction (Algorithm 1).

Heads are removed one by one, always the one without which the model scores best.
"""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._io.files import parse_json, write_atomically
from .._io.processes import from_first_process, gather_batches, rank_and_world_size
from .._io.progress import progress_bar
from ..data.fingerprints import fingerprint_of_weights, fingerprints_of_rows
from ..data.tags import NO_TAG, check_tags
from ..model_info import check_chooses_one_class
from ..models.ensembling import at_least_float32
from ..models.task import task_name
from .ablation import GIB, Ablate, ablation_of
from .circuits import MODES, Circuit
from .evaluation_data import EvaluationData, read_data
from .heads import Head, Prompts, Towers, check_count, chosen_towers, heads_of, prune_heads
from .objectives import (
    METRIC,
    OBJECTIVES,
    Metric,
    SampleValues,
    Score,
    chance_score,
    metric_score,
    minus_loss_of,
    name_of,
    objective_scores,
    sample_values,
)


# For the states of the candidates that run together.
ACCELERATOR_MEMORY_GIB = 4.0
CPU_MEMORY_GIB = 0.25
BATCH_SIZE = 32  # where data comes in rows
LEAST_SHORTLIST = 8  # a short list is a fifth of the heads, or this many
CHECK_EVERY = 8  # removals, after which all heads are evaluated again


def extract_circuit(
    model: PreTrainedModel,
    data: Any,
    ood_data: Any = None,
    objective: str | Metric = "acc",
    *,
    budget: int,
    class_prompts: Prompts | None = None,
    towers: Towers | None = None,
    trunk_layers: int | float = 0,
    mode: str = "exact",
    checkpoint: str | os.PathLike | None = None,
) -> Circuit:
    """Rank `budget` heads by greedy removal: each time the head without which the score is highest.

    A candidate is scored with its slice of the output projection zeroed. Heads of equal score are
    ordered by a margin, how clearly the score is reached: for "acc" the negative log-likelihood of
    the labels, for "ood" the mean confidence on `data` minus that on `ood_data`, for "avg" the mean
    of the two (the means to four digits). Then the first head in order goes: vision before text,
    lower layer, lower head. `Circuit.tied` says how many heads shared each score. `model` stays as
    it is; the extraction runs on its device and in its dtype.

    Args:
        model (`PreTrainedModel`): a classifier or a CLIP model of Transformers, or a one-member
            Hydra of one.
        data (`DataLoader`, `Dataset` or `list`): in-distribution batches or rows with labels; "ood"
            needs no labels.
        ood_data (*optional*): out-of-distribution data for "ood" and "avg"; "acc" ignores it.
        objective (`str` or a function, defaults to `"acc"`): "acc" (accuracy), "ood" (AUROC of the
            maximum softmax probability) or "avg" (the mean of both); or a metric of your own, a
            function of all logits (samples, classes) and labels, on the CPU, that returns a number,
            higher being better. A multi-label or regression model has its own loss in place of
            accuracy, and no "ood" and "avg". With a metric, labels may be of any kind; the logits
            of all candidates are held in memory, and heads of equal value go in their order.
        budget (`int`): how many heads to rank; fewer than the model has.
        class_prompts (*optional*): for CLIP and SigLIP, the tokenizer's output with one row per
            class.
        towers (*optional*): for CLIP and SigLIP, the towers whose heads compete: both, or
            ("vision",) or ("text",).
        trunk_layers (`int` or `float`, defaults to 0): how many first layers (of each tower) keep
            all their heads, or which share of the layers; only heads of later layers compete.
            Members that have these layers in common run them once when they are fused.
        mode (`str`, defaults to `"exact"`): "exact" evaluates every remaining head at every
            removal. "shortlist" does so at every eighth removal only; in between it evaluates a
            fifth of the heads (at least 8), those that cost the score least when last evaluated.
            `Circuit.checks` says how often the short list held the exact choice.
        checkpoint (*optional*): a JSON file, written after every removal, from which a stopped run
            resumes.

    Returns:
        `Circuit`: the ranking, and the score after each removal.

    Example:
        ```py
        circuit = extract_circuit(model, validation_rows, budget=24)
        pruned = prune_heads(model, circuit.heads_to_prune())
        ```
    """
    # An extraction takes long: a checkpoint that cannot be written is noticed before it.
    if checkpoint is not None:
        existing = next(folder for folder in Path(checkpoint).absolute().parents if folder.exists())
        if Path(checkpoint).is_dir() or not existing.is_dir():
            raise ValueError(f"checkpoint is {checkpoint}, where no file can be written: pass the path of a JSON file")

    search = GreedySearch(
        model,
        data,
        ood_data,
        objective,
        budget=budget,
        class_prompts=class_prompts,
        towers=towers,
        trunk_layers=trunk_layers,
        mode=mode,
    )
    if checkpoint is not None:
        search.resume(checkpoint)
    search.run(budget, checkpoint)
    return search.circuit.first(budget)


class GreedySearch:
    """The greedy loop: the circuit so far, and what is known of the remaining heads.

    Checks its arguments (those of `extract_circuit`), copies the model and reads the data.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        data: Any,
        ood_data: Any,
        objective: str | Metric,
        *,
        budget: int,
        class_prompts: Prompts | None = None,
        towers: Towers | None = None,
        trunk_layers: int | float = 0,
        mode: str = "exact",
    ):
        # What is maximized: an objective by name, or a metric.
        metric = objective if callable(objective) else None
        if (metric is None and objective not in OBJECTIVES) or mode not in MODES:
            objectives = ", ".join(map(repr, OBJECTIVES))
            modes = ", ".join(map(repr, MODES))
            raise ValueError(
                f"objective is {objective!r} and mode {mode!r}: pass one of {objectives} or a function of "
                f"logits and labels, and one of {modes}"
            )
        task = task_name(model)
        if metric is None and objective == "acc" and task != "single_label_classification":
            metric = minus_loss_of(model)  # the objective that the model was trained for
        if metric is not None:
            objective = METRIC
        has_ood_data = objective in ("ood", "avg")
        if has_ood_data and ood_data is None:
            raise ValueError(f"objective {objective!r} needs ood_data: pass such data, or objective='acc'")
        if metric is None:
            check_chooses_one_class(model, "model")

        # The engine, on a copy of the model, and the heads that compete.
        hydra = prune_heads(model)
        memory = ACCELERATOR_MEMORY_GIB
        if hydra.device.type == "cpu":
            memory = CPU_MEMORY_GIB
        weights = fingerprint_of_weights(hydra)
        engine = ablation_of(hydra, class_prompts, towers, int(memory * GIB))
        if metric is None and engine.num_classes < 2:
            raise ValueError("model has one output: pass a model that chooses one of several classes, or a metric")
        engine.heads = heads_of(hydra, towers, trunk_layers)
        num_heads = len(engine.heads)
        check_count(budget, "budget", 1, num_heads - 1, f"{num_heads} heads compete")

        # The data, read once. For "ood" alone labels say nothing.
        def read(rows: Any, name: str, num_classes: int | None) -> EvaluationData:
            return read_data(
                rows,
                name,
                engine.input_names,
                BATCH_SIZE,
                hydra.device,
                hydra.dtype,
                num_classes,
                any_labels=metric is not None,
            )

        num_classes = engine.num_classes
        if objective == "ood":
            num_classes = None
        id_set = read(data, "data", num_classes)
        ood_set = None
        if has_ood_data:
            ood_set = read(ood_data, "ood_data", None)
        _check_data(id_set, ood_set)
        self.per_token = task == "token_classification"
        if self.per_token:
            main_input = engine.input_names[0]
            for inputs, labels in zip(id_set.inputs, id_set.labels, strict=True):
                rows, tokens = inputs[main_input].shape
                check_tags(labels, rows, tokens, engine.num_classes)

        # What the circuit is made from, so that a checkpoint of another run is noticed.
        made_from = {
            "model": type(hydra).__name__,
            "weights": weights,
            "kept_heads": hydra.config.kept_heads,
            "data": id_set.description(),
            "ood_data": None if ood_set is None else ood_set.description(),
            "towers": None if class_prompts is None else chosen_towers(hydra, towers),
            "trunk_layers": trunk_layers or None,
            "dtype": str(hydra.dtype).removeprefix("torch."),
            "metric": None if metric is None else name_of(metric),
        }
        digests = [_config_digest(hydra)]  # the config is not among the weights
        if class_prompts is not None:
            digests += fingerprints_of_rows(engine.prompts)
        self.digest = hashlib.sha256(b"".join(digests)).hexdigest()

        # The state of the search.
        self.engine = engine
        self.id_set = id_set
        self.ood_set = ood_set
        self.metric = metric
        self.circuit = Circuit([], [], math.nan, objective, mode, made_from, tied=[])
        self.shortlist_size = max(LEAST_SHORTLIST, num_heads // 5)
        # How each head's removal changed the score when it was last evaluated: the short list is
        # made from it.
        self.effects: dict[Head, Score] = {}

    def run(self, budget: int, checkpoint: str | os.PathLike | None) -> None:
        """Remove heads until there are `budget`, and write a checkpoint after each."""
        is_first_process = rank_and_world_size()[0] == 0
        start = min(len(self.circuit.ranking), budget)
        with progress_bar(budget, f"circuit ({self.circuit.objective})", "head", initial=start) as bar:
            while len(self.circuit.ranking) < budget:
                self.remove_one()
                if checkpoint is not None and is_first_process:
                    state = {
                        "circuit": self.circuit.to_dict(),
                        "effects": list(self.effects.items()),
                        "digest": self.digest,
                    }
                    write_atomically(checkpoint, json.dumps(state, indent=1))
                bar.set_postfix(score=f"{self.circuit.scores[-1]:.4f}", refresh=False)
                bar.update()

    def remove_one(self) -> None:
        """Evaluate the candidates, take the best, and cut it out."""
        circuit = self.circuit
        heads = self.engine.heads
        removal = len(circuit.ranking) + 1

        # The candidates: all heads, or between two checks those of the short list.
        candidates = heads
        shortlist = heads
        if circuit.mode == "shortlist" and removal > 1:
            by_effect = sorted(heads, key=self.effects.__getitem__, reverse=True)
            least_costly = by_effect[: self.shortlist_size]
            shortlist = [head for head in heads if head in least_costly]
            is_check = (removal - 1) % CHECK_EVERY == 0
            if not is_check:
                candidates = shortlist

        # Their scores, and the best of them; of equal ones the first.
        scores, current = self.evaluate(candidates)
        if removal == 1:
            circuit.dense_score = current.value
        best = max(candidates, key=scores.__getitem__)
        best_score = scores[best].value
        if circuit.mode == "shortlist":
            for head, score in scores.items():
                self.effects[head] = Score(score.value - current.value, score.margin - current.margin)
            if removal > 1 and candidates is heads:
                best_of_shortlist = max(shortlist, key=scores.__getitem__)
                circuit.checks.append((removal, best_of_shortlist == best))
        self._mark_chance(removal, best_score)

        # Record the removal, and cut the head out.
        circuit.ranking.append(best)
        circuit.scores.append(best_score)
        circuit.tied.append(sum(score.value == best_score for score in scores.values()))
        self.engine.remove(best)
        self.effects.pop(best, None)

    def _mark_chance(self, removal: int, best_score: float) -> None:
        """Warn, and note the removal, where a named objective is first no better than chance."""
        if self.circuit.objective == METRIC or self.circuit.chance_from is not None:
            return  # nobody knows what guessing scores by a metric
        chance = chance_score(self.circuit.objective, self.engine.num_classes)
        if best_score > chance:
            return
        self.circuit.chance_from = removal
        warnings.warn(
            f"at removal {removal} no candidate scores better than chance ({best_score:.4f}, chance is {chance:.4f}): "
            "the ranking from here on means little",
            stacklevel=5,
        )

    @torch.inference_mode()
    def evaluate(self, candidates: Sequence[Head]) -> tuple[dict[Head, Score], Score]:
        """Return the score without each of `candidates`, and the score of the model as it is."""
        ablate = self.engine.over(candidates)
        if self.metric is not None:
            scores = self._metric_scores(ablate, candidates)
        else:
            id_values = self._sample_values(ablate, self.id_set, candidates)
            ood_values = None
            if self.ood_set is not None:
                ood_values = self._sample_values(ablate, self.ood_set, candidates)
            scores = objective_scores(self.circuit.objective, id_values, ood_values)
        return dict(zip(candidates, scores[:-1], strict=True)), scores[-1]

    def _metric_scores(self, ablate: Ablate, candidates: Sequence[Head]) -> list[Score]:
        """Return the metric's score of each candidate, and last of the model as it is."""
        [logits] = self._over_samples(ablate, self.id_set, lambda logits, _: [at_least_float32(logits)])
        self._check_finite(logits.flatten(1), candidates, self.id_set.name)
        labels_of_batches = []
        for labels in self.id_set.labels:
            if self.per_token:
                labels = labels[labels != NO_TAG]
            labels_of_batches.append(labels.cpu())
        labels = torch.cat(gather_batches(labels_of_batches))
        return [metric_score(self.metric, logits_of_candidate, labels) for logits_of_candidate in logits]

    def _sample_values(self, ablate: Ablate, data: EvaluationData, candidates: Sequence[Head]) -> SampleValues:
        """Return the values of all samples, (candidates + 1, samples).

        The last row is the model as it is.
        """

        def values_of(logits: Tensor, labels: Tensor | None) -> list[Tensor]:
            return [value for value in sample_values(logits, labels) if value is not None]

        values = SampleValues(*self._over_samples(ablate, data, values_of))
        self._check_finite(values.confidence, candidates, data.name)
        return values

    def _over_samples(
        self, ablate: Ablate, data: EvaluationData, values_of: Callable[[Tensor, Tensor | None], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Return `values_of(logits, labels)` for the samples of all processes.

        Each of the values is (candidates + 1, samples, ...), on the CPU.
        """
        values_of_batches = []
        for inputs, labels in zip(data.inputs, data.labels, strict=True):
            # The samples of a token classifier are its words:
            # (candidates, batch, tokens, classes) -> (candidates, words, classes)
            samples = ...
            targets = labels
            if self.per_token:
                has_tag = labels != NO_TAG
                samples = (slice(None), has_tag)
                targets = labels[has_tag]
            values_of_parts = [values_of(logits[samples], targets) for logits in ablate(inputs)]
            by_value = zip(*values_of_parts, strict=True)
            values_of_batches.append([torch.cat(parts).cpu() for parts in by_value])
        by_value = zip(*gather_batches(values_of_batches), strict=True)
        return [torch.cat(batches, dim=1) for batches in by_value]

    def _check_finite(self, values: Tensor, candidates: Sequence[Head], name: str) -> None:
        """Raise if a candidate, or the model as it is, has values that are NaN."""
        # The model as it is comes last in `values`, and first in the search for an error.
        are_nan = values.isnan().any(dim=1).roll(1).tolist()
        for head, is_nan in zip([None, *candidates], are_nan, strict=True):
            if not is_nan:
                continue
            case = f"without head {head}"
            if head is None:
                case = f"with {len(self.circuit.ranking)} heads removed"
            raise ValueError(f"the logits on {name} are NaN {case}: check the weights, or try a wider dtype")

    def resume(self, path: str | os.PathLike) -> None:
        """Continue from the checkpoint at `path` if there is one; raise for one of another run."""
        # The first process reads the file for all.
        content = None
        is_first_process = rank_and_world_size()[0] == 0
        if is_first_process and Path(path).exists():
            content = Path(path).read_bytes()
        content = from_first_process(content)
        if content is None:
            return
        try:
            state = parse_json(content)
            circuit = Circuit.from_dict(state["circuit"])
            digest = state["digest"]
            effects = {tuple(head): Score(*effect) for head, effect in state["effects"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint {path} cannot be read as that of an extraction: pass another path, or delete it if it is "
                "broken"
            ) from error

        # It must belong to this run: to the same model, data and settings.
        here = json.loads(json.dumps(_run_description(self.circuit, self.digest)))
        there = _run_description(circuit, digest)
        differing = [name for name, value in here.items() if there.get(name) != value]
        if differing:
            raise ValueError(
                f"checkpoint {path} belongs to another run, with other {', '.join(differing)}: delete it or pass "
                "another path"
            )

        # Repeat its removals.
        self.circuit = circuit
        self.effects = effects
        for head in circuit.ranking:
            self.engine.remove(head)

        # Another metric may have the same name: its value would differ.
        if self.metric is not None and circuit.ranking:
            _, current = self.evaluate([])
            value = current.value
            before = circuit.scores[-1]
            if not math.isclose(value, before, rel_tol=1e-3, abs_tol=1e-6):
                raise ValueError(
                    f"checkpoint {path} belongs to another run, whose metric of this name gave {before:g} where this "
                    "one "
                    f"gives {value:g}: delete it or pass another path"
                )


def _run_description(circuit: Circuit, digest: str) -> dict[str, Any]:
    """Return what a run and its checkpoint have in common, by the names that errors use."""
    return {
        "objective": circuit.objective,
        "mode": circuit.mode,
        "config or class_prompts": digest,
        **circuit.made_from,
    }


def _config_digest(hydra: PreTrainedModel) -> bytes:
    """Digest a config: equal for configs that compute the same from equal weights.

    Activations, epsilons, positions and windows count; where the model lies does not.
    """
    fields = hydra.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        fields.pop(name, None)
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()


def _check_data(id_set: EvaluationData, ood_set: EvaluationData | None) -> None:
    """Raise for a single sample, and warn of data that says little."""
    for data in (id_set, ood_set):
        if data is not None and data.num_samples < 2:
            raise ValueError(f"{data.name} has 1 sample: scores are shares over many, pass at least 2")
    if ood_set is not None and set(ood_set.input_digests) <= set(id_set.input_digests):
        warnings.warn(
            "every sample of ood_data is in data too, so no head can help to tell them apart: pass other data as "
            "ood_data",
            stacklevel=4,
        )
    if len(id_set.classes) == 1:
        only_class = id_set.classes[0]
        warnings.warn(
            f"all {id_set.num_samples} samples of data are of class {only_class}: the circuit for it may know no "
            "other, "
            "pass data of all classes",
            stacklevel=4,
        )
