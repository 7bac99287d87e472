"""The base class of baselines built around one Transformers model."""

import inspect
import json
import math
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .._io.files import parse_json, write_atomically, written_whole
from ..cost import inputs_for, multiply_adds_of
from ..data.prediction import answer_of, device_of
from ..fusion import without_weights
from ..models import auto
from ..models.configuration_hydra import set_problem_type
from ..models.modeling_hydra import HydraClassifierOutput, check_labels, mean_loss, watch_for_other_loss


SETTINGS_FILE, WEIGHTS_FILE, MODEL_FOLDER = "baseline.json", "baseline.safetensors", "model"


class Baseline(nn.Module):
    """A model that answers with `member_logits`, and is trained, evaluated, calibrated, saved and published like a Hydra.

    A subclass

    - takes the model first, then arguments that JSON can hold, and passes all of them on:
      `super().__init__(model, num_members=num_members)`. If it changes or trains the model, it passes on a copy;
    - creates its own parameters and buffers in `__init__`, with shapes that depend on the model and the arguments alone:
      loading and counting build it again;
    - computes `member_logits(**inputs)`, (batch, members, classes), from the inputs that the model's forward names;
    - describes itself in `summary`, which opens its model card; `{members}` becomes their number. `usage` is example code
      for the card, with REPO for the repository, where the usual code for classifiers does not fit.

    It may override `loss`, `num_members` and, if it replaces parts of the model, `plain_model`. It is saved as
    `baseline.json` (class and arguments), `baseline.safetensors` (weights that `plain_model` does not have) and the folder
    `model` (`plain_model`, as Transformers saves it).
    """

    summary: str
    usage: str | None = None
    classes: ClassVar[dict[str, type["Baseline"]]] = {}  # by name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Baseline.classes[cls.__name__] = cls

    def __init__(self, model: PreTrainedModel, **arguments: Any):
        super().__init__()
        check_is_plain(model)
        json.dumps(arguments)  # fail now, not when saving after the training
        self.model = model
        self.arguments = arguments
        parameters = inspect.signature(model.forward).parameters.values()
        self.reads = frozenset(each.name for each in parameters if each.kind is not each.VAR_KEYWORD) - {"labels"}

    @property
    def num_members(self) -> int:
        return self.arguments.get("num_members", 1)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    # Trainer keeps the columns that forward names.
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        input_values: Tensor | None = None,
        input_features: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> HydraClassifierOutput:
        """`member_logits` (batch, members, classes), `logits` (batch, classes), and with labels the `loss`.

        num_items_in_batch: divides the summed loss in place of the batch size; Trainer passes it
        inputs: others that the model's forward names
        """
        inputs |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "pixel_values": pixel_values,
            "input_values": input_values,
            "input_features": input_features,
        }
        given = {name: value for name, value in inputs.items() if value is not None}
        read = {name: value for name, value in given.items() if name in self.reads}
        if not read:
            raise ValueError(
                f"{type(self.model).__name__} takes none of the batch's entries ({', '.join(given) or 'none'}): it reads "
                f"{', '.join(sorted(self.reads))}"
            )
        return self.outputs(read, labels, num_items_in_batch)

    def outputs(
        self, inputs: dict[str, Tensor], labels: Tensor | None, num_items_in_batch: Tensor | int | None
    ) -> HydraClassifierOutput:
        """What `forward` returns, for the inputs that the model reads."""
        output = answer_of(self.model, self.member_logits(**inputs))
        if labels is not None:
            count = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            output.loss = self.loss(output.member_logits, labels, **count)
        elif self.training and self.num_members > 1:
            reason = f"each member of a {type(self).__name__} has a loss of its own"
            watch_for_other_loss(output.logits, num_items_in_batch is not None, reason, otherwise="")
        return output

    def member_logits(self, **inputs: Tensor) -> Tensor:
        """(batch, members, classes)"""
        raise NotImplementedError

    def loss(self, member_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """The mean over members of the model's own loss."""
        set_problem_type(self.config)
        check_labels(labels, member_logits, self.config.problem_type)
        return mean_loss(self.model.loss_function, labels, member_logits.unbind(dim=1), self.config, **kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.model.gradient_checkpointing_enable(**kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Tied weights are copied: Trainer saves with safetensors, which refuses shared memory."""
        state, seen = super().state_dict(*args, **kwargs), set()
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor) or tensor.requires_grad or tensor.is_meta or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage().data_ptr()
            if storage in seen:
                state[name] = tensor.clone()
            seen.add(storage)
        return state

    def plain_model(self) -> PreTrainedModel:
        """The model in a form that Transformers can save and load."""
        return self.model

    def own_weights(self) -> dict[str, Tensor]:
        """The parameters and buffers that `plain_model` does not have."""
        of_model = {f"model.{name}" for name in self.plain_model().state_dict()}
        return {name: tensor for name, tensor in self.state_dict().items() if name not in of_model}

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Other files in the folder, such as a processor's, stay."""
        folder, plain = Path(folder), self.plain_model()
        _model_class(type(plain).__name__, folder)
        own = {name: tensor.detach().contiguous().cpu() for name, tensor in self.own_weights().items()}
        settings = {
            "baseline": type(self).__name__,
            "arguments": self.arguments,
            "model_class": type(plain).__name__,
        }
        # The settings file is removed first and written last, so a folder that has it is complete.
        (folder / SETTINGS_FILE).unlink(missing_ok=True)
        with written_whole(folder / MODEL_FOLDER) as unfinished:
            plain.save_pretrained(unfinished)
        write_atomically(folder / WEIGHTS_FILE, save(own, metadata={"format": "pt"}))
        write_atomically(folder / SETTINGS_FILE, json.dumps(settings, indent=1) + "\n")

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike, revision: str | None = None) -> "Baseline":
        """Loads a baseline of any imported subclass from a folder or a Hub repository, in eval mode."""
        folder = Path(name)
        if not folder.is_dir():
            if str(name).startswith((".", "/", "~")):
                raise FileNotFoundError(
                    f"there is no folder {name}: pass one that save_pretrained wrote, or a Hub name"
                )
            folder = Path(snapshot_download(str(name), revision=revision))
        settings = _read_settings(folder)
        found = Baseline.classes.get(settings["baseline"])
        if found is None:
            raise ValueError(
                f"{name} is a {settings['baseline']}, which is not known here: import its class first (known are "
                f"{', '.join(sorted(Baseline.classes))})"
            )
        if not issubclass(found, cls):
            raise ValueError(f"{name} is a {found.__name__}: load it with {found.__name__}.from_pretrained")
        model, loading = _model_class(settings["model_class"], folder).from_pretrained(
            folder / MODEL_FOLDER, dtype="auto", output_loading_info=True, local_files_only=True, use_safetensors=True
        )
        baseline = found(model, **settings["arguments"])
        own = load_file(folder / WEIGHTS_FILE)
        differing = {*loading["missing_keys"], *(set(baseline.own_weights()) ^ set(own))}
        if differing:
            raise ValueError(f"{folder} and its baseline do not agree on {min(differing)}: save the baseline again")
        baseline.load_state_dict(own, strict=False, assign=True)  # assigning keeps the dtypes of the file
        return baseline.to(device_of(model)).eval()

    @staticmethod
    def is_saved_in(name: str | os.PathLike) -> bool:
        """Whether a folder or a Hub repository holds a baseline."""
        if Path(name).is_dir():
            return (Path(name) / SETTINGS_FILE).is_file()
        errors = ("gated_repo", "missing_entries", "connection_errors")
        quietly = {f"_raise_exceptions_for_{error}": False for error in errors}
        return cached_file(str(name), SETTINGS_FILE, **quietly) is not None

    @property
    def input_model(self) -> PreTrainedModel:
        return self.model

    def count_multiply_adds(self) -> int:
        return multiply_adds_of(self.without_weights(), **inputs_for(self, 1, "meta"))

    def without_weights(self) -> "Baseline":
        """The same baseline on the meta device, for counting."""
        model = without_weights(type(self.model), self.config)
        with torch.device("meta"):
            return type(self)(model, **self.arguments).eval()


def check_is_plain(model: Any, name: str = "model") -> None:
    """Refuses models with PEFT adapters too: only these would be saved."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is a {type(model).__name__}: pass a model of Transformers that is loaded")
    auto.check_has_no_adapters(model, name)


def check_is_classifier(model: Any, name: str = "model") -> None:
    """Refuses models without classes, and Hydras."""
    check_is_plain(model, name)
    kind = type(model).__name__
    if "Classification" not in kind:
        raise TypeError(f"{name} is a {kind}, no classifier: pass a model for classification")
    if "TokenClassification" in kind:
        raise TypeError(f"{name} is a {kind}, which classifies each token: pass a classifier of whole inputs")
    if hasattr(type(model), "backbone_rules"):
        raise TypeError(f"{name} is a {kind}, which has members already: pass a model of Transformers")


def check_is_count(value: Any, name: str = "num_members", least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: pass at least {least}, a whole number")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _model_class(name: str, folder: Path) -> type[PreTrainedModel]:
    """Refuses names of anything but models: the name may come from a stranger's file."""
    found = getattr(transformers, name, None) or getattr(auto, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(f"{folder} cannot hold a {name}, which is no model class of Transformers or this package")
    return found


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {SETTINGS_FILE}, so it holds no baseline, or not all of one")
    try:
        settings = parse_json(path.read_bytes())
        return {name: settings[name] for name in ("baseline", "arguments", "model_class")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is broken ({error}): save the baseline again") from error
