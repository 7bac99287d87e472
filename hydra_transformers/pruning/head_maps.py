"""Heads as a picture in a notebook: a row per layer, a cell per head, drawn as SVG."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from .heads import Head, tower_and_place


CELL, GAP, LABEL = 22, 2, 58  # pixels
LIGHT, DARK = (239, 243, 248), (0, 90, 160)


@dataclass(frozen=True)
class HeadMap:
    """One or several maps of heads side by side; the higher a value, the darker its cell.

    maps: title -> `{(layer, head): value}`, for CLIP `{(tower, layer, head): value}`
    low, high: the values of the lightest and the darkest cell; by default the lowest and the highest value
    marks: title -> `{head: text}`, written into the cells
    """

    maps: Mapping[str, Mapping[Head, float]]
    low: float | None = None
    high: float | None = None
    marks: Mapping[str, Mapping[Head, str]] | None = None

    def _repr_html_(self) -> str:
        values = [value for heads in self.maps.values() for value in heads.values()]
        low = min(values, default=0.0) if self.low is None else self.low
        high = max(values, default=1.0) if self.high is None else self.high
        pictures = []
        for title, heads in self.maps.items():
            marks = (self.marks or {}).get(title, {})
            for tower in dict.fromkeys(tower_and_place(head)[0] for head in heads):
                cells = {head: value for head, value in heads.items() if tower_and_place(head)[0] == tower}
                pictures.append(_svg(f"{title}, {tower} tower" if tower else title, cells, low, high, marks))
        return f'<div style="display:flex;flex-wrap:wrap;gap:16px">{"".join(pictures)}</div>'


def _svg(title: str, values: Mapping[Head, float], low: float, high: float, marks: Mapping[Head, str]) -> str:
    layers, heads = (1 + max(head[axis] for head in values) for axis in (-2, -1))
    step = CELL + GAP
    width, height = max(LABEL + heads * step, 8 * len(title)), (layers + 1) * step + 20
    parts = [f'<text x="0" y="14" font-weight="bold">{escape(title)}</text>']
    parts += [
        f'<text x="{LABEL + head * step + CELL / 2}" y="34" text-anchor="middle">{head}</text>'
        for head in range(heads)
    ]
    parts += [f'<text x="0" y="{40 + layer * step + CELL * 0.7}">layer {layer}</text>' for layer in range(layers)]
    for head, value in values.items():
        share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 1.0
        x, y = LABEL + head[-1] * step, 40 + head[-2] * step
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3" fill="{_colour(share)}">'
            f"<title>layer {head[-2]}, head {head[-1]}: {value:.4g}</title></rect>"
        )
        if head in marks:
            ink = "#FFFFFF" if share > 0.5 else "#333333"
            middle = f'x="{x + CELL / 2}" y="{y + CELL * 0.68}" text-anchor="middle" font-size="10" fill="{ink}"'
            parts.append(f"<text {middle}>{escape(marks[head])}</text>")
    style = 'font-family="sans-serif" font-size="12" fill="#333333"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>{"".join(parts)}</svg>'


def _colour(share: float) -> str:
    channels = (round(light + share * (dark - light)) for light, dark in zip(LIGHT, DARK, strict=True))
    return "#" + "".join(f"{channel:02X}" for channel in channels)
