"""Baselines of CLIP as image classifiers over fixed class prompts."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import CLIPModel

from ..cost import multiply_adds_of
from ..data.zero_shot import check_class_prompts
from ..fusion.probe import example_inputs
from ..models.ensembling import at_least_float32
from ..models.inputs import evaluation_mode
from ..models.modeling_hydra import HydraClassifierOutput
from .baseline import Baseline


PROMPTS_PER_PASS = 256


class ClipBaseline(Baseline):
    """A baseline of CLIP, which becomes a classifier by two methods of the subclass.

    `prompt_features(**prompts)` returns a tuple of tensors with a row per class, and
    `classify(pixel_values, *features, labels=None)` reads them.

    Args:
        model (`CLIPModel`): becomes part of this.
    """

    def __init__(self, model: CLIPModel):
        if not isinstance(model, CLIPModel):
            raise TypeError(f"model is a {type(model).__name__}: pass a CLIPModel of Transformers")
        super().__init__(model)

    def zero_shot(self, class_prompts: Mapping[str, Tensor]) -> "PromptClassifier":
        """Return an image classifier over fixed class prompts; its batches hold `pixel_values`.

        Args:
            class_prompts (`Mapping[str, Tensor]`): the tokenizer's output with one row per class.
        """
        return PromptClassifier(self, class_prompts)


class PromptClassifier(nn.Module):
    """A baseline of CLIP with the prompts of its classes; their features are computed once."""

    @torch.no_grad()
    def __init__(self, baseline: ClipBaseline, class_prompts: Mapping[str, Tensor]):
        super().__init__()
        check_class_prompts(class_prompts, baseline.model)
        self.model = baseline
        self.num_prompts = len(class_prompts["input_ids"])

        # Some prompts at a time.
        parts = []
        with evaluation_mode(baseline):
            for start in range(0, self.num_prompts, PROMPTS_PER_PASS):
                end = start + PROMPTS_PER_PASS
                part = {name: value[start:end] for name, value in class_prompts.items()}
                parts.append(baseline.prompt_features(**part))

        self.num_features = len(parts[0])
        for number, features in enumerate(zip(*parts, strict=True)):
            self.register_buffer(f"features_{number}", torch.cat(features), persistent=False)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> HydraClassifierOutput:
        """Return the baseline's prediction over the classes."""
        features = [at_least_float32(getattr(self, f"features_{number}")) for number in range(self.num_features)]
        return self.model.classify(pixel_values, *features, labels=labels)

    def count_multiply_adds(self) -> int:
        """Count multiply-adds for one image; the prompts are computed once."""
        prompts = {"input_ids": torch.zeros(self.num_prompts, 1, dtype=torch.long, device="meta")}
        counted = PromptClassifier(self.model.without_weights(), prompts)
        images = example_inputs(self.model.config.vision_config, 1, "meta")
        return multiply_adds_of(counted, **images)


def check_has_images_and_texts(batch: Mapping[str, Tensor], name: str) -> None:
    """Raise for a batch without images or without texts."""
    missing = {"pixel_values", "input_ids"} - set(batch)
    if missing:
        raise ValueError(f"{name} has no {min(missing)}: pass images and texts, or use zero_shot()")
