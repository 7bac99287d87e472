"""How docstrings become pages: as an extension of Griffe this lets the reference show what the source says plainly.

Many docstrings describe arguments without a heading, as `name: what it is` in a paragraph of their own; they are given one.
"""

import re
from typing import Any

from griffe import Class, Docstring, Extension, Function


ARGUMENTS = re.compile(r"( *)(\w+(?:, \w+)*): ")
TYPED = re.compile(r"^ +\w+ \(`[^\n]*\):$", re.MULTILINE)  # name (`int`, *optional*): as Transformers writes it
REFERENCE = re.compile(r"\[(`\w+`)\](?![(\[])")  # [`ViTConfig`], likewise


class PlainDocstrings(Extension):
    """Gives `name: what it is` a heading, where `name` is an argument or a field."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        tidy(func.docstring, {parameter.name.lstrip("*") for parameter in func.parameters}, "Args")

    def on_class(self, *, cls: Class, **_: Any) -> None:
        start = cls.members.get("__init__")
        of_start = {each.name for each in getattr(start, "parameters", ())}
        tidy(cls.docstring, {*cls.members, *of_start}, "Attributes" if start is None else "Args")


def tidy(docstring: Docstring | None, names: set[str], heading: str) -> None:
    if docstring is not None:
        docstring.value = with_headings(docstring.value, names, heading)


def with_headings(text: str, names: set[str], heading: str) -> str:
    """`text` with "Args:" above a paragraph of arguments, "Examples:" for "Example:", and Transformers' marks made plain."""
    text = TYPED.sub(lambda found: re.sub("[`*]", "", found[0]), REFERENCE.sub(r"\1", text))
    paragraphs = re.sub(r"^Example:$(?=\n +)", "Examples:", text, flags=re.MULTILINE).split("\n\n")
    return "\n\n".join(_one_each(_under_heading(each, names, heading), names) for each in paragraphs)


def _under_heading(paragraph: str, names: set[str], heading: str) -> str:
    found = ARGUMENTS.match(paragraph)
    if not found or found[1] or not set(found[2].split(", ")) <= names:
        return paragraph
    return f"{heading}:\n" + "\n".join(f"    {line}" for line in paragraph.splitlines())


def _one_each(paragraph: str, names: set[str]) -> str:
    """`a, b: what they are` as an entry for each."""
    lines = []
    for line in paragraph.splitlines():
        found = ARGUMENTS.match(line)
        first, *others = found[2].split(", ") if found else [""]
        if others and {first, *others} <= names:
            lines += [f"{found[1]}{other}: see `{first}`." for other in others]
            line = f"{found[1]}{first}: {line[found.end() :]}"
        lines.append(line)
    return "\n".join(lines)
