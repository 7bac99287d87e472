"""Diverse members: from several fine-tuned models, or from one backbone by objective, by samples of one ranking, or by data."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .._io.processes import on_one_process
from ..data.batches import batches, collate
from ..data.fingerprints import fingerprint_of_weights
from ..fusion import check_can_be_fused
from ..fusion.structure import tower_configs
from ..fusion.trunk import trunk_depth
from .circuits import FOLDER, Circuit
from .extraction import extract_circuit
from .heads import Prompts, as_heads_to_prune, check_count, heads_of, prune_heads, tower_and_place
from .objectives import OBJECTIVES
from .taylor import taylor_prune


ROWS_PER_BATCH = 32
MOST_DRAWS = 1_000  # attempts to draw a new head set; there may be none

# The options of each source of members; others would have no effect.
OPTIONS = {
    "circuits": {"budget", "tolerance"},
    "circuit": {"budget", "out_of"},
    "data": {"heads_per_layer"},
    "the models alone": set(),
}


def draw_members(
    model: PreTrainedModel | Sequence[PreTrainedModel],
    *,
    circuits: Sequence[Circuit] | None = None,
    circuit: Circuit | None = None,
    data: Any = None,
    budget: int | Literal["best"] | None = None,
    tolerance: float | None = None,
    out_of: int | None = None,
    heads_per_layer: int | None = None,
    num_members: int | None = None,
    seed: int = 0,
    class_prompts: Prompts | None = None,
    trunk_layers: int | float = 0,
    allow_equal: bool = False,
) -> list[PreTrainedModel]:
    """Different one-member Hydras, ready for `from_pruned_members` or for fine-tuning one by one.

    Args:
        model (`PreTrainedModel` or `Sequence[PreTrainedModel]`): one backbone, or several models fine-tuned from one,
            each of which makes one member. Without other arguments nothing is pruned. They stay as they are.
        circuits (`Sequence[Circuit]`, *optional*): one member per circuit, without its first `budget` heads. Of several
            backbones, circuit i is that of backbone i. Of one backbone, Hydra (Circ) takes three circuits, for the
            objectives "acc", "ood" and "avg". A circuit of other weights causes a warning.
        circuit (`Circuit`, *optional*): samples from one circuit of one backbone (B.5). Each member loses `budget` heads,
            drawn from the first `out_of` of the ranking (the paper: 48 out of 100).
        data (`DataLoader`, `Dataset` or `list`, *optional*): Hydra (Taylor). Each member is pruned by `taylor_prune` to
            `heads_per_layer` heads, on its own random half of every calibration batch. CLIP also needs `class_prompts`; its
            vision tower is pruned.
        budget (`int` or `"best"`, *optional*), tolerance (`float`, *optional*): how many heads each member loses. With
            "best" each circuit removes as many heads as it scores best without, and with `tolerance=0.01` as many as cost at
            most that much of the score.
        out_of, heads_per_layer (`int`, *optional*), class_prompts (`dict`, *optional*): see `circuit` and `data`.
        num_members (`int`, *optional*), seed (`int`, defaults to 0): of one backbone, by default three members, member m
            with the seed `seed + m`.
        trunk_layers (`int` or `float`, defaults to 0): the first layers, a count or a share such as 0.75, keep all their
            heads, so that fused members can run them once; extract circuits with the same `trunk_layers`.
        allow_equal (`bool`, defaults to `False`): accept members with equal heads and weights, for training to make them
            different. By default they are refused, as an ensemble of them is one model: try another budget, other data, or
            samples from more heads.
    """
    is_several = not isinstance(model, nn.Module)
    models = list(model) if is_several else [model]
    sources = {"circuits": circuits, "circuit": circuit, "data": data}
    options = {"budget": budget, "tolerance": tolerance, "out_of": out_of, "heads_per_layer": heads_per_layer}
    source = _source(sources, options, is_several)
    if tolerance is not None and budget != "best":
        raise ValueError(f"tolerance is {tolerance!r}, which goes with budget='best': pass that, or leave it out")
    counts = {
        "models": len(models) if is_several else None,
        "circuits": len(circuits) if source == "circuits" else None,
        "num_members": num_members,
    }
    counts = {name: count for name, count in counts.items() if count is not None} or {"num_members": 3}
    num_members = next(iter(counts.values()))
    if num_members < 1 or set(counts.values()) != {num_members}:
        text = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"each of them makes one member, there are {text}: pass as many of each, or leave one out")
    if is_several:
        check_can_be_fused(models, "model")
    # Each backbone becomes a Hydra once, and the members are cut out of it.
    hydras = [prune_heads(backbone) for backbone in models]
    backbones = hydras if is_several else hydras * num_members
    head_sets: list[dict] = []
    if source == "circuits":
        weights = [fingerprint_of_weights(hydra) for hydra in hydras] * (1 if is_several else num_members)
        for place, entry in enumerate(circuits):
            first = entry.first(entry.largest_budget(tolerance or 0.0) if budget == "best" else budget)
            _check_circuit(f"circuits[{place}]", first, weights[place], trunk_layers, hydras[0])
            head_sets.append(first.heads_to_prune())
    elif source == "circuit":
        for place in range(num_members):
            head_sets.append(sample_heads(circuit, budget, out_of, seed + place, taken=head_sets))
        first = circuit if out_of is None else circuit.first(out_of)
        _check_circuit("circuit", first, fingerprint_of_weights(hydras[0]), trunk_layers, hydras[0])
    elif source == "data":
        calibration = list(batches(data))
        settings = {"heads_per_layer": heads_per_layer, "class_prompts": class_prompts, "trunk_layers": trunk_layers}
        head_sets = [
            taylor_prune(backbone, half_of_each(calibration, seed + place), **settings).heads_to_prune
            for place, backbone in enumerate(backbones)
        ]
    else:
        head_sets = [{}] * num_members
    members = [prune_heads(backbone, heads) for backbone, heads in zip(backbones, head_sets, strict=True)]
    if len(members) > 1:
        check_can_be_fused(members, "members", allow_equal)
    return members


def _source(sources: Mapping[str, Any], options: Mapping[str, Any], is_several: bool) -> str:
    """Where members come from: one of `OPTIONS`; refuses two sources, and options that have no effect."""
    names = [name for name, value in sources.items() if value is not None]
    names = names or ["the models alone"] * is_several
    if len(names) != 1 or (is_several and names == ["circuit"]):
        raise ValueError(
            f"draw_members got {' and '.join(names) or 'nothing to draw from'}: pass circuits (one for each of several models) "
            "or data, or for one model a circuit"
        )
    for name, value in options.items():
        if value is not None and name not in OPTIONS[names[0]]:
            raise ValueError(f"{name} is {value!r}, which drawing from {names[0]} has no use for: leave it out")
    return names[0]


def sample_heads(circuit: Circuit, budget: int, out_of: int | None, seed: int, taken: Sequence[dict] = ()) -> dict:
    """`budget` heads drawn without replacement from the first `out_of` of a circuit's ranking (by default all of it); other
    than the head sets in `taken`, if possible."""
    if out_of is not None:
        check_count(out_of, "out_of", 1, len(circuit.ranking), f"this circuit ranks {len(circuit.ranking)} heads")
    pool = circuit.ranking[:out_of]
    check_count(budget, "budget", 1, len(pool), f"heads are sampled from the first {len(pool)} of the ranking")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(MOST_DRAWS):
        order = torch.randperm(len(pool), generator=generator, device="cpu").tolist()
        heads = as_heads_to_prune(pool[place] for place in order[:budget])
        if heads not in taken:
            break
    return heads


def half_of_each(calibration: Sequence[Mapping[str, Tensor]], seed: int) -> list[dict[str, Tensor]]:
    """A random half (rounded up) of the rows of every batch."""
    generator = torch.Generator().manual_seed(seed)
    halves = []
    for batch in calibration:
        rows = len(next(iter(batch.values())))
        for name, tensor in batch.items():
            if len(tensor) != rows:
                raise ValueError(f"a batch of data has {rows} rows, and {len(tensor)} as its {name}: pass one each")
        half = torch.randperm(rows, generator=generator, device="cpu")[: (rows + 1) // 2].sort().values
        halves.append({name: tensor[half.to(tensor.device)] for name, tensor in batch.items()})
    return halves


def _check_circuit(name: str, circuit: Circuit, weights: str, trunk_layers: float, hydra: PreTrainedModel) -> None:
    """Refuses a circuit of `hydra` with heads in the trunk, and warns if it was extracted from other weights."""
    if circuit.made_from.get("weights") not in (None, weights):
        warnings.warn(
            f"{name} was extracted from a model with other weights: its heads may not be the ones this model can spare",
            stacklevel=3,
        )
    layers = {tower: len(config.kept_heads) for tower, config in tower_configs(hydra.config).items()}
    for head in circuit.ranking:
        tower, layer, _ = tower_and_place(head)
        depth = trunk_depth(trunk_layers, layers[tower]) if tower in layers else 0
        if layer < depth:
            raise ValueError(
                f"{name} ranks head {head}, which is in the first {depth} layers (trunk_layers): extract it with "
                f"extract_circuit(..., trunk_layers={trunk_layers})"
            )


def make_members(
    models: Sequence[PreTrainedModel],
    data: Any,
    ood_data: Any = None,
    *,
    num_members: int | None = None,
    budget: int | None = None,
    trunk_layers: int | float = 0,
    seed: int = 0,
    class_prompts: Prompts | None = None,
    folder: str | os.PathLike | None = None,
) -> list[PreTrainedModel]:
    """Extracts circuits and draws members from one model, or one member from each of several, as `prune` does.

    With `ood_data`, three members of one model are those of the objectives "acc", "ood" and "avg"; other numbers are sampled from
    the first heads of one circuit, and several models have one circuit each ("avg"). Without `ood_data` the objective is "acc".

    data, ood_data: Datasets or lists of dict rows
    num_members: of one model, by default 3
    budget: how many heads each member loses; by default a sixth of those that compete
    folder: gets the circuits, and a checkpoint of each, from which the same call resumes
    """
    is_several = len(models) > 1
    source = list(models) if is_several else models[0]
    heads = heads_of(prune_heads(models[0]), None, trunk_layers)
    loader, ood_loader = (
        rows if rows is None else DataLoader(rows, ROWS_PER_BATCH, collate_fn=collate) for rows in (data, ood_data)
    )
    common = {"class_prompts": class_prompts, "trunk_layers": trunk_layers}
    has_one_each = not is_several and num_members in (None, len(OBJECTIVES))
    objectives = ["acc"] if ood_data is None else OBJECTIVES if has_one_each else ["avg"]
    budget = max(1, len(heads) // 6) if budget is None else budget
    check_count(budget, "budget", 1, len(heads) - 1, f"{len(heads)} heads compete")
    expected = len(models) * len(objectives)
    if expected > 1 and num_members not in (None, expected):
        raise ValueError(f"there are {len(models)} models, each of which makes one member: leave num_members out")
    ranked = budget
    if expected == 1:
        num_members = num_members or 3
        ranked = max(budget, min(max(2 * budget, budget + num_members - 1), len(heads) - 1))
        ways = math.comb(ranked, budget)
        if ways < num_members:
            raise ValueError(
                f"there are only {ways} ways to lose {budget} of {ranked} heads, for {num_members} members: pass another budget, "
                "or fewer members"
            )
    if is_several:
        check_can_be_fused(models, "models")  # before the long extraction
    circuits = []
    for index, (model, objective) in enumerate(product(models, objectives)):
        place = None if folder is None else Path(folder) / FOLDER / (f"member-{index}" if is_several else objective)
        checkpoint = None if place is None else place.with_suffix(".checkpoint")
        circuit = extract_circuit(model, loader, ood_loader, objective, budget=ranked, checkpoint=checkpoint, **common)
        if place is not None:
            on_one_process(partial(circuit.save, place.with_suffix(".json")))
        circuits.append(circuit)
    if expected > 1:
        return draw_members(source, circuits=circuits, budget=budget, seed=seed)
    return draw_members(source, circuit=circuits[0], budget=budget, num_members=num_members, seed=seed)
