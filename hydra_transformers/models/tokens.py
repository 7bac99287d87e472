"""Classifiers of tokens: a class for every token of a text, such as the tags of words (NER, POS)."""

import torch
from torch import nn
from transformers import PreTrainedConfig

from .configuration_hydra import set_problem_type
from .ensembling import at_least_float32, log_mean_probability
from .texts import HydraTextClassifierMixin, HydraTypedTextClassifierMixin


class HydraTokenClassifierMixin(HydraTextClassifierMixin):
    """A head per member on every token, for tags of words (NER, POS).

    `member_logits` are (batch, members, tokens, classes): members stay the second axis, as in every Hydra, so that the ensemble's
    prediction `logits` (batch, tokens, classes) is computed by the same code. `rows_of_tokens` makes rows of them,
    (tokens, members, classes), as every function of rows reads them.
    """

    reads_first_token = False
    # As the token classifiers of Transformers choose it.
    head_dropout = (
        "classifier_dropout",
        "classifier_dropout_prob",
        "hidden_dropout",
        "hidden_dropout_prob",
        "dropout",
    )

    def __init__(self, config: PreTrainedConfig):
        set_problem_type(config)
        if config.problem_type != "single_label_classification":
            raise ValueError(
                f"problem_type is {config.problem_type!r} with {config.num_labels} labels, and a token has one class of "
                "several: set problem_type to 'single_label_classification', and num_labels to at least 2"
            )
        super().__init__(config)

    @property
    def encoder_options(self) -> dict[str, bool]:
        return {"add_pooling_layer": False} if hasattr(self.config, "add_pooling_layer") else {}

    @property
    def has_head_bias(self) -> bool:
        return getattr(self.config, "token_classification_bias", True)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        """(members, batch, tokens, hidden), all of them"""
        return hidden_states if self.dropout is None else self.dropout(hidden_states)

    def compute_loss(self, labels: torch.Tensor, member_logits: torch.Tensor, **kwargs) -> torch.Tensor:
        """labels: (batch, tokens) class indices, -100 where a token has none"""
        batch, _, tokens, _ = member_logits.shape
        if labels.shape != (batch, tokens) or labels.is_floating_point():
            raise ValueError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}, and a token classifier takes a class index per token, "
                f"({batch}, {tokens}): give every token one, and -100 to those that have none"
            )
        if self.config.ensemble_loss == "ensemble":
            member_logits = log_mean_probability(member_logits).unsqueeze(1)
        losses = [token_loss(labels, logits, **kwargs) for logits in member_logits.unbind(dim=1)]
        return torch.stack(losses).mean()

    def pipeline_class(self) -> type:
        from .pipeline_hydra_token import HydraTokenClassificationPipeline  # not above, as in `predict`

        return HydraTokenClassificationPipeline


class HydraTypedTokenClassifierMixin(HydraTokenClassifierMixin, HydraTypedTextClassifierMixin):
    """Of families with `token_type_ids`."""


def token_loss(
    labels: torch.Tensor, logits: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None, **kwargs
) -> torch.Tensor:
    """Cross-entropy of logits (batch, tokens, classes) over the tokens with a label other than -100: their mean, or with
    `num_items_in_batch` their sum divided by it."""
    labels = labels.to(logits.device).flatten()
    total = nn.functional.cross_entropy(
        at_least_float32(logits).flatten(0, 1), labels, reduction="mean" if num_items_in_batch is None else "sum"
    )
    if num_items_in_batch is None:
        return total
    is_tensor = isinstance(num_items_in_batch, torch.Tensor)
    return total / (num_items_in_batch.to(total.device) if is_tensor else num_items_in_batch)


def rows_of_tokens(member_logits: torch.Tensor) -> torch.Tensor:
    """(batch, members, tokens, ...) -> (batch * tokens, members, ...)"""
    return member_logits.transpose(1, 2).flatten(0, 1)
