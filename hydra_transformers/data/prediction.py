"""From a model and data to `member_logits` (batch, members, classes).

Reads every kind of model in one way: a Hydra, a plain Hugging Face classifier, two towers with class prompts, saved arrays.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..models.modeling_hydra import (
    HydraClassifierOutput,
    at_least_float32,
    ensemble_logits,
    log_mean_probability,
    two_points,
)
from ..models.pipeline_hydra import evaluation_mode
from .batches import batches, labels_of, split_labels
from .labels import model_classes


# Problem types of configs that do not choose one of several classes.
OTHER_PROBLEMS = {"multi_label_classification": "multi-label classification", "regression": "regression"}


def predict(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The member logits (batch, members, classes) of one batch; a plain model has one member.

    Labels, and entries that the model's `forward` does not name, are not passed to the model.
    """
    inputs = accepted_inputs(model, split_labels(batch)[0])
    with evaluation_mode(model), torch.inference_mode():
        return member_logits_of(model(**inputs), type(model).__name__, classifies_tokens(model))


def member_logits_of(output: Any, source: str = "the model", per_token: bool = False) -> Tensor:
    """Read (batch, members, classes) from a model's output: `member_logits`, else `logits` or `logits_per_image` as one member.
    Of heads that predict a variance, `two_points` in place of each member.

    per_token: of a classifier of tokens, (batch, members, tokens, classes)
    """
    places = "tokens, " if per_token else ""
    found = {name: getattr(output, name, None) for name in ("member_logits", "logits", "logits_per_image")}
    name, logits = next(((name, each) for name, each in found.items() if each is not None), (None, None))
    if logits is None:
        raise TypeError(
            f"the output of {source} has neither logits nor logits_per_image: pass a classification model, "
            "or wrap CLIP or SigLIP in ZeroShotClassifier"
        )
    if name == "member_logits" and logits.dim() != 3 + per_token:
        raise ValueError(
            f"{source} gave member_logits of shape {tuple(logits.shape)}: expected (batch, members, {places}classes)"
        )
    if name != "member_logits" and logits.dim() != 2 + per_token:
        raise ValueError(f"{source} gave logits of shape {tuple(logits.shape)}: expected (batch, {places}classes)")
    logits = logits if name == "member_logits" else logits.unsqueeze(1)
    return two_points(logits, getattr(output, "member_variances", None))


def answer_of(model: nn.Module, member_logits: Tensor) -> HydraClassifierOutput:
    """The output of an ensemble of models like `model`, from what `member_logits_of` its members gave."""
    problem_type = problem_type_of_answers(model)
    if problem_type is None and getattr(config_of(model), "num_labels", None) == 1:
        problem_type = "regression"  # as in Transformers' loss
    aggregate, variances = getattr(config_of(model), "aggregate", None), None
    if getattr(config_of(model), "predicts_variance", False):
        member_logits, variances = means_and_variances(member_logits)
    logits = ensemble_logits(member_logits, problem_type, aggregate)
    return HydraClassifierOutput(logits=logits, member_logits=member_logits, member_variances=variances)


def means_and_variances(points: Tensor) -> tuple[Tensor, Tensor]:
    """Undoes `two_points`: (batch, 2 * members, outputs) -> (batch, members, outputs) each"""
    below, above = points.unflatten(1, (-1, 2)).unbind(dim=2)
    return (below + above) / 2, ((above - below) / 2).square()


def collect_member_logits(
    model: nn.Module, data: Any, batch_size: int = 32, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor | None]:
    """Predict all of `data`: member logits (samples, members, classes) and labels (or `None`), on the CPU.

    For sets that fit in memory, such as the validation set of a temperature. `device`: the model's own unless given.
    """
    parts = []
    device = device_of(model) if device is None else device
    for batch in batches(data, batch_size, device, classes=classes_of(model)):
        member_logits = predict(model, batch).cpu()
        parts.append((member_logits, labels_of(batch, len(member_logits))))
    if not parts:
        raise ValueError("data has no batches: pass at least one sample")
    return torch.cat([logits for logits, _ in parts]), joined_labels([labels for _, labels in parts])


def joined_labels(labels: Sequence[Tensor | None]) -> Tensor | None:
    """The labels of all batches (samples,) on the CPU; None if no batch has any."""
    found = [each.cpu() for each in labels if each is not None]
    if found and len(found) != len(labels):
        raise ValueError(
            f"{len(found)} of {len(labels)} batches have labels: give every batch labels, or none of them"
        )
    return torch.cat(found) if found else None


# The model


def config_of(model: nn.Module | None) -> Any:
    """The config of a model, or of the model inside it; None where there is none."""
    return next((each.config for each in models_inside(model) if hasattr(each, "config")), None)


def models_inside(model: nn.Module | None) -> Iterator[nn.Module]:
    """The model and those it wraps, from the outside in; of several the first."""
    while model is not None:
        yield model
        inside = (getattr(model, name, None) for name in ("model", "module"))
        model = model.models[0] if hasattr(model, "models") else next(filter(None, inside), None)


