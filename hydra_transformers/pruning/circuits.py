"""A circuit: the heads of a model in the order in which they can go."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .heads import Head, as_heads_to_prune, check_count


@dataclass
class Circuit:
    """Heads in the order in which they were removed, and what the model scored without them.

    ranking: the heads, least useful first
    scores: the score after each removal
    dense_score: the score before the first
    objective: "acc", "ood" or "avg"
    mode: "exact", or "shortlist" where most choices were made among a short list of candidates
    made_from: the model, the data and the settings, with fingerprints
    checks: for "shortlist", (removal, whether the short list held the exact choice), where that was checked
    chance_from: the first removal (counted from 1) at which no candidate scored better than chance, or None
    """

    ranking: list[Head]
    scores: list[float]
    dense_score: float
    objective: str
    mode: str = "exact"
    made_from: dict[str, Any] = field(default_factory=dict)
    checks: list[tuple[int, bool]] = field(default_factory=list)
    chance_from: int | None = None

    def heads_to_prune(self, budget: int | None = None) -> dict:
        """The first `budget` heads (by default all) as `prune_heads` takes them."""
        return as_heads_to_prune(self.first(len(self.ranking) if budget is None else budget).ranking)

    def first(self, budget: int) -> "Circuit":
        """The circuit after `budget` removals."""
        check_count(budget, "budget", 0, len(self.ranking), f"this circuit ranks {len(self.ranking)} heads")
        return replace(
            self,
            ranking=self.ranking[:budget],
            scores=self.scores[:budget],
            checks=[check for check in self.checks if check[0] <= budget],
            chance_from=self.chance_from if self.chance_from is not None and self.chance_from <= budget else None,
        )

    @property
    def best_budget(self) -> int:
        """After how many removals the score is best, the more of them the better where several are; 0 where the model
        never does as well as with all its heads."""
        scores = [self.dense_score, *self.scores]
        return max(range(len(scores)), key=lambda removed: (scores[removed], removed))

    @property
    def agreement(self) -> float | None:
        """Share of the checked removals at which the short list held the exact choice; None where none was checked."""
        return sum(agreed for _, agreed in self.checks) / len(self.checks) if self.checks else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Circuit":
        fields = dict(fields)
        fields["ranking"] = [tuple(head) for head in fields["ranking"]]
        fields["checks"] = [tuple(check) for check in fields["checks"]]
        return cls(**fields)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the circuit as JSON, whole or not at all."""
        write_atomically(path, json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Circuit":
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no circuit: pass a file that Circuit.save wrote") from error
