"""`AutoHydra`, which finds the class that a model becomes, and the classes of all families by
backbone, task and type.

Families are in the table of `families.py`; they are imported when they are needed. Their classes
say themselves what they are built from (`backbone_classes`) and how the Auto classes of
Transformers find them (`auto_classes` of the config).
"""

import copy
import difflib
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub import HfApi, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .adapters import base_of_adapters, config_of_adapters, is_adapter_folder, load_merged
from .configuration_hydra import SHARED_PARTS, TrunkLayers
from .families import FAMILIES, config_class, model_class


# Arguments of from_pretrained by which a config is found.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# What a model reads, by the Auto class that loads it.
INPUTS = {
    "AutoModelForAudioClassification": "audio",
    "AutoModelForImageClassification": "image",
    "AutoModelForSequenceClassification": "text",
    "AutoModelForTokenClassification": "tokens",
    "AutoModelForZeroShotImageClassification": "zero-shot",
}
SECONDS_TO_FIND = 10.0  # until the Hub has said whether it has a model


if TYPE_CHECKING:
    from .pretrained import HydraModelMixin

    class HydraModel(HydraModelMixin, PreTrainedModel):
        """Any Hydra, for type checkers: a model of Transformers with `calibrate`, `predict` and
        `member`."""

        num_members: int


