"""Renews the tables of the pages from the results files, and names those that another state of the package made:

python -m experiments --tables
"""

import argparse
import sys

from .figures import of_other_states
from .tables import write_pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", required=True)
    parser.parse_args()
    write_pages()
    for command in of_other_states():
        print(f"made by another state of the package: {command}", file=sys.stderr)


if __name__ == "__main__":
    main()
