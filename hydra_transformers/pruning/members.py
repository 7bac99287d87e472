"""Diverse members: from several fine-tuned models, or from one backbone by objective, by samples of one ranking, or by data."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import batches
from ..data.fingerprints import fingerprint_of_weights
from ..data.prediction import classes_of
from ..fusion import check_can_be_fused, tower_configs, trunk_depth
from .circuits import Circuit
from .heads import Prompts, as_heads_to_prune, check_count, prune_heads, tower_and_place
from .taylor import taylor_prune


MOST_DRAWS = 1_000  # attempts to draw a new head set; there may be none

# The options of each source of members.
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
    class_prompts: Prompts | None = None,
    trunk_layers: int | float = 0,
    allow_equal: bool = False,
) -> list[PreTrainedModel]:
    """Different one-member Hydras, ready for `from_pruned_members` or for fine-tuning one by one.

    `model` is one backbone, or a list of several fine-tuned models of one pre-trained model, each of which makes one member. The
    other arguments say where the members come from:

    - `circuits`, `budget`: one member per circuit, without its first `budget` heads. With `budget="best"` each circuit removes
      as many heads as it scores best without, and with `tolerance=0.01` as many as cost at most that much of the score. Of
      several backbones, circuit i is that of backbone i. Of one backbone, Hydra (Circ) takes three circuits, for the
      objectives "acc", "ood" and "avg".
    - `circuit`, `budget`, `out_of`, `num_members`, `seed`: samples from one circuit of one backbone (B.5). Each member loses
      `budget` heads, drawn from the first `out_of` of the ranking (the paper: 48 out of 100).
    - `data`, `heads_per_layer`, `num_members`, `seed`: Hydra (Taylor). Each member is pruned by `taylor_prune` on its own
      random half of every calibration batch. CLIP also needs `class_prompts`; its vision tower is pruned.
    - several backbones and nothing else: each as it is, nothing pruned.

    The first `trunk_layers` layers (a count, or a share such as 0.75) keep all their heads, so that fused members can run them
    once; extract circuits with the same `trunk_layers`.

    Of one backbone, three members are drawn unless `num_members` says otherwise, member m with the seed `seed + m`. The
    backbones stay as they are. Members with equal heads and weights are refused, as an ensemble of them is one model: try
    another budget, other data, or samples from more heads; `allow_equal=True` takes them, for training to make them different.
    A circuit of other weights causes a warning.
    """
    sources = {"circuits": circuits, "circuit": circuit, "data": data}
    given = [name for name, value in sources.items() if value is not None]
    options = {"budget": budget, "out_of": out_of, "heads_per_layer": heads_per_layer, "num_members": num_members}
    is_several = not isinstance(model, PreTrainedModel) and isinstance(model, Sequence)
    if is_several:
        _check_backbones(model, given, num_members)
    source = _source(given, options, is_several)
    if budget == "best" and source != "circuits":
        raise ValueError(
            "budget is 'best', which each of several circuits has: pass circuits=[...], or a whole number"
        )
    if tolerance is not None and budget != "best":
        raise ValueError(f"tolerance is {tolerance!r}, which goes with budget='best': pass that, or leave it out")
    if source == "circuits":
        _check_number(circuits, len(model) if is_several else num_members, is_several)
        num_members = len(circuits)
    # Each backbone becomes a Hydra once, and the members are cut out of it.
    whole = [prune_heads(each) for each in (model if is_several else [model])]
    backbones = whole if is_several else whole * (num_members or 3)
    head_sets: list[dict] = []
    if source == "circuits":
        weights = [fingerprint_of_weights(each) for each in whole] * (1 if is_several else num_members)
        for place, each in enumerate(circuits):
            _check_circuit(f"circuits[{place}]", each, weights[place])
            own_budget = each.largest_budget(tolerance or 0.0) if budget == "best" else budget
            head_sets.append(each.heads_to_prune(own_budget))
            _check_trunk(f"circuits[{place}]", each, own_budget, trunk_layers, whole[0])
    elif source == "circuit":
        _check_circuit("circuit", circuit, fingerprint_of_weights(whole[0]))
        for place in range(len(backbones)):
            head_sets.append(sample_heads(circuit, budget, out_of, seed + place, taken=head_sets))
        _check_trunk("circuit", circuit, out_of, trunk_layers, whole[0])
    elif source == "data":
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


def _source(given: Sequence[str], options: Mapping[str, int | None], is_several: bool) -> str:
    """Where members come from: "circuits", "circuit", "data" or, for several backbones, "nothing"; refuses other options."""
    if len(given) > 1 or not (given or is_several):
        raise ValueError(
            f"draw_members got {' and '.join(given) or 'nothing to draw from'}: pass circuits, circuit or data"
        )
    source = given[0] if given else "nothing"
    for name, value in options.items():
        if value is not None and name not in OPTIONS[source]:
            instead = "leave it out" if given else "leave it out, or pass circuits or data to prune by"
            raise ValueError(f"{name} is {value!r}, which drawing from {source} has no use for: {instead}")
    if options["num_members"] is not None and options["num_members"] < 1:
        raise ValueError(f"num_members is {options['num_members']}: pass at least 1")
    if source in ("circuits", "circuit") and options["budget"] is None:
        raise ValueError(f"budget is missing: say how many heads each member loses when drawing from {source}")
    if source == "data" and options["heads_per_layer"] is None:
        raise ValueError("heads_per_layer is missing: say how many heads a layer keeps when drawing with data")
    return source


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
        chosen = torch.randperm(rows, generator=generator, device="cpu")[: (rows + 1) // 2].sort().values
        halves.append({name: tensor[chosen.to(tensor.device)] for name, tensor in batch.items()})
    return halves


def _check_backbones(backbones: Sequence[PreTrainedModel], given: Sequence[str], num_members: int | None) -> None:
    count = len(backbones)
    if not count:
        raise ValueError("model is an empty list: pass at least one backbone")
    if "circuit" in given:
        raise ValueError(
            f"circuit is a single one, and there are {count} backbones, which can spare different heads: extract one from each "
            "and pass circuits=[...]"
        )
    if num_members not in (None, count):
        raise ValueError(
            f"num_members is {num_members}, and there are {count} backbones: each makes one member, leave it out"
        )
    check_can_be_fused(backbones, "model")


def _check_number(circuits: Any, expected: int | None, is_several: bool) -> None:
    if isinstance(circuits, Circuit):
        raise TypeError("circuits is a single circuit: pass one per member, or sample members from it with circuit=")
    count = len(circuits)
    if expected not in (None, count):
        problem = f"there are {expected} backbones, and circuits has {count}: pass one of each backbone"
        other = f"num_members is {expected}, circuits has {count}: each makes one member, leave it out"
        raise ValueError(problem if is_several else other)


def _check_circuit(name: str, circuit: Any, weights: str) -> None:
    """Refuses anything but a circuit, and warns if it was extracted from other weights."""
    if not isinstance(circuit, Circuit):
        raise TypeError(f"{name} is a {type(circuit).__name__}: pass what extract_circuit or Circuit.load returns")
    if circuit.made_from.get("weights") not in (None, weights):
        warnings.warn(
            f"{name} was extracted from a model with other weights: its heads may not be the ones this model can spare",
            stacklevel=3,
        )


def _check_trunk(
    name: str, circuit: Circuit, first: int | None, trunk_layers: int | float, hydra: PreTrainedModel
) -> None:
    """Refuses a circuit of `hydra` whose `first` heads (None: all) are partly in the trunk."""
    depths = {
        tower: trunk_depth(trunk_layers, len(config.kept_heads))
        for tower, config in tower_configs(hydra.config).items()
    }
    places = [(head, *tower_and_place(head)) for head in circuit.ranking[:first]]
    lost = next(((head, depths[tower]) for head, tower, layer, _ in places if layer < depths.get(tower, 0)), None)
    if lost is not None:
        raise ValueError(
            f"{name} ranks head {lost[0]}, which is in the first {lost[1]} layers (trunk_layers): extract it with "
            f"extract_circuit(..., trunk_layers={trunk_layers})"
        )
