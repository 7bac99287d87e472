"""The registry of families, and `AutoHydra`, which finds the class that a model becomes.

A new family is imported here; its classes say themselves what they are built from (`backbone_classes`) and how the Auto
classes of Transformers find them (`auto_classes` of the config). No other file names a family.
"""

import copy
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub import HfApi, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pipelines import PIPELINE_REGISTRY, Pipeline

from .configuration_hydra import PIPELINES, SHARED_PARTS, TrunkLayers, task_of
from .configuration_hydra_albert import HydraAlbertConfig
from .configuration_hydra_ast import HydraASTConfig
from .configuration_hydra_beit import HydraBeitConfig
from .configuration_hydra_bert import HydraBertConfig
from .configuration_hydra_clip import HydraCLIPConfig, HydraCLIPTextConfig, HydraCLIPVisionConfig
from .configuration_hydra_deberta_v2 import HydraDebertaV2Config
from .configuration_hydra_deit import HydraDeiTConfig
from .configuration_hydra_dinov2 import HydraDinov2Config
from .configuration_hydra_dinov2_with_registers import HydraDinov2WithRegistersConfig
from .configuration_hydra_dinov3_vit import HydraDINOv3ViTConfig
from .configuration_hydra_distilbert import HydraDistilBertConfig
from .configuration_hydra_electra import HydraElectraConfig
from .configuration_hydra_gemma import HydraGemmaConfig
from .configuration_hydra_gemma3_text import HydraGemma3TextConfig
from .configuration_hydra_hubert import HydraHubertConfig
from .configuration_hydra_llama import HydraLlamaConfig
from .configuration_hydra_modernbert import HydraModernBertConfig
from .configuration_hydra_mpnet import HydraMPNetConfig
from .configuration_hydra_qwen2 import HydraQwen2Config
from .configuration_hydra_qwen3 import HydraQwen3Config
from .configuration_hydra_roberta import HydraRobertaConfig
from .configuration_hydra_siglip import HydraSiglipConfig, HydraSiglipTextConfig, HydraSiglipVisionConfig
from .configuration_hydra_vit import HydraViTConfig
from .configuration_hydra_wav2vec2 import HydraWav2Vec2Config
from .configuration_hydra_wavlm import HydraWavLMConfig
from .configuration_hydra_whisper import HydraWhisperConfig
from .modeling_hydra_albert import (
    HydraAlbertForSequenceClassification,
    HydraAlbertForTokenClassification,
    HydraAlbertModel,
)
from .modeling_hydra_ast import HydraASTForAudioClassification, HydraASTModel
from .modeling_hydra_beit import HydraBeitForImageClassification, HydraBeitModel
from .modeling_hydra_bert import HydraBertForSequenceClassification, HydraBertForTokenClassification, HydraBertModel
from .modeling_hydra_clip import (
    HydraCLIPForImageClassification,
    HydraCLIPModel,
    HydraCLIPTextModel,
    HydraCLIPVisionModel,
)
from .modeling_hydra_deberta_v2 import (
    HydraDebertaV2ForSequenceClassification,
    HydraDebertaV2ForTokenClassification,
    HydraDebertaV2Model,
)
from .modeling_hydra_deit import HydraDeiTForImageClassification, HydraDeiTModel
from .modeling_hydra_dinov2 import HydraDinov2ForImageClassification, HydraDinov2Model
from .modeling_hydra_dinov2_with_registers import (
    HydraDinov2WithRegistersForImageClassification,
    HydraDinov2WithRegistersModel,
)
from .modeling_hydra_dinov3_vit import HydraDINOv3ViTModel
from .modeling_hydra_distilbert import (
    HydraDistilBertForSequenceClassification,
    HydraDistilBertForTokenClassification,
    HydraDistilBertModel,
)
from .modeling_hydra_electra import (
    HydraElectraForSequenceClassification,
    HydraElectraForTokenClassification,
    HydraElectraModel,
)
from .modeling_hydra_gemma import (
    HydraGemmaForSequenceClassification,
    HydraGemmaForTokenClassification,
    HydraGemmaModel,
)
from .modeling_hydra_gemma3_text import HydraGemma3TextForSequenceClassification, HydraGemma3TextModel
from .modeling_hydra_hubert import HydraHubertForSequenceClassification, HydraHubertModel
from .modeling_hydra_llama import (
    HydraLlamaForSequenceClassification,
    HydraLlamaForTokenClassification,
    HydraLlamaModel,
)
from .modeling_hydra_modernbert import (
    HydraModernBertForSequenceClassification,
    HydraModernBertForTokenClassification,
    HydraModernBertModel,
)
from .modeling_hydra_mpnet import (
    HydraMPNetForSequenceClassification,
    HydraMPNetForTokenClassification,
    HydraMPNetModel,
)
from .modeling_hydra_qwen2 import (
    HydraQwen2ForSequenceClassification,
    HydraQwen2ForTokenClassification,
    HydraQwen2Model,
)
from .modeling_hydra_qwen3 import (
    HydraQwen3ForSequenceClassification,
    HydraQwen3ForTokenClassification,
    HydraQwen3Model,
)
from .modeling_hydra_roberta import (
    HydraRobertaForSequenceClassification,
    HydraRobertaForTokenClassification,
    HydraRobertaModel,
)
from .modeling_hydra_siglip import (
    HydraSiglipForImageClassification,
    HydraSiglipModel,
    HydraSiglipTextModel,
    HydraSiglipVisionModel,
)
from .modeling_hydra_vit import HydraViTForImageClassification, HydraViTModel
from .modeling_hydra_wav2vec2 import HydraWav2Vec2ForSequenceClassification, HydraWav2Vec2Model
from .modeling_hydra_wavlm import HydraWavLMForSequenceClassification, HydraWavLMModel
from .modeling_hydra_whisper import HydraWhisperForAudioClassification, HydraWhisperModel


