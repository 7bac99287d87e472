"""A classifier or baseline with the decision that `calibrate` fitted for it, saved in one file beside the model."""

import hashlib
import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor, nn
from transformers.utils import cached_file

from .._io.files import parse_json, write_atomically
from ..data.prediction import answer_of, device_of
from ..model_info import prompts_in
from ..models.decision import Decision, decision_of
from ..models.modeling_hydra import HydraClassifierOutput
from .features import AnswerReader


FILE_NAME = "decision.safetensors"


class OtherClassesError(ValueError):
    """A decision was fitted for other prompts than the model's."""

    def __init__(self, classes: Sequence[str] | None):
        named = "those of other prompts" if classes is None else ", ".join(classes[:10])
        super().__init__(f"the decision is about other classes ({named}): pass a model with these, or calibrate again")


class CalibratedClassifier(nn.Module):
    """Any classifier or baseline with a decision: its outputs have `logits` and `member_logits` with the temperature,
    `detector_score`, `abstain` and `prediction_set`. Made by `calibrate`.

    Args:
        model (`nn.Module`), decision (`Decision`): the model, which gets a forward hook that notices training, and its decision.
    """

    def __init__(self, model: nn.Module, decision: Decision):
        super().__init__()
        if prompts_of(model).get("prompts") != getattr(decision.settings, "prompts", None):
            raise OtherClassesError(getattr(decision.settings, "classes", None))
        self.model, self.decision = model, decision
        self._make_reader()
        model.register_forward_hook(TrainingWatch(decision))
        self.was_frozen = self._is_frozen()
        self.train(model.training)

    def _make_reader(self) -> None:
        self.reader = [AnswerReader(self.model, self.decision.reads_features)]  # in a list: not a submodule

    def _is_frozen(self) -> bool:
        return not any(weight.requires_grad for weight in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        """inputs: of the model, and `group` (batch,) where it was calibrated by a column, see `Decision.forward`"""
        group = inputs.pop("group", None)
        member_logits, features = self.reader[0](inputs)
        if self.training or not self._has_its_weights():
            return answer_of(self.model, member_logits)
        decided = self.decision(member_logits, features, group)
        return HydraClassifierOutput(**answer_of(self.model, decided.member_logits), **decided.outputs())

    def _apply(self, fn: Any, recurse: bool = True) -> "CalibratedClassifier":
        super()._apply(fn, recurse)
        self._make_reader()  # the old one's copy of the model keeps the buffers from before
        return self

    @torch.compiler.assume_constant_result  # as for a Hydra
    def _has_its_weights(self) -> bool:
        if self.was_frozen != self._is_frozen():  # PEFT freezes a model for its adapters
            self.was_frozen = not self.was_frozen
            self.decision.compare_again()
        return self.decision.is_current(self.model)

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes the decision, not the model, to `decision.safetensors` in a folder, with the settings as metadata."""
        self.decision.compare(self.model)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.decision.state_dict().items()}
        metadata = {"format": "pt", "decision": json.dumps(self.decision.settings.to_dict())}
        return write_atomically(Path(folder) / FILE_NAME, format_tensors(tensors, metadata=metadata))

    @staticmethod
    def is_saved_in(folder: str | os.PathLike) -> bool:
        """Whether a folder, or a repository of the Hub, holds a decision beside its model."""
        return _find(folder) is not None

    @staticmethod
    def classes_saved_in(folder: str | os.PathLike) -> list[str] | None:
        """The class names of a saved decision; None if they are the model's own."""
        classes = _read(folder)[1].get("classes")
        return classes if isinstance(classes, list) and all(isinstance(name, str) for name in classes) else None

    @staticmethod
    def settings_saved_in(folder: str | os.PathLike) -> dict[str, Any]:
        """Return the settings of a saved decision."""
        return _read(folder)[1]

    @classmethod
    def load(cls, model: nn.Module, folder: str | os.PathLike) -> "CalibratedClassifier":
        """The model with the decision saved in `folder`, or in a repository of the Hub."""
        tensors, settings = _read(folder)
        decision = decision_of(settings, sum(weight.numel() for weight in model.parameters()))
        if decision is None:
            raise ValueError(f"{folder} holds a decision of another version: calibrate the model again")
        decision.load_state_dict(tensors)
        decision.check_loaded()
        decision.to(device_of(model)).compare(model)
        return cls(model, decision)


class TrainingWatch:
    """A forward hook: after a forward in training mode, or gradients, a decision compares the model's weights again."""

    def __init__(self, decision: Decision | None):
        self.decision = (lambda: None) if decision is None else weakref.ref(decision)

    def __reduce__(self) -> tuple:
        return TrainingWatch, (None,)  # a copied or pickled model is not the one that is watched

    def __call__(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        decision = self.decision()
        if decision is None:
            return
        if module.training:
            decision.compare_again()
        for value in output.values() if isinstance(output, dict) else ():
            if isinstance(value, Tensor):
                decision.watch(value)


def _find(folder: str | os.PathLike) -> Path | None:
    """The file in a folder, or in a repository of the Hub; None where there is none."""
    if Path(folder).is_dir():
        return Path(folder) / FILE_NAME if (Path(folder) / FILE_NAME).is_file() else None
    path = cached_file(str(folder), FILE_NAME, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def _read(folder: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the settings of a saved decision."""
    path = _find(folder)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {FILE_NAME}: save a CalibratedClassifier there first")
    try:
        with safe_open(path, "pt") as opened:
            settings = dict(parse_json((opened.metadata() or {})["decision"].encode()))
            return {name: opened.get_tensor(name) for name in opened.keys()}, settings  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"{path} is not a whole decision ({error}): calibrate and save it again") from error


def prompts_of(model: nn.Module) -> dict[str, Any]:
    """Identifies the classes of a zero-shot classifier: their names, and a digest of the prompts' tokens."""
    zero_shot = prompts_in(model)
    if zero_shot is None:
        return {}
    tokens = zero_shot.class_prompts["input_ids"]
    is_padding = zero_shot.class_prompts.get("attention_mask", torch.ones_like(tokens)) == 0
    is_padding &= not hasattr(zero_shot.model, "logit_bias")  # SigLIP reads the last token even if it is padding
    kept = [row[~padded].tolist() for row, padded in zip(tokens, is_padding, strict=True)]
    return {"classes": zero_shot.class_names, "prompts": hashlib.sha256(json.dumps(kept).encode()).hexdigest()}
