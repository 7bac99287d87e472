"""Diverse members, from several fine-tuned models or from one backbone.

Members of one backbone differ by objective, by samples of one ranking, or by data.
"""

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
    """Draw different one-member Hydras, ready for `from_pruned_members` or for fine-tuning one by
    one.

    Args:
        model (`PreTrainedModel` or `Sequence[PreTrainedModel]`): one backbone, or several models
            fine-tuned from one, each of which makes one member. Without other arguments nothing is
            pruned. They stay as they are.
        circuits (`Sequence[Circuit]`, *optional*): one member per circuit, without its first
            `budget` heads. Of several backbones, circuit i is that of backbone i. Of one backbone,
            Hydra (Circ) takes three circuits, for the objectives "acc", "ood" and "avg". A circuit
            of other weights causes a warning.
        circuit (`Circuit`, *optional*): samples from one circuit of one backbone (B.5). Each member
            loses `budget` heads, drawn from the first `out_of` of the ranking (the paper: 48 out of
            100).
        data (`DataLoader`, `Dataset` or `list`, *optional*): Hydra (Taylor). Each member is pruned
            by `taylor_prune` to `heads_per_layer` heads, on its own random half of every
            calibration batch. CLIP also needs `class_prompts`; its vision tower is pruned.
        budget (`int` or `"best"`, *optional*), tolerance (`float`, *optional*): how many heads each
            member loses. With "best" each circuit removes as many heads as it scores best without,
            and with `tolerance=0.01` as many as cost at most that much of the score.
        out_of, heads_per_layer (`int`, *optional*), class_prompts (`dict`, *optional*): see
            `circuit` and `data`.
        num_members (`int`, *optional*), seed (`int`, defaults to 0): of one backbone, by default
            three members, member m with the seed `seed + m`.
        trunk_layers (`int` or `float`, defaults to 0): the first layers, a count or a share such as
            0.75, keep all their heads, so that fused members can run them once; extract circuits
            with the same `trunk_layers`.
        allow_equal (`bool`, defaults to `False`): accept members with equal heads and weights, for
            training to make them different. By default they are refused, as an ensemble of them is
            one model: try another budget, other data, or samples from more heads.
    """
    # Where members come from, and how many there are.
    is_several = not isinstance(model, nn.Module)
    models = list(model) if is_several else [model]
    sources = {"circuits": circuits, "circuit": circuit, "data": data}
    options = {"budget": budget, "tolerance": tolerance, "out_of": out_of, "heads_per_layer": heads_per_layer}
    source = _source(sources, options, is_several)
    if tolerance is not None and budget != "best":
        raise ValueError(f"tolerance is {tolerance!r}, which goes with budget='best': pass that, or leave it out")
    num_members = _count_members(
        models=len(models) if is_several else None,
        circuits=len(circuits) if source == "circuits" else None,
        num_members=num_members,
    )
    if is_several:
        check_can_be_fused(models, "model")

    # Each backbone becomes a Hydra once, and the members are cut out of it.
    hydras = [prune_heads(backbone) for backbone in models]
    backbones = hydras if is_several else hydras * num_members

    # The heads that each member loses.
    head_sets: list[dict] = []
    if source == "circuits":
        weights = [fingerprint_of_weights(hydra) for hydra in hydras]
        if not is_several:
            weights = weights * num_members
        for place, entry in enumerate(circuits):
            budget_of_member = budget
            if budget == "best":
                budget_of_member = entry.largest_budget(tolerance or 0.0)
            removed = entry.first(budget_of_member)
            _check_circuit(f"circuits[{place}]", removed, weights[place], trunk_layers, hydras[0])
            head_sets.append(removed.heads_to_prune())
    elif source == "circuit":
        for place in range(num_members):
            heads = sample_heads(circuit, budget, out_of, seed + place, taken=head_sets)
            head_sets.append(heads)
        pool = circuit
        if out_of is not None:
            pool = circuit.first(out_of)
        _check_circuit("circuit", pool, fingerprint_of_weights(hydras[0]), trunk_layers, hydras[0])
    elif source == "data":
        calibration = list(batches(data))
        for place, backbone in enumerate(backbones):
            pruning = taylor_prune(
                backbone,
                half_of_each(calibration, seed + place),
                heads_per_layer=heads_per_layer,
                class_prompts=class_prompts,
                trunk_layers=trunk_layers,
            )
            head_sets.append(pruning.heads_to_prune)
    else:
        head_sets = [{}] * num_members

    # Cut them out.
    members = [prune_heads(backbone, heads) for backbone, heads in zip(backbones, head_sets, strict=True)]
    if len(members) > 1:
        check_can_be_fused(members, "members", allow_equal)
    return members


