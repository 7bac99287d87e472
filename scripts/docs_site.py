"""What the site of `make docs` is made of: the pages of the repository where they lie, and every file that they link to.

MkDocs knows a folder of pages; ours link to README.md, to figures in benchmarks/ and to notebooks as well. As a hook of
MkDocs this gives each its place in the repository, so that one link serves both the site and the repository.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<words>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>'
)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """README.md and its like, and all pages of docs/."""
    return [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Targets of a page's links within the repository, and their anchors ("" where there is none)."""
    words = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in LINK.findall(words):
        yield target, anchor.removeprefix("#")
    for picture in PICTURE.finditer(words):
        yield picture["light"], ""
        yield picture["dark"], ""


def site_files() -> list[Path]:
    """The pages, and whatever they link to, and what that links to."""
    found = set()
    to_read = pages()
    while to_read:
        path = to_read.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        if path.suffix == ".md":
            to_read += [(path.parent / target).resolve() for target, _ in links(path)]
    return sorted(found)


# Hooks of MkDocs


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for file in list(files):
        if file.generated_by is None and Path(file.abs_src_path or "").is_relative_to(config.docs_dir):
            files.remove(file)
    for path in [*site_files(), ROOT / "docs" / "site.css"]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show the picture that fits the site's light or dark look, and the text alone of a link to a folder.

    In the repository a picture follows the reader's system; the site has a switch of its own.
    """
    here = Path(page.file.abs_src_path).parent
    markdown = PICTURE.sub(r"![\g<words>](\g<light>#only-light)\n![\g<words>](\g<dark>#only-dark)", markdown)
    return re.sub(
        r"\[([^]]+)\]\((?!https?:)([^)#]+)\)", lambda link: link[1] if (here / link[2]).is_dir() else link[0], markdown
    )
