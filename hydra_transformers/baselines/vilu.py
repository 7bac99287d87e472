"""ViLU (Lafon et al., 2025): a small network that says whether a frozen CLIP's answer is right; and the same for classifiers."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CLIPModel, PreTrainedModel

from ..data.batches import batches, split_labels
from ..data.prediction import (
    accepted_inputs,
    answer_of,
    check_chooses_one_class,
    check_class_prompts,
    device_of,
    evaluation_mode,
    member_logits_of,
)
from ..models.modeling_hydra import HydraClassifierOutput, at_least_float32
from ..uncertainty.inputs import as_tensor
from ..uncertainty.metrics import (
    adaptive_calibration_error,
    exact_mean,
    expected_calibration_error,
    ood_metrics,
    risk_coverage_curve,
)
from .baseline import Baseline
from .kronecker import without_autocast
from .last_layer import SplitModel, check_is_head
from .zero_shot import ZERO_SHOT_USAGE, PromptClassifier


WIDTHS = (512, 256, 128)  # of the predictor's hidden layers
ATTENTION_STEPS = 200  # after so many, the attention trains too


class Seen(NamedTuple):
    """What the predictor reads.

    features: (rows, dim), of an image or text; classes: (classes, dim), of what the classes are called, or the rows of the
    classifier; scale, bias: with them scale · features @ classesᵀ + bias are the model's logits
    """

    features: Tensor
    classes: Tensor
    scale: Tensor
    bias: Tensor | None

    def logits(self) -> Tensor:
        logits = self.scale * self.features @ self.classes.t()
        return logits if self.bias is None else logits + self.bias


class FailurePredictor(nn.Module):
    """From an image's features and those of all classes to a logit of "the answer is right".

    It reads the features, the mean of the classes' features by how likely each is (an attention, at first the model's own
    probabilities), and those of the predicted class. The order of the classes and their number leave no trace.
    """

    def __init__(self, dim: int, learned_attention: bool, seed: int = 0):
        super().__init__()
        self.learned_attention = learned_attention
        with torch.random.fork_rng(devices=[]):  # new weights are drawn below
            if learned_attention:
                self.of_features = nn.Linear(dim, dim, bias=False)
                self.of_classes = nn.Linear(dim, dim, bias=False)
            sizes = (3 * dim, *WIDTHS)
            hidden = [layer for size in pairwise(sizes) for layer in (nn.Linear(*size), nn.ReLU())]
            self.mlp = nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))
        if self.mlp[0].weight.device.type != "meta":
            self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """New weights, the same for the same seed; the attention starts as the model's own probabilities."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.startswith("of_"):
                parameter.copy_(torch.eye(len(parameter)))
                continue
            fan_in = self.mlp.get_submodule(name.split(".")[1]).in_features
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
            parameter.copy_((2 * drawn - 1) / math.sqrt(fan_in))

    def attention_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if name.startswith("of_")]

    def forward(self, seen: Seen) -> Tensor:
        """-> (rows,)"""
        logits = attention = seen.logits()
        if self.learned_attention:
            asked = Seen(self.of_features(seen.features), self.of_classes(seen.classes), seen.scale, seen.bias)
            attention = asked.logits()
        expected = attention.softmax(dim=-1) @ seen.classes
        predicted = seen.classes[logits.argmax(dim=-1)]
        return self.mlp(torch.cat([seen.features, expected, predicted], dim=-1)).squeeze(-1)


