"""Text corruptions: characters and words that are mistyped or dropped.

Each takes a text, the share of its characters or words to change, and a random generator. A change
at a low share is also made at every higher one.
"""

import random


# Letter:those around it on a QWERTY keyboard, left, right, above and below.
KEYS = (
    "q:wa w:qeas e:wrsd r:etdf t:ryfg y:tugh u:yihj i:uojk o:ipkl p:ol "
    "a:sqwz s:adwezx d:sferxc f:dgrtcv g:fhtyvb h:gjyubn j:hkuinm k:jliom l:kop "
    "z:xas x:zcsd c:xvdf v:cbfg b:vngh n:bmhj m:njk"
)
NEIGHBOURS = {key[0]: key[2:] for key in KEYS.split()}


def typos(text: str, share: float, generator: random.Random) -> str:
    """Replace letters by their neighbours on a QWERTY keyboard; letters that it lacks stay."""
    indices = [index for index, character in enumerate(text) if character.lower() in NEIGHBOURS]
    mistyped = _draw(indices, share, generator)
    # A neighbour is drawn for every letter, mistyped or not, so that it is the same at each share.
    neighbours = [generator.choice(NEIGHBOURS[text[index].lower()]) for index in indices]

    characters = list(text)
    for index, neighbour in zip(indices, neighbours, strict=True):
        if index not in mistyped:
            continue
        if text[index].isupper():
            neighbour = neighbour.upper()
        characters[index] = neighbour
    return "".join(characters)


def character_drops(text: str, share: float, generator: random.Random) -> str:
    """Drop letters and digits."""
    indices = [index for index, character in enumerate(text) if character.isalnum()]
    dropped = _draw(indices, share, generator)
    return "".join(character for index, character in enumerate(text) if index not in dropped)


def word_drops(text: str, share: float, generator: random.Random) -> str:
    """Drop words, never all."""
    words = text.split()
    indices = list(range(len(words)))
    dropped = _draw(indices, share, generator)
    return " ".join(word for index, word in enumerate(words) if index not in dropped)


def _draw(indices: list[int], share: float, generator: random.Random) -> set[int]:
    """Draw a share of the indices, never all.

    Takes the first ones of an order that does not depend on the share.
    """
    # Rounded up or down at random, so that the share is right on average.
    count = int(share * len(indices) + generator.random())
    count = max(0, min(count, len(indices) - 1))
    shuffled = generator.sample(indices, len(indices))
    return set(shuffled[:count])
