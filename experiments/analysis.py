"""Which heads see what, and how many can go, on the fine-tuned pre-trained models (docs/analysis.md).

    python -m experiments.analysis --setting tinyimagenet-dinov2 --data DIR --start FOLDER --results OUT
    python -m experiments.analysis --setting sst2-gte --data DIR --start FOLDER --results OUT --fine-tunings 2
    python -m experiments.analysis --setting sst2-gte ... --tuned-budgets 24 48      # and what fine-tuning brings back
    python -m experiments.analysis --results OUT --page docs/analysis.md             # the tables of a page
    python -m experiments.analysis --smallest                                        # does it run? made-up data

Fine-tunes the setting's model once (its folder in `--runs` is taken up again), extracts circuits, and writes for each setting
`OUT/SETTING/` with `report.md`, `results.json` and pictures. Heads are chosen on the rows that the setting has for circuits, and
judged on test rows.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import where_it_ran
from experiments.heads import HeadReport, analyse_heads, sweep_budgets
from experiments.heads.head_report import CIRCUITS, REPORT, RESULTS, TAYLOR, in_dtype
from hydra_transformers._io.files import parse_json, write_atomically
from hydra_transformers.pruning import extract_circuit, taylor_scores

from .methods import Comparison
from .pretrained import PRETRAINED
from .results import in_lines
from .rows import TensorRows
from .setting import Setting
from .settings import SETTINGS
from .smallest import SMALLEST
from .tables import MARKED, with_tables


JUDGED_ROWS, FOREIGN_ROWS = 2_000, 500  # of the test rows, and of each OOD set
NOISE_ROWS = 1_000  # of the test rows, for second derivatives
BATCH = 250
BUDGETS = 6  # up to half of the heads, as many steps; head sets are compared at a third


class Clock:
    """Says what is done, and how long the step before took."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.step = ""

    def tell(self, step: str) -> None:
        now = time.perf_counter()
        if self.step:
            self.seconds[self.step] = round(now - self.last, 1)
            print(f"  {now - self.last:.1f} s", flush=True)
        self.step, self.last = step, now
        if step:
            print(f"{now - self.start:6.1f} s  {step}", flush=True)


