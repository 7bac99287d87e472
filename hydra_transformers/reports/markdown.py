"""Tables in markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], alignment: Sequence[str] | None = None
) -> str:
    """A line for the headings, for their alignment and for each row; by default the first column is of names, the others of
    numbers."""
    alignment = ["---"] + ["--:"] * (len(headings) - 1) if alignment is None else alignment
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, alignment, *rows))
