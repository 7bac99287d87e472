"""`python -m hydra_transformers.demo` runs `hydra-transformers demo`."""

import sys

from ..cli import main


if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
