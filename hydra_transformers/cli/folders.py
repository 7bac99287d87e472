"""Models, members and processors in folders: found, loaded, and claimed by a step."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BertForSequenceClassification,
    CLIPModel,
    PreTrainedConfig,
    PreTrainedModel,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from .. import HydraBertForSequenceClassification, HydraCLIPModel, HydraViTForImageClassification
from ..files import write_atomically
from .problems import CommandError, access_to


MODEL_CLASSES = {
    "vit": ViTForImageClassification,
    "bert": BertForSequenceClassification,
    "clip": CLIPModel,
    "hydra_vit": HydraViTForImageClassification,
    "hydra_bert": HydraBertForSequenceClassification,
    "hydra_clip": HydraCLIPModel,
}
PROCESSOR_CLASSES = {"vit": AutoImageProcessor, "bert": AutoTokenizer, "clip": AutoProcessor}
# Older versions of Transformers ask for torchvision even where Pillow would do.
WITHOUT_TORCHVISION = {AutoImageProcessor: ViTImageProcessorPil}
CIRCUITS = "circuits"


def load_config(name: str) -> PreTrainedConfig:
    """The config of a model by Hub name or folder, of a kind this package knows."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        if member_folders(path):
            raise CommandError(
                f"{name} holds members, no model: fuse them first with `hydra-transformers fuse {name}`"
            )
        raise CommandError(f"the folder {name} holds no model: it has no config.json")
    if not path.exists() and name.startswith((".", "/", "~")):
        raise CommandError(f"there is no folder {name}")
    with access_to(name, "model"):
        try:
            config = AutoConfig.from_pretrained(name)
        except ValueError as error:
            raise CommandError(f"{name} is no model that Transformers knows: {str(error).splitlines()[0]}") from error
    if config.model_type not in MODEL_CLASSES:
        raise CommandError(f"{name} is a {config.model_type}: pass a {', '.join(MODEL_CLASSES)} model")
    return config


def load_model(name: str, device: str = "cpu") -> PreTrainedModel:
    """A classifier or CLIP model by Hub name or folder, ready to predict; one with untrained parts is refused."""
    model_class = MODEL_CLASSES[load_config(name).model_type]
    with access_to(name, "model"):
        model, found = model_class.from_pretrained(name, output_loading_info=True)
    missing = sorted(found["missing_keys"])
    if missing:
        raise CommandError(f"{name} has no {missing[0]}: pass a model that is trained for classification")
    return model.to(device).eval()


def load_processor(name: str, config: PreTrainedConfig) -> Any:
    """The image processor, tokenizer, or for CLIP both in one, that was saved with a model."""
    processor_class = PROCESSOR_CLASSES[config.model_type.removeprefix("hydra_")]
    try:
        with access_to(name, "model"):
            try:
                return processor_class.from_pretrained(name)
            except ImportError:
                return WITHOUT_TORCHVISION[processor_class].from_pretrained(name)
    except (CommandError, ValueError) as error:
        if not Path(name).exists() and isinstance(error, CommandError):
            raise
        what = processor_class.__name__.removeprefix("Auto")
        raise CommandError(
            f"{name} has no {what} saved with it, or one that needs a missing package: name another model's with "
            f"--processor ({' '.join(str(error).split())[:120]})"
        ) from error


def member_folders(folder: Path) -> list[Path]:
    """`member-0`, `member-1`, ... of a folder, in order."""
    found = [path for path in folder.glob("member-*") if re.fullmatch(r"member-\d+", path.name)]
    return sorted((path for path in found if (path / "config.json").exists()), key=_member_number)


def _member_number(path: Path) -> int:
    return int(path.name.removeprefix("member-"))


def members_in(folder: Path) -> list[Path]:
    """The member folders of a step's output; refuses a folder that has none, or that lacks one."""
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder}: pass the output of `hydra-transformers prune`")
    members = member_folders(folder)
    if not members:
        raise CommandError(f"{folder} holds no members: pass the output of `hydra-transformers prune` or `finetune`")
    if [_member_number(path) for path in members] != list(range(len(members))):
        raise CommandError(
            f"{folder} lacks a member, it has {', '.join(path.name for path in members)}: run its step again"
        )
    return members


def check_is_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} exists already: pass another --output, or remove it")


def claim(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Takes a folder for a step with these settings, or refuses one in which a step with others made something."""
    settings = json.loads(json.dumps(settings))
    record = folder / file
    if record.exists() and any(path != record for path in folder.iterdir()):
        found = json.loads(record.read_text())
        for name, value in settings.items():
            if found.get(name) != value:
                raise CommandError(
                    f"{folder} was made with another {name} ({found.get(name)!r}, now {value!r}): pass another --output, "
                    "or remove it"
                )
        return
    if not record.exists():
        check_is_new(folder)
    write_atomically(record, json.dumps(settings, indent=1) + "\n")


def copy_circuits(source: Path, target: Path) -> None:
    if (source / CIRCUITS).is_dir() and not (target / CIRCUITS).exists():
        shutil.copytree(source / CIRCUITS, target / CIRCUITS)
