"""Loads the processor that is saved with a model, and makes prompts of class names."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from ..model_info import ModelInfo
from ..models.adapters import base_of_adapters, is_adapter_folder
from ..models.auto import check_type_is_supported, hydra_classes


# By what a model reads.
PROCESSORS = {
    "audio": "AutoFeatureExtractor",
    "image": "AutoImageProcessor",
    "text": "AutoTokenizer",
    "tokens": "AutoTokenizer",
    "zero-shot": "AutoProcessor",
}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json", "tokenizer.json")
PROCESSOR_FILES += ("vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


def load_processor(name: str | os.PathLike, model: PreTrainedConfig | ModelInfo) -> Any:
    """Return the processor saved with a model: a tokenizer, an image processor, a feature
    extractor, or a pair for two towers.

    name: the model's folder or Hub name; empty for a model in memory
    model: its config, or what it is
    """
    info = ModelInfo.of(model)
    check_type_is_supported(info.config, name or "the model")
    processor = find_processor(name, info)
    if processor is None:
        name = name or "the model, which was not loaded from a folder or the Hub,"
        kind = PROCESSORS[info.inputs].removeprefix("Auto")
        raise ValueError(f"{name} has no {kind} saved with it: save one there, or pass processor=")
    return processor


def find_processor(name: str | os.PathLike, model: PreTrainedConfig | ModelInfo) -> Any | None:
    """Return the processor saved with a model; None where there is none."""
    if name and is_adapter_folder(name) and not _has_processor_files(name):
        name = base_of_adapters(name)
    if not name or not _has_processor_files(name):  # AutoTokenizer would make an empty one
        return None
    inputs = ModelInfo.of(model).inputs
    auto_class = PROCESSORS[inputs]
    load = getattr(transformers, auto_class).from_pretrained
    try:
        processor = load(name)
    except ImportError:  # older versions of Transformers ask for torchvision even where Pillow would do
        if auto_class != "AutoImageProcessor":
            raise
        return transformers.ViTImageProcessorPil.from_pretrained(name)
    # Byte-level tokenizers read lists of words only if a space belongs to the word behind it.
    is_byte_level = inputs == "tokens" and getattr(processor, "add_prefix_space", None) is False
    if is_byte_level:
        return load(name, add_prefix_space=True)
    return processor


def _has_processor_files(name: str | os.PathLike) -> bool:
    """Whether one of the files of a processor is in a folder, or in a repository on the Hub."""
    if Path(name).is_dir():
        return any((Path(name) / file).exists() for file in PROCESSOR_FILES)
    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    return any(cached_file(name, file, **quiet) is not None for file in PROCESSOR_FILES)


def class_prompts(
    model: PreTrainedConfig | ModelInfo, processor: Any, class_names: Sequence[str] | None
) -> dict | None:
    """Return the tokenized prompts of classes for a model of two towers; None for a classifier,
    which has its own classes."""
    info = ModelInfo.of(model)
    if not info.is_zero_shot:
        return None
    head = info.model_class
    length = {"padding": True}
    if hydra_classes().get(head, head).reads_padding:
        length = {"padding": "max_length", "max_length": info.config.text_config.max_position_embeddings}
    prompts = [f"A photo of a {name}." for name in class_names]
    return dict(processor(text=prompts, truncation=True, return_tensors="pt", **length))


def check_same_processors(names: Sequence[str], configs: Sequence[PreTrainedConfig], first: Any) -> None:
    """Raise for models whose saved processors prepare inputs differently; a model may have none.

    first: the processor of the first model, which will serve all
    """
    expected = preparation_of(first)
    for name, config in zip(names[1:], configs[1:], strict=True):
        processor = find_processor(name, config)
        if processor is None:
            continue
        settings = preparation_of(processor)
        for key in expected.keys() & settings.keys():
            if settings[key] != expected[key]:
                raise ValueError(
                    f"{name} prepares its inputs differently from {names[0]} ({key} differs): pass models of one "
                    "pre-trained model"
                )


def preparation_of(processor: Any) -> dict[str, Any]:
    """Return the settings of a processor that change the numbers it makes of an input."""
    if hasattr(processor, "image_processor"):
        return preparation_of(processor.image_processor) | preparation_of(processor.tokenizer)
    if hasattr(processor, "get_vocab"):
        return {
            "vocabulary": processor.get_vocab(),
            "special tokens": processor.special_tokens_map,
            "do_lower_case": getattr(processor, "do_lower_case", None),
            "padding_side": getattr(processor, "padding_side", None),
        }
    images = ("do_", "image_mean", "image_std", "size", "crop_size", "resample", "rescale_factor")
    audio = ("sampling_rate", "num_mel_bins", "max_length", "mean", "std", "return_attention_mask")
    audio += ("feature_size", "chunk_length", "hop_length", "n_fft")  # of Whisper
    settings = processor.to_dict().items()
    return {name: value for name, value in settings if name.startswith(images + audio) and value is not None}