# Arguments of from_pretrained by which a config is found.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
SECONDS_TO_FIND = 10.0  # until the Hub has said whether it has a model


if TYPE_CHECKING:
    from .pretrained import HydraModelMixin

    class HydraModel(HydraModelMixin, PreTrainedModel):
        """Any Hydra, for type checkers: a model of Transformers with `calibrate`, `predict` and `member`."""

        num_members: int


class AutoHydra:
    """Hydras of any supported model, without naming their class."""

    def __init__(self):
        raise TypeError("AutoHydra is not a model: call its from_pretrained, from_backbone or from_pruned_members")

    @staticmethod
    def from_pretrained(name: str | os.PathLike, **kwargs: Any) -> "HydraModel":
        """The Hydra in a folder or on the Hub, of the class that it was saved as; `kwargs` as in Transformers."""
        check_model_exists(name)
        of_the_hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        config = transformers.AutoConfig.from_pretrained(os.fspath(name), **of_the_hub)
        return _saved_class(config, str(name)).from_pretrained(name, **kwargs)

    @staticmethod
    def from_config(config: PreTrainedConfig, **kwargs: Any) -> "HydraModel":
        """A Hydra with fresh weights, of the class that its config was saved with, or else with a head."""
        return _saved_class(config, "config")._from_config(config, **kwargs)

    @staticmethod
    def from_backbone(
        model: PreTrainedModel | str | os.PathLike,
        heads_to_prune: dict | None = None,
        check: bool = True,
        *,
        num_members: int = 1,
        trunk_layers: TrunkLayers = 0.75,
        num_labels: int | None = None,
        class_names: Sequence[str] | None = None,
        problem_type: str | None = None,
        seed: int = 0,
        shared: Sequence[str] = ("embeddings",),
    ) -> "HydraModel":
        """A Hydra of one model of Transformers: the model itself as one member, or several members with new classifiers, to be
        fine-tuned in one run. `model` is left as it is.

        Args:
            model (`PreTrainedModel`, `str` or `os.PathLike`):
                A supported model of Transformers, its folder or its Hub name; or a one-member Hydra to prune further.
            heads_to_prune (`dict`, *optional*):
                The heads to cut out of every member, `{layer: [heads]}`; for CLIP `{"vision": {layer: [heads]}, "text": ...}`.
            check (`bool`, defaults to `True`):
                Compare the Hydra with the backbone on a random batch, and raise where their outputs differ.
            num_members (`int`, defaults to 1):
                How many members. With more than one, or with one of the next three arguments, the classifier is new:
                members share the pre-trained weights, and differ by their classifiers.
            num_labels (`int`, *optional*), class_names (`list[str]`, *optional*):
                How many classes, or their names in the order of the labels; by default those in the model's config.
            problem_type (`str`, *optional*):
                "single_label_classification" (the default), "multi_label_classification", "regression" or
                "token_classification".
            trunk_layers (`int` or `float`, defaults to 0.75):
                The leading layers that run once for all members: a count, or a share below 1, rounded down.
            seed (`int`, defaults to 0):
                The classifier of member i is drawn with `seed + i`.
            shared (`Sequence[str]`, defaults to `("embeddings",)`):
                What members share behind the trunk: with "mlp" and "layernorm", too, only attention and classifier are per
                member.

        Returns:
            A Hydra in eval mode.

        Example:

        ```py
        hydra = AutoHydra.from_backbone("facebook/dinov2-small", num_members=3, num_labels=100)
        HydraTrainer(hydra, HydraTrainingArguments("run"), train_dataset=train, eval_dataset=validation).train()
        ```
        """
        is_name = isinstance(model, (str, os.PathLike))
        if num_members == 1 and (num_labels, class_names, problem_type) == (None, None, None):
            model = load_trained(model) if is_name else model
            return hydra_class(model).from_backbone(model, heads_to_prune, check)
        found = class_with_new_classifier(config_of(model) if is_name else described(model), problem_type)
        return found.from_backbone(
            model,
            heads_to_prune,
            check,
            num_members=num_members,
            trunk_layers=trunk_layers,
            num_labels=num_labels,
            class_names=class_names,
            problem_type=problem_type,
            seed=seed,
            shared=shared,
        )

    @staticmethod
    def from_pruned_members(
        members: Sequence[PreTrainedModel | str | os.PathLike],
        shared: Sequence[str] = SHARED_PARTS,
        trunk_layers: TrunkLayers = None,
        allow_equal: bool = False,
        check: bool = True,
    ) -> "HydraModel":
        """One Hydra of `members`, fine-tuned from one pre-trained model for example; they are left as they are.

        members: one-member Hydras, Hydras (their members are taken apart), or supported models of Transformers, whole or
            with their q, k, v and output projections sliced; the models, or the folders or Hub names from which they are
            loaded. All of one architecture, for the same classes
        shared: the parts that become the mean over the members, of "embeddings", "layernorm" and "mlp"; with `()` nothing
            is merged and the Hydra is exactly the ensemble of the members
        trunk_layers: how many leading layers become the mean over the members, attention too, and run once: a count, or
            a share below 1, rounded down (0.75 of 12 layers are 9). By default as many as are equal, which changes no
            answer. For CLIP of both towers, or `{"vision": 6, "text": 0}`
        allow_equal: take members that are one and the same model (or a single one), to be trained apart for example
        check: as for `from_backbone`; also warn of members that hardly differ
        """
        if isinstance(members, (PreTrainedModel, str, os.PathLike)):
            raise TypeError(f"members is a {type(members).__name__}: pass a list of members")
        if not members:
            raise ValueError("members is empty: pass at least one model")
        loaded = [load_trained(each) if isinstance(each, (str, os.PathLike)) else each for each in members]
        found = hydra_class(loaded[0], "members[0]")
        check_classes(loaded, found, "members")
        return found.from_pruned_members(loaded, shared, trunk_layers, allow_equal, check)

    @staticmethod
    def supported(task: str | None = None) -> dict[str, str]:
        """The names of the models of Transformers that become Hydras, and of the classes they become, task by task.

        task: only those of one task, named as pipelines are: "text-classification" for example, or "feature-extraction" for
            encoders without a head
        """
        tasks = {auto_class: task_of(pipeline).removeprefix("hydra-") for auto_class, pipeline in PIPELINES.items()}
        tasks["AutoModel"] = "feature-extraction"
        if task is not None and task not in tasks.values():
            raise ValueError(f"task is {task!r}: use one of {', '.join(map(repr, tasks.values()))}, or None for all")
        return {
            backbone.__name__: hydra.__name__
            for auto_class, name in tasks.items()
            for backbone, hydra in HYDRA_CLASSES.items()
            if AUTO_CLASSES.get(hydra, "AutoModel") == auto_class and task in (None, name)
        }


