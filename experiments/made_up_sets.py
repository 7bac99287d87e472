"""Out-of-distribution sets that need no download: made from a seed, or of rows that are there."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def noise(count: int, side: int, seed: int) -> Tensor:
    """uint8 (count, 3, side, side): coloured noise, from large soft blots to single pixels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.empty(count, 3, side, side)
    grains = [grain for grain in (4, 8, 16, 32, side) if grain <= side]
    for index in range(count):
        grain = grains[index % len(grains)]
        coarse = torch.rand(1, 3, grain, grain, generator=generator)
        images[index] = interpolate(coarse, size=(side, side), mode="bilinear")[0]
    return (images * 255).round().to(torch.uint8)


def drawings(count: int, side: int, seed: int) -> Tensor:
    """uint8 (count, 3, side, side): a few rectangles, ellipses and lines of one colour each on a plain ground."""
    import numpy as np
    from PIL import Image, ImageDraw

    random = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        image = Image.new("RGB", (side, side), tuple(random.integers(0, 256, 3).tolist()))
        draw = ImageDraw.Draw(image)
        for _ in range(random.integers(2, 7)):
            colour = tuple(random.integers(0, 256, 3).tolist())
            left, right = sorted(random.integers(0, side, 2).tolist())
            top, bottom = sorted(random.integers(0, side, 2).tolist())
            kind = random.integers(0, 3)
            if kind == 0:
                draw.rectangle((left, top, right, bottom), fill=colour)
            elif kind == 1:
                draw.ellipse((left, top, right, bottom), fill=colour)
            else:
                draw.line((left, bottom, right, top), fill=colour, width=int(random.integers(1, 6)))
        images.append(torch.from_numpy(np.array(image)))
    return torch.stack(images).permute(0, 3, 1, 2).contiguous()


def spliced(texts: list[str], seed: int) -> list[str]:
    """The first half of each text's words, and the second half of another's."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(len(texts), generator=generator).roll(1).tolist()
    halves = [text.split() for text in texts]
    return [
        " ".join([*own[: (len(own) + 1) // 2], *halves[other][len(halves[other]) // 2 :]])
        for own, other in zip(halves, others, strict=True)
    ]


def mixed_words(texts: list[str], seed: int) -> list[str]:
    """Texts of the same lengths, each word drawn from all the words of all of them: the words without any sense."""
    generator = torch.Generator().manual_seed(seed)
    words = [word for text in texts for word in text.split()]
    drawn = iter(torch.randint(len(words), (len(words),), generator=generator).tolist())
    return [" ".join(words[next(drawn)] for _ in text.split()) for text in texts]
