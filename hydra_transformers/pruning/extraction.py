"""Circuit extraction (Algorithm 1): remove heads one by one, always the one without which the model scores best."""

import hashlib
import json
import math
import operator
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
from ..data.prediction import check_chooses_one_class
from ..data.tags import NO_TAG, check_tags
from ..models.decision import task_name
from ..models.ensembling import at_least_float32
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


ACCELERATOR_MEMORY_GIB, CPU_MEMORY_GIB = 4.0, 0.25  # for the states of the candidates that run together
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
    """Ranks `budget` heads by greedy removal: each time the head without which the score is highest.

    A candidate is scored with its slice of the output projection zeroed. Heads of equal score are ordered by a margin, how
    clearly the score is reached: for "acc" the negative log-likelihood of the labels, for "ood" the mean confidence on `data`
    minus that on `ood_data`, for "avg" the mean of the two (the means to four digits). Then the first head in order goes: vision
    before text, lower layer, lower head. `Circuit.tied` says how many heads shared each score. `model` stays as it is; the
    extraction runs on its device and in its dtype.

    Args:
        model (`PreTrainedModel`): a classifier or a CLIP model of Transformers, or a one-member Hydra of one.
        data (`DataLoader`, `Dataset` or `list`): in-distribution batches or rows with labels; "ood" needs no labels.
        ood_data (*optional*): out-of-distribution data for "ood" and "avg"; "acc" ignores it.
        objective (`str` or a function, defaults to `"acc"`): "acc" (accuracy), "ood" (AUROC of the maximum softmax
            probability) or "avg" (the mean of both); or a metric of your own, a function of all logits (samples, classes) and
            labels, on the CPU, that returns a number, higher being better. A multi-label or regression model has its own loss
            in place of accuracy, and no "ood" and "avg". With a metric, labels may be of any kind; the logits of all
            candidates are held in memory, and heads of equal value go in their order.
        budget (`int`): how many heads to rank; fewer than the model has.
        class_prompts (*optional*): for CLIP and SigLIP, the tokenizer's output with one row per class.
        towers (*optional*): for CLIP and SigLIP, the towers whose heads compete: both, or ("vision",) or ("text",).
        trunk_layers (`int` or `float`, defaults to 0): how many first layers (of each tower) keep all their heads, or which
            share of the layers; only heads of later layers compete. Members that have these layers in common run them once
            when they are fused.
        mode (`str`, defaults to `"exact"`): "exact" evaluates every remaining head at every removal. "shortlist" does so at
            every eighth removal only; in between it evaluates a fifth of the heads (at least 8), those that cost the score
            least when last evaluated. `Circuit.checks` says how often the short list held the exact choice.
        checkpoint (*optional*): a JSON file, written after every removal, from which a stopped run resumes.

    Returns:
        `Circuit`: the ranking, and the score after each removal.

    Example:
        ```py
        circuit = extract_circuit(model, validation_rows, budget=24)
        pruned = prune_heads(model, circuit.heads_to_prune())
        ```
    """
    if checkpoint is not None:
        existing = next(folder for folder in Path(checkpoint).absolute().parents if folder.exists())
        if Path(checkpoint).is_dir() or not existing.is_dir():
            raise ValueError(f"checkpoint is {checkpoint}, where no file can be written: pass the path of a JSON file")
    settings = {"class_prompts": class_prompts, "towers": towers, "trunk_layers": trunk_layers, "mode": mode}
    search = GreedySearch(model, data, ood_data, objective, budget=budget, **settings)
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
        metric = objective if callable(objective) else None
        if (metric is None and objective not in OBJECTIVES) or mode not in MODES:
            raise ValueError(
                f"objective is {objective!r} and mode {mode!r}: pass one of {', '.join(map(repr, OBJECTIVES))} or a function of "
                f"logits and labels, and one of {', '.join(map(repr, MODES))}"
            )
        task = task_name(model)
        if metric is None and objective == "acc" and task != "single_label_classification":
            metric = minus_loss_of(model)  # the objective that the model was trained for
        objective = METRIC if metric is not None else objective
        has_ood_data = objective in ("ood", "avg")
        if has_ood_data and ood_data is None:
            raise ValueError(f"objective {objective!r} needs ood_data: pass such data, or objective='acc'")
        if metric is None:
            check_chooses_one_class(model, "model")
        hydra = prune_heads(model)
        memory = CPU_MEMORY_GIB if hydra.device.type == "cpu" else ACCELERATOR_MEMORY_GIB
        weights = fingerprint_of_weights(hydra)
        engine = ablation_of(hydra, class_prompts, towers, int(memory * GIB))
        if metric is None and engine.num_classes < 2:
            raise ValueError("model has one output: pass a model that chooses one of several classes, or a metric")
        engine.heads = heads_of(hydra, towers, trunk_layers)
        num_heads = len(engine.heads)
        check_count(budget, "budget", 1, num_heads - 1, f"{num_heads} heads compete")

        def read(data: Any, name: str, num_classes: int | None) -> EvaluationData:
            settings = (engine.input_names, BATCH_SIZE, hydra.device, hydra.dtype, num_classes, metric is not None)
            return read_data(data, name, *settings)

        id_set = read(data, "data", None if objective == "ood" else engine.num_classes)
        ood_set = read(ood_data, "ood_data", None) if has_ood_data else None
        _check_data(id_set, ood_set)
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
        # What a checkpoint belongs to, beside `made_from`: the config is not among the weights.
        prompts = [] if class_prompts is None else fingerprints_of_rows(engine.prompts)
        self.digest = hashlib.sha256(b"".join([_config_digest(hydra), *prompts])).hexdigest()
        self.engine, self.id_set, self.ood_set, self.metric = engine, id_set, ood_set, metric
        self.per_token = task == "token_classification"
        if self.per_token:
            for inputs, labels in zip(id_set.inputs, id_set.labels, strict=True):
                check_tags(labels, *inputs[engine.input_names[0]].shape, engine.num_classes)
        self.circuit = Circuit([], [], math.nan, objective, mode, made_from, tied=[])
        self.shortlist_size = max(LEAST_SHORTLIST, num_heads // 5)
        # How each head's removal changed the score when it was last evaluated; the short list is made from it.
        self.effects: dict[Head, Score] = {}

    def run(self, budget: int, checkpoint: str | os.PathLike | None) -> None:
        """Removes heads until there are `budget`."""
        is_first_process = rank_and_world_size()[0] == 0
        start = min(len(self.circuit.ranking), budget)
        with progress_bar(budget, f"circuit ({self.circuit.objective})", "head", initial=start) as bar:
            while len(self.circuit.ranking) < budget:
                self.remove_one()
                if checkpoint is not None and is_first_process:
                    state = {"circuit": self.circuit.to_dict(), "effects": list(self.effects.items())}
                    write_atomically(checkpoint, json.dumps(state | {"digest": self.digest}, indent=1))
                bar.set_postfix(score=f"{self.circuit.scores[-1]:.4f}", refresh=False)
                bar.update()

    def remove_one(self) -> None:
        """One removal: evaluate the candidates, take the best, cut it out."""
        circuit, heads, removal = self.circuit, self.engine.heads, len(self.circuit.ranking) + 1
        candidates = shortlist = heads
        if circuit.mode == "shortlist" and removal > 1:
            least = sorted(heads, key=self.effects.__getitem__, reverse=True)[: self.shortlist_size]
            shortlist = [head for head in heads if head in least]
            candidates = heads if (removal - 1) % CHECK_EVERY == 0 else shortlist
        scores, current = self.evaluate(candidates)
        if removal == 1:
            circuit.dense_score = current.value
        best = max(candidates, key=scores.__getitem__)
        if circuit.mode == "shortlist":
            self.effects |= {head: Score(*map(operator.sub, score, current)) for head, score in scores.items()}
            if removal > 1 and candidates is heads:
                circuit.checks.append((removal, max(shortlist, key=scores.__getitem__) == best))
        self._mark_chance(removal, scores[best].value)
        circuit.ranking.append(best)
        circuit.scores.append(scores[best].value)
        circuit.tied.append(sum(score.value == scores[best].value for score in scores.values()))
        self.engine.remove(best)
        self.effects.pop(best, None)

    def _mark_chance(self, removal: int, best_score: float) -> None:
        if self.circuit.objective == METRIC or self.circuit.chance_from is not None:
            return  # nobody knows what guessing scores
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
        """The score without each of `candidates`, and the score of the model as it is."""
        ablate = self.engine.over(candidates)
        if self.metric is not None:
            [logits] = self._over_samples(ablate, self.id_set, lambda logits, _: [at_least_float32(logits)])
            self._check_finite(logits.flatten(1), candidates, self.id_set.name)
            batches = [labels[labels != NO_TAG] if self.per_token else labels for labels in self.id_set.labels]
            labels = torch.cat(gather_batches([labels.cpu() for labels in batches]))
            scores = [metric_score(self.metric, row, labels) for row in logits]
        else:
            id_values = self._sample_values(ablate, self.id_set, candidates)
            ood_values = None if self.ood_set is None else self._sample_values(ablate, self.ood_set, candidates)
            scores = objective_scores(self.circuit.objective, id_values, ood_values)
        return dict(zip(candidates, scores[:-1], strict=True)), scores[-1]

    def _sample_values(self, ablate: Ablate, data: EvaluationData, candidates: Sequence[Head]) -> SampleValues:
        """The values of all samples, (candidates + 1, samples); the last row is the model as it is."""

        def values_of(logits: Tensor, labels: Tensor | None) -> list[Tensor]:
            return [value for value in sample_values(logits, labels) if value is not None]

        values = SampleValues(*self._over_samples(ablate, data, values_of))
        self._check_finite(values.confidence, candidates, data.name)
        return values

    def _over_samples(
        self, ablate: Ablate, data: EvaluationData, values_of: Callable[[Tensor, Tensor | None], Sequence[Tensor]]
    ) -> list[Tensor]:
        """`values_of(logits, labels)` for the samples of all processes: (candidates + 1, samples, ...) each, on the CPU."""
        values = []
        for inputs, labels in zip(data.inputs, data.labels, strict=True):
            # A token classifier's samples are its words: (candidates, batch, tokens, classes) -> (candidates, words, classes)
            words = (slice(None), labels != NO_TAG) if self.per_token else ...
            targets = labels[labels != NO_TAG] if self.per_token else labels
            parts = zip(*(values_of(logits[words], targets) for logits in ablate(inputs)), strict=True)
            values.append([torch.cat(part).cpu() for part in parts])
        return [torch.cat(part, dim=1) for part in zip(*gather_batches(values), strict=True)]

    def _check_finite(self, values: Tensor, candidates: Sequence[Head], name: str) -> None:
        for head, is_nan in zip([None, *candidates], values.isnan().any(dim=1).roll(1).tolist(), strict=True):
            if is_nan:
                case = f"with {len(self.circuit.ranking)} heads removed" if head is None else f"without head {head}"
                raise ValueError(f"the logits on {name} are NaN {case}: check the weights, or try a wider dtype")

    def resume(self, path: str | os.PathLike) -> None:
        """Continues from the checkpoint at `path` if there is one; refuses one of another run."""
        is_first_process = rank_and_world_size()[0] == 0
        content = from_first_process(Path(path).read_bytes() if is_first_process and Path(path).exists() else None)
        if content is None:
            return
        try:
            state = parse_json(content)
            circuit, digest = Circuit.from_dict(state["circuit"]), state["digest"]
            effects = {tuple(head): Score(*effect) for head, effect in state["effects"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint {path} cannot be read as that of an extraction: pass another path, or delete it if it is broken"
            ) from error
        runs = [
            {"objective": run.objective, "mode": run.mode, "config or class_prompts": checksum, **run.made_from}
            for run, checksum in ((self.circuit, self.digest), (circuit, digest))
        ]
        differing = [name for name, value in json.loads(json.dumps(runs[0])).items() if runs[1].get(name) != value]
        if differing:
            raise ValueError(
                f"checkpoint {path} belongs to another run, with other {', '.join(differing)}: delete it or pass another path"
            )
        self.circuit, self.effects = circuit, effects
        for head in circuit.ranking:
            self.engine.remove(head)
        if self.metric is not None and circuit.ranking:
            # Another metric may have the same name: its value would differ.
            value, before = self.evaluate([])[1].value, circuit.scores[-1]
            if not math.isclose(value, before, rel_tol=1e-3, abs_tol=1e-6):
                raise ValueError(
                    f"checkpoint {path} belongs to another run, whose metric of this name gave {before:g} where this one gives "
                    f"{value:g}: delete it or pass another path"
                )


def _config_digest(hydra: PreTrainedModel) -> bytes:
    """Equal for configs that compute the same from equal weights: activations, epsilons, positions, windows."""
    fields = hydra.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        fields.pop(name, None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).digest()


def _check_data(id_set: EvaluationData, ood_set: EvaluationData | None) -> None:
    """Refuses a single sample, and warns of data that says little."""
    for data in (id_set, ood_set):
        if data is not None and data.num_samples < 2:
            raise ValueError(f"{data.name} has 1 sample: scores are shares over many, pass at least 2")
    if ood_set is not None and set(ood_set.input_digests) <= set(id_set.input_digests):
        text = "every sample of ood_data is in data too, so no head can help to tell them apart: pass other data as ood_data"
        warnings.warn(text, stacklevel=4)
    if len(id_set.classes) == 1:
        text = f"all {id_set.num_samples} samples of data are of class {id_set.classes[0]}: the circuit for it may know no other"
        warnings.warn(f"{text}, pass data of all classes", stacklevel=4)