class ViLU(SplitModel, Baseline):
    """A model with a second opinion on whether its answer is right. The answer itself is the model's: accuracy, Brier and NLL
    are as they were. `detector_score` of its output, 1 − the probability of being right, is high for wrong answers.

    Args:
        model: a `CLIPModel`, as in the paper; or a classifier of Transformers whose logits are the outputs of an `nn.Linear`,
            where the rows of that layer stand for the classes' texts (this form is ours). It is not trained.
        learned_attention: whether the attention over the classes trains too, as the paper has it; otherwise it stays the model's
            own probabilities, as the authors' published settings leave it.

    `fit` trains the predictor on labelled rows of the data that it will be used on; rows that the model itself was trained on
    show it too few mistakes. Its probability is about one yes or no, "is the answer right?": an ECE of it is of that binary
    question, see `failure_metrics`.
    """

    summary = "ViLU: a frozen model with a small network beside it that says whether its answer is right. Members: {members}."

    def __init__(self, model: PreTrainedModel, learned_attention: bool = False):
        super().__init__(model, learned_attention=learned_attention)
        if isinstance(model, CLIPModel):
            self.head, dim = None, model.config.projection_dim
        else:
            check_chooses_one_class(model, "model")
            self.split(model)
            dim = self.head.in_features
        # Of a classifier: sizes of its features and of its rows, so that the predictor reads numbers around 1.
        where = {"device": device_of(model), "dtype": torch.promote_types(model.dtype, torch.float32)}
        self.register_buffer("sizes", torch.ones(2, **where))
        self.predictor = FailurePredictor(dim, learned_attention).to(**where)

    @property
    def usage(self) -> str | None:
        failure = 'print("wrong with probability", outputs.detector_score.item())\n'
        return ZERO_SHOT_USAGE.format(name="ViLU") + failure if self.is_zero_shot else None

    @property
    def is_zero_shot(self) -> bool:
        return self.head is None

    def train(self, mode: bool = True) -> "ViLU":
        """The predictor alone trains: the model's answers are those of eval mode, without dropout."""
        super().train(mode)
        self.model.eval()
        return self

    # What is read of the model, without gradients

    @torch.no_grad()
    def class_features(self, **prompts: Tensor) -> Tensor:
        """What stands for the classes, (classes, dim): the features of prompts, of length 1, or the classifier's rows."""
        if not self.is_zero_shot:
            return at_least_float32(self.head.weight) / self.sizes[1]
        read = {name: prompts[name] for name in ("input_ids", "attention_mask", "position_ids") if name in prompts}
        features = self.model.get_text_features(**read).pooler_output
        return nn.functional.normalize(at_least_float32(features), dim=-1)

    @torch.no_grad()
    def features(self, **inputs: Tensor) -> Tensor:
        """(batch, dim): an image's features, of length 1, or what the classifier's last layer reads."""
        if not self.is_zero_shot:
            return at_least_float32(self.model(**inputs).logits) / self.sizes[0]
        features = self.model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
        return nn.functional.normalize(at_least_float32(features), dim=-1)

    @torch.no_grad()
    def seen(self, features: Tensor, classes: Tensor) -> Seen:
        if self.is_zero_shot:
            return Seen(features, classes, at_least_float32(self.model.logit_scale).exp(), None)
        bias = None if self.head.bias is None else at_least_float32(self.head.bias)
        return Seen(features, classes, self.sizes.prod(), bias)

    # Answering

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> HydraClassifierOutput:
        """The model's answer, of CLIP among the texts of `input_ids`; `detector_score` (batch,), and with labels the `loss` of the
        predictor. num_items_in_batch: as in every baseline"""
        inputs |= {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask}
        inputs["token_type_ids"] = token_type_ids
        given = accepted_inputs(self.model, {name: value for name, value in inputs.items() if value is not None})
        missing = {"pixel_values", "input_ids"} - set(given)
        if self.is_zero_shot and missing:
            raise ValueError(
                f"the batch has no {min(missing)}: pass images and the texts of the classes, or use zero_shot()"
            )
        classes = self.class_features(**given) if self.is_zero_shot else self.class_features()
        output = self.answer(self.features(**given), classes, labels)
        if output.loss is not None and num_items_in_batch is not None:
            output.loss = output.loss * len(labels) / num_items_in_batch
        return output

    def answer(self, features: Tensor, classes: Tensor, labels: Tensor | None = None) -> HydraClassifierOutput:
        """The answer to images whose features are known; `detector_score` is how likely it is wrong.

        features: (batch, dim), as `features` gives them
        classes: (classes, dim), as `class_features` gives them
        """
        with without_autocast(features.device):
            seen = self.seen(features, classes)
            member_logits, of_right = seen.logits().unsqueeze(1), self.predictor(seen)
            output = answer_of(self.model, member_logits)
            output.detector_score = 1 - of_right.sigmoid()
            if labels is not None:
                output.loss = failure_loss(of_right, member_logits[:, 0].argmax(dim=-1) == labels)
            return output

    def member_logits(self, **inputs: Tensor) -> Tensor:
        return self(**inputs).member_logits

    def zero_shot(self, class_prompts: Mapping[str, Tensor]) -> "ViLUClassifier":
        """An image classifier over fixed class prompts, which need not be those of the fit; its batches hold `pixel_values`."""
        return ViLUClassifier(self, class_prompts)

    # Training

    def fit(
        self,
        data: Any,
        class_prompts: Mapping[str, Tensor] | None = None,
        batch_size: int = 128,
        epochs: int = 10,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> "ViLU":
        """Trains the predictor, from new weights, on features that are computed once; returns itself.

        Args:
            data: labelled, as `evaluate_uncertainty` takes it, of rows that the model was not trained on. Of a row with the
                label -1, every answer is wrong.
            class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
            batch_size: rows per step, and where the data is a Dataset of rows, per batch that the model computes.
            epochs, learning_rate: of AdamW with a weight decay of 0.05, warmed up and then along a cosine. The authors train
                for 300 to 800 epochs with SGD on augmented images of large sets; on features of a few thousand rows, that
                does not leave its start. For augmented images, pass several views of each: any iterable of batches will do.
            seed: of the new weights and of the order of the rows.
        """
        if self.is_zero_shot:
            check_class_prompts(class_prompts, self.model)
        elif class_prompts is not None:
            raise ValueError(
                f"class_prompts is for CLIP and SigLIP, model is a {type(self.model).__name__}: leave it out"
            )
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}: pass at least 1")
        before = self.sizes.clone()
        try:
            features, classes, is_right = self._examples(data, class_prompts or {}, batch_size)
        except BaseException:
            self.sizes.copy_(before)  # the predictor is still that of an earlier fit
            raise
        self.predictor.reset(seed)
        self._train(features, classes, is_right, batch_size, epochs, learning_rate, seed)
        return self

    @torch.no_grad()
    def _examples(self, data: Any, prompts: Mapping[str, Tensor], batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The features of all rows and those of the classes, of which it sets the sizes, and whether each answer is right."""
        with evaluation_mode(self):
            features, labels = self._collected(data, batch_size)
            if not self.is_zero_shot:
                self.sizes.copy_(torch.stack([_size(features), _size(at_least_float32(self.head.weight))]))
                features = features / self.sizes[0]
            classes = self.class_features(**{name: value.to(self.device) for name, value in prompts.items()})
            if labels.max() >= len(classes):  # below 0 is none of them, as of rows from elsewhere
                raise ValueError(f"data has the label {labels.max().item()}: the classes are 0 to {len(classes) - 1}")
            is_right = self.seen(features, classes).logits().argmax(dim=-1) == labels
        if is_right.all() or not is_right.any():
            raise ValueError(
                f"the model answers {'all' if is_right.all() else 'none'} of the {len(labels)} rows rightly, so there is nothing to "
                "tell apart: pass rows that it was not trained on"
            )
        return features, classes, is_right

    def _collected(self, data: Any, batch_size: int) -> tuple[Tensor, Tensor]:
        """The features of all rows, in the model's own size, and labels."""
        self.sizes.fill_(1)
        all_features, all_labels = [], []
        for batch in batches(data, batch_size, self.device):
            inputs, labels = split_labels(batch)
            if labels is None:
                raise ValueError("data has no labels, by which right and wrong are known: add a column labels")
            inputs = accepted_inputs(self.model, inputs)
            if not (self.is_zero_shot or all_features):
                check_is_head(self.model, self.head, self._head_name, inputs)
            all_features.append(self.features(**inputs))
            all_labels.append(labels)
        if not all_features:
            raise ValueError("data has no samples: pass at least one batch")
        return torch.cat(all_features), torch.cat(all_labels)

    def _train(
        self, features, classes, is_right, batch_size: int, epochs: int, learning_rate: float, seed: int
    ) -> None:
        attention = self.predictor.attention_parameters()
        others = [
            parameter for parameter in self.predictor.parameters() if all(parameter is not each for each in attention)
        ]
        groups = [{"params": others}, *([{"params": attention}] if attention else [])]
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.05)
        generator = torch.Generator().manual_seed(seed)
        steps = epochs * math.ceil(len(features) / batch_size)
        warm_up = max(1, steps // 20)
        done = 0
        with torch.enable_grad():
            for _ in range(epochs):
                order = torch.randperm(len(features), generator=generator).to(features.device)
                for part in order.split(batch_size):
                    rate = min((done + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * done / steps))
                    for number, group in enumerate(optimizer.param_groups):
                        group["lr"] = 0.0 if number and done < ATTENTION_STEPS else rate * learning_rate
                    optimizer.zero_grad()
                    of_right = self.predictor(self.seen(features[part], classes))
                    failure_loss(of_right, is_right[part]).backward()
                    optimizer.step()
                    done += 1
        optimizer.zero_grad()
        if not all(parameter.isfinite().all() for parameter in self.predictor.parameters()):
            raise ValueError(
                f"the training has come to numbers that are not finite (learning_rate is {learning_rate}): pass a smaller one, "
                "and look whether the model's features are finite"
            )


def _size(rows: Tensor) -> Tensor:
    """The root mean square length of rows."""
    return rows.square().sum(dim=-1).mean().sqrt().float()


def failure_loss(of_right: Tensor, is_right: Tensor) -> Tensor:
    """Binary cross-entropy of logits of "right"; wrong answers weigh log(1 + a / (1 − a)) for a batch of accuracy a, so that few
    of them count as much. Where that is 0 or infinite, in a batch all wrong or all right, all rows weigh 1."""
    accuracy = is_right.float().mean()
    weight = -torch.log1p(-accuracy)  # log(1 + a / (1 − a))
    weight = torch.where((accuracy > 0) & (accuracy < 1), weight, torch.ones_like(weight))
    weights = torch.where(is_right, torch.ones_like(weight), weight)
    return nn.functional.binary_cross_entropy_with_logits(
        of_right, is_right.to(of_right.dtype), weights.to(of_right.dtype)
    )


class ViLUClassifier(PromptClassifier):
    """A `ViLU` of CLIP as an image classifier; the prompts' features are computed once, here."""

    def __init__(self, vilu: ViLU, class_prompts: Mapping[str, Tensor]):
        if not vilu.is_zero_shot:
            raise TypeError(f"vilu is of a {type(vilu.model).__name__}, which has its own classes: use it as it is")
        super().__init__(vilu, class_prompts)
        prompts = {name: value.to(vilu.device) for name, value in class_prompts.items()}
        with evaluation_mode(vilu):
            self.register_buffer("classes", vilu.class_features(**prompts), persistent=False)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> HydraClassifierOutput:
        return self.model.answer(
            self.model.features(pixel_values=pixel_values), at_least_float32(self.classes), labels
        )


@torch.inference_mode()
def collect_confidences(model: nn.Module, data: Any, batch_size: int = 32) -> tuple[Tensor, Tensor | None]:
    """Each row's confidence that the answer is right, and where there are labels whether it is: (samples,) each, on the CPU.

    Of a `ViLU` it is the predictor's; of all other models the mean probability of the predicted class.
    """
    confidences, rights = [], []
    with evaluation_mode(model):
        for batch in batches(data, batch_size, device_of(model)):
            inputs, labels = split_labels(batch)
            output = model(**accepted_inputs(model, inputs))
            mean = member_logits_of(output, type(model).__name__).double().softmax(dim=-1).mean(dim=1)
            is_vilu = isinstance(model, (ViLU, ViLUClassifier))
            confidences.append((1 - output.detector_score.double()) if is_vilu else mean.amax(dim=-1))
            if labels is not None:
                rights.append(mean.argmax(dim=-1) == labels)
    if not confidences:
        raise ValueError("data has no batches: pass at least one sample")
    return torch.cat(confidences).cpu(), torch.cat(rights).cpu() if rights else None


def failure_metrics(confidence: Any, is_right: Any) -> dict[str, float]:
    """How well confidences tell wrong answers from right ones; wrong is the positive class.

        auroc, aupr, fpr95  as in `ood_metrics`, of 1 − confidence
        aurc                the area under the risk-coverage curve, as in `classification_metrics`
        ece, aece           of the confidence against "the answer is right". For the probability of the predicted class that is
                            the usual top-1 ECE. A predictor that was trained on this very question has an easier task than class
                            probabilities, from which NLL and Brier could be computed too, so the two are not to be ranked by it
        base_rate           the share of right answers: an ECE of 0 is reached by saying this and nothing else

    Args:
        confidence: (samples,), between 0 and 1.
        is_right: (samples,), whether the answer is right.

    Example:
        >>> failure_metrics([0.9, 0.8, 0.3, 0.6], [True, True, False, False])["auroc"]
        1.0
    """
    confidence, is_right = as_tensor(confidence).double().cpu(), as_tensor(is_right).bool().cpu()
    if confidence.shape != is_right.shape or confidence.dim() != 1:
        raise ValueError(
            f"confidence has shape {tuple(confidence.shape)}, is_right {tuple(is_right.shape)}: pass one of each for every sample"
        )
    if is_right.all() or not is_right.any():
        raise ValueError("is_right is the same for all samples: there is nothing to tell apart, pass more samples")
    correct = is_right.double()
    return {
        **ood_metrics(1 - confidence[is_right], 1 - confidence[~is_right]),
        "aurc": exact_mean(risk_coverage_curve(confidence, correct)[1]),
        "ece": expected_calibration_error(confidence, correct),
        "aece": adaptive_calibration_error(confidence, correct),
        "base_rate": exact_mean(correct),
    }
