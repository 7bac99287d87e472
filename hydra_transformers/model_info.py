"""What a model is: asked here, once, and passed on.

A model may be a name, a folder, a config, or a module: a Hydra, a model of Transformers, or a
wrapper around one, such as a baseline, a `ZeroShotClassifier`, a `PeftModel` or a model that was
calibrated.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .models import auto
from .models.task import (
    YES_OR_NO,
    Task,
    classifies_tokens,
    config_inside,
    load_class,
    load_task,
    task_of,
    task_of_config,
)


# What is put into a model, in words, by `ModelInfo.inputs`.
READS = {"image": "images", "zero-shot": "images", "audio": "audio", "text": "texts", "tokens": "texts"}


@dataclass(frozen=True)
class ModelInfo:
    """What a model is, and what it reads and predicts.

    Attributes:
        config (`PreTrainedConfig` or `None`): of the model, or of the one inside it.
        model_class (`type` or `None`): of the model of Transformers or Hydra, without what is
            around it. Of a config the one that it was saved with, or else the usual one; None
            where it becomes no Hydra.
        task (`Task`): what it predicts.
        auto_class (`str`): the name of the Auto class that loads `model_class`; empty where that
            is not known.
        inputs (`str` or `None`): "image", "text", "audio", "tokens" for texts or lists of words
            with a class for each word, or "zero-shot" for images and the texts of each call; None
            where that is not known.
        is_hydra (`bool`): whether it is a Hydra, and not a wrapper around one.
        wrapper (`str` or `None`): what is around it: "adapters" of PEFT, a "baseline", a "zero-shot
            classifier", or "other".
        class_names (`list[str]` or `None`): in order; None where it has no classes of its own, or
            they have no names.
    """

    config: PreTrainedConfig | None
    model_class: type[PreTrainedModel] | None
    task: Task
    auto_class: str
    inputs: str | None
    is_hydra: bool
    wrapper: str | None
    class_names: list[str] | None

    @classmethod
    def of(cls, source: Any) -> "ModelInfo":
        """Say what a model is.

        Args:
            source (`ModelInfo`, `str`, `os.PathLike`, `PreTrainedConfig` or `nn.Module`): a folder
                or Hub name, a config, or a model.

        Example:
            >>> ModelInfo.of(config).inputs  # doctest: +SKIP
            'image'
        """
        if isinstance(source, ModelInfo):
            return source
        if isinstance(source, (str, os.PathLike)):
            source = auto.config_of(source)
        if isinstance(source, PreTrainedConfig):
            return cls._of_config(source)
        if isinstance(source, nn.Module):
            return cls._of_module(source)
        raise TypeError(f"model is a {type(source).__name__}: pass a model, its folder or Hub name, or its config")

    @classmethod
    def _of_config(cls, config: PreTrainedConfig) -> "ModelInfo":
        auto_class = auto.auto_class_of(config)
        inputs = auto.INPUTS.get(auto_class)
        model_class = None
        if auto_class:
            model_class = auto.class_with_head(config)
        # Token classification is said by the class alone, and zero-shot models have no classes.
        if inputs == "tokens":
            task = load_task("token_classification")
        else:
            task = task_of_config(config)
        class_names = None
        if inputs != "zero-shot":
            class_names = class_names_in(config)
        return cls(
            config=config,
            model_class=model_class,
            task=task,
            auto_class=auto_class,
            inputs=inputs,
            is_hydra=auto.is_hydra_class(model_class),
            wrapper=None,
            class_names=class_names,
        )

    @classmethod
    def _of_module(cls, model: nn.Module) -> "ModelInfo":
        config = config_inside(model)
        model_class = _model_class_inside(model)
        auto_class = ""
        if isinstance(config, PreTrainedConfig):
            auto_class = auto.auto_class_of(config, model_class)
        inputs = auto.INPUTS.get(auto_class)
        if prompts_in(model) is not None:  # its texts are fixed: it reads images alone
            inputs = "image"
        return cls(
            config=config,
            model_class=model_class,
            task=task_of(model),
            auto_class=auto_class,
            inputs=inputs,
            is_hydra=auto.is_hydra_class(type(model)),
            wrapper=wrapper_of(model),
            class_names=class_names_of(model),
        )

    @property
    def is_zero_shot(self) -> bool:
        """Whether its classes are texts: those of each call, or of a `ZeroShotClassifier`."""
        return auto.INPUTS.get(self.auto_class) == "zero-shot"

    @property
    def says_task(self) -> bool:
        """Whether the config says what its outputs are, or has several.

        A single one may also be a probability.
        """
        config: Any = self.config
        return config.problem_type is not None or config.num_labels != 1


# Parts of the answer, for those who need no more


def models_inside(model: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the model and those it wraps, from the outside in; of several the first."""
    while model is not None:
        yield model
        several = getattr(model, "models", None)
        if several is not None:
            model = several[0]
        else:
            inside = getattr(model, "model", None) or getattr(model, "module", None)
            model = inside or None


