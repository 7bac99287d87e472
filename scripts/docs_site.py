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
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """README.md and its like, and all pages of docs/."""
    return [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Targets of a page's links within the repository, and their anchors ("" where there is none)."""
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        yield target, anchor.removeprefix("#")


def site_files() -> list[Path]:
    """The pages, and whatever they link to, and what that links to."""
    found, to_read = set(), pages()
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
    """A link to a folder is for those who look at the repository; the site has its text."""
    here = Path(page.file.abs_src_path).parent
    return re.sub(
        r"\[([^]]+)\]\((?!https?:)([^)#]+)\)", lambda link: link[1] if (here / link[2]).is_dir() else link[0], markdown
    )
