"""The comparators of `one_run.py`: (judge, run) -> a trained model with several members, or a list of pruned ones to be trained."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from hydra_transformers.baselines import (
    MIMO,
    BatchEnsemble,
    DeepEnsemble,
    LastLayerLaplace,
    MCDropout,
    MIMOCollator,
)
from hydra_transformers.baselines.mc_dropout import dropouts_of
from hydra_transformers.pruning import draw_members, extract_circuit, prune_heads
from hydra_transformers.training import lora_config

from .rows import as_it_is
from .runs import PRUNED_HYDRAS, Run


if TYPE_CHECKING:
    from .rows import Batch, TensorRows
    from .splits import Splits

MEMBERS = 3
DROPOUT = 0.1
SAMPLES = 10
MIMO_ROWS = {"rho": 0.7, "repetitions": 2}
PRUNED = 6  # one of so many heads
OBJECTIVES = ("acc", "ood", "avg")


class Judge(Protocol):
    """What a comparator needs of `one_run.Judge`: data on a device, and a way to train."""

    args: Any
    splits: "Splits"
    train_rows: "TensorRows"
    sets: "dict[str, TensorRows]"

    def new_model(self, seed: int) -> PreTrainedModel: ...

    def train(self, model: nn.Module, run: Run, collate: "Callable[[Batch], Batch]" = ...) -> nn.Module: ...

    def batches(self, rows: "TensorRows") -> "list[Batch]": ...


def lora_ensemble(judge: Judge, run: Run) -> nn.Module:
    """Adapters of rank 4, as in the paper, on three models with classifiers of their own."""
    from peft import get_peft_model

    models = []
    for seed in range(run.seed, run.seed + MEMBERS):
        model = judge.new_model(seed)
        adapted = get_peft_model(model, lora_config(model, r=4, lora_alpha=8))
        models.append(judge.train(adapted, replace(run, seed=seed)).merge_and_unload())
    return DeepEnsemble(models)


def batch_ensemble(judge: Judge, run: Run) -> nn.Module:
    return judge.train(BatchEnsemble(judge.new_model(run.seed), num_members=MEMBERS, seed=run.seed), run)


def mimo(judge: Judge, run: Run) -> nn.Module:
    model = MIMO(judge.new_model(run.seed), num_members=MEMBERS, seed=run.seed)
    return judge.train(model, run, MIMOCollator(MEMBERS, collator=as_it_is, **MIMO_ROWS))


def mc_dropout(judge: Judge, run: Run) -> nn.Module:
    """Trained with the dropout that is sampled."""
    model = judge.new_model(run.seed)
    for module, name in dropouts_of(model):
        setattr(module, name, DROPOUT)
    return MCDropout(judge.train(model, run), num_samples=SAMPLES, seed=0)


TRAINED: dict[str, Callable[[Judge, Run], nn.Module]] = {
    "LoRA ensemble": lora_ensemble,
    "BatchEnsemble": batch_ensemble,
    "MIMO": mimo,
    "MC Dropout": mc_dropout,
}


# Made of a checkpoint


def laplace(judge: Judge, checkpoint: PreTrainedModel) -> nn.Module:
    """Fitted on the training rows as they are, not augmented."""
    rows = judge.train_rows.prepared_by(judge.sets["validation"].prepare)
    return LastLayerLaplace(checkpoint).fit(judge.batches(rows))


def taylor_members(judge: Judge, checkpoint: PreTrainedModel, seed: int) -> list[PreTrainedModel]:
    """Of each layer, a share of the heads goes, drawn by their Taylor scores."""
    heads = checkpoint.config.num_attention_heads
    options = {"heads_per_layer": heads - heads // PRUNED, "num_members": MEMBERS, "seed": seed, "allow_equal": True}
    return draw_members(checkpoint, data=judge.batches(judge.splits.circuit_id), **options)


def circuit_members(judge: Judge, checkpoint: PreTrainedModel, seed: int) -> list[PreTrainedModel]:
    """The heads go whose removal costs least accuracy, least detection, and least of both."""
    config = checkpoint.config
    budget = config.num_attention_heads * config.num_hidden_layers // PRUNED
    sets = [judge.batches(rows) for rows in (judge.splits.circuit_id, judge.splits.circuit_ood)]
    dense = prune_heads(checkpoint)
    dense = dense.to(torch.bfloat16) if judge.args.device == "cuda" else dense
    circuits = [extract_circuit(dense, *sets, name, budget=budget, mode="shortlist") for name in OBJECTIVES]
    return [prune_heads(checkpoint, circuit.heads_to_prune(budget)) for circuit in circuits]


PRUNERS = dict(zip(PRUNED_HYDRAS, (taylor_members, circuit_members), strict=True))