def _model_class_inside(model: nn.Module) -> type[PreTrainedModel] | None:
    """Return the class of the first model of Transformers or Hydra inside; None without one."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return type(module)
    return None


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is a `PeftModel`; peft need not be installed to ask."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model inside a `PeftModel`; another one as it is."""
    if is_peft_model(model):
        adapted: Any = model
        return adapted.get_base_model()
    return model


def is_baseline(model: nn.Module) -> bool:
    """Whether a model is a `baselines.Baseline`, a model with weights around it.

    By an attribute: that module imports this one.
    """
    return hasattr(type(model), "without_weights")


def prompts_in(model: nn.Module) -> Any:
    """Return the `ZeroShotClassifier` that a model is or contains; None where there is none."""
    for module in model.modules():
        if "class_prompts" in vars(module):
            return module
    return None


def wrapper_of(model: nn.Module) -> str | None:
    """Return what is around a model, as `ModelInfo.wrapper`."""
    if is_peft_model(model):
        return "adapters"
    if is_baseline(model):
        return "baseline"
    if prompts_in(model) is not None:
        return "zero-shot classifier"
    if isinstance(model, PreTrainedModel):
        return None
    return "other"


def class_names_in(config: PreTrainedConfig) -> list[str]:
    """Return the names of the classes in a config, in order."""
    fields: Any = config
    return [str(fields.id2label[index]) for index in range(fields.num_labels)]


def class_names_of(model: nn.Module | None) -> list[str] | None:
    """Return the names of a model's classes, in order; None where it has none."""
    if model is None:
        return None
    prompts = prompts_in(model)
    if prompts is not None:
        return prompts.class_names
    config = config_inside(model)
    if getattr(config, "id2label", None) is None:
        return None
    return class_names_in(config)


def padding_token_of(model: nn.Module) -> int | None:
    """Return the padding token by which a plain causal classifier finds the end of a text.

    None for others: Hydras read the mask, too.
    """
    # Transformers calls its head `score` there, and `classifier` elsewhere.
    is_decoder = any(isinstance(getattr(module, "score", None), nn.Module) for module in model.modules())
    if not is_decoder:
        return None
    return getattr(config_inside(model), "pad_token_id", None)


def task_of_logits(model: nn.Module, num_outputs: int | None = None) -> Task:
    """Return what the model's own logits mean, of which there are `num_outputs` for a row.

    Two towers with a bias (SigLIP) say yes or no to each text, unless in a `ZeroShotClassifier`. A
    single output is a probability where the config speaks of more, and says nothing of the task.
    """
    config = config_inside(model)
    has_bias = any(hasattr(module, "logit_bias") for module in models_inside(model))
    if has_bias and prompts_in(model) is None:
        return load_class(YES_OR_NO)()
    has_problem_type = getattr(config, "problem_type", None) is not None
    has_one_label = getattr(config, "num_labels", None) == 1
    if num_outputs == 1 and not has_problem_type and not has_one_label:
        return load_class(YES_OR_NO)()
    return task_of_config(config)


def check_chooses_one_class(model: nn.Module, name: str) -> None:
    """Raise for models whose logits have no softmax over the classes of a row."""
    task = task_of(model)
    # Without a problem type, a model with a single output says itself that this is too few.
    is_said = classifies_tokens(model) or getattr(config_inside(model), "problem_type", None) is not None
    if is_said and not task.chooses_one_class:
        raise ValueError(f"{name} is made for {task.title}: pass a model that chooses one of several classes")
