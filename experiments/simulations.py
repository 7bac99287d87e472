"""The command of a simulation: all its cases, written to one results file."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import where_it_ran
from hydra_transformers._io.files import write_atomically


def run_cases(
    description: str | None,
    what: str,
    cases: Sequence[Any],
    summarize: Callable[[Any, int], dict[str, Any]],
    arguments: Sequence[str] | None = None,
) -> None:
    """Summarize each case over `--draws` draws, and write what was found to `--output`.

    what: the name of the simulation in its results file, by which its table is found
    summarize: (case, draws) -> what is written of the case
    arguments: of the command line, by default those of the process
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = []
    for case in cases:
        found.append(summarize(case, options.draws))
        print(json.dumps(found[-1]), flush=True)
    content = {"machine": where_it_ran("cpu"), "what": what, "cases": found}
    write_atomically(options.output, json.dumps(content, indent=1) + "\n")
