"""The paper's comparison on pre-trained models (tables 1, 2, 9 to 14), from raw data to tables: Hydras whose members are pruned from
one model, and what they are compared with.

    python -m experiments --workers 3                                               # both settings, from the Hub
    python -m experiments --settings sst2-gte --data DIR --start sst2-gte=FOLDER    # or from files
    python -m experiments --settings sst2-gte --rate 0.5                            # all learning rates halved, for a sweep
    python -m experiments --tables                                                  # tables from the results files
    python -m experiments --smallest                                                # does it run? made-up data

DIR holds plain files (see local_files.py). A process does all the work of a seed, up to `--workers` of them at a time. Stopped and
started again, it goes on with what lies in `--runs`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from .figures import of_other_states
from .methods import Comparison
from .pretrained import SETTINGS
from .results import RESULTS, gather, results_file, write_results
from .setting import Setting
from .smallest import SMALLEST
from .tables import print_tables, write_pages


def run_seeds(setting: Setting, args: argparse.Namespace, seeds: list[int]) -> None:
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    splits = setting.read(args.data, setting.start).to(args.device)
    for seed in seeds:
        began = time.time()
        Comparison(setting, splits, args.runs / setting.name, args.device).run_seed(seed)
        print(f"{setting.name}, seed {seed}: {time.time() - began:.0f} s", flush=True)


def run_workers(module: str, args: argparse.Namespace) -> None:
    """A process per seed, `--workers` at a time; ends with an error if one did."""
    waiting, running, failed = list(range(args.seeds)), {}, []
    while waiting or running:
        while waiting and len(running) < args.workers:
            seed = waiting.pop(0)
            command = [sys.executable, "-m", module, *sys.argv[1:], "--seed", str(seed)]
            running[seed] = subprocess.Popen(command)
        time.sleep(0.5)
        for seed, process in list(running.items()):
            if process.poll() is not None:
                failed += [seed] if process.returncode else []
                del running[seed]
    if failed:
        sys.exit(f"seeds {', '.join(map(str, failed))} did not finish: see above; started again, what is done stays")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all comparisons take."""
    parser.add_argument("--data", type=Path, help="a folder of plain files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="do the work of this seed only, and write no results")
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where work in progress lies")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results files")
    parser.add_argument(
        "--smallest", action="store_true", help="a tiny model on made-up data, and tables printed: shows that it runs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--start", nargs="+", default=[], metavar="SETTING=MODEL", help="what backbones start from")
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies all learning rates")
    parser.add_argument("--tables", action="store_true", help="only renew the tables of the pages")
    add_options(parser)
    args = parser.parse_args()
    starts = dict(words.split("=", 1) for words in args.start if "=" in words)
    unknown = [words for words in args.start if words.partition("=")[0] not in SETTINGS or "=" not in words]
    if unknown:
        parser.error(f"--start is {unknown[0]}: pass SETTING=MODEL, with a setting of {', '.join(SETTINGS)}")
    if args.smallest:
        with tempfile.TemporaryDirectory() as folder:
            args.runs = args.results = Path(folder)
            run_seeds(SMALLEST, args, [0])
            write_results(gather(args.runs / SMALLEST.name, args.device), results_file(args.results, SMALLEST.name))
            return print_tables(args.results)
    if args.tables:
        write_pages()
        for command in of_other_states():
            print(f"made by another state of the package: {command}", file=sys.stderr)
        return None
    settings = [replace(SETTINGS[name], start=starts.get(name, SETTINGS[name].start)) for name in args.settings]
    settings = [setting.at_rate(args.rate) for setting in settings]
    if args.seed is not None:
        for setting in settings:
            run_seeds(setting, args, [args.seed])
        return None
    run_workers("experiments", args)
    for setting in settings:
        write_results(gather(args.runs / setting.name, args.device), results_file(args.results, setting.name))
    return print_tables(args.results)
