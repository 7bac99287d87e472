"""The base class of baselines built around one Transformers model."""

import inspect
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from .._io.files import write_atomically
from ..cost import inputs_for, multiply_adds_of
from ..data.prediction import answer_of, device_of
from ..fusion.structure import without_weights
from ..models.auto import check_has_no_adapters, is_hydra_class
from ..models.configuration_hydra import set_problem_type
from ..models.modeling_hydra import HydraClassifierOutput, warn_if_loss_uses_ensemble_logits
from ..models.task import task_of_config


class Baseline(nn.Module):
    """A model that answers with `member_logits`, and is trained, evaluated, calibrated and saved
    like a Hydra.

    A subclass passes the model (a copy, if it changes it) and all its plain arguments on to
    `super().__init__`, creates its parameters and buffers in `__init__` from these alone (counting
    builds it again), and computes `member_logits(**inputs)`, (batch, members, classes), from the
    inputs that the model's forward names. It may override `loss` and `num_members`.

    Args:
        model (`PreTrainedModel`): becomes part of this.
        arguments: those of the subclass, beside the model.
    """

    def __init__(self, model: PreTrainedModel, **arguments: Any):
        super().__init__()
        check_has_no_adapters(model, "model")
        self.model = model
        self.arguments = arguments
        parameters = inspect.signature(model.forward).parameters.values()
        names = frozenset(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)
        self.reads = names - {"labels"}

    @property
    def num_members(self) -> int:
        return self.arguments.get("num_members", 1)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def input_model(self) -> PreTrainedModel:
        return self.model

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
        """Return `member_logits` (batch, members, classes), `logits` (batch, classes), and a
        `loss`.

        The loss needs labels.

        Args:
            input_ids (`Tensor`, *optional*), attention_mask, token_type_ids, position_ids,
                inputs_embeds, pixel_values, input_values, input_features: as the model's forward
                names them; what it does not name is left out.
            labels (`Tensor`, *optional*): as for the model.
            num_items_in_batch (`Tensor` or `int`, *optional*): divides the summed loss in place of
                the batch size; Trainer passes it.
            inputs: others that the model's forward names.
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
        read = {name: value for name, value in inputs.items() if value is not None and name in self.reads}
        return self.outputs(read, labels, num_items_in_batch)

    def outputs(
        self, inputs: dict[str, Tensor], labels: Tensor | None, num_items_in_batch: Tensor | int | None
    ) -> HydraClassifierOutput:
        """Return what `forward` returns, for the inputs that the model reads."""
        output = answer_of(self.model, self.member_logits(**inputs))
        if labels is not None:
            divisor = {}
            if num_items_in_batch is not None:
                divisor["num_items_in_batch"] = num_items_in_batch
            output.loss = self.loss(output.member_logits, labels, **divisor)
        elif self.training and self.num_members > 1:
            reason = f"each member of a {type(self).__name__} has a loss of its own"
            warn_if_loss_uses_ensemble_logits(output.logits, num_items_in_batch is not None, reason)
        return output

    def member_logits(self, **inputs: Tensor) -> Tensor:
        """Return (batch, members, classes)."""
        raise NotImplementedError

    def loss(self, member_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """Return the mean over members of the model's own loss."""
        set_problem_type(self.config)
        logits_of_members = member_logits.unbind(dim=1)
        task = task_of_config(self.config)
        return task.mean_loss(self.model.loss_function, labels, logits_of_members, self.config, **kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Recompute activations of the model in backward; Trainer calls it."""
        self.model.gradient_checkpointing_enable(**kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return all weights; tied ones are copied, for safetensors raises for shared memory."""
        state = super().state_dict(*args, **kwargs)
        seen = set()
        for name, tensor in state.items():
            if tensor.requires_grad or tensor.is_meta or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage().data_ptr()
            if storage in seen:
                state[name] = tensor.clone()
            seen.add(storage)
        return state

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write all weights into `model.safetensors`, as Trainer does.

        A baseline that is made again with the same arguments loads them by `load_state_dict`.

        Args:
            folder (`str` or `os.PathLike`): where to write the file.
        """
        weights = {name: tensor.detach().contiguous().cpu() for name, tensor in self.state_dict().items()}
        write_atomically(Path(folder) / SAFE_WEIGHTS_NAME, save(weights, metadata={"format": "pt"}))

    def count_multiply_adds(self) -> int:
        """Count multiply-adds for one sample."""
        inputs = inputs_for(self, 1, "meta")
        return multiply_adds_of(self.without_weights(), **inputs)

    def without_weights(self) -> "Baseline":
        """Make the same baseline on the meta device, for counting."""
        model = without_weights(type(self.model), self.config)
        with torch.device("meta"):
            return type(self)(model, **self.arguments).eval()


def check_is_classifier(model: Any) -> None:
    """Raise for models without classes, classifiers of tokens, and Hydras."""
    kind = type(model).__name__
    is_plain = isinstance(model, PreTrainedModel) and not is_hydra_class(type(model))
    if not is_plain or "Classification" not in kind or "TokenClassification" in kind:
        raise TypeError(f"model is a {kind}: pass a classifier of whole inputs, as Transformers makes it")


def check_is_count(value: Any, name: str = "num_members", least: int = 1) -> None:
    """Raise for a count that is not a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: pass at least {least}, a whole number")
