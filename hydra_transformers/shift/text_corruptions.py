"""Text corruptions: characters and words that are mistyped or dropped.

Each takes a text, the share of its characters or words to change, and a random generator. A change at a low share is also made at
every higher one.
"""

import random


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


def character_drops(text: str, share: float, generator: random.Random) -> str:
    """Drops letters and digits."""
    places = [place for place, character in enumerate(text) if character.isalnum()]
    dropped = _chosen(places, share, generator)
    return "".join(character for place, character in enumerate(text) if place not in dropped)


def word_drops(text: str, share: float, generator: random.Random) -> str:
    """Drops words, never all."""
    words = text.split()
    dropped = _chosen(list(range(len(words))), share, generator)
    return " ".join(word for place, word in enumerate(words) if place not in dropped)


def _chosen(places: list[int], share: float, generator: random.Random) -> set[int]:
    """A share of the places, never all: the first ones of an order that does not depend on the share."""
    # Rounded up or down at random, so that the share is right on average.
    count = int(share * len(places) + generator.random())
    return set(generator.sample(places, len(places))[: max(0, min(count, len(places) - 1))])
