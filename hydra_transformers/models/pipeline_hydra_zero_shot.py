"""The pipeline for images and classes named by texts that says how sure it is."""

from typing import Any

from transformers.pipelines import ZeroShotImageClassificationPipeline

from .pipeline_hydra import ImagesMixin, PredictionsMixin


class HydraZeroShotImageClassificationPipeline(ImagesMixin, PredictionsMixin, ZeroShotImageClassificationPipeline):
    @staticmethod
    def check_parameters(parameters: dict[str, Any]) -> None:
        if not parameters.get("candidate_labels"):
            raise ValueError("candidate_labels is missing: the model chooses among labels that you name")

    def outputs(self, model_inputs: dict) -> dict[str, Any]:
        labels, [texts, *_] = model_inputs.pop("candidate_labels"), model_inputs.pop("text_inputs")
        texts = texts[0] if isinstance(texts, list) else texts  # a batch has them once per image
        outputs = self.model(**texts, **model_inputs)
        return {**outputs, "logits": outputs.logits_per_image, "candidate_labels": labels}