class AutoHydra:
    """Hydras of any supported model, without naming their class."""

    @staticmethod
    def from_pretrained(name: str | os.PathLike, **kwargs: Any) -> "HydraModel":
        """Load the Hydra in a folder or on the Hub, as the class that it was saved as.

        kwargs: as in Transformers
        """
        check_model_exists(name)
        hub_arguments = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        config = transformers.AutoConfig.from_pretrained(os.fspath(name), **hub_arguments)
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"{name} is a {config.model_type}, which is not a Hydra: load it with its own class of Transformers, "
                "and pass it to AutoHydra.from_backbone"
            )
        classes = list(classes_of([config.model_type]))
        usual = next(iter(classes_with_head_of_type(config.model_type)), classes[-1])
        return saved_class(config, classes, usual).from_pretrained(name, **kwargs)

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
        """Build a Hydra of one model of Transformers: the model itself as one member, or several
        members with new classifiers, to be fine-tuned in one run. `model` is left as it is.

        Args:
            model (`PreTrainedModel`, `str` or `os.PathLike`):
                A supported model of Transformers, its folder or its Hub name; or a one-member Hydra
                to prune further.
            heads_to_prune (`dict`, *optional*):
                The heads to cut out of every member, `{layer: [heads]}`; for CLIP
                `{"vision": {layer: [heads]}, "text": ...}`.
            check (`bool`, defaults to `True`):
                Compare the Hydra with the backbone on a random batch, and raise where their outputs
                differ.
            num_members (`int`, defaults to 1):
                How many members. With more than one, or with one of the next three arguments, the
                classifier is new: members share the pre-trained weights, and differ by their
                classifiers.
            num_labels (`int`, *optional*):
                How many classes; by default as many as in the model's config.
            class_names (`list[str]`, *optional*):
                The classes' names in the order of the labels; by default those in the model's
                config.
            problem_type (`str`, *optional*):
                "single_label_classification" (the default), "multi_label_classification",
                "regression" or "token_classification".
            trunk_layers (`int` or `float`, defaults to 0.75):
                The leading layers that run once for all members: a count, or a share below 1,
                rounded down.
            seed (`int`, defaults to 0):
                The classifier of member i is drawn with `seed + i`.
            shared (`Sequence[str]`, defaults to `("embeddings",)`):
                What members share behind the trunk; with "mlp" and "layernorm" too, all but
                attention and classifier.

        Returns:
            A Hydra in eval mode.

        Example:

        ```py
        hydra = AutoHydra.from_backbone("facebook/dinov2-small", num_members=3, num_labels=100)
        arguments = HydraTrainingArguments("run")
        HydraTrainer(hydra, arguments, train_dataset=train, eval_dataset=validation).train()
        ```
        """
        is_name = isinstance(model, (str, os.PathLike))

        # The model itself as one member.
        if num_members == 1 and (num_labels, class_names, problem_type) == (None, None, None):
            if is_name:
                model = load_trained(model)
            return hydra_class(model).from_backbone(model, heads_to_prune, check)

        # Members with new classifiers.
        if is_name:
            config = config_of(model)
        else:
            config = config_with_architecture(model)
        return class_with_new_classifier(config, problem_type).from_backbone(
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
        """Fuse `members` into one Hydra, fine-tuned from one pre-trained model for example; they
        are left as they are.

        Args:
            members (`Sequence`):
                One-member Hydras, Hydras (their members are taken apart), or supported models of
                Transformers; the models, or the folders or Hub names from which they are loaded, or
                folders of PEFT adapters, which are merged into their base model. All of one
                architecture, for the same classes.
            shared (`Sequence[str]`, *optional*, defaults to `("embeddings", "layernorm", "mlp")`):
                The parts that become the mean over the members; with `()` nothing is merged and the
                Hydra is exactly the ensemble of the members.
            trunk_layers (`int`, `float` or `dict`, *optional*):
                How many leading layers become the mean over the members, attention too, and run
                once: a count, or a share below 1, rounded down (0.75 of 12 layers are 9). By
                default as many as are equal, which changes no prediction. For CLIP of both towers,
                or `{"vision": 6, "text": 0}`.
            allow_equal (`bool`, *optional*, defaults to `False`):
                Accept members that are one and the same model (or a single one), to be trained
                apart for example.
            check (`bool`, *optional*, defaults to `True`):
                As for `from_backbone`; also warn of members that hardly differ.

        Returns:
            A Hydra in eval mode.
        """
        if isinstance(members, (PreTrainedModel, str, os.PathLike)):
            raise TypeError(f"members is a {type(members).__name__}: pass a list of members")
        if not members:
            raise ValueError("members is empty: pass at least one model")
        loaded = []
        for member in members:
            if isinstance(member, (str, os.PathLike)):
                member = load_trained(member)
            loaded.append(member)
        hydra = hydra_class(loaded[0], "members[0]")
        return hydra.from_pruned_members(loaded, shared, trunk_layers, allow_equal, check)

    @staticmethod
    def supported() -> dict[str, str]:
        """Return the names of the models of Transformers that become Hydras, and of the classes
        they become."""
        return {backbone.__name__: hydra.__name__ for backbone, hydra in hydra_classes().items()}


def is_hydra_class(model_class: type | None) -> bool:
    """Whether a class is a Hydra's. It may have come with a repository, and then be another than
    this package's."""
    return hasattr(model_class, "from_pruned_members")


def hydra_class(model: PreTrainedModel, name: str = "model") -> type:
    """Return the Hydra class that `model` becomes; its own where it is one."""
    check_has_no_adapters(model, name)
    if is_hydra_class(type(model)):
        return type(model)
    config = getattr(model, "config", None)
    families = families_of(getattr(config, "model_type", ""))
    for backbone_class, hydra in backbones_of(families).items():
        if isinstance(model, backbone_class):
            return hydra
    raise TypeError(
        f"{name} is a {type(model).__name__}: pass a Hydra or one of AutoHydra.supported(), such as "
        f"{closest(type(model).__name__, AutoHydra.supported())}; docs/adding-a-model-family.md tells how to add "
        "another"
    )


def closest(name: str, supported: Iterable[str]) -> str:
    """Return the three supported names that are most like `name`."""
    return ", ".join(difflib.get_close_matches(name, supported, n=3, cutoff=0.0))


def check_has_no_adapters(model: nn.Module, name: str) -> None:
    """Raise for a model with adapters of PEFT, whose weights are not yet those that it computes
    with."""
    if not isinstance(model, nn.Module):
        return  # the caller says what is wrong with it
    if any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        raise ValueError(f"{name} ({type(model).__name__}) has adapters: pass the result of merge_and_unload()")


def config_of(name: str | os.PathLike) -> PreTrainedConfig:
    """Load the config in a folder or on the Hub; for a folder of adapters that of the model with
    them."""
    check_model_exists(name)
    if is_adapter_folder(name):
        check_model_exists(base_of_adapters(name))
        return config_of_adapters(name)
    return transformers.AutoConfig.from_pretrained(os.fspath(name))


def check_model_exists(name: str | os.PathLike) -> None:
    """Raise at once for what is neither a folder nor a model on the Hub; loading it would try for a
    minute first."""
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
            f"there is no folder {name}, and the Hub could not be reached to look for it: check the name, or the "
            "network"
        ) from error


