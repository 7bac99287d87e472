"""Folders of PEFT adapters: the config of the model that they are for, and that model with the
adapters merged."""

import json
import os
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto


SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."  # of names in a file of adapters
# By PEFT's names of tasks, the names of classes by `model_type`.
MODELS_OF_TASK = {
    "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


def is_adapter_folder(name: str | os.PathLike) -> bool:
    """Whether a folder holds adapters in place of a model."""
    return (Path(name) / SETTINGS).is_file()


def base_of_adapters(name: str | os.PathLike) -> str:
    """Return the folder or Hub name of the model that the adapters in a folder were trained on."""
    base = _settings(name).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{SETTINGS} in {name} names no base_model_name_or_path: write the base model's name there")
    return base


def _settings(name: str | os.PathLike) -> dict[str, Any]:
    return json.loads((Path(name) / SETTINGS).read_text())


def config_of_adapters(name: str | os.PathLike) -> PreTrainedConfig:
    """Load the config of the model with its adapters: that in the folder, or that of the base model
    with as many classes as the classifier in the folder has."""
    if (Path(name) / "config.json").is_file():
        return transformers.AutoConfig.from_pretrained(os.fspath(name))
    settings = _settings(name)
    config = transformers.AutoConfig.from_pretrained(base_of_adapters(name), revision=settings.get("revision"))

    # The model's class: by the task, or where there is none as it is named.
    auto_mapping = settings.get("auto_mapping") or {}
    saved_class = auto_mapping.get("base_model_class")
    task = settings.get("task_type")
    if task in MODELS_OF_TASK:
        saved_class = MODELS_OF_TASK[task].get(config.model_type, saved_class)
    if saved_class is not None:
        config.architectures = [saved_class]

    # As many classes as the last map of the saved classifier has.
    sizes = {}
    for key, weight in _weights(name).items():
        if key.startswith(("classifier.", "score.")) and weight.dim() == 2 and "lora_" not in key:
            sizes[key] = len(weight)
    if sizes:
        num_labels = sizes[max(sizes)]
        if num_labels != config.num_labels:
            config.num_labels = num_labels
    return config


def _weights(name: str | os.PathLike) -> dict[str, Any]:
    try:
        from peft import load_peft_weights
    except ImportError as error:
        raise ImportError(f"{name} holds adapters of PEFT: pip install peft") from error
    if not (Path(name) / "adapter_model.safetensors").is_file():  # others can run code when they are loaded
        raise FileNotFoundError(f"{name} has {SETTINGS}, no adapter_model.safetensors: save the adapters again")
    weights = load_peft_weights(os.fspath(name), "cpu")
    return {key.removeprefix(PREFIX): weight for key, weight in weights.items()}


def load_merged(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str | os.PathLike
) -> tuple[PreTrainedModel, set[str]]:
    """Load the base model with the adapters in a folder merged into its weights.

    Returns it, and the names of weights that neither has.
    """
    from peft import PeftModel, get_peft_model_state_dict

    saved = set(_weights(name))
    model, loading = model_class.from_pretrained(
        base_of_adapters(name),
        config=config,
        revision=_settings(name).get("revision"),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    untrained = set(loading["missing_keys"])
    untrained |= {entry[0] for entry in loading["mismatched_keys"]}
    adapted = PeftModel.from_pretrained(model, os.fspath(name))
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = _settings(name).get("peft_type")
        raise ValueError(f"{name} holds adapters of the type {kind}, which cannot be merged into weights: pass LoRA's")
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)  # PEFT only warns if some are missing
    untrained |= {key.removeprefix(PREFIX) for key in expected}
    return adapted.merge_and_unload(), untrained - saved
