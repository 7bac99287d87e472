"""Multi-label classification, which says yes or no to each label. Ships with such models, and with encoders, which may get
such a head."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .decision_settings import DecisionSettings, limits, numbers, optional, positive, setting
from .ensembling import at_least_float32, entropy_split
from .task import Classification, DecisionOutput


ROUNDING = 1e-6  # of log-odds


def label_log_probabilities(member_logits: Tensor) -> Tensor:
    """Return the log of the probabilities of no and yes: (batch, members, labels) -> (batch, members, labels, 2)"""
    return nn.functional.logsigmoid(torch.stack([-member_logits, member_logits], dim=-1))


def logit_of_mean_probability(member_logits: Tensor) -> Tensor:
    """Return the logit of the mean over members of sigmoid: (batch, members, classes) -> (batch, classes), at least
    float32."""
    member_logits = at_least_float32(member_logits)
    yes = torch.logsumexp(nn.functional.logsigmoid(member_logits), dim=1)
    no = torch.logsumexp(nn.functional.logsigmoid(-member_logits), dim=1)
    return yes - no


class YesOrNo(Classification):
    """Says yes or no to each of several, as SigLIP to texts, without naming those with a yes."""

    def log_probabilities(self, member_logits: Tensor) -> Tensor:
        return label_log_probabilities(member_logits)

    def ensemble_logits(self, member_logits: Tensor, config: PreTrainedConfig | None = None) -> Tensor:
        return logit_of_mean_probability(member_logits)

    def scores(self, logits: Tensor) -> Tensor:
        return logits.double().sigmoid()


@dataclass(frozen=True, kw_only=True)
class MultiLabelSettings(DecisionSettings):
    """temperature: what logits are divided by
    log_odds: of each label, from where on it is predicted
    set_log_odds: of each label, from where on it is in the set; None without sets
    """

    temperature: float = setting(positive)
    log_odds: tuple[float, ...] = setting(numbers)
    set_log_odds: tuple[float, ...] | None = setting(optional(limits), default=None)


class MultiLabel(YesOrNo):
    """Any number of labels are right."""

    name = "multi_label_classification"
    title = "multi-label classification"
    choice = "any of {} classes"
    expected_labels = "a float per row and class"
    reads_lists = True
    settings_class = "task_multi_label.MultiLabelSettings"

    def classes_of_label(self, label: Sequence[float]) -> Iterable[int]:
        return [place for place, has_label in enumerate(label) if has_label]

    def accepts(self, labels: Tensor, logits: Tensor) -> bool:
        return labels.shape == logits.shape and labels.is_floating_point()

    def prediction_fields(
        self, outputs: Mapping[str, Any], names: Any, top_k: int | None, settings: Any
    ) -> dict[str, Any]:
        """Add `labels`, those that are predicted, the likeliest first: from their own thresholds on where the model was
        calibrated, else from 0.5. Each of `scores` gets its own uncertainty, aleatoric and epistemic."""
        fields = super().prediction_fields(outputs, names, top_k, settings)
        logits = outputs["logits"][0]
        order = logits.argsort(descending=True, stable=True).tolist()
        parts = self.parts_of_uncertainty(outputs)
        for score, place in zip(fields["scores"], order, strict=False):
            score |= {name: part[0, place].item() for name, part in parts.items()}
        values = logits.tolist()
        lowest = [0.0] * len(values) if settings is None else settings.log_odds
        fields["labels"] = [names[place] for place in order if values[place] >= lowest[place]]
        return fields

    def decide(self, decision: Any, member_logits: Tensor, member_features: Tensor | None) -> DecisionOutput:
        """`detector_score` is the sum of the labels' entropies."""
        settings = decision.settings
        member_logits = at_least_float32(member_logits) / settings.temperature
        log_odds = logit_of_mean_probability(member_logits)
        beyond = log_odds - decision.per_output("log_odds", log_odds)
        detector_score = entropy_split(label_log_probabilities(member_logits))[0].sum(dim=-1)
        chosen = None
        if settings.set_log_odds is not None:
            lowest = [_rounded_down(value) for value in settings.set_log_odds]
            lowest = torch.tensor(lowest, dtype=log_odds.dtype, device=log_odds.device)
            chosen = (log_odds >= lowest) | log_odds.isnan()
        abstain = decision.above_threshold(detector_score)
        return DecisionOutput(member_logits, detector_score, abstain, chosen, chosen_labels=beyond >= 0)


def _rounded_down(log_odds: float) -> float:
    """In doubt a label is in the set."""
    if not math.isfinite(log_odds):
        return log_odds
    return log_odds - ROUNDING * (1 + abs(log_odds))
