"""Pipelines with uncertainty: per input one dict, with what a calibrated model decides."""

import importlib
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer, PreTrainedModel
from transformers.pipelines import ImageClassificationPipeline, Pipeline, ZeroShotImageClassificationPipeline

from .configuration_hydra import OUTPUTS_OF_HYDRAS
from .inputs import evaluation_mode, image_mode, read_image
from .task import PARTS_OF_UNCERTAINTY, task_of_answer


class PredictionsMixin:
    """Gives for each input

    label, score: the likeliest class and its probability
    uncertainty, aleatoric, epistemic: the entropy of the mean probability, the mean of the members'
        own entropies, and their difference, in nats; of a multi-label model, and of SigLIP, summed
        over the labels
    abstain: whether the model should rather not answer; None where it was not calibrated for that.
        True for inputs that hold nothing (empty texts, images of one colour) and predictions that
        are not numbers
    detector, detector_score, threshold: by what a calibrated model abstains: above the threshold;
        None otherwise
    reason: why it abstains, in a sentence; None where it does not
    prediction_set: the classes that it may be, the likeliest first; None where it was not
        calibrated for that
    truncated: of texts, whether the model read only the beginning
    scores: the `top_k` likeliest labels with their scores (5; None for all)

    Some tasks have further fields, and mean others by these: see `Task.prediction_fields`.
    """

    def check_model_type(self, supported_models: Any) -> None:
        pass  # any classifier will do, also one that came with its repository

    def _sanitize_parameters(self, top_k: int | str | None = "", **parameters):
        if "function_to_apply" in parameters:
            raise ValueError("function_to_apply is not a parameter here: the config's problem_type says it")
        preprocess_parameters, forward_parameters, _ = super()._sanitize_parameters(**parameters)
        postprocess_parameters = {}
        if top_k != "":
            postprocess_parameters["top_k"] = top_k
        return preprocess_parameters, forward_parameters, postprocess_parameters

    def _forward(self, model_inputs: Any) -> dict[str, Any]:
        notes = model_inputs.pop("notes", None)
        outputs = self.outputs(model_inputs)
        kept = {name: outputs[name] for name in KEPT_OUTPUTS if name in outputs}
        kept["notes"] = notes
        return kept

    def outputs(self, model_inputs: Any) -> Any:
        return super()._forward(model_inputs)

    def postprocess(self, model_outputs: dict, top_k: int | None = 5) -> dict[str, Any]:
        notes = model_outputs.pop("notes") or {}
        names = model_outputs.get("candidate_labels") or self.model.config.id2label
        settings = decision_settings(self.model, model_outputs)
        task = task_of_answer(self.model, model_outputs, settings)

        # What is predicted, and how sure the model is.
        fields = task.prediction_fields(model_outputs, names, top_k, settings)
        first = {name: fields.pop(name) for name in ("label", "score", *PARTS_OF_UNCERTAINTY)}
        scores = fields.pop("scores")

        # Whether to answer, by what, and why.
        decided = dict.fromkeys(("abstain", "detector", "detector_score", "threshold", "reason"))
        if settings is not None:
            decided = settings.prediction_fields(model_outputs)
        is_number = bool(task.scores(model_outputs["logits"][0]).isfinite().all())
        if notes.get("empty") is not None or not is_number:
            decided |= {"abstain": True, "reason": notes.get("empty") or "The answer is not a number."}
            if getattr(settings, "by_group", None) is not None:
                decided["threshold"] = "-inf"  # whatever its group

        if "truncated" in notes:
            fields["truncated"] = notes["truncated"]
        return {**first, **decided, **fields, "scores": scores}


KEPT_OUTPUTS = ("logits", *OUTPUTS_OF_HYDRAS, "candidate_labels")


def decision_settings(model: nn.Module, outputs: Mapping[str, Any]) -> Any:
    """Return the `DecisionSettings` of the decision that made these outputs; None without one."""
    if outputs.get("detector_score") is None:
        return None
    # By name: the model may have come with its repository, and this pipeline with the package.
    decision = next(module for module in model.modules() if type(module).__name__.endswith("Decision"))
    # By name, too: models that are not calibrated ship without it.
    return importlib.import_module(".decision_settings", __package__).typed_settings(decision.settings)