def classifies_tokens(model: nn.Module | None) -> bool:
    """Whether a model, or the one inside it, gives every token a class; its logits are (batch, tokens, classes)."""
    return any("ForTokenClassification" in type(each).__name__ for each in models_inside(model))


def classes_of(model: nn.Module | None) -> list[str] | None:
    """The names of a model's classes, in order; None where it has none."""
    zero_shot = None if model is None else zero_shot_in(model)
    if zero_shot is not None:
        return zero_shot.class_names
    config = config_of(model)
    return None if getattr(config, "id2label", None) is None else model_classes(config)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's inputs."""
    if isinstance(getattr(model, "device", None), torch.device):
        return model.device
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def problem_type_of(model: nn.Module | None) -> str | None:
    """The `problem_type` of the model's config."""
    return getattr(config_of(model), "problem_type", None)


def problem_type_of_answers(model: nn.Module) -> str | None:
    """The problem type of the model's own logits. SigLIP says yes or no to each text, unless in a `ZeroShotClassifier`."""
    inside = list(models_inside(model))
    has_bias = any(hasattr(each, "logit_bias") for each in inside)
    chooses_one = any(isinstance(each, ZeroShotClassifier) for each in inside)
    return "multi_label_classification" if has_bias and not chooses_one else problem_type_of(model)


def check_chooses_one_class(model: nn.Module, name: str) -> None:
    """Refuses multi-label and regression models, whose logits have no softmax, and classifiers of tokens."""
    if classifies_tokens(model):
        raise ValueError(
            f"{name} classifies tokens, and this is about one class for each row: pass a model that chooses one of several classes"
        )
    problem = OTHER_PROBLEMS.get(problem_type_of(model))
    if problem is not None:
        raise ValueError(
            f"{name} is made for {problem} (problem_type in its config): pass a model that chooses one of several classes "
            "(predict_uncertainty also takes multi-label models)"
        )


# Its inputs


