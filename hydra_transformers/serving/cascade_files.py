"""The file of a cascade: its thresholds, what they promise, and of which stages."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._io.files import parse_json
from ..uncertainty.cascade import LEVELS, CascadeFit, StageShares
from .cascade_stages import PERSON, FunctionStage, Stage


CASCADE_FILE = "cascade.json"
VERSION = 1
KINDS = ("folder", "hub", "function", PERSON)


@dataclass(frozen=True)
class SavedStage:
    """A stage as it is saved.

    kind: "folder", "hub", "function" or "person"
    name: in sentences and predictions
    source: a folder, relative to the file; a name on the Hub; "module:function"; empty for a person
    digest: of a model; empty for others
    """

    kind: str
    name: str
    source: str = ""
    digest: str = ""


@dataclass(frozen=True)
class SavedCascade:
    """What the file of a cascade holds.

    stages: in their order, with the person
    fit: the thresholds, and what they promise
    prices: of the stages, or None
    unit: of the work: "multiply-adds", "price" or "calls"
    columns: that were read
    sentences: what `calibrate` said
    """

    stages: tuple[SavedStage, ...]
    fit: CascadeFit
    prices: tuple[float, ...] | None
    unit: str
    columns: tuple[str, ...]
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it, which knows no infinity."""
        fit = asdict(self.fit)
        fit["thresholds"] = [value if math.isfinite(value) else str(value) for value in self.fit.thresholds]
        return {"version": VERSION} | asdict(self) | {"fit": fit, "digest": _digest(fit)}


def find_cascade(folder: str | os.PathLike) -> Path | None:
    """Return the file of the cascade in a folder; None where there is none."""
    file = Path(folder) / CASCADE_FILE
    return file if file.is_file() else None


def read_cascade(file: Path) -> SavedCascade:
    """Read the file of a cascade; raise a sentence for one that is not whole."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no cascade {file}: calibrate the stages together first, and save them")
    try:
        content = parse_json(file.read_bytes())
        if content.get("version") != VERSION:
            raise ValueError(f"its version is {str(content.get('version'))[:20]}, and this package reads {VERSION}")
        return _typed(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a whole cascade ({error}): calibrate the stages together again") from error


def _typed(content: Mapping[str, Any]) -> SavedCascade:
    """Read the content of the file; raise for anything that `calibrate` does not write."""
    # The stages.
    stages = tuple(SavedStage(**stage) for stage in content["stages"])
    for stage in stages:
        are_texts = all(isinstance(value, str) for value in asdict(stage).values())
        if not are_texts or stage.kind not in KINDS:
            raise ValueError("a stage is not one")
    machines = [stage for stage in stages if stage.kind != PERSON]
    if len(machines) not in LEVELS or PERSON in [stage.kind for stage in stages[:-1]]:
        raise ValueError("its stages are not those of a cascade")

    # Thresholds and shares.
    fit = dict(content["fit"])
    if content["digest"] != _digest(fit):
        raise ValueError("its thresholds, or what they promise, were changed")
    thresholds = tuple(_number(value) for value in fit.pop("thresholds"))
    shares = tuple(_shares(share) for share in fit.pop("stages"))
    if len(thresholds) != len(machines) or len(shares) != len(machines):
        raise ValueError("it has not a threshold for each stage")
    rows = tuple(int(_number(count)) for count in fit.pop("rows"))
    numbers = {name: _number(value) for name, value in fit.items()}
    typed_fit = CascadeFit(thresholds=thresholds, stages=shares, rows=rows, **numbers)

    prices = content["prices"]
    if prices is not None:
        prices = tuple(_number(price) for price in prices)
    texts = [_texts(content[name], name) for name in ("columns", "sentences")]
    return SavedCascade(stages, typed_fit, prices, *_texts([content["unit"]], "unit"), *texts)


def _digest(fit: Mapping[str, Any]) -> str:
    """Return a digest of thresholds and promise as JSON has them."""
    return hashlib.sha256(json.dumps(fit, sort_keys=True).encode()).hexdigest()


def _shares(share: Mapping[str, Any]) -> StageShares:
    values = {name: _number(value) for name, value in share.items() if value is not None}
    return StageShares(**{"wrong": None} | values)


def _number(value: Any) -> float:
    """Read a number, or the name of an infinity."""
    if value in ("inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{repr(value)[:40]} is not a number")
    return float(value)


def _texts(values: Sequence[Any], name: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} is not a list of texts")
    return tuple(values)


# Where stages are


def file_of(file: str | os.PathLike) -> Path:
    """Return the file of a cascade, which may be named by its folder."""
    path = Path(file)
    return path if path.suffix == ".json" else path / CASCADE_FILE


def saved_stage(stage: Stage, folder: Path) -> SavedStage:
    """Return a stage as it is saved in a folder."""
    if isinstance(stage, FunctionStage):
        return SavedStage("function", stage.name, stage.place)
    if stage.source is None:
        raise ValueError(f"stage {stage.name} is a model in memory: save it with its processor, and pass its folder")
    if not Path(stage.source).is_dir():
        return SavedStage("hub", stage.name, stage.source, stage.digest())
    relative = os.path.relpath(os.path.realpath(stage.source), os.path.realpath(folder))
    return SavedStage("folder", stage.name, Path(relative).as_posix(), stage.digest())


def sources_of(saved: SavedCascade, file: Path, then: Sequence[str] | None) -> list[str]:
    """Return where each stage is: where the file says, or behind the first, where `then` says."""
    folder = os.path.realpath(file.parent)
    sources = []
    for stage in saved.stages:
        is_folder = stage.kind == "folder"
        sources.append(os.path.normpath(os.path.join(folder, stage.source)) if is_folder else stage.source)
    if then is None:
        return sources

    # In place of a function no model can be named, nor in place of a person.
    behind = saved.stages[1:]
    fits = len(then) == len(behind)
    for place, (stage, name) in enumerate(zip(behind, then, strict=False), start=1):
        if stage.kind in ("function", PERSON) or name == PERSON:
            fits = fits and name == stage.name
        else:
            sources[place] = name
    if not fits:
        names = ", ".join(stage.name for stage in behind)
        raise ValueError(
            f"{file} is of {saved.stages[0].name} then {names}, not then {', '.join(then)}: calibrate these together"
        )
    return sources
