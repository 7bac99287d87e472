"""Tables, titles and sentences as text for a terminal, as markdown and as HTML; names in them are always escaped."""

import base64
import html
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


TEXT_WIDTH = 120
NO_VALUE = "-"
_RULES = {"l": "---", "r": "--:", "c": ":-:"}
_SIDES = {"l": "left", "r": "right", "c": "center"}
_ALIGN = {"l": str.ljust, "r": str.rjust, "c": str.center}
_MARKDOWN_MARKS = {"": "{}", "bold": "**{}**", "underline": "<u>{}</u>"}
_HTML_MARKS = {"": "{}", "bold": "<b>{}</b>", "underline": "<u>{}</u>", "code": "<code>{}</code>"}
# A page loads no font, script, picture or style from elsewhere.
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; } h3 { font-size: 1.05em; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.8em 0; }
th, td { padding: 0.25em 0.7em; border-bottom: 1px solid #ddd; text-align: right; }
td { white-space: nowrap; } td[style*="left"] { white-space: normal; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } figure { margin: 1.5em 0; } figcaption { color: #555; }
"""


def escape_markdown(text: str) -> str:
    """The text on one line, with everything escaped that markdown would read as HTML, a link, emphasis, code or a cell.

    Example:
        >>> print(escape_markdown("a|b <i>[x](y)</i> *z* snake_case"))
        a\\|b &lt;i&gt;\\[x\\](y)&lt;/i&gt; \\*z\\* snake_case
    """
    text = re.sub(r"&(?=#?\w+;)", "&amp;", _one_line(text)).replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def _one_line(text: str) -> str:
    """Without line ends and control characters, which could write elsewhere in a terminal."""
    return "".join(each if each.isprintable() else " " for each in text).strip()


@dataclass(frozen=True)
class Cell:
    """A text with a mark: "bold", "underline", "code", or "" for none."""

    text: str
    mark: str = ""

    def markdown(self) -> str:
        if self.mark == "code":  # only a backtick or a bar could end it
            code = _one_line(self.text).replace("`", "'").replace("|", "\\|")
            return f"`{code}`"
        return _MARKDOWN_MARKS[self.mark].format(escape_markdown(self.text))

    def html(self) -> str:
        return _HTML_MARKS[self.mark].format(html.escape(self.text))


class Table:
    """Rows of texts below a header.

    Args:
        header: a title for each column.
        rows: as many cells for each row, texts or `Cell`s. Markup in a text is escaped.
        alignment: a letter for each column: "l" left, "r" right, "c" centre. By default "lrrr...": names, then numbers.

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
        # The style sheet aligns the first column to the left and the others to the right.
        styles = [
            "" if letter == ("r" if place else "l") else f' style="text-align: {_SIDES[letter]}"'
            for place, letter in enumerate(self.alignment)
        ]
        lines = [[f"<th{style}>{html.escape(title)}</th>" for style, title in zip(styles, self.header, strict=True)]]
        lines += [
            [f"<td{style}>{cell.html()}</td>" for style, cell in zip(styles, row, strict=True)] for row in self.rows
        ]
        body = "\n".join(f"<tr>{''.join(line)}</tr>" for line in lines)
        return f'<div class="table"><table>\n{body}\n</table></div>'

    def text(self, width: int = TEXT_WIDTH) -> str:
        """Columns for a terminal, a star behind bold cells; a table wider than `width` continues below."""
        lines = [[f"{_one_line(title)} " for title in self.header]]
        lines += [[_one_line(cell.text) + ("*" if cell.mark == "bold" else " ") for cell in row] for row in self.rows]
        columns = []
        for letter, column in zip(self.alignment, zip(*lines, strict=True), strict=True):
            longest = max(map(len, column))
            columns.append([_ALIGN[letter](cell, longest) for cell in column])
        first, *others = columns
        groups = [[first]]
        for column in others:
            used = sum(len(each[0]) + 2 for each in groups[-1])
            if used + len(column[0]) > width and len(groups[-1]) > 1:
                groups.append([first])
            groups[-1].append(column)
        return "\n\n".join(map(_side_by_side, groups))


def _side_by_side(columns: Sequence[Sequence[str]]) -> str:
    head, *rows = ("  ".join(line).rstrip() for line in zip(*columns, strict=True))
    return "\n".join([head, "-" * max(map(len, (head, *rows))), *rows])


@dataclass(frozen=True)
class Title:
    """level: 2 for a section of a report, 3 for a part of a section."""

    text: str
    level: int = 2


Part = Title | str | Table  # of a report; a str is a sentence


def to_markdown(parts: Sequence[Part]) -> str:
    def markdown(part: Part) -> str:
        if isinstance(part, Table):
            return part.markdown()
        if isinstance(part, Title):
            return f"{'#' * part.level} {escape_markdown(part.text)}"
        # A name at the beginning of a line must not begin a heading or a list.
        return re.sub(r"^(\d*)([#+=.)-])", r"\1\\\2", escape_markdown(part))

    return "\n\n".join(map(markdown, parts)) + "\n"


def to_text(parts: Sequence[Part]) -> str:
    def text(part: Part) -> str:
        if isinstance(part, Title):
            return part.text
        return f"{part if isinstance(part, Table) else textwrap.fill(part, TEXT_WIDTH)}\n"

    return "\n".join(map(text, parts)).rstrip()


def to_html(parts: Sequence[Part]) -> str:
    def element(part: Part) -> str:
        if isinstance(part, Table):
            return part.html()
        tag, text = (f"h{part.level}", part.text) if isinstance(part, Title) else ("p", part)
        return f"<{tag}>{html.escape(text)}</{tag}>"

    return "\n".join(map(element, parts))


def html_page(title: str, parts: Sequence[Part], pictures: Mapping[str, bytes]) -> str:
    """A page in one file: the parts, then the pictures (file name without .png -> content)."""
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">']
    lines += [f"<title>{html.escape(title)}</title>", f"<style>{_STYLE}</style>", "</head>", "<body>"]
    lines += [to_html([Title(title, 1), *parts])]
    for name, png in pictures.items():
        words = name.replace("_", " ")
        caption = f"ROC curve, {words[4:]}" if words.startswith("roc ") else words[:1].upper() + words[1:]
        caption, source = html.escape(caption), f"data:image/png;base64,{base64.b64encode(png).decode()}"
        lines += [f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" src="{source}"></figure>']
    return "\n".join([*lines, "</body>", "</html>", ""])