def accepted_inputs(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries that the model's `forward` names, or that it `reads`; all of them for a wrapper with `**inputs` only.

    Masked tokens are replaced by the padding token where the model goes by it.
    """
    tokens, mask, padding = inputs.get("input_ids"), inputs.get("attention_mask"), padding_of(model)
    if padding is not None and tokens is not None and mask is not None and tokens.shape == mask.shape:
        inputs = inputs | {"input_ids": tokens.masked_fill(mask == 0, padding)}
    parameters = inspect.signature(model.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {parameter.name for parameter in parameters if parameter.kind not in variadic}
    if not named:
        return inputs
    named |= getattr(model, "reads", frozenset())  # a baseline passes on what the model inside reads
    accepted = {name: value for name, value in inputs.items() if name in named}
    if not accepted:
        raise ValueError(
            f"{type(model).__name__} takes none of the batch's entries ({', '.join(inputs) or 'none'}): "
            f"it reads {', '.join(sorted(named))}, which its tokenizer or image processor makes"
        )
    return accepted


def padding_of(model: nn.Module) -> int | None:
    """The padding token that a plain causal classifier finds the last token of a text by; None for others."""
    # Transformers calls its head `score` there, and `classifier` elsewhere. Hydras read the mask as well.
    is_decoder = any(isinstance(getattr(module, "score", None), nn.Module) for module in model.modules())
    return getattr(config_of(model), "pad_token_id", None) if is_decoder else None


class SavedLogits(nn.Module):
    """A stand-in for a model with saved member logits: its batches are `{"member_logits": ..., "labels": ...}`."""

    def forward(self, member_logits: Tensor) -> HydraClassifierOutput:
        return HydraClassifierOutput(logits=log_mean_probability(member_logits), member_logits=member_logits)


# Two towers with class prompts


def check_class_prompts(class_prompts: Mapping[str, Tensor] | None, model: nn.Module) -> None:
    """Refuses class prompts that are missing or not tokenized; warns if SigLIP's are not padded as in its training."""
    input_ids = None if class_prompts is None else class_prompts.get("input_ids")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise ValueError(
            f"{type(model).__name__} classifies by prompts, and class_prompts has no input_ids of shape (classes, tokens): pass the "
            'tokenizer\'s output with padding=True and return_tensors="pt", one row per class'
        )
    most = getattr(getattr(config_of(model), "text_config", None), "max_position_embeddings", None)
    # SigLIP, which has a bias, reads the last token even if it is padding.
    if hasattr(model, "logit_bias") and most is not None and input_ids.shape[1] < most:
        warnings.warn(
            f"class_prompts have {input_ids.shape[1]} tokens, and {type(model).__name__} reads the last of {most}: tokenize "
            f'with padding="max_length", max_length={most}, as it was trained',
            stacklevel=3,
        )


class ZeroShotClassifier(nn.Module):
    """A model of two towers as an image classifier over fixed class prompts; its batches hold `pixel_values`.

    Args:
        clip_model: a Hydra of two towers, or a `CLIPModel` or other two-tower model of Transformers.
        class_prompts: the tokenizer's output for one prompt per class, for example
            `tokenizer([f"A photo of a {label}." for label in labels], padding=True, return_tensors="pt")`; for SigLIP with
            `padding="max_length"`, since it reads the last token even if it is padding.
        class_names: the names of the classes in answers to raw images, one per prompt.

    Probabilities are a softmax over the classes. SigLIP itself says yes or no to each prompt, by a sigmoid; the softmax of its
    logits is the probability of each class given that exactly one is right.

    The prompts' features are computed once; call `refresh()` after changing the model's weights.
    """

    prompts_per_pass = 256  # bounds the memory of the text tower for thousands of classes

    def __init__(
        self, clip_model: nn.Module, class_prompts: Mapping[str, Tensor], class_names: Sequence[str] | None = None
    ):
        super().__init__()
        check_class_prompts(class_prompts, clip_model)
        if class_names is not None and len(class_names) != len(class_prompts["input_ids"]):
            raise ValueError(
                f"class_names has {len(class_names)} names, class_prompts {len(class_prompts['input_ids'])} prompts: pass one "
                "name per prompt"
            )
        self.class_names = None if class_names is None else list(class_names)
        prompts = {name: value for name, value in class_prompts.items() if isinstance(value, Tensor)}
        self.model = clip_model
        self.class_prompts = prompts
        self.similarity = PromptSimilarity()
        self.register_buffer("text_features", torch.empty(0), persistent=False)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the class prompts' features (classes, members, dim) from the model's current weights."""
        device = device_of(self.model)
        rows = len(self.class_prompts["input_ids"])
        features = []
        with evaluation_mode(self.model):
            for start in range(0, rows, self.prompts_per_pass):
                part = slice(start, start + self.prompts_per_pass)
                prompts = {name: value[part].to(device) for name, value in self.class_prompts.items()}
                features.append(_unit_features(self.model.get_text_features(**prompts)))
        self.text_features = torch.cat(features)

    def forward(self, pixel_values: Tensor) -> HydraClassifierOutput:
        shortcut = only_what_is_read(self.model)
        image_features = _unit_features(self.model.get_image_features(pixel_values=pixel_values, **shortcut))
        text_features = at_least_float32(self.text_features)  # a buffer: `.to(torch.bfloat16)` casts it
        scale = at_least_float32(self.model.logit_scale).exp()
        bias = at_least_float32(self.model.logit_bias) if hasattr(self.model, "logit_bias") else None
        member_logits = self.similarity(image_features, text_features, scale, bias)
        return HydraClassifierOutput(logits=log_mean_probability(member_logits), member_logits=member_logits)


def only_what_is_read(model: nn.Module) -> dict[str, bool]:
    """Arguments of `get_image_features`: a Hydra that pools one token computes only that one in its last layer."""
    return {"first_token_only": True} if getattr(model, "reads_first_token", False) else {}


def logits_of_cosines(model: nn.Module, cosines: Tensor) -> Tensor:
    """The logits (..., classes) of a plain model of two towers, or of a one-member Hydra."""
    logits = cosines * model.logit_scale.exp()
    return logits + model.logit_bias if hasattr(model, "logit_bias") else logits


def zero_shot_in(model: nn.Module) -> ZeroShotClassifier | None:
    """The `ZeroShotClassifier` that the model is or contains."""
    return next((each for each in model.modules() if isinstance(each, ZeroShotClassifier)), None)


class PromptSimilarity(nn.Module):
    """The classifier of two towers: a linear map whose weights are the prompts' features."""

    def forward(
        self, image_features: Tensor, text_features: Tensor, scale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """(images, members, dim), (classes, members, dim), twice (members,) or () -> (images, members, classes)"""
        image_members, text_members = image_features.shape[1], text_features.shape[1]
        if image_members != text_members and 1 not in (image_members, text_members):
            raise ValueError(
                f"the vision tower has {image_members} members, the text tower {text_members}: "
                "they must agree, or one of them must have a single member"
            )
        # One member per batch entry of the product: (members, images, dim) @ (members, dim, classes).
        similarity = image_features.transpose(0, 1) @ text_features.permute(1, 2, 0)
        logits = scale.reshape(-1, 1, 1) * similarity
        return (logits if bias is None else logits + bias.reshape(-1, 1, 1)).transpose(0, 1)


def _unit_features(output: Any) -> Tensor:
    """A tower's projected features as unit vectors, at least in float32, (rows, members, dim)."""
    features = output if isinstance(output, Tensor) else output.get("member_pooler_output", output.pooler_output)
    features = features.unsqueeze(1) if features.dim() == 2 else features
    return nn.functional.normalize(at_least_float32(features), dim=-1)
