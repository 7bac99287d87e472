"""Models, members and processors in folders: found, loaded, and claimed by a step."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .._io.files import remove_leftovers, write_atomically
from ..baselines import Baseline
from ..baselines.baseline import MODEL_FOLDER
from ..data.processors import find_processor
from ..models.auto import HEADS, check_model_exists, load_trained
from ..training.run_folders import FINISHED, RUN
from .errors import access_to


# What a step was asked for, in its output folder: among others the number of "members".
PRUNE_SETTINGS, FINETUNE_SETTINGS, FUSE_SETTINGS = "prune.json", "finetune.json", "fuse.json"


def load_config(name: str) -> PreTrainedConfig:
    """The config of a model by Hub name or folder, of a kind this package knows; of a baseline that of the model inside."""
    path = Path(name)
    inside = {"subfolder": MODEL_FOLDER} if is_baseline(name) else {}
    if path.is_dir() and not inside and not (path / "config.json").exists():
        if member_folders(path):
            raise ValueError(f"{name} holds members, no model: fuse them first with `hydra-transformers fuse {name}`")
        raise ValueError(f"the folder {name} holds no model: it has no config.json")
    with access_to(name, "model"):
        try:
            config = AutoConfig.from_pretrained(name, **inside)
        except ValueError as error:
            raise ValueError(f"{name} is no model that Transformers knows: {str(error).splitlines()[0]}") from error
    if config.model_type not in HEADS:
        raise ValueError(f"{name} is a {config.model_type}: pass a {', '.join(HEADS)} model")
    return config


def load_model(name: str, device: str = "cpu") -> PreTrainedModel | Baseline:
    """A classifier, CLIP or SigLIP model or baseline by Hub name or folder, ready to predict; one with untrained parts is refused."""
    load_config(name)  # has the clearer sentences
    with access_to(name, "model"):
        return (Baseline.from_pretrained(name) if is_baseline(name) else load_trained(name)).to(device)


def is_baseline(name: str) -> bool:
    """Whether a folder, or a repository of the Hub, holds a baseline around a model."""
    check_model_exists(name)
    with access_to(name, "model"):
        return Baseline.is_saved_in(name)


def check_can_be_published(config: PreTrainedConfig, name: str) -> None:
    """Refuses what no card describes."""
    if not is_baseline(name):
        check_is_hydra(config, name)


def check_is_hydra(config: PreTrainedConfig, name: str) -> None:
    if not config.model_type.startswith("hydra_"):
        raise ValueError(
            f"{name} is a plain {config.model_type}: pass a Hydra, the output of `hydra-transformers fuse`"
        )


def check_same_processors(names: Sequence[str], configs: Sequence[PreTrainedConfig], first: Any) -> None:
    """Refuses models whose inputs are prepared differently, as far as that can be told: a model may come without a processor.

    first: the processor of the first of them, which will serve all
    """
    expected = _preparation(first)
    for name, config in zip(names[1:], configs[1:], strict=True):
        processor = find_processor(name, config)
        found = {} if processor is None else _preparation(processor)
        differing = [key for key in expected if key in found and found[key] != expected[key]]
        if differing:
            raise ValueError(
                f"{name} reads its inputs otherwise than {names[0]} ({differing[0]} differs): pass models of one "
                "pre-trained model, or say with --processor which one serves all"
            )


def _preparation(processor: Any) -> dict[str, Any]:
    """What decides how an image, a text or a sound becomes numbers; not who does it."""
    if hasattr(processor, "image_processor"):
        return _preparation(processor.image_processor) | _preparation(processor.tokenizer)
    if hasattr(processor, "get_vocab"):
        settings = {name: getattr(processor, name, None) for name in ("do_lower_case", "padding_side")}
        return {"vocabulary": processor.get_vocab(), "special tokens": processor.special_tokens_map, **settings}
    kinds = ("do_", "image_mean", "image_std", "size", "crop_size", "resample", "rescale_factor")
    kinds += ("sampling_rate", "num_mel_bins", "max_length", "mean", "std")  # of sounds
    return {name: value for name, value in processor.to_dict().items() if name.startswith(kinds) and value is not None}


def member_folders(folder: Path) -> list[Path]:
    """`member-0`, `member-1`, ... of a folder, in order."""
    found = [path for path in folder.glob("member-*") if re.fullmatch(r"member-\d+", path.name)]
    return sorted((path for path in found if (path / "config.json").exists()), key=_member_number)


def _member_number(path: Path) -> int:
    return int(path.name.removeprefix("member-"))


def holds_members(folder: Path) -> bool:
    """Whether a folder is the output of a step, and no model."""
    steps = (PRUNE_SETTINGS, FINETUNE_SETTINGS)
    is_model = (folder / "config.json").exists()
    return not is_model and (bool(member_folders(folder)) or any((folder / step).exists() for step in steps))


def models_named(names: Sequence[str]) -> list[str]:
    """The models that a command was given: each by folder or Hub name, or all of them by the folder of an earlier step."""
    if len(names) == 1 and holds_members(Path(names[0])):
        return [str(folder) for folder in members_in(Path(names[0]))]
    return list(names)


def are_fine_tunings(folder: Path) -> bool:
    """Whether the members in a folder, or of the Hydra in it, are several fine-tunings, as the records of steps tell."""
    found = {
        file: read_settings(folder / file)
        for file in (PRUNE_SETTINGS, FINETUNE_SETTINGS, FUSE_SETTINGS)
        if (folder / file).exists()
    }
    return any(settings.get("fine_tunings") for settings in found.values()) or isinstance(
        found.get(PRUNE_SETTINGS, {}).get("model"), list
    )


def digest_of_names(names: Sequence[str]) -> str:
    """Knows members again by where they lie, without saying where: a Hydra's folder may be published."""
    places = [str(Path(name).resolve()) if Path(name).exists() else name for name in names]
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


