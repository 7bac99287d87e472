"""Baselines of CLIP as image classifiers over fixed class prompts."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..cost import multiply_adds_of
from ..data.prediction import check_class_prompts
from ..fusion import example_inputs
from .baseline import Baseline


# How a card shows a baseline of CLIP.
ZERO_SHOT_USAGE = """
import torch
from PIL import Image
from transformers import AutoProcessor

from hydra_transformers.baselines import {name}

model, processor = {name}.from_pretrained("REPO"), AutoProcessor.from_pretrained("REPO")
labels = ["cat", "dog", "boat"]
prompts = processor(text=[f"A photo of a {{label}}." for label in labels], return_tensors="pt", padding=True)
classifier = model.zero_shot(prompts)
with torch.no_grad():
    outputs = classifier(**processor(images=Image.open("photo.jpg").convert("RGB"), return_tensors="pt"))
print(labels[outputs.logits.argmax(-1).item()], outputs.logits.softmax(-1).max().item())
"""


class PromptClassifier(nn.Module):
    """A baseline of CLIP with the prompts of its classes; a subclass computes what they say once, in `__init__`."""

    def __init__(self, baseline: Baseline, class_prompts: Mapping[str, Tensor]):
        super().__init__()
        check_class_prompts(class_prompts, baseline.model)
        self.model = baseline
        self.num_prompts = len(class_prompts["input_ids"])

    @property
    def device(self) -> torch.device:
        return self.model.device

    def count_multiply_adds(self) -> int:
        """Of one image; the prompts are computed once."""
        prompts = {"input_ids": torch.zeros(self.num_prompts, 1, dtype=torch.long, device="meta")}
        counted = type(self)(self.model.without_weights(), prompts)
        return multiply_adds_of(counted, **example_inputs(self.model.config.vision_config, 1, "meta"))
