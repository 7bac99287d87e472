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
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.8em 0; }
table { display: block; overflow-x: auto; }
th, td { padding: 0.25em 0.7em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } figure { margin: 1.5em 0; } figcaption { color: #555; }
.rows { display: flex; flex-wrap: wrap; gap: 1em; }
.row { margin: 0; width: 15em; } .row img { width: 8em; image-rendering: pixelated; }
.row blockquote { margin: 0 0 0.4em; padding: 0.4em 0.7em; background: #f4f4f4; overflow-wrap: anywhere; }
"""


def escape_markdown(text: str) -> str:
    """Return the text on one line, with everything escaped that markdown would read as markup.

    That is HTML, links, emphasis, code and the borders of cells.

    Example:
        >>> print(escape_markdown("a|b <i>[x](y)</i> *z* snake_case"))
        a\\|b &lt;i&gt;\\[x\\](y)&lt;/i&gt; \\*z\\* snake_case
    """
    text = one_line(text)
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    text = text.replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def one_line(text: str) -> str:
    """Replace line ends and control characters, which could write elsewhere in a terminal."""
    characters = []
    for character in text:
        if not character.isprintable():
            character = " "
        characters.append(character)
    return "".join(characters).strip()


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in markdown: the first column to the left, the others to the right.

    pandas would need another package, tabulate, and escapes nothing.

    Example:
        >>> print(markdown_table(["Model", "Accuracy"], [["a|b", "91.2"], ["plain", "90.1"]]))
        | Model | Accuracy |
        | --- | --: |
        | a\\|b | 91.2 |
        | plain | 90.1 |
    """
    rules = ["---"] + ["--:"] * (len(header) - 1)
    lines = [[escape_markdown(title) for title in header], rules]
    for row in rows:
        lines.append([escape_markdown(cell) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cost_table(costs: Mapping[str, Cost]) -> str:
    """Return the costs of models as a table in markdown.

    Args:
        costs (`dict`): what `compare_costs` returns.
    """
    rows = [[name, f"{cost.parameters:,}", readable_count(cost.multiply_adds)] for name, cost in costs.items()]
    return markdown_table(["Model", "Parameters", "Multiply-adds"], rows)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal; what is wider than `TEXT_WIDTH` continues below."""
    import pandas

    first_title, *titles = [one_line(title) for title in header]
    names = [one_line(row[0]) for row in rows]
    cells = [[one_line(cell) for cell in row[1:]] for row in rows]
    frame = pandas.DataFrame(cells, index=names, columns=titles)
    return frame.rename_axis(columns=first_title).to_string(line_width=TEXT_WIDTH)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a `<table>`, its cells escaped."""
    import pandas

    return pandas.DataFrame(rows, columns=list(header)).to_html(index=False, border=0)


def to_markdown(sections: Sequence[Section]) -> str:
    """Return sections as markdown, with titles of the second level."""
    lines = []
    for title, parts in sections:
        lines.append(f"## {escape_markdown(title)}")
        for part in parts:
            if isinstance(part, str):
                # A name at the beginning of a sentence must not begin a heading or a list.
                lines.append(re.sub(r"^(\d*)([#+=.)-])", r"\1\\\2", escape_markdown(part)))
            else:
                lines.append(markdown_table(*part))
    return "\n\n".join(lines) + "\n"


def to_text(sections: Sequence[Section]) -> str:
    """Return sections as text for a terminal."""
    lines = []
    for title, parts in sections:
        lines.append(title)
        for part in parts:
            if isinstance(part, str):
                lines.append(one_line(part))
            else:
                lines.append(text_table(*part))
        lines.append("")
    return "\n".join(lines).rstrip()


def to_html(sections: Sequence[Section]) -> str:
    """Return sections as elements of a page."""
    lines = []
    for title, parts in sections:
        lines.append(f"<h2>{html.escape(title)}</h2>")
        for part in parts:
            if isinstance(part, str):
                lines.append(f"<p>{html.escape(part)}</p>")
            else:
                lines.append(html_table(*part))
    return "\n".join(lines)


def html_page(
    title: str, sections: Sequence[Section], pictures: Mapping[str, bytes], about: Sequence[str] = (), more: str = ""
) -> str:
    """Return a page in one file: the first section and picture, then the others.

    Args:
        title (`str`): of the page.
        sections (`Sequence[Section]`): what it says.
        pictures (`Mapping[str, bytes]`): file name without .png -> content.
        about (`Sequence[str]`, *optional*): sentences below the title.
        more (`str`, *optional*): elements that follow the pictures, as HTML.
    """
    head = f'<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>'
    figures = []
    for name, png in pictures.items():
        caption = html.escape(name.replace("_", " ").capitalize().replace("Roc ", "ROC curve, "))
        content = base64.b64encode(png).decode()
        source = f"data:image/png;base64,{content}"
        figures.append(f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" src="{source}"></figure>')
    lines = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in about),
        to_html(sections[:1]),
        *figures[:1],
        to_html(sections[1:-1]),
        *figures[1:],
        more,
        to_html(sections[-1:]),
    ]
    body = "\n".join(lines)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'
