"""Deep Ensembles (Lakshminarayanan et al., 2017): models trained apart, run one after the other."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..cost import count_multiply_adds
from ..data.prediction import accepted_inputs, answer_of, classifies_tokens, member_logits_of
from ..models.modeling_hydra import HydraClassifierOutput


class DeepEnsemble(nn.Module):
    """Runs models one after the other on the same input.

    Args:
        models (`Iterable[nn.Module]`): Hugging Face classifiers, Hydras (all their members join) or other baselines, with the
            same classes; for CLIP, a `ZeroShotClassifier` each.
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
        return sum(map(count_multiply_adds, self.models))

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        outputs = [(model(**accepted_inputs(model, inputs)), type(model).__name__) for model in self.models]
        per_token = classifies_tokens(self.models[0])
        members = [member_logits_of(*pair, per_token) for pair in outputs]
        return answer_of(self.models[0], join_members(members, "models"))


def _check_class_names(models: Sequence[nn.Module]) -> None:
    names = [getattr(getattr(model, "config", None), "id2label", None) for model in models]
    for index, table in enumerate(names):
        if table is not None and names[0] is not None and len(table) == len(names[0]) and table != names[0]:
            few = [", ".join([*map(str, part.values())][:3]) + ", ..." * (len(part) > 3) for part in (table, names[0])]
            raise ValueError(
                f"models[{index}] calls its classes {few[0]}, models[0] {few[1]}: all must have the same "
                "classes in the same order (id2label in the config)"
            )


def join_members(member_logits: Sequence[Tensor], source: str) -> Tensor:
    """Concatenates (batch, members, classes) along the members; `source` names them in errors."""
    classes = [logits.shape[-1] for logits in member_logits]
    for index, count in enumerate(classes):
        if count != classes[0]:
            raise ValueError(f"{source}[{index}] has {count} classes, {source}[0] has {classes[0]}: all need the same")
    return torch.cat(list(member_logits), dim=1)