def _saved_class(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    kinds = [each for each in CONFIG_CLASSES if each.model_type == config.model_type]
    if not kinds:
        raise ValueError(
            f"{name} is a {config.model_type}, which is no Hydra: load it with its own class of Transformers, and pass it to "
            "AutoHydra.from_backbone"
        )
    classes = [
        _model_class(kinds[0], auto_class) for auto_class in kinds[0].auto_classes if auto_class != "AutoConfig"
    ]
    saved = getattr(config, "architectures", None) or ()
    return next((each for each in classes if each.__name__ in saved), HEADS.get(config.model_type, classes[-1]))


def hydra_class(model: PreTrainedModel, name: str = "model") -> type:
    """The Hydra class that `model` becomes; its own where it is one."""
    check_has_no_adapters(model, name)
    if hasattr(type(model), "from_pruned_members"):
        return type(model)
    for backbone_class, found in HYDRA_CLASSES.items():
        if isinstance(model, backbone_class):
            return found
    raise TypeError(
        f"{name} is a {type(model).__name__}: pass a Hydra or one of {', '.join(AutoHydra.supported())}; "
        "docs/adding-a-model-family.md tells how to add another"
    )


def check_has_no_adapters(model: nn.Module, name: str) -> None:
    """Refuses a model with adapters of PEFT, whose weights are not yet those that it computes with."""
    if not isinstance(model, nn.Module):
        return  # the caller says what is wrong with it
    if any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        raise ValueError(
            f"{name} ({type(model).__name__}) has adapters of PEFT: pass what merge_and_unload() of its PeftModel returns"
        )


def config_of(name: str | os.PathLike) -> PreTrainedConfig:
    """The config in a folder or on the Hub."""
    check_model_exists(name)
    return transformers.AutoConfig.from_pretrained(os.fspath(name))


def check_model_exists(name: str | os.PathLike) -> None:
    """Refuses at once what is neither a folder nor a model on the Hub; loading it would try for a minute first."""
    name = os.fspath(name)
    if Path(name).exists():
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no folder {name}: pass a folder that save_pretrained wrote, or a Hub name")
    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        if not is_cached and not is_offline_mode():  # otherwise loading answers at once
            HfApi().model_info(name, timeout=SECONDS_TO_FIND)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(f"there is no folder {name}, and no such model on the Hub: check the name") from error
    except HfHubHTTPError:
        return  # loading says what else the Hub objects to
    except Exception as error:  # of whichever library the requests are made with
        raise ConnectionError(
            f"there is no folder {name}, and the Hub could not be reached to look for a model of that name: check the name, or "
            "the network"
        ) from error


def load_trained(name: str | os.PathLike) -> PreTrainedModel:
    """The classifier or zero-shot model in a folder or on the Hub, ready to predict; one with untrained parts is refused."""
    config = config_of(name)
    if config.model_type not in HEADS:
        raise ValueError(f"{name} is a {config.model_type}: pass a {', '.join(HEADS)} model")
    model, found = head_of(config).from_pretrained(name, output_loading_info=True)
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(f"{name} has no {missing[0]}: pass a model that is trained for classification")
    return model.eval()


def check_classes(models: Sequence[PreTrainedModel], found: type, name: str) -> None:
    """Refuses models of one kind that call their classes, or count them, differently: their answers have no mean."""
    kinds = (*found.backbone_types, found.config_class.model_type)
    first = models[0].config.id2label
    for place, model in enumerate(models):
        config = getattr(model, "config", None)
        if getattr(config, "model_type", None) in kinds and config.id2label != first:
            at = next(
                index for index in {**first, **config.id2label} if first.get(index) != config.id2label.get(index)
            )
            raise ValueError(
                f"{name}[{place}] has other classes than {name}[0] (number {at} is {config.id2label.get(at)!r}, not "
                f"{first.get(at)!r}): pass models fine-tuned on the same labels, or set id2label alike if only names differ"
            )


def _model_class(config_class: type, auto_class: str) -> type:
    return globals()[config_class.auto_classes[auto_class].rpartition(".")[2]]


CONFIG_CLASSES: tuple[type[PreTrainedConfig], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, type) and hasattr(value, "auto_classes")
)
# By class of the backbone, those with a head first: a model without one is part of a model with one.
HYDRA_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {
    backbone: _model_class(config, auto_class)
    for of_heads in (True, False)
    for config in CONFIG_CLASSES
    for auto_class in config.auto_classes
    if auto_class != "AutoConfig" and (auto_class != "AutoModel") is of_heads
    for backbone in _model_class(config, auto_class).backbone_classes
}


