"""`evaluate`, `benchmark` and `info`: what a model knows, what it costs, and what it is made of."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedConfig

from .._io.files import write_atomically
from ..baselines import Baseline, DeepEnsemble
from ..cost import (
    compare_costs,
    count_parameters,
    inputs_for,
    unpruned_backbone,
)
from ..data.loading import PreparedData
from ..data.prediction import ChangedBatches, ZeroShotClassifier, collate
from ..data.rows import FEW_ROWS, is_same_source
from ..fusion import without_weights
from ..models.auto import head_of, is_zero_shot
from ..reports.evaluation import evaluate_uncertainty
from ..reports.report import UncertaintyReport
from ..reports.tables import cost_table
from ..shift import SEVERITIES, corrupted_sets
from ..uncertainty import DecidingClassifier, detector_by_name
from ..uncertainty.calibration import OtherClassesError
from .arguments import (
    check_can_be_learnt_from,
    check_named_once,
    class_prompts,
    device_of,
    read_data,
)
from .building import overlap
from .folders import (
    check_takes_files,
    is_baseline,
    load_config,
    load_model,
    load_processor,
    member_folders,
)
from .problems import CommandError


# evaluate


class WithProgress:
    """Batches of a data set, with a bar each time they are read."""

    def __init__(self, data: Any, batch_size: int, name: str):
        self.loader, self.name = torch.utils.data.DataLoader(data, batch_size, collate_fn=collate), name

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(tqdm(self.loader, desc=self.name, unit="batch"))


def _with_progress(data: Any, batch_size: int, name: str) -> Any:
    """A bar on data that may be changed; the change is left to whoever reads it, who knows the device."""
    if isinstance(data, ChangedBatches):
        return ChangedBatches(WithProgress(data.data, batch_size, name), data.change)
    return WithProgress(data, batch_size, name)


def evaluate(arguments: argparse.Namespace) -> None:
    sources = _models_by_name(arguments)
    output = arguments.output or Path(arguments.model) / "evaluation"
    device = device_of(arguments)
    configs = {name: load_config(source) for name, source in sources.items()}
    _check_classes(configs)
    check_takes_files(output)
    processors = {
        name: load_processor(arguments.processor or source, configs[name]) for name, source in sources.items()
    }
    data = {
        name: _read_all(arguments, configs[name], processors[name], is_told=place == 0)
        for place, name in enumerate(sources)
    }
    fit_data = {
        name: _fit_data(arguments, configs[name], processors[name], data[name][0], is_told=place == 0)
        for place, name in enumerate(sources)
    }
    _tell_what_says_little(arguments, next(iter(data.values()))[0])
    corruptions = {name: _corrupted(arguments, data[name][0], processors[name]) for name in sources}
    models = {name: load_model(source, device) for name, source in sources.items()}
    results = {}
    for place, (name, model) in enumerate(models.items()):
        labelled, ood = data[name]
        prompts = class_prompts(configs[name], processors[name], labelled)
        model = model if prompts is None else ZeroShotClassifier(model, prompts, labelled.class_names)
        model = _with_saved_decision(model, sources[name])
        detector = detector_by_name(arguments.score)
        if detector.needs_fit:
            detector.fit(model, WithProgress(fit_data[name], arguments.batch_size, f"{name}: fit of {detector.name}"))
            if place == 0:
                detector.save(output)
        report = evaluate_uncertainty(
            {name: model},
            WithProgress(labelled, arguments.batch_size, f"{name}: in distribution"),
            {
                group: {
                    each: WithProgress(rows, arguments.batch_size, f"{name}: {each}") for each, rows in sets.items()
                }
                for group, sets in ood.items()
            },
            score=detector if detector.needs_fit else arguments.score,
            corruptions={
                corruption: {
                    severity: _with_progress(rows, arguments.batch_size, f"{name}: {corruption} {severity}")
                    for severity, rows in sweep.items()
                }
                for corruption, sweep in corruptions[name].items()
            },
        )
        results |= report.models
    report = UncertaintyReport(score=arguments.score, models=results)
    report.to_json(output / "report.json")
    write_atomically(output / "report.md", report.to_markdown())
    print(report)
    try:
        report.to_html(output / "report.html", pictures=report.plot(output / "plots"))
        written = "report.md, report.html, report.json and plots"
    except ImportError as error:
        print(f"no plots: {error}")
        written = "report.md and report.json"
    print(f"{written} are in {output}.")
    own_name = f" --report-model {next(iter(models))}" if arguments.compare else ""
    print(f"Next: hydra-transformers card {arguments.model} --report {output / 'report.json'}{own_name} --dataset ...")


def _with_saved_decision(model: nn.Module, source: str) -> nn.Module:
    """With the decision that `calibrate` saved beside the model, where there is one: a Hydra classifier's is a part of it."""
    if not DecidingClassifier.is_saved_in(source):
        return model
    try:
        return DecidingClassifier.load(model, source).eval()
    except OtherClassesError as error:
        print(f"note: {source} is judged without its decision: {error}", file=sys.stderr)
        return model


