"""A plan for making members, from one model or several fine-tunings: defaults, checks, circuits that resume."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.batches import collate
from ..fusion import saved_tower_configs
from .circuits import Circuit
from .extraction import extract_circuit
from .members import draw_members
from .objectives import OBJECTIVES


METHODS = ("circuits", "taylor")
CIRCUITS = "circuits"  # the folder


@dataclass(frozen=True)
class MemberPlan:
    """How members are made. Refuses arguments that do not go together, before anything is loaded.

    Args:
        num_models: one model, of which members are differently pruned copies; or several fine-tunings of one pre-trained model,
            each of which makes one member.
        has_ood_data: whether there will be out-of-distribution data.
        method: "circuits" or "taylor".
        num_members: by default one per fine-tuning or objective, otherwise 3.
        budget: for circuits, the heads that each member loses, by default a sixth of those that compete; "best" for those that
            its own circuit scores best without, at most a third.
        heads_per_layer: for Taylor scores, the heads that each layer keeps, by default two thirds.
        objectives: of circuits, one member each; with a single one, members are sampled from its ranking. By default, with
            out-of-distribution data all three ("avg" for several models), without "acc".
        out_of: with a single objective and model, how many heads of the ranking to sample from; by default twice the budget.
        trunk_layers: how many first layers keep all heads.
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
    trunk_layers: int = 0
    mode: str = "exact"
    score: str = "msp"
    seed: int = 0
    allow_equal: bool = False

    def __post_init__(self):
        if self.num_models > 1 and self.num_members not in (None, self.num_models):
            raise ValueError(
                f"num_members is {self.num_members}, and {self.num_models} models make one each: leave it out"
            )
        if self.method == "taylor":
            self._check_taylor()
        else:
            self._check_circuits()

    def _check_taylor(self) -> None:
        given = {"budget": self.budget, "objectives": self.objectives, "out_of": self.out_of}
        given |= {"ood_data": self.has_ood_data or None, "mode": None if self.mode == "exact" else self.mode}
        given["score"] = None if self.score == "msp" else self.score
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is for the method circuits, not for taylor: leave it out")

    def _check_circuits(self) -> None:
        if self.heads_per_layer is not None:
            raise ValueError("heads_per_layer is for the method taylor: pass budget, the heads each member loses")
        named, chosen = list(self.objectives or ()), self.chosen_objectives
        twice = next((name for place, name in enumerate(named) if name in named[:place]), None)
        if twice is not None:
            raise ValueError(f"objectives has {twice} twice: name each once")
        if self.num_models > 1 and len(chosen) > 1:
            raise ValueError(
                f"objectives has {len(chosen)}, and each of the {self.num_models} models gets one circuit: name one"
            )
        if self.num_models > 1 and self.out_of is not None:
            raise ValueError(
                "out_of is for members sampled from one circuit, here each model has its own: leave it out"
            )
        if len(chosen) > 1 and self.num_members not in (None, len(chosen)):
            raise ValueError(f"{len(chosen)} objectives make {len(chosen)} members, not {self.num_members}")
        if len(chosen) > 1 and self.out_of is not None:
            raise ValueError(f"out_of is for a single objective, here are {len(chosen)}: leave it out")
        needy = [objective for objective in chosen if objective != "acc"]
        if needy and not self.has_ood_data:
            raise ValueError(f"the objective {needy[0]} needs out-of-distribution data: pass ood_data")
        if self.has_ood_data and not needy:
            raise ValueError("ood_data is for the objectives ood and avg: leave it out, or name one of them")
        if self.score != "msp" and not needy:
            raise ValueError(
                f"the score {self.score} is for the objectives ood and avg: leave it out, or name one of them"
            )
        if self.budget == "best" and len(chosen) == 1 and self.num_models == 1:
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
        layers = min(each.num_hidden_layers for each in saved_tower_configs(config).values())
        if self.trunk_layers >= layers:
            raise ValueError(
                f"trunk_layers is {self.trunk_layers}, {name} has {layers} layers: pass 0 to {layers - 1}, or there is nothing "
                "to prune"
            )
        if self.method == "taylor":
            most = self._most_heads_in_a_layer(config)
            if self._kept_per_layer(config) >= most:
                instead = f"pass 1 to {most - 1}" if most > 1 else "and there is none to spare"
                raise ValueError(
                    f"heads_per_layer is {self._kept_per_layer(config)}, of at most {most} heads in a layer: that cuts nothing, "
                    f"{instead}"
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
        class_prompts: Mapping[str, Tensor] | None = None,
        batch_size: int = 32,
        folder: str | os.PathLike | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> list[PreTrainedModel]:
        """The members, one-member Hydras.

        Args:
            models: as many as `num_models`; they are left as they are.
            data, ood_data: a Dataset or list of dict rows, by which heads are chosen.
            class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
            folder: gets the circuits, and a checkpoint of each from which the same call goes on after a stop.
            tell: is called with a sentence on each circuit.
        """
        config = models[0].config
        drawn_from = list(models) if self.num_models > 1 else models[0]
        common = {"seed": self.seed, "allow_equal": self.allow_equal}
        if self.method == "taylor":
            return draw_members(
                drawn_from,
                data=torch.utils.data.DataLoader(data, batch_size, collate_fn=collate),
                heads_per_layer=self._kept_per_layer(config),
                num_members=self.members,
                class_prompts=class_prompts,
                trunk_layers=self.trunk_layers,
                **common,
            )
        circuits = self._circuits(models, data, ood_data, class_prompts, batch_size, folder, tell)
        if len(circuits) == 1:
            sampled = {"budget": self._most_lost(config), "out_of": self._ranked(config), "num_members": self.members}
            return draw_members(drawn_from, circuit=circuits[0], **sampled, **common)
        budget = "best" if self.budget == "best" else self._most_lost(config)
        return draw_members(drawn_from, circuits=circuits, budget=budget, **common)

    def _circuits(self, models, data, ood_data, class_prompts, batch_size, folder, tell) -> list[Circuit]:
        """One for each of several models, or one of the single model for each objective."""
        is_several = self.num_models > 1
        circuits = []
        for objective in self.chosen_objectives:
            names = [f"member-{place}" for place in range(len(models))] if is_several else [objective]
            places = [None if folder is None else Path(folder) / CIRCUITS / name for name in names]
            for index, (model, place) in enumerate(zip(models, places, strict=True)):
                circuit = extract_circuit(
                    model,
                    data,
                    ood_data,
                    objective,
                    budget=self._ranked(models[0].config),
                    score=self.score,
                    class_prompts=class_prompts,
                    trunk_layers=self.trunk_layers,
                    mode=self.mode,
                    batch_size=batch_size,
                    checkpoint=None if place is None else place.with_suffix(".checkpoint"),
                )
                if place is not None:
                    circuit.save(place.with_suffix(".json"))
                tell(f"circuit {f'of member {index} ' if is_several else ''}for {objective}: {_scores(circuit)}")
                circuits.append(circuit)
        return circuits

    def _kept_per_layer(self, config: PreTrainedConfig) -> int:
        return self.heads_per_layer or max(1, round(self._most_heads_in_a_layer(config) * 2 / 3))

    def _most_heads_in_a_layer(self, config: PreTrainedConfig) -> int:
        """Behind the trunk, in the tower that Taylor pruning looks at: of two that of images."""
        tower = next(iter(saved_tower_configs(config).values()))
        if hasattr(tower, "kept_heads"):
            return max(len(layer[0]) for layer in tower.kept_heads[self.trunk_layers :])
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


def num_heads(config: PreTrainedConfig, trunk_layers: int = 0) -> int:
    """How many heads a backbone or a member has, in all layers of all towers behind the first `trunk_layers`."""
    towers = saved_tower_configs(config).values()
    if all(hasattr(config, "kept_heads") for config in towers):
        return sum(len(layer[0]) for config in towers for layer in config.kept_heads[trunk_layers:])
    return sum((config.num_hidden_layers - trunk_layers) * config.num_attention_heads for config in towers)


def _scores(circuit: Circuit) -> str:
    return (
        f"score {circuit.dense_score:.4f} with all heads, {circuit.scores[-1]:.4f} without {len(circuit.ranking)}, best "
        f"without {circuit.best_budget}"
    )
