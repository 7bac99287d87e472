"""Tables in markdown."""

from collections.abc import Sequence


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plus_minus(value: float, error: float | None) -> str:
    """A value with its standard error, where it has one."""
    return f"{value:+.3f}" + ("" if error is None else f" ± {error:.3f}")
