"""Runs the first example of README.md and the demo on the installed package, outside of the repository.

python -m venv fresh && fresh/bin/pip install "$(echo dist/*.whl)[demo]"
fresh/bin/python scripts/check_installed.py     # two minutes; --fast: a demo of a few steps
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).with_name("hydra-transformers")
WHERE = "import hydra_transformers; print(hydra_transformers.__file__)"


def first_example() -> str:
    """The first block of README.md that runs without a download."""
    return re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="a demo of a few steps")
    is_fast = parser.parse_args().fast
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:

        def run(*words: object, **options: object) -> str:
            return subprocess.run([*words], cwd=folder, env=environment, check=True, text=True, **options).stdout

        place = Path(run(sys.executable, "-c", WHERE, stdout=subprocess.PIPE).strip())
        if place.is_relative_to(ROOT / "hydra_transformers"):
            raise SystemExit(f"{place} is the repository's: install a wheel, not the repository")
        print(f"The package is {place.parent}")
        run(COMMAND, "--version")
        run(sys.executable, "-c", first_example())
        run(COMMAND, "demo", *(["--fast"] if is_fast else []))


if __name__ == "__main__":
    main()
