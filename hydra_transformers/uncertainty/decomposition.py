"""Split uncertainty into noise in the data (aleatoric) and disagreement of the members
(epistemic)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import batches
from ..data.prediction import device_of, predict
from ..data.tags import NO_TAG, collect_words
from ..model_info import ModelInfo, task_of_logits
from ..models.configuration_hydra import PROBLEM_TYPES
from ..models.detection import differing_pairs
from ..models.ensembling import entropy_split, log_mean
from ..models.task import classifies_tokens, load_task
from ..models.task_multi_label import label_log_probabilities
from ..models.task_regression import spread
from ..models.task_tokens import rows_of_tokens
from .features import collect_answers
from .inputs import as_member_logits, as_tensor, check_predictions, wide_log_softmax, widened


WITH_ENTROPY = [None, *(name for name in PROBLEM_TYPES if not load_task(name).predicts_numbers)]


@dataclass(frozen=True)
class Decomposition:
    """The ensemble's prediction and its uncertainty, one row per sample; entropies in nats,
    everything in float64.

    For a multi-label model every attribute is (batch, labels): each label is a choice between 0
    (no) and 1 (yes), and `mean_probabilities` that of yes. Likewise for SigLIP without a
    `ZeroShotClassifier`, (images, texts).

    Attributes:
        mean_probabilities: (batch, classes), the members' mean probability p̄.
        prediction: (batch,), the class with the largest mean probability.
        confidence: (batch,), that probability.
        total: (batch,), entropy of p̄.
        aleatoric: (batch,), mean over the members of their own entropies.
        epistemic: (batch,), their difference: the mutual information of prediction and member.
        disagreement: (batch,), share of the pairs of members that predict different classes.
    """

    mean_probabilities: Tensor
    prediction: Tensor
    confidence: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    disagreement: Tensor


def decompose(member_logits: Any, problem_type: str | None = None) -> Decomposition:
    r"""Split the predictive uncertainty of an ensemble.

    With member probabilities `p_m = softmax(z_m)` and their mean `p̄ = 1/M Σ_m p_m`:

        total      H(p̄)            = -Σ_c p̄_c log p̄_c
        aleatoric  1/M Σ_m H(p_m)
        epistemic  total - aleatoric = 1/M Σ_m KL(p_m ‖ p̄) >= 0
        disagreement                 = share of the M(M-1)/2 pairs of members whose argmax differs

    With one member, epistemic and disagreement are exactly 0. Ties of the argmax go to the lower
    class. For multi-label models p_m is (1 - sigmoid(z_m), sigmoid(z_m)), label by label; entropies
    of labels may be added up.

    Args:
        member_logits (`torch.Tensor`):
            (batch, members, classes), a tensor or array of any float type; of a classifier of
            tokens (batch, members, tokens, classes), and every attribute is then (batch, tokens).
        problem_type (`str`, *optional*):
            As in the model's config; by default one class of several.

    Example:
        >>> sure = torch.tensor([[9.0, 0.0], [9.0, 0.0]])
        >>> torn = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
        >>> parts = decompose(torch.stack([sure, torn]))
        >>> parts.epistemic.round(decimals=2)
        tensor([0.0000, 0.6900], dtype=torch.float64)
        >>> parts.disagreement
        tensor([0., 1.], dtype=torch.float64)
    """
    if problem_type not in WITH_ENTROPY:
        raise ValueError(f"problem_type is {problem_type!r}: pass one of {', '.join(map(repr, WITH_ENTROPY))}")
    if not load_task(problem_type).chooses_one_class:
        return _decompose_labels(as_member_logits(member_logits, least_classes=1))
    if not hasattr(member_logits, "logits") and as_tensor(member_logits).dim() == 4:
        return _decompose_tokens(as_tensor(member_logits))
    return decompose_log_probabilities(wide_log_softmax(as_member_logits(member_logits)))


def _decompose_labels(member_logits: Tensor) -> Decomposition:
    """Decompose each label as two classes, no and yes: (batch, members, labels) -> (batch, labels)
    each."""
    batch, _, labels = member_logits.shape
    check_predictions(member_logits, have_softmax=False)
    log_probabilities = label_log_probabilities(widened(member_logits))
    parts = vars(decompose_log_probabilities(log_probabilities.transpose(1, 2).flatten(0, 1)))
    parts = parts | {"mean_probabilities": parts["mean_probabilities"][:, 1]}
    return Decomposition(**{name: value.unflatten(0, (batch, labels)) for name, value in parts.items()})


def _decompose_tokens(member_logits: Tensor) -> Decomposition:
    """(batch, members, tokens, classes) -> (batch, tokens) each; NaN, and a prediction of -100,
    where all logits are NaN."""
    batch, _, tokens, _ = member_logits.shape
    rows = rows_of_tokens(member_logits)
    are_words = ~rows.isnan().all(dim=-1).all(dim=-1)
    log_probabilities = wide_log_softmax(as_member_logits(rows[are_words]))
    parts = vars(decompose_log_probabilities(log_probabilities))

    # Put them back among the tokens that are not words.
    filled = {}
    for name, value in parts.items():
        filler = torch.nan if value.is_floating_point() else NO_TAG
        filled[name] = value.new_full((len(rows), *value.shape[1:]), filler)
        filled[name][are_words] = value
    return Decomposition(**{name: value.unflatten(0, (batch, tokens)) for name, value in filled.items()})


def decompose_log_probabilities(log_probabilities: Tensor) -> Decomposition:
    """Run `decompose` from the members' log-probabilities (batch, members, classes) in float64."""
    mean_probabilities = log_mean(log_probabilities).exp()
    confidence, prediction = mean_probabilities.max(dim=-1)
    split = entropy_split(log_probabilities)  # total, aleatoric, epistemic
    return Decomposition(mean_probabilities, prediction, confidence, *split, differing_pairs(log_probabilities))


