"""Entities in the tags of words, and how unsure an entity is."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


OUTSIDE = "O"
SAME_PREFIXES = {"M": "I", "L": "E", "U": "S"}  # of BMES and BILOU


class Entity(NamedTuple):
    """kind: the tag without its prefix; first, last: the numbers of its first and last word"""

    kind: str
    first: int
    last: int


def have_prefixes(tags: Iterable[str]) -> bool:
    """Whether tags say where entities begin ("B-PER", "I-PER"), as in IOB2; otherwise every word is
    a unit of its own (POS)."""
    return any(tag.startswith(("B-", "I-")) for tag in tags)


def entities_in(tags: Sequence[str | None], by_prefix: bool) -> list[Entity]:
    """Find the entities of a text, as seqeval does by default.

    "B-" and "S-" begin one, "I-" and "E-" go on with one of the same kind or else begin one, "E-"
    and "S-" end it. "M-", "L-" and "U-" are other names of "I-", "E-" and "S-".

    tags: of each word, None where a word has none
    by_prefix: `have_prefixes` of all tags that there are; otherwise every word with a tag but "O"
        is one

    Example:
        >>> entities_in(["B-PER", "I-PER", "O", "I-LOC"], by_prefix=True)
        [Entity(kind='PER', first=0, last=1), Entity(kind='LOC', first=3, last=3)]
        >>> entities_in(["NOUN", "NOUN"], by_prefix=False)
        [Entity(kind='NOUN', first=0, last=0), Entity(kind='NOUN', first=1, last=1)]
    """
    entities: list[Entity] = []
    is_open = False  # whether the word before belongs to an entity that may go on
    for place, tag in enumerate(tags):
        if tag is None or tag == OUTSIDE:
            is_open = False
            continue
        prefix = "S"
        kind = tag
        if by_prefix and "-" in tag:  # without, it is a tag of one word among tags with prefixes
            prefix, _, kind = tag.partition("-")
        prefix = SAME_PREFIXES.get(prefix, prefix)
        if is_open and prefix in ("I", "E") and entities[-1].kind == kind:
            entities[-1] = entities[-1]._replace(last=place)
        else:
            entities.append(Entity(kind, place, place))
        is_open = prefix in ("B", "I")
    return entities


def worst_and_mean(entity: Entity, scores: Sequence[float]) -> tuple[float, float]:
    """Return the highest score of the words of an entity, and their mean. NaN counts as the
    highest."""
    of_entity = scores[entity.first : entity.last + 1]
    worst = max(of_entity, key=lambda score: (score != score, score))
    return worst, sum(of_entity) / len(of_entity)
