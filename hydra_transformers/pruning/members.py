"""Diverse members from one backbone: by objective, by sampling one ranking, or by calibration subset."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..fingerprints import fingerprint_of_weights
from ..prediction import batches
from .circuits import Circuit
from .heads import as_heads, as_heads_to_prune, check_count, prune_heads
from .taylor import taylor_prune


MOST_DRAWS = 1_000  # until members differ; there may be no other heads to draw

# What each way of drawing looks at.
OPTIONS = {
    "circuits": ("budget", "num_members"),
    "circuit": ("budget", "out_of", "num_members"),
    "dataloader": ("heads_per_layer", "num_members"),
}


def draw_members(
    model: PreTrainedModel,
    *,
    circuits: Sequence[Circuit] | None = None,
    circuit: Circuit | None = None,
    dataloader: Any = None,
    budget: int | None = None,
    out_of: int | None = None,
    heads_per_layer: int | None = None,
    num_members: int | None = None,
    seed: int = 0,
    class_prompts: Mapping[str, Tensor] | None = None,
    allow_equal: bool = False,
) -> list[PreTrainedModel]:
    """One-member Hydras with different heads, ready for `from_pruned_members` or for fine-tuning one by one.

    There are three ways, told apart by what is passed:

    - `circuits`, `budget`: one member per circuit, without its first `budget` heads. Hydra (Circ) takes three circuits, for
      the objectives "acc", "ood" and "avg".
    - `circuit`, `budget`, `out_of`, `num_members`, `seed`: from one circuit (B.5), each member loses `budget` heads that
      are sampled from the first `out_of` of its ranking (the paper: 48 out of 100).
    - `dataloader`, `heads_per_layer`, `num_members`, `seed`: Hydra (Taylor), each member pruned with `taylor_prune` on its
      own random half of every calibration batch. CLIP also needs `class_prompts`; its vision tower is pruned.

    Three members are drawn where `num_members` is not given, member m with the seed `seed + m`. `model` is left as it is.
    Members that lose the same heads are refused, as an ensemble of them is one model: `allow_equal=True` takes them, where
    training is to make them different. A warning tells of circuits that were extracted from other weights.
    """
    given = [
        name
        for name, value in (("circuits", circuits), ("circuit", circuit), ("dataloader", dataloader))
        if value is not None
    ]
    if len(given) != 1:
        raise ValueError(
            f"draw_members got {' and '.join(given) or 'nothing to draw from'}: pass circuits, circuit or dataloader"
        )
    options = {"budget": budget, "out_of": out_of, "heads_per_layer": heads_per_layer, "num_members": num_members}
    for name, value in options.items():
        if value is not None and name not in OPTIONS[given[0]]:
            raise ValueError(f"{name} is {value!r}, which drawing from {given[0]} has no use for: leave it out")
    if num_members is not None and num_members < 1:
        raise ValueError(f"num_members is {num_members}: pass at least 1")
    if dataloader is None and budget is None:
        raise ValueError(f"budget is missing: say how many heads each member loses when drawing from {given[0]}")
    seeds = range(seed, seed + (3 if num_members is None else num_members))
    if circuits is not None:
        _check_circuits(model, _named(circuits, num_members))
        head_sets = [each.heads_to_prune(budget) for each in circuits]
    elif circuit is not None:
        _check_circuits(model, {"circuit": circuit})
        head_sets = []
        for member_seed in seeds:
            head_sets.append(sample_heads(circuit, budget, out_of, member_seed, taken=head_sets))
    else:
        if heads_per_layer is None:
            raise ValueError(
                "heads_per_layer is missing: say how many heads a layer keeps when drawing with a dataloader"
            )
        calibration = list(batches(dataloader))
        head_sets = [
            taylor_prune(
                model,
                half_of_each(calibration, member_seed),
                heads_per_layer=heads_per_layer,
                class_prompts=class_prompts,
            ).heads_to_prune
            for member_seed in seeds
        ]
    if not allow_equal:
        _refuse_twins(head_sets)
    return [prune_heads(model, heads_to_prune) for heads_to_prune in head_sets]


def sample_heads(circuit: Circuit, budget: int, out_of: int | None, seed: int, taken: Sequence[dict] = ()) -> dict:
    """`budget` heads, sampled without replacement from the first `out_of` of a circuit's ranking (by default all of it);
    where they are those of a member in `taken`, others."""
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
        chosen = torch.randperm(rows, generator=generator, device="cpu")[: (rows + 1) // 2].sort().values
        halves.append({name: tensor[chosen.to(tensor.device)] for name, tensor in batch.items()})
    return halves


def _named(circuits: Any, num_members: int | None) -> dict[str, Any]:
    if isinstance(circuits, Circuit):
        raise TypeError("circuits is a single circuit: pass one per member, or sample members from it with circuit=")
    if not circuits:
        raise ValueError("circuits is empty: pass one circuit per member")
    if num_members not in (None, len(circuits)):
        raise ValueError(
            f"num_members is {num_members}, circuits has {len(circuits)}: each makes one member, leave it out"
        )
    return {f"circuits[{index}]": each for index, each in enumerate(circuits)}


def _check_circuits(model: PreTrainedModel, circuits: Mapping[str, Any]) -> None:
    """Refuses what is no circuit, and warns of one that was extracted from other weights than the model's."""
    for name, each in circuits.items():
        if not isinstance(each, Circuit):
            raise TypeError(f"{name} is a {type(each).__name__}: pass what extract_circuit or Circuit.load returns")
    sources = {name: each.made_from["weights"] for name, each in circuits.items() if "weights" in each.made_from}
    weights = fingerprint_of_weights(prune_heads(model)) if sources else None
    for name, source in sources.items():
        if source != weights:
            warnings.warn(
                f"{name} was extracted from a model with other weights: its heads may not be the ones this model can spare",
                stacklevel=3,
            )


def _refuse_twins(head_sets: Sequence[dict]) -> None:
    sets = [set(as_heads(heads_to_prune)) for heads_to_prune in head_sets]
    twins = [(a, b) for a, b in combinations(range(len(sets)), 2) if sets[a] == sets[b]]
    if twins:
        pairs = ", ".join(f"{a} and {b}" for a, b in twins)
        raise ValueError(
            f"members {pairs} lose the same heads and would agree on everything: try another budget, more or other data, or "
            "samples from more heads of one circuit (out_of); allow_equal takes them, to be trained apart"
        )