def _models_by_name(arguments: argparse.Namespace) -> dict[str, str]:
    """Name -> folder or Hub name, the model itself first; refuses names that stand for two things."""
    path = Path(arguments.model)
    if arguments.output is None and not path.is_dir():
        raise CommandError(f"{arguments.model} is no folder to write into: pass --output")
    own = path.resolve().name if path.is_dir() else path.name
    for group in ("near", "far"):
        check_named_once([name for name, _ in getattr(arguments, group)], f"--{group}")
    check_named_once([name for name, _ in arguments.compare], "--compare")
    if own in dict(arguments.compare):
        raise CommandError(
            f"--compare calls another model {own}, as {arguments.model} itself is called: name it otherwise"
        )
    return {own: arguments.model, **dict(arguments.compare)}


def _check_classes(configs: dict[str, PreTrainedConfig]) -> None:
    first = next(iter(configs))
    for name, config in configs.items():
        if getattr(config, "id2label", None) != getattr(configs[first], "id2label", None):
            raise CommandError(f"{name} has other classes than {first}: they cannot be judged on the same labels")


def _read_all(
    arguments: argparse.Namespace, config: PreTrainedConfig, processor: Any, is_told: bool
) -> tuple[PreparedData, dict[str, dict[str, PreparedData]]]:
    """The data, and by group and name the out-of-distribution data, prepared for one model."""
    data = read_data(arguments, config, processor, split=arguments.split, is_told=is_told, part=arguments.part)
    groups = {group: getattr(arguments, group) for group in ("near", "far") if getattr(arguments, group)}
    ood = {
        group: {
            name: read_data(arguments, config, processor, source, labelled=False, is_told=is_told)
            for name, source in sets
        }
        for group, sets in groups.items()
    }
    return data, ood


def _corrupted(arguments: argparse.Namespace, data: PreparedData, processor: Any) -> dict[str, dict[int, Any]]:
    """The corrupted data that were asked for, by corruption and severity."""
    if arguments.corruptions is None:
        if arguments.severities is not None:
            raise CommandError("--severities is of --corruptions: name those, or all")
        return {}
    scale = {} if data.kind == "text" else {"processor": processor}
    try:
        return corrupted_sets(data, arguments.corruptions, arguments.severities or SEVERITIES, **scale)
    except ValueError as error:
        raise CommandError(f"--corruptions: {error}") from error


def _fit_data(
    arguments: argparse.Namespace, config: PreTrainedConfig, processor: Any, data: PreparedData, is_told: bool
) -> PreparedData | None:
    """What the score is fitted on, where it is one that needs that."""
    detector = detector_by_name(arguments.score)
    if not detector.needs_fit:
        for name in ("fit_data", "fit_split"):
            if getattr(arguments, name) is not None:
                raise CommandError(
                    f"--{name.replace('_', '-')} is for scores that are fitted, {arguments.score} is not"
                )
        return None
    source, labelled = arguments.fit_data or arguments.data, detector.needs_labels
    given = (source, arguments.fit_split, labelled)
    rows = read_data(arguments, config, processor, *given, prefer=("train",), is_told=is_told)
    if is_same_source(source, arguments.data) and overlap(rows.split, data.split):
        raise CommandError(
            f"{arguments.score} would be fitted on the rows that it is judged on ({source}, {rows.split}): pass the training "
            "data with --fit-data or --fit-split"
        )
    if labelled:
        check_can_be_learnt_from(rows, source, "to fit the score on")
        if is_zero_shot(config) and rows.class_names != data.class_names:
            raise CommandError(
                f"{source} has other classes than {arguments.data}: fit the score on data with the same"
            )
    return rows


