"""`python -m hydra_transformers.demo`, which is also `hydra-transformers demo`."""

import argparse
import os
import sys
from pathlib import Path

from ..cli import quiet_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the results")
    parser.add_argument("--train", action="store_true", help="pre-train the model, too, instead of loading it")
    parser.add_argument("--fast", action="store_true", help="a few steps of everything: quick, and worth nothing else")


def run(arguments: argparse.Namespace) -> None:
    """The demo on one thread, so that sums have one order and every run the same figures."""
    import torch

    from .story import FAST, FULL, tell

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tell(arguments.output, FAST if arguments.fast else FULL, arguments.train)
    finally:
        torch.set_num_threads(threads)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hydra_transformers.demo", description="The whole story on digits."
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with quiet_libraries():
            run(arguments)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
