"""Checks of rows that several commands read."""

from ..data.loading import PreparedData


def check_can_be_learnt_from(data: PreparedData, name: str, purpose: str, by_classes: bool = True) -> None:
    """Refuses rows among which nothing can be told apart."""
    if len(data) < 2:
        raise ValueError(f"{name} gives 1 row, too few {purpose}: read more of it")
    if by_classes and len(set(data.labels)) < 2:
        raise ValueError(
            f"all {len(data):,} rows of {name} have the same label, so there is nothing {purpose}: where the rows are "
            "sorted by class, read all of them and draw with --limit"
        )


def overlap(split: str | None, other: str | None) -> bool:
    """Whether two splits surely have rows in common: they are the same, or one is a part of the other."""
    if split is None or other is None:  # the only one
        return split == other
    is_of_same = split.partition("[")[0] == other.partition("[")[0]
    return is_of_same and (split == other or "[" not in split or "[" not in other)