@dataclass(frozen=True)
class NumberPrediction:
    """The ensemble's numbers and how uncertain they are, in float64.

    mean: (batch, outputs), the answer
    variance: (batch, outputs), of the answer: that between members, 0 for one
    """

    mean: Tensor
    variance: Tensor


def predict_uncertainty(model: nn.Module, data: Any, batch_size: int = 32) -> Decomposition | NumberPrediction:
    """Predict `data` in batches on the model's device and decompose the uncertainty; the result is
    on the CPU.

    Args:
        model (`nn.Module`):
            A Hydra, a Hugging Face classifier (one member) or a `ZeroShotClassifier`.
            `problem_type` in its config says whether it chooses one class or decides on each label;
            a single output is one label. CLIP by itself chooses among the texts of each batch,
            SigLIP says yes or no to each; a `ZeroShotClassifier` chooses one class.
        data (`DataLoader`, `Dataset` or `list`):
            Dict batches or rows.
        batch_size (`int`, *optional*, defaults to 32):
            Rows per batch, if data comes in rows.

    Returns:
        Of a regression model the mean and the variance, a `NumberPrediction`; of a classifier a
        `Decomposition`, whose parts are (texts, words) for one of tokens, NaN where a text has
        fewer words than others.
    """
    task = task_of_logits(model)
    if task.predicts_numbers and ModelInfo.of(model).says_task:
        answers, _, _ = collect_answers(model, data, batch_size, with_features=False)
        outputs = widened(answers)
        return NumberPrediction(outputs.mean(dim=1), spread(outputs).square())
    if classifies_tokens(model):
        answers, _ = collect_words(model, data, batch_size)
        return decompose(answers)

    # Batch by batch; all have to have the same classes.
    parts = []
    for batch in batches(data, batch_size, device_of(model)):
        member_logits = predict(model, batch)
        is_of_labels = member_logits.shape[-1] == 1 or not task.chooses_one_class
        if is_of_labels:
            decomposition = _decompose_labels(as_member_logits(member_logits, least_classes=1))
        else:
            decomposition = decompose(member_logits)
        parts.append({name: value.cpu() for name, value in vars(decomposition).items()})
    if not parts or len({part["mean_probabilities"].shape[-1] for part in parts}) > 1:
        raise ValueError("data has no batches, or not all have the same classes and texts: pass the same with each")
    return Decomposition(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})
