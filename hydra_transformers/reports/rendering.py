"""The tables of a report as markdown, as text for a terminal and as HTML."""

import base64
import html
from collections.abc import Callable, Mapping, Sequence

from .markdown import markdown_table
from .tables import Cell, Part, Table, Title


MARKDOWN_PLACES = {0: "{}", 1: "**{}**", 2: "<u>{}</u>"}
TEXT_PLACES = {0: "{} ", 1: "{}*", 2: "{} "}
HTML_PLACES = {0: "{}", 1: "<b>{}</b>", 2: "<u>{}</u>"}
TEXT_WIDTH = 120
# Everything a page needs is in it: no font, script, picture or style comes from elsewhere.
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; } h3 { font-size: 1.05em; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.8em 0; }
th, td { padding: 0.25em 0.7em; border-bottom: 1px solid #ddd; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } figure { margin: 1.5em 0; } figcaption { color: #555; }
"""


# Markdown


def to_markdown(parts: Sequence[Part]) -> str:
    """The best in bold, the second best underlined."""
    return "\n\n".join(map(_markdown, parts)) + "\n"


def _markdown(part: Part) -> str:
    if isinstance(part, Title):
        return f"{'#' * part.level} {part.text}"
    if isinstance(part, Table):
        headings = [_without_bars(heading) for heading in part.headings]
        return markdown_table(headings, [_marked(row, MARKDOWN_PLACES, _without_bars) for row in part.rows])
    return _without_bars(part)


def _without_bars(text: str) -> str:
    """A bar or the end of a line would end the cell of a table."""
    return " ".join(text.splitlines()).replace("|", "\\|")


def _marked(row: Sequence[Cell], places: Mapping[int, str], escape: Callable[[str], str] = str) -> list[str]:
    return [places[cell.place].format(escape(cell.text)) for cell in row]


# Text


def to_text(parts: Sequence[Part]) -> str:
    """Straight columns, the best with a star; a table that is too wide goes on below."""
    return "\n".join(_text(part) + ("" if isinstance(part, Title) else "\n") for part in parts).rstrip()


def _text(part: Part) -> str:
    if isinstance(part, Title):
        return part.text
    if isinstance(part, Table):
        lines = [[f"{heading} " for heading in part.headings], *(_marked(row, TEXT_PLACES) for row in part.rows)]
        return "\n\n".join(map(_straight, _narrow_enough(lines)))
    return part


def _narrow_enough(lines: Sequence[Sequence[str]]) -> list[list[list[str]]]:
    """The columns in groups that fit side by side, each beginning with the first column."""
    names, *columns = zip(*lines, strict=True)
    groups, width = [[names]], TEXT_WIDTH
    for column in columns:
        needed = max(map(len, column)) + 2
        if width < needed + max(map(len, names)) and len(groups[-1]) > 1:
            groups.append([names])
            width = TEXT_WIDTH
        groups[-1].append(column)
        width -= needed
    return [[list(line) for line in zip(*group, strict=True)] for group in groups]


def _straight(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        rows.append("  ".join(cells).rstrip())
    return "\n".join([rows[0], "-" * max(map(len, rows)), *rows[1:]])


# HTML


def to_html_parts(parts: Sequence[Part]) -> str:
    """The best in bold, the second best underlined; every text escaped."""
    return "\n".join(map(_html, parts))


def html_page(title: str, parts: Sequence[Part], pictures: Mapping[str, bytes]) -> str:
    """One file that needs no other: the parts, then pictures (title -> PNG)."""
    figures = [_html_picture(name, png) for name, png in pictures.items()]
    head = f'<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n<style>{STYLE}</style>'
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", to_html_parts(parts), *figures])
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _html(part: Part) -> str:
    if isinstance(part, Title):
        return f"<h{part.level}>{html.escape(part.text)}</h{part.level}>"
    if isinstance(part, Table):
        head = "".join(f"<th>{html.escape(heading)}</th>" for heading in part.headings)
        rows = ["".join(f"<td>{cell}</td>" for cell in _marked(row, HTML_PLACES, html.escape)) for row in part.rows]
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        return f'<div class="table"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
    return f"<p>{html.escape(part)}</p>"


def _html_picture(title: str, png: bytes) -> str:
    title, content = html.escape(title), base64.b64encode(png).decode()
    return (
        f'<figure><figcaption>{title}</figcaption><img alt="{title}" src="data:image/png;base64,{content}"></figure>'
    )
