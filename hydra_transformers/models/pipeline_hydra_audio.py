"""The audio classification pipeline with uncertainty."""

from transformers.pipelines import AudioClassificationPipeline

from .pipeline_hydra import PredictionsMixin


class HydraAudioClassificationPipeline(PredictionsMixin, AudioClassificationPipeline):
    def _sanitize_parameters(self, top_k: int | str | None = "", function_to_apply: str | None = None, **parameters):
        # Transformers' own fills in what was not asked for, over what the pipeline was made with.
        *before, after = super()._sanitize_parameters(function_to_apply=function_to_apply, **parameters)
        after = {} if function_to_apply is None else {"function_to_apply": after["function_to_apply"]}
        return *before, after if top_k == "" else after | {"top_k": top_k}
