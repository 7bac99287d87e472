"""Detectors of out-of-distribution inputs, fitted where needed."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import split_labels
from ..model_info import check_chooses_one_class
from ..models.detection import DETECTORS, answers_of, score
from .detector_fits import FITS
from .features import AnswerReader
from .inputs import as_labels, as_member_logits, as_tensor, check_predictions, widened


ROWS_PER_PASS = 1024  # bounds the memory of a pass over tensors


def ood_score(member_logits: Any, method: str = "msp") -> Tensor:
    """Score how far out of distribution each sample looks, (batch,) in float64; higher means more
    out of distribution.

    For models that choose one of several classes, not for multi-label ones.

    Args:
        member_logits (`torch.Tensor`): (batch, members, classes).
        method (`str`, defaults to `"msp"`): how the members' logits `z_m` and mean probability `p̄`
            become one score:

            - `"msp"`: `1 - max_c p̄_c`, the maximum softmax probability of the ensemble (the
              paper's score)
            - `"entropy"`: `H(p̄)`, the entropy of the mean probability
            - `"max_logit"`: `-1/M Σ_m max_c z_mc`, the mean over members of each member's score
            - `"energy"`: `-1/M Σ_m log Σ_c exp z_mc`, the mean over members of each member's score
            - `"mutual_information"`: the epistemic part of the entropy; 0 for a single model
            - `"disagreement"`: share of differing pairs of members; 0 for a single model
            - `"gen"`: `Σ p̄_c^0.1 (1 - p̄_c)^0.1` over the 100 most probable classes, a generalised
              entropy

    For scores that are fitted on training data, see `Detector`.

    Example:
        >>> ood_score([[[4.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]], method="msp").round(decimals=3)
        tensor([0.0350, 0.6670], dtype=torch.float64)
    """
    return as_detector(method)(member_logits)


def as_detector(score: "str | Detector") -> "Detector":
    """Return a detector by the name of its score, or a fitted one as it is."""
    detector = score
    if not isinstance(score, Detector):
        detector = Detector(score)
    detector.check_fitted()
    return detector


class Detector:
    """Scores how far out of distribution inputs of models that choose one of several classes look;
    higher is further out.

    Args:
        name (`str`): from the logits, see `ood_score`: `"msp"`, `"max_logit"`, `"energy"`,
            `"entropy"`, `"gen"`, and between members `"mutual_information"`, `"disagreement"`. From
            the features, fitted, the mean of the members' scores: `"knn"`, `"mahalanobis"`,
            `"relative_mahalanobis"`.
        k (`int`, *optional*, defaults to 50): of `"knn"`, which of the nearest training rows is
            measured.

    Attributes:
        state (`dict` or `None`): the tensors of a fit; None before it.
        fitted_on (`dict`): members, classes, dim and rows of the fit.
        reads_features, needs_fit, needs_labels (`bool`): what it is computed from, and whether its
            fit needs labels.

    Example:
        >>> Detector("energy")(torch.tensor([[[8.0, 0.0]], [[0.5, 0.0]]])).round(decimals=2)
        tensor([-8.0000, -0.9700], dtype=torch.float64)
    """

    def __init__(self, name: str, *, k: int | None = None):
        if name not in list(DETECTORS):
            raise ValueError(f"unknown detector {name!r}: choose one of {', '.join(DETECTORS)}")
        if k is not None and name != "knn":
            raise ValueError(f"{name} has no k, which is of knn: leave it out")
        self.name = name
        self.method = DETECTORS[name]
        self.settings = dict(self.method.settings)
        if k is not None:
            self.settings["k"] = k
        self.reads_features = self.needs_fit = bool(self.method.state)
        self.needs_labels = "class_means" in self.method.state
        self.state: dict[str, Tensor] | None = None
        self.fitted_on: dict[str, Any] = {}

    @property
    def description(self) -> str:
        """Return the name, and k where it is not the default: "knn (k=10)"."""
        if self.settings == self.method.settings:
            return self.name
        return f"{self.name} (k={self.settings['k']})"

    def check_fitted(self) -> None:
        if self.needs_fit and self.state is None:
            raise ValueError(f"{self.name} is not fitted: call fit(model, train_data) first")

    # Fitting

    def fit(self, model: nn.Module, data: Any, batch_size: int = 32) -> "Detector":
        """Learn the training data as the model sees it, in one pass on the model's device, and
        return itself.

        Args:
            model: any model that predicts; see `AnswerReader` for those whose features can be read.
            data: in-distribution data, best the training data: a DataLoader, a list of dict
                batches, or a Dataset or list of dict rows; with labels where `needs_labels`.
            batch_size: rows per batch, if data comes in rows.
        """
        check_chooses_one_class(model, "model")
        reader = AnswerReader(model, self.reads_features)
        read = reader.read(data, batch_size)
        return self._fit((logits, features, split_labels(batch)[1]) for batch, logits, features in read)

    def fit_answers(self, member_logits: Any, member_features: Any, labels: Any = None) -> "Detector":
        """Run `fit` on given predictions, such as those of `collect_answers`.

        Args:
            member_logits: (rows, members, classes).
            member_features: (rows, members, dim).
            labels: (rows,), where `needs_labels`.
        """
        passes = math.ceil(len(member_logits) / ROWS_PER_PASS)
        logits_of_passes = as_tensor(member_logits).split(ROWS_PER_PASS)
        features_of_passes = as_tensor(member_features).split(ROWS_PER_PASS)
        labels_of_passes = [None] * passes
        if labels is not None:
            labels_of_passes = as_tensor(labels).split(ROWS_PER_PASS)
        return self._fit(zip(logits_of_passes, features_of_passes, labels_of_passes, strict=True))

    def _fit(self, answers: Iterable[tuple]) -> "Detector":
        """Fit on (member_logits, member_features, labels) of each batch."""
        fit = FITS[self.name](**self.settings)
        rows = 0
        sizes = {}
        for member_logits, member_features, labels in answers:
            member_logits, features = self._checked(member_logits, member_features)
            sizes = _sizes_of(member_logits, features)
            if self.needs_labels:
                if labels is None:
                    raise ValueError(f"data has no labels, and {self.name} learns classes: add a column labels")
                labels = as_labels(labels, len(member_logits), sizes["classes"]).to(features.device)
            rows += len(features)
            if len(features):
                fit.update(answers_of(widened(member_logits), features), labels)
        if rows == 0:
            raise ValueError("data has no rows: pass at least one batch")
        dtype = torch.promote_types(features.dtype, torch.float32)
        state = fit.state(sizes["classes"])
        self.state = {name: tensor.to(features.device, dtype).contiguous() for name, tensor in state.items()}
        self.fitted_on = sizes | {"rows": rows}
        return self

    # Scoring

    def __call__(self, member_logits: Any, member_features: Any = None) -> Tensor:
        """Return the scores (batch,) in float64, of logits (batch, members, classes) and, where
        `reads_features`, features (batch, members, dim)."""
        # Check that they are of the model that the detector was fitted on.
        self.check_fitted()
        member_logits, features = self._checked(member_logits, member_features)
        member_logits = member_logits.detach()
        sizes = _sizes_of(member_logits, features)
        if self.fitted_on and any(self.fitted_on[name] != size for name, size in sizes.items()):
            raise ValueError(f"{self.name} was fitted on {self.fitted_on}, these have {sizes}: fit it on this model")

        # Compute where the features are.
        device = member_logits.device
        if features is not None:
            device = features.device
        if self.state is not None and any(tensor.device != device for tensor in self.state.values()):
            self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
        scores = []
        for start in range(0, max(1, len(member_logits)), ROWS_PER_PASS):
            rows = slice(start, start + ROWS_PER_PASS)
            # float64, except where features are on a device without it
            logits = widened(member_logits[rows])
            if logits.device != device:
                logits = logits.float().to(device)
            features_of_rows = None
            if features is not None:
                features_of_rows = features[rows]
            answers = answers_of(logits, features_of_rows, self.state)
            scores.append(widened(score(self.name, answers, **self.settings)))
        return torch.cat(scores)

    def score(self, model: nn.Module, data: Any, batch_size: int = 32) -> Tensor:
        """Return the scores (samples,) of a data set, in float64 on the CPU, predicted batch by
        batch on the model's device."""
        self.check_fitted()
        check_chooses_one_class(model, "model")
        reader = AnswerReader(model, self.reads_features)
        scores = [self(logits, features).cpu() for _, logits, features in reader.read(data, batch_size)]
        return torch.cat(scores)

    def _checked(self, member_logits: Any, member_features: Any) -> tuple[Tensor, Tensor | None]:
        """Return both as tensors, without features where none are read."""
        member_logits = as_member_logits(member_logits)
        if not self.reads_features:
            check_predictions(member_logits)
            return member_logits, None
        features = None
        is_right = False
        if member_features is not None:
            features = as_tensor(member_features).detach()
            is_right = features.shape[:2] == member_logits.shape[:2] and bool(features.isfinite().all())
        if not is_right:
            raise ValueError(f"{self.name} reads features: pass member_features (batch, members, dim), finite numbers")
        return member_logits, features


def _sizes_of(member_logits: Tensor, features: Tensor | None) -> dict[str, int | None]:
    members, classes = member_logits.shape[1:]
    sizes = {"members": members, "classes": classes, "dim": None}
    if features is not None:
        sizes["dim"] = features.shape[-1]
    return sizes
