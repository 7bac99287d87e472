"""ViLU (Lafon et al., 2025): a small network that predicts whether a frozen CLIP is right."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import CLIPModel

from ..data.batches import batches, split_labels
from ..data.prediction import accepted_inputs, answer_of, device_of, member_logits_of
from ..data.zero_shot import check_class_prompts
from ..models.ensembling import at_least_float32
from ..models.inputs import evaluation_mode
from ..models.modeling_hydra import HydraClassifierOutput
from ..uncertainty.inputs import as_tensor
from ..uncertainty.metrics import (
    adaptive_calibration_error,
    error_coverage_curve,
    exact_mean,
    expected_calibration_error,
    ood_metrics,
)
from .baseline import check_is_count
from .kronecker import without_autocast
from .prompt_classifier import ClipBaseline, PromptClassifier, check_has_images_and_texts


WIDTHS = (512, 256, 128)  # of the predictor's hidden layers


class FailurePredictor(nn.Module):
    """A logit of "the prediction is right" from a row's features and those of all classes.

    It reads the features, the mean of the classes weighted by the model's probabilities and the
    predicted class, so it does not depend on the order or the number of the classes.

    dim: of the features
    seed: for the weights
    """

    def __init__(self, dim: int, seed: int = 0):
        super().__init__()
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):  # reset draws the weights
            for width, next_width in pairwise((3 * dim, *WIDTHS)):
                layers += [nn.Linear(width, next_width), nn.ReLU()]
            layers.append(nn.Linear(WIDTHS[-1], 1))
        self.mlp = nn.Sequential(*layers)
        if self.mlp[0].weight.device.type != "meta":
            self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw new weights."""
        generator = torch.Generator().manual_seed(seed)
        for linear in self.mlp[::2]:
            for parameter in linear.parameters():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
                parameter.copy_((2 * noise - 1) / math.sqrt(linear.in_features))

    def forward(self, features: Tensor, classes: Tensor, logits: Tensor) -> Tensor:
        """Return the logit of "right" of each row.

        (rows, dim), (classes, dim), (rows, classes) -> (rows,)
        """
        expected_class = logits.softmax(dim=-1) @ classes
        predicted_class = classes[logits.argmax(dim=-1)]
        read = torch.cat([features, expected_class, predicted_class], dim=-1)  # (rows, 3 * dim)
        return self.mlp(read).squeeze(-1)


