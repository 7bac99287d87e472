"""Reads head sets, orders of heads and foreign data in the forms that users have."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from hydra_transformers.data.loading import ood_groups
from hydra_transformers.pruning import Circuit, TaylorPruning, prune_heads
from hydra_transformers.pruning.heads import Head, as_heads, heads_of


def check_are_named(given: Any, argument: str, form: str) -> None:
    if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{argument} is a {type(given).__name__}: pass {{name: {form}}}, at least one")


def as_head_sets(given: Any, argument: str, heads: Sequence[Head]) -> dict[str, list[Head]]:
    """Several head sets by name, none of them empty; see `as_head_set`."""
    check_are_named(given, argument, "heads")
    sets = {name: as_head_set(each, f"{argument}[{name!r}]", heads) for name, each in given.items()}
    for name, chosen in sets.items():
        if not chosen:
            raise ValueError(f"{argument}[{name!r}] names no head: pass at least one")
    return sets


def as_head_set(given: Any, name: str, heads: Sequence[Head]) -> list[Head]:
    """The heads of a head set, in the order of `heads`, which are all of the model's.

    given: a circuit (all that it ranks), a Taylor pruning, heads as `prune_heads` takes them, or a list of heads
    """
    if _are_scores(given):
        raise TypeError(f"{name} is a dict of scores, which do not say how many heads go: pass the heads that do")
    if isinstance(given, TaylorPruning):
        given = given.heads_to_prune
    chosen = set(_checked(as_heads(dict(given)) if isinstance(given, Mapping) else given, name, heads))
    return [head for head in heads if head in chosen]


def as_order(given: Any, name: str, heads: Sequence[Head]) -> list[Head]:
    """Heads in the order of their removal.

    given: a circuit, scores `{head: score}` (the lowest goes first; of equal ones the first in order), or a list of heads
    """
    if not isinstance(given, Mapping):
        return _checked(given, name, heads)
    if not _are_scores(given):
        raise TypeError(f"{name} is a dict whose keys are no heads: pass {{(layer, head): score}}")
    for head, score in given.items():
        if not math.isfinite(score):
            raise ValueError(f"{name} gives head {head} the score {score}: pass finite scores")
    _checked(given, name, heads)
    return sorted((head for head in heads if head in given), key=given.__getitem__)


def random_order(model: PreTrainedModel, seed: int, towers: Sequence[str] | None = None) -> list[Head]:
    """All heads of a model in a random order; for CLIP only those of `towers`."""
    heads = heads_of(prune_heads(model), towers)
    random.Random(seed).shuffle(heads)
    return heads


def foreign_sets(ood_data: Any) -> dict[str, Any]:
    """Name -> data, from one set (then named "foreign data"), sets by name, or groups of these."""
    groups = ood_groups(ood_data)
    if not groups:
        raise ValueError("ood_data is None: pass foreign data, or several sets as {name: data}")
    if not isinstance(ood_data, dict):
        return {"foreign data": ood_data}
    named = [(name, data) for sets in groups.values() for name, data in sets.items()]
    if len(dict(named)) < len(named):
        raise ValueError("ood_data has a name in two groups: name each set once")
    return dict(named)


def _are_scores(given: Any) -> bool:
    return isinstance(given, Mapping) and bool(given) and all(isinstance(key, tuple) for key in given)


def _checked(given: Any, name: str, heads: Sequence[Head]) -> list[Head]:
    """A circuit's or a list's heads, if the model has each of them and none comes twice."""
    given = given.ranking if isinstance(given, Circuit) else given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is a {type(given).__name__}: pass a Circuit, heads to prune, or a list of heads")
    named = [tuple(head) if isinstance(head, Sequence) else head for head in given]
    known, seen = set(heads), set()
    for head in named:
        if not isinstance(head, tuple):
            raise TypeError(
                f"{name} has {head!r}, which is no head: a head is (layer, head), of two towers (tower, layer, head)"
            )
        if head not in known:
            raise ValueError(f"{name} has the head {head}, which the model does not have: heads are numbered from 0")
        if head in seen:
            raise ValueError(f"{name} has the head {head} twice: name each once")
        seen.add(head)
    return named
