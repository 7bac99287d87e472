"""Which figure of the paper is drawn from what."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .methods import sweep
from .studies import AnySetting, smallest_of
from .study import COMPONENTS, TOWER_SCORES


@dataclass(frozen=True)
class PaperFigure:
    """
    number: the paper's
    title: what it shows
    settings: the paper's
    methods: (setting, whether it is the smallest) -> what it is drawn from
    """

    number: int
    title: str
    settings: tuple[str, ...]
    methods: Callable[[AnySetting, bool], Sequence[str]]


def swept(tuned: bool) -> Callable[[AnySetting, bool], Sequence[str]]:
    def methods(setting: AnySetting, smallest: bool) -> Sequence[str]:
        return ["single", *sweep(smallest_of(setting) if smallest else setting, tuned)]

    return methods


FIGURES = {
    figure.number: figure
    for figure in (
        PaperFigure(4, "Outputs of single heads on known and OOD rows", ("cifar100",), lambda *_: [COMPONENTS]),
        PaperFigure(5, "Heads removed, not fine-tuned", ("imagenet1k",), swept(tuned=False)),
        PaperFigure(6, "Heads removed, fine-tuned", ("imagenet1k",), swept(tuned=True)),
        PaperFigure(7, "Taylor scores of a CLIP's two towers", ("clip-vit-b32",), lambda *_: [TOWER_SCORES]),
    )
}
