"""The pipeline for images and classes named by texts that says how sure it is."""

from typing import Any

from transformers.pipelines import ZeroShotImageClassificationPipeline

from .pipeline_hydra import ImagesMixin, PredictionsMixin


class HydraZeroShotImageClassificationPipeline(ImagesMixin, PredictionsMixin, ZeroShotImageClassificationPipeline):
    def outputs(self, model_inputs: dict) -> dict[str, Any]:
        labels, [texts, *_] = model_inputs.pop("candidate_labels"), model_inputs.pop("text_inputs")
        texts = texts[0] if isinstance(texts, list) else texts  # a batch has them once per image
        outputs = self.model(**texts, **model_inputs)
        return {**outputs, "logits": outputs.logits_per_image, "candidate_labels": labels}
