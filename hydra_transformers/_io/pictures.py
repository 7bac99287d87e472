"""Draws PNG files without pyplot: no window, no global state; figures of the caller stay."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .files import write_atomically


if TYPE_CHECKING:
    from matplotlib.axes import Axes

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("plot() needs matplotlib: pip install matplotlib") from error

# Okabe and Ito's colours, which colour-blind readers can tell apart too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # so that curves differ in grey too
NEUTRAL = "#555555"


def write_png(figure: Figure, path: str | os.PathLike) -> Path:
    """Write the file atomically and return its path."""
    return write_atomically(path, png_of(figure))


def png_of(figure: Figure) -> bytes:
    """Return a figure as the content of a PNG file."""
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()


def finish_panel(panel: "Axes", title: str) -> None:
    """Add a title and a light grid behind the data; remove the frame above and on the right."""
    panel.set_title(drawable(title), fontsize=11)
    panel.grid(color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def drawable(name: str) -> str:
    """Escape a name: matplotlib reads formulas between dollars, and hides what begins with _."""
    if name.startswith("_"):
        name = f" {name}"
    return name.replace("$", r"\$")


def legend_below(figure: Figure, panel: "Axes", columns: int, **look: float) -> None:
    """Draw one legend for all panels, with the entries of `panel`."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, **look)
