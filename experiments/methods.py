"""Every method of the comparison, from a setting's data to metrics in JSON files.

A unit of work writes into its own folder or file below the setting's, and resumes if it was cut off.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import (
    MIMO,
    BatchEnsemble,
    DeepEnsemble,
    HeadEnsemble,
    LastLayerLaplace,
    LoRAEnsemble,
    MCDropout,
    MIMOCollator,
    average_members,
    finetune_lora_ensemble,
    soup,
)
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import SavedLogits, collect_member_logits
from hydra_transformers.models.auto import AutoHydra
from hydra_transformers.pruning import Circuit, draw_members, extract_circuit, oba_prune, prune_heads
from hydra_transformers.pruning.members import sample_heads
from hydra_transformers.pruning.oba import ranked_weights
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.training import Recipe, finetune_members
from hydra_transformers.uncertainty import TemperatureScaling

from .rows import LengthBatches, TensorRows
from .setting import Setting
from .shifted_sets import Shifted, shift_of
from .splits import Splits
from .units import (
    BASELINES,
    CIRC,
    SAMPLED,
    SOURCES,
    TAYLOR,
    Unit,
    budget_of,
    circuit_of,
    ensemble,
    further_members,
    six,
    varied_members,
    with_budget,
)


SCORES = ("msp", "mutual_information", "energy")
DETECTION = ("auroc", "aupr", "fpr95")
EVALUATION_BATCH = 500
OBA_BATCH = 64  # a backward through a backward takes several times the memory


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
        """`make(*arguments)`, computed once in this process."""
        key = (make.__name__, *arguments)
        if key not in self.made:
            self.made[key] = make(*arguments)
        return self.made[key]

    def run(self, unit: Unit) -> None:
        if unit.kind == "backbone":
            self.backbone(unit.index)
        elif unit.kind == "circuit":
            self.circuit(unit.index, unit.name)
        elif unit.kind == "member":
            self.member(unit)
        elif unit.kind == "lora":
            self.lora_ensemble(unit.index)
        elif unit.kind == "baseline":
            self.baseline(unit.index, unit.name)
        else:
            for method, make, *trainings in getattr(self, unit.name.replace("-", "_"))(unit.index):
                self.judge(unit.index, method, make, *trainings)

    # Training

    def backbone(self, index: int) -> PreTrainedModel:
        """The backbone with this number, which is its seed: for a new classifier and the order of rows."""
        setting, folder = self.setting, self.folder / str(Unit("backbone", index))
        model = self.start(index)
        return self.finetune(model, folder, setting.backbone_recipe, setting.batch_size, index).eval()

    def start(self, seed: int) -> PreTrainedModel:
        """The model that backbones start from."""
        torch.manual_seed(seed)
        return self.setting.new_backbone(self.setting.start).to(self.device).eval()

    def finetune(
        self,
        model: nn.Module,
        folder: Path,
        recipe: Recipe,
        batch: int,
        seed: int,
        data_seed: int | None = None,
        **others,
    ) -> nn.Module:
        order = seed if data_seed is None else data_seed
        options = self.training_options(batch, order) | others
        [tuned] = finetune_members([model], recipe, output_dir=folder, seed=seed, data_seed=order, **options)
        return tuned

    def training_options(self, batch: int, order: int) -> dict[str, Any]:
        """The options of `finetune_members` besides the models, the recipe, the folder and the seed."""
        train = self.splits.train
        if self.setting.groups_by_length:
            train, batch = LengthBatches(train, batch, order), 1
        return {
            "train_data": train,
            "validation_data": self.splits.validation,
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
        """A member after pruning and fine-tuning. Members of different circuits have different seeds; those sampled from one
        circuit share a seed, which the unit's order and noise shift."""
        groups = (CIRC, TAYLOR, *(with_budget(CIRC, each) for each in self.setting.budgets))
        place = next((group.index(unit.name) for group in groups if unit.name in group), 2)
        seed = 100 * unit.index + place
        pruned = self.once(self.pruned_member, unit.index, unit.name)
        recipe, batch = self.setting.member_recipe, self.setting.batch_size
        recipe = replace(recipe, keep_zeros=True) if unit.name == "oba" else recipe
        return self.finetune(pruned, self.folder / str(unit), recipe, batch, seed + unit.noise, seed + unit.order)

    def lora_ensemble(self, seed: int) -> LoRAEnsemble:
        setting = self.setting
        recipe = setting.member_recipe.with_arguments(
            optim="adamw_torch", classifier_learning_rate=None, learning_rate=setting.lora_learning_rate
        )
        if setting.lora_from_start:
            start = self.start(seed)
            recipe = recipe.with_arguments(num_train_epochs=setting.lora_epochs)
        else:
            start = self.once(self.backbone, seed)
        return finetune_lora_ensemble(
            start,
            recipe,
            output_dir=self.folder / str(Unit("lora", seed)),
            seed=100 * seed,
            **self.training_options(setting.batch_size, 100 * seed),
        )

    def members_of(self, seed: int, name: str) -> list[PreTrainedModel]:
        """Three members: as many fine-tunings, or six averaged in pairs."""
        if name == "six":
            indices = six(seed, self.seeds, self.backbones)
            return average_members([self.once(self.pruned_member, index, "single") for index in indices], into=3)
        return self.whole_members(seed)

    # Baselines

    def baseline(self, seed: int, name: str) -> nn.Module:
        """A baseline of three members: classifiers on a trained backbone, BatchEnsemble and MIMO from what backbones start from."""
        folder, setting, options = self.folder / str(Unit("baseline", seed, name)), self.setting, {}
        if name == "heads":
            start, recipe = self.once(self.backbone, seed), setting.member_recipe
        else:
            start, recipe = self.start(seed), setting.backbone_recipe
        if name == "mimo":
            model = MIMO(start, num_members=3, seed=seed)
            recipe = recipe.with_arguments(
                label_smoothing_factor=0.0
            )  # only its own loss knows which label lies in which place
            options["data_collator"] = MIMOCollator(3, collator=self.splits.data_collator)
        else:
            model = {"batch-ensemble": BatchEnsemble, "heads": HeadEnsemble}[name](start, num_members=3, seed=seed)
        return self.finetune(model, folder, recipe, setting.batch_size, 100 * seed, **options)

    def lora_single(self, seed: int) -> LoRAEnsemble:
        """The first adapter of the ensemble by itself."""
        model = self.lora_ensemble(seed).model
        for adapter in list(model.peft_config)[1:]:
            model.delete_adapter(adapter)
        return LoRAEnsemble(model)

    # Pruning

    def circuit_data(self) -> tuple[Any, Any]:
        return self.batches(self.splits.circuit_id), self.batches(self.splits.circuit_ood)

    def circuit(self, seed: int, objective: str) -> Circuit:
        """A ranking of the heads; the average's is long enough to sample members from, where these are compared."""
        setting = self.setting
        ranked = setting.heads_to_rank if objective == "avg" else 0
        backbone = prune_heads(self.once(self.backbone, seed))
        return extract_circuit(
            backbone.to(self.setting.circuit_dtype or backbone.dtype) if self.device == "cuda" else backbone,
            *self.once(self.circuit_data),
            objective,
            budget=max((setting.heads_to_prune, ranked, *setting.budgets)),
            mode=self.setting.circuit_mode,
            checkpoint=self.folder / f"{Unit('circuit', seed, objective)}.json",
        )

    def pruned_member(self, seed: int, name: str) -> PreTrainedModel:
        backbone, setting = self.once(self.backbone, seed), self.setting
        if name in TAYLOR:
            calibration, index = self.once(self.circuit_data)[0], TAYLOR.index(name)
            heads = setting.heads_per_layer
            [member] = draw_members(
                backbone, data=calibration, heads_per_layer=heads, num_members=1, seed=10 * seed + index
            )
            return member
        if name == "single":
            return prune_heads(backbone)
        if name == "oba":
            return self.sparse(seed)
        circuit = self.once(self.circuit, seed, circuit_of(name))
        if name in SAMPLED:
            sampled = sample_heads(circuit, setting.heads_to_prune, None, 10 * seed + SAMPLED.index(name))
            return prune_heads(backbone, sampled)
        return prune_heads(backbone, circuit.heads_to_prune(budget_of(name) or setting.heads_to_prune))

    def sparse(self, seed: int) -> PreTrainedModel:
        """The backbone without as many single weights, by OBA, as the heads have that circuits remove (paper, C.1.4)."""
        backbone, config = self.once(self.backbone, seed), self.once(self.backbone, seed).config
        head = 4 * config.hidden_size * (config.hidden_size // config.num_attention_heads)
        share = self.setting.heads_to_prune * head / sum(weight.numel() for weight in ranked_weights(backbone))
        rows = self.splits.circuit_id
        return oba_prune(backbone, rows.batches(OBA_BATCH) if isinstance(rows, TensorRows) else rows, sparsity=share)

    def last_layer_laplace(self, seed: int) -> LastLayerLaplace:
        """Fitted on the training rows as they are, not augmented; from the Hub, where these are many, on validation rows."""
        train, rows = self.splits.train, self.splits.validation
        rows = train.prepared_by(rows.prepare) if isinstance(train, TensorRows) else rows
        return LastLayerLaplace(self.once(self.backbone, seed)).fit(self.batches(rows))

    # Judging

    def batches(self, rows: Any) -> Any:
        return rows.batches(EVALUATION_BATCH) if isinstance(rows, TensorRows) else rows

    def untuned(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """(name, how to make it) of the methods on the backbone `seed` that train nothing more."""
        backbone = self.once(self.backbone, seed)
        yield "single", lambda: backbone
        yield "deep-ensembles", lambda: self.deep_ensemble(seed, 3)
        yield "mc-dropout", lambda: MCDropout(backbone, num_samples=10, p=self.setting.sampled_dropout, seed=0)
        yield "last-layer-laplace", lambda: self.last_layer_laplace(seed)

    def zero_shot(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for pruned backbones."""

        def pruned(name: str) -> PreTrainedModel:
            return self.once(self.pruned_member, seed, name)

        for name in ("oba", "taylor-0", *CIRC):
            yield f"{name}-zero-shot", lambda name=name: pruned(name)
        yield "hydra-taylor-zero-shot", lambda: fused(map(pruned, TAYLOR))
        yield "hydra-circ-zero-shot", lambda: fused(map(pruned, CIRC))
        for budget in self.setting.budgets:
            yield f"hydra-circ-zero-shot-{budget}", lambda budget=budget: fused(map(pruned, with_budget(CIRC, budget)))

    def deep_ensemble(self, seed: int, members: int) -> DeepEnsemble:
        return DeepEnsemble([self.once(self.backbone, index) for index in self.ensemble(seed, members)])

    def ensemble(self, seed: int, members: int = 3) -> list[int]:
        """The fine-tunings, or backbones trained apart, that a seed's ensemble is made of."""
        return ensemble(seed, self.seeds, self.backbones, members)

    def tuned(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for methods that fine-tune."""
        yield "lora-ensembles", lambda: self.lora_ensemble(seed)
        yield "oba-tuned", lambda: self.tuned_member(seed, "oba")
        for kind, names in (("taylor", TAYLOR), ("circ", CIRC)):
            yield f"hydra-{kind}", lambda names=names: fused(self.tuned_member(seed, name) for name in names)

    def members(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for tuned members by themselves, and for Hydras that share nothing."""
        for name in ("single", "taylor-0", *CIRC):
            yield f"{name}-tuned", lambda name=name: self.tuned_member(seed, name)
        for kind, names in (("taylor", TAYLOR), ("circ", CIRC)):
            yield (
                f"hydra-{kind}-not-fused",
                lambda names=names: fused((self.tuned_member(seed, name) for name in names), shared=()),
            )

    def tuned_member(self, seed: int, name: str) -> PreTrainedModel:
        return self.once(self.member, Unit("member", seed, name))

    def five(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for five members of one backbone."""
        units = [*(Unit("member", seed, name) for name in CIRC), *further_members(seed)]
        yield "hydra-circ-5", lambda: fused(self.once(self.member, unit) for unit in units)

    def budgets(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for members that lose other numbers of heads."""
        for budget in self.setting.budgets:
            members = [Unit("member", seed, name) for name in with_budget(CIRC, budget)]
            yield (
                f"hydra-circ-{budget}-heads",
                lambda members=members: fused(self.once(self.member, unit) for unit in members),
            )

    def sources(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for ensembles from one circuit whose members differ in one thing or several (tables 8 and 9)."""
        for sources in SOURCES:
            members = varied_members(seed, sources)
            yield (
                f"varied-{'-'.join(sources) or 'nothing'}",
                lambda members=members: fused(self.once(self.member, unit) for unit in members),
            )

    def baselines(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for trained methods other than Hydras."""
        for name in BASELINES:
            yield name, lambda name=name: self.baseline(seed, name)
        yield "lora-single", lambda: self.lora_single(seed)

    def fine_tunings(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same for members of several fine-tunings."""
        yield "soup", lambda: soup(self.whole_members(seed))
        yield "tunings-whole", lambda: fused(self.whole_members(seed))
        for count in (2, 5):
            if count <= self.backbones:
                yield f"deep-ensembles-of-{count}", lambda count=count: self.deep_ensemble(seed, count)
                yield f"tunings-whole-of-{count}", lambda count=count: fused(self.whole_members(seed, count))

    def whole_members(self, seed: int, count: int = 3) -> list[PreTrainedModel]:
        """Members of several fine-tunings, with all their heads."""
        return [self.once(self.pruned_member, index, "single") for index in self.ensemble(seed, count)]

    def fine_tunings_tuned(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same, each pruned by its own circuit and fine-tuned."""

        def members() -> list[PreTrainedModel]:
            return [self.tuned_member(index, "circ-avg") for index in self.ensemble(seed)]

        yield "tunings", lambda: fused(members())
        yield "tunings-not-fused", lambda: fused(members(), shared=())

    def trunk(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """The same with a quarter, half or three quarters of the layers merged whole: one trunk for all members."""
        layers = self.once(self.backbone, seed).config.num_hidden_layers
        for depth in sorted({layers // 4, layers // 2, 3 * layers // 4} - {0}):
            yield (
                f"tunings-whole-trunk-{depth}",
                lambda depth=depth: fused(self.whole_members(seed), trunk_layers=depth),
            )

    def soups(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module], float]]:
        """The same for three fine-tunings with deep trunks, for six that are averaged into three members, and what they are
        compared with; all of the same run, with the number of trainings."""
        yield "three-single", lambda: self.once(self.backbone, seed), 1
        yield "three-deep-ensembles", lambda: self.deep_ensemble(seed, 3), 3
        yield "three-soup", lambda: soup(self.members_of(seed, "three")), 3
        for name, trainings in (("three", 3), ("six", 6)):
            yield from self.with_trunks(name, lambda name=name: self.members_of(seed, name), trainings)

    def with_trunks(
        self, name: str, members: Callable[[], list[PreTrainedModel]], trainings: float
    ) -> Iterator[tuple[str, Callable[[], nn.Module], float]]:
        """Members fused with nothing merged, and with every deep trunk."""
        for depth in (0, *self.setting.deep_trunks):
            yield f"{name}-trunk-{depth}", lambda depth=depth: fused(members(), trunk_layers=depth), trainings

    def judge(self, seed: int, method: str, make: Callable[[], nn.Module], trainings: float | None = None) -> None:
        """Writes metrics in and out of distribution for each score and under shift, the number of members and the costs; and
        the same with a temperature, fitted on the validation rows for the members' mean.

        trainings: how much training went into it; such a method is not judged under shift
        """
        paths = [self.folder / "results" / str(seed) / f"{name}.json" for name in (method, with_temperature(method))]
        if all(self.is_judged(path, with_shift=trainings is None) for path in paths):
            return
        model = make()
        splits = self.splits
        test, validation = self.answers(model, splits.test), self.answers(model, splits.validation)
        ood = {
            group: {name: self.answers(model, rows) for name, rows in sets.items()}
            for group, sets in splits.ood.items()
        }
        shifted = {
            name: {severity: self.answers(model, rows) for severity, rows in sweep.items()}
            for name, sweep in (self.once(self.shifted) if trainings is None else {}).items()
        }
        held_out = {} if splits.validation_ood is None else {"": {"": self.answers(model, splits.validation_ood)}}
        costs = {"parameters": count_parameters(model), "multiply_adds": count_multiply_adds(model)}
        fitted = TemperatureScaling.fit(validation["member_logits"], validation["labels"])
        for path, scaling in zip(paths, (TemperatureScaling(1.0), fitted), strict=True):
            results = metrics_of(test, ood, scaling, shifted)
            content = costs | {"temperature": scaling.temperature} | results
            content |= {} if trainings is None else {"trainings": trainings}
            if held_out:
                content["validation"] = metrics_of(validation, held_out, scaling)
            write_atomically(path, json.dumps(content, indent=1) + "\n")
            aurocs = {
                name: f"{100 * of['auroc']:.1f}"
                for sets in results["ood"]["msp"].values()
                for name, of in sets.items()
            }
            accuracy = 100 * results["id"]["accuracy"]
            print(f"seed {seed} {path.stem}: accuracy {accuracy:.2f}, AUROC {aurocs}", flush=True)

    def shifted(self) -> Shifted:
        """The test rows under shift, by corruption and severity; none where the setting has no such rows."""
        return {} if self.splits.shift is None else self.splits.shift(self.splits.test)

    def is_judged(self, path: Path, with_shift: bool) -> bool:
        """Whether a results file is there, with what is under shift if the setting has that."""
        needs_shift = with_shift and self.splits.shift is not None
        return path.exists() and (not needs_shift or "shift" in json.loads(path.read_text()))

    def answers(self, model: nn.Module, rows: Any) -> dict[str, torch.Tensor]:
        """A model's logits (rows, members, classes), and the labels where there are any."""
        dtype = self.setting.judged_dtype
        with torch.autocast(self.device, dtype, enabled=self.device == "cuda" and dtype != torch.float32):
            member_logits, labels = collect_member_logits(model, self.batches(rows), EVALUATION_BATCH)
        member_logits = member_logits.float()
        return {"member_logits": member_logits} | ({} if labels is None else {"labels": labels})


def metrics_of(
    answers: dict[str, torch.Tensor],
    ood: Mapping[str, Mapping[str, dict[str, torch.Tensor]]],
    scaling: TemperatureScaling,
    shifted: Shifted | None = None,
) -> dict[str, Any]:
    """{"num_members", "id": metrics, "ood": {score: {group: {set: metrics}}}} of a model's answers; with answers under
    shift also "shift", see `shift_of`."""

    def scaled(given: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [{**given, "member_logits": scaling(given["member_logits"])}]

    sets = {group: {name: scaled(each) for name, each in of_group.items()} for group, of_group in ood.items()}
    corruptions = {name: {n: scaled(each) for n, each in sweep.items()} for name, sweep in (shifted or {}).items()}
    reports = {
        score: evaluate_uncertainty(
            SavedLogits(), scaled(answers), sets, score=score, corruptions=corruptions if score == "msp" else None
        )
        for score in SCORES
    }
    name, msp = "SavedLogits", reports["msp"]
    found = {"shift": shift_of(msp, name)} if corruptions else {}
    by_group = {score: ood_of(report, name) for score, report in reports.items()}
    return found | {
        "num_members": msp.num_members[name],
        "id": msp.models[name]["data"],
        "ood": {score: found if score == "msp" else detection_of(found) for score, found in by_group.items()},
    }


def ood_of(report: Report, model: str) -> dict[str, dict[str, dict[str, float]]]:
    """group -> OOD data set -> metrics"""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for data_set in report.data_sets():
        group, name, _ = report.groups[data_set]
        found.setdefault(group, {})[name] = report.models[model][data_set]
    return found


def detection_of(ood: Mapping[str, Mapping[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """The metrics that depend on the score."""
    return {
        group: {name: {metric: of_set[metric] for metric in DETECTION} for name, of_set in sets.items()}
        for group, sets in ood.items()
    }


def with_temperature(method: str) -> str:
    return "temperature" if method == "single" else f"{method}-temperature"


def fused(members: Iterable[PreTrainedModel], **options) -> PreTrainedModel:
    members = list(members)
    return AutoHydra.from_pruned_members(members, allow_equal=True, **options)
