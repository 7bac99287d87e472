"""The predictor: a saved model that predicts for columns of rows.

It serves batch engines, the server and the page.
"""

import io
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .._io.access import in_one_line
from ..data.audio import waveform
from ..data.columns import REMEMBERED
from ..data.groups import group_name
from ..data.prediction import member_logits_of
from ..data.processors import find_processor
from ..model_info import READS, ModelInfo
from ..models.decision import with_groups
from ..models.decision_settings import typed_settings
from ..models.inputs import image_mode, read_image
from ..uncertainty import predict_decisions
from ..uncertainty.features import without_decision
from ..uncertainty.tasks import task_fit_of
from .answerer import Answerer
from .answers import arrow_schema, check_fields
from .saved_models import open_model


SECONDS_FOR_URL = 60.0  # a server that says nothing would hold up all rows


def kind_of(info: ModelInfo, name: str) -> str:
    """Return what a model reads, as `ModelInfo.inputs`; raise where that is not known."""
    if info.config is None:
        raise TypeError(f"model is a {name}, which has no config: pass a classifier of Transformers")
    if info.inputs is None:
        raise ValueError(f"{name} is a {info.config.model_type}: pass a classifier of images, texts or audio")
    return info.inputs


class HydraPredictor(Answerer):
    """A model that maps a dict of columns to a dict of columns.

    Ray Data (`map_batches`) and `datasets.map` expect that. Any number of threads may call it.
    Pickled, it is only its arguments: each process loads the model itself.

        >>> predictor = HydraPredictor("my-calibrated-hydra")
        >>> predictor({"image": ["one.jpg", "two.jpg"]})["label"]

    Args:
        model (`str`, `os.PathLike` or `nn.Module`): a folder or Hub name: the output of `calibrate`
            or `fuse`, any classifier, CLIP or SigLIP model. Or the model itself, which is put into
            eval mode, stays on its device and cannot be pickled.
        processor (*optional*): the tokenizer, image processor or feature extractor, or its folder
            or Hub name; by default the one saved with the model.
        device (`str`, *optional*): by default cuda where there is one, otherwise cpu.
        name (`str`, *optional*): shown by the server and the page; by default the folder's or Hub
            name.
        column (`str` or pair of `str`, *optional*): the one that is read, or two of pairs of texts.
            By default those that the model was fine-tuned on, else "image", "audio" or "text", with
            "text_pair" if there is one.
        candidate_labels (`list[str]`, *optional*): for CLIP and SigLIP: the classes to choose from.
        top_k (`int`, defaults to 5): how many of the likeliest labels `scores` holds; None for all.
        batch_size (`int`, defaults to 32): rows per pass of the model.
    """

    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        processor: Any = None,
        device: str | None = None,
        *,
        name: str | None = None,
        column: str | Sequence[str] | None = None,
        candidate_labels: Sequence[str] | None = None,
        top_k: int | None = 5,
        batch_size: int = 32,
    ):
        # The model: loaded, or as it is given.
        self._arguments: dict[str, Any] | None = None
        if not isinstance(model, nn.Module):
            folder = os.fspath(model)
            self._arguments = {
                "model": folder,
                "processor": processor,
                "device": device,
                "name": name,
                "column": column,
                "candidate_labels": candidate_labels,
                "top_k": top_k,
                "batch_size": batch_size,
            }
            opened = open_model(folder, processor)
            kind_of(opened.info, folder)  # raises its error before anything large is loaded
            if not name and Path(folder).exists():
                name = Path(folder).resolve().name
            name = name or folder
            model = opened.load_with_decision(device)
            processor = opened.processor
        elif device is not None:
            model = model.to(device)
        self.info = info = ModelInfo.of(model)
        kind = kind_of(info, name or type(model).__name__)
        config = info.config
        self.name = name or config.name_or_path or type(model).__name__
        if processor is None:
            processor = find_processor(config.name_or_path, config)
        super().__init__(model.eval(), processor, kind)

        # What it predicts.
        self.config = config  # of the model inside, where one holds another
        self.task = task_fit_of(model)
        self.class_names = None
        if not self.needs_classes:
            self.class_names = info.class_names
        self.columns = dict(self.task.columns)
        if self.kind == "text":
            self.columns["truncated"] = "bool"

        # How it is called.
        self.parameters: dict[str, Any] = {"top_k": top_k}
        if candidate_labels is not None:
            if not self.needs_classes:
                raise ValueError(f"candidate_labels is for CLIP and SigLIP, {self.name} has its own: leave it out")
            self.parameters["candidate_labels"] = list(candidate_labels)
        if isinstance(column, str):
            column = [column]
        self.input_columns = list(column or ())
        self.batch_size = batch_size

        # Two threads cannot use one tokenizer at once, and a pass already takes all cores.
        self._one_at_a_time = threading.Lock()
        self._answered: Any = None  # an input that was answered

    def __reduce__(self) -> tuple[Any, ...]:
        if self._arguments is None:
            raise TypeError(f"the predictor of {self.name} holds a model in memory: save it, and pass its folder")
        return partial(HydraPredictor, **self._arguments), ()

    @property
    def features(self) -> Any:
        """The columns' types as `datasets` names them.

        `map` would guess them from its first rows, where some may be None.
        """
        import datasets

        return datasets.Features.from_arrow_schema(arrow_schema(self.columns | {"error": "string"}))

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Predict for a batch of columns.

        Args:
            batch (`Mapping[str, Sequence]`): columns of equal length, such as {"text": [...]}. An
                image is one of PIL, an array of 8 bits (height, width, 3), a path, URL or the
                content of a file; audio is what `waveform` takes. Other columns are not read.

        Returns:
            A list per field of `predict`: label, score, uncertainty, aleatoric, epistemic, abstain,
            prediction_set and so on (`columns` names them all), and `error`: why a row cannot be
            read, whose other fields are None.
        """
        answers = self.answers(self.values_in(batch), self.groups_in(batch))
        check_fields(answers, self.columns)
        return {name: [answer.get(name) for answer in answers] for name in (*self.columns, "error")}

    def values_in(self, batch: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Return the inputs of the model in a batch of columns.

        Args:
            batch (`Mapping[str, Sequence]`): as for a call.
        """
        names = self.input_columns or self._usual_columns(batch)
        missing = [name for name in names if name not in batch]
        if missing:
            raise ValueError(f"the batch has no column {missing[0]!r}, it has {', '.join(batch)}: name it as column=")
        inputs, *pairs = (list(batch[name]) for name in names)
        if not pairs:
            return inputs
        return [{"text": text, "text_pair": pair} for text, pair in zip(inputs, *pairs, strict=True)]

    def groups_in(self, batch: Mapping[str, Sequence[Any]]) -> list[str] | None:
        """Return the group of each row, by which the model answers; None where it answers by none.

        Args:
            batch (`Mapping[str, Sequence]`): as for a call.
        """
        column = self.group_column
        if column is None:
            return None
        if column not in batch:
            names = ", ".join(batch)
            raise ValueError(f"the batch has no column {column!r}, by which {self.name} answers: it has {names}")
        return [group_name(cell, f"row {row}", column) for row, cell in enumerate(batch[column])]

    @property
    def group_column(self) -> str | None:
        """The column by which the model answers; None without one."""
        decision = dict(self.model.named_children()).get("decision")
        by_group = None if decision is None else typed_settings(decision.settings).by_group
        return None if by_group is None else by_group.column

    def _usual_columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Return the columns that are read where none is named.

        These are the columns that the model was fine-tuned on, if the batch has them.
        """
        remembered = (getattr(self.config, REMEMBERED, None) or {}).get("column") or []
        if remembered and set(remembered) <= batch.keys():
            return list(remembered)
        if self.kind == "zero-shot":
            return ["image"]
        if self.kind == "tokens" and "tokens" not in batch:
            return ["text"]
        if self.kind == "text" and "text_pair" in batch:
            return ["text", "text_pair"]
        return [self.kind]

    def answers(self, values: Sequence[Any], groups: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the prediction for each input; {"error": why} for one that cannot be read.

        Args:
            values (`Sequence`): inputs, as in the columns of a call.
            groups (`Sequence[str]`, *optional*): of each, for a model that answers by a column.
                Without them it answers none.
        """
        if self.needs_classes and "candidate_labels" not in self.parameters:
            raise ValueError(f"candidate_labels is missing: {self.name} chooses among classes that you name")
        answers: list[Any] = []
        for start in range(0, len(values), self.batch_size):
            # Only these images are in memory.
            batch = [self.read_value(value) for value in values[start : start + self.batch_size]]
            readable = [value for value, error in batch if error is None]
            predicted: list[dict[str, Any]] = []
            if readable:
                predicted = self._answers_of_batch(readable)
            if groups is not None:
                of_batch = groups[start : start + self.batch_size]
                of_readable = [group for group, (_, error) in zip(of_batch, batch, strict=True) if error is None]
                predicted = self.with_groups(predicted, of_readable)

            # In the order of the rows.
            remaining = iter(predicted)
            for _, error in batch:
                if error is None:
                    answers.append(next(remaining))
                else:
                    answers.append({"error": error})
        return answers

    def with_groups(self, answers: list[dict[str, Any]], groups: Sequence[str]) -> list[dict[str, Any]]:
        """Return predictions with what their groups decide.

        Those with an error stay as they are.
        """
        result = list(answers)
        for place, answer in enumerate(answers):
            if "error" not in answer:
                [result[place]] = with_groups(self.model, [answer], [groups[place]])
        return result

    def _answers_of_batch(self, inputs: list[Any]) -> list[dict[str, Any]]:
        """Predict for a batch; if it fails, try its rows alone.

        A row that fails is bad, unless the model no longer answers a row that it has answered
        before; where it has answered none yet, the model is to blame if all of several fail.
        """
        try:
            answers = self.answer(inputs, self.parameters)
            self._answered = inputs[-1]
            return answers
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if len(inputs) == 1:
                if self._answered is not None:
                    self.answer([self._answered], self.parameters)
                return [{"error": in_one_line(error)}]
            results = [self._answers_of_batch([value])[0] for value in inputs]
            if self._answered is None:
                raise
            return results

    def read_value(self, value: Any) -> tuple[Any, str | None]:
        """Return an input as the model's pipeline takes it, and why it cannot be read, or None."""
        try:
            is_file = isinstance(value, Mapping) and value.keys() == {"bytes", "path"}
            if is_file and self.kind != "audio":
                value = value["path"] if value["bytes"] is None else value["bytes"]
            if value is None:
                return None, "there is none"
            if self.kind == "audio":
                return waveform(value, self.processor.sampling_rate), None
            if self.reads == "texts":
                return self._text_of(value), None
            return _image_of(value, image_mode(self.config)), None
        except FileNotFoundError:
            return None, "there is no such file"
        except Exception as error:  # decoders raise anything for a broken file
            if type(error).__name__ == "UnidentifiedImageError":  # whose message may hold an address in memory
                return None, "it is not an image file, or a broken one"
            return None, in_one_line(error)

    def _text_of(self, value: Any) -> Any:
        """Return a text, a pair of texts, or for tokens a list of words; raise for others."""
        texts = [value]
        if self.kind == "tokens" and not isinstance(value, str):
            value = list(value)
            texts = value
        elif isinstance(value, Mapping):
            texts = list(value.values())
        for text in texts:
            if text is None:
                raise TypeError("there is none")
            if not isinstance(text, str):
                raise TypeError(f"it is a {type(text).__name__}")
        return value

    @property
    def needs_classes(self) -> bool:
        """Whether every question names the classes to choose from, as for CLIP and SigLIP."""
        return self.kind == "zero-shot"

    @property
    def reads(self) -> str:
        """What it reads, in the plural: "images", "texts", "audio"."""
        return READS[self.kind]

    @property
    def calibration(self) -> dict[str, Any] | None:
        """The settings of its calibration; None without one, or if it has other weights since."""
        _, decision = without_decision(self.model)
        if decision is None:
            return None
        return typed_settings(decision.settings).to_dict()

    def answer(self, inputs: list[Any], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        """Predict for inputs that were read; one thread at a time.

        Args:
            inputs (`list`): as the model's pipeline takes them.
            parameters (`dict`): of `predict`, such as `top_k`.
        """
        with self._one_at_a_time:
            return predict_decisions(self.model, inputs, self.processor, self.together(inputs), **parameters)

    def answer_with_members(self, value: Any) -> dict[str, Any]:
        """Predict with the `scores` of all classes, and with `members`.

        These are each member's probabilities, in the classes' order. Multi-label models also have
        `thresholds`; for regression `members` are the members' numbers; token classifiers have
        `text` and `num_classes`, and no `members`.

        Args:
            value: a PIL image, the samples of audio, a text, or a pair {"text", "text_pair"}.
        """
        if self.class_names is None:
            raise ValueError(f"{self.name} chooses among classes that you name: pass a ZeroShotClassifier of it")
        with self._one_at_a_time:
            outputs: list[Any] = []
            hook = self.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
            try:
                [answer] = predict_decisions(self.model, [value], self.processor, top_k=None)
            finally:
                hook.remove()
        if "entities" in answer:  # of a token classifier
            return answer | {"text": value, "num_classes": len(self.class_names)}
        member_logits = member_logits_of(*outputs)[0].double()
        return answer | self.task.of_members(member_logits, answer["scores"], self.calibration)


def _image_of(value: Any, mode: str) -> Any:
    """Return an image of PIL as a model reads it.

    value: an image of PIL, an array, a file's content, a path or a URL
    """
    from PIL import Image

    if isinstance(value, (bytes, bytearray, memoryview)):
        with Image.open(io.BytesIO(value)) as opened:
            return read_image(opened, "it", mode)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        pixels = np.asarray(value)
        is_grey = pixels.ndim == 2
        is_colour = pixels.ndim == 3 and pixels.shape[2] in (3, 4)
        if pixels.dtype != np.uint8 or not (is_grey or is_colour):
            raise ValueError(f"it is an array {pixels.shape} of {pixels.dtype}: pass (height, width, 3) of uint8")
        value = Image.fromarray(pixels)
    return read_image(value, "it", mode, timeout=SECONDS_FOR_URL)
