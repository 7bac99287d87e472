"""Runs the tables and figures of the paper (arXiv 2510.18358).

    python -m experiments.paper --list                                     # what each table is made of and needs
    python -m experiments.paper --table 1 --data OPENOOD --workers 4       # ImageNet-1K and CIFAR-100, days on a GPU
    python -m experiments.paper --table 2 --setting sst2-gte --data DIR    # with a small model: minutes
    python -m experiments.paper --table 2 --smallest                       # does it run? tiny models, made-up data
    python -m experiments.paper --tables                                   # docs/results/paper.md from the results
    python -m experiments --tables                                         # and those beside the paper's numbers

DIR/data and DIR/weights hold plain files (see experiments/local_files.py) and pre-trained models; what is not there comes
from the Hub. Each method's numbers with each seed go to RUNS/SETTING/results/SEED/METHOD.json, and all of them to one
file for each setting in `--results`. Stop it at any time: started again, it goes on with what lies in `--runs`.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from hydra_transformers._io.files import write_atomically

from ..results import gather, results_file, write_results
from .figures import FIGURES
from .studies import SETTINGS, new_study, smallest_of
from .study import RESULTS
from .tables import PAPER_RESULTS, SHIFTED_TABLES, TABLES, page, read_paper_results, render
from .work import do_all


RUNS = Path("runs/paper")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "paper.md"


COST_TABLE = 7
COST_FIGURE = 3
COST = f"Table {COST_TABLE} and figure {COST_FIGURE}: python benchmarks/inference_cost.py --paper"


def what_is_asked(args: argparse.Namespace) -> list[tuple[str, list[str], bool]]:
    """Return (setting, methods, whether corrupted data are judged, too) of the table or figure."""
    found = []
    if args.figure is not None:
        figure = FIGURES[args.figure]
        for name in args.setting or figure.settings:
            found.append((name, list(figure.methods(SETTINGS[name], args.smallest)), False))
        return found
    table = TABLES[args.table]
    for name in args.setting or table.settings:
        found.append((name, list(args.methods or table.rows(SETTINGS[name])), args.table in SHIFTED_TABLES))
    return found


def run(args: argparse.Namespace, name: str, methods: list[str], with_shift: bool) -> list[str]:
    """Do the work of one setting and write its results file; return a line on each part that failed or is left."""
    make = partial(new_study, name, args.smallest, args.data, args.runs, args.device)
    study = make()
    goals = study.goals(methods, args.seeds, with_shift)
    plan = study.plan(goals)
    lines = do_all(list(plan), plan.__getitem__, make, args.workers, args.stop_after)
    collected = gather(study.folder, args.device) | {"learning_rates": tried_rates(study.folder)}
    write_results(collected, results_file(args.results, name))
    return lines


def tried_rates(folder: Path) -> dict[str, dict[str, float]]:
    """Return {"member" or "backbone": {rate: accuracy}}."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted((folder / "rates").glob("rate-0-*.json")):
        of, rate = path.stem.removeprefix("rate-0-").split("-rate")
        found.setdefault(of, {})[rate] = json.loads(path.read_text())["accuracy"]
    return found


def show(args: argparse.Namespace, name: str) -> None:
    """Print the table, or draw the figure."""
    setting = smallest_of(SETTINGS[name]) if args.smallest else SETTINGS[name]
    content = json.loads(results_file(args.results, name).read_text())
    if args.figure is not None:
        from .pictures import draw  # needs matplotlib

        print(draw(FIGURES[args.figure], setting, content["seeds"], args.results))
        return
    table = TABLES[args.table]
    print(f"Table {table.number}: {table.title} ({setting.title})\n")
    print(render(table, setting, content["seeds"]))


def list_all() -> None:
    for table in TABLES.values():
        print(f"--table {table.number}: {table.title}. Settings: {', '.join(table.settings)}.")
    for figure in FIGURES.values():
        print(f"--figure {figure.number}: {figure.title}. Settings: {', '.join(figure.settings)}.")
    print(COST)
    for setting in SETTINGS.values():
        stands_in = "" if setting.paper == setting.name else f" In place of {setting.paper}."
        print(f"\n--setting {setting.name}: {setting.title}.{stands_in} {setting.about}")


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--table", type=int, choices=sorted([*TABLES, COST_TABLE]))
    what.add_argument("--figure", type=int, choices=sorted([*FIGURES, COST_FIGURE]))
    what.add_argument("--list", action="store_true", help="what each table and setting needs")
    what.add_argument("--tables", action="store_true", help="write docs/results/paper.md")
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, help="by default the table's own")
    parser.add_argument("--methods", nargs="+", help="some of the table's rows")
    parser.add_argument("--data", type=Path, help="the folder of files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="processes; 0 for none but this one")
    parser.add_argument("--stop-after", type=float, help="seconds after which the work stops, and can go on later")
    parser.add_argument("--device", help="by default a GPU where there is one; for --smallest the CPU")
    parser.add_argument("--runs", type=Path, help=f"where work in progress lies, by default {RUNS}")
    parser.add_argument("--results", type=Path, help="the folder of the results files and figures")
    parser.add_argument("--smallest", action="store_true", help="tiny models, made-up data, one seed; tables printed")
    args = parser.parse_args(words)
    if args.smallest:
        args.seeds = 1
        args.workers = 0
    if args.device is None:
        has_gpu = torch.cuda.is_available() and not args.smallest
        args.device = "cuda" if has_gpu else "cpu"
    check_settings(parser, args)
    return args


def check_settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error where a setting has no such table or figure."""
    asked = TABLES.get(args.table) or FIGURES.get(args.figure)
    if asked is None:
        return
    tasks = {SETTINGS[name].task for name in asked.settings}
    fitting = [name for name, setting in SETTINGS.items() if setting.task in tasks]
    for name in args.setting or []:
        if name not in fitting:
            parser.error(f"--setting {name} has another task than this table or figure: pass {', '.join(fitting)}")


def main(words: list[str] | None = None) -> None:
    args = parsed(words)
    if args.list:
        list_all()
        return
    if args.table == COST_TABLE or args.figure == COST_FIGURE:
        print(f"Costs are measured by another command. {COST}")
        return
    with tempfile.TemporaryDirectory() as folder:
        # What made-up data give is not kept, unless a folder is named.
        args.runs = args.runs or (Path(folder) / "runs" if args.smallest else RUNS)
        args.results = args.results or (Path(folder) / RESULTS if args.smallest else PAPER_RESULTS)
        if args.tables:
            write_atomically(PAGE, page(read_paper_results(args.results)))
        else:
            run_and_show(args)


def run_and_show(args: argparse.Namespace) -> None:
    lines = []
    for name, methods, with_shift in what_is_asked(args):
        lines += run(args, name, methods, with_shift)
        if results_file(args.results, name).exists():
            show(args, name)
    if lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
