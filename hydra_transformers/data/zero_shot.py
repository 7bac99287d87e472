"""Two towers with class prompts, as an image classifier."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..models.ensembling import at_least_float32, log_mean_probability
from ..models.inputs import evaluation_mode
from ..models.modeling_hydra import HydraClassifierOutput


def check_class_prompts(class_prompts: Mapping[str, Tensor] | None, model: nn.Module) -> None:
    """Raise for class prompts that are missing or not tokenized.

    Warn if SigLIP's are not padded as in its training.
    """
    input_ids = (class_prompts or {}).get("input_ids")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise ValueError(
            f"{type(model).__name__} classifies by prompts, and class_prompts has no input_ids of shape "
            "(classes, tokens): pass the tokenizer's output with padding=True and "
            'return_tensors="pt", one row per class'
        )
    config = getattr(model, "config", None)
    most = getattr(getattr(config, "text_config", None), "max_position_embeddings", None)
    # SigLIP, which has a bias, reads the last token even if it is padding.
    if hasattr(model, "logit_bias") and most is not None and input_ids.shape[1] < most:
        warnings.warn(
            f"class_prompts have {input_ids.shape[1]} tokens, and {type(model).__name__} reads the last of {most}: "
            f'tokenize with padding="max_length", max_length={most}, as it was trained',
            stacklevel=3,
        )


class ZeroShotClassifier(nn.Module):
    """A model of two towers as an image classifier over fixed class prompts.

    Its batches hold `pixel_values`.

    Args:
        clip_model (`nn.Module`): a Hydra of two towers, or a `CLIPModel` or other two-tower model
            of Transformers.
        class_prompts (`dict`): the tokenizer's output for one prompt per class, for example
            `tokenizer([f"A photo of a {name}." for name in names], padding=True,
            return_tensors="pt")`; for SigLIP with `padding="max_length"`, since it reads the last
            token even if it is padding.
        class_names (`Sequence[str]`, *optional*): the names of the classes in predictions for raw
            images, one per prompt.

    Probabilities are a softmax over the classes. SigLIP itself says yes or no to each prompt, by a
    sigmoid; the softmax of its logits is the probability of each class given that exactly one is
    right.

    The prompts' features are computed once; call `refresh()` after changing the model's weights.
    """

    prompts_per_pass = 256  # bounds the memory of the text tower for thousands of classes

    def __init__(
        self, clip_model: nn.Module, class_prompts: Mapping[str, Tensor], class_names: Sequence[str] | None = None
    ):
        super().__init__()
        check_class_prompts(class_prompts, clip_model)
        if class_names is not None and len(class_names) != len(class_prompts["input_ids"]):
            raise ValueError(f"class_names has {len(class_names)} names: pass one per prompt")
        self.class_names = None
        if class_names is not None:
            self.class_names = list(class_names)
        self.model = clip_model
        self.class_prompts = {name: value for name, value in class_prompts.items() if isinstance(value, Tensor)}
        self.similarity = PromptSimilarity()
        self.register_buffer("text_features", torch.empty(0), persistent=False)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the prompts' features (classes, members, dim) from the model's weights."""
        device = next(self.model.parameters()).device
        rows = len(self.class_prompts["input_ids"])
        # Not all at once: there may be thousands of classes.
        features = []
        with evaluation_mode(self.model):
            for start in range(0, rows, self.prompts_per_pass):
                part = slice(start, start + self.prompts_per_pass)
                prompts = {name: value[part].to(device) for name, value in self.class_prompts.items()}
                features.append(_unit_features(self.model.get_text_features(**prompts)))
        self.text_features = torch.cat(features)

    def forward(self, pixel_values: Tensor) -> HydraClassifierOutput:
        shortcut = first_token_kwargs(self.model)
        image_features = _unit_features(self.model.get_image_features(pixel_values=pixel_values, **shortcut))
        text_features = at_least_float32(self.text_features)  # a buffer: `.to(torch.bfloat16)` casts it
        scale = at_least_float32(self.model.logit_scale).exp()
        bias = None
        if hasattr(self.model, "logit_bias"):
            bias = at_least_float32(self.model.logit_bias)
        member_logits = self.similarity(image_features, text_features, scale, bias)
        return HydraClassifierOutput(logits=log_mean_probability(member_logits), member_logits=member_logits)


def first_token_kwargs(model: nn.Module) -> dict[str, bool]:
    """Return arguments of `get_image_features`.

    A Hydra that pools one token computes only that one in its last layer.
    """
    if getattr(model, "reads_first_token", False):
        return {"first_token_only": True}
    return {}


def logits_of_cosines(model: nn.Module, cosines: Tensor) -> Tensor:
    """Return the logits (..., classes) of a plain model of two towers, or of a one-member Hydra."""
    logits = cosines * model.logit_scale.exp()
    if hasattr(model, "logit_bias"):
        return logits + model.logit_bias
    return logits


class PromptSimilarity(nn.Module):
    """The classifier of two towers: a linear map whose weights are the prompts' features."""

    def forward(
        self, image_features: Tensor, text_features: Tensor, scale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the logits (images, members, classes) of features (images, members, dim).

        text_features: (classes, members, dim)
        scale, bias: (members,) or ()
        """
        # One member per batch entry: (members, images, dim) @ (members, dim, classes).
        similarity = image_features.transpose(0, 1) @ text_features.permute(1, 2, 0)
        logits = scale.reshape(-1, 1, 1) * similarity
        if bias is not None:
            logits = logits + bias.reshape(-1, 1, 1)
        return logits.transpose(0, 1)


def _unit_features(output: Any) -> Tensor:
    """Return a tower's features (rows, members, dim) as unit vectors, at least in float32."""
    features = output
    if not isinstance(output, Tensor):
        features = output.get("member_pooler_output", output.pooler_output)
    if features.dim() == 2:  # of a plain model
        features = features.unsqueeze(1)
    return nn.functional.normalize(at_least_float32(features), dim=-1)
