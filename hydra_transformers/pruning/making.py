"""Members from one model or several, in one call: circuits that resume, or Taylor scores."""

import math
import os
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .._io.processes import on_one_process
from ..data.batches import collate
from ..fusion import check_can_be_fused
from .circuits import FOLDER
from .extraction import extract_circuit
from .head_weights import by_layer
from .heads import Prompts, check_count, heads_of, prune_heads
from .members import draw_members
from .objectives import OBJECTIVES


def make_members(
    models: Sequence[PreTrainedModel],
    data: Any,
    ood_data: Any = None,
    *,
    method: str = "circuits",
    num_members: int | None = None,
    budget: int | None = None,
    heads_per_layer: int | None = None,
    objectives: Sequence[str] | None = None,
    trunk_layers: int | float = 0,
    seed: int = 0,
    class_prompts: Prompts | None = None,
    batch_size: int = 32,
    folder: str | os.PathLike | None = None,
) -> list[PreTrainedModel]:
    """Chooses heads by data and draws members from one model, or one member from each of several.

    Args:
        models (`Sequence[PreTrainedModel]`): one model, whose members are differently pruned copies; or several fine-tuned
            models of one pre-trained model, each of which makes one member. They stay as they are.
        data: a Dataset or list of dict rows to choose heads by.
        ood_data (*optional*): out-of-distribution rows, for the objectives "ood" and "avg".
        method (`str`, defaults to `"circuits"`): "circuits" or "taylor".
        num_members (`int`, *optional*): of one model, by default one per objective, or 3.
        budget (`int`, *optional*): for circuits, how many heads each member loses; by default a sixth of those that compete.
        heads_per_layer (`int`, *optional*): for Taylor scores, the heads that each layer keeps; by default two thirds.
        objectives (`Sequence[str]`, *optional*): of circuits, one member each; with a single one, members are sampled from the
            first heads of its ranking. By default all three with `ood_data` ("avg" for several models), otherwise "acc".
        trunk_layers (`int` or `float`, defaults to 0): how many first layers keep all heads, or which share of the layers.
        seed (`int`, defaults to 0): as for `draw_members`.
        class_prompts (*optional*): for CLIP and SigLIP, the tokenizer's output with one row per class.
        batch_size (`int`, defaults to 32): rows per batch.
        folder (*optional*): gets the circuits, and a checkpoint of each, from which the same call resumes.

    Returns:
        `list[PreTrainedModel]`: the members as one-member Hydras.
    """
    is_several = len(models) > 1
    source = list(models) if is_several else models[0]
    heads = heads_of(prune_heads(models[0]), None, trunk_layers)
    loader, ood_loader = (
        rows if rows is None else DataLoader(rows, batch_size, collate_fn=collate) for rows in (data, ood_data)
    )
    if method == "taylor":
        if budget is not None or objectives is not None or ood_data is not None:
            raise ValueError("budget, objectives and ood_data are for circuits: pass heads_per_layer with taylor")
        most = max(map(len, by_layer(heads).values()))
        kept = heads_per_layer or max(1, round(most * 2 / 3))
        check_count(kept, "heads_per_layer", 1, most - 1, "as many as a layer has cut nothing")
        common = {"class_prompts": class_prompts, "trunk_layers": trunk_layers, "seed": seed}
        count = len(models) if is_several else num_members
        return draw_members(source, data=loader, heads_per_layer=kept, num_members=count, **common)
    if method != "circuits" or heads_per_layer is not None:
        raise ValueError(f"method is {method!r}: pass 'circuits' with a budget, or 'taylor' with heads_per_layer")
    if objectives is None:
        has_one_each = not is_several and num_members in (None, len(OBJECTIVES))
        objectives = ["acc"] if ood_data is None else OBJECTIVES if has_one_each else ["avg"]
    if ood_data is None and set(objectives) != {"acc"}:
        raise ValueError(f"the objectives {', '.join(objectives)} need out-of-distribution data: pass ood_data")
    budget = max(1, len(heads) // 6) if budget is None else budget
    check_count(budget, "budget", 1, len(heads) - 1, f"{len(heads)} heads compete")
    if is_several and len(objectives) > 1:
        raise ValueError(
            f"objectives has {len(objectives)}, and each of {len(models)} models gets one circuit: name one"
        )
    expected = len(models) if is_several else len(objectives)
    if expected > 1:
        if num_members not in (None, expected):
            raise ValueError(
                f"num_members is {num_members}, and there are {expected} circuits, one each: leave it out"
            )
        ranked = budget
    else:
        num_members = num_members or 3
        ranked = max(budget, min(max(2 * budget, budget + num_members - 1), len(heads) - 1))
        if math.comb(ranked, budget) < num_members:
            raise ValueError(
                f"there are only {math.comb(ranked, budget)} ways to lose {budget} of {ranked} heads, for {num_members} members: "
                "pass another budget, or fewer members"
            )
    if is_several:
        check_can_be_fused(models, "models")  # before the long extraction
    circuits = []
    for index, (model, objective) in enumerate(product(models, objectives)):
        name = f"member-{index}" if is_several else objective
        place = None if folder is None else Path(folder) / FOLDER / name
        circuit = extract_circuit(
            model,
            loader,
            ood_loader,
            objective,
            budget=ranked,
            class_prompts=class_prompts,
            trunk_layers=trunk_layers,
            checkpoint=None if place is None else place.with_suffix(".checkpoint"),
        )
        if place is not None:
            on_one_process(partial(circuit.save, place.with_suffix(".json")))
        circuits.append(circuit)
    if expected > 1:
        return draw_members(source, circuits=circuits, budget=budget, seed=seed)
    return draw_members(source, circuit=circuits[0], budget=budget, num_members=num_members, seed=seed)