# Backbones and Hydras with a head, and the name of the Auto class that loads them.
AUTO_CLASSES: dict[type[PreTrainedModel], str] = {
    each: auto_class
    for config in CONFIG_CLASSES
    for auto_class in config.auto_classes
    if auto_class not in ("AutoConfig", "AutoModel")
    for each in (_model_class(config, auto_class), *_model_class(config, auto_class).backbone_classes)
}
# By `model_type`, of backbones and of Hydras, the class for the task that a user would have the model for: where one type has
# several (two towers, or an image classifier of one of them), the first.
HEADS: dict[str, type[PreTrainedModel]] = {}
for _each in AUTO_CLASSES:
    HEADS.setdefault(_each.config_class.model_type, _each)
# By `model_type` of a backbone, its class with a classifier of whole texts, images or sounds.
CLASSIFIERS: dict[str, type[PreTrainedModel]] = {
    each.config_class.model_type: each
    for each, auto_class in AUTO_CLASSES.items()
    if not any(kind in auto_class for kind in ("ZeroShot", "Token")) and not hasattr(each, "from_pruned_members")
}


# By `model_type` of a backbone, its class with a classifier of tokens.
TOKEN_CLASSIFIERS: dict[str, type[PreTrainedModel]] = {
    each.config_class.model_type: each
    for each, auto_class in AUTO_CLASSES.items()
    if "Token" in auto_class and not hasattr(each, "from_pruned_members")
}


