"""Several fine-tunings of one pre-trained model: the members of a Hydra before any pruning."""

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.tags import TOKEN_CLASSIFICATION
from ..fusion.checks import check_is_in_memory
from ..fusion.soup import average_members
from ..models.auto import CLASSIFIERS, HYDRA_CLASSES, TOKEN_CLASSIFIERS, AutoHydra, config_of, head_of
from ..models.configuration_hydra import PROBLEM_TYPES, set_problem_type
from .callbacks import EndAfter
from .finetune import finetune_members
from .parameter_groups import places
from .recipes import Recipe, default_recipe, recipe_for


BEFORE_RESTARTS = 0.5  # of a training; the best of four points that were tried
START = "start"  # the folder of the common part of one run


def finetune_from_pretrained(
    pretrained: PreTrainedModel | str | os.PathLike,
    num_members: int,
    recipe: Recipe | str | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    output_dir: str | os.PathLike | None = None,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    trainings: float | None = None,
    problem_type: str | None = None,
    classifiers: int | None = None,
    predicts_variance: bool = False,
    **arguments: Any,
) -> list[PreTrainedModel]:
    """Fine-tunes one pre-trained model several times; the results differ by their initial classifiers and orders of the data.

    `AutoHydra.from_pruned_members` fuses them, as they are or each pruned by a circuit of its own (`draw_members`).

    Args:
        pretrained: a supported model of Transformers, with or without a head, its folder or its Hub name. It is left as it is;
            a head is replaced by a new one.
        num_members: how many fine-tunings.
        recipe: a `Recipe`, or the name of one: "finetune-images" or "finetune-texts"; None for `default_recipe`: one of
            these, with epochs by the data's size and early stopping.
        class_names: the names of the labels 0, 1, ...; by default those in the model's config.
        seed: the classifier of member i is drawn with `seed + i`, and it trains with that seed.
        classifiers: how many different new classifiers the fine-tunings begin with; None for one each where they choose one
            class, otherwise for the same (docs/results/tasks.md). With 1 they stay closer to each other: what members share, trunks
            and averages then cost less accuracy, and members disagree less.
        trainings: the steps of all members together, in trainings; None for a whole one each. A multiple of `num_members`, such
            as 6 for 3, makes as many fine-tunings and averages them in their order into the members (`average_members`):
            better, and no slower to run. With less than one each, one training runs up to its half, and each member goes on from
            there: a short training of its own with a new rise of the learning rate (StarSSE, Sadrtdinov et al., 2023). So 3
            members of `trainings=1.5` take a third of a training each. They are cheaper and worse than whole fine-tunings:
            docs/fine-tuning.md has figures.
        problem_type: as in the model's config: "multi_label_classification" for rows with several labels each,
            "regression" for numbers (one, or one for each of class_names); or "token_classification" for a class for each
            token, its names the tags of words; by default one class per row.
        predicts_variance: for regression: members learn a variance beside each number, see `with_variance`.
        train_data, validation_data, output_dir, arguments: as for `finetune_members`; the same call resumes.
    """
    if trainings is not None:
        check_trainings(trainings, num_members)
    if predicts_variance and problem_type != "regression":
        raise ValueError("predicts_variance is for problem_type='regression': pass that, too, or leave it out")
    count = fine_tunings_within(trainings, num_members)
    if classifiers is not None:
        check_classifiers(classifiers, count)
    members = with_new_classifiers(pretrained, count or 1, class_names, seed, problem_type, classifiers)
    if predicts_variance:
        members = [with_variance(member) for member in members]
    if recipe is None and train_data is not None:
        recipe = default_recipe(members[0].config, train_data, is_pretrained=True)
    if count or output_dir is None or train_data is None:  # the latter two are refused there
        members = finetune_members(members, recipe, train_data, validation_data, output_dir, seed=seed, **arguments)
        return average_members(members, num_members) if len(members) > num_members else members
    recipe = recipe_for(recipe, members[0].config, train_data)
    data = {"train_data": train_data, "validation_data": validation_data}
    share = (trainings - BEFORE_RESTARTS) / num_members
    if arguments.get("progress", True):
        print(
            f"one run of {trainings:g} trainings: a common start of {BEFORE_RESTARTS:g}, then {num_members} restarts of {share:.3g}",
            flush=True,
        )
    start = start_of_one_run(members[0], recipe, output_dir=Path(output_dir) / START, seed=seed, **data, **arguments)
    arguments = shortened_arguments(arguments, share)
    recipe = shortened(recipe, share)
    return finetune_members([start] * num_members, recipe, output_dir=output_dir, seed=seed + 1, **data, **arguments)