def members_in(folder: Path) -> list[Path]:
    """The member folders of a step's output; refuses a folder that has none, that lacks one, or of a step that was cut off."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: pass the output of `hydra-transformers prune`")
    members = member_folders(folder)
    step = next((file for file in (FINETUNE_SETTINGS, PRUNE_SETTINGS) if (folder / file).exists()), None)
    wanted = None if step is None else read_settings(folder / step).get("members")
    there = ", ".join(path.name for path in members) or "none"
    if step is None and not members:
        raise ValueError(f"{folder} holds no members: pass the output of `hydra-transformers prune` or `finetune`")
    numbers = [_member_number(path) for path in members]
    if numbers != list(range(len(members) if wanted is None else wanted)):
        of_all = "" if wanted is None else f" of {wanted}"
        again = "its step" if step is None else f"`hydra-transformers {step.removesuffix('.json')}`"
        raise ValueError(
            f"{folder} lacks a member, it has {there}{of_all}: run {again} again with the same arguments, it goes on where it "
            "was"
        )
    for path in folder.glob("member-*"):
        if (path / RUN).exists() and not (path / FINISHED).exists():
            raise ValueError(
                f"{path} is not trained to its end: run its fine-tuning again with the same arguments, it goes on where it was"
            )
    return members


def check_is_new(folder: Path) -> None:
    remove_leftovers(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: pass another --output, or remove it")


def check_takes_files(folder: Path) -> None:
    """Refuses, before any work, a folder that could not be made or written into."""
    place = Path(os.path.realpath(folder))
    there = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written into ({error.strerror}: {there}): pass another --output"
        ) from error


def claim(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Takes a folder for a step with these settings, or refuses one in which a step with others made something."""
    settings = json.loads(json.dumps(settings))
    record = folder / file
    remove_leftovers(folder)
    if record.exists() and any(path != record for path in folder.iterdir()):
        found = read_settings(record)
        for name, value in settings.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{folder} was made with another {name} ({found.get(name)!r}, now {value!r}): pass another --output, "
                    "or remove it"
                )
        return
    if not record.exists():
        check_is_new(folder)
    check_takes_files(folder)
    write_atomically(record, json.dumps(settings, indent=1) + "\n")


def claim_for_training(folder: Path, source: Path, members: int, fine_tunings: bool) -> None:
    """Takes a folder for the fine-tuning of `members` members, or refuses one that holds anything else.

    fine_tunings: whether they do not come from one backbone
    """
    if folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is where the members are read from: pass another --output")
    remove_leftovers(folder)
    record = folder / FINETUNE_SETTINGS
    trained = [path for path in folder.glob("member-*") if path.is_dir() and any(path.iterdir())]
    others = [path for path in trained if not (path / RUN).exists()]
    if others:
        raise ValueError(f"{others[0]} holds something else than a fine-tuning: pass another --output, or remove it")
    if not (record.exists() or trained):
        check_is_new(folder)
    if trained and record.exists() and read_settings(record).get("members") != members:
        raise ValueError(
            f"{folder} was made of another number of members ({read_settings(record).get('members')}, now {members}): pass "
            "another --output, or remove it"
        )
    check_takes_files(folder)
    write_atomically(record, json.dumps({"members": members, "fine_tunings": fine_tunings}) + "\n")


def read_settings(record: Path) -> dict[str, Any]:
    try:
        settings = json.loads(record.read_text())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{record} is broken, so nobody knows what {record.parent} is: make it again")
    return settings
