"""Classifiers of tokens: a class for every token of a text, such as the tags of words (NER,
POS)."""

import torch

from .task import load_task
from .task_tokens import TokenClassification
from .texts import HydraTextClassifierMixin, HydraTypedTextClassifierMixin


class HydraTokenClassifierMixin(HydraTextClassifierMixin):
    """A head per member on every token, for tags of words (NER, POS).

    `member_logits` are (batch, members, tokens, classes): members stay the second axis, as in every
    Hydra, so that the ensemble's prediction `logits` (batch, tokens, classes) is computed by the
    same code. `task_tokens.rows_of_tokens` makes rows of them, (tokens, members, classes), as every
    function of rows reads them.
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

    @property
    def encoder_options(self) -> dict[str, bool]:
        if hasattr(self.config, "add_pooling_layer"):
            return {"add_pooling_layer": False}
        return {}

    @property
    def has_head_bias(self) -> bool:
        return getattr(self.config, "token_classification_bias", True)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        """Return the states of all tokens, (members, batch, tokens, hidden)."""
        if self.dropout is None:
            return hidden_states
        return self.dropout(hidden_states)

    @property
    def task(self) -> TokenClassification:
        return load_task(TokenClassification.name)

    def pipeline_class(self) -> type:
        from .pipeline_hydra_token import HydraTokenClassificationPipeline  # not above, as in `predict`

        return HydraTokenClassificationPipeline


class HydraTypedTokenClassifierMixin(HydraTokenClassifierMixin, HydraTypedTextClassifierMixin):
    """Of families with `token_type_ids`."""