class ImagesMixin:
    """Reads images by `read_image`, as all of this package does."""

    def preprocess(self, image: Any, timeout: float | None = None, **parameters) -> Any:
        empty = None
        if hasattr(image, "mode") or isinstance(image, str):
            mode = image_mode(self.model.config)
            image = read_image(image, mode=mode, timeout=timeout)
            bands = image.getextrema()
            if mode == "L":
                bands = [bands]
            if all(low == high for low, high in bands):
                empty = "The image has one colour only."
            if mode == "L":  # as a tensor: Transformers' pipeline makes images RGB
                pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
                image = pixels.view(1, image.height, image.width)
        inputs = super().preprocess(image, **parameters)
        inputs["notes"] = {"empty": empty}
        return inputs


class HydraImageClassificationPipeline(ImagesMixin, PredictionsMixin, ImageClassificationPipeline):
    pass


READER = {
    "tokenizer": AutoTokenizer,
    "image_processor": AutoImageProcessor,
    "feature_extractor": AutoFeatureExtractor,
}


def predict(
    model: nn.Module,
    pipeline_class: type[Pipeline],
    inputs: Iterable[Any],
    processor: Any = None,
    batch_size: int = 1,
    groups: Any = None,
    **parameters: Any,
) -> list[dict[str, Any]]:
    """Predict raw inputs as a pipeline does, with a dict each: see `PredictionsMixin`.

    model: runs in eval mode, on its device
    inputs: texts; PIL images, or paths or URLs of images; or audio: arrays at the sampling rate of
        the feature extractor, `{"array": ..., "sampling_rate": ...}`, or paths or URLs of files,
        which take ffmpeg
    processor: the tokenizer, image processor, feature extractor or several in one; by default those
        saved with the model
    groups: of a model that was calibrated with by=column: the value of that column for each input
    parameters: of the pipeline: `top_k`, and for CLIP `candidate_labels`
    """
    # The inputs, as a list.
    if isinstance(inputs, (str, bytes, Mapping)) or not isinstance(inputs, Iterable):
        raise TypeError(f"inputs is a {type(inputs).__name__}: pass a list of texts, images or audio")
    if hasattr(inputs, "columns"):  # a DataFrame, whose iterator gives names of columns
        columns = [name for name in ("text", "image", "audio") if name in inputs.columns] or list(inputs.columns)
        if len(columns) != 1:
            raise TypeError(f"inputs has the columns {', '.join(map(str, columns))}: pass one of them, inputs[column]")
        inputs = inputs[columns[0]]
    sources = []
    for source in inputs:
        if isinstance(source, os.PathLike):
            source = os.fspath(source)
        sources.append(source)
    if issubclass(pipeline_class, ZeroShotImageClassificationPipeline) and not parameters.get("candidate_labels"):
        raise ValueError("candidate_labels is missing: the model chooses among labels that you name")

    # What the pipeline reads them with.
    readers = {}
    for name, auto_class in READER.items():
        if not getattr(pipeline_class, f"_load_{name}"):
            continue
        if processor is None:
            readers[name] = processor_of(model, auto_class)
        else:
            readers[name] = getattr(processor, name, processor)

    with evaluation_mode(model):
        pipeline = pipeline_class(model=model, device=model.device, **readers)
        predictions = []
        if sources:
            predictions = pipeline(sources, batch_size=batch_size, **parameters)
    if groups is None:
        return predictions
    # Models without a decision ship without its code.
    return importlib.import_module(".decision", __package__).with_groups(model, predictions, groups)


# Model -> its processors; each thread loads its own, because tokenizers are not thread-safe.
LOADED_PROCESSORS = threading.local()


def processor_of(model: nn.Module, auto_class: type) -> Any:
    """Return the processor that was saved with the model, loaded once for each model."""
    config = model.config
    name = config.name_or_path
    inside = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    by_model = vars(LOADED_PROCESSORS).setdefault("by_model", WeakKeyDictionary())
    loaded = by_model.setdefault(inside, {})
    key = (auto_class.__name__, name)
    if key in loaded:
        return loaded[key]

    # Who trusted the code of the model's repository need not be asked again; its config says which
    # processor it has.
    is_trusted = type(inside).__module__.startswith("transformers_modules.")
    options = {"trust_remote_code": is_trusted or None}
    if config.model_type:
        options["config"] = config
    try:
        loaded[key] = auto_class.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        where = "the model was not loaded from anywhere"
        if name:
            where = f"none could be loaded from {name}"
        what = auto_class.__name__.removeprefix("Auto")
        raise ValueError(f"processor is missing, {where}: pass the {what} it was trained with") from error
    return loaded[key]
