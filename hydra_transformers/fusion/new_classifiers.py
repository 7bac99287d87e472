"""A pre-trained model with new classifiers, one for each member: the start of a fine-tuning in one
run."""

import copy
import os
from collections.abc import Collection, Sequence
from numbers import Integral

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.adapters import is_adapter_folder
from ..models.auto import INPUTS, config_of, load_trained
from ..models.backbone_rules import backbone_types
from ..models.configuration_hydra import PROBLEM_TYPES, set_problem_type
from ..models.task import load_task
from .checks import check_is_in_memory
from .reading import backbone_names, read_members
from .structure import Member


TOKEN_CLASSIFICATION = "token_classification"


def read_with_new_classifiers(
    cls: type,
    model: PreTrainedModel | str | os.PathLike,
    num_members: int,
    num_labels: int | None,
    class_names: Sequence[str] | None,
    problem_type: str | None,
    seed: int,
) -> tuple[PreTrainedModel, Member, list[dict[str, torch.Tensor]]]:
    """The first member as a model of Transformers and as it is read, and the tensors of each
    member's classifier.

    Classifier i is drawn with `seed + i`. Other new layers (BERT's pooler where a checkpoint has
    none) are drawn once.
    """
    for name, number in (("num_members", num_members), ("num_labels", num_labels)):
        if number is not None and (not isinstance(number, Integral) or number < 1):
            raise ValueError(f"{name} is {number!r}: pass a whole number, at least 1")
    if cls.is_base_model or INPUTS[cls._auto_class] == "zero-shot":
        raise ValueError(f"{cls.__name__} has no classifier, by which new members differ: use a class that has one")
    if not isinstance(model, PreTrainedModel) and is_adapter_folder(model):
        model = load_trained(model)
    is_model = isinstance(model, PreTrainedModel)
    name = f"model ({type(model).__name__})" if is_model else os.fspath(model)
    config = copy.deepcopy(model.config) if is_model else config_of(model)
    if config.model_type not in backbone_types(cls):
        raise ValueError(
            f"{name} is a {config.model_type}: {cls.__name__} gets new classifiers on pre-trained "
            f"{' or '.join(backbone_types(cls))} models"
        )
    set_classes(config, num_labels, class_names, problem_type, is_of_tokens=INPUTS[cls._auto_class] == "tokens")
    with torch.random.fork_rng(devices=[]):
        backbone, untrained = _with_head(cls, model, config, name)
    prefix = f"{cls.base_model_prefix}."
    heads = {name for name, _ in backbone.named_parameters() if not name.startswith(prefix)}
    missing = {key for key in untrained - heads if not (key.startswith(cls.unused_prefixes) or "pooler." in key)}
    if missing:
        raise ValueError(f"{name} has no {min(missing)} of the right shape: pass a model that is pre-trained")
    _draw(backbone, untrained | heads, seed)
    start = copy.deepcopy(backbone) if num_members > 1 else backbone
    [first] = read_members(cls, start, "model")
    names = [ours for ours, theirs in backbone_names(cls, backbone).items() if heads.intersection(theirs)]
    classifiers = [{name: first.tensors[name] for name in names}]
    for index in range(1, num_members):
        _draw(backbone, heads, seed + index)
        [draw] = read_members(cls, backbone, "model")
        classifiers.append({name: draw.tensors[name].clone() for name in names})
    return start, first, classifiers


def set_classes(
    config: PreTrainedConfig,
    num_labels: int | None,
    class_names: Sequence[str] | None,
    problem_type: str | None,
    is_of_tokens: bool,
) -> None:
    """Sets the classes and the problem type in a config; without either, its own classes stay."""
    if problem_type == TOKEN_CLASSIFICATION and is_of_tokens:
        problem_type = None
    if problem_type not in (None, *PROBLEM_TYPES):
        known = ", ".join(map(repr, PROBLEM_TYPES))
        raise ValueError(f"problem_type is {problem_type!r}: pass one of {known}, or the class for tokens")
    task = load_task(problem_type)
    if class_names is not None:
        least = task.least_classes
        if (
            isinstance(class_names, str)
            or len(class_names) < least
            or len(set(map(str, class_names))) < len(class_names)
        ):
            number = "at least two different names" if least == 2 else "a list of different names"
            raise ValueError(f"class_names is {class_names!r}: pass {number}, in the order of the labels")
        if num_labels not in (None, len(class_names)):
            raise ValueError(f"num_labels is {num_labels} and class_names has {len(class_names)}: pass one of them")
        config.id2label = {index: str(name) for index, name in enumerate(class_names)}
        config.label2id = {name: index for index, name in config.id2label.items()}
    elif num_labels is not None:
        config.num_labels = num_labels
    elif task.predicts_numbers:
        config.num_labels = 1
    config.problem_type = problem_type
    if not is_of_tokens:
        set_problem_type(config)


def _with_head(
    cls: type, model: PreTrainedModel | str | os.PathLike, config: PreTrainedConfig, name: str
) -> tuple[PreTrainedModel, set[str]]:
    """A copy of the model with a classification head, and the names of the parameters that are not
    pre-trained."""
    head = next(kind for kind in cls.backbone_classes if kind.config_class.model_type == config.model_type)
    config.architectures = [head.__name__]
    if not isinstance(model, PreTrainedModel):
        # Loaded in float32, not cast to it afterwards: numbers computed from the config stay exact
        # (Gemma's scale).
        backbone, loading = head.from_pretrained(
            model, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
        names = {*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])}
        return backbone.eval(), names & dict(backbone.named_parameters()).keys()
    check_is_in_memory(model, name)
    backbone = head(config).to(model.device)
    for parameter in backbone.parameters():  # not the buffers: rotary positions stay in float32, as after loading
        parameter.data = parameter.data.to(model.dtype)
    prefix = cls.base_model_prefix  # on one of two towers, Transformers' own prefix is another
    encoder, untrained = getattr(backbone, prefix), set()
    source = next((module for module in model.modules() if isinstance(module, type(encoder))), model).state_dict()
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name in source and source[name].shape == parameter.shape:
                parameter.copy_(source[name])
            else:
                untrained.add(f"{prefix}.{name}")
    return backbone.eval(), untrained


def _draw(model: PreTrainedModel, names: Collection[str], seed: int) -> None:
    """Draws the parameters of these names anew, as a new model of the class has them."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        drawn = type(model)(copy.deepcopy(model.config))
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).copy_(drawn.get_parameter(name))