def drawn(rows: TensorRows, count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of at most `count` rows, drawn at random; texts of about the same length come together."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count].sort().values
    some = rows.part(order.to(next(iter(rows.tensors.values())).device))
    return (some.sorted_by_length() if "attention_mask" in some.tensors else some).batches(BATCH)


def analyse(setting: Setting, args: argparse.Namespace) -> tuple[HeadReport, dict[str, Any]]:
    """The report, and what else a results file has."""
    clock = Clock()
    clock.tell("data")
    splits = setting.read(args.data, setting.start).to(args.device)
    comparison = Comparison(setting, splits, args.runs / setting.name, args.device, 1, max(1, args.fine_tunings))
    clock.tell("fine-tuning")
    model = comparison.backbone(0)
    choosing = drawn(splits.circuit_id, len(splits.circuit_id)), drawn(splits.circuit_ood, len(splits.circuit_ood))
    dtype = setting.circuit_dtype if args.device == "cuda" else None
    heads = model.config.num_hidden_layers * model.config.num_attention_heads
    budget, others = heads // 3, {}
    for index in range(1, args.fine_tunings):
        clock.tell(f"fine-tuning {index}, its scores and circuit")
        other = comparison.backbone(index)
        scores = taylor_scores(other, choosing[0])
        others[f"{TAYLOR}, fine-tuning {index}"] = sorted(scores, key=scores.__getitem__)[:budget]
        others[f"{CIRCUITS['avg']}, fine-tuning {index}"] = extract_circuit(
            in_dtype(other, dtype), *choosing, "avg", budget=budget, mode=setting.circuit_mode
        )
    judged = drawn(splits.test, JUDGED_ROWS)
    foreign = {name: drawn(rows, FOREIGN_ROWS) for sets in splits.ood.values() for name, rows in sets.items()}
    report = analyse_heads(
        model,
        *choosing,
        judged,
        foreign,
        budget=budget,
        budgets=sorted({budget, *(max(1, heads * step // (2 * BUDGETS)) for step in range(1, BUDGETS + 1))}),
        other_head_sets=others,
        seconds=args.seconds,
        noise_rows=NOISE_ROWS,
        circuit_options={"mode": setting.circuit_mode},
        circuit_dtype=dtype,
        tell=clock.tell,
    )
    tuned = {}
    if args.tuned_budgets:
        clock.tell("fine-tuning after pruning")
        orders = {TAYLOR: taylor_scores(model, choosing[0]), CIRCUITS["avg"]: report.circuits["avg"]}
        sweep = sweep_budgets(
            model,
            judged,
            foreign,
            orders=orders,
            budgets=args.tuned_budgets,
            finetune=lambda pruned, name: comparison.finetune(
                pruned, comparison.folder / f"tuned-{name}", setting.member_recipe, setting.batch_size, seed=0
            ),
        )
        tuned = {"tuned": sweep.to_dict(), "tuned_tables": {"tuned": sweep.to_markdown().strip()}}
        sweep.plot(args.results / setting.name / "tuned")
    clock.tell("")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    notes = [
        f"{setting.title}. {sum(len(batch['labels']) for batch in judged):,} test rows and up to {FOREIGN_ROWS} of each "
        f"OOD set, on {device}."
    ]
    return replace(report, notes=notes), {**where_it_ran(args.device), "seconds": clock.seconds, **tuned}


def write(report: HeadReport, more: Mapping[str, Any], folder: Path) -> None:
    report.save(folder)
    tables = {f"{folder.name}/{name}": text for name, text in report.tables().items()}
    tables |= {f"{folder.name}/{name}": text for name, text in more.get("tuned_tables", {}).items()}
    content = {**more, "tables": tables | {f"{folder.name}/notes": report.notes[0]}, **report.to_dict()}
    write_atomically(folder / RESULTS, in_lines(content, depth=2) + "\n")


def write_page(results: Path, page: Path) -> None:
    """Renews a page's tables from the results files. What the page says of a setting without results stays."""
    settings = {path.parent.name for path in results.glob(f"*/{RESULTS}")}
    text = page.read_text()
    tables = {
        found["name"]: found["text"] for found in MARKED.finditer(text) if found["name"].split("/")[0] not in settings
    }
    for path in sorted(results.glob(f"*/{RESULTS}")):
        # A mark has no spaces in it.
        tables |= {name.replace(" ", "-"): text for name, text in parse_json(path.read_bytes())["tables"].items()}
    write_atomically(page, with_tables(text, tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=PRETRAINED, help="which model and data")
    parser.add_argument("--data", type=Path, help="a folder of plain files; by default data come from the Hub")
    parser.add_argument("--start", help="the pre-trained model: a folder, or by default its Hub name")
    parser.add_argument("--results", type=Path, help="gets a folder for each setting")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where fine-tunings lie")
    parser.add_argument(
        "--fine-tunings", type=int, default=1, help="of more than one, the heads that go are compared, too"
    )
    parser.add_argument(
        "--tuned-budgets", type=int, nargs="*", default=[], help="numbers of heads to fine-tune without"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="to measure the time of each pruned model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--page", type=Path, help="only renew the tables of this page, from the results")
    parser.add_argument("--smallest", action="store_true", help="a tiny model on made-up data: the report is printed")
    args = parser.parse_args()
    if args.smallest:
        with tempfile.TemporaryDirectory() as folder:
            args.runs = args.results = Path(folder)
            report, more = analyse(SMALLEST, args)
            write(report, more, args.results / SMALLEST.name)
            print((args.results / SMALLEST.name / REPORT).read_text())
        return
    if args.results is None:
        parser.error("--results is missing: it says where results go, or with --page where they are")
    if args.page is not None:
        write_page(args.results, args.page)
        return
    if args.setting is None:
        parser.error(f"--setting is missing: pass {' or '.join(PRETRAINED)}")
    folder = args.results / args.setting
    if (folder / RESULTS).exists():
        sys.exit(f"{folder} holds results: remove it, or pass another --results")
    setting = SETTINGS[args.setting]
    report, more = analyse(setting if args.start is None else replace(setting, start=args.start), args)
    write(report, more, folder)
    print(f"{folder / REPORT}, {RESULTS} and pictures; seconds: {more['seconds']}")


if __name__ == "__main__":
    main()
