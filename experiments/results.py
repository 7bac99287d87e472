"""The results of a setting in one JSON file."""

import json
from pathlib import Path
from typing import Any

from benchmarks.provenance import where_it_ran
from hydra_transformers._io.files import write_atomically


RESULTS = Path(__file__).parent / "results"
DIGITS = 6  # significant ones; metrics carry no more


def gather(folder: Path, device: str) -> dict[str, Any]:
    """What lies in a setting's folder: {"machine", "versions", "date", "commit", "seeds": {seed: {method: metrics}},
    "circuits": {backbone: {name: circuit}}}"""
    seeds: dict[str, Any] = {}
    circuits: dict[str, Any] = {}
    for path in sorted(folder.glob("results/*/*.json")):
        seeds.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    for path in sorted(folder.glob("circuit-*.json")):
        content = json.loads(path.read_text())["circuit"]
        _, index, name = path.stem.split("-", 2)
        kept = {key: content[key] for key in ("ranking", "scores", "dense_score")}
        circuits.setdefault(index, {})[name] = kept
    return where_it_ran(device) | rounded({"seeds": seeds, "circuits": circuits})


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def results_file(folder: Path, setting: str) -> Path:
    return folder / f"{setting}.json"


def write_results(results: dict[str, Any], path: Path) -> None:
    """Where nothing was judged, what is there stays."""
    if results["seeds"]:
        write_atomically(path, in_lines(results, depth=3) + "\n")


def in_lines(value: Any, depth: int) -> str:
    """JSON with a line for each entry down to `depth`: one for what a method reached with a seed."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {in_lines(each, depth - 1)}" for key, each in value.items()) + "\n}"


def read_results(folder: Path) -> dict[str, Any]:
    """{setting: results} of all that are there."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
