"""Builds the model of a design; circuits and tuned members are read from the folder of steps where they are finished."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..baselines import DeepEnsemble, average_members, soup
from ..data.tasks import ONE_CLASS, task_of_model
from ..fusion import encoder_config
from ..models.auto import AutoHydra
from ..models.configuration_hydra import SHARED_PARTS
from ..pruning import Circuit, draw_members, extract_circuit
from ..training import Recipe, finetune_members, tune_jointly
from .candidates import DEEP_ENSEMBLE, ONE_MODEL, SOUP, Design, heads_behind
from .resuming import Deadline, StepsFolder
from .sources import HeldOut, rows_of


class SameMembersError(ValueError):
    """Two members are identical."""


@dataclass(frozen=True)
class Tuning:
    """How pruned members are fine-tuned; arguments: further ones of `finetune_members`.

    jointly: whether Hydras of whole members are tuned, too
    """

    recipe: Recipe
    train_data: Any
    arguments: dict[str, Any]
    jointly: bool = True


@dataclass
class ModelBuilder:
    """Builds candidates.

    models: several fine-tunings, or one
    num_members: the most of a Hydra
    tuning: None where there is nothing to train with
    check_time: raises `OutOfTime`; called between two heads of a circuit
    fine_tunings: the models and more, to be averaged into members; empty where there are no more
    """

    models: list[PreTrainedModel]
    num_members: int
    data: HeldOut
    steps: StepsFolder
    tuning: Tuning | None
    batch_size: int
    seed: int
    progress: bool
    deadline: Deadline
    check_time: Callable[[], None]
    fine_tunings: list[PreTrainedModel] = field(default_factory=list)

    @property
    def is_one(self) -> bool:
        return len(self.models) == 1

    @property
    def config(self) -> PreTrainedConfig:
        return encoder_config(self.models[0])

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives of circuits: one, or for three copies of one model one each."""
        if self.data.ood_search is None or task_of_model(self.models[0]) != ONE_CLASS:
            return ("acc",)  # of other tasks minus the loss; their detection is no objective of circuits
        return ("acc", "ood", "avg") if self.is_one and self.num_members == 3 else ("avg",)

    @cached_property
    def equal_layers(self) -> int:
        """How many first layers the fine-tunings have in common already."""
        return AutoHydra.from_pruned_members(self.models).config.trunk_layers

    def model_of(self, design: Design) -> nn.Module:
        if design.kind == ONE_MODEL:
            return self.models[0]
        if design.kind == DEEP_ENSEMBLE:
            return DeepEnsemble(self.models)
        if design.kind == SOUP:
            return soup(self.models)
        if design.tuned and design.pruned_by is None:
            return self._tuned_jointly(design)
        trunk = None if self.is_one or set(design.shared) != set(SHARED_PARTS) else design.trunk_layers
        # Circuits of one model may spare the same heads; the results then show that members are equal.
        return AutoHydra.from_pruned_members(self.members_of(design), design.shared, trunk, allow_equal=True)

    def members_of(self, design: Design) -> list[PreTrainedModel]:
        """The first members of as many as there are."""
        if design.averaged > 1:
            return average_members(self.fine_tunings, self.num_members)[: design.members]
        if design.pruned_by is None:
            return self.models[: design.members]
        if design.tuned:
            return self._tuned_members(design)
        return self._pruned_members(replace(design, members=self.num_members))[: design.members]

    def _pruned_members(self, design: Design) -> list[PreTrainedModel]:
        circuits = self.circuits_of(design)
        drawn = {"num_members": self.num_members, "seed": self.seed}
        if design.pruned_by == "taylor":
            kept = self.config.num_attention_heads - design.budget
            settings = {"data": self.data.search, "heads_per_layer": kept, **drawn}
        elif design.pruned_by == "samples":
            out_of = min(self._ranked(design), len(circuits[0].ranking))
            settings = {"circuit": circuits[0], "budget": design.budget, "out_of": out_of, **drawn}
        else:
            settings = {"circuits": circuits, "budget": design.budget}
        models: Any = self.models[0] if self.is_one else self.models
        members = draw_members(models, **settings, trunk_layers=design.trunk_layers, allow_equal=True)
        if self.is_one and len({str(each.config.kept_heads) for each in members}) < len(members):
            raise SameMembersError("two members would lose the same heads")
        return members

    def _tuned_members(self, design: Design) -> list[PreTrainedModel]:
        recipe = self.tuning.recipe
        if self.is_one and design.trunk_layers:
            recipe = replace(recipe, trunk_layers=design.trunk_layers)  # which stay common
        return finetune_members(self.members_of(replace(design, tuned=False)), recipe, **self._training(design))

    def _tuned_jointly(self, design: Design) -> PreTrainedModel:
        """Taught by the same members with no more merged than is equal."""
        untuned = replace(design, tuned=False)
        teacher = self.model_of(replace(untuned, trunk_layers=self.equal_layers))
        return tune_jointly(self.model_of(untuned), self.tuning.recipe, teacher=teacher, **self._training(design))

    def _training(self, design: Design) -> dict[str, Any]:
        return {
            "train_data": self.tuning.train_data,
            "validation_data": list(rows_of(self.data.search)),
            "output_dir": self.steps.folder / "tuned" / design.key,
            "seed": self.seed,
            "callbacks": [self.deadline],
            **self.tuning.arguments,
        }

    def circuits_of(self, design: Design) -> list[Circuit] | None:
        """The circuits by which a design's members lose their heads."""
        if design.pruned_by == "circuits":
            return [each.first(design.budget) for each in self._circuits(design)[: design.members]]
        return self._circuits(design)[-1:] if design.pruned_by == "samples" else None

    def _ranked(self, design: Design) -> int:
        """How many heads a circuit must rank for a design: twice its budget where members are sampled."""
        if design.pruned_by == "circuits":
            return design.budget
        most = heads_behind(self.config, design.trunk_layers) - 1
        return min(max(2 * design.budget, design.budget + self.num_members - 1), most)

    def _circuits(self, design: Design) -> list[Circuit]:
        """One for each fine-tuning, or for one model one for each objective. Larger ones begin with smaller ones."""
        if self.is_one:
            return [self._circuit(self.models[0], design, each, each) for each in self.objectives]
        [objective] = self.objectives
        return [self._circuit(model, design, objective, f"circuit-{place}") for place, model in enumerate(self.models)]

    def _circuit(self, model: PreTrainedModel, design: Design, objective: str, name: str) -> Circuit:
        ranked = self._ranked(design)
        # Head by head where the time is limited: each call continues from the checkpoint of the one before.
        for count in range(1, ranked + 1) if self.deadline.is_set else [ranked]:
            self.check_time()
            circuit = extract_circuit(
                model,
                self.data.search,
                self.data.ood_search,
                objective,
                budget=count,
                trunk_layers=design.trunk_layers,
                batch_size=self.batch_size,
                checkpoint=self.steps.folder / "circuits" / f"trunk-{design.trunk_layers}" / f"{name}.json",
                progress=self.progress,
            )
        return circuit