def check_type_is_supported(config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Raise for a model of which there is no classifier, nor a zero-shot model, that becomes a
    Hydra."""
    if not classes_with_head_of_type(config.model_type):
        types = {each.config_class.model_type for each in classes_with_head(FAMILIES)}
        raise ValueError(f"{name} is a {config.model_type}: not supported; {closest(config.model_type, types)} are")


def load_trained(
    name: str | os.PathLike, config: PreTrainedConfig | None = None, keep_decision: bool = True
) -> PreTrainedModel:
    """Load the classifier or zero-shot model in a folder or on the Hub, ready to predict; adapters
    are merged into their base model.

    A model with untrained parts raises.

    config: of that name, if it was loaded before
    keep_decision: False for a model that is to be calibrated anew
    """
    if config is None:
        config = config_of(name)
    check_type_is_supported(config, name)
    if is_adapter_folder(name):
        model, missing = load_merged(class_with_head(config), config, name)
    else:
        without_decision = {}
        if not keep_decision and getattr(config, "decision", None) is not None:
            without_decision = {"decision": None}
        model, loading = class_with_head(config).from_pretrained(name, output_loading_info=True, **without_decision)
        missing = loading["missing_keys"]
    if missing and (Path(name) / "config_setfit.json").exists():
        raise ValueError(
            f"{name} is a SetFit model, whose classifier is outside the network: fine-tune its encoder, as "
            f"`hydra-transformers finetune {name} --data ...` does"
        )
    if missing:
        raise ValueError(f"{name} has no {min(missing)}: pass a model that is trained for classification")
    return model.eval()


def families_of(model_type: str) -> list[str]:
    """Return the Hydra types that a backbone's or a Hydra's `model_type` belongs to."""
    return [kind for kind, family in FAMILIES.items() if model_type in (kind, *family.backbone_types)]


def classes_of(kinds: Iterable[str]) -> dict[type[PreTrainedModel], str]:
    """Return the model classes of these Hydra types, and the Auto classes that load them; an
    encoder with two has the last."""
    classes = {}
    for kind in kinds:
        config = config_class(kind)
        for auto_class in config.auto_classes:
            if auto_class != "AutoConfig":
                classes[model_class(config, auto_class)] = auto_class
    return classes


def backbones_of(kinds: Iterable[str]) -> dict[type[PreTrainedModel], type[PreTrainedModel]]:
    """Return the Hydra class by class of the backbone, those with a head first: a model without one
    is part of a model with one."""
    classes = classes_of(kinds)
    ordered = sorted(classes, key=lambda hydra: classes[hydra] == "AutoModel")
    return {backbone: hydra for hydra in ordered for backbone in hydra.backbone_classes}


def classes_with_head(kinds: Iterable[str]) -> dict[type[PreTrainedModel], str]:
    """Return the Hydras of these types that have a head, and their backbones, with the names of the
    Auto classes that load them."""
    classes = {}
    for hydra, auto_class in classes_of(kinds).items():
        if auto_class != "AutoModel":
            for each in (hydra, *hydra.backbone_classes):
                classes[each] = auto_class
    return classes


@cache
def hydra_classes() -> dict[type[PreTrainedModel], type[PreTrainedModel]]:
    """Return `backbones_of` all families, which are imported."""
    return backbones_of(FAMILIES)


def classes_with_head_of_type(model_type: str) -> dict[type[PreTrainedModel], str]:
    """Return `classes_with_head` of a backbone's or Hydra's `model_type`, the one first that a user
    would have the model for."""
    classes = classes_with_head(families_of(model_type))
    return {each: auto_class for each, auto_class in classes.items() if each.config_class.model_type == model_type}


def class_with_head(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class with a head that a backbone's or Hydra's config was saved with, or the usual
    one where it was none."""
    classes = list(classes_with_head_of_type(config.model_type))
    return saved_class(config, classes, classes[0])


def saved_class(
    config: PreTrainedConfig, classes: Iterable[type[PreTrainedModel]], usual: type[PreTrainedModel]
) -> type[PreTrainedModel]:
    """Return the class that a config was saved with, if it is one of these; the usual one
    otherwise."""
    saved_names = getattr(config, "architectures", None) or ()
    for each in classes:
        if each.__name__ in saved_names:
            return each
    return usual


def class_with_new_classifier(config: PreTrainedConfig, problem_type: str | None) -> type[PreTrainedModel]:
    """Return the Hydra class for a pre-trained model's config and a task; of tokens where the model
    is a token classifier already."""
    is_of_tokens = problem_type == "token_classification"
    if problem_type is None:
        is_of_tokens = INPUTS.get(auto_class_of(config)) == "tokens"
    for backbone, auto_class in classes_with_head_of_type(config.model_type).items():
        inputs = INPUTS[auto_class]
        if is_hydra_class(backbone) or inputs == "zero-shot":
            continue
        if (inputs == "tokens") == is_of_tokens:
            return hydra_classes()[backbone]
    units = "tokens" if is_of_tokens else "whole inputs"
    raise ValueError(
        f"model is a {config.model_type}, which gets no classifier of {units} here: pass a pre-trained model of "
        "Transformers, one of AutoHydra.supported()"
    )


def auto_class_of(config: PreTrainedConfig, model_class: type | None = None) -> str:
    """Return the name of the Auto class that loads a class, by default the one that
    `class_with_head` finds; empty where there is none."""
    classes = classes_with_head_of_type(config.model_type)
    if model_class is not None:
        for each, auto_class in classes.items():
            if each.__name__ == model_class.__name__:
                return auto_class
    if not classes:
        return ""
    return classes[class_with_head(config)]


def config_with_architecture(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of a model's config that names its class, and not the one that it was loaded
    from."""
    config = copy.copy(model.config)
    config.architectures = [type(model).__name__]
    return config
