"""Tables as markdown, as text for a terminal and as HTML; names in them are always escaped."""

import base64
import html
import re
from collections.abc import Mapping, Sequence

from ..cost import Cost, readable_count


DATA = "data"  # the name of the in-distribution data set in a report

TEXT_WIDTH = 120
NO_VALUE = "-"
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # header, rows
Section = tuple[str, Sequence["str | Table"]]  # title; sentences and tables
# A page loads no font, script, picture or style from elsewhere.
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.8em 0; display: block; overflow-x: auto; }
th, td { padding: 0.25em 0.7em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } figure { margin: 1.5em 0; } figcaption { color: #555; }
"""


def escape_markdown(text: str) -> str:
    """The text on one line, with everything escaped that markdown would read as HTML, a link, emphasis, code or a cell.

    Example:
        >>> print(escape_markdown("a|b <i>[x](y)</i> *z* snake_case"))
        a\\|b &lt;i&gt;\\[x\\](y)&lt;/i&gt; \\*z\\* snake_case
    """
    text = re.sub(r"&(?=#?\w+;)", "&amp;", one_line(text)).replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def one_line(text: str) -> str:
    """Without line ends and control characters, which could write elsewhere in a terminal."""
    return "".join(character if character.isprintable() else " " for character in text).strip()


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in markdown: the first column to the left, the others to the right.

    Example:
        >>> print(markdown_table(["Model", "Accuracy"], [["a|b", "91.2"], ["plain", "90.1"]]))
        | Model | Accuracy |
        | --- | --: |
        | a\\|b | 91.2 |
        | plain | 90.1 |
    """
    rules = ["---", *["--:"] * (len(header) - 1)]
    lines = [map(escape_markdown, header), rules, *(map(escape_markdown, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cost_table(costs: Mapping[str, Cost]) -> str:
    """The costs of models, in markdown.

    Args:
        costs (`dict`): what `compare_costs` returns.
    """
    rows = [[name, f"{cost.parameters:,}", readable_count(cost.multiply_adds)] for name, cost in costs.items()]
    return markdown_table(["Model", "Parameters", "Multiply-adds"], rows)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal; what is wider than `TEXT_WIDTH` continues below."""
    import pandas

    cells = [[one_line(cell) for cell in row] for row in rows]
    frame = pandas.DataFrame([row[1:] for row in cells], [row[0] for row in cells], [*map(one_line, header[1:])])
    return frame.rename_axis(columns=one_line(header[0])).to_string(line_width=TEXT_WIDTH)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A `<table>`."""
    import pandas

    return pandas.DataFrame(rows, columns=list(header)).to_html(index=False, border=0)


def to_markdown(sections: Sequence[Section]) -> str:
    """Sections with titles of the second level."""
    lines = []
    for title, parts in sections:
        lines.append(f"## {escape_markdown(title)}")
        for part in parts:
            # A name at the beginning of a sentence must not begin a heading or a list.
            is_table = not isinstance(part, str)
            sentence = "" if is_table else re.sub(r"^(\d*)([#+=.)-])", r"\1\\\2", escape_markdown(part))
            lines.append(markdown_table(*part) if is_table else sentence)
    return "\n\n".join(lines) + "\n"


def to_text(sections: Sequence[Section]) -> str:
    """The same for a terminal."""
    lines = []
    for title, parts in sections:
        lines += [title, *(one_line(part) if isinstance(part, str) else text_table(*part) for part in parts), ""]
    return "\n".join(lines).rstrip()


def to_html(sections: Sequence[Section]) -> str:
    """The same as elements of a page."""
    lines = []
    for title, parts in sections:
        lines.append(f"<h2>{html.escape(title)}</h2>")
        lines += [f"<p>{html.escape(part)}</p>" if isinstance(part, str) else html_table(*part) for part in parts]
    return "\n".join(lines)


def html_page(title: str, sections: Sequence[Section], pictures: Mapping[str, bytes]) -> str:
    """A page in one file: the first section and picture, then the others (file name without .png -> content)."""
    head = f'<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>'
    figures = []
    for name, png in pictures.items():
        caption = html.escape(name.replace("_", " ").capitalize().replace("Roc ", "ROC curve, "))
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        figures.append(f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" src="{source}"></figure>')
    lines = [
        f"<h1>{html.escape(title)}</h1>",
        to_html(sections[:1]),
        *figures[:1],
        to_html(sections[1:]),
        *figures[1:],
    ]
    body = "\n".join(lines)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'
