"""The parts of a report (titles, sentences, tables) as markdown, as text for a terminal and as an HTML page."""

import base64
import re
import textwrap
from collections.abc import Mapping, Sequence

from .table import TEXT_WIDTH, Table, escape_html, escape_markdown
from .tables import Part, Title


# Everything a page needs is in it: no font, script, picture or style comes from elsewhere.
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; } h3 { font-size: 1.05em; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.8em 0; }
th, td { padding: 0.25em 0.7em; border-bottom: 1px solid #ddd; text-align: right; }
td { white-space: nowrap; } td[style*="left"] { white-space: normal; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } figure { margin: 1.5em 0; } figcaption { color: #555; }
"""


def to_markdown(parts: Sequence[Part]) -> str:
    return "\n\n".join(map(_markdown, parts)) + "\n"


def _markdown(part: Part) -> str:
    if isinstance(part, Table):
        return part.markdown()
    if isinstance(part, Title):
        return f"{'#' * part.level} {escape_markdown(part.text)}"
    # A name at the beginning of a line must not begin a heading or a list.
    return re.sub(r"^(\d*)([#+=.)-])", r"\1\\\2", escape_markdown(part))


def to_text(parts: Sequence[Part]) -> str:
    return "\n".join(_text(part) for part in parts).rstrip()


def _text(part: Part) -> str:
    if isinstance(part, Title):
        return part.text
    return f"{part if isinstance(part, Table) else textwrap.fill(part, TEXT_WIDTH)}\n"


def to_html_parts(parts: Sequence[Part]) -> str:
    return "\n".join(map(_html, parts))


def html_page(title: str, parts: Sequence[Part], pictures: Mapping[str, bytes]) -> str:
    """One file that needs no other: the parts, then pictures (title -> PNG)."""
    figures = [_html_picture(name, png) for name, png in pictures.items()]
    head = f'<meta charset="utf-8">\n<title>{escape_html(title)}</title>\n<style>{STYLE}</style>'
    body = "\n".join([f"<h1>{escape_html(title)}</h1>", to_html_parts(parts), *figures])
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _html(part: Part) -> str:
    if isinstance(part, Table):
        return part.html()
    if isinstance(part, Title):
        return f"<h{part.level}>{escape_html(part.text)}</h{part.level}>"
    return f"<p>{escape_html(part)}</p>"


def _in_words(name: str) -> str:
    """The caption for a picture by the name of its file."""
    words = name.replace("_", " ")
    return f"ROC curve, {words[4:]}" if words.startswith("roc ") else words[:1].upper() + words[1:]


def _html_picture(title: str, png: bytes) -> str:
    title, content = escape_html(_in_words(title)), base64.b64encode(png).decode()
    return (
        f'<figure><figcaption>{title}</figcaption><img alt="{title}" src="data:image/png;base64,{content}"></figure>'
    )
