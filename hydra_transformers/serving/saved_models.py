"""Loads models from folders and the Hub as they were saved, with their decisions."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .._io.access import access_to
from ..data.processors import class_prompts, load_processor
from ..data.zero_shot import ZeroShotClassifier
from ..model_info import ModelInfo
from ..models import auto
from ..models.adapters import is_adapter_folder
from ..models.auto import check_model_exists, check_type_is_supported, load_trained
from ..models.task import config_inside
from ..uncertainty import CalibratedClassifier
from ..uncertainty.tasks import task_fit_of


def load_config(name: str) -> PreTrainedConfig:
    """Load the config of a supported model by Hub name or folder."""
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{name} is a file: pass the folder or Hub name of a model")
    check_model_exists(name)
    if path.is_dir() and not _holds_model(path):
        if member_folders(path):
            raise ValueError(f"{name} holds members, not a model: fuse them first: `hydra-transformers fuse {name}`")
        raise ValueError(f"the folder {name} holds no model: it has no config.json")
    with access_to(name, "model"):
        try:
            config = auto.config_of(name)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"Transformers does not know the model {name}: {reason}") from error
    check_type_is_supported(config, name)
    return config


def load_model(name: str, device: str = "cpu") -> PreTrainedModel:
    """Load a trained classifier, CLIP or SigLIP model by Hub name or folder, ready to predict."""
    return _load_trained(name, load_config(name), device)


def _load_trained(name: str, config: PreTrainedConfig, device: str, keep_decision: bool = True) -> PreTrainedModel:
    with access_to(name, "model"):
        return load_trained(name, config, keep_decision).to(device)


@dataclass(frozen=True)
class OpenModel:
    """A saved model that was looked at once. Its weights are loaded when they are asked for.

    Attributes:
        name (`str`): its folder, or its name on the Hub.
        info (`ModelInfo`): what it is.
        processor: its tokenizer, image processor, feature extractor or pair.
    """

    name: str
    info: ModelInfo
    processor: Any

    def load(self, device: str = "cpu") -> PreTrainedModel:
        """Load the model itself, ready to predict."""
        return _load_trained(self.name, self.info.config, device)

    def load_to_calibrate(self, device: str = "cpu") -> PreTrainedModel:
        """Load the model, for which `calibrate` makes a decision.

        An earlier decision that is damaged is left out, with a note.
        """
        try:
            return self.load(device)
        except ValueError as error:
            if not str(error).startswith("decision"):
                raise
            print(f"note: the earlier calibration of {self.name} is dropped: {error}", file=sys.stderr)
        return _load_trained(self.name, self.info.config, device, keep_decision=False)

    def as_classifier(self, model: nn.Module, class_names: Sequence[str] | None) -> nn.Module:
        """Return two towers as a classifier of these classes; other models as they are."""
        prompts = class_prompts(self.info, self.processor, class_names)
        return model if prompts is None else ZeroShotClassifier(model, prompts, class_names)

    def load_with_decision(self, device: str | None = None) -> nn.Module:
        """Load the model with the decision that lies beside it, if there is one.

        Two towers become a classifier if they were calibrated as one.

        Args:
            device (`str`, *optional*): by default cuda where there is one, otherwise cpu.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model = self.load(device)
        if not CalibratedClassifier.is_saved_in(self.name):
            return model

        # A decision beside the model, for models that are no Hydras.
        classes = CalibratedClassifier.classes_saved_in(self.name)
        if classes is not None:
            model = self.as_classifier(model, classes)
        model = CalibratedClassifier.load(model, self.name).eval()
        if task_fit_of(model).name == "regression":  # the config of a model with one output may not say so
            config_inside(model).problem_type = "regression"
        return model


def open_model(name: str, processor: Any = None) -> OpenModel:
    """Look at a saved model: its config, its task, its processor.

    Args:
        name (`str`): a folder, or a name on the Hub.
        processor (*optional*): the processor, or its folder or Hub name; by default the model's.
    """
    info = ModelInfo.of(load_config(name))
    if processor is None or isinstance(processor, (str, Path)):
        processor = load_processor(processor or name, info)
    return OpenModel(name, info, processor)


def member_folders(folder: Path) -> list[Path]:
    """Return `member-0`, `member-1`, ... of a folder, in order."""
    members = {}
    for path in folder.glob("member-*"):
        match = re.fullmatch(r"member-(\d+)", path.name)
        if match is not None and _holds_model(path):
            members[path] = int(match[1])
    return sorted(members, key=members.__getitem__)


def _holds_model(folder: Path) -> bool:
    """Whether a folder has a model, or an adapter of one."""
    return (folder / "config.json").exists() or is_adapter_folder(folder)
