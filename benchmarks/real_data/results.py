"""The results of all runs in one JSON file."""

import json
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from hydra_transformers.files import write_atomically


def gather(runs: Path, settings: Sequence[str], device: str) -> dict[str, Any]:
    """{setting: {"machine", "versions", "date", "seeds": {seed: {method: metrics}}, "circuits": {seed: {name: circuit}}}}"""
    return {setting: where_it_ran(device) | _gather_setting(runs / setting) for setting in settings}


def where_it_ran(device: str) -> dict[str, str]:
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }


def _gather_setting(folder: Path) -> dict[str, Any]:
    seeds, circuits = {}, {}
    for path in sorted(folder.glob("results/*/*.json")):
        seeds.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    for path in sorted(folder.glob("circuit-*.json")):
        content = json.loads(path.read_text())["circuit"]
        _, seed, name = path.stem.split("-", 2)
        kept = {key: content[key] for key in ("ranking", "scores", "dense_score")}
        circuits.setdefault(seed, {})[name] = kept
    return {"seeds": seeds, "circuits": circuits}


def write_results(results: dict[str, Any], path: Path) -> None:
    """Settings without results of this time stay as they are in the file."""
    judged = {name: content for name, content in results.items() if content["seeds"]}
    if not judged:
        return
    before = json.loads(path.read_text()) if path.exists() else {}
    write_atomically(path, json.dumps(before | judged, indent=1) + "\n")
