"""Heads in the forms in which a caller has them: a circuit, a Taylor pruning, scores, a list."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..pruning import Circuit, TaylorPruning, prune_heads
from ..pruning.heads import Head, as_heads, heads_of


def check_are_named(given: Any, argument: str, form: str) -> None:
    """Refuses what is no dict of at least one."""
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
    """The heads that a head set names, in the order of `heads`, which are all that the model has.

    given: a circuit (all that it ranks), a Taylor pruning, heads as `prune_heads` takes them, or heads one by one
    """
    if isinstance(given, Circuit):
        named = given.ranking
    elif isinstance(given, TaylorPruning):
        named = as_heads(given.heads_to_prune)
    elif isinstance(given, Mapping):
        if _are_scores(given):
            raise TypeError(f"{name} is a dict of scores, which says not how many heads go: pass those that do")
        named = as_heads(dict(given))
    else:
        named = _heads(given, name)
    _check(named, name, heads)
    chosen = set(named)
    return [head for head in heads if head in chosen]


def as_order(given: Any, name: str, heads: Sequence[Head]) -> list[Head]:
    """Heads in the order in which they go.

    given: a circuit, scores `{head: score}` of which the lowest goes first (of equal ones the first in order), or heads one by one
    """
    if isinstance(given, Circuit):
        order = list(given.ranking)
    elif isinstance(given, Mapping):
        if not _are_scores(given):
            raise TypeError(f"{name} is a dict whose keys are no heads: pass {{(layer, head): score}}")
        for head, score in given.items():
            if not math.isfinite(score):
                raise ValueError(f"{name} gives head {head} the score {score}: pass finite scores")
        _check(given, name, heads)
        order = sorted((head for head in heads if head in given), key=given.__getitem__)
    else:
        order = _heads(given, name)
    _check(order, name, heads)
    return order


def random_order(model: PreTrainedModel, seed: int, towers: Sequence[str] | None = None) -> list[Head]:
    """All heads of a model in a random order, for comparison; of CLIP's towers only those in `towers`."""
    heads = heads_of(prune_heads(model), towers)
    random.Random(seed).shuffle(heads)
    return heads


def _are_scores(given: Mapping) -> bool:
    return bool(given) and all(isinstance(key, tuple) for key in given)


def _heads(given: Any, name: str) -> list[Head]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is a {type(given).__name__}: pass a Circuit, heads to prune, or a list of heads")
    heads = [tuple(head) if isinstance(head, Sequence) else head for head in given]
    for head in heads:
        if not isinstance(head, tuple):
            raise TypeError(
                f"{name} has {head!r}, which is no head: a head is (layer, head), of two towers (tower, layer, head)"
            )
    return heads


def _check(named: Iterable[Head], name: str, heads: Sequence[Head]) -> None:
    known, seen = set(heads), set()
    for head in named:
        if head not in known:
            raise ValueError(f"{name} has the head {head}, which the model does not have: heads are numbered from 0")
        if head in seen:
            raise ValueError(f"{name} has the head {head} twice: name each once")
        seen.add(head)
