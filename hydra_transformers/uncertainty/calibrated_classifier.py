"""A classifier or baseline with the decision that `calibrate` fitted for it, saved in one file beside the model."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor, nn
from transformers.utils import cached_file

from .._io.files import parse_json, write_atomically
from ..data.prediction import answer_of, device_of, zero_shot_in
from ..models.decision import Decision
from ..models.modeling_hydra import HydraClassifierOutput
from .decision_settings import check_settings
from .features import AnswerReader


FILE_NAME = "decision.safetensors"


class OtherClassesError(ValueError):
    """A decision about the classes of other prompts than the model's."""

    def __init__(self, classes: list[str] | None):
        named = (
            "those of other prompts" if classes is None else ", ".join(classes[:10]) + (", ..." * (len(classes) > 10))
        )
        super().__init__(
            f"the decision is about other classes ({named}): pass a model with these, or calibrate it anew"
        )


class CalibratedClassifier(nn.Module):
    """Any classifier or baseline with a decision: its outputs have `logits` and `member_logits` divided by the temperature,
    `detector_score`, `abstain` and `prediction_set`. `calibrate` makes one."""

    def __init__(self, model: nn.Module, decision: Decision):
        super().__init__()
        if prompts_of(model).get("prompts") != decision.settings.get("prompts"):
            raise OtherClassesError(decision.settings.get("classes"))
        self.model, self.decision = model, decision
        self.reader = [AnswerReader(model, decision.reads_features)]  # in a list: no part of this module
        self.train(model.training)

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        member_logits, features = self.reader[0](inputs)
        if self.training or not self._has_its_weights():
            return answer_of(self.model, member_logits)
        decided = vars(self.decision(member_logits, features))
        answer = answer_of(self.model, decided.pop("member_logits"))
        for name, tensor in decided.items():
            answer[name] = tensor
        return answer

    def _apply(self, fn: Any, recurse: bool = True) -> "CalibratedClassifier":
        super()._apply(fn, recurse)
        # The reader's copy of the model would keep the buffers from before.
        self.reader = [AnswerReader(self.model, self.decision.reads_features)]
        return self

    @torch.compiler.assume_constant_result  # as a Hydra's
    def _has_its_weights(self) -> bool:
        return self.decision.is_current(self.model)

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes the decision, not the model, into a folder, such as the one the model was saved to: one file,
        `decision.safetensors`, with the settings in its metadata."""
        self.decision.compare(self.model)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.decision.state_dict().items()}
        metadata = {"format": "pt", "decision": json.dumps(self.decision.settings)}
        return write_atomically(Path(folder) / FILE_NAME, format_tensors(tensors, metadata=metadata))

    @staticmethod
    def is_saved_in(folder: str | os.PathLike) -> bool:
        """Whether a folder, or a repository of the Hub, holds a decision beside its model."""
        return _saved(folder) is not None

    @staticmethod
    def classes_saved_in(folder: str | os.PathLike) -> list[str] | None:
        """The names of the classes that a saved decision is about; None where they are the model's own."""
        settings, _ = _read(folder)
        check_settings(settings, math.inf)
        return settings.get("classes")

    @classmethod
    def load(cls, model: nn.Module, folder: str | os.PathLike) -> "CalibratedClassifier":
        """The model with the decision that was saved in `folder`, or in a repository of the Hub."""
        settings, tensors = _read(folder)
        try:
            decision = Decision(settings, num_parameters(model))
            decision.load_state_dict(tensors)
            decision.check_loaded()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{folder} holds no decision that can be read: {error}") from error
        return cls(model, decision.to(device_of(model)))


def prompts_of(model: nn.Module) -> dict[str, Any]:
    """What identifies the classes of a zero-shot classifier: their names, and a digest of the prompts' tokens."""
    zero_shot = zero_shot_in(model)
    if zero_shot is None:
        return {}
    tokens = zero_shot.class_prompts["input_ids"]
    is_padding = zero_shot.class_prompts.get("attention_mask", torch.ones_like(tokens)) == 0
    kept = [row[~padded].tolist() for row, padded in zip(tokens, is_padding, strict=True)]
    return {"classes": zero_shot.class_names, "prompts": hashlib.sha256(json.dumps(kept).encode()).hexdigest()}


def num_parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _saved(folder: str | os.PathLike) -> Path | None:
    if Path(folder).is_dir():
        return Path(folder) / FILE_NAME if (Path(folder) / FILE_NAME).is_file() else None
    found = cached_file(str(folder), FILE_NAME, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _read(folder: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and the tensors of a saved decision."""
    path = _saved(folder)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {FILE_NAME}: save a CalibratedClassifier there first")
    try:
        with safe_open(path, "pt") as opened:
            settings = parse_json((opened.metadata() or {})["decision"].encode())
            return dict(settings), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"{path} is no whole decision ({error}): calibrate and save it again") from error
