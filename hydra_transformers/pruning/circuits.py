"""A circuit: heads in the order of their removal, and the model's score after each removal."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .._io.files import parse_json, write_atomically
from .heads import Head, as_heads_to_prune, check_count
from .objectives import METRIC, OBJECTIVES


FOLDER = "circuits"  # beside members that were drawn by circuits
MODES = ("exact", "shortlist")
ROUNDING = 1e-12  # of differences of scores: 0.8 - 0.7 is more than 0.1
AXIS_LABELS = {
    "acc": "accuracy",
    "ood": "AUROC of out-of-distribution data",
    "avg": "mean of accuracy and AUROC",
}


@dataclass
class Circuit:
    """Heads in the order of their removal, and the model's score without them.

    Attributes:
        ranking (`list`): the heads, least useful first.
        scores (`list[float]`), dense_score (`float`): the score after each removal, and before the
            first.
        objective (`str`): "acc", "ood" or "avg", or "metric" for the user's own
            (`made_from["metric"]` is its name).
        mode (`str`): "exact", or "shortlist" where most choices were made among a short list of
            candidates.
        made_from (`dict`): the model, the data and the settings, with fingerprints.
        checks (`list`): for "shortlist", (removal, whether the short list held the exact choice),
            where that was checked.
        chance_from (`int` or `None`): the first removal (counted from 1) at which no candidate
            scored better than chance.
        tied (`list[int]` or `None`): how many candidates shared the score of each removal, where a
            margin chose.
    """

    ranking: list[Head]
    scores: list[float]
    dense_score: float
    objective: str
    mode: str = "exact"
    made_from: dict[str, Any] = field(default_factory=dict)
    checks: list[tuple[int, bool]] = field(default_factory=list)
    chance_from: int | None = None
    tied: list[int] | None = None

    def heads_to_prune(self, budget: int | None = None) -> dict:
        """Return the first `budget` heads (by default all) as `prune_heads` takes them."""
        if budget is None:
            budget = len(self.ranking)
        return as_heads_to_prune(self.first(budget).ranking)

    def first(self, budget: int) -> "Circuit":
        """Return the circuit after `budget` removals."""
        check_count(budget, "budget", 0, len(self.ranking), f"this circuit ranks {len(self.ranking)} heads")
        chance_from = self.chance_from
        if chance_from is not None and chance_from > budget:
            chance_from = None
        tied = self.tied
        if tied is not None:
            tied = tied[:budget]
        return replace(
            self,
            ranking=self.ranking[:budget],
            scores=self.scores[:budget],
            checks=[check for check in self.checks if check[0] <= budget],
            chance_from=chance_from,
            tied=tied,
        )

    @property
    def best_budget(self) -> int:
        """The number of removals with the best score, the largest of several.

        It is 0 if all heads together score best.
        """
        scores = [self.dense_score, *self.scores]
        return max(range(len(scores)), key=lambda removed: (scores[removed], removed))

    def largest_budget(self, tolerance: float = 0.0) -> int:
        """Return the largest number of removals whose score is within `tolerance` of the best.

        With a tolerance of 0 that is `best_budget`.
        """
        scores = [self.dense_score, *self.scores]
        lowest = tolerance + ROUNDING
        return max(removed for removed, score in enumerate(scores) if max(scores) - score <= lowest)

    def plot(self, path: str | os.PathLike) -> Path:
        """Draw the score after each removal, and where it is best, as a PNG file.

        Returns the file's path.
        """
        from .._io.pictures import COLOURS, Figure, write_png

        scores = [self.dense_score, *self.scores]
        best = self.best_budget
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()

        # The curve, the score of all heads, the best circuit, and where scores are at chance.
        axes.plot(range(len(scores)), scores, "-o", color=COLOURS[0], markersize=3)
        dense_label = f"all heads: {self.dense_score:.3f}"
        axes.axhline(self.dense_score, color=COLOURS[7], linestyle=":", label=dense_label)
        best_label = f"best: {scores[best]:.3f} without {best}"
        axes.plot(best, scores[best], "D", color=COLOURS[1], label=best_label)
        if self.chance_from is not None:
            last = len(scores) - 1
            axes.axvspan(self.chance_from, last, color=COLOURS[7], alpha=0.2, label="no better than chance")

        name = AXIS_LABELS.get(self.objective) or self.made_from.get("metric", self.objective)
        axes.set(xlabel="heads removed", ylabel=name)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        return write_png(figure, path)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as `from_dict` takes them; they can be written as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Circuit":
        """Build the circuit that `to_dict` wrote; a ValueError says what is wrong with others."""
        try:
            fields = {"checks": [], **fields}
            # JSON knows lists only.
            for name in ("ranking", "checks"):
                fields[name] = [tuple(entry) for entry in fields[name]]
            circuit = cls(**fields)
            flaw = circuit._flaw()
        except (KeyError, TypeError) as error:
            raise ValueError(f"its fields are others, {error}") from error
        if flaw is not None:
            raise ValueError(flaw)
        return circuit

    def _flaw(self) -> str | None:
        """Return what is wrong with the first bad field, or None."""
        count = len(self.ranking)
        are_heads = all(map(_is_head, self.ranking))
        if not are_heads or len({len(head) for head in self.ranking}) > 1 or len(set(self.ranking)) < count:
            return "its ranking is not a list of different heads"

        numbers = [*self.scores, self.dense_score]
        are_numbers = all(isinstance(number, (int, float)) for number in numbers)
        if len(self.scores) != count or not are_numbers:
            return f"its scores are not one number for each of its {count} heads and one for all of them"

        has_wrong_tied = self.tied is not None and len(self.tied) != count
        if not all(map(math.isfinite, numbers)) or has_wrong_tied:
            return f"its scores are not finite, or its tied is not one count for each of its {count} heads"

        if self.objective not in (*OBJECTIVES, METRIC) or self.mode not in MODES:
            return f"its objective is {self.objective!r}, its mode {self.mode!r}"
        return None

    def save(self, path: str | os.PathLike) -> None:
        """Write the circuit as JSON, whole or not at all."""
        text = json.dumps(self.to_dict(), indent=1)
        write_atomically(path, text)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Circuit":
        """Read a circuit that `save` wrote."""
        try:
            fields = parse_json(Path(path).read_bytes())
            return cls.from_dict(fields)
        except ValueError as error:
            raise ValueError(f"{path} is not a circuit ({error}): pass a file that Circuit.save wrote") from error


def _is_head(entry: tuple) -> bool:
    """Whether an entry is (layer, head), or (tower, layer, head) with the name of a tower."""
    tower = entry[:-2]
    numbers = entry[-2:]
    are_counts = len(entry) > 1 and all(isinstance(number, int) and number >= 0 for number in numbers)
    return tower in ((), ("vision",), ("text",)) and are_counts
