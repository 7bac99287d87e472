"""`benchmark`: parameters, multiply-adds and time of a Hydra against one model and a Deep Ensemble."""

from pathlib import Path

import torch
from torch import nn

from .._io.files import check_takes_files, write_atomically
from ..cost import compare_costs, inputs_for, unpruned_backbone
from ..reports import cost_table
from . import flags
from .folders import check_is_hydra, load_config, load_model
from .options import argument, check_named_once, device_named, duration, option


def benchmark(
    model: argument(str, "MODEL", "a Hydra: the output of `fuse`, a member, or a Hub name"),
    batch_sizes: option(list[int], "batch sizes to measure", "N...", min=1) = (1, 8),
    seconds: option(float, "to measure per batch size", parser=duration) = 5.0,
    device: flags.Device = None,
    output: option(Path | None, "write the table to this file, too", "FILE") = None,
) -> None:
    """Compare parameters, multiply-adds and time with one model and a Deep Ensemble."""
    check_named_once(batch_sizes, "--batch-sizes")
    check_is_hydra(load_config(model), model)
    device = device_named(device)
    if output is not None:
        if output.is_dir():
            raise ValueError(f"--output {output} is a folder: pass the name of a file")
        check_takes_files(output.parent)
    hydra = load_model(model, device)
    models = {"Single": unpruned_backbone(hydra, device), **deep_ensemble_of(hydra, device)}
    if hydra.num_members > 1:
        models["Pruned member"] = hydra.member(0)
    models["Hydra" if hydra.num_members > 1 else "Pruned member"] = hydra
    print(f"One sample has {sample_size(hydra)}; median times on {device} (threads: {torch.get_num_threads()}).\n")
    table = cost_table(compare_costs(models, batch_sizes, seconds)).markdown()
    print(table)
    if output is not None:
        write_atomically(output, table + "\n")


def deep_ensemble_of(hydra: nn.Module, device: str = "meta") -> dict[str, nn.Module]:
    """As many unpruned backbones as a Hydra has members, with their name; nothing for a single member."""
    from ..baselines import DeepEnsemble

    members = hydra.config.num_members
    backbones = [unpruned_backbone(hydra, device) for _ in range(members)]
    return {f"Deep Ensemble of {members}": DeepEnsemble(backbones)} if members > 1 else {}


def sample_size(model: nn.Module) -> str:
    """The size of one input, in words."""
    inputs = inputs_for(model, 1, "meta")
    parts = ["{} x {} pixels".format(*inputs["pixel_values"].shape[2:])] if "pixel_values" in inputs else []
    if "input_values" in inputs:
        is_raw = inputs["input_values"].dim() == 2
        words = "{:,} samples" if is_raw else "{} frames of {} mel bins"
        parts.append(words.format(*inputs["input_values"].shape[1:]))
    if "input_features" in inputs:
        parts.append("{1} frames of {0} mel bins".format(*inputs["input_features"].shape[1:]))
    if "input_ids" in inputs:
        parts.append(f"{inputs['input_ids'].shape[1]} tokens")
    return " and ".join(parts)
