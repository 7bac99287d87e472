"""The models that a search starts from: one fine-tuned model, several, or a pre-trained one to fine-tune several times."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.fingerprints import fingerprint_of_weights
from ..data.prediction import check_chooses_one_class
from ..fusion import check_can_be_fused
from ..models.auto import CLASSIFIERS, check_has_no_adapters, config_of, described, load_trained
from ..training.from_pretrained import with_new_classifiers
from .held_out import LEAST_ROWS, divided


MOST_HELD_OUT_ROWS = 3_000

Model = PreTrainedModel | str | os.PathLike


@dataclass(frozen=True)
class Source:
    """Models to make members of.

    models: the fine-tuned ones; of a pre-trained model the one that is fine-tuned first, before its training
    pretrained: the model that is to be fine-tuned `num_members` times, None where models are fine-tuned
    """

    models: list[PreTrainedModel]
    pretrained: Model | None
    num_members: int

    @property
    def config(self) -> PreTrainedConfig:
        return described(self.models[0])

    def fingerprints(self) -> list[str]:
        return [fingerprint_of_weights(model) for model in self.models]


def is_to_be_finetuned(given: Model | Sequence[Model], finetune: bool | None) -> bool:
    """Whether one model is to be fine-tuned first: as it is asked for, by default where it has no classifier."""
    if isinstance(given, (list, tuple)):
        return False
    return finetune if finetune is not None else not has_classifier(given)


def read_source(
    given: Model | Sequence[Model],
    has_train_data: bool,
    finetune: bool | None,
    num_members: int,
    class_names: Sequence[str] | None,
    seed: int,
    device: str | None,
) -> Source:
    """The models, checked; those that are named are loaded."""
    if type(num_members) is not int or num_members < 2:
        raise ValueError(f"num_members is {num_members!r}: pass at least 2, one member is no ensemble")
    is_several = isinstance(given, (list, tuple))
    if not is_several and not isinstance(given, (PreTrainedModel, str, os.PathLike)):
        raise TypeError(
            f"model_or_models is a {type(given).__name__}: pass a model, a folder or Hub name, or a list of these"
        )
    named = list(given) if is_several else [given]
    if not named:
        raise ValueError("model_or_models is an empty list: pass at least one model")
    names = [f"model_or_models[{place}]" if is_several else "model_or_models" for place in range(len(named))]
    for each, name in zip(named, names, strict=True):
        _check_kind(each, name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if len(named) == 1:
        [only] = named
        if is_to_be_finetuned(only, finetune):
            is_loaded = isinstance(only, PreTrainedModel)
            if not has_train_data:
                name = f"model_or_models ({type(only).__name__})" if is_loaded else os.fspath(only)
                raise ValueError(
                    f"{name} is a pre-trained model without a trained classifier, and there is no train_data to fine-tune it "
                    "on: pass train_data, or fine-tuned models"
                )
            [first] = with_new_classifiers(only, 1, class_names, seed)
            return Source([first.to(only.device if is_loaded else device)], only, num_members)
    elif finetune:
        raise ValueError(f"finetune is for one pre-trained model, and there are {len(named)} models: leave it out")
    if class_names is not None:
        raise ValueError(
            "class_names are for a pre-trained model that is fine-tuned here: leave them out, or pass finetune=True"
        )
    models = [each if isinstance(each, PreTrainedModel) else load_trained(each).to(device) for each in named]
    for model, name in zip(models, names, strict=True):
        if not has_classifier(model):
            raise ValueError(
                f"{name} is a {type(model).__name__}, which has no classifier: pass fine-tuned classifiers, or one pre-trained "
                "model with train_data"
            )
        check_chooses_one_class(model, name)
    if len(models) > 1:
        check_can_be_fused(models, "model_or_models", allow_equal=False)
    return Source(models, None, len(models) if len(models) > 1 else num_members)


def _check_kind(model: Any, name: str) -> None:
    """Refuses what has no classifier that Hydras know, before anything is loaded."""
    if isinstance(model, PreTrainedModel):
        check_has_no_adapters(model, name)
        config = model.config
    elif isinstance(model, (str, os.PathLike)):
        config = config_of(model)
    else:
        raise TypeError(f"{name} is a {type(model).__name__}: pass a model, a folder or a Hub name")
    if hasattr(config, "kept_heads") or hasattr(config, "num_members"):
        raise ValueError(f"{name} is a Hydra already: pass models of Transformers, before they are pruned or fused")
    if config.model_type not in CLASSIFIERS:
        raise ValueError(f"{name} is a {config.model_type}: pass a classifier, one of {', '.join(CLASSIFIERS)}")


def has_classifier(model: Model) -> bool:
    """Whether a model has a classifier that is trained, as far as its class or its config tells."""
    if isinstance(model, PreTrainedModel):
        return isinstance(model, CLASSIFIERS[model.config.model_type])
    config = config_of(model)
    return CLASSIFIERS[config.model_type].__name__ in (config.architectures or ())


# Training data


def divided_training_data(source: Source, train_data: Any, seed: int) -> tuple[Subset, Subset]:
    """Rows to train on, and a fifth (at most 3,000) as the data that is missing."""
    if source.pretrained is None:
        raise ValueError(
            "data is missing: pass labelled rows that the models were not trained on, by which candidates are judged"
        )
    count = len(train_data)
    size = min(MOST_HELD_OUT_ROWS, count // 5)
    if size < LEAST_ROWS:
        raise ValueError(
            f"data is missing, and a fifth of the {count} rows of train_data are too few to choose by: pass data, at least "
            f"{LEAST_ROWS} rows"
        )
    held_out, others = divided(count, [size], seed)
    return Subset(train_data, others.tolist()), Subset(train_data, held_out.tolist())


def check_training_data(train_data: Any) -> None:
    if not (hasattr(train_data, "__len__") and hasattr(train_data, "__getitem__")) or isinstance(train_data, dict):
        raise TypeError(
            f"train_data is a {type(train_data).__name__}: pass a Dataset or a list of dict rows, which Trainer can shuffle"
        )
    if len(train_data) == 0:
        raise ValueError("train_data has no rows: pass at least one")
