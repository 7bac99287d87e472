"""A table that is written as text, markdown or HTML, and escapes what its cells hold."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass


TEXT_WIDTH = 120
NO_VALUE = "-"
_RULES = {"l": "---", "r": "--:", "c": ":-:"}
_SIDES = {"l": "left", "r": "right", "c": "center"}
_MARKDOWN_MARKS = {"": "{}", "bold": "**{}**", "underline": "<u>{}</u>", "code": "`{}`"}
_HTML_MARKS = {"": "{}", "bold": "<b>{}</b>", "underline": "<u>{}</u>", "code": "<code>{}</code>"}


def escape_markdown(text: str) -> str:
    """A text on one line that markdown shows as it is: no HTML, links, emphasis, code or cell of a table begins in it.

    Example:
        >>> print(escape_markdown("a|b <i>[x](y)</i> *z* snake_case"))
        a\\|b &lt;i&gt;\\[x\\](y)&lt;/i&gt; \\*z\\* snake_case
    """
    text = re.sub(r"&(?=#?\w+;)", "&amp;", _one_line(text)).replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def escape_html(text: str) -> str:
    return html.escape(text)


@dataclass(frozen=True)
class Cell:
    """A text that stands out: `mark` is "bold", "underline", "code", or "" for a plain one."""

    text: str
    mark: str = ""

    def markdown(self) -> str:
        if self.mark == "code":  # only a backtick or a bar could end it
            return _MARKDOWN_MARKS["code"].format(_one_line(self.text).replace("`", "'").replace("|", "\\|"))
        return _MARKDOWN_MARKS[self.mark].format(escape_markdown(self.text))

    def html(self) -> str:
        return _HTML_MARKS[self.mark].format(escape_html(self.text))


class Table:
    """Rows of texts below a header.

    Args:
        header: a title for each column.
        rows: for each row as many cells, each a text or a `Cell`. Texts are shown as they are: whatever would be markup in
            markdown or HTML is escaped.
        alignment: a letter for each column: "l" left, "r" right, "c" centre. By default the first column holds names, the
            others hold numbers: "lrrr".

    Example:
        >>> table = Table(["Model", "Accuracy"], [["a|b", Cell("91.2", "bold")], ["plain", "90.1"]])
        >>> print(table.markdown())
        | Model | Accuracy |
        | --- | --: |
        | a\\|b | **91.2** |
        | plain | 90.1 |
        >>> print(table.text())
        Model   Accuracy
        -----------------
        a|b         91.2*
        plain       90.1
    """

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str | Cell]], alignment: str = ""):
        self.header = list(header)
        self.rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
        self.alignment = alignment or "l" + "r" * (len(self.header) - 1)
        if any(len(each) != len(self.header) for each in (*self.rows, self.alignment)):
            raise ValueError(f"a row or the alignment does not have the {len(self.header)} columns of the header")

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()

    def markdown(self) -> str:
        lines = [map(escape_markdown, self.header), (_RULES[letter] for letter in self.alignment)]
        lines += [(cell.markdown() for cell in row) for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def html(self) -> str:
        """A `<table>` in a `<div class="table">`, which a page may make scrollable."""
        head = "".join(f"<th{self._style(place)}>{escape_html(title)}</th>" for place, title in enumerate(self.header))
        body = "\n".join(
            "<tr>" + "".join(f"<td{self._style(place)}>{cell.html()}</td>" for place, cell in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        return f'<div class="table"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'

    def _style(self, place: int) -> str:
        """Nothing for a column that is aligned as its page does by itself: the first to the left, others to the right."""
        if self.alignment[place] == ("r" if place else "l"):
            return ""
        return f' style="text-align: {_SIDES[self.alignment[place]]}"'

    def text(self, width: int = TEXT_WIDTH) -> str:
        """Straight columns for a terminal, a star behind what is bold; a table wider than `width` goes on below."""
        lines = [[f"{_one_line(title)} " for title in self.header]]
        lines += [[_one_line(cell.text) + ("*" if cell.mark == "bold" else " ") for cell in row] for row in self.rows]
        first, *others = (self._straight(place, column) for place, column in enumerate(zip(*lines, strict=True)))
        groups = [[first]]
        for column in others:
            used = sum(len(each[0]) + 2 for each in groups[-1])
            if used + len(column[0]) > width and len(groups[-1]) > 1:
                groups.append([first])
            groups[-1].append(column)
        return "\n\n".join(map(_side_by_side, groups))

    def _straight(self, place: int, column: Sequence[str]) -> list[str]:
        width = max(map(len, column))
        align = {"l": str.ljust, "r": str.rjust, "c": str.center}[self.alignment[place]]
        return [align(cell, width) for cell in column]


def _one_line(text: str) -> str:
    """Without line ends, nor the control characters by which a name could write elsewhere in a terminal."""
    return "".join(each if each.isprintable() else " " for each in text).strip()


def _side_by_side(columns: Sequence[Sequence[str]]) -> str:
    head, *rows = ("  ".join(line).rstrip() for line in zip(*columns, strict=True))
    return "\n".join([head, "-" * max(map(len, (head, *rows))), *rows])
