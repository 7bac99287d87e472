"""Deep Ensembles (Lakshminarayanan et al., 2017): models trained apart, asked one after the other."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..cost import count_multiply_adds
from ..data.prediction import accepted_inputs, answer_of, device_of, member_logits_of
from ..models.modeling_hydra import HydraClassifierOutput


class DeepEnsemble(nn.Module):
    """A Deep Ensemble as it is usually run: models one after the other on the same input.

    models: Hugging Face classifiers, Hydras (all their members join) or other baselines, with the same classes; for CLIP,
        a `ZeroShotClassifier` each
    """

    def __init__(self, models: Iterable[nn.Module]):
        super().__init__()
        if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
            raise TypeError(f"models is a {type(models).__name__}: pass a list of classifiers")
        models = list(models) if isinstance(models, Iterable) else []
        if not models:
            raise ValueError("models has no models: pass a list of classifiers")
        for index, model in enumerate(models):
            if not isinstance(model, nn.Module):
                raise TypeError(f"models[{index}] is a {type(model).__name__}: pass classifiers that are loaded")
        _check_names(models)
        self.models = nn.ModuleList(models)

    @property
    def device(self) -> torch.device:
        return device_of(self.models[0])

    @property
    def input_model(self) -> nn.Module:
        return self.models[0]

    def count_multiply_adds(self) -> int:
        return sum(map(count_multiply_adds, self.models))

    def forward(self, **inputs) -> HydraClassifierOutput:
        answers = [
            member_logits_of(model(**accepted_inputs(model, inputs)), type(model).__name__) for model in self.models
        ]
        return answer_of(self.models[0], joined(answers, "models"))


def _check_names(models: Sequence[nn.Module]) -> None:
    names = [getattr(getattr(model, "config", None), "id2label", None) for model in models]
    for index, own in enumerate(names):
        if own is not None and names[0] is not None and len(own) == len(names[0]) and own != names[0]:
            raise ValueError(
                f"models[{index}] calls its classes {_few(own)}, models[0] {_few(names[0])}: all must have the same "
                "classes in the same order (id2label in the config)"
            )


def _few(names: dict[int, str]) -> str:
    return ", ".join(map(str, list(names.values())[:3])) + (", ..." if len(names) > 3 else "")


def joined(answers: Sequence[Tensor], source: str) -> Tensor:
    """The members of several answers, (batch, members, classes) each, side by side; `source` is what they came from."""
    classes = [answer.shape[-1] for answer in answers]
    for index, count in enumerate(classes):
        if count != classes[0]:
            raise ValueError(
                f"{source}[{index}] has {count} classes, {source}[0] has {classes[0]}: all must tell the same classes apart"
            )
    return torch.cat(list(answers), dim=1)
