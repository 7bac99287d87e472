"""Taylor pruning (D.1.1): cuts the heads whose weights would change the loss least, to first
order.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .._io.progress import progress_bar
from .gradient_scores import Calibration, weight_times_gradient
from .head_weights import attentions_of, by_head, by_layer, scored_towers, working_copy
from .heads import Head, Prompts, Towers, as_heads_to_prune, check_count, heads_of, prune_heads


@dataclass
class TaylorPruning:
    """The heads that Taylor pruning cuts, and every head's score when this was decided.

    heads_to_prune: as `prune_heads` takes it
    scores: by head, `(layer, head)` or for CLIP `(tower, layer, head)`
    heads_per_layer: how many heads a layer keeps; with the scope "global" on average
    scope: "layer" or "global"
    """

    heads_to_prune: dict
    scores: dict[Head, float]
    heads_per_layer: int
    scope: str


def taylor_prune(
    model: PreTrainedModel,
    data: Any,
    *,
    heads_per_layer: int,
    scope: str = "layer",
    class_prompts: Prompts | None = None,
    towers: Towers | None = None,
    trunk_layers: int | float = 0,
) -> TaylorPruning:
    """Choose the heads with the lowest Taylor scores; `prune_heads(model, pruning.heads_to_prune)`
    cuts them out.

    Args:
        model, data, class_prompts, towers: as for `taylor_scores`.
        heads_per_layer (`int`): how many heads each layer KEEPS (the paper's 8 of 12).
        scope (`str`, defaults to `"layer"`): "layer" prunes one layer after the other, with new
            scores for each. "global" ranks the heads of all layers together, once, and prunes as
            many as "layer" would; layers then keep `heads_per_layer` heads on average, and one may
            lose all of its heads.
        trunk_layers (`int` or `float`, defaults to 0): how many first layers keep all their heads,
            or which share.

    Ties go to the lower layer and head. A layer with `heads_per_layer` heads or fewer loses none.
    """
    if scope not in ("layer", "global"):
        raise ValueError(f"scope is {scope!r}: pass 'layer' or 'global'")

    # The heads that compete, as groups that are scored together.
    hydra = working_copy(model)
    heads = heads_of(hydra, scored_towers(hydra, towers), trunk_layers)
    layers = list(by_layer(heads).values())
    groups = layers
    if scope == "global":
        groups = [heads]
    most = max(map(len, layers), default=0)
    check_count(heads_per_layer, "heads_per_layer", 1, most, "it says how many heads to keep")

    # Score each group with the heads of the groups before it cut out.
    calibration = Calibration(hydra, data, class_prompts)
    pruned = []
    scores = {}
    with progress_bar(len(groups) * len(calibration.batches), "Taylor scores", "gradient") as bar:
        for group in groups:
            score_of_layers = weight_times_gradient(hydra, calibration, attentions_of(hydra, group), bar.update)
            group_scores = by_head(group, score_of_layers)
            surplus = sum(max(0, len(layer) - heads_per_layer) for layer in by_layer(group).values())
            lowest = sorted(group_scores, key=group_scores.__getitem__)[:surplus]
            hydra = prune_heads(hydra, as_heads_to_prune(lowest))
            pruned += lowest
            scores |= group_scores
    return TaylorPruning(as_heads_to_prune(pruned), scores, heads_per_layer, scope)
