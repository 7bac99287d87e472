"""Heads as a picture in a notebook: a row per layer, a cell per head, without matplotlib."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from .heads import Head, tower_and_place


CELL, GAP, LABEL = 22, 2, 58  # pixels
LIGHT, DARK = (239, 243, 248), (0, 90, 160)


@dataclass(frozen=True)
class HeadMap:
    """Values of heads, side by side for several titles; the darker a cell, the higher its value.

    maps: title -> `{(layer, head): value}`, for CLIP `{(tower, layer, head): value}`
    low, high: the values of the lightest and the darkest cell; by default the lowest and the highest there are
    marks: title -> `{head: text}` for what is written into cells
    """

    maps: Mapping[str, Mapping[Head, float]]
    low: float | None = None
    high: float | None = None
    marks: Mapping[str, Mapping[Head, str]] | None = None

    def _repr_html_(self) -> str:
        values = [value for of_map in self.maps.values() for value in of_map.values()]
        low = min(values, default=0.0) if self.low is None else self.low
        high = max(values, default=1.0) if self.high is None else self.high
        marks = self.marks or {}
        parts = [
            _svg(
                _titled(title, tower),
                by_place,
                low,
                high,
                {tower_and_place(h): m for h, m in marks.get(title, {}).items()},
            )
            for title, of_map in self.maps.items()
            for tower, by_place in _by_tower(of_map).items()
        ]
        return f'<div style="display:flex;flex-wrap:wrap;gap:16px">{"".join(parts)}</div>'


def _titled(title: str, tower: str) -> str:
    return f"{title}, {tower} tower" if tower else title


def _by_tower(values: Mapping[Head, float]) -> dict[str, dict[tuple, float]]:
    towers: dict[str, dict[tuple, float]] = {}
    for head, value in values.items():
        towers.setdefault(tower_and_place(head)[0], {})[tower_and_place(head)] = value
    return towers


def _svg(title: str, values: Mapping[tuple, float], low: float, high: float, marks: Mapping[tuple, str]) -> str:
    layers, heads = (1 + max(place[axis] for place in values) for axis in (1, 2))
    step = CELL + GAP
    width, height = max(LABEL + heads * step, 8 * len(title)), (layers + 1) * step + 20
    parts = [f'<text x="0" y="14" font-weight="bold">{escape(title)}</text>']
    parts += [
        f'<text x="{LABEL + head * step + CELL / 2}" y="34" text-anchor="middle">{head}</text>'
        for head in range(heads)
    ]
    parts += [f'<text x="0" y="{40 + layer * step + CELL * 0.7}">layer {layer}</text>' for layer in range(layers)]
    for place, value in values.items():
        _, layer, head = place
        share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 1.0
        x, y = LABEL + head * step, 40 + layer * step
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3" fill="{_colour(share)}">'
            f"<title>layer {layer}, head {head}: {value:.4g}</title></rect>"
        )
        if place in marks:
            ink = "#FFFFFF" if share > 0.5 else "#333333"
            middle = f'x="{x + CELL / 2}" y="{y + CELL * 0.68}" text-anchor="middle" font-size="10" fill="{ink}"'
            parts.append(f"<text {middle}>{escape(marks[place])}</text>")
    style = 'font-family="sans-serif" font-size="12" fill="#333333"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>{"".join(parts)}</svg>'


def _colour(share: float) -> str:
    return "#" + "".join(
        f"{round(light + share * (dark - light)):02X}" for light, dark in zip(LIGHT, DARK, strict=True)
    )
