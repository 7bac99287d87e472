"""Tables in markdown."""

from collections.abc import Sequence

from ..reports.table import Table


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table(heading, rows, "l" * len(heading)).markdown()


def plus_minus(value: float, error: float | None) -> str:
    """A value with its standard error, where it has one: to three decimals, and to five where both are small."""
    decimals = 3 if max(abs(value), error or 0) >= 0.01 else 5
    return f"{value:+.{decimals}f}" + ("" if error is None else f" ± {error:.{decimals}f}")
