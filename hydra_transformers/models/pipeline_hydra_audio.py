"""The pipeline for sounds that says how sure it is."""

from typing import Any

from transformers.pipelines import AudioClassificationPipeline
from transformers.utils import ModelOutput

from .pipeline_hydra import AnswersMixin


class _AudioScores(AudioClassificationPipeline):
    def postprocess(self, model_outputs: dict, **parameters) -> Any:
        return super().postprocess(ModelOutput(model_outputs), **parameters)  # it reads attributes


class HydraAudioClassificationPipeline(AnswersMixin, _AudioScores):
    @property
    def every_score(self) -> dict[str, Any]:
        return {"top_k": self.model.config.num_labels}

    def _sanitize_parameters(self, top_k: int | str | None = "", function_to_apply: str | None = None, **parameters):
        # Transformers' own fills in what was not asked for, over what the pipeline was made with.
        *before, after = super()._sanitize_parameters(function_to_apply=function_to_apply, **parameters)
        after = {} if function_to_apply is None else {"function_to_apply": after["function_to_apply"]}
        return *before, after if top_k == "" else after | {"top_k": top_k}

    def postprocess(self, model_outputs: dict, **parameters) -> dict[str, Any]:
        if getattr(self.model.config, "problem_type", None) == "multi_label_classification":
            parameters = {"function_to_apply": "sigmoid", **parameters}
        return super().postprocess(model_outputs, **parameters)
