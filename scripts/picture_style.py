"""The look of the pictures in README and docs: one width, one size of letters, light and dark."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image
from PIL.PngImagePlugin import PngInfo


IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 700 / 96  # inches, so that a point is a point in a page that shows 700 pixels
DPI = 192  # two pixels of the file for one of the page
PALETTE = 96  # colours of a file
SMALL, NORMAL, LARGE = 11, 12, 14  # points


@dataclass(frozen=True)
class Look:
    """Colours on a light or a dark page.

    ground: behind the picture
    ink: of letters
    faded: of axes and what is less important
    pale: of frames
    shared: fills what all members share
    members: a colour for each member, told apart by colour-blind readers too
    tints: pale ones of the same
    costs: from a cheap model to an expensive one
    """

    ground: str
    ink: str
    faded: str
    pale: str
    shared: str
    members: tuple[str, ...]
    tints: tuple[str, ...]
    costs: tuple[str, ...]


LIGHT = Look(
    ground="#FFFFFF",
    ink="#1F2933",
    faded="#697586",
    pale="#CBD2D9",
    shared="#E4E7EB",
    members=("#0072B2", "#D55E00", "#009E73", "#56B4E9", "#E69F00", "#CC79A7"),
    tints=("#D9EAF4", "#F9E6DA", "#D9F0E9", "#E3F3FC", "#FCF0D9", "#F7E9F1"),
    costs=("#0072B2", "#009E73", "#B8860B", "#D55E00", "#A3195B"),
)
DARK = Look(
    ground="#0D1117",
    ink="#E6EDF3",
    faded="#9AA5B1",
    pale="#3D4650",
    shared="#262E38",
    members=("#4DA6DB", "#F08A4B", "#3CC39B", "#9BD3F5", "#F2C14E", "#E3A1C6"),
    tints=("#12304A", "#43260F", "#0E3A2E", "#1B3F57", "#4A3A10", "#472A3C"),
    costs=("#4DA6DB", "#3CC39B", "#E5C04B", "#F08A4B", "#E56BA5"),
)
Draw = Callable[[Look], Figure]


def dark_path(path: Path) -> Path:
    """Return where the dark picture beside a light one lies."""
    return path.with_name(f"{path.stem}-dark{path.suffix}")


def save(draw: Draw, path: Path, numbers: str = "") -> None:
    """Write a picture for light pages, and beside it one for dark pages.

    Args:
        draw (`Draw`): returns the figure in a look.
        path (`Path`): of the light one.
        numbers (`str`, *optional*): what it shows, which the files keep as their description.
    """
    about = PngInfo()
    about.add_text("Description", numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    for look, output in ((LIGHT, path), (DARK, dark_path(path))):
        drawn = io.BytesIO()
        draw(look).savefig(drawn, dpi=DPI, facecolor=look.ground)
        # A palette makes a quarter of the file, and looks the same.
        Image.open(drawn).convert("RGB").quantize(PALETTE).save(output, optimize=True, pnginfo=about)
        print(f"wrote {output}")


# Drawings without axes


def canvas(look: Look, height: float, units: float = 10.0) -> tuple[Figure, Axes]:
    """Return a figure without axes, so many units wide, of which a point at the same scale lies as high.

    Args:
        look (`Look`): its colours.
        height (`float`): in units.
        units (`float`): the width.
    """
    figure = Figure(figsize=(WIDTH, WIDTH * height / units))
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, units), ylim=(0, height))
    panel.axis("off")
    return figure, panel


def box(panel: Axes, x: float, y: float, width: float, height: float, edge: str, fill: str, **look: object) -> None:
    """Draw a box with round corners."""
    settings = {"facecolor": fill, "edgecolor": edge, "linewidth": 1.5, "zorder": 2} | look
    panel.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.06", **settings))


def arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Draw an arrow."""
    look = {"arrowstyle": "-|>", "mutation_scale": 13, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    panel.add_patch(FancyArrowPatch(start, end, color=colour, **look))


def text(panel: Axes, x: float, y: float, words: str, colour: str, size: float = SMALL, **look: object) -> None:
    """Write words around a point, in the middle by default."""
    settings = {"ha": "center", "va": "center", "linespacing": 1.3, "zorder": 3} | look
    panel.text(x, y, words, fontsize=size, color=colour, **settings)


# Plots with axes


def style_axes(panel: Axes, look: Look, title: str = "", across: str = "", up: str = "") -> None:
    """Give axes the look, a title at the left, and names."""
    panel.set_facecolor(look.ground)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(look.faded)
    panel.tick_params(colors=look.faded, labelcolor=look.ink, labelsize=SMALL)
    panel.set_title(title, loc="left", fontsize=NORMAL, color=look.ink, weight="bold")
    panel.set_xlabel(across, fontsize=SMALL, color=look.ink)
    panel.set_ylabel(up, fontsize=SMALL, color=look.ink)
