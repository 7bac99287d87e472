"""Token classification: a class for every token of a text, such as the tags of words (NER, POS)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .decision_settings import DecisionSettings, positive, setting
from .ensembling import at_least_float32, log_mean_probability
from .task import DecisionOutput, SingleLabel


NO_TAG = -100  # of tokens that no loss and no metric counts


@dataclass(frozen=True, kw_only=True)
class TokenSettings(DecisionSettings):
    """temperature: what logits are divided by"""

    temperature: float = setting(positive)


class TokenClassification(SingleLabel):
    """One class of several for every token; logits have an axis of tokens in front of the classes."""

    name = "token_classification"
    title = "token classification"
    choice = "one of {} classes for each word"
    chooses_one_class = False
    reads_lists = True
    has_detector = False
    settings_class = "task_tokens.TokenSettings"

    def check_config(self, config: PreTrainedConfig) -> None:
        if config.problem_type != "single_label_classification":
            raise ValueError(
                f"problem_type is {config.problem_type!r} with {config.num_labels} labels, and a token has one class of "
                "several: set problem_type to 'single_label_classification', and num_labels to at least 2"
            )
        super().check_config(config)

    def read_labels(
        self, labels: Any, classes: Sequence[str], words: Sequence[Sequence[str]] | None = None
    ) -> list[Any]:
        return labels.of_words(words, classes)

    def classes_of_label(self, label: Sequence[int]) -> Iterable[int]:
        return [tag for tag in label if tag != NO_TAG]

    def check_labels(self, labels: Tensor, logits: Tensor, config: Any) -> None:
        batch, tokens, _ = logits.shape
        if labels.shape != (batch, tokens) or labels.is_floating_point():
            raise ValueError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}, and a token classifier takes a class index per token, "
                f"({batch}, {tokens}): give every token one, and -100 to those that have none"
            )

    def loss(self, loss_function: Callable, labels: Tensor, logits: Tensor, config: Any, **kwargs: Any) -> Tensor:
        return token_loss(labels, logits, **kwargs)

    def decide(self, decision: Any, member_logits: Tensor, member_features: Tensor | None) -> DecisionOutput:
        """`detector_score` and `abstain` are (batch, tokens), of 1 - the probability of each token's likeliest class. An
        entity is answered if none of its words is above the threshold.

        member_logits: (batch, members, tokens, classes)
        """
        member_logits = at_least_float32(member_logits) / decision.settings.temperature
        detector_score = 1 - log_mean_probability(member_logits).exp().amax(dim=-1)
        return DecisionOutput(member_logits, detector_score, decision.above_threshold(detector_score))


def token_loss(
    labels: Tensor, logits: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
) -> Tensor:
    """Return the cross-entropy of logits (batch, tokens, classes) over the tokens with a label other than -100: their mean,
    or with `num_items_in_batch` their sum divided by it."""
    labels = labels.to(logits.device).flatten()
    reduction = "mean" if num_items_in_batch is None else "sum"
    total = nn.functional.cross_entropy(at_least_float32(logits).flatten(0, 1), labels, reduction=reduction)
    if num_items_in_batch is None:
        return total
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def rows_of_tokens(member_logits: Tensor) -> Tensor:
    """(batch, members, tokens, ...) -> (batch * tokens, members, ...)"""
    return member_logits.transpose(1, 2).flatten(0, 1)
