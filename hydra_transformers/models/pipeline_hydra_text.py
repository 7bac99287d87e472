"""The text classification pipeline with uncertainty."""

from functools import cached_property
from typing import Any

import torch
from transformers.pipelines import Pipeline, TextClassificationPipeline

from .inputs import has_content, most_tokens
from .pipeline_hydra import PredictionsMixin


class HydraTextClassificationPipeline(PredictionsMixin, TextClassificationPipeline):
    @cached_property
    def most_tokens(self) -> int:
        return min(self.tokenizer.model_max_length, most_tokens(self.model))

    def preprocess(self, inputs: Any, **parameters) -> Any:
        parameters = {"truncation": True, "max_length": self.most_tokens, **parameters}
        tokens = super().preprocess(inputs, **parameters)
        length = tokens["input_ids"].shape[-1]

        # Whether the text is longer than what the model reads.
        is_cut = False
        if length >= (parameters["max_length"] or self.most_tokens):
            whole_text = {**parameters, "truncation": False, "max_length": None, "padding": False, "verbose": False}
            is_cut = super().preprocess(inputs, **whole_text)["input_ids"].shape[-1] > length

        # One token in place of none: the model fails on that, or reads the padding of its batch.
        if length == 0:
            token = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0
            values = {"input_ids": token, "attention_mask": 1}
            for name in tokens:
                tokens[name] = torch.full((1, 1), values.get(name, 0))

        empty = None
        if length == 0 or not any(map(has_content, texts_in(inputs))):
            empty = "The text is empty."
        tokens["notes"] = {"empty": empty, "truncated": is_cut}
        return tokens

    def __call__(self, inputs: Any, **parameters):
        return Pipeline.__call__(self, inputs, **parameters)  # one dict for one text, no list of one


def texts_in(inputs: Any) -> list[str]:
    """Return the texts of one input: a text, or a pair as a dict or in lists."""
    if isinstance(inputs, str):
        return [inputs]
    parts = inputs or ()
    if isinstance(inputs, dict):
        parts = inputs.values()
    return [text for part in parts for text in texts_in(part)]
