"""Predicts raw texts, images or audio with any classifier, as `hydra.predict` does with a Hydra."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.batches import AUDIO_INPUTS
from ..data.prediction import accepted_inputs, device_of
from ..model_info import prompts_in
from ..models.families import pipeline_class
from ..models.pipeline_hydra import predict
from ..models.task import classifies_tokens


def predict_decisions(
    model: nn.Module, inputs: Iterable[Any], processor: Any = None, batch_size: int = 1, **parameters: Any
) -> list[dict[str, Any]]:
    """A dict for each input, as from `hydra.predict` and the Hydra pipelines: see `AnswersMixin` of `models.pipeline_hydra`.

    Args:
        model (`nn.Module`): a Hydra, a classifier or CLIP model of Transformers, a `ZeroShotClassifier` with `class_names`,
            a baseline, or the result of `calibrate`.
        inputs (`Iterable`): texts, PIL images, or paths or URLs of images.
        processor (tokenizer, image processor or a pair, *optional*): by default those saved with the model.
        batch_size (`int`, defaults to 1): inputs per forward.
        parameters (*optional*): `top_k`, the number of scores (5; None for all), for CLIP `candidate_labels`, and for a model that
            was calibrated with by=column `groups`, the value of that column for each input.
    """
    model = model if isinstance(model, PreTrainedModel) else _PipelineModel(model)
    if hasattr(model, "get_image_features"):
        kind = "ZeroShotImage"
    else:
        of_texts = "Token" if classifies_tokens(model) else "Sequence"
        kinds = {"pixel_values": "Image"} | dict.fromkeys(AUDIO_INPUTS, "Audio")
        kind = kinds.get(model.main_input_name, of_texts)
    pipeline = pipeline_class(f"AutoModelFor{kind}Classification")
    return predict(model, pipeline, inputs, processor, batch_size, **parameters)


class _PipelineModel(nn.Module):
    """A model around one of Transformers, with the attributes that pipelines read."""

    def __init__(self, model: nn.Module):
        super().__init__()
        inside = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if inside is None:
            raise TypeError(f"model is a {type(model).__name__} without a model of Transformers inside: pass one")
        self.model, self.config = model, inside.config
        self.main_input_name, self.dtype = inside.main_input_name, inside.dtype
        if hasattr(inside, "get_image_features"):
            zero_shot = prompts_in(model)
            if zero_shot is None or zero_shot.class_names is None:
                raise TypeError("the classes of these towers have no names: pass candidate_labels=")
            names = dict(enumerate(zero_shot.class_names))
            self.config = PreTrainedConfig(id2label=names, name_or_path=inside.config.name_or_path)
            self.main_input_name = "pixel_values"

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**accepted_inputs(self.model, inputs))
