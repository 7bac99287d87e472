"""Text corruptions: characters and words that are mistyped, swapped or dropped.

Each takes a text, the share of its characters or words to change, and a random generator. A change at a low share is also made at
every higher one.
"""

import random
import re


# Letter:those around it on a QWERTY keyboard, left, right, above and below.
KEYS = (
    "q:wa w:qeas e:wrsd r:etdf t:ryfg y:tugh u:yihj i:uojk o:ipkl p:ol "
    "a:sqwz s:adwezx d:sferxc f:dgrtcv g:fhtyvb h:gjyubn j:hkuinm k:jliom l:kop "
    "z:xas x:zcsd c:xvdf v:cbfg b:vngh n:bmhj m:njk"
)
NEIGHBOURS = dict(key.split(":") for key in KEYS.split())


def typos(text: str, share: float, generator: random.Random) -> str:
    """Replaces letters by their neighbours on a QWERTY keyboard; letters that it lacks stay."""
    places = [place for place, character in enumerate(text) if character.lower() in NEIGHBOURS]
    chosen = _chosen(places, share, generator)
    wrong = [generator.choice(NEIGHBOURS[text[place].lower()]) for place in places]
    characters = list(text)
    for place, letter in zip(places, wrong, strict=True):
        if place in chosen:
            characters[place] = letter.upper() if text[place].isupper() else letter
    return "".join(characters)


def character_swaps(text: str, share: float, generator: random.Random) -> str:
    """Swaps neighbouring letters of a word."""
    places = [match.start() for match in re.finditer(r"(?=\w\w)", text)]
    pairs = [place for place in places if text[place] != text[place + 1]]
    return "".join(_swapped(list(text), pairs, share * sum(map(str.isalnum, text)), generator))


def character_drops(text: str, share: float, generator: random.Random) -> str:
    """Drops letters and digits."""
    places = [place for place, character in enumerate(text) if character.isalnum()]
    dropped = _chosen(places, share, generator)
    return "".join(character for place, character in enumerate(text) if place not in dropped)


def word_swaps(text: str, share: float, generator: random.Random) -> str:
    """Swaps neighbouring words."""
    words = text.split()
    pairs = [place for place in range(len(words) - 1) if words[place] != words[place + 1]]
    return " ".join(_swapped(words, pairs, share * len(words), generator))


def word_drops(text: str, share: float, generator: random.Random) -> str:
    """Drops words, never all."""
    words = text.split()
    dropped = _chosen(list(range(len(words))), share, generator)
    return " ".join(word for place, word in enumerate(words) if place not in dropped)


def _count(expected: float, generator: random.Random) -> int:
    """`expected` rounded up or down at random, so that it is right on average."""
    return int(expected + generator.random())


def _chosen(places: list[int], share: float, generator: random.Random) -> set[int]:
    """A share of the places, never all: the first ones of an order that does not depend on the share."""
    count = min(_count(share * len(places), generator), len(places) - 1)
    return set(generator.sample(places, len(places))[: max(0, count)])


def _swapped(parts: list[str], pairs: list[int], touched: float, generator: random.Random) -> list[str]:
    """Swaps `touched` / 2 pairs that do not overlap; `pairs` are the places of their first parts."""
    count, moved = _count(touched / 2, generator), set()
    for place in generator.sample(pairs, len(pairs)):
        if count > 0 and not moved & {place, place + 1}:
            parts[place], parts[place + 1] = parts[place + 1], parts[place]
            moved |= {place, place + 1}
            count -= 1
    return parts
