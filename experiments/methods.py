"""The paper's comparison: every method, from a setting's data to metrics in JSON files.

A seed has three backbones of its own. Each training and each circuit writes into a folder or file below the setting's and resumes
if it was cut off; a method that was judged is not judged again.
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
    LastLayerLaplace,
    LoRAEnsemble,
    MCDropout,
    MIMOCollator,
    PackedEnsemble,
    finetune_lora_ensemble,
)
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.models.auto import AutoHydra
from hydra_transformers.pruning import Circuit, draw_members, extract_circuit, oba_prune, prune_heads
from hydra_transformers.pruning.oba import ranked_weights
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.training import Recipe, finetune_members
from hydra_transformers.uncertainty import TemperatureScaling
from hydra_transformers.uncertainty.features import collect_answers

from .rows import LengthBatches, TensorRows
from .setting import Setting
from .shifted_sets import Shifted, shift_of
from .splits import Splits


MEMBERS = 3
OBJECTIVES = ("acc", "ood", "avg")
CIRCUITS = tuple(f"circ-{objective}" for objective in OBJECTIVES)
TAYLOR = tuple(f"taylor-{index}" for index in range(MEMBERS))
TITLES = {
    "single": "One model",
    "temperature": "Temperature scaling",
    "deep-ensembles": "Deep Ensemble of 3",
    "mc-dropout": "MC Dropout, 10 passes",
    "last-layer-laplace": "Laplace on the last layer",
    "lora-ensembles": "LoRA Ensemble of 3",
    "batch-ensemble": "BatchEnsemble of 3",
    "mimo": "MIMO of 3",
    "packed": "Packed-Ensemble of 3, new weights",
    "oba": "OBA, fine-tuned",
    "hydra-taylor-untuned": "Hydra (Taylor), not fine-tuned",
    "hydra-circ-untuned": "Hydra (Circ), not fine-tuned",
    "hydra-taylor": "Hydra (Taylor)",
    "hydra-circ": "Hydra (Circ)",
}
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
    made: dict[tuple, Any] = field(default_factory=dict)

    def once(self, make: Callable, *arguments: Any) -> Any:
        """`make(*arguments)`, computed once in this process."""
        key = (make.__name__, *arguments)
        if key not in self.made:
            self.made[key] = make(*arguments)
        return self.made[key]

    def run_seed(self, seed: int) -> None:
        for method, make in self.methods(seed):
            self.judge(seed, method, make)

    def methods(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """(name, how to make it), those with the longest training last."""

        def backbone() -> PreTrainedModel:
            return self.once(self.backbone, MEMBERS * seed)

        def pruned(names: Iterable[str], tuned: bool) -> PreTrainedModel:
            make = self.tuned_member if tuned else self.pruned_member
            return fused([self.once(make, seed, name) for name in names])

        yield "single", backbone
        yield "deep-ensembles", lambda: self.deep_ensemble(seed)
        yield "mc-dropout", lambda: MCDropout(backbone(), num_samples=10, p=self.setting.sampled_dropout, seed=0)
        yield "last-layer-laplace", lambda: self.last_layer_laplace(seed)
        yield "hydra-taylor-untuned", lambda: pruned(TAYLOR, tuned=False)
        yield "hydra-circ-untuned", lambda: pruned(CIRCUITS, tuned=False)
        yield "hydra-taylor", lambda: pruned(TAYLOR, tuned=True)
        yield "hydra-circ", lambda: pruned(CIRCUITS, tuned=True)
        yield "oba", lambda: self.tuned_member(seed, "oba")
        for name in ("batch-ensemble", "mimo", "packed"):
            yield name, lambda name=name: self.baseline(seed, name)
        yield "lora-ensembles", lambda: self.lora_ensemble(seed)

    # Training

    def backbone(self, index: int) -> PreTrainedModel:
        """The backbone with this number, which is its seed: for a new classifier and the order of rows."""
        setting, folder = self.setting, self.folder / f"backbone-{index}"
        return self.finetune(self.start(index), folder, setting.backbone_recipe, index).eval()

    def start(self, seed: int) -> PreTrainedModel:
        """The model that backbones start from."""
        torch.manual_seed(seed)
        return self.setting.new_backbone(self.setting.start).to(self.device).eval()

    def finetune(self, model: nn.Module, folder: Path, recipe: Recipe, seed: int, **others: Any) -> nn.Module:
        options = self.training_options(seed) | others
        [tuned] = finetune_members([model], recipe, output_dir=folder, seed=seed, **options)
        return tuned

    def training_options(self, seed: int) -> dict[str, Any]:
        """The options of `finetune_members` besides the models, the recipe, the folder and the seed."""
        train, batch = self.splits.train, self.setting.batch_size
        if self.setting.groups_by_length:
            train, batch = LengthBatches(train, batch, seed), 1
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

    def tuned_member(self, seed: int, name: str) -> PreTrainedModel:
        """A member after pruning and fine-tuning, each with a seed of its own."""
        place = next((names.index(name) for names in (CIRCUITS, TAYLOR) if name in names), MEMBERS)
        recipe = replace(self.setting.member_recipe, keep_zeros=name == "oba")
        folder = self.folder / f"member-{seed}-{name}"
        return self.finetune(self.once(self.pruned_member, seed, name), folder, recipe, 100 * seed + place)

    def lora_ensemble(self, seed: int) -> LoRAEnsemble:
        """From the model that backbones start from, as long as they train."""
        recipe = self.setting.backbone_recipe.with_arguments(
            optim="adamw_torch", classifier_learning_rate=None, learning_rate=self.setting.lora_learning_rate
        )
        return finetune_lora_ensemble(
            self.start(seed),
            recipe,
            output_dir=self.folder / f"lora-{seed}",
            seed=100 * seed,
            **self.training_options(100 * seed),
        )

    def baseline(self, seed: int, name: str) -> nn.Module:
        """A baseline of three members that starts where backbones do; a Packed-Ensemble has weights of its own."""
        start, recipe, options = self.start(seed), self.setting.backbone_recipe, {}
        if name == "mimo":
            model = MIMO(start, num_members=MEMBERS, seed=seed)
            # only its own loss knows which label lies in which place
            recipe = recipe.with_arguments(label_smoothing_factor=0.0)
            options["data_collator"] = MIMOCollator(MEMBERS, collator=self.splits.data_collator)
        elif name == "packed":
            model = PackedEnsemble.from_backbone(start, num_members=MEMBERS, seed=seed)
        else:
            model = BatchEnsemble(start, num_members=MEMBERS, seed=seed)
        return self.finetune(model, self.folder / f"{name}-{seed}", recipe, 100 * seed, **options)

    def deep_ensemble(self, seed: int) -> DeepEnsemble:
        first = MEMBERS * seed
        return DeepEnsemble([self.once(self.backbone, index) for index in range(first, first + MEMBERS)])

    # Pruning

    def circuit_data(self) -> tuple[Any, Any]:
        return self.batches(self.splits.circuit_id), self.batches(self.splits.circuit_ood)

    def circuit(self, seed: int, objective: str) -> Circuit:
        backbone = prune_heads(self.once(self.backbone, MEMBERS * seed))
        return extract_circuit(
            backbone.to(self.setting.circuit_dtype) if self.device == "cuda" else backbone,
            *self.once(self.circuit_data),
            objective,
            budget=self.setting.heads_to_prune,
            mode=self.setting.circuit_mode,
            checkpoint=self.folder / f"circuit-{seed}-{objective}.json",
        )

    def pruned_member(self, seed: int, name: str) -> PreTrainedModel:
        backbone, setting = self.once(self.backbone, MEMBERS * seed), self.setting
        if name in TAYLOR:
            calibration, place = self.once(self.circuit_data)[0], TAYLOR.index(name)
            options = {"heads_per_layer": setting.heads_per_layer, "num_members": 1, "seed": 10 * seed + place}
            [member] = draw_members(backbone, data=calibration, **options)
            return member
        if name == "oba":
            return self.sparse(backbone)
        circuit = self.once(self.circuit, seed, name.removeprefix("circ-"))
        return prune_heads(backbone, circuit.heads_to_prune(setting.heads_to_prune))

    def sparse(self, backbone: PreTrainedModel) -> PreTrainedModel:
        """The backbone without as many single weights, by OBA, as the heads have that circuits remove (paper, C.1.4)."""
        config = backbone.config
        head = 4 * config.hidden_size * (config.hidden_size // config.num_attention_heads)
        share = self.setting.heads_to_prune * head / sum(weight.numel() for weight in ranked_weights(backbone))
        return oba_prune(backbone, self.splits.circuit_id.batches(OBA_BATCH), sparsity=share)

    def last_layer_laplace(self, seed: int) -> LastLayerLaplace:
        """Fitted on the training rows as they are, not augmented."""
        rows = self.splits.train.prepared_by(self.splits.validation.prepare)
        return LastLayerLaplace(self.once(self.backbone, MEMBERS * seed)).fit(self.batches(rows))

    # Judging

    def batches(self, rows: TensorRows) -> list[dict[str, torch.Tensor]]:
        return rows.batches(EVALUATION_BATCH)

    def judge(self, seed: int, method: str, make: Callable[[], nn.Module]) -> None:
        """Writes metrics in and out of distribution for each score and under shift, the number of members and the costs; and
        the same with a temperature, fitted on the validation rows for the members' mean."""
        paths = [self.folder / "results" / str(seed) / f"{name}.json" for name in (method, with_temperature(method))]
        if all(path.exists() for path in paths):
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
            for name, sweep in self.once(self.shifted).items()
        }
        held_out = {} if splits.validation_ood is None else {"": {"": self.answers(model, splits.validation_ood)}}
        costs = {"parameters": count_parameters(model), "multiply_adds": count_multiply_adds(model)}
        fitted = TemperatureScaling.fit(validation["member_logits"], validation["labels"])
        for path, scaling in zip(paths, (TemperatureScaling(1.0), fitted), strict=True):
            results = metrics_of(test, ood, scaling, shifted)
            content = costs | {"temperature": scaling.temperature} | results
            if held_out:
                content["validation"] = metrics_of(validation, held_out, scaling)
            write_atomically(path, json.dumps(content, indent=1) + "\n")
            accuracy = 100 * results["id"]["accuracy"]
            print(f"seed {seed} {path.stem}: accuracy {accuracy:.2f}", flush=True)

    def shifted(self) -> Shifted:
        """The test rows under shift, by corruption and severity; none where the setting has no such rows."""
        return {} if self.splits.shift is None else self.splits.shift(self.splits.test)

    def answers(self, model: nn.Module, rows: Any) -> dict[str, torch.Tensor]:
        """A model's logits (rows, members, classes), and the labels where there are any."""
        dtype = self.setting.judged_dtype
        with torch.autocast(self.device, dtype, enabled=self.device == "cuda" and dtype != torch.float32):
            member_logits, _, labels = collect_answers(
                model, self.batches(rows), EVALUATION_BATCH, with_features=False
            )
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
