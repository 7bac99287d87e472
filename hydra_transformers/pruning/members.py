"""Diverse members: of several fine-tunings, each by its own circuit; of one backbone by objective, by sampling one ranking,
or by calibration subset."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import batches
from ..data.fingerprints import fingerprint_of_weights
from ..data.prediction import classes_of
from ..fusion import check_can_be_fused
from .circuits import Circuit
from .heads import as_heads_to_prune, check_count, prune_heads, tower_and_place
from .taylor import taylor_prune


MOST_DRAWS = 1_000  # until members differ; there may be no other heads to draw

# What each way of drawing looks at.
OPTIONS = {
    "circuits": ("budget", "num_members"),
    "circuit": ("budget", "out_of", "num_members"),
    "data": ("heads_per_layer", "num_members"),
    "nothing": ("num_members",),
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
    class_prompts: Mapping[str, Tensor] | None = None,
    trunk_layers: int = 0,
    allow_equal: bool = False,
) -> list[PreTrainedModel]:
    """Different one-member Hydras, ready for `from_pruned_members` or for fine-tuning one by one.

    `model` is one backbone, or a list of several fine-tunings of one pre-trained model: then each makes one member.
    There are these ways, told apart by what is passed:

    - `circuits`, `budget`: one member per circuit, without its first `budget` heads; with `budget="best"` each without as many
      as its own circuit scores best without, or with `tolerance=0.01` as many as cost it at most that much of the score. Of
      several backbones, circuit i is that of backbone i. Of one backbone, Hydra (Circ) takes three circuits, for the
      objectives "acc", "ood" and "avg".
    - `circuit`, `budget`, `out_of`, `num_members`, `seed`: from one circuit of one backbone (B.5), each member loses `budget`
      heads that are sampled from the first `out_of` of its ranking (the paper: 48 out of 100).
    - `data`, `heads_per_layer`, `num_members`, `seed`: Hydra (Taylor), each member pruned with `taylor_prune` on its
      own random half of every calibration batch. CLIP also needs `class_prompts`; its vision tower is pruned.
    - several backbones and nothing else: each as it is, nothing pruned.

    The first `trunk_layers` layers keep all their heads, so that fused members can run them once (`from_pruned_members` does,
    where they are equal); circuits are to be extracted with the same `trunk_layers`.

    Of one backbone, three members are drawn where `num_members` is not given, member m with the seed `seed + m`. The backbones
    are left as they are. Members with the same heads and weights are refused, as an ensemble of them is one model:
    try another budget, other data, or samples from more heads of one circuit; `allow_equal=True` takes them, where training
    is to make them different. A warning tells of circuits that were extracted
    from other weights.
    """
    given = [
        name for name, value in (("circuits", circuits), ("circuit", circuit), ("data", data)) if value is not None
    ]
    options = {"budget": budget, "out_of": out_of, "heads_per_layer": heads_per_layer, "num_members": num_members}
    is_several = not isinstance(model, PreTrainedModel) and isinstance(model, Sequence)
    if is_several:
        _check_backbones(model, given, num_members)
    way = _way(given, options, is_several)
    _check_best(way, budget, tolerance)
    if way == "circuits":
        _check_number(circuits, len(model) if is_several else num_members, is_several)
        num_members = len(circuits)
    # Each backbone is made a Hydra once, and the members are cut out of it.
    whole = [prune_heads(each) for each in (model if is_several else [model])]
    backbones = whole if is_several else whole * (num_members or 3)
    if way == "circuits":
        named = {f"circuits[{index}]": each for index, each in enumerate(circuits)}
        _check_circuits(backbones, named)
        budgets = [each.largest_budget(tolerance or 0.0) if budget == "best" else budget for each in circuits]
        head_sets = [each.heads_to_prune(own) for each, own in zip(circuits, budgets, strict=True)]
        for (name, each), own in zip(named.items(), budgets, strict=True):
            _check_trunk(name, each, own, trunk_layers)
    elif way == "circuit":
        _check_circuits(backbones[:1], {"circuit": circuit})
        head_sets = []
        for place in range(len(backbones)):
            head_sets.append(sample_heads(circuit, budget, out_of, seed + place, taken=head_sets))
        _check_trunk("circuit", circuit, out_of, trunk_layers)
    elif way == "data":
        calibration = list(batches(data, classes=classes_of(backbones[0])))
        settings = {"heads_per_layer": heads_per_layer, "class_prompts": class_prompts, "trunk_layers": trunk_layers}
        head_sets = [
            taylor_prune(backbone, half_of_each(calibration, seed + place), **settings).heads_to_prune
            for place, backbone in enumerate(backbones)
        ]
    else:
        head_sets = [{}] * len(backbones)
    members = [prune_heads(backbone, heads) for backbone, heads in zip(backbones, head_sets, strict=True)]
    if len(members) > 1:
        check_can_be_fused(members, "members", allow_equal)
    return members


def _way(given: Sequence[str], options: Mapping[str, int | None], is_several: bool) -> str:
    """What members are drawn from: "circuits", "circuit", "data" or, of several backbones, "nothing"; refuses options
    that do not go with it."""
    if len(given) > 1 or not (given or is_several):
        raise ValueError(
            f"draw_members got {' and '.join(given) or 'nothing to draw from'}: pass circuits, circuit or data"
        )
    way = given[0] if given else "nothing"
    for name, value in options.items():
        if value is not None and name not in OPTIONS[way]:
            instead = "leave it out" if given else "leave it out, or pass circuits or data to prune by"
            raise ValueError(f"{name} is {value!r}, which drawing from {way} has no use for: {instead}")
    if options["num_members"] is not None and options["num_members"] < 1:
        raise ValueError(f"num_members is {options['num_members']}: pass at least 1")
    if way in ("circuits", "circuit") and options["budget"] is None:
        raise ValueError(f"budget is missing: say how many heads each member loses when drawing from {way}")
    if way == "data" and options["heads_per_layer"] is None:
        raise ValueError("heads_per_layer is missing: say how many heads a layer keeps when drawing with data")
    return way


def _check_best(way: str, budget: Any, tolerance: float | None) -> None:
    if budget == "best" and way != "circuits":
        raise ValueError(
            "budget is 'best', which each of several circuits has: pass circuits=[...], or a whole number"
        )
    if tolerance is not None and budget != "best":
        raise ValueError(f"tolerance is {tolerance!r}, which goes with budget='best': pass that, or leave it out")


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
        for name, tensor in batch.items():
            if len(tensor) != rows:
                raise ValueError(f"a batch of data has {rows} rows, and {len(tensor)} as its {name}: pass one each")
        chosen = torch.randperm(rows, generator=generator, device="cpu")[: (rows + 1) // 2].sort().values
        halves.append({name: tensor[chosen.to(tensor.device)] for name, tensor in batch.items()})
    return halves


def _check_backbones(backbones: Sequence[PreTrainedModel], given: Sequence[str], num_members: int | None) -> None:
    if not backbones:
        raise ValueError("model is an empty list: pass at least one backbone")
    if "circuit" in given:
        raise ValueError(
            f"circuit is a single one, and there are {len(backbones)} backbones, which can spare different heads: extract one "
            "from each and pass circuits=[...]"
        )
    if num_members not in (None, len(backbones)):
        raise ValueError(
            f"num_members is {num_members}, and there are {len(backbones)} backbones: each makes one member, leave it out"
        )
    check_can_be_fused(backbones, "model")


def _check_number(circuits: Any, expected: int | None, is_several: bool) -> None:
    if isinstance(circuits, Circuit):
        raise TypeError("circuits is a single circuit: pass one per member, or sample members from it with circuit=")
    if not circuits:
        raise ValueError("circuits is empty: pass one circuit per member")
    if expected not in (None, len(circuits)):
        if is_several:
            raise ValueError(
                f"there are {expected} backbones, and circuits has {len(circuits)}: pass one of each backbone"
            )
        raise ValueError(
            f"num_members is {expected}, circuits has {len(circuits)}: each makes one member, leave it out"
        )


def _check_circuits(backbones: Sequence[PreTrainedModel], circuits: Mapping[str, Any]) -> None:
    """Refuses what is no circuit, and warns of one that was extracted from other weights than its backbone's."""
    weights = {id(each): fingerprint_of_weights(each) for each in {id(each): each for each in backbones}.values()}
    for backbone, (name, each) in zip(backbones, circuits.items(), strict=True):
        if not isinstance(each, Circuit):
            raise TypeError(f"{name} is a {type(each).__name__}: pass what extract_circuit or Circuit.load returns")
        if each.made_from.get("weights") not in (None, weights[id(backbone)]):
            warnings.warn(
                f"{name} was extracted from a model with other weights: its heads may not be the ones this model can spare",
                stacklevel=3,
            )


def _check_trunk(name: str, circuit: Circuit, first: int | None, trunk_layers: int) -> None:
    """Refuses a circuit by whose `first` heads (None: all) members would lose some of the trunk."""
    lost = next((head for head in circuit.ranking[:first] if tower_and_place(head)[1] < trunk_layers), None)
    if lost is not None:
        raise ValueError(
            f"{name} ranks head {lost}, which is in the first {trunk_layers} layers (trunk_layers): extract it with "
            f"extract_circuit(..., trunk_layers={trunk_layers})"
        )
