"""Output folders of commands: what they hold, and what may be written into them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._io.files import check_takes_files, write_atomically
<<<<<<< HEAD
from ..serving.saved_models import load_config, load_model, member_folders, member_number
from ..training.checkpoints import CHECKPOINTS, is_finished
=======
>>>>>>> 8b3b779 (wip)


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What a command was asked to do, in its output folder.
PRUNE_SETTINGS, FINETUNE_SETTINGS = "prune.json", "finetune.json"


def check_is_hydra(config: "PreTrainedConfig", name: str) -> None:
    if not config.model_type.startswith("hydra_"):
        raise ValueError(
            f"{name} is a plain {config.model_type}: pass a Hydra, the output of `hydra-transformers finetune` or `fuse`"
        )


def models_named(names: Sequence[str]) -> list[str]:
    """The models that a command was given: each by folder or Hub name, or all of them by a folder of members."""
    from ..serving.saved_models import member_folders

    folder = Path(names[0])
    if len(names) > 1 or (folder / "config.json").exists() or not folder.is_dir():
        return list(names)
    members = member_folders(folder)
    record = folder / PRUNE_SETTINGS
    expected = read_settings(record).get("members") if record.exists() else len(members)
    if len(members) != expected:
        raise ValueError(
            f"{folder} has {len(members)} of {expected} members: run its command again with the same arguments, and it "
            "continues"
        )
<<<<<<< HEAD
    for path in folder.glob("member-*"):
        if (path / CHECKPOINTS).exists():
            raise ValueError(
                f"the training of {path} is not finished: run it again with the same arguments, and it continues"
            )
    return members


def are_fine_tunings(folder: Path) -> bool:
    """Whether the members in a folder, or of the Hydra in it, are separate fine-tunings, according to the steps' records."""
    records = [folder / file for file in (PRUNE_SETTINGS, FINETUNE_SETTINGS, FUSE_SETTINGS)]
    found = {record.name: read_settings(record) for record in records if record.exists()}
    of_several = isinstance(found.get(PRUNE_SETTINGS, {}).get("model"), list)
    return of_several or any(settings.get("fine_tunings") for settings in found.values())


def made_by(folder: Path) -> dict[str, Any]:
    """What the steps' records say of how members were made: how many fine-tunings each is the mean of ("averaged"), and whether
    they were tuned jointly with a teacher ("taught")."""
    records = [read_settings(path) for file in (FINETUNE_SETTINGS, FUSE_SETTINGS) if (path := folder / file).exists()]
    return {name: each[name] for each in records for name in ("averaged", "taught") if each.get(name)}


def digest_of_names(names: Sequence[str]) -> str:
    """Identifies members by their folders without naming these: a Hydra's folder may be published."""
    places = [str(Path(name).resolve()) if Path(name).exists() else name for name in names]
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


# Output folders
=======
    return [str(member) for member in members] or list(names)
>>>>>>> 8b3b779 (wip)


def check_is_new(folder: Path) -> None:
    """Refuses, before any work, a folder that holds something or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: pass another --output, or remove it")
    check_takes_files(folder)


def claim(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Records a command's settings in its new folder; refuses one that the command filled with other settings."""
    settings = json.loads(json.dumps(settings, default=str))
    record = folder / file
    if not record.exists():
        check_is_new(folder)
        write_atomically(record, json.dumps(settings, indent=1) + "\n")
        return
    before = read_settings(record)
    for name, value in settings.items():
        if before.get(name) != value:
            raise ValueError(
                f"{folder} was made with {name} {before.get(name)!r}, which now is {value!r}: pass another --output, or "
                "remove it"
            )
    check_takes_files(folder)
<<<<<<< HEAD
    write_atomically(record, json.dumps(settings, indent=1) + "\n")


def claim_for_training(folder: Path, source: Path, members: int, fine_tunings: bool, taught: bool = False) -> None:
    """Claims a folder for fine-tuning.

    fine_tunings: whether the members do not come from one backbone
    taught: whether a Hydra is tuned as a whole, with a teacher
    """
    if folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is where the members are read from: pass another --output")
    trained = [path for path in folder.glob("member-*") if path.is_dir() and any(path.iterdir())]
    for path in trained:
        if not (is_finished(path) or (path / CHECKPOINTS).exists()):
            raise ValueError(f"{path} is not a fine-tuning: pass another --output, or remove it")
    settings = (
        {"members": members, "fine_tunings": fine_tunings} | made_by(source) | ({"taught": True} if taught else {})
    )
    record = folder / FINETUNE_SETTINGS
    if trained and not record.exists():  # `finetune_members` made them
        write_atomically(record, json.dumps(settings))
    claim(folder, FINETUNE_SETTINGS, settings)
=======
>>>>>>> 8b3b779 (wip)


def read_settings(record: Path) -> dict[str, Any]:
    try:
        settings = json.loads(record.read_text())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{record} is broken, so the settings of {record.parent} are unknown: make it again")
    return settings


def note_training_rows(model: str, data: str, split: str | None) -> str | None:
    """A sentence where rows may be those that a model was fine-tuned on."""
    record = Path(model) / FINETUNE_SETTINGS
    trained_on = read_settings(record).get("data") if record.exists() else None
    same = trained_on is not None and Path(trained_on).resolve() == Path(data).resolve()
    is_training = str(split).startswith("train") or (split is None and same and Path(data).is_file())
    if not (same and is_training):
        return None
    return f"{model} was trained on rows of {data}, so they say too much: pass --split validation, or --split test"
