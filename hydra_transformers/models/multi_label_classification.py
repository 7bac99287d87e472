"""The ensemble of a multi-label model, which says yes or no to each label. Ships with such models, and with encoders,
which may get such a head."""

import torch
from torch import nn

from .ensembling import at_least_float32


def label_log_probabilities(member_logits: torch.Tensor) -> torch.Tensor:
    """Log of the probabilities of no and yes: (batch, members, labels) -> (batch, members, labels, 2)"""
    return nn.functional.logsigmoid(torch.stack([-member_logits, member_logits], dim=-1))


def logit_of_mean_probability(member_logits: torch.Tensor, aggregate: None = None) -> torch.Tensor:
    """Logit of the mean over members of sigmoid: (batch, members, classes) -> (batch, classes), at least float32."""
    member_logits = at_least_float32(member_logits)
    yes = torch.logsumexp(nn.functional.logsigmoid(member_logits), dim=1)
    no = torch.logsumexp(nn.functional.logsigmoid(-member_logits), dim=1)
    return yes - no


class Problem:  # like `SingleLabel`, not a subclass: a decision may bring it to models with older code
    expected_labels = "a float per row and class"
    divides_by_items = False
    ensemble_logits = staticmethod(logit_of_mean_probability)
    log_probabilities = staticmethod(label_log_probabilities)

    @staticmethod
    def accepts(labels: torch.Tensor, batch: int, classes: int) -> bool:
        return labels.shape == (batch, classes) and labels.is_floating_point()

    @staticmethod
    def predicted_labels(
        scores: list[dict], order: list[int], logits: list[float], parts: dict, settings: dict | None
    ) -> list:
        """The places of the labels that are predicted, the likeliest first: from their own thresholds on where it was
        calibrated, else from 0.5. Each of a pipeline's `scores` gets its `parts`: uncertainty, aleatoric, epistemic.

        order: the labels' places, the likeliest first; settings: of the decision, if there is one
        """
        for score, place in zip(scores, order, strict=False):
            score |= {name: part[0, place].item() for name, part in parts.items()}
        lowest = [0.0] * len(logits) if settings is None else list(map(float, settings["log_odds"]))
        return [place for place in order if logits[place] >= lowest[place]]
