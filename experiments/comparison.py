"""Does a Hydra keep its promise on real data? Members of several fine-tunings, and the paper's comparison (tables 1, 2, 9,
10, 11), from raw data to tables.

    python -m experiments --workers 6                                           # both pre-trained models, from the Hub
    python -m experiments --settings sst2-gte --data DIR --start sst2-gte=FOLDER    # or from files
    python -m experiments --settings sst2                                       # the paper's own, from the Hub
    python -m experiments --settings imagenet1k cifar100 --data OPENOOD         # and with OpenOOD's images
    python -m experiments --settings tinyimagenet-dinov2 --groups trunk    # one group more, beside the results that are there
    python -m experiments --tables                                              # tables from the results files
    python -m experiments --smallest                                            # does it run? made-up data

DIR holds plain files (see local_files.py), OPENOOD what OpenOOD's benchmark downloads. The work is cut into units
(a backbone, a circuit, a member, ...) which `--workers` processes per setting take one after the other. Stop it at any time,
or let it stop after `--stop-after` seconds: started again, it goes on with what lies in `--runs`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hydra_transformers._io.files import write_atomically

from .figures import of_other_states
from .methods import Comparison
from .pretrained import PRETRAINED
from .results import gather, results_file, write_results
from .settings import SETTINGS, Setting
from .smallest import SMALLEST
from .tables import write_tables
from .units import GROUPS, Queue, Unit, units_of


HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
TRIES = 3  # of each worker at a unit for which there is no memory
PAGES = [
    page
    for page in (
        HERE.parent / "README.md",
        DOCS / "figures.md",
        DOCS / "results.md",
        *sorted((DOCS / "results").glob("*.md")),
    )
    if "<!-- table: " in page.read_text()
]


def work(name: str, args: argparse.Namespace) -> None:
    """A worker: takes units of one setting until none is left."""
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    setting = chosen_setting(name, args)
    folder = args.runs / name
    queue = Queue(folder, units_to_do(setting, args))
    splits = setting.read(args.data, setting.start).to(args.device)
    comparison = Comparison(setting, splits, folder, args.device, args.seeds, args.backbones)
    do_units(queue, comparison.run)


def do_units(queue: Queue, run: Callable[[Unit], None], pause: float = 5.0) -> None:
    """Runs units until none is left. One that finds no memory on the GPU, because other workers hold it, is tried again after
    `pause` seconds."""
    tries: Counter[Unit] = Counter()
    while queue.left():
        unit = queue.take()
        if unit is None:
            time.sleep(1)
            continue
        start, has_no_memory = time.time(), False
        try:
            run(unit)
        except Exception as error:
            traceback.print_exc()
            tries[unit] += 1
            has_no_memory = isinstance(error, torch.cuda.OutOfMemoryError) and tries[unit] < TRIES
            if not has_no_memory:
                queue.mark(unit, "failed")
        else:
            queue.mark(unit, "done")
            print(f"{time.strftime('%H:%M:%S')} {unit}: {time.time() - start:.0f} s", flush=True)
        torch.cuda.empty_cache()  # for the other workers
        if has_no_memory:
            queue.give_back(unit)
            time.sleep(pause)


def run_workers(args: argparse.Namespace) -> list[str]:
    """Starts the workers of all settings and waits for them; returns a line on each that broke off, and on what is left."""
    processes, queues = {}, []
    for name in args.settings:
        queues.append(Queue(args.runs / name, units_to_do(chosen_setting(name, args), args)))
        queues[-1].folder.mkdir(parents=True, exist_ok=True)
        check_numbers(queues[-1].folder, {"seeds": args.seeds, "backbones": args.backbones})
        queues[-1].start_again()
        for index in range(args.workers):
            log = queues[-1].folder / f"worker-{index}.log"
            command = [sys.executable, "-m", "experiments", *sys.argv[1:], "--runs", str(args.runs), "--worker", name]
            with log.open("a") as stream:
                processes[log] = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    deadline = time.time() + args.stop_after
    while any(process.poll() is None for process in processes.values()) and time.time() < deadline:
        time.sleep(0.5)
    broken = [log for log, process in processes.items() if process.poll()]
    for process in processes.values():
        process.terminate()
        process.wait()
    lines = [f"{log}: {log.read_text().strip().splitlines()[-1]}" for log in broken]
    for queue in queues:
        failed = [str(unit) for unit in queue.units if queue.is_marked(unit, "failed")]
        lines += [f"{queue.folder}: failed: {', '.join(failed)} (see its worker logs)"] if failed else []
        left = sum(not queue.is_marked(unit, "done") for unit in queue.units)
        lines += [f"{queue.folder}: {left} of {len(queue.units)} units are left, start again to go on"] if left else []
    return lines


def check_numbers(folder: Path, numbers: dict[str, int]) -> None:
    """Which backbones make up a Deep Ensemble depends on them: a folder is for one choice of both."""
    path = folder / "numbers.json"
    found = json.loads(path.read_text()) if path.exists() else numbers
    for name, number in numbers.items():
        if found[name] != number:
            sys.exit(f"{folder} was begun with --{name} {found[name]}, not {number}: pass that, or another --runs")
    write_atomically(path, json.dumps(numbers))


def chosen_setting(name: str, args: argparse.Namespace) -> Setting:
    """The setting, with what the arguments say in place of its own."""
    if args.smallest:
        return SMALLEST
    setting = SETTINGS[name]
    given = dict(each.split("=", 1) for each in args.start)
    setting = replace(setting, start=given[name]) if name in given else setting
    return setting if args.groups is None else replace(setting, groups=tuple(args.groups))


def units_to_do(setting: Setting, args: argparse.Namespace) -> dict[Unit, list[Unit]]:
    """All units; of chosen groups those that they need."""
    units = units_of(setting, args.seeds, args.backbones)
    if args.groups is None:
        return units
    needed = {each for unit, needs in units.items() if unit.kind == "judge" for each in (unit, *needs)}
    return {unit: needs for unit, needs in units.items() if unit in needed}


def run_smallest(args: argparse.Namespace) -> None:
    """The whole comparison on a stand-in: nothing outside a temporary folder is read or written, the tables are printed."""
    with tempfile.TemporaryDirectory() as folder:
        args.runs = Path(folder)
        problems = run_workers(args)
        if problems:
            logs = [log.read_text()[-3000:] for log in sorted(args.runs.glob("*/worker-*.log"))]
            sys.exit("\n".join(logs + problems))
        results = args.runs / "results"
        write_results(gather(args.runs / SMALLEST.name, args.device), results_file(results, SMALLEST.name))
        write_tables(results, [], {SMALLEST.name: SMALLEST})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(PRETRAINED), choices=list(SETTINGS))
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=list(GROUPS),
        help="compare only these, and leave what the results files have of others (default: all of a setting)",
    )
    parser.add_argument("--data", type=Path, help="a folder of plain files, or OpenOOD's folder")
    parser.add_argument("--start", nargs="+", default=[], metavar="SETTING=MODEL", help="what backbones start from")
    parser.add_argument("--seeds", type=int, default=3, help="how many backbones are pruned and compared")
    parser.add_argument("--backbones", type=int, default=9, help="how many are trained; 3 per seed: none is shared")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes per setting")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where work in progress lies")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results files")
    parser.add_argument(
        "--pages", type=Path, nargs="*", default=PAGES, help="whose tables are renewed; none: print them"
    )
    parser.add_argument("--tables", action="store_true", help="only renew the tables, from the results files")
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="one seed of a tiny model on made-up data, and tables printed: shows that it runs, writes nothing",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smallest:
        args.settings, args.seeds, args.backbones = [SMALLEST.name], 1, 3
    if args.backbones < max(3, args.seeds):
        parser.error(f"--backbones is {args.backbones}: a Deep Ensemble has 3, and every seed has its own")
    if args.smallest and args.groups:
        parser.error("--groups: --smallest runs all of them, leave one of both out")
    for name in args.settings:
        strange = [group for group in args.groups or () if group not in SETTINGS[name].groups]
        if strange:
            parser.error(f"--groups: {name} has no {strange[0]}, pass some of {', '.join(SETTINGS[name].groups)}")
    unknown = [each for each in args.start if each.partition("=")[0] not in SETTINGS or "=" not in each]
    if unknown:
        parser.error(f"--start is {unknown[0]}: pass SETTING=MODEL, with a setting of {', '.join(SETTINGS)}")
    missing = [page for page in args.pages if not page.is_file()]
    if missing:
        parser.error(
            f"--pages: there is no {missing[0]}, pass pages with marked places for tables, or none to print them"
        )
    if args.worker:
        return work(args.worker, args)
    if args.smallest:
        return run_smallest(args)
    if args.tables and not args.results.exists():
        parser.error(f"--results: there is no {args.results}, run the comparison first")
    if not args.tables:
        problems = run_workers(args)
        for name in args.settings:
            write_results(gather(args.runs / name, args.device), results_file(args.results, name), args.groups)
        if problems:
            sys.exit("\n".join(problems))
    try:
        write_tables(args.results, args.pages, pictures=DOCS / "images" if args.pages == PAGES else None)
    except ValueError as error:
        sys.exit(f"{error}; pass --pages without any to print the tables of {args.results}")
    for command in of_other_states() if args.pages == PAGES else ():
        print(f"made by another state of the package: {command}", file=sys.stderr)