def _source(sources: Mapping[str, Any], options: Mapping[str, Any], is_several: bool) -> str:
    """Return where members come from, one of `OPTIONS`.

    Raises for two sources, and for options that have no effect.
    """
    names = [name for name, value in sources.items() if value is not None]
    if is_several and not names:
        names = ["the models alone"]
    if len(names) != 1 or (is_several and names == ["circuit"]):
        passed = " and ".join(names) or "nothing to draw from"
        raise ValueError(
            f"draw_members got {passed}: pass circuits (one for each of several models) or data, or for one model a "
            "circuit"
        )
    source = names[0]
    for name, value in options.items():
        if value is not None and name not in OPTIONS[source]:
            raise ValueError(f"{name} is {value!r}, which drawing from {source} has no use for: leave it out")
    return source


def _count_members(**counts: int | None) -> int:
    """Return the number on which all counts that are not None agree, by default three."""
    counts = {name: count for name, count in counts.items() if count is not None}
    if not counts:
        counts = {"num_members": 3}
    num_members = next(iter(counts.values()))
    if num_members < 1 or set(counts.values()) != {num_members}:
        text = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"each of them makes one member, there are {text}: pass as many of each, or leave one out")
    return num_members


def sample_heads(circuit: Circuit, budget: int, out_of: int | None, seed: int, taken: Sequence[dict] = ()) -> dict:
    """Draw `budget` heads without replacement from the first `out_of` of a circuit's ranking.

    By default from all of it; other than the head sets in `taken`, if possible.
    """
    ranked = len(circuit.ranking)
    if out_of is not None:
        check_count(out_of, "out_of", 1, ranked, f"this circuit ranks {ranked} heads")
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
    """Draw a random half (rounded up) of the rows of every batch."""
    generator = torch.Generator().manual_seed(seed)
    halves = []
    for batch in calibration:
        rows = len(next(iter(batch.values())))
        for name, tensor in batch.items():
            if len(tensor) != rows:
                raise ValueError(f"a batch of data has {rows} rows, and {len(tensor)} as its {name}: pass one each")
        order = torch.randperm(rows, generator=generator, device="cpu")
        half = order[: (rows + 1) // 2].sort().values
        halves.append({name: tensor[half.to(tensor.device)] for name, tensor in batch.items()})
    return halves


def _check_circuit(name: str, circuit: Circuit, weights: str, trunk_layers: float, hydra: PreTrainedModel) -> None:
    """Raise for a circuit with heads in the trunk; warn if it was extracted from other weights."""
    if circuit.made_from.get("weights") not in (None, weights):
        warnings.warn(
            f"{name} was extracted from a model with other weights: its heads may not be the ones this model can "
            "spare",
            stacklevel=3,
        )
    depths = {}
    for tower, config in tower_configs(hydra.config).items():
        depths[tower] = trunk_depth(trunk_layers, len(config.kept_heads))
    for head in circuit.ranking:
        tower, layer, _ = tower_and_place(head)
        depth = depths.get(tower, 0)
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
    method: Literal["circuits", "taylor"] | None = None,
    num_members: int | None = None,
    budget: int | None = None,
    heads_per_layer: int | None = None,
    trunk_layers: int | float = 0,
    seed: int = 0,
    class_prompts: Prompts | None = None,
    folder: str | os.PathLike | None = None,
) -> list[PreTrainedModel]:
    """Make pruned members of one model, or one member of each of several, as the paper does (4.3).

    Strategy 1, "taylor", needs no OOD data: each member is pruned by Taylor scores on its own
    random half of the data; members may keep the same heads, which causes a warning.

    Strategy 2, "circuits": with `ood_data`, three members of one model are those of the objectives
    "acc", "ood" and "avg"; other numbers are sampled from the first heads of one circuit, and
    several models have one circuit each ("avg"). Circuits without `ood_data` have the objective
    "acc".

    Args:
        models: one backbone, or several models fine-tuned from one
        data, ood_data: Datasets or lists of dict rows
        method: by default "circuits" with `ood_data`, and "taylor" without
        num_members: of one model, by default 3
        budget: of circuits, how many heads each member loses; by default a sixth of those that
            compete
        heads_per_layer: of Taylor, how many heads each layer keeps; by default two thirds
        trunk_layers: how many first layers keep all their heads, or which share
        seed: of the sampling
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class
        folder: gets the circuits, and a checkpoint of each, from which the same call resumes
    """
    method = choose_method(method, ood_data is not None, budget=budget, heads_per_layer=heads_per_layer)
    is_several = len(models) > 1
    source = list(models) if is_several else models[0]
    if method == "taylor":
        members = draw_members(
            source,
            data=_loader(data),
            heads_per_layer=heads_per_layer or _two_thirds_of_heads(models[0]),
            num_members=num_members,
            seed=seed,
            class_prompts=class_prompts,
            trunk_layers=trunk_layers,
            allow_equal=True,
        )
        if not is_several:
            _warn_of_equal_heads(members)
        return members
    heads = heads_of(prune_heads(models[0]), None, trunk_layers)

    # The objectives, for each model.
    objectives = ["acc"]
    if ood_data is not None:
        is_one_per_objective = not is_several and num_members in (None, len(OBJECTIVES))
        objectives = OBJECTIVES if is_one_per_objective else ["avg"]

    # How many heads go, how many are ranked, and how many circuits there are.
    if budget is None:
        budget = max(1, len(heads) // 6)
    check_count(budget, "budget", 1, len(heads) - 1, f"{len(heads)} heads compete")
    num_circuits = len(models) * len(objectives)
    if num_circuits > 1 and num_members not in (None, num_circuits):
        raise ValueError(f"there are {len(models)} models, each of which makes one member: leave num_members out")
    ranked = budget
    if num_circuits == 1:
        num_members = num_members or 3
        wanted = max(2 * budget, budget + num_members - 1)
        ranked = max(budget, min(wanted, len(heads) - 1))
        ways = math.comb(ranked, budget)
        if ways < num_members:
            raise ValueError(
                f"there are only {ways} ways to lose {budget} of {ranked} heads, for {num_members} members: pass "
                "another "
                "budget, or fewer members"
            )
    if is_several:
        check_can_be_fused(models, "models")  # before the long extraction

    # Extract the circuits.
    loader = _loader(data)
    ood_loader = _loader(ood_data)
    circuits = []
    for index, (model, objective) in enumerate(product(models, objectives)):
        checkpoint = None
        if folder is not None:
            file_name = f"member-{index}" if is_several else objective
            place = Path(folder) / FOLDER / file_name
            checkpoint = place.with_suffix(".checkpoint")
        circuit = extract_circuit(
            model,
            loader,
            ood_loader,
            objective,
            budget=ranked,
            class_prompts=class_prompts,
            trunk_layers=trunk_layers,
            checkpoint=checkpoint,
        )
        if folder is not None:
            on_one_process(partial(circuit.save, place.with_suffix(".json")))
        circuits.append(circuit)

    # Draw the members.
    if num_circuits > 1:
        return draw_members(source, circuits=circuits, budget=budget, seed=seed)
    return draw_members(source, circuit=circuits[0], budget=budget, num_members=num_members, seed=seed)


def choose_method(method: str | None, has_ood_data: bool, **options: int | None) -> str:
    """Return how heads are chosen, "circuits" or "taylor".

    Raises for what that method has no use for.

    options: `budget` and `heads_per_layer`, None where they are not given
    """
    if method is None:
        method = "circuits" if has_ood_data else "taylor"
    of_others = {"circuits": "heads_per_layer", "taylor": "budget"}
    if method not in of_others:
        raise ValueError(f"method is {method!r}: pass 'circuits' or 'taylor'")
    name = of_others[method]
    if options[name] is not None:
        [other] = set(of_others) - {method}
        raise ValueError(
            f"{name} is {options[name]}, and the method is {method}: leave it out, or pass method={other!r}"
        )
    if method == "taylor" and has_ood_data:
        raise ValueError("ood_data is for the method circuits, and the method is taylor: leave one of them out")
    return method


def _warn_of_equal_heads(members: Sequence[PreTrainedModel]) -> None:
    """Warn where members of one model keep the same heads, which Taylor scores often lead to."""
    kept = [[config.kept_heads for config in tower_configs(member.config).values()] for member in members]
    for index, heads in enumerate(kept):
        first = kept.index(heads)
        if first < index:
            warnings.warn(
                f"members[{first}] and members[{index}] keep the same heads: fine-tune them, and they differ by their "
                "seeds, or keep fewer heads; they cannot be fused as they are",
                stacklevel=3,
            )


def _two_thirds_of_heads(model: PreTrainedModel) -> int:
    """Return how many heads a layer keeps by default: the paper's 8 of 12.

    Of CLIP the vision tower is pruned.
    """
    configs = tower_configs(prune_heads(model).config)
    heads = next(iter(configs.values())).num_attention_heads
    return max(1, round(2 * heads / 3))


def _loader(rows: Any) -> DataLoader | None:
    """Return rows in batches, or None without rows."""
    if rows is None:
        return None
    return DataLoader(rows, ROWS_PER_BATCH, collate_fn=collate)