def head_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class with a head that a backbone's or Hydra's config was saved with, or that of `HEADS` where it was none."""
    saved = getattr(config, "architectures", None) or ()
    kinds = {each.__name__: each for each in AUTO_CLASSES if each.config_class.model_type == config.model_type}
    return next((kinds[name] for name in saved if name in kinds), HEADS[config.model_type])


def class_with_new_classifier(config: PreTrainedConfig, problem_type: str | None) -> type[PreTrainedModel]:
    """The Hydra class for a pre-trained model's config and a task; of tokens where the model is a token classifier already."""
    is_of_tokens = problem_type == "token_classification"
    if problem_type is None and config.model_type in HEADS:
        is_of_tokens = "Token" in auto_class_of(config)
    classes = TOKEN_CLASSIFIERS if is_of_tokens else CLASSIFIERS
    if config.model_type not in classes:
        raise ValueError(
            f"model is a {config.model_type}, which gets no classifier of {'tokens' if is_of_tokens else 'whole inputs'} here: "
            f"pass a pre-trained model of Transformers, one of {', '.join(classes)}"
        )
    return HYDRA_CLASSES[classes[config.model_type]]


def auto_class_of(config: PreTrainedConfig) -> str:
    """The name of the Auto class that loads the class which `head_of` finds."""
    return AUTO_CLASSES[head_of(config)]


def described(model: PreTrainedModel) -> PreTrainedConfig:
    """A copy of a model's config that names its class, and not the one that it was loaded from."""
    config = copy.copy(model.config)
    config.architectures = [type(model).__name__]
    return config


def is_zero_shot(config: PreTrainedConfig) -> bool:
    """Whether a backbone's or Hydra's config is that of two towers, which choose among the texts of each call."""
    return "ZeroShot" in auto_class_of(config)


def register() -> None:
    """Lets the Auto classes and `pipeline` find what is installed, and saved models take their code along.

    Both are needed: registered only with the Auto classes, a model that came from the Hub would be saved without code.
    """
    for config_class in CONFIG_CLASSES:
        transformers.AutoConfig.register(config_class.model_type, config_class)
        config_class.register_for_auto_class()
        for auto_class in config_class.auto_classes:
            if auto_class != "AutoConfig":
                model_class = _model_class(config_class, auto_class)
                getattr(transformers, auto_class).register(config_class, model_class)
                model_class.register_for_auto_class(auto_class)
    for auto_class, pipeline in PIPELINES.items():
        PIPELINE_REGISTRY.register_pipeline(
            task_of(pipeline), pipeline_class(auto_class), getattr(transformers, auto_class)
        )


