"""Taylor pruning (D.1.1): heads scored by how much the loss would change, to first order, without their weights."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .._io.files import parse_json, write_atomically
from .calibration import Calibration
from .heads import Head, as_heads, as_heads_to_prune, check_count, heads_of, prune_heads
from .units import (
    Layer,
    Unit,
    UnitLayer,
    UnitsOf,
    by_unit,
    head_layers,
    layers_of_heads,
    scored_towers,
    units_to_score,
    working_copy,
)


SCOPES = ("layer", "global")


@dataclass
class TaylorPruning:
    """The heads that Taylor pruning cuts, and the score of every head when it was decided on.

    heads_to_prune: as `prune_heads` takes it
    scores: by head, `(layer, head)` or for CLIP `(tower, layer, head)`
    heads_per_layer: how many heads a layer keeps; with the scope "global" on average
    scope: "layer" or "global"
    """

    heads_to_prune: dict
    scores: dict[Head, float]
    heads_per_layer: int
    scope: str

    def save(self, path: str | os.PathLike) -> None:
        """Writes the pruning as JSON, whole or not at all."""
        fields = {
            "heads_per_layer": self.heads_per_layer,
            "scope": self.scope,
            "scores": [[*head, score] for head, score in self.scores.items()],
            "pruned": as_heads(self.heads_to_prune),
        }
        write_atomically(path, json.dumps(fields, indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "TaylorPruning":
        try:
            fields = parse_json(Path(path).read_bytes())
            scores = {tuple(head): score for *head, score in fields["scores"]}
            heads_to_prune = as_heads_to_prune(tuple(head) for head in fields["pruned"])
            return cls(heads_to_prune, scores, fields["heads_per_layer"], fields["scope"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no Taylor pruning ({error}): pass a file that save() wrote") from error


def taylor_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    units_of: UnitsOf = head_layers,
) -> dict[Unit, float]:
    """The Taylor score of every head: the mean of |W · G| over its rows of q, k and v, averaged over the three.
    A key and value that several heads read counts for each of them. (Of a neuron: over its rows of the MLP's first map.)

    G is the gradient of the mean loss over the whole of `data`, so the batch size leaves no trace. `model` is left
    as it is. The loss is the model's own; for CLIP, the cross-entropy of zero-shot classification.

    Args:
        model: a classifier or a CLIP model of Transformers, or a one-member Hydra of one.
        data: calibration data with labels: a DataLoader, a list of dict batches, or a Dataset or list of dict
            rows.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        towers: for CLIP, the towers to score; by default the vision tower only, because scores of the two towers are not
            on one scale.

    Returns `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`.
    """
    hydra, units, layers = units_to_score(model, towers, units_of)
    return _scores(hydra, Calibration(hydra, data, class_prompts), units, layers)


def _scores(
    hydra: PreTrainedModel, calibration: Calibration, units: Sequence[Unit], layers: Mapping[Layer, UnitLayer]
) -> dict[Unit, float]:
    """Scores of `units`; gradients are computed for their layers only."""
    gradients = calibration.gradients(hydra, [layer.incoming for layer in layers.values()])
    products = {
        place: layer.by_incoming((layer.incoming.detach() * gradient).abs()).mean(dim=(0, 2))
        for (place, layer), gradient in zip(layers.items(), gradients, strict=True)
    }
    return by_unit(units, products)


def taylor_prune(
    model: PreTrainedModel,
    data: Any,
    *,
    heads_per_layer: int,
    scope: str = "layer",
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    trunk_layers: int = 0,
) -> TaylorPruning:
    """Chooses the heads with the lowest Taylor scores; `prune_heads(model, pruning.heads_to_prune)` cuts them out.

    Args:
        model, data, class_prompts, towers: as for `taylor_scores`.
        heads_per_layer: how many heads each layer KEEPS (the paper's 8 of 12).
        scope: "layer" prunes the first layer, computes the scores of the second anew, prunes it, and so on. "global" ranks
            the heads of all layers together, once, and prunes as many as "layer" would; layers then keep
            `heads_per_layer` heads on average, and one may lose all of its heads.

        trunk_layers: how many first layers keep all their heads, for members that have them in common.

    Ties go to the lower layer and head. A layer that has no more than `heads_per_layer` heads loses none.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope is {scope!r}: pass one of {', '.join(map(repr, SCOPES))}")
    hydra = working_copy(model)
    heads = heads_of(hydra, scored_towers(hydra, towers), trunk_layers)
    most = max((len(of_layer) for of_layer in _by_layer(heads)), default=0)
    check_count(heads_per_layer, "heads_per_layer", 1, most, "it says how many heads to keep")
    calibration = Calibration(hydra, data, class_prompts)
    if scope == "global":
        scores = _scores(hydra, calibration, heads, layers_of_heads(hydra, heads))
        surplus = sum(max(0, len(of_layer) - heads_per_layer) for of_layer in _by_layer(heads))
        return TaylorPruning(as_heads_to_prune(_lowest(scores, surplus)), scores, heads_per_layer, scope)

    pruned, scores = [], {}
    for of_layer in _by_layer(heads):
        layer_scores = _scores(hydra, calibration, of_layer, layers_of_heads(hydra, of_layer))
        lowest = _lowest(layer_scores, len(of_layer) - heads_per_layer)
        hydra = prune_heads(hydra, as_heads_to_prune(lowest))
        pruned += lowest
        scores |= layer_scores
    return TaylorPruning(as_heads_to_prune(pruned), scores, heads_per_layer, scope)


def _by_layer(heads: Sequence[Head]) -> list[list[Head]]:
    layers: dict[tuple, list[Head]] = {}
    for head in heads:
        layers.setdefault(head[:-1], []).append(head)
    return list(layers.values())


def _lowest(scores: Mapping[Head, float], count: int) -> list[Head]:
    return sorted(scores, key=scores.__getitem__)[: max(0, count)]