def _tell_what_says_little(arguments: argparse.Namespace, data: PreparedData) -> None:
    if len(data) < 2:
        print(f"note: {arguments.data} gives 1 row, of which no figure means anything", file=sys.stderr)
    elif len(set(data.labels)) < 2:
        print(f"note: all {len(data):,} rows of {arguments.data} have the same label", file=sys.stderr)
    elif len(data) < FEW_ROWS and arguments.part is None:  # of a part it was said already
        print(f"note: only {len(data)} rows judge: differences of a few points may be chance", file=sys.stderr)
    for group in ("near", "far"):
        for name, source in getattr(arguments, group):
            if is_same_source(source, arguments.data):
                print(f"note: --{group} {name} is the data itself, so it cannot be told from it", file=sys.stderr)


# benchmark


def benchmark(arguments: argparse.Namespace) -> None:
    check_named_once(arguments.batch_sizes, "--batch-sizes")
    check_is_hydra(load_config(arguments.model), arguments.model)
    device = device_of(arguments)
    if arguments.output is not None:
        if arguments.output.is_dir():
            raise CommandError(f"--output {arguments.output} is a folder: pass the name of a file")
        check_takes_files(arguments.output.parent)
    hydra = load_model(arguments.model, device)
    models: dict[str, nn.Module] = {"Single": unpruned_backbone(hydra, device)}
    if hydra.num_members > 1:
        several = [unpruned_backbone(hydra, device) for _ in range(hydra.num_members)]
        models[f"Deep Ensemble of {hydra.num_members}"] = DeepEnsemble(several)
        models["Pruned member"] = hydra.member(0)
    models["Hydra" if hydra.num_members > 1 else "Pruned member"] = hydra
    print(f"One sample has {_sample(hydra)}; median times on {device} (threads: {torch.get_num_threads()}).\n")
    table = cost_table(compare_costs(models, arguments.batch_sizes, arguments.seconds)).markdown()
    print(table)
    if arguments.output is not None:
        write_atomically(arguments.output, table + "\n")


def _sample(model: nn.Module) -> str:
    inputs = inputs_for(model, 1, "meta")
    parts = ["{} x {} pixels".format(*inputs["pixel_values"].shape[2:])] if "pixel_values" in inputs else []
    if "input_values" in inputs:
        parts.append("{} frames of {} mel bins".format(*inputs["input_values"].shape[1:]))
    if "input_ids" in inputs:
        parts.append(f"{inputs['input_ids'].shape[1]} tokens")
    return " and ".join(parts)


def check_can_be_published(config: PreTrainedConfig, name: str) -> None:
    """Refuses what no card describes."""
    if not is_baseline(name):
        check_is_hydra(config, name)


def check_is_hydra(config: PreTrainedConfig, name: str) -> None:
    if not config.model_type.startswith("hydra_"):
        raise CommandError(
            f"{name} is a plain {config.model_type}: pass a Hydra, the output of `hydra-transformers fuse`"
        )


# info


def info(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.model)
    if folder.is_dir() and not (folder / "config.json").exists() and member_folders(folder):
        for member in member_folders(folder):
            print(f"{member.name}\n")
            describe(load_config(str(member)), str(member))
            print()
        return
    if is_baseline(arguments.model):
        return describe_baseline(load_model(arguments.model))
    describe(load_config(arguments.model), arguments.model)


def describe_baseline(model: Baseline) -> None:
    arguments = ", ".join(f"{name}={value!r}" for name, value in model.arguments.items())
    print(f"{type(model).__name__}({arguments}) around a {type(model.model).__name__}\n")
    rows = {"This model": model, "One plain model": without_weights(type(model.model), model.config)}
    print(f"{cost_table(compare_costs(rows)).markdown()}\n({_sample(model)} per sample)")


def describe(config: PreTrainedConfig, name: str) -> None:
    from ..hub import kept_heads_map

    check_is_hydra(config, name)
    model = without_weights(head_of(config), config)
    shared = ", ".join(config.shared) or "nothing"
    print(
        f"{type(model).__name__}, {config.num_members} member{'s' if config.num_members > 1 else ''}, sharing {shared}"
    )
    if getattr(config, "id2label", None) and not is_zero_shot(config):
        print(f"{config.num_labels} classes: {', '.join(list(map(str, config.id2label.values()))[:10])}")
    print(f"{count_parameters(model):,} parameters\n")
    print(kept_heads_map(config))
    rows = {"This model": model, "Unpruned backbone": unpruned_backbone(model)}
    if config.num_members > 1:
        several = [unpruned_backbone(model) for _ in range(config.num_members)]
        rows[f"Deep Ensemble of {config.num_members}"] = DeepEnsemble(several)
    print(f"\n{cost_table(compare_costs(rows)).markdown()}\n({_sample(model)} per sample)")
