"""What `zero_shot.py` judges methods with: metrics of each in JSON files; a method that was judged is not judged again."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hydra_transformers._io.files import write_atomically
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.models.auto import AutoHydra
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.uncertainty import TemperatureScaling
from hydra_transformers.uncertainty.features import collect_answers

from .rows import TensorRows
from .splits import Splits


OBJECTIVES = ("acc", "ood", "avg")
SCORES = ("msp", "mutual_information", "energy")
DETECTION = ("auroc", "aupr", "fpr95")
EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Comparison:
    """A setting with its data on a device, and the folder that all its files go to."""

    setting: Any
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
        """(name, how to make it)"""
        raise NotImplementedError

    def circuit_data(self) -> tuple[Any, Any]:
        return self.batches(self.splits.circuit_id), self.batches(self.splits.circuit_ood)

    def batches(self, rows: TensorRows) -> list[dict[str, torch.Tensor]]:
        return rows.batches(EVALUATION_BATCH)

    def judge(self, seed: int, method: str, make: Callable[[], nn.Module]) -> None:
        """Writes metrics in and out of distribution for each score, the number of members and the costs; and the same with a
        temperature, fitted on the validation rows for the members' mean."""
        paths = [self.folder / "results" / str(seed) / f"{name}.json" for name in (method, with_temperature(method))]
        if all(path.exists() for path in paths):
            return
        model = make()
        splits = self.splits
        test = self.answers(model, splits.test)
        validation = self.answers(model, splits.validation)
        ood = {
            group: {name: self.answers(model, rows) for name, rows in sets.items()}
            for group, sets in splits.ood.items()
        }
        held_out = {} if splits.validation_ood is None else {"": {"": self.answers(model, splits.validation_ood)}}
        costs = {"parameters": count_parameters(model), "multiply_adds": count_multiply_adds(model)}
        fitted = TemperatureScaling.fit(validation["member_logits"], validation["labels"])
        for path, scaling in zip(paths, (TemperatureScaling(1.0), fitted), strict=True):
            results = metrics_of(test, ood, scaling)
            content = costs | {"temperature": scaling.temperature} | results
            if held_out:
                content["validation"] = metrics_of(validation, held_out, scaling)
            write_atomically(path, json.dumps(content, indent=1) + "\n")
            accuracy = 100 * results["id"]["accuracy"]
            print(f"seed {seed} {path.stem}: accuracy {accuracy:.2f}", flush=True)

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
) -> dict[str, Any]:
    """{"num_members", "id": metrics, "ood": {score: {group: {set: metrics}}}} of a model's answers"""

    def scaled(given: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [{**given, "member_logits": scaling(given["member_logits"])}]

    sets = {group: {name: scaled(each) for name, each in of_group.items()} for group, of_group in ood.items()}
    reports = {score: evaluate_uncertainty(SavedLogits(), scaled(answers), sets, score=score) for score in SCORES}
    name = "SavedLogits"
    msp = reports["msp"]
    by_group = {score: ood_of(report, name) for score, report in reports.items()}
    return {
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
