"""A plan for making members of one model or several fine-tunings: defaults, checks, circuits that resume."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .._io.processes import on_one_process
from ..data.batches import collate
from ..fusion import number_of_layers, saved_tower_configs, trunk_depth
from .extraction import extract_circuit
from .heads import Prompts
from .members import draw_members
from .objectives import OBJECTIVES


METHODS = ("circuits", "taylor")
CIRCUITS = "circuits"  # the folder


@dataclass(frozen=True)
class MemberPlan:
    """How to make members. Contradictory arguments are refused before anything is loaded.

    Args:
        num_models: one model, whose members are differently pruned copies; or several fine-tunings of one pre-trained model,
            each of which makes one member.
        has_ood_data: whether there will be out-of-distribution data.
        method: "circuits" or "taylor".
        num_members: by default one per fine-tuning or objective, otherwise 3.
        budget: for circuits, how many heads each member loses, by default a sixth of those that compete; "best" for as many as
            its own circuit scores best without, at most a third.
        heads_per_layer: for Taylor scores, the heads that each layer keeps, by default two thirds.
        objectives: of circuits, one member each; with a single one, members are sampled from its ranking. By default all three
            with out-of-distribution data ("avg" for several models), otherwise "acc".
        out_of: with a single objective and model, how many heads of the ranking to sample from; by default twice the budget.
        trunk_layers: how many first layers keep all heads, or which share of the layers.
        mode, score: as for `extract_circuit`.
        seed, allow_equal: as for `draw_members`.
    """

    num_models: int = 1
    has_ood_data: bool = False
    method: str = "circuits"
    num_members: int | None = None
    budget: int | str | None = None
    heads_per_layer: int | None = None
    objectives: Sequence[str] | None = None
    out_of: int | None = None
    trunk_layers: int | float = 0
    mode: str = "exact"
    score: str = "msp"
    seed: int = 0
    allow_equal: bool = False

    def __post_init__(self) -> None:
        models, members = self.num_models, self.num_members
        if models > 1 and members not in (None, models):
            raise ValueError(f"num_members is {members}, and {models} models make one each: leave it out")
        if self.method == "taylor":
            given = {"budget": self.budget, "objectives": self.objectives, "out_of": self.out_of}
            given |= {"ood_data": self.has_ood_data or None, "mode": None if self.mode == "exact" else self.mode}
            given["score"] = None if self.score == "msp" else self.score
            for name, value in given.items():
                if value is not None:
                    raise ValueError(f"{name} is for the method circuits, not for taylor: leave it out")
            return
        if self.heads_per_layer is not None:
            raise ValueError("heads_per_layer is for the method taylor: pass budget, the heads each member loses")
        chosen = self.chosen_objectives
        for objective in chosen:
            if chosen.count(objective) > 1:
                raise ValueError(f"objectives has {objective} twice: name each once")
        count = len(chosen)
        if models > 1 and count > 1:
            raise ValueError(f"objectives has {count}, and each of the {models} models gets one circuit: name one")
        if models > 1 and self.out_of is not None:
            raise ValueError("out_of is for members sampled from one circuit, here each model has one: leave it out")
        if count > 1 and members not in (None, count):
            raise ValueError(f"{count} objectives make {count} members, not {members}")
        if count > 1 and self.out_of is not None:
            raise ValueError(f"out_of is for a single objective, here are {count}: leave it out")
        of_ood = [objective for objective in chosen if objective != "acc"]
        if of_ood and not self.has_ood_data:
            raise ValueError(f"the objective {of_ood[0]} needs out-of-distribution data: pass ood_data")
        for name, is_given in (("ood_data", self.has_ood_data), (f"the score {self.score}", self.score != "msp")):
            if is_given and not of_ood:
                raise ValueError(f"{name} is for the objectives ood and avg: leave it out, or name one of them")
        if self.budget == "best" and count == models == 1:
            raise ValueError(
                "budget is best, which is for members with a circuit each: pass several objectives or models, or a number"
            )

    @property
    def chosen_objectives(self) -> list[str]:
        """The objectives that circuits are extracted for; none with Taylor scores."""
        if self.method == "taylor":
            return []
        if self.objectives:
            return list(self.objectives)
        if not self.has_ood_data:
            return ["acc"]
        is_one_each = self.num_models == 1 and self.num_members in (None, len(OBJECTIVES))
        return list(OBJECTIVES) if is_one_each else ["avg"]

    @property
    def members(self) -> int:
        """How many members there will be."""
        if self.num_models > 1:
            return self.num_models
        objectives = len(self.chosen_objectives)
        return self.num_members or (objectives if objectives > 1 else 3)

    def check_heads(self, config: PreTrainedConfig, name: str) -> None:
        """Refuses numbers that the heads of the model `name` do not allow."""
        if getattr(config, "num_members", 1) > 1:
            raise ValueError(f"{name} is a Hydra of {config.num_members} members: pass the backbone, or one member")
        layers = min(map(number_of_layers, saved_tower_configs(config).values()))
        if trunk_depth(self.trunk_layers, layers) >= layers:
            raise ValueError(
                f"trunk_layers is {self.trunk_layers}, {name} has {layers} layers: pass 0 to {layers - 1}, or there is nothing to prune"
            )
        if self.method == "taylor":
            most, kept = self._most_heads_in_a_layer(config), self._kept_per_layer(config)
            if kept >= most:
                instead = f"pass 1 to {most - 1}" if most > 1 else "and there is none to spare"
                raise ValueError(
                    f"heads_per_layer is {kept}, of at most {most} heads in a layer: that cuts nothing, {instead}"
                )
            return
        every, budget, out_of = num_heads(config, self.trunk_layers), self._most_lost(config), self._ranked(config)
        if not 1 <= budget < every:
            raise ValueError(f"budget is {budget}: {every} heads compete, so pass 1 to {every - 1}")
        if self.num_models > 1:
            return
        if not budget <= out_of < every:
            raise ValueError(
                f"out_of is {out_of}: a member loses {budget} of them, and {every} heads compete, so pass {budget} to {every - 1}"
            )
        ways = math.comb(out_of, budget)
        if len(self.chosen_objectives) == 1 and ways < self.members and not self.allow_equal:
            raise ValueError(
                f"there are only {ways} ways to lose {budget} of {out_of} heads, for {self.members} members: pass another budget "
                "or out_of, or fewer num_members"
            )

    def make_members(
        self,
        models: Sequence[PreTrainedModel],
        data: Any,
        ood_data: Any = None,
        *,
        class_prompts: Prompts | None = None,
        batch_size: int = 32,
        folder: str | os.PathLike | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> list[PreTrainedModel]:
        """The members as one-member Hydras.

        Args:
            models: as many as `num_models`; they stay as they are.
            data, ood_data: a Dataset or list of dict rows to choose heads by.
            class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
            folder: gets the circuits, and a checkpoint of each, from which the same call resumes.
            tell: called with a sentence about each circuit.
        """
        config, is_several = models[0].config, self.num_models > 1
        common = {"model": list(models) if is_several else models[0], "seed": self.seed}
        common["allow_equal"] = self.allow_equal
        if self.method == "taylor":
            common |= {"heads_per_layer": self._kept_per_layer(config), "num_members": self.members}
            loader = torch.utils.data.DataLoader(data, batch_size, collate_fn=collate)
            return draw_members(data=loader, class_prompts=class_prompts, trunk_layers=self.trunk_layers, **common)
        ranked, budget = self._ranked(config), self._most_lost(config)
        settings = {"class_prompts": class_prompts, "trunk_layers": self.trunk_layers, "mode": self.mode}
        settings |= {"budget": ranked}
        circuits = []
        # One for each of several models, or one of the single model for each objective.
        for index, (model, objective) in enumerate(product(models, self.chosen_objectives)):
            place = (
                None if folder is None else Path(folder) / CIRCUITS / (f"member-{index}" if is_several else objective)
            )
            checkpoint = None if place is None else place.with_suffix(".checkpoint")
            circuit = extract_circuit(model, data, ood_data, objective, checkpoint=checkpoint, **settings)
            if place is not None:
                on_one_process(partial(circuit.save, place.with_suffix(".json")))
            tell(
                f"circuit {f'of member {index} ' if is_several else ''}for {objective}: score {circuit.dense_score:.4f} with all "
                f"heads, {circuit.scores[-1]:.4f} without {len(circuit.ranking)}, best without {circuit.best_budget}"
            )
            circuits.append(circuit)
        if len(circuits) == 1:
            return draw_members(circuit=circuits[0], budget=budget, out_of=ranked, num_members=self.members, **common)
        return draw_members(circuits=circuits, budget="best" if self.budget == "best" else budget, **common)

    def _kept_per_layer(self, config: PreTrainedConfig) -> int:
        return self.heads_per_layer or max(1, round(self._most_heads_in_a_layer(config) * 2 / 3))

    def _most_heads_in_a_layer(self, config: PreTrainedConfig) -> int:
        """After the trunk; of two towers in the vision tower, which Taylor pruning prunes."""
        tower = next(iter(saved_tower_configs(config).values()))
        if hasattr(tower, "kept_heads"):
            depth = trunk_depth(self.trunk_layers, len(tower.kept_heads))
            return max(len(layer[0]) for layer in tower.kept_heads[depth:])
        return tower.num_attention_heads

    def _most_lost(self, config: PreTrainedConfig) -> int:
        """How many heads a member loses at most."""
        every = num_heads(config, self.trunk_layers)
        if self.budget == "best":
            return max(1, every // 3)
        return self.budget or max(1, every // 6)

    def _ranked(self, config: PreTrainedConfig) -> int:
        """How many heads a circuit ranks: those to sample from where it is the only one, otherwise the budget."""
        budget = self._most_lost(config)
        if self.num_models > 1 or len(self.chosen_objectives) > 1:
            return budget
        enough = max(2 * budget, budget + self.members - 1)  # so that members can differ
        return self.out_of or max(budget, min(enough, num_heads(config, self.trunk_layers) - 1))


def num_heads(config: PreTrainedConfig, trunk_layers: int | float = 0) -> int:
    """How many heads a backbone or a member has, in all towers, without those of the trunk."""
    total = 0
    for tower in saved_tower_configs(config).values():
        depth = trunk_depth(trunk_layers, number_of_layers(tower))
        if hasattr(tower, "kept_heads"):
            total += sum(len(layer[0]) for layer in tower.kept_heads[depth:])
        else:
            total += (number_of_layers(tower) - depth) * tower.num_attention_heads
    return total
