"""Write the description for PyPI: README.md for readers who do not have the repository at hand.

Everything else about the package is in pyproject.toml. With REPOSITORY_URL in the environment,
which the release workflow sets, links lead to the files of the repository at the tag of this
version; without it they become plain text.
"""

import os
import re
from pathlib import Path

from setuptools import setup


ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")
PICTURE = re.compile(r'<picture>.*?<img alt="([^"]+)" src="([^"]+)">\s*</picture>', re.DOTALL)
IN_A_CLONE = ("Clone this repository, then:", 'pip install ".[demo]"')
PUBLISHED = ("To try it:", 'pip install "hydra-transformers[demo]"')


def version() -> str:
    return re.search(
        r'__version__ = "(.+)"', (ROOT / "hydra_transformers" / "_version.py").read_text(encoding="utf-8")
    )[1]


def description(repository: str | None) -> str:
    """README.md with links that work anywhere, and the way to install what is published."""

    def elsewhere(link: re.Match[str]) -> str:
        is_picture, text, target = link.groups()
        if repository is None:
            return "" if is_picture else text
        return f"{is_picture}[{text}]({repository}/{'raw' if is_picture else 'blob'}/v{version()}/{target})"

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for here, there in zip(IN_A_CLONE, PUBLISHED, strict=True):
        page = page.replace(here, there)
    page = PICTURE.sub(r"![\1](\2)", page)  # PyPI's page is light
    return LINK.sub(elsewhere, page)


if __name__ == "__main__":
    url = os.environ.get("REPOSITORY_URL")
    pages = {} if url is None else {"Repository": url, "Changes": f"{url}/blob/v{version()}/CHANGELOG.md"}
    setup(long_description=description(url), long_description_content_type="text/markdown", project_urls=pages)
