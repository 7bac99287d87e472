"""The results of all runs in one JSON file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import where_it_ran
from hydra_transformers.files import write_atomically


def gather(runs: Path, settings: Sequence[str], device: str) -> dict[str, Any]:
    """{setting: {"machine", "versions", "date", "commit", "seeds": {seed: {method: metrics}}, "circuits": {seed: {name: circuit}}}}"""
    return {setting: where_it_ran(device) | _gather_setting(runs / setting) for setting in settings}


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
