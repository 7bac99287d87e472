"""Looks into a built sdist and wheel: everything that runs is in them, and nothing else.

python -m build && python scripts/check_package.py dist/*
python scripts/check_package.py --tag v0.2.0 dist/*      # the tag names the version that was built
"""

import argparse
import sys
import tarfile
import zipfile
from pathlib import Path


ROOT = Path(__file__).parents[1]
PACKAGE = "hydra_transformers"
IGNORED = {"__pycache__"}
BESIDE_IT = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"}
BESIDE_IT |= {"pyproject.toml", "setup.cfg", "setup.py"}


def expected_files() -> set[str]:
    """All files of the package, as the repository has them."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and not IGNORED & set(path.parts)
    }


def files_in(archive: Path) -> set[str]:
    """Names of the files in a wheel or an sdist, as they are in the repository."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as source:
        return {member.name.partition("/")[2] for member in source.getmembers() if member.isfile()}


def version_of(archive: Path) -> str:
    """hydra_transformers-0.2.0-py3-none-any.whl, hydra_transformers-0.2.0.tar.gz"""
    return archive.name.removeprefix(f"{PACKAGE}-").partition(".tar.gz")[0].partition("-")[0]


def problems(archive: Path, tag: str | None = None) -> list[str]:
    """What is wrong with an archive, a sentence each."""
    found = files_in(archive)
    expected = expected_files()
    is_wheel = archive.suffix == ".whl"
    metadata, expected = (".dist-info/", expected) if is_wheel else (".egg-info/", expected | BESIDE_IT)
    others = {name for name in found - expected if metadata not in name}
    told = [f"{archive.name} lacks {name}" for name in sorted(expected - found)]
    told += [f"{archive.name} has {name}, which does not belong there" for name in sorted(others)]
    if tag is not None and tag != f"v{version_of(archive)}":
        told.append(f"{archive.name} has another version than the tag {tag}: set __version__ in {PACKAGE}/_version.py")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archives", nargs="+", type=Path, metavar="FILE", help="an sdist or a wheel")
    parser.add_argument("--tag", help="refuse archives of another version: v0.2.0")
    arguments = parser.parse_args()
    told = [each for archive in arguments.archives for each in problems(archive, arguments.tag)]
    print("\n".join(told) or f"{len(arguments.archives)} archives are complete")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
