"""Deep Ensembles (Lakshminarayanan et al., 2017): models trained apart, asked one after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..models.ensembling import HydraClassifierOutput, log_mean_probability
from ..prediction import accepted_inputs, device_of, member_logits_of


class DeepEnsemble(nn.Module):
    """A Deep Ensemble as it is usually run: models one after the other on the same input.

    models: Hugging Face classifiers, Hydras (all their members join) or other baselines, with the same classes; for CLIP,
        a `ZeroShotClassifier` each
    """

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__()
        if isinstance(models, nn.Module) or len(models) == 0:
            raise ValueError("models has no models: pass a list of classifiers")
        self.models = nn.ModuleList(models)

    @property
    def device(self) -> torch.device:
        return device_of(self.models[0])

    def forward(self, **inputs) -> HydraClassifierOutput:
        answers = [
            member_logits_of(model(**accepted_inputs(model, inputs)), type(model).__name__) for model in self.models
        ]
        return joined(answers, "models")


def joined(answers: Sequence[Tensor], source: str) -> HydraClassifierOutput:
    """All members of several answers (batch, members, classes) as one ensemble; `source` is what they came from."""
    classes = [answer.shape[-1] for answer in answers]
    for index, count in enumerate(classes):
        if count != classes[0]:
            raise ValueError(
                f"{source}[{index}] has {count} classes, {source}[0] has {classes[0]}: all must tell the same classes apart"
            )
    member_logits = torch.cat(list(answers), dim=1)
    return HydraClassifierOutput(logits=log_mean_probability(member_logits), member_logits=member_logits)