def with_variance(model: PreTrainedModel) -> PreTrainedModel:
    """A regression model, or a one-member Hydra of one, as a one-member Hydra whose head also gives a variance for each output.

    It begins with a variance of 1 and the numbers of `model`, which is left as it is. It learns both by the Gaussian negative
    log-likelihood, with `Trainer` or `finetune_members`; `from_pruned_members` fuses such members as it does others. Train it on
    labels whose scatter is not far from 1: divide them by their standard deviation if it is.
    """
    hydra = model if hasattr(model, "num_members") else AutoHydra.from_backbone(model)
    if hydra.num_members > 1 or getattr(hydra.config, "problem_type", None) != "regression":
        raise ValueError(
            f"model is a {type(model).__name__} of {hydra.num_members} members, problem_type {hydra.config.problem_type!r}: pass one "
            "member made for regression"
        )
    config = copy.deepcopy(hydra.config)
    config.predicts_variance, config.decision = True, None
    result = type(hydra)(config).to(hydra.device, hydra.dtype)
    before = hydra.state_dict()
    with torch.no_grad():
        for name, tensor in result.state_dict().items():
            tensor.zero_()
            tensor[: len(before[name])].copy_(before[name]) if tensor.dim() else tensor.copy_(before[name])
    return result.eval()


def check_trainings(trainings: float, num_members: int, name: str = "trainings", or_more: bool = True) -> None:
    """Refuses a budget without restarts, one that is just enough for whole fine-tunings, and unless `or_more` larger ones."""
    is_multiple = or_more and trainings > num_members and trainings % num_members == 0
    if not BEFORE_RESTARTS < trainings < num_members and not is_multiple:
        more = f"a multiple of it such as {2 * num_members}, " if or_more else ""
        raise ValueError(
            f"{name} is {trainings}: pass more than {BEFORE_RESTARTS} and less than {num_members}, the number of members, {more}or "
            "leave it out for whole fine-tunings"
        )


def check_classifiers(classifiers: int, fine_tunings: int, name: str = "classifiers") -> None:
    """fine_tunings: 0 for restarts of one run, which begin with one."""
    if not 1 <= classifiers <= max(1, fine_tunings):
        which = (
            f"a number from 1 to {fine_tunings}, of fine-tunings"
            if fine_tunings
            else "1, for restarts of one run have one"
        )
        raise ValueError(f"{name} is {classifiers}: pass {which}")


def fine_tunings_within(trainings: float | None, num_members: int) -> int:
    """How many whole fine-tunings a budget is for: one for each member, a multiple of that, or 0 for a single run."""
    return num_members if trainings is None else int(trainings) if trainings >= num_members else 0


def start_of_one_run(model: PreTrainedModel, recipe: Recipe, **arguments: Any) -> PreTrainedModel:
    """The model after the first half of a training, whose learning rate is still high; arguments of `finetune_members`."""
    recipe = replace(recipe, early_stopping_patience=None, keep_best=False)
    arguments["callbacks"] = [*arguments.get("callbacks", ()), EndAfter(BEFORE_RESTARTS)]
    [start] = finetune_members([model], recipe, **arguments)
    return start


def shortened(recipe: Recipe, share: float) -> Recipe:
    """The recipe for a share of its steps, without early stopping; the warm-up keeps its share."""
    steps = None if recipe.max_steps is None else max(1, round(share * recipe.max_steps))
    warmup = recipe.warmup_steps
    if warmup >= 1:  # less than one step would be read as a share of all steps
        warmup = share * warmup if share * warmup >= 1 else 0
    epochs = None if recipe.epochs is None else share * recipe.epochs
    return replace(recipe, max_steps=steps, epochs=epochs, warmup_steps=warmup, early_stopping_patience=None)


def shortened_arguments(arguments: dict[str, Any], share: float) -> dict[str, Any]:
    """Training arguments with a share of the steps and epochs that they name."""
    found = dict(arguments)
    if found.get("max_steps", -1) > 0:
        found["max_steps"] = max(1, round(share * found["max_steps"]))
    if "num_train_epochs" in found:
        found["num_train_epochs"] = share * found["num_train_epochs"]
    if found.get("warmup_steps", 0) >= 1:
        found["warmup_steps"] = math.floor(share * found["warmup_steps"])
    return found


