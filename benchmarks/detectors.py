"""What detectors cost: a Hydra's forward with and without each of them, in turns in one process.

    python benchmarks/detectors.py                                  # ViT-B/16 and BERT-base, 3 members x 8 heads, batch 32
    python benchmarks/detectors.py --device cpu --families vit --rounds 5
    python benchmarks/detectors.py --smallest                       # does it run? tiny models, seconds

Each model is saved once and loaded by `from_pretrained`. A detector's time is that of `detector(member_logits,
member_features)` on the answers of that very forward; beside it stands that of a forward whose features are read, against one
whose are not. Detectors are fitted on made-up answers: how long a score takes does not depend on what was learnt. Shares are
medians over the rounds of what a step took against the forward of its own round.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from inference_cost import FAMILIES, SavedModels, synchronise

from hydra_transformers.models.detection import DETECTORS
from hydra_transformers.uncertainty import AnswerReader, Detector, detector_by_name
from provenance import where_it_ran


MODEL = "Hydra 3 x 8"
READING = "reading features"
AIM = 0.05  # of a forward


@dataclass
class Row:
    """milliseconds, share: medians of a call, and of its share of the forward in the same round; spread: its quartiles"""

    family: str
    batch: int
    what: str
    milliseconds: float
    share: float | None = None
    spread: tuple[float, float] | None = None


def fitted_detector(name: str, reader: AnswerReader, members: int, classes: int, dim: int, device: str) -> Detector:
    """Fitted on random answers, enough for covariances of full rank and a full bank."""
    detector = detector_by_name(name)
    if not detector.needs_fit:
        return detector
    generator = torch.Generator().manual_seed(0)
    rows = detector.settings["bank_size"] if name == "knn" else 2 * max(dim, classes, 200)
    labels = torch.arange(rows) % classes
    logits = torch.randn(rows, members, classes, generator=generator)
    logits[torch.arange(rows), :, labels] += 10
    features = torch.randn(rows, members, dim, generator=generator)
    heads = reader.heads if name == "vim" else None
    return detector.fit_answers(logits.to(device), features.to(device), labels.to(device), heads=heads)


def timed(call: Callable, args: argparse.Namespace) -> tuple[float, object]:
    clock = time.process_time if args.cpu_time else time.perf_counter
    synchronise(args.device)
    start = clock()
    result = call()
    synchronise(args.device)
    return 1000 * (clock() - start), result


def measure(saved: SavedModels, family: str, batch: int, args: argparse.Namespace) -> list[Row]:
    model = saved.load(MODEL, torch.float32, args.device)
    inputs = [
        {key: value.to(args.device) for key, value in saved.family.inputs(saved.config, batch).items()}
        for _ in range(4)
    ]
    plain, with_features = AnswerReader(model, with_features=False), AnswerReader(model)
    plain(inputs[0])  # warm-up
    member_logits, features = with_features(inputs[0])
    sizes = (*member_logits.shape[1:], features.shape[-1])
    detectors = {name: fitted_detector(name, with_features, *sizes, args.device) for name in args.detectors}
    for detector in detectors.values():
        detector(member_logits, features)
    times: dict[str, list[float]] = {what: [] for what in ("forward", READING, *detectors)}
    for number in range(args.rounds):
        given = inputs[number % len(inputs)]
        times["forward"].append(timed(lambda: plain(given), args)[0])  # noqa: B023
        milliseconds, (member_logits, features) = timed(lambda: with_features(given), args)  # noqa: B023
        times[READING].append(milliseconds)
        for name, detector in detectors.items():
            run = [timed(lambda: detector(member_logits, features), args)[0] for _ in range(3)]  # noqa: B023
            times[name].append(statistics.median(run))
    rows = [Row(family, batch, "forward", statistics.median(times["forward"]))]
    for what in (READING, *detectors):
        rounds = zip(times[what], times["forward"], strict=True)
        shares = [own / forward - (what == READING) for own, forward in rounds]
        quartiles = statistics.quantiles(shares, n=4)
        rows.append(
            Row(
                family,
                batch,
                what,
                statistics.median(times[what]),
                statistics.median(shares),
                (quartiles[0], quartiles[2]),
            )
        )
    return rows


def to_markdown(rows: list[Row], machine: dict) -> str:
    lines = [f"{key}: {value}  " for key, value in machine.items()]
    lines += ["", "| model | batch | what | ms | share of a forward (quartiles) |", "|---|---|---|---|---|"]
    for row in rows:
        share = "" if row.share is None else f"**{row.share:.2%}** ({row.spread[0]:.2%} to {row.spread[1]:.2%})"
        lines.append(f"| {row.family} | {row.batch} | {row.what} | {row.milliseconds:.3f} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", default=["vit", "bert"], choices=["vit", "bert"])
    parser.add_argument("--batches", nargs="+", type=int, default=[32])
    parser.add_argument("--detectors", nargs="+", default=list(DETECTORS), choices=list(DETECTORS))
    parser.add_argument("--rounds", type=int, default=20, help="each times everything once")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time, for a CPU that runs other work; best with one thread"
    )
    parser.add_argument("--output", type=Path, help="folder for detectors.md and detectors.json")
    parser.add_argument("--models", type=Path, help="folder for the saved models; a temporary one otherwise")
    parser.add_argument(
        "--smallest", action="store_true", help="tiny models, few calls: shows that it runs, not what it costs"
    )
    args = parser.parse_args()
    if args.smallest:
        args.batches, args.rounds = [2], 2
    if args.cpu_time and args.device != "cpu":
        parser.error("--cpu-time is for --device cpu: a GPU does not use the processor's time")
    clock = "processor time, on a machine that ran other work" if args.cpu_time else "elapsed time"
    machine = where_it_ran(args.device) | {"measured": f"{clock}, {args.rounds} rounds"}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.families:
            family, folder = FAMILIES[name], args.models or Path(temporary)
            config = family.smallest if args.smallest else family.config
            saved = SavedModels(family, config, folder / (f"smallest-{name}" if args.smallest else name))
            for batch in args.batches:
                measured = measure(saved, name, batch, args)
                rows += measured
                print(to_markdown(measured, machine).split("|---|\n")[-1], flush=True)
                if args.output:
                    args.output.mkdir(parents=True, exist_ok=True)
                    (args.output / "detectors.md").write_text(to_markdown(rows, machine))
                    report = {"machine": machine, "rows": [asdict(row) for row in rows]}
                    (args.output / "detectors.json").write_text(json.dumps(report, indent=1))
    dear = [f"{row.family} {row.what} {row.share:.1%}" for row in rows if row.share is not None and row.share > AIM]
    print(f"more than {AIM:.0%} of a forward: {', '.join(dear) or 'none'}")


if __name__ == "__main__":
    main()
