"""Files and folders of commands: which exist, what they hold, and what may be written into them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._io.records import RECORD, read_settings


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..data.loading import PreparedData
    from .options import DataOptions

PRUNE_SETTINGS = "prune.json"  # in a folder of members, pruned or tuned: how many there will be


def check_is_hydra(config: "PreTrainedConfig", name: str) -> None:
    """Raise for the config of another model."""
    if not config.model_type.startswith("hydra_"):
        raise ValueError(f"{name} is a plain {config.model_type}: pass a Hydra, the output of `finetune` or `fuse`")


def models_named(names: Sequence[str]) -> list[str]:
    """Return the models that a command was given.

    names: each by folder or Hub name, or all of them by a folder of members
    """
    from ..serving.saved_models import member_folders

    folder = Path(names[0])
    if len(names) > 1 or (folder / "config.json").exists() or not folder.is_dir():
        return list(names)
    members = member_folders(folder)
    expected = len(members)
    record = folder / PRUNE_SETTINGS
    if record.exists():
        expected = read_settings(record).get("members")
    if len(members) != expected:
        raise ValueError(
            f"{folder} has {len(members)} of {expected} members: run its command again with the same arguments, and "
            "it continues"
        )
    return [str(member) for member in members] or list(names)


def read_members(names: Sequence[str]) -> "tuple[list[str], list[PreTrainedConfig], Any | None]":
    """Return the models that a command was given, their configs, and the processor that all share.

    It is None where the first model has none.
    """
    from ..data.processors import check_same_processors, find_processor
    from ..serving.saved_models import load_config

    names = models_named(names)
    configs = [load_config(name) for name in names]
    processor = find_processor(names[0], configs[0])
    if processor is not None:
        check_same_processors(names, configs, processor)
    return names, configs, processor


def note_training_rows(model: str, data: "DataOptions", rows: "PreparedData") -> None:
    """Print a note where rows may be those that a model was fine-tuned on, or changed since."""
    from ..data.fingerprints import fingerprint_of_labels

    # What the model was trained on, if that is known.
    record = Path(model) / RECORD
    if not record.exists():
        return
    settings = read_settings(record)
    trained_on = settings.get("data")
    if trained_on is None or trained_on not in (data.data, os.path.realpath(data.data)):
        return

    if data.split in ("validation", "test"):
        # The rows that `finetune` left out, unless the data have others now.
        has_changed = data.limit is None and settings["rows"][data.split] != fingerprint_of_labels(rows.labels)
        if has_changed:
            since = f"have changed since {model} was trained on it"
            _note(f"rows of {data.data} {since}: some of these may be training rows")
    else:
        split, _, _ = (rows.split or "train").partition("[")
        if split.startswith("train") or split == settings["split"]:
            advice = "pass --split validation, or --split test"
            _note(f"{model} was trained on rows of {data.data}, so they say too much: {advice}")


def _note(sentence: str) -> None:
    """Print what a user should know, and need not act on."""
    print(f"note: {sentence}", file=sys.stderr)
