"""The base class of baselines around one model of Transformers: answering, training, saving and loading."""

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
    """A baseline around one model of Transformers: an `nn.Module` that answers with `member_logits`, and is trained with
    `Trainer`, judged, calibrated, saved and published like a Hydra.

    A subclass

    - takes the model first, then arguments that JSON can hold, and hands all of them on:
      `super().__init__(model, num_members=num_members, std=std)`. `self.model` is the model, `self.arguments` the rest;
      where the subclass changes or trains the model, it hands on a copy, so that the user's own stays as it is;
    - adds parameters and buffers of its own in `__init__`, of shapes that follow from the model and the arguments alone
      (zeros will do, where a later `fit` fills them): it is made anew, and then gets its weights, when it is loaded or
      counted. It keeps nothing on `self` from one call to the next;
    - answers in `member_logits(**inputs)`: (batch, members, classes). The inputs are those that the model's forward names;
    - says in `summary` what it is, as the sentences with which its card begins; `{members}` stands for their number. Where
      it is not used like a classifier of images or texts, `usage` is the code for the card, with REPO for where it lies.

    It may have its own `loss`, its own `num_members`, and, where it replaces parts of the model, its own `plain_model`.

    Saved, it is a folder with `baseline.json` (its class and arguments), `baseline.safetensors` (the weights that
    `plain_model` does not have) and `model`, where `plain_model` lies as Transformers saves it. `Baseline.from_pretrained`
    loads any of them; a subclass is known by its name once it is imported.
    """

    summary: str
    usage: str | None = None
    classes: ClassVar[dict[str, type["Baseline"]]] = {}  # by name

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Baseline.classes[cls.__name__] = cls

    def __init__(self, model: PreTrainedModel, **arguments: Any):
        super().__init__()
        check_is_plain(model)
        json.dumps(arguments)  # what could not be saved is an error now, not after the training
        self.model = model
        self.arguments = arguments
        parameters = inspect.signature(model.forward).parameters.values()
        self.reads = frozenset(each.name for each in parameters if each.kind is not each.VAR_KEYWORD) - {"labels"}

    @property
    def num_members(self) -> int:
        return self.arguments.get("num_members", 1)

    @property
    def config(self) -> Any:
        """The model's."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    # Trainer takes the columns that forward names, and finds the labels by their name.
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> HydraClassifierOutput:
        """`member_logits` (batch, members, classes), `logits` (batch, classes), and with labels the `loss`.

        num_items_in_batch: what the sum of the losses is divided by, where it is not the batch's own rows; Trainer passes it
        inputs: further ones that the model's forward names
        """
        inputs |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "pixel_values": pixel_values,
            "input_values": input_values,
        }
        given = {name: value for name, value in inputs.items() if value is not None}
        read = {name: value for name, value in given.items() if name in self.reads}
        if not read:
            raise ValueError(
                f"{type(self.model).__name__} takes none of the batch's entries ({', '.join(given) or 'none'}): it reads "
                f"{', '.join(sorted(self.reads))}"
            )
        member_logits = self.member_logits(**read)
        loss = None
        if labels is not None:
            about_sum = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            loss = self.loss(member_logits, labels, **about_sum)
        output = answer_of(self.model, member_logits)
        output.loss = loss
        if labels is None and self.training and self.num_members > 1:
            wanted = f"each member of a {type(self).__name__} has a loss of its own"
            watch_for_other_loss(output.logits, num_items_in_batch is not None, wanted, otherwise="")
        return output

    def member_logits(self, **inputs: Tensor) -> Tensor:
        """What a subclass computes: (batch, members, classes)."""
        raise NotImplementedError

    def loss(self, member_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """The mean of the members' losses, each the model's own. kwargs: `num_items_in_batch`, where Trainer knows it"""
        set_problem_type(self.config)
        check_labels(labels, member_logits, self.config.problem_type)
        return mean_loss(self.model.loss_function, labels, member_logits.unbind(dim=1), self.config, **kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """As Trainer asks for it: less memory in training, for a second forward."""
        self.model.gradient_checkpointing_enable(**kwargs)

    # Saving

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """As of every module. Of tied weights each name has numbers of its own: Trainer saves what is no model of Transformers
        with safetensors, which takes no two names of the same."""
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
        """The model as Transformers can save it and load it again."""
        return self.model

    def own_weights(self) -> dict[str, Tensor]:
        """The parameters and buffers, by name, that `plain_model` does not have."""
        of_model = {f"model.{name}" for name in self.plain_model().state_dict()}
        return {name: tensor for name, tensor in self.state_dict().items() if name not in of_model}

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes all of it into a folder, beside what else is there, such as a processor."""
        folder, plain = Path(folder), self.plain_model()
        _class_named(type(plain).__name__, folder)
        own = {name: tensor.detach().contiguous().cpu() for name, tensor in self.own_weights().items()}
        settings = {
            "baseline": type(self).__name__,
            "arguments": self.arguments,
            "model_class": type(plain).__name__,
        }
        # Comes last and is away meanwhile: a folder that has it is whole.
        (folder / SETTINGS_FILE).unlink(missing_ok=True)
        with written_whole(folder / MODEL_FOLDER) as unfinished:
            plain.save_pretrained(unfinished)
        write_atomically(folder / WEIGHTS_FILE, save(own, metadata={"format": "pt"}))
        write_atomically(folder / SETTINGS_FILE, json.dumps(settings, indent=1) + "\n")

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike, revision: str | None = None) -> "Baseline":
        """The baseline in a folder or in a repository of the Hub, ready to predict, whatever subclass it is of.

        revision: of the repository
        """
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
        model_class = _class_named(settings["model_class"], folder)
        model, loading = model_class.from_pretrained(
            folder / MODEL_FOLDER, dtype="auto", output_loading_info=True, local_files_only=True, use_safetensors=True
        )
        _check_is_whole(folder, loading["missing_keys"])
        baseline = found(model, **settings["arguments"])
        own = load_file(folder / WEIGHTS_FILE)
        _check_is_whole(folder, set(baseline.own_weights()) ^ set(own))
        baseline.load_state_dict(own, strict=False, assign=True)  # assigned, they keep the dtype they were saved in
        return baseline.to(device_of(model)).eval()

    @staticmethod
    def is_saved_in(name: str | os.PathLike) -> bool:
        """Whether a folder, or a repository of the Hub, holds a baseline."""
        if Path(name).is_dir():
            return (Path(name) / SETTINGS_FILE).is_file()
        found = cached_file(
            str(name),
            SETTINGS_FILE,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return found is not None

    @property
    def input_model(self) -> PreTrainedModel:
        return self.model

    def count_multiply_adds(self) -> int:
        return multiply_adds_of(self.without_weights(), **inputs_for(self, 1, "meta"))

    def without_weights(self) -> "Baseline":
        """The same on the meta device, to be counted and not to compute with."""
        model = without_weights(type(self.model), self.config)
        with torch.device("meta"):
            return type(self)(model, **self.arguments).eval()


def check_is_plain(model: Any, name: str = "model") -> None:
    """Refuses what is no model of Transformers, and one with adapters of PEFT: saved, it would be these alone."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is a {type(model).__name__}: pass a model of Transformers that is loaded")
    auto.check_has_no_adapters(model, name)


def check_is_count(value: Any, name: str = "num_members", least: int = 1) -> None:
    """Refuses what is no whole number, or a smaller one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: pass at least {least}, a whole number")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_is_classifier(model: Any, name: str = "model") -> None:
    """Refuses what has no classes of its own, and Hydras, which have members already."""
    check_is_plain(model, name)
    if "Classification" not in type(model).__name__:
        raise TypeError(f"{name} is a {type(model).__name__}, no classifier: pass a model for classification")
    if "TokenClassification" in type(model).__name__:
        raise TypeError(f"{name} is a {type(model).__name__}, which answers for each token: pass a classifier of rows")
    if hasattr(type(model), "backbone_rules"):
        raise TypeError(f"{name} is a {type(model).__name__}, which has members already: pass a model of Transformers")


def _class_named(name: str, folder: Path) -> type[PreTrainedModel]:
    found = getattr(transformers, name, None) or getattr(auto, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(
            f"{folder} cannot be of a {name}, no model of Transformers or this package: it would not load"
        )
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


def _check_is_whole(folder: Path, names: Any) -> None:
    if names:
        raise ValueError(f"{folder} and its baseline do not agree on {min(names)}: save the baseline again")