def pipeline_class(auto_class: str) -> type[Pipeline]:
    """The pipeline that says how sure it is, of models that this Auto class loads."""
    module, _, name = PIPELINES[auto_class].partition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)


__all__ = [
    "AutoHydra",
    "HydraASTConfig",
    "HydraASTForAudioClassification",
    "HydraASTModel",
    "HydraAlbertConfig",
    "HydraAlbertForSequenceClassification",
    "HydraAlbertForTokenClassification",
    "HydraAlbertModel",
    "HydraBeitConfig",
    "HydraBeitForImageClassification",
    "HydraBeitModel",
    "HydraBertConfig",
    "HydraBertForSequenceClassification",
    "HydraBertForTokenClassification",
    "HydraBertModel",
    "HydraCLIPConfig",
    "HydraCLIPForImageClassification",
    "HydraCLIPModel",
    "HydraCLIPTextConfig",
    "HydraCLIPTextModel",
    "HydraCLIPVisionConfig",
    "HydraCLIPVisionModel",
    "HydraDINOv3ViTConfig",
    "HydraDINOv3ViTModel",
    "HydraDebertaV2Config",
    "HydraDebertaV2ForSequenceClassification",
    "HydraDebertaV2ForTokenClassification",
    "HydraDebertaV2Model",
    "HydraDeiTConfig",
    "HydraDeiTForImageClassification",
    "HydraDeiTModel",
    "HydraDinov2Config",
    "HydraDinov2ForImageClassification",
    "HydraDinov2Model",
    "HydraDinov2WithRegistersConfig",
    "HydraDinov2WithRegistersForImageClassification",
    "HydraDinov2WithRegistersModel",
    "HydraDistilBertConfig",
    "HydraDistilBertForSequenceClassification",
    "HydraDistilBertForTokenClassification",
    "HydraDistilBertModel",
    "HydraElectraConfig",
    "HydraElectraForSequenceClassification",
    "HydraElectraForTokenClassification",
    "HydraElectraModel",
    "HydraGemma3TextConfig",
    "HydraGemma3TextForSequenceClassification",
    "HydraGemma3TextModel",
    "HydraGemmaConfig",
    "HydraGemmaForSequenceClassification",
    "HydraGemmaForTokenClassification",
    "HydraGemmaModel",
    "HydraHubertConfig",
    "HydraHubertForSequenceClassification",
    "HydraHubertModel",
    "HydraLlamaConfig",
    "HydraLlamaForSequenceClassification",
    "HydraLlamaForTokenClassification",
    "HydraLlamaModel",
    "HydraMPNetConfig",
    "HydraMPNetForSequenceClassification",
    "HydraMPNetForTokenClassification",
    "HydraMPNetModel",
    "HydraModernBertConfig",
    "HydraModernBertForSequenceClassification",
    "HydraModernBertForTokenClassification",
    "HydraModernBertModel",
    "HydraQwen2Config",
    "HydraQwen2ForSequenceClassification",
    "HydraQwen2ForTokenClassification",
    "HydraQwen2Model",
    "HydraQwen3Config",
    "HydraQwen3ForSequenceClassification",
    "HydraQwen3ForTokenClassification",
    "HydraQwen3Model",
    "HydraRobertaConfig",
    "HydraRobertaForSequenceClassification",
    "HydraRobertaForTokenClassification",
    "HydraRobertaModel",
    "HydraSiglipConfig",
    "HydraSiglipForImageClassification",
    "HydraSiglipModel",
    "HydraSiglipTextConfig",
    "HydraSiglipTextModel",
    "HydraSiglipVisionConfig",
    "HydraSiglipVisionModel",
    "HydraViTConfig",
    "HydraViTForImageClassification",
    "HydraViTModel",
    "HydraWav2Vec2Config",
    "HydraWav2Vec2ForSequenceClassification",
    "HydraWav2Vec2Model",
    "HydraWavLMConfig",
    "HydraWavLMForSequenceClassification",
    "HydraWavLMModel",
    "HydraWhisperConfig",
    "HydraWhisperForAudioClassification",
    "HydraWhisperModel",
]
