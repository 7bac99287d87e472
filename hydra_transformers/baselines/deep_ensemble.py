"""Deep Ensembles (Lakshminarayanan et al., 2017): models trained apart, run one after the other."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..cost import count_multiply_adds
from ..data.prediction import accepted_inputs, answer_of, member_logits_of
from ..models.modeling_hydra import HydraClassifierOutput
from ..models.task import classifies_tokens


class DeepEnsemble(nn.Module):
    """Runs models one after the other on the same input.

    Args:
        models (`Iterable[nn.Module]`): Hugging Face classifiers, Hydras (all their members join) or
            other baselines, with the same classes; for CLIP, a `ZeroShotClassifier` each.
    """

    def __init__(self, models: Iterable[nn.Module]):
        super().__init__()
        models = list(models)
        if not models:
            raise ValueError("models is empty: pass a list of classifiers")
        _check_class_names(models)
        self.models = nn.ModuleList(models)

    @property
    def input_model(self) -> nn.Module:
        return self.models[0]

    def count_multiply_adds(self) -> int:
        """Count multiply-adds of all models."""
        return sum(map(count_multiply_adds, self.models))

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        """Return `member_logits` (batch, members, classes), the models' in their order."""
        per_token = classifies_tokens(self.models[0])
        members = []
        for model in self.models:
            output = model(**accepted_inputs(model, inputs))
            members.append(member_logits_of(output, type(model).__name__, per_token))
        return answer_of(self.models[0], join_members(members, "models"))


def _check_class_names(models: Sequence[nn.Module]) -> None:
    """Raise for models whose classes have other names; other numbers are seen in the logits."""
    tables = [getattr(getattr(model, "config", None), "id2label", None) for model in models]
    first = tables[0]
    for index, table in enumerate(tables):
        if table is None or first is None or len(table) != len(first):
            continue
        if table != first:
            raise ValueError(
                f"models[{index}] calls its classes {_few(table)}, models[0] {_few(first)}: all must have the same "
                "classes in the same order (id2label in the config)"
            )


def _few(id2label: Mapping[int, str]) -> str:
    """Write the first three names of classes."""
    names = [str(name) for name in id2label.values()]
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += ", ..."
    return text


def join_members(member_logits: Sequence[Tensor], source: str) -> Tensor:
    """Concatenate (batch, members, classes) along the members; `source` names them in errors."""
    classes = [logits.shape[-1] for logits in member_logits]
    for index, count in enumerate(classes):
        if count != classes[0]:
            raise ValueError(f"{source}[{index}] has {count} classes, {source}[0] has {classes[0]}: all need the same")
    return torch.cat(list(member_logits), dim=1)
