"""Draws docs/images/monitor.png: what a monitor sees of a stream before and after a shift.

python -m scripts.draw_monitor [OUTPUT]

`python -m scripts.draw_monitor --simulate` first draws the stream again, with a fixed seed, passes it through a `Monitor`, and
writes what the monitor said after each batch to docs/images/monitor.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.monitoring import Case, Pool, draw_run
from hydra_transformers._io.files import write_atomically
from hydra_transformers.uncertainty import Monitor
from hydra_transformers.uncertainty.task import Outcomes

from .picture_style import IMAGES, SMALL, WIDTH, Look, save, style_axes


OUTPUT = IMAGES / "monitor.png"
DATA = OUTPUT.with_suffix(".json")
CASE = Case("30 % out of distribution", ood=0.3, labelled=0.5, batch=50)
ROWS = 4_000  # the second half has out-of-distribution rows
SEED = 0
SEEN = 500  # rows of the shown rate


def simulate(rows: int = ROWS) -> dict[str, Any]:
    """Return what a monitor says after each batch of a stream whose second half differs.

    Args:
        rows (`int`): after how many to stop.
    """
    run = draw_run(CASE, Pool(), ROWS, SEED)
    if run is None:
        raise ValueError(f"seed {SEED} promises nothing: take another")
    monitor = Monitor(run.settings)
    wrong = torch.from_numpy(run.bins["risk"])
    coverage = torch.from_numpy(run.bins["coverage"])
    scores = torch.from_numpy(run.scores)
    is_answered = torch.from_numpy(run.bins["answered"]) == 0
    path = []
    for start in range(0, rows, CASE.batch):
        batch = slice(start, start + CASE.batch)
        # All rows count without labels, and then those that somebody has checked.
        monitor.count(Outcomes(scores[batch], is_answered[batch]))
        checked = coverage[batch] >= 0
        answered = is_answered[batch][checked]
        missed = coverage[batch][checked] == 1
        monitor.count(Outcomes(scores[batch][checked], answered, wrong[batch][checked][answered] == 1, missed))

        seen = wrong[max(0, start + CASE.batch - SEEN) : start + CASE.batch]
        counted = seen[seen >= 0].double()
        states = {name: [state.status, float(f"{state.e_value:.4g}")] for name, state in monitor.state().items()}
        path.append({"rows": start + CASE.batch, "wrong": round(float(counted.mean()), 4), "states": states})
    return {"case": CASE.name, "change": ROWS // 2, "risk": CASE.risk, "alarm": monitor.alarm, "path": path}


def draw(content: dict[str, Any], look: Look) -> Figure:
    """Draw the share of wrong answers, and the evidence against two promises, up to their alarms."""
    figure = Figure(figsize=(WIDTH, WIDTH * 0.82))
    above, below = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.1, right=0.97, top=0.93, bottom=0.1, hspace=0.32)
    path = content["path"]
    rows = [step["rows"] for step in path]

    above.plot(rows, [100 * step["wrong"] for step in path], color=look.members[0], linewidth=2)
    above.axhline(100 * content["risk"], color=look.ink, linewidth=1, linestyle="--")
    above.text(rows[0], 100 * content["risk"] - 2.6, "promised: at most 5 %", fontsize=SMALL, color=look.ink)
    above.set_ylim(0, 1.15 * max(100 * step["wrong"] for step in path))
    style_axes(above, look, f"Wrong answers in %, among the checked of the last {SEEN} rows")

    for index, (name, title) in enumerate({"inputs": "the inputs, without labels", "risk": "wrong answers"}.items()):
        values = [max(step["states"][name][1], 1e-2) for step in path]
        broken = [step["rows"] for step in path if step["states"][name][0] == "broken"]
        colour = look.members[index + 1]
        below.plot(rows, np.minimum(values, 1e5), color=colour, linewidth=2, label=title)
        if broken:
            below.plot(broken[0], content["alarm"], "o", markersize=9, color=colour)
            below.annotate(
                f"{broken[0] - content['change']} rows\nafter it",
                (broken[0], content["alarm"]),
                (-9, 5),
                textcoords="offset points",
                fontsize=SMALL,
                color=look.ink,
                ha="right",
                va="bottom",
            )
    below.axhline(content["alarm"], color=look.ink, linewidth=1, linestyle="--")
    below.text(rows[0], 1.3 * content["alarm"], "alarm", fontsize=SMALL, color=look.ink, va="bottom")
    below.set_yscale("log")
    below.set_ylim(1e-2, 1e5)
    style_axes(below, look, "The monitor's evidence that a promise is broken", "rows since deployment")
    for panel in (above, below):
        panel.axvline(content["change"], color=look.faded, linewidth=1)
    top = above.get_ylim()[1]
    above.text(content["change"] + 40, 0.96 * top, "from here on 30 % of\nthe rows are of\nanother kind", va="top")
    above.texts[-1].set(fontsize=SMALL, color=look.ink)
    legend = below.legend(frameon=False, fontsize=SMALL, loc="center left", bbox_to_anchor=(0.0, 0.38))
    for words in legend.get_texts():
        words.set_color(look.ink)
    return figure


def main() -> None:
    words = sys.argv[1:]
    if "--simulate" in words:
        words.remove("--simulate")
        write_atomically(DATA, json.dumps(simulate(), indent=1) + "\n")
    content = json.loads(DATA.read_text())
    numbers = ", ".join(f"{step['wrong']}" for step in content["path"])
    save(lambda look: draw(content, look), Path(words[0]) if words else OUTPUT, numbers)


if __name__ == "__main__":
    main()
