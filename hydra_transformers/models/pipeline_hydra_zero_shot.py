"""The pipeline for images and classes named by texts that says how sure it is."""

from typing import Any

from transformers.pipelines import ZeroShotImageClassificationPipeline

from .pipeline_hydra import ImagesMixin, PredictionsMixin


class HydraZeroShotImageClassificationPipeline(ImagesMixin, PredictionsMixin, ZeroShotImageClassificationPipeline):
    def outputs(self, model_inputs: dict) -> dict[str, Any]:
        labels = model_inputs.pop("candidate_labels")
        texts = model_inputs.pop("text_inputs")[0]
        if isinstance(texts, list):  # a batch has them once per image
            texts = texts[0]
        outputs = self.model(**texts, **model_inputs)
        return {**outputs, "logits": outputs.logits_per_image, "candidate_labels": labels}
