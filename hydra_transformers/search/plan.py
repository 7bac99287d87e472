"""What a search will try, how much work that is, and how long it takes here."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..cost import wait_for
from ..data.prediction import accepted_inputs, batches, device_of, evaluation_mode
from ..fusion import encoder_config
from ..models.auto import AutoHydra
from ..pruning.extraction import start_search
from .held_out import Batch, HeldOut, first_batch, rows_in


BUDGETS = (1 / 12, 1 / 6, 1 / 3)  # of the heads that compete
TRUNKS = (1 / 4, 1 / 2, 3 / 4)  # of the layers
MOST_TUNED = 2
LEAST_MEMBERS = 2
MOST_WITH_FEWER = 3  # candidates that are tried with fewer members
ROWS_TO_TIME = 8  # where a whole batch takes long
HEADS_TO_TIME = 8
LONG = 0.1  # seconds of a forward


def trunk_depths(layers: int, equal: int = 0) -> list[int]:
    """How many first layers to merge: as many as are equal already, and a quarter, a half and three quarters."""
    return sorted({equal, *(depth for share in TRUNKS if (depth := int(share * layers)) > equal)})


def heads_behind(config: PreTrainedConfig, trunk_layers: int) -> int:
    return (config.num_hidden_layers - trunk_layers) * config.num_attention_heads


def budgets_of(config: PreTrainedConfig, trunk_layers: int) -> list[int]:
    """How many heads a member loses, of those behind the trunk: a twelfth, a sixth and a third."""
    heads = heads_behind(config, trunk_layers)
    return sorted({budget for share in BUDGETS if (budget := max(1, round(share * heads))) < heads})


def taylor_budgets(config: PreTrainedConfig) -> list[int]:
    """How many heads each layer loses: a sixth and a third."""
    heads = config.num_attention_heads
    return sorted({lost for share in BUDGETS[1:] if (lost := max(1, round(share * heads))) < heads})


@dataclass(frozen=True)
class Extraction:
    """Circuits to extract: how many, how many heads compete, and how many are removed.

    share: of the layers, those that run anew for a head on average, against the same without a trunk
    """

    circuits: int
    heads: int
    removals: int
    share: float = 1.0

    @property
    def candidates(self) -> float:
        """Evaluations of one head's removal, in all; those behind a trunk count for what they take."""
        return self.share * self.circuits * sum(self.heads - removal for removal in range(self.removals))


@dataclass(frozen=True)
class Plan:
    """The work ahead, without what is finished.

    fine_tunings, steps: trainings, and optimizer steps of each
    extractions: of circuits
    later_extractions: of circuits that may follow, where members without a trunk are better
    candidates: models to judge
    passes: over the search rows by all members at once, for the fusion report
    tuned, tuning_steps: trainings that may follow, where pruned members are near the front
    members: of each Hydra
    """

    members: int
    candidates: int
    fine_tunings: int = 0
    steps: int = 0
    extractions: list[Extraction] = field(default_factory=list)
    later_extractions: list[Extraction] = field(default_factory=list)
    passes: int = 0
    tuned: int = 0
    tuning_steps: int = 0


@dataclass(frozen=True)
class Speed:
    """What was measured: seconds of one model's forward and training step, and of one head's removal, for one row."""

    forward: float
    removal: float
    step: float


@dataclass(frozen=True)
class Estimate:
    """Seconds, by kind of work; `may_follow` is for what is done where it can still win."""

    parts: dict[str, float]
    may_follow: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def sentence(self) -> str:
        if not self.parts:
            return "Everything is finished already."
        parts = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in self.parts.items())
        more = "".join(
            f", and up to {in_words(seconds)} more for {name}, where it can still win"
            for name, seconds in self.may_follow.items()
        )
        return f"About {in_words(self.seconds)} on this machine ({parts}){more}."


