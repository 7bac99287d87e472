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
    """{"machine", "versions", "date", "settings": {name: {"backbones": {...}, "seeds": {seed: {method: metrics}}}}}"""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "machine": name,
        "versions": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
        "settings": {setting: _gather_setting(runs / setting) for setting in settings},
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
    judged = {name: content for name, content in results["settings"].items() if content["seeds"]}
    if not judged:
        return
    results = {**results, "settings": judged}
    if path.exists():
        before = json.loads(path.read_text())
        results = {**results, "settings": {**before["settings"], **results["settings"]}}
    write_atomically(path, json.dumps(results, indent=1) + "\n")