class ViLU(ClipBaseline):
    """A frozen CLIP, and a predictor of whether it is right.

    `detector_score` is 1 − that probability, high for mistakes. The logits are the model's, so
    accuracy, Brier and NLL do not change.

    `fit` trains the predictor on labelled rows of the data that it will be used on; the model makes
    too few mistakes on its own training rows. An ECE of `detector_score` is about "is it right?",
    see `failure_metrics`.

    Args:
        model (`CLIPModel`): becomes part of this.
    """

    def __init__(self, model: CLIPModel):
        super().__init__(model)
        dtype = torch.promote_types(model.dtype, torch.float32)
        self.predictor = FailurePredictor(model.config.projection_dim).to(device_of(model), dtype)

    def train(self, mode: bool = True) -> "ViLU":
        """Set the mode of the predictor, which alone trains: the model stays in eval mode."""
        super().train(mode)
        self.model.eval()
        return self

    @torch.no_grad()
    def features(self, pixel_values: Tensor) -> Tensor:
        """Return the features of images, (batch, dim), of length 1."""
        features = self.model.get_image_features(pixel_values=pixel_values).pooler_output
        return nn.functional.normalize(at_least_float32(features), dim=-1)

    @torch.no_grad()
    def class_features(self, **prompts: Tensor) -> Tensor:
        """Return the features of prompts, (classes, dim), of length 1."""
        inputs = {}
        for name in ("input_ids", "attention_mask", "position_ids"):
            if name in prompts:
                inputs[name] = prompts[name].to(self.device)
        features = self.model.get_text_features(**inputs).pooler_output
        return nn.functional.normalize(at_least_float32(features), dim=-1)

    def logits_of(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return the model's logits (rows, classes).

        features: (rows, dim)
        classes: (classes, dim)
        """
        scale = at_least_float32(self.model.logit_scale.detach()).exp()
        return scale * features @ classes.t()

    def outputs(
        self, inputs: dict[str, Tensor], labels: Tensor | None, num_items_in_batch: Tensor | int | None
    ) -> HydraClassifierOutput:
        """Return the model's prediction over the texts of `input_ids`.

        With `detector_score` (batch,), and for labels the predictor's loss.
        """
        check_has_images_and_texts(inputs, "the batch")
        classes = self.class_features(**inputs)
        output = self.classify(inputs["pixel_values"], classes, labels)
        if output.loss is not None and num_items_in_batch is not None:
            output.loss = output.loss * len(labels) / num_items_in_batch
        return output

    def prompt_features(self, **prompts: Tensor) -> tuple[Tensor]:
        """Return the features of the classes, as a tuple of one."""
        return (self.class_features(**prompts),)

    def classify(self, pixel_values: Tensor, classes: Tensor, labels: Tensor | None = None) -> HydraClassifierOutput:
        """Return what `forward` returns, for images and the features of classes (classes, dim)."""
        features = self.features(pixel_values)
        with without_autocast(features.device):
            logits = self.logits_of(features, classes)
            right_logits = self.predictor(features, classes, logits)
            output = answer_of(self.model, logits.unsqueeze(1))
            output.detector_score = 1 - right_logits.sigmoid()
            if labels is not None:
                is_right = logits.argmax(dim=-1) == labels
                output.loss = failure_loss(right_logits, is_right)
            return output

    def fit(
        self,
        data: Any,
        class_prompts: Mapping[str, Tensor],
        batch_size: int = 128,
        epochs: int = 10,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> "ViLU":
        """Train the predictor from new weights, on features that are computed once; return itself.

        Args:
            data: labelled, as `evaluate_uncertainty` takes it, of rows that the model was not
                trained on. With the label -1, every answer is wrong.
            class_prompts (`Mapping[str, Tensor]`): the tokenizer's output with one row per class.
            batch_size (`int`, defaults to 128): rows per step, and per batch for a Dataset of rows.
            epochs (`int`, defaults to 10): passes over the rows. The authors train for 300 to 800
                with SGD on augmented images of large sets, which gets nowhere on a few thousand
                rows. To augment, pass several views of each image.
            learning_rate (`float`, defaults to 1e-3): of AdamW with a weight decay of 0.05, a
                warm-up and a cosine schedule.
            seed (`int`, defaults to 0): for the new weights and the order of the rows.
        """
        check_class_prompts(class_prompts, self.model)
        check_is_count(epochs, "epochs")
        features, classes, is_right = self._examples(data, class_prompts, batch_size)

        # New weights, and how they are trained.
        self.predictor.reset(seed)
        optimizer = torch.optim.AdamW(self.predictor.parameters(), lr=learning_rate, weight_decay=0.05)
        steps = epochs * math.ceil(len(is_right) / batch_size)
        warm_up = max(1, steps // 20)

        def rate(step: int) -> float:
            rising = (step + 1) / warm_up
            falling = 0.5 + 0.5 * math.cos(math.pi * step / steps)
            return min(rising, falling)

        schedule = LambdaLR(optimizer, rate)
        generator = torch.Generator().manual_seed(seed)
        with torch.enable_grad():
            for _ in range(epochs):
                order = torch.randperm(len(is_right), generator=generator).to(is_right.device)
                for rows in order.split(batch_size):
                    optimizer.zero_grad()
                    logits = self.logits_of(features[rows], classes)
                    right_logits = self.predictor(features[rows], classes, logits)
                    failure_loss(right_logits, is_right[rows]).backward()
                    optimizer.step()
                    schedule.step()
        optimizer.zero_grad()
        if not all(parameter.isfinite().all() for parameter in self.predictor.parameters()):
            raise ValueError(
                f"the predictor's weights are not finite after training (learning_rate is {learning_rate}): pass a "
                "smaller one, and check that the model's features are finite"
            )
        return self

    @torch.no_grad()
    def _examples(self, data: Any, prompts: Mapping[str, Tensor], batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the predictor is trained on.

        These are the features of all rows (rows, dim) and classes (classes, dim), and whether each
        prediction is right (rows,).
        """
        all_features = []
        all_labels = []
        with evaluation_mode(self):
            for batch in batches(data, batch_size, self.device):
                inputs, labels = split_labels(batch)
                if labels is None:
                    raise ValueError("data has no labels, so right and wrong are unknown: add a column labels")
                all_features.append(self.features(inputs["pixel_values"]))
                all_labels.append(labels)
            if not all_features:
                raise ValueError("data has no samples: pass at least one batch")
            classes = self.class_features(**prompts)
        features = torch.cat(all_features)
        labels = torch.cat(all_labels)
        if labels.max() >= len(classes):  # negative labels are of no class: out-of-distribution rows
            raise ValueError(f"data has the label {labels.max().item()}: the classes are 0 to {len(classes) - 1}")

        is_right = self.logits_of(features, classes).argmax(dim=-1) == labels
        if is_right.all() or not is_right.any():
            how_many = "all" if is_right.all() else "none"
            raise ValueError(
                f"the model answers {how_many} of the {len(labels)} rows rightly, so there is nothing to tell apart: "
                "pass rows that it was not trained on"
            )
        return features, classes, is_right


def failure_loss(right_logits: Tensor, is_right: Tensor) -> Tensor:
    """Return the binary cross-entropy of logits of "right".

    In a batch of accuracy a, wrong answers weigh log(1 + a / (1 − a)), so that a few of them count
    as much; in a batch all wrong or all right, every row weighs 1.
    """
    accuracy = is_right.float().mean()
    weight_of_wrong = -torch.log1p(-accuracy)  # log(1 + a / (1 − a))
    one = torch.ones_like(weight_of_wrong)
    has_both = (accuracy > 0) & (accuracy < 1)
    weight_of_wrong = torch.where(has_both, weight_of_wrong, one)

    dtype = right_logits.dtype
    weights = torch.where(is_right, one, weight_of_wrong).to(dtype)
    return nn.functional.binary_cross_entropy_with_logits(right_logits, is_right.to(dtype), weights)


@torch.inference_mode()
def collect_confidences(model: nn.Module, data: Any, batch_size: int = 32) -> tuple[Tensor, Tensor | None]:
    """Return the confidence that each prediction is right, and with labels whether it is.

    They are (samples,) each, on the CPU. A `ViLU` has its predictor's confidence; other models have
    the mean probability of the predicted class.

    Args:
        model (`nn.Module`): a ViLU, a classifier or a `ZeroShotClassifier`.
        data (`DataLoader`, `Dataset` or `list`): as for `evaluate_uncertainty`.
        batch_size (`int`, defaults to 32): rows per batch, for a Dataset of rows.
    """
    inside = model
    if isinstance(model, PromptClassifier):
        inside = model.model
    confidences = []
    rights = []
    with evaluation_mode(model):
        for batch in batches(data, batch_size, device_of(model)):
            inputs, labels = split_labels(batch)
            output = model(**accepted_inputs(model, inputs))
            member_logits = member_logits_of(output, type(model).__name__)
            probabilities = member_logits.double().softmax(dim=-1).mean(dim=1)  # (batch, classes)
            if isinstance(inside, ViLU):
                confidences.append(1 - output.detector_score.double())
            else:
                confidences.append(probabilities.amax(dim=-1))
            if labels is not None:
                rights.append(probabilities.argmax(dim=-1) == labels)

    is_right = None
    if rights:
        is_right = torch.cat(rights).cpu()
    return torch.cat(confidences).cpu(), is_right


def failure_metrics(confidence: Any, is_right: Any) -> dict[str, float]:
    """Measure how well confidences tell wrong answers from right ones.

    Wrong is the positive class.

        auroc, aupr, fpr95  as in `ood_metrics`, of 1 − confidence
        aurc                the area under the risk-coverage curve, as in `classification_metrics`
        ece, aece           of the confidence as a probability of being right; the usual top-1 ECE
        if
                            it is the probability of the predicted class. Do not rank a ViLU against
                            class probabilities by it: its task is easier
        base_rate           the share of right answers; always predicting it gives an ECE of 0

    Args:
        confidence (`torch.Tensor`): (samples,), between 0 and 1.
        is_right (`torch.Tensor`): (samples,), bool.

    Example:
        >>> failure_metrics([0.9, 0.8, 0.3, 0.6], [True, True, False, False])["auroc"]
        1.0
    """
    confidence = as_tensor(confidence).double().cpu()
    is_right = as_tensor(is_right).bool().cpu()
    if confidence.shape != is_right.shape or confidence.dim() != 1:
        raise ValueError(
            f"confidence has shape {tuple(confidence.shape)}, is_right {tuple(is_right.shape)}: pass one of each for "
            "every sample"
        )
    if is_right.all() or not is_right.any():
        raise ValueError("is_right is the same for all samples: there is nothing to tell apart, pass more samples")
    correct = is_right.double()
    detection = ood_metrics(1 - confidence[is_right], 1 - confidence[~is_right])
    _, risk = error_coverage_curve(confidence, 1 - correct)
    return {
        **detection,
        "aurc": exact_mean(risk),
        "ece": expected_calibration_error(confidence, correct),
        "aece": adaptive_calibration_error(confidence, correct),
        "base_rate": exact_mean(correct),
    }