def estimate(plan: Plan, speed: Speed, data: HeldOut, seconds: float, train_batch: int) -> Estimate:
    """
    seconds: for which each candidate's time is measured
    """
    judging = rows_in(data.calibration) + rows_in(data.judging)
    judging += sum(rows_in(each) for sets in data.ood.values() for each in sets.values())
    searching = rows_in(data.search) + (0 if data.ood_search is None else rows_in(data.ood_search))

    def circuits(extractions: list[Extraction]) -> float:
        return sum(each.candidates for each in extractions) * searching * speed.removal

    parts = {
        "fine-tuning": plan.fine_tunings * plan.steps * train_batch * speed.step,
        "circuits": circuits(plan.extractions),
        "what to share": plan.passes * plan.members * searching * speed.forward,
        "judging": plan.candidates * (plan.members * judging * speed.forward + seconds),
    }
    later = {
        "pruning without a trunk": circuits(plan.later_extractions),
        "tuning": plan.tuned * plan.tuning_steps * train_batch * speed.step,
    }
    return Estimate(*({name: value for name, value in each.items() if value > 0} for each in (parts, later)))


def measure(model: PreTrainedModel, data: HeldOut, extracts: bool, train_data: Any, batch_size: int) -> Speed:
    """A forward, the removal of some heads and a training step: of a batch, or of a few rows where that takes long."""
    forward = _forward(model, batch := first_batch(data.search, ROWS_TO_TIME))
    if forward * batch_size / ROWS_TO_TIME < LONG:
        forward = _forward(model, batch := first_batch(data.search, batch_size))
    rows = len(batch["labels"])
    removal = _removal(model, batch) if extracts and rows > 1 else 0.0
    step = 0.0 if train_data is None else _step(model, train_data, rows)
    return Speed(forward / rows, removal, step)


def _forward(model: PreTrainedModel, batch: Batch) -> float:
    device = device_of(model)
    inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
    inputs = accepted_inputs(model, inputs)
    with evaluation_mode(model), torch.inference_mode():
        return _seconds(lambda: model(**inputs), device)


def _removal(model: PreTrainedModel, batch: Batch) -> float:
    """Of one head for one row; the earlier its layer the longer it takes, so heads of all layers are measured."""
    search = start_search(model, [batch], None, "acc", budget=1)
    heads = search.engine.heads[:: max(1, len(search.engine.heads) // HEADS_TO_TIME)]
    return _seconds(lambda: search.evaluate(heads), device_of(model)) / (len(heads) * len(batch["labels"]))


def _step(model: PreTrainedModel, train_data: Any, rows: int) -> float:
    """Of one row; the model itself stays as it is."""
    count = min(rows, len(train_data))
    [batch] = batches([train_data[row] for row in range(count)], count, device_of(model))
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0)
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "label")}
    labels = batch.get("labels", batch.get("label"))

    def step() -> None:
        trained(**accepted_inputs(trained, inputs), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    device = device_of(model)
    # Dropout would otherwise draw from everybody's numbers.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return _seconds(step, device) / count


def _seconds(act: Callable[[], Any], device: torch.device) -> float:
    """Of the second of two runs."""
    for _ in range(2):
        wait_for(device)  # for what was begun before
        start = time.perf_counter()
        act()
        wait_for(device)
        seconds = time.perf_counter() - start
    return seconds


def in_words(seconds: float) -> str:
    """1 s, 40 s, 3 min, 1.5 h"""
    if seconds < 90:
        return f"{max(1, math.ceil(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def stand_in(model: PreTrainedModel, members: int, trunk_layers: int, budget: int) -> nn.Module:
    """A Hydra as large as one whose members lose `budget` heads behind the trunk: its time does not depend on which."""
    config = encoder_config(model)
    places = [
        (layer, head)
        for head in range(config.num_attention_heads)
        for layer in range(trunk_layers, config.num_hidden_layers)
    ]
    heads: dict[int, list[int]] = {}
    for layer, head in places[:budget]:
        heads.setdefault(layer, []).append(head)
    pruned = AutoHydra.from_backbone(model, heads)
    return AutoHydra.from_pruned_members([pruned] * members, trunk_layers=trunk_layers, allow_equal=True)
