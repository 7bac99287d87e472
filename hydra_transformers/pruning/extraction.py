"""Circuit extraction (Algorithm 1): turn heads off one by one, always the one without which the model scores best."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.evaluation_data import EvaluationData, read_data
from ..data.fingerprints import (
    fingerprint_of_config,
    fingerprint_of_rows,
    fingerprint_of_weights,
    fingerprints_of_rows,
)
from ..data.prediction import check_chooses_one_class, classes_of
from .ablation import GIB, ablation_of
from .circuits import MODES, Circuit
from .greedy import GreedySearch, end_of
from .heads import check_count, chosen_towers, heads_of, prune_heads
from .objectives import MARGINS, METRIC, OBJECTIVES, Metric, check_ood_score, name_of


ACCELERATOR_MEMORY_GIB = 4.0
CPU_MEMORY_GIB = 0.25


def extract_circuit(
    model: PreTrainedModel,
    data: Any,
    ood_data: Any = None,
    objective: str | Metric = "acc",
    *,
    budget: int,
    score: str = "msp",
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    trunk_layers: int = 0,
    mode: str = "exact",
    shortlist: int | None = None,
    check_every: int = 8,
    batch_size: int = 32,
    dtype: torch.dtype | None = None,
    memory_gib: float | None = None,
    tolerance: float | None = None,
    checkpoint: str | os.PathLike | None = None,
    progress: bool = True,
) -> Circuit:
    """Ranks `budget` heads by greedy removal: each time the head without which the score is highest.

    The score is that of the model with the head's slice of the output projection zeroed. Heads of equal score are told apart
    by a margin, how surely the score is reached: for "acc" the negative log-likelihood of the labels, for "ood" the mean
    confidence (by the OOD score) on `data` minus that on `ood_data`, for "avg" the mean of the two (the means to four
    digits). Where that is equal too, the first head in order goes: vision before text, then the lower layer, then the lower
    head. `Circuit.tied` says how many heads shared each score. `model` is left as it is; the extraction runs where it lies.
    Several objectives, or several backbones, are several calls.

    Args:
        model: a classifier or a CLIP model of Transformers, or a one-member Hydra of one.
        data: in-distribution data with labels (which "ood" does not need): a DataLoader, a list of dict batches, or a
            Dataset or list of dict rows.
        ood_data: out-of-distribution data for "ood" and "avg"; "acc" does not look at it.
        objective: "acc" (accuracy), "ood" (AUROC of an OOD score) or "avg" (the mean of both); or a metric of your own, a
            function of all logits (samples, classes) and labels, on the CPU, that returns a number, higher being better.
            With one, labels may be of any kind and the model may solve any problem, regression for example; the logits of
            all candidates are held in memory, and heads of equal value go in their order.
        budget: how many heads to rank; fewer than the model has.
        score: the OOD score of "ood" and "avg": "msp" (the paper's, the maximum softmax probability), "max_logit", "energy",
            "entropy" or "gen", best the one that the model will be used with. Scores that are fitted on features are
            refused: they would have to be fitted anew on each candidate.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        towers: for CLIP and SigLIP, the towers whose heads compete: both, or ("vision",) or ("text",).
        trunk_layers: how many first layers keep all their heads (of each tower, where there are two): only heads behind them
            compete. Members that have these layers in common run them once when they are fused.
        mode: "exact" evaluates every head that is left at every removal. "shortlist" does so at every `check_every`-th
            removal only; in between it evaluates the `shortlist` heads that cost the score least when last evaluated.
            `Circuit.checks` says how often the short list held the exact choice.
        shortlist: by default a fifth of the heads, at least 8.
        check_every: 1 makes "shortlist" exact.
        batch_size: rows per batch where `data` and `ood_data` come in rows.
        dtype: the dtype to evaluate in, e.g. `torch.bfloat16`; by default the model's.
        memory_gib: what the states of the candidates that run together may take; by default 4 on an accelerator and
            0.25 on a CPU. One candidate always runs, so a smaller batch is the way to take less than it needs.
        tolerance: end before the budget is spent, with the first removal that leaves the score more than this below the best
            so far: 0.02 for two points of accuracy, say. By default the whole budget is spent.
        checkpoint: a JSON file that is written after every removal, and from which a run that was stopped goes on.
        progress: whether to show a progress bar.
    """
    if tolerance is not None and (not isinstance(tolerance, (int, float)) or not tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance!r}: pass how far the score may fall, such as 0.02, or None")
    _check_can_be_written(checkpoint)
    search = start_search(
        model,
        data,
        ood_data,
        objective,
        budget=budget,
        score=score,
        class_prompts=class_prompts,
        towers=towers,
        trunk_layers=trunk_layers,
        mode=mode,
        shortlist=shortlist,
        check_every=check_every,
        batch_size=batch_size,
        dtype=dtype,
        memory_gib=memory_gib,
    )
    if checkpoint is not None:
        search.resume(checkpoint)
    search.run(budget, checkpoint, progress, tolerance)
    return search.circuit.first(end_of(search.circuit, budget, tolerance))


def _check_can_be_written(path: str | os.PathLike | None) -> None:
    """Fail early if the checkpoint is not writable."""
    if path is None:
        return
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"checkpoint is {path!r}: pass the path of a JSON file")
    there = next(each for each in Path(path).absolute().parents if each.exists())
    if Path(path).is_dir() or not there.is_dir():
        raise ValueError(
            f"checkpoint is {path}, which can be no file ({there} is there): pass the path of a JSON file"
        )


def start_search(
    model: PreTrainedModel,
    data: Any,
    ood_data: Any,
    objective: str | Metric,
    *,
    budget: int,
    score: str = "msp",
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    trunk_layers: int = 0,
    mode: str = "exact",
    shortlist: int | None = None,
    check_every: int = 8,
    batch_size: int = 32,
    dtype: torch.dtype | None = None,
    memory_gib: float | None = None,
) -> GreedySearch:
    """Everything before the first removal: arguments checked, model copied, data read. Arguments of `extract_circuit`."""
    metric = objective if callable(objective) else None
    if metric is None and objective not in OBJECTIVES:
        raise ValueError(
            f"objective is {objective!r}: pass one of {', '.join(map(repr, OBJECTIVES))}, or a function of logits and labels"
        )
    objective = METRIC if metric is not None else objective
    _check_settings(objective, mode, shortlist, check_every, ood_data)
    check_ood_score(score)
    if metric is None:
        check_chooses_one_class(model, "model")
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype is {dtype!r}: pass a torch.dtype such as torch.bfloat16")
    hydra = prune_heads(model)
    weights = fingerprint_of_weights(hydra)
    hydra = hydra if dtype is None else hydra.to(dtype)
    if memory_gib is not None and not (isinstance(memory_gib, (int, float)) and 0 < memory_gib < math.inf):
        raise ValueError(f"memory_gib is {memory_gib!r}: pass how many GiB candidates may take, such as 0.5")
    if memory_gib is None:
        memory_gib = CPU_MEMORY_GIB if hydra.device.type == "cpu" else ACCELERATOR_MEMORY_GIB
    engine = ablation_of(hydra, class_prompts, towers, int(memory_gib * GIB))
    if metric is None and engine.num_classes < 2:
        raise ValueError("model has a single output, and this is about choosing one of several classes")
    engine.heads = heads_of(hydra, towers, trunk_layers)
    num_heads = len(engine.heads)
    check_count(budget, "budget", 1, num_heads - 1, f"{num_heads} heads compete")

    def read(data: Any, name: str, num_classes: int | None) -> EvaluationData:
        settings = (engine.input_names, batch_size, hydra.device, hydra.dtype, num_classes, metric is not None)
        return read_data(data, name, *settings, classes_of(hydra))

    id_set = read(data, "data", None if objective == "ood" else engine.num_classes)
    ood_set = None if objective in ("acc", METRIC) else read(ood_data, "ood_data", None)
    _check_data(id_set, ood_set)
    is_shortlist = mode == "shortlist"
    made_from = {
        "model": type(hydra).__name__,
        "weights": weights,
        "config": fingerprint_of_config(hydra.config),
        "kept_heads": hydra.config.kept_heads,
        "data": id_set.description(),
        "ood_data": None if ood_set is None else ood_set.description(),
        "class_prompts": None if class_prompts is None else fingerprint_of_rows(fingerprints_of_rows(engine.prompts)),
        "towers": None if class_prompts is None else chosen_towers(hydra, towers),
        "trunk_layers": trunk_layers or None,
        "dtype": str(hydra.dtype).removeprefix("torch."),
        "shortlist": (shortlist or max(8, num_heads // 5)) if is_shortlist else None,
        "check_every": check_every if is_shortlist else None,
        "score": None if objective in ("acc", METRIC) else score,
        "metric": None if metric is None else name_of(metric),
        "ties_by": MARGINS[objective] if score == "msp" else MARGINS[objective].replace("confidence", score),
    }
    circuit = Circuit([], [], math.nan, objective, mode, made_from, tied=[])
    return GreedySearch(engine, id_set, ood_set, circuit, metric)


def _check_settings(objective: str, mode: str, shortlist: int | None, check_every: int, ood_data: Any) -> None:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: pass one of {', '.join(map(repr, MODES))}")
    if mode == "exact" and shortlist is not None:
        raise ValueError("shortlist is for mode='shortlist': leave it out, or set the mode")
    for name, count in (("shortlist", shortlist), ("check_every", check_every)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} is {count!r}: pass a whole number, at least 1")
    if objective in ("ood", "avg") and ood_data is None:
        raise ValueError(f"objective {objective!r} needs ood_data: pass out-of-distribution data, or objective='acc'")


def _check_data(id_set: EvaluationData, ood_set: EvaluationData | None) -> None:
    """Refuses a single sample, and warns of data that says little."""
    for data in (id_set, ood_set) if ood_set is not None else (id_set,):
        if data.num_samples < 2:
            raise ValueError(f"{data.name} has 1 sample: scores are shares over many, pass at least 2")
    if ood_set is not None and set(ood_set.input_digests) <= set(id_set.input_digests):
        warnings.warn(
            "every sample of ood_data is in data too, so no head can help to tell them apart: pass data that is foreign "
            "to the model as ood_data",
            stacklevel=4,
        )
    if len(id_set.classes) == 1:
        warnings.warn(
            f"all {id_set.num_samples} samples of data are of class {id_set.classes[0]}: the circuit for it may know no "
            "other, pass data of all classes",
            stacklevel=4,
        )