def with_new_classifiers(
    pretrained: PreTrainedModel | str | os.PathLike,
    num_members: int,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    problem_type: str | None = None,
    classifiers: int | None = None,
) -> list[PreTrainedModel]:
    """Copies of a pre-trained model, each with a new classifier: its own, drawn with `seed + i`, or one of so many different ones,
    the same for neighbours. None: one each where they choose one class, otherwise the same for all."""
    if num_members < 1:
        raise ValueError(f"num_members is {num_members}: pass at least 1")
    if isinstance(pretrained, PreTrainedModel):
        config, called = copy.deepcopy(pretrained.config), f"pretrained ({type(pretrained).__name__})"
    else:
        config, called = config_of(pretrained), os.fspath(pretrained)
    _prepare(config, class_names, called, problem_type)
    with torch.random.fork_rng(devices=[]):
        model, untrained = _with_head(pretrained, config, called)
    encoder = f"{_encoder_of(model)}."
    is_new = untrained | {name for name, _ in model.named_parameters() if not name.startswith(encoder)}
    where = places(model)
    missing = min((name for name in is_new if where[name].part != "classifier"), default=None)
    if missing is not None:
        raise ValueError(f"{called} has no {missing} of the right shape: pass a model that is pre-trained")
    chooses_a_class = problem_type in (None, "single_label_classification")
    different = classifiers or (num_members if chooses_a_class else 1)
    seeds = [seed + place * different // num_members for place in range(num_members)]
    return [_with_classifier_of(model, is_new, each) for each in seeds]


def _prepare(
    config: PreTrainedConfig, class_names: Sequence[str] | None, called: str, problem_type: str | None
) -> None:
    """Sets the classes and the problem type in the config; refuses models without a classifier, and Hydras."""
    if config.model_type not in CLASSIFIERS:
        known = ", ".join(CLASSIFIERS)
        raise ValueError(f"{called} is a {config.model_type}: pass a pre-trained model, one of {known}")
    if problem_type == TOKEN_CLASSIFICATION and config.model_type not in TOKEN_CLASSIFIERS:
        raise ValueError(
            f"{called} is a {config.model_type}, which has no classifier of tokens: pass one of {', '.join(TOKEN_CLASSIFIERS)}"
        )
    heads = TOKEN_CLASSIFIERS if problem_type == TOKEN_CLASSIFICATION else CLASSIFIERS
    config.architectures = [heads[config.model_type].__name__]
    problem_type = None if problem_type == TOKEN_CLASSIFICATION else problem_type
    if problem_type is not None and problem_type not in PROBLEM_TYPES:
        raise ValueError(f"problem_type is {problem_type!r}: pass one of {', '.join(map(repr, PROBLEM_TYPES))}")
    if class_names is not None:
        least = 1 if problem_type in ("multi_label_classification", "regression") else 2
        if isinstance(class_names, str) or len(class_names) < least or len(set(class_names)) < len(class_names):
            number = "at least two different names" if least == 2 else "a list of different names"
            raise ValueError(f"class_names is {class_names!r}: pass {number}, in the order of the labels")
        config.id2label = {index: str(name) for index, name in enumerate(class_names)}
        config.label2id = {name: index for index, name in config.id2label.items()}
    elif problem_type == "regression":
        config.num_labels = 1
    config.problem_type = problem_type
    if problem_type is not None:
        set_problem_type(config)  # refuses one that does not go with the number of classes


def _with_head(
    pretrained: PreTrainedModel | str | os.PathLike, config: PreTrainedConfig, called: str
) -> tuple[PreTrainedModel, set[str]]:
    """The model with a classification head, and the names of the parameters that are not pre-trained."""
    head = head_of(config)
    if not isinstance(pretrained, PreTrainedModel):
        # Loaded in float32, not cast to it afterwards: numbers computed from the config stay exact (Gemma's scale).
        model, found = head.from_pretrained(
            pretrained, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
        names = [*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])]
        return model, {name for name in names if name in dict(model.named_parameters())}
    check_is_in_memory(pretrained, called)
    model = head(config).to(pretrained.device)
    for parameter in model.parameters():  # not the buffers: rotary positions stay in float32, as after loading
        parameter.data = parameter.data.to(pretrained.dtype)
    prefix = _encoder_of(model)
    encoder, theirs = getattr(model, prefix), getattr(pretrained, prefix, pretrained).state_dict()
    untrained = set()
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name in theirs and theirs[name].shape == parameter.shape:
                parameter.copy_(theirs[name])
            else:
                untrained.add(f"{prefix}.{name}")
    return model, untrained


def _encoder_of(model: PreTrainedModel) -> str:
    """The name of a classifier's encoder; on one of two towers, Transformers' `base_model_prefix` is another."""
    return HYDRA_CLASSES[type(model)].base_model_prefix


def _with_classifier_of(model: PreTrainedModel, is_new: set[str], seed: int) -> PreTrainedModel:
    """A copy of the model with the parameters `is_new` drawn with `seed`."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        drawn = type(model)(copy.deepcopy(model.config))
    member = copy.deepcopy(model)
    with torch.no_grad():
        for name in is_new:
            member.get_parameter(name).copy_(drawn.get_parameter(name))
    return member.eval()
