"""Detectors of out-of-distribution inputs: made by name, fitted where needed, saved beside a model."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._io.processes import (
    check_can_be_shared,
    from_first_process,
    in_rounds,
    on_one_process,
    rank_and_world_size,
    total,
)
from ..data.batches import split_labels
from ..data.prediction import classes_of, problem_type_of
from ..models.detection import DETECTORS, Answers, Method, answers_of, is_number, score
from .detector_fits import FITS
from .features import AnswerReader, Head
from .inputs import as_labels, as_member_logits, as_tensor, check_predictions, widened
from .saving import load_tensors, save_tensors, saved_in


FILE_NAME = "detector.safetensors"
ROWS_PER_PASS = 1024  # bounds the memory of a pass over tensors
OOD_SCORES = tuple(name for name, method in DETECTORS.items() if not method.state)
"""The scores that need no fit, by name: what `ood_score` takes."""


def ood_score(member_logits: Any, method: str = "msp") -> Tensor:
    """How far out of distribution each sample looks, (batch,) in float64; higher means more out of distribution.

    For models that choose one of several classes, not for multi-label ones.

    Args:
        member_logits: (batch, members, classes).
        method: how the members' logits `z_m` and mean probability `p̄` become one score:

            - `"msp"`: `1 - max_c p̄_c`, the maximum softmax probability of the ensemble (the paper's score)
            - `"entropy"`: `H(p̄)`, the entropy of the mean probability
            - `"max_logit"`: `-1/M Σ_m max_c z_mc`, the mean over members of each member's score
            - `"energy"`: `-1/M Σ_m log Σ_c exp z_mc`, the mean over members of each member's score
            - `"mutual_information"`: the epistemic part of the entropy; 0 for a single model
            - `"disagreement"`: share of differing pairs of members; 0 for a single model
            - `"gen"`: `Σ p̄_c^0.1 (1 - p̄_c)^0.1` over the 100 most probable classes, a generalised entropy

    For scores that are fitted on training data, and other settings of these, see `detector_by_name`.

    Example:
        >>> ood_score([[[4.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]], method="msp").round(decimals=3)
        tensor([0.0350, 0.6670], dtype=torch.float64)
    """
    return as_detector(method)(member_logits)


def as_detector(score: "str | Detector") -> "Detector":
    """A detector by the name of its score, or a fitted one as it is; refuses anything else."""
    if isinstance(score, Detector):
        score.check_fitted()
        return score
    if not isinstance(score, str):
        raise TypeError(f"score is a {type(score).__name__}: pass a name, or a Detector of detector_by_name")
    if score in DETECTORS and score not in OOD_SCORES:
        raise ValueError(
            f"{score} needs a fit: pass detector_by_name({score!r}).fit(model, train_data) in place of the name"
        )
    if score not in OOD_SCORES:
        raise ValueError(f"unknown OOD score {score!r}: choose one of {', '.join(OOD_SCORES)}")
    return detector_by_name(score)


def detector_by_name(name: str, *, by: str | None = None, multi_label: bool = False, **settings: Any) -> "Detector":
    """A detector; higher scores mean more out of distribution.

    Args:
        name: one of

            - from the logits: `"msp"`, `"max_logit"`, `"energy"`, `"entropy"`, `"gen"`, and between members
              `"mutual_information"`, `"disagreement"`: see `ood_score`
            - from the logits, fitted: `"kl_matching"`, distance to the mean probabilities of the predicted classes
            - from the features, fitted: `"knn"`, `"mahalanobis"`, `"relative_mahalanobis"`; with the logits `"she"`, `"vim"`
        by: `"members"`, the mean of the members' scores, or `"mean"`, the score of their mean probability and mean features;
            some detectors have only one of them.
        multi_label: for models that decide on each label by itself. msp is then that of the likeliest label, energy the
            joint energy, entropies are summed over the labels and disagreement is averaged; knn is unchanged. The others
            need one class of several, and are refused.
        settings: of `"gen"`: `gamma` (0.1), `top_classes` (100). Of `"knn"`: `k` (50), `bank_size` (10,000: at most so many
            rows are kept, drawn at random) and the `seed` of the draw. Of the Mahalanobis distances: `shrinkage` of the
            covariances, see `whitening_of`. Of `"vim"`: `principal_dim` (1,000 for features of more than 1,500 dimensions,
            512 from 768 on, otherwise half of them), and the `sample_size` and `seed` of the rows that scale the residual.

    Example:
        >>> detector = detector_by_name("energy")
        >>> detector.needs_fit, detector.reads_features
        (False, False)
        >>> import torch
        >>> detector(torch.tensor([[[8.0, 0.0]], [[0.5, 0.0]]])).round(decimals=2)
        tensor([-8.0000, -0.9700], dtype=torch.float64)
    """
    return Detector(name, by, multi_label, settings)


def check_detector(name: str, by: str | None, multi_label: bool, settings: Mapping[str, Any]) -> Method:
    """Refuses a detector that does not exist, or not in this form; its method otherwise."""
    if not isinstance(name, str) or name not in DETECTORS:
        raise ValueError(f"unknown detector {name!r}: choose one of {', '.join(DETECTORS)}")
    method = DETECTORS[name]
    if by not in (None, *method.by):
        ways = " or ".join(map(repr, method.by))
        raise ValueError(f"by is {by!r}, which {name} has no form for: pass {ways}, or leave it out")
    if multi_label and method.multi_label is None:
        able = ", ".join(other for other, each in DETECTORS.items() if each.multi_label is not None)
        raise ValueError(f"{name} is about one class of several, and has no multi-label form: choose one of {able}")
    usual = {**method.settings, **method.fit_settings}
    for setting, value in settings.items():
        if setting not in usual:
            choices = f"choose from {', '.join(usual)}" if usual else "it has none"
            raise ValueError(f"{name} has no setting {setting!r}: {choices}")
        _check_setting(setting, value)
    return method


def _check_setting(name: str, value: Any) -> None:
    is_finite = is_number(value) and math.isfinite(value)
    is_count = is_finite and isinstance(value, int) and value >= (0 if name == "seed" else 1)
    if name == "shrinkage":
        fits, wanted = value is None or (is_finite and 0 <= value <= 1), "a number from 0 to 1, or None"
    elif name == "gamma":
        fits, wanted = is_finite and value > 0, "a positive number"
    elif name == "principal_dim":
        fits, wanted = value is None or is_count, "a positive whole number, or None"
    else:
        fits, wanted = is_count, "a positive whole number"
    if not fits:
        raise ValueError(f"{name} is {value!r}: pass {wanted}")


class Detector:
    """Scores how far out of distribution inputs look; made by `detector_by_name`.

    Attributes:
        name, by, multi_label, settings: as given to `detector_by_name`, with defaults filled in.
        state: the tensors of a fit; None before it.
        fitted_on: members, classes, dim and rows of the fit, and a fingerprint of the model's head if it was seen.
    """

    def __init__(self, name: str, by: str | None, multi_label: bool, settings: Mapping[str, Any]):
        self.method = check_detector(name, by, multi_label, settings)
        self.name, self.by, self.multi_label = name, by or self.method.by[0], multi_label
        self.defaults: dict[str, Any] = {**self.method.settings, **self.method.fit_settings}
        self.settings: dict[str, Any] = self.defaults | dict(settings)
        if self.settings.get("bank_size", math.inf) < self.settings.get("k", 0):
            raise ValueError(f"bank_size is {self.settings['bank_size']}, k {self.settings['k']}: pass a larger bank")
        self.state: dict[str, Tensor] | None = None
        self.fitted_on: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Detector({self.description}{', not fitted' if self.needs_fit and self.state is None else ''})"

    @property
    def description(self) -> str:
        """The name, and settings that are not the defaults: "knn (k=10, by mean)"."""
        parts = [f"{name}={value}" for name, value in self.settings.items() if value != self.defaults[name]]
        parts += [f"by {self.by}"] if self.by != self.method.by[0] else []
        parts += ["multi-label"] if self.multi_label else []
        return f"{self.name} ({', '.join(parts)})" if parts else self.name

    @property
    def score_settings(self) -> dict[str, Any]:
        """The settings of scoring, without those of the fit."""
        return {name: self.settings[name] for name in self.method.settings}

    @property
    def needs_fit(self) -> bool:
        return bool(self.method.state)

    @property
    def needs_labels(self) -> bool:
        """Whether the fit's data must have labels."""
        return self.method.needs_labels

    @property
    def reads_features(self) -> bool:
        return "features" in self.method.reads

    @property
    def reads_logits(self) -> bool:
        return "logits" in self.method.reads

    def check_fitted(self) -> None:
        if self.needs_fit and self.state is None:
            raise ValueError(f"{self.name} is not fitted: call fit(model, train_data) first")

    # Fitting

    def fit(self, model: nn.Module, data: Any, batch_size: int = 32) -> "Detector":
        """Learns the training data as the model sees it, in one pass on the model's device, and returns itself. Features
        are held of a sample at most, for knn and vim.

        With `torch.distributed` initialised, the processes share the batches, and each gets the fit of all rows: every one
        must call it, with the whole data in the same order.

        Args:
            model: any model that predicts; see `AnswerReader` for those whose features can be read.
            data: in-distribution data, best the training data: a DataLoader, a list of dict batches, or a Dataset or list
                of dict rows; with labels where `needs_labels`.
            batch_size: rows per batch, if data comes in rows.
        """
        self._check_problem(model)
        check_can_be_shared(data, "data")
        reader = AnswerReader(model, self.reads_features)
        classes = classes_of(model) if self.needs_labels else None
        rank, world_size = rank_and_world_size()
        answers = (
            (member_logits, features, split_labels(batch)[1])
            for batch, member_logits, features in reader.read(
                data, batch_size, classes=classes, rank=rank, world_size=world_size
            )
        )
        shared_on = reader.device if world_size > 1 else None
        return self._fit(answers, lambda: (reader.heads, reader.fingerprint()), shared_on)

    def fit_answers(
        self,
        member_logits: Any,
        member_features: Any = None,
        labels: Any = None,
        heads: Sequence[tuple[Tensor, Tensor | None]] | None = None,
    ) -> "Detector":
        """`fit` on given answers, such as those of `collect_answers`.

        Args:
            member_logits: (rows, members, classes).
            member_features: (rows, members, dim), where `reads_features`.
            labels: (rows,), where `needs_labels`.
            heads: for vim, each member's last linear map: weight (classes, dim) and bias (classes,), or None for no bias.
        """
        if self.name == "vim" and heads is None:
            raise ValueError("vim needs heads: pass each member's last linear map as (weight, bias)")
        given = {"member_logits": member_logits, "member_features": member_features, "labels": labels}
        tensors = {name: as_tensor(each) for name, each in given.items() if each is not None}
        if len({len(tensor) for tensor in tensors.values()}) > 1:
            found = ", ".join(f"{name} has {len(tensor)} rows" for name, tensor in tensors.items())
            raise ValueError(f"{found}: pass one of each for every row")
        in_parts = {name: tensor.split(ROWS_PER_PASS) for name, tensor in tensors.items()}
        nothing = [None] * len(in_parts["member_logits"])
        answers = zip(*(in_parts.get(name, nothing) for name in given), strict=True)
        return self._fit(answers, lambda: ([Head(*head) for head in heads or ()], None))

    def _fit(
        self,
        answers: Iterable[tuple],
        read_heads: Callable[[], tuple[list[Head], Any]],
        shared_on: torch.device | None = None,
    ) -> "Detector":
        """
        answers: (member_logits, member_features, labels) of each batch
        read_heads: heads and their fingerprint
        shared_on: this process's device, where several processes have a part of the batches each
        """
        if not self.needs_fit:
            raise ValueError(f"{self.name} needs no fit: call it as it is")
        fit_settings = {
            name: self.settings[name] for name in ("k", *self.method.fit_settings) if name in self.settings
        }
        fit, rows, last = FITS[self.name](**fit_settings), 0, None
        checked = self._checked_batches(answers)
        for batch, between in ((batch, 0) for batch in checked) if shared_on is None else in_rounds(checked):
            if between and hasattr(fit, "reservoir"):
                fit.reservoir.skip(between)
            rows, last = rows + len(batch), batch
            if len(batch):
                fit.update(batch.answers, batch.labels)
        if shared_on is not None:
            rows = total(rows)
            if rows:
                fit.merge()
        if rows == 0:
            raise ValueError("data has no rows: pass at least one batch")
        compute = partial(self._fitted, fit, read_heads, last, rows, shared_on)
        if shared_on is None:
            self.state, self.fitted_on = compute()
        else:  # the first process has the first batch
            state, self.fitted_on = from_first_process(on_one_process(compute))
            self.state = {name: tensor.to(shared_on) for name, tensor in state.items()}
        return self

    def _checked_batches(self, answers: Iterable[tuple]) -> "Iterator[_Batch]":
        sizes = {}
        for member_logits, features, labels in answers:
            if self.needs_labels and labels is None:
                raise ValueError(
                    f"data has no labels, and {self.name} learns what classes look like: add a column labels with class indices"
                )
            member_logits, features = self._checked(member_logits, features)
            found = _sizes_of(member_logits, features)
            if sizes and found != sizes:
                raise ValueError(
                    f"a batch of data gave {_in_words(found)}, others {_in_words(sizes)}: pass one model's answers"
                )
            sizes, read = found, member_logits if features is None else features
            if self.needs_labels:
                labels = as_labels(labels, len(member_logits), sizes["classes"]).to(read.device)
            answered = None
            if len(read):
                answered = answers_of(widened(member_logits), features, None, self.by, self.multi_label)
            yield _Batch(
                answered, labels, len(read), sizes, read.device, torch.promote_types(read.dtype, torch.float32)
            )

    def _fitted(
        self, fit: Any, read_heads: Callable, last: "_Batch", rows: int, shared_on: torch.device | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The fit's tensors, on the CPU where they will go to other processes, and what they are of."""
        heads, fingerprint = read_heads()
        if self.name == "vim" and len(heads) != last.sizes["members"]:
            raise ValueError(f"heads has {len(heads)} maps, the answers are of {last.sizes['members']} members")
        state, device = fit.state(heads, last.sizes["classes"]), last.device if shared_on is None else "cpu"
        state = {name: tensor.to(device, last.dtype).contiguous() for name, tensor in state.items()}
        return state, last.sizes | {"rows": rows, "head": fingerprint}

    # Scoring

    def __call__(self, member_logits: Any, member_features: Any = None) -> Tensor:
        """The scores (batch,) in float64, of logits (batch, members, classes) and, where `reads_features`, features
        (batch, members, dim)."""
        self.check_fitted()
        member_logits, features = self._checked(member_logits, member_features)
        member_logits = member_logits.detach()
        found = _sizes_of(member_logits, features)
        if self.fitted_on and any(self.fitted_on[name] != value for name, value in found.items()):
            raise ValueError(
                f"{self.name} was fitted on {_in_words(self.fitted_on)}, these answers have {_in_words(found)}: fit it on this model"
            )
        device = member_logits.device if features is None else features.device
        if self.state is not None and any(tensor.device != device for tensor in self.state.values()):
            self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
        scores = []
        for start in range(0, max(1, len(member_logits)), ROWS_PER_PASS):
            part = slice(start, start + ROWS_PER_PASS)
            # float64, except where features are on a device without it
            logits = widened(member_logits[part])
            logits = logits if logits.device == device else logits.float().to(device)
            of_part = None if features is None else features[part]
            answers = answers_of(logits, of_part, self.state, multi_label=self.multi_label)
            values = score(self.name, answers, self.by, self.multi_label, **self.score_settings)
            scores.append(widened(values))
        return torch.cat(scores)

    def score(self, model: nn.Module, data: Any, batch_size: int = 32) -> Tensor:
        """The scores (samples,) of a data set, in float64 on the CPU, predicted batch by batch on the model's device.

        Refuses a model with other numbers of members, classes or dimensions than in the fit, or with another head of the
        same dtype.
        """
        self.check_fitted()
        self._check_problem(model)
        reader, scores = AnswerReader(model, self.reads_features), []
        for _, *answers in reader.read(data, batch_size):
            if not scores:
                self.check_heads(reader)
            scores.append(self(*answers).cpu())
        return torch.cat(scores)

    def check_heads(self, reader: AnswerReader) -> None:
        """Refuses a model whose head is not that of the fit; called after the reader's first batch."""
        fitted = self.fitted_on.get("head")
        if fitted is None or len(reader.heads) != self.fitted_on["members"]:  # the latter is refused by its sizes
            return
        found = reader.fingerprint()
        if found is not None and found["dtype"] == fitted["dtype"] and found != fitted:
            raise ValueError(
                f"{reader.name} has another head than the model that {self.name} was fitted on: fit it on this model"
            )

    def _check_problem(self, model: nn.Module) -> None:
        problem = problem_type_of(model)
        if problem == "regression":
            raise ValueError("model is made for regression (problem_type in its config): detectors need classes")
        other = "single_label_classification" if self.multi_label else "multi_label_classification"
        if problem == other:
            raise ValueError(
                f"model is made for {problem} (problem_type in its config), this detector is not: make it with "
                f"multi_label={not self.multi_label}"
            )

    def _checked(self, member_logits: Any, member_features: Any) -> tuple[Tensor, Tensor | None]:
        """The answers as tensors, without features where none are read."""
        member_logits = as_member_logits(member_logits, least_classes=1 if self.multi_label else 2)
        if self.reads_logits:
            check_predictions(member_logits, self.multi_label)
        if not self.reads_features:
            return member_logits, None
        if member_features is None:
            raise ValueError(f"{self.name} reads features: pass member_features, such as those of collect_answers")
        features = as_tensor(member_features).detach()
        if features.dim() != 3 or features.shape[:2] != member_logits.shape[:2]:
            raise ValueError(
                f"member_features has shape {tuple(features.shape)}, member_logits {tuple(member_logits.shape)}: pass "
                "(batch, members, dim)"
            )
        bad = ~features.isfinite().all(dim=-1)
        if bad.any():
            row, member = bad.nonzero()[0].tolist()
            raise ValueError(f"member_features[{row}, {member}] is not finite: check the model's weights and input")
        return member_logits, features

    # Files

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes `detector.safetensors` into a folder, such as the model's: the state, with the settings as metadata."""
        self.check_fitted()
        settings = {name: getattr(self, name) for name in ("name", "by", "multi_label", "settings", "fitted_on")}
        return save_tensors(Path(folder) / FILE_NAME, self.state or {}, "detector", settings)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "Detector":
        """Reads `detector.safetensors` from a folder, or from a repository of the Hub."""
        path = saved_in(folder, FILE_NAME, "Detector")
        try:
            return cls._from_saved(*load_tensors(path, "detector"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no detector ({error}): pass a folder that Detector.save wrote into"
            ) from error

    @classmethod
    def _from_saved(cls, tensors: dict[str, Tensor], saved: Mapping[str, Any]) -> "Detector":
        detector = cls(saved["name"], saved["by"], saved["multi_label"], saved["settings"])
        if set(tensors) != set(detector.method.state):
            raise ValueError(f"its tensors are {', '.join(sorted(tensors)) or 'none'}")
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise ValueError(f"its {name} is not made of finite numbers")
        if tensors:
            detector.state, detector.fitted_on = tensors, saved["fitted_on"]
            detector._check_state()
        return detector

    def _check_state(self) -> None:
        """Refuses tensors that do not fit each other, by scoring one made-up answer."""
        sizes, head = {name: self.fitted_on[name] for name in ("members", "classes", "dim")}, self.fitted_on["head"]
        if head is not None and {type(head[name]) for name in ("dtype", "digest")} != {str}:
            raise ValueError("its fingerprint of a head is none")
        try:
            logits = torch.zeros(1, sizes["members"], sizes["classes"], device="cpu")
            features = None if sizes["dim"] is None else torch.zeros(1, sizes["members"], sizes["dim"], device="cpu")
            members = {len(tensor) for tensor in self.state.values()}
            fits = members == {1 if self.by == "mean" else sizes["members"]} and len(self(logits, features)) == 1
        except (RuntimeError, IndexError):
            fits = False
        if not fits:
            raise ValueError(f"its tensors are not those of {_in_words(sizes)}")


@dataclass
class _Batch:
    """One batch of a fit. dtype: of the fit's tensors"""

    answers: Answers | None
    labels: Tensor | None
    rows: int
    sizes: dict[str, int | None]
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.rows


def _sizes_of(member_logits: Tensor, features: Tensor | None) -> dict[str, int | None]:
    members, classes = member_logits.shape[1:]
    return {"members": members, "classes": classes, "dim": None if features is None else features.shape[-1]}


def _in_words(sizes: Mapping[str, Any]) -> str:
    dim = "" if sizes["dim"] is None else f" and features of {sizes['dim']} dimensions"
    return f"{sizes['members']} member{'' if sizes['members'] == 1 else 's'}, {sizes['classes']} classes{dim}"
