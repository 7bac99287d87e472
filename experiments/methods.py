"""Every method of the comparison, as units of work that lead from a setting's data to metrics in JSON files.

A unit writes into its own folder or file below the setting's; one that was cut off goes on where it was.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hydra_transformers.baselines import (
    DeepEnsemble,
    LoRAEnsemble,
    MCDropout,
    finetune_lora_ensemble,
    temperature_scaled,
)
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.files import write_atomically
from hydra_transformers.prediction import SavedLogits, collect_member_logits
from hydra_transformers.pruning import Circuit, draw_members, extract_circuit, prune_heads
from hydra_transformers.pruning.members import sample_heads
from hydra_transformers.training import Recipe, finetune_members
from hydra_transformers.uncertainty import evaluate_uncertainty

from .rows import LengthBatches, TensorRows
from .settings import Setting
from .splits import Splits
from .units import (
    ALTERED,
    CIRC,
    SAMPLED,
    SOURCES,
    TAYLOR,
    Unit,
    budget_of,
    circuit_of,
    deep_ensemble,
    further_members,
    varied_members,
    with_budget,
)


SCORES = ("msp", "mutual_information", "energy")
EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Comparison:
    """A setting with its data on a device, and the folder that all its files go to."""

    setting: Setting
    splits: Splits
    folder: Path
    device: str
    seeds: int
    backbones: int
    made: dict[tuple, Any] = field(default_factory=dict)

    def once(self, make: Callable, *arguments) -> Any:
        """What `make` gives for these arguments, made once in this process."""
        key = (make.__name__, *arguments)
        if key not in self.made:
            self.made[key] = make(*arguments)
        return self.made[key]

    def run(self, unit: Unit) -> None:
        if unit.kind == "backbone":
            self.backbone(unit.index)
        elif unit.kind == "backbones":
            self.trained_backbones(range(self.backbones))
        elif unit.kind == "circuit":
            self.circuit(unit.index, unit.name)
        elif unit.kind == "member":
            self.member(unit)
        elif unit.kind == "lora":
            self.lora_ensemble(unit.index)
        else:
            for method, make in getattr(self, unit.name)(unit.index):
                self.judge(unit.index, method, make)

    # Training

    def trained_backbones(self, indices: Sequence[int]) -> list[PreTrainedModel]:
        """The backbones with these numbers, which are their seeds: new weights (a new classifier at least), new order."""
        models = []
        for index in indices:
            torch.manual_seed(index)
            models.append(self.setting.new_backbone(self.setting.start).to(self.device))
        folders = [self.folder / f"backbone-{index}" for index in indices]
        return [model.eval() for model in self.setting.train_backbones(self, models, folders, indices)]

    def backbone(self, index: int) -> PreTrainedModel:
        [model] = self.trained_backbones([index])
        return model

    def finetune(
        self, model: PreTrainedModel, folder: Path, recipe: Recipe, batch: int, seed: int, data_seed: int | None = None
    ) -> PreTrainedModel:
        order = seed if data_seed is None else data_seed
        options = self.training_options(batch, order)
        [tuned] = finetune_members([model], recipe, output_dir=folder, seed=seed, data_seed=order, **options)
        return tuned

    def training_options(self, batch: int, order: int) -> dict[str, Any]:
        """What `finetune_members` is told besides the models, the recipe, the folder and the seed."""
        train = self.splits.train
        if self.setting.groups_by_length:
            train, batch = LengthBatches(train, batch, order), 1
        return {
            "train_dataset": train,
            "eval_dataset": self.splits.validation,
            "data_collator": self.splits.data_collator,
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": EVALUATION_BATCH,
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": self.device == "cpu",
            "bf16": self.device == "cuda",
            **self.setting.training_arguments,
        }

    def member(self, unit: Unit) -> PreTrainedModel:
        """A member after pruning and fine-tuning. Those of different circuits have different seeds; those sampled from
        one circuit have one, which the unit's order and noise shift."""
        groups = (CIRC, TAYLOR, ALTERED, *(with_budget(CIRC, each) for each in self.setting.budgets))
        place = next((group.index(unit.name) for group in groups if unit.name in group), 2)
        seed = 100 * unit.index + place
        pruned = self.once(self.pruned_member, unit.index, unit.name)
        recipe, batch = self.setting.member_recipe, self.setting.member_batch
        return self.finetune(pruned, self.folder / str(unit), recipe, batch, seed + unit.noise, seed + unit.order)

    def lora_ensemble(self, seed: int) -> LoRAEnsemble:
        return finetune_lora_ensemble(
            self.once(self.backbone, seed),
            replace(self.setting.member_recipe, optimizer="adamw"),
            output_dir=self.folder / str(Unit("lora", seed)),
            seed=100 * seed,
            learning_rates=[self.setting.lora_learning_rate],
            **self.training_options(self.setting.member_batch, 100 * seed),
        )

    # Pruning

    def circuit_data(self, altered: bool) -> tuple[Any, Any]:
        out_of_distribution = self.splits.circuit_altered if altered else self.splits.circuit_ood
        return self.batches(self.splits.circuit_id), self.batches(out_of_distribution)

    def circuit(self, seed: int, name: str) -> Circuit:
        """A ranking of the heads; the average's is long enough to sample members from."""
        budget = self.setting.heads_to_rank if name == "avg" else self.setting.heads_to_prune
        return extract_circuit(
            self.once(self.backbone, seed),
            *self.once(self.circuit_data, name.startswith("altered-")),
            name.removeprefix("altered-"),
            budget=budget,
            dtype=self.setting.circuit_dtype if self.device == "cuda" else None,
            checkpoint=self.folder / f"{Unit('circuit', seed, name)}.json",
            progress=False,
        )

    def pruned_member(self, seed: int, name: str) -> PreTrainedModel:
        backbone, setting = self.once(self.backbone, seed), self.setting
        if name in TAYLOR:
            calibration, index = self.once(self.circuit_data, False)[0], TAYLOR.index(name)
            heads = setting.heads_per_layer
            [member] = draw_members(
                backbone, dataloader=calibration, heads_per_layer=heads, num_members=1, seed=10 * seed + index
            )
            return member
        if name == "single":
            return prune_heads(backbone)
        circuit = self.once(self.circuit, seed, circuit_of(name))
        if name in SAMPLED:
            sampled = sample_heads(circuit, setting.heads_to_prune, None, 10 * seed + SAMPLED.index(name))
            return prune_heads(backbone, sampled)
        return prune_heads(backbone, circuit.heads_to_prune(budget_of(name) or setting.heads_to_prune))

    # Judging

    def batches(self, rows: Any) -> Any:
        return rows.batches(EVALUATION_BATCH) if isinstance(rows, TensorRows) else rows

    def scaled(self, model: nn.Module) -> nn.Module:
        return temperature_scaled(model, self.batches(self.splits.validation))

    def untuned(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """(name, how to make it) of the methods on the backbone `seed` that train nothing more."""
        backbone, setting = self.once(self.backbone, seed), self.setting
        ensemble = deep_ensemble(seed, self.seeds, self.backbones)
        yield "single", lambda: backbone
        yield "temperature", lambda: self.scaled(backbone)
        yield "deep-ensembles", lambda: DeepEnsemble([self.once(self.backbone, index) for index in ensemble])
        yield (
            "deep-ensembles-temperature",
            lambda: self.scaled(DeepEnsemble([self.once(self.backbone, index) for index in ensemble])),
        )
        yield "mc-dropout", lambda: MCDropout(backbone, num_samples=10, p=setting.sampled_dropout, seed=0)

        def pruned(name: str) -> PreTrainedModel:
            return self.once(self.pruned_member, seed, name)

        for name in ("taylor-0", *CIRC):
            yield f"{name}-zero-shot", lambda name=name: pruned(name)
        yield "hydra-taylor-zero-shot", lambda: fused(map(pruned, TAYLOR))
        yield "hydra-circ-zero-shot", lambda: fused(map(pruned, CIRC))
        for budget in setting.budgets:
            yield f"hydra-circ-zero-shot-{budget}", lambda budget=budget: fused(map(pruned, with_budget(CIRC, budget)))
        fewest = setting.fewest_heads
        yield (
            f"hydra-circ-zero-shot-{fewest}-temperature",
            lambda: self.scaled(fused(map(pruned, with_budget(CIRC, fewest)))),
        )

    def tuned(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for those that are fine-tuned."""

        def tuned(name: str) -> PreTrainedModel:
            return self.once(self.member, Unit("member", seed, name))

        yield "lora-ensembles", lambda: self.lora_ensemble(seed)
        for name in ("single", "taylor-0", *CIRC):
            yield f"{name}-tuned", lambda name=name: tuned(name)
        yield "hydra-taylor", lambda: fused(map(tuned, TAYLOR))
        yield "hydra-circ", lambda: fused(map(tuned, CIRC))
        yield "hydra-circ-temperature", lambda: self.scaled(fused(map(tuned, CIRC)))
        further = further_members(seed)
        yield "hydra-circ-5", lambda: fused([*map(tuned, CIRC), *(self.once(self.member, unit) for unit in further)])
        yield "hydra-taylor-not-fused", lambda: fused(map(tuned, TAYLOR), shared=())
        yield "hydra-circ-not-fused", lambda: fused(map(tuned, CIRC), shared=())

    def altered(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for circuits against the altered set."""

        def pruned(names: Iterable[str]) -> PreTrainedModel:
            return fused(self.once(self.pruned_member, seed, name) for name in names)

        for budget in self.setting.budgets:
            yield f"hydra-altered-zero-shot-{budget}", lambda budget=budget: pruned(with_budget(ALTERED, budget))
        fewest = self.setting.fewest_heads
        yield (
            f"hydra-altered-zero-shot-{fewest}-temperature",
            lambda: self.scaled(pruned(with_budget(ALTERED, fewest))),
        )
        yield "hydra-altered-zero-shot", lambda: pruned(ALTERED)
        yield "hydra-altered", lambda: fused(self.once(self.member, Unit("member", seed, name)) for name in ALTERED)

    def budgets(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for members that lose other numbers of heads."""
        for budget in self.setting.budgets:
            members = [Unit("member", seed, name) for name in with_budget(CIRC, budget)]
            yield (
                f"hydra-circ-{budget}-heads",
                lambda members=members: fused(self.once(self.member, unit) for unit in members),
            )

    def sources(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for ensembles from one circuit whose members differ in this or that (tables 8 and 9)."""
        for sources in SOURCES:
            members = varied_members(seed, sources)
            yield (
                f"varied-{'-'.join(sources) or 'nothing'}",
                lambda members=members: fused(self.once(self.member, unit) for unit in members),
            )

    def judge(self, seed: int, method: str, make: Callable[[], nn.Module]) -> None:
        """Writes metrics in and out of distribution for each score, the members and the costs."""
        path = self.folder / "results" / str(seed) / f"{method}.json"
        if path.exists():
            return
        model = make()

        def saved(rows: Any) -> list[dict[str, torch.Tensor]]:
            member_logits, labels = collect_member_logits(model, self.batches(rows), EVALUATION_BATCH)
            return [{"member_logits": member_logits} | ({} if labels is None else {"labels": labels})]

        test = saved(self.splits.test)
        ood = {group: {name: saved(rows) for name, rows in sets.items()} for group, sets in self.splits.ood.items()}
        reports = {score: evaluate_uncertainty(SavedLogits(), test, ood, score=score) for score in SCORES}
        results = {score: report.models["SavedLogits"] for score, report in reports.items()}
        content = {
            "num_members": results["msp"].num_members,
            "parameters": count_parameters(model),
            "multiply_adds": count_multiply_adds(model),
            "id": results["msp"].id,
            "ood": {score: result.ood for score, result in results.items()},
        }
        write_atomically(path, json.dumps(content, indent=1) + "\n")
        aurocs = {name: f"{100 * m['auroc']:.1f}" for sets in results["msp"].ood.values() for name, m in sets.items()}
        print(f"seed {seed} {method}: accuracy {100 * content['id']['accuracy']:.2f}, AUROC {aurocs}", flush=True)


def fused(members: Iterable[PreTrainedModel], **options) -> PreTrainedModel:
    members = list(members)
    return type(members[0]).from_pruned_members(members, **options)
