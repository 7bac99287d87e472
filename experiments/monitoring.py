"""How often a monitor raises a false alarm, and how soon it notices a change, beside two simple tests.

Each repetition calibrates on new rows and then watches 5,000 others, in batches of 250 rows, or of 50 where something changes. Many
repetitions bet at once, row by row; a test compares them with a `Monitor`. Cases that the results file has are not run again. Rows are
made up, or drawn from the scores of a real model (`--pool NAME=FILE.npz`, with the arrays test_scores, test_wrong and ood_scores;
`one_run --pool` writes it).

    python -m experiments.monitoring --output experiments/results/monitoring.json
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import ks_2samp

from benchmarks.provenance import where_it_ran
from hydra_transformers._io.files import write_atomically
from hydra_transformers.uncertainty.abstention import Abstention
from hydra_transformers.uncertainty.monitor import BLOCK, CUTS, ODDS, SCORE_BINS, Monitor, Promise, validation_summary
from hydra_transformers.uncertainty.task import Outcomes


ALPHA, LEVEL, WINDOW = 0.1, 0.05, 500  # WINDOW: rows between two looks of the simple tests
KS = "Kolmogorov-Smirnov on windows"
CHUNK = 200  # repetitions that are simulated at once


@dataclass(frozen=True)
class Case:
    """
    rows: for the calibration
    risk, confidence: the promise
    ties: scores have one decimal
    labelled: the share of the rows that somebody checks
    batch: rows between two looks of the monitor
    error: after the change, the share of wrong answers; before it, exactly the promised one
    ood: after the change, the share of out-of-distribution rows
    """

    name: str
    rows: int = 2000
    risk: float = 0.05
    confidence: float | None = 0.9
    ties: bool = False
    labelled: float = 1.0
    batch: int = 250
    error: float | None = None
    ood: float = 0.0

    @property
    def has_change(self) -> bool:
        return self.error is not None or self.ood > 0


FALSE_ALARMS = (
    Case("2,000 validation rows"),
    Case("500 validation rows", rows=500),
    Case("60 validation rows, 20 % promised", rows=60, risk=0.2),
    Case("tied scores", ties=True),
    Case("10 % of the rows labelled", labelled=0.1),
    Case("no confidence", confidence=None),
    Case("looked at every 10 rows", batch=10),
)
DELAYS = tuple(
    replace(case, batch=50)
    for case in (
        Case("errors 5 % to 10 %", error=0.1),
        Case("errors 5 % to 20 %", error=0.2),
        Case("errors 5 % to 10 %, 10 % labelled", error=0.1, labelled=0.1),
        Case("10 % out of distribution", ood=0.1),
        Case("30 % out of distribution", ood=0.3),
    )
)


@dataclass(frozen=True)
class Pool:
    """Rows to draw from with replacement: the arrays of a file, or made up where there are none."""

    rows: Mapping[str, np.ndarray] | None = None

    def draw(self, random: np.random.Generator, count: int, ood: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """(scores, wrong)"""
        unfamiliar = random.random(count) < ood
        if self.rows is None:
            scores = np.where(unfamiliar, random.beta(2.0, 1.5, count), random.beta(0.6, 2.0, count))
            return scores, unfamiliar | (random.random(count) < 0.5 * scores)
        scores, wrong, others = (self.rows[name] for name in ("test_scores", "test_wrong", "ood_scores"))
        places, other_places = (random.integers(len(part), size=count) for part in (scores, others))
        return np.where(unfamiliar, others[other_places], scores[places]), unfamiliar | wrong[places].astype(bool)


class Run(NamedTuple):
    """A calibration and the rows that are watched after it.

    settings: of the calibration, for a `Monitor`
    scores: (rows,)
    bins: by promise (rows,), the bin of each row, -1 where it does not count
    alarms: the row after which each test raises its alarm
    """

    settings: dict[str, Any]
    scores: np.ndarray
    bins: dict[str, np.ndarray]
    alarms: dict[str, int]


def draw_run(case: Case, pool: Pool, length: int, number: int) -> Run | None:
    """None where no threshold can be promised."""
    random = np.random.default_rng([number, case.rows])
    round_off = (lambda scores: scores.round(1)) if case.ties else (lambda scores: scores)
    scores, wrong = pool.draw(random, case.rows)
    others, _ = pool.draw(random, case.rows)
    scores = round_off(scores)
    others = round_off(others)
    margins = random.random(case.rows)
    try:
        fitted = Abstention.fit(torch.tensor(scores), ~torch.tensor(wrong), risk=case.risk, confidence=case.confidence)
    except ValueError:
        return None
    place = int(np.ceil((case.rows + 1) * (1 - ALPHA)))
    quantile = np.sort(margins)[place - 1] if place <= case.rows else np.inf
    answered = torch.tensor(scores <= fitted.threshold)
    missed = torch.tensor(margins > quantile)
    outcomes = Outcomes(torch.tensor(scores), answered, torch.tensor(wrong)[answered], missed)
    summary = validation_summary(outcomes, torch.tensor(others), case.risk)
    settings = {"task": "", "alpha": ALPHA, "threshold": 0.0, "validation": summary, "digests": {"weights": []}}
    change = length // 2 if case.has_change else length
    before = pool.draw(random, change)
    after = pool.draw(random, length - change, case.ood)
    new_scores, new_wrong = (np.concatenate(parts) for parts in zip(before, after, strict=True))
    new_scores = round_off(new_scores)
    new_margins = random.random(length)
    if case.error is not None:
        rates = np.where(np.arange(length) < change, case.risk, case.error)
        new_wrong = random.random(length) < rates
    labelled = random.random(length) < case.labelled
    is_answered = new_scores <= fitted.threshold
    bins = {
        "risk": np.where(labelled & is_answered, new_wrong, -1),
        "coverage": np.where(labelled, new_margins > quantile, -1),
        "answered": (~is_answered).astype(int),
    }
    alarms = {}
    for end in range(WINDOW, length + 1, WINDOW):
        count = max(1, (bins["risk"][:end] >= 0).sum())
        errors = (bins["risk"][:end] == 1).sum()
        z_value = (errors / count - case.risk) / np.sqrt(case.risk * (1 - case.risk) / count)
        if z_value > 1.645:
            alarms.setdefault("z-test every 500 rows", end)
        if KS not in alarms and ks_2samp(new_scores[end - WINDOW : end], scores).pvalue < LEVEL:
            alarms[KS] = end
    return Run(settings, new_scores, bins, alarms)


def repetitions(case: Case, pool: Pool, length: int, numbers: Iterable[int]) -> list[dict[str, int] | None]:
    """The row after which each test raises its alarm; None where no threshold can be promised.

    What a `Monitor` computes for one run is computed for all of them at once.
    """
    drawn = [draw_run(case, pool, length, number) for number in numbers]
    runs = [run for run in drawn if run is not None]
    monitors = [Monitor(run.settings, LEVEL) for run in runs]
    for name in monitors[0].promises if runs else ():
        bins = rank_bins(runs, case.batch) if name == "inputs" else np.stack([run.bins[name] for run in runs])
        promises = [monitor.promises[name] for monitor in monitors]
        for run, row in zip(runs, first_alarms(promises, bins, monitors[0].alarm, case.batch), strict=True):
            run.alarms.update({name: int(row)} if row else {})
    return [None if run is None else run.alarms for run in drawn]


def rank_bins(runs: list[Run], batch: int) -> np.ndarray:
    """(runs, rows), by the rank of each row's score among the validation rows and the rows before it; ties are broken as by `Monitor`."""
    summaries = [run.settings["validation"] for run in runs]
    streams = np.arange(len(runs))
    bins = np.stack([np.searchsorted(one["cuts"], run.scores) for one, run in zip(summaries, runs, strict=True)])
    pool = np.stack([np.pad(one["scores"], (0, SCORE_BINS - len(one["scores"]))) for one in summaries])
    total = int(pool[0].sum())
    ranks = np.empty(bins.shape)
    looks = range(total, total + bins.shape[1], batch)
    random = np.concatenate([np.random.default_rng(rows).random(batch) for rows in looks])
    for row in range(bins.shape[1]):
        taken = bins[:, row]
        below = (pool * (np.arange(SCORE_BINS) < taken[:, None])).sum(axis=1)
        ranks[:, row] = (below + random[row] * (pool[streams, taken] + 1)) / (total + row + 1)
        pool[streams, taken] += 1
    return np.searchsorted(np.sort(CUTS), ranks)


def first_alarms(promises: list[Promise], bins: np.ndarray, alarm: float, batch: int) -> np.ndarray:
    """(runs,), the row after which the evidence against each run's promise reaches `alarm`, 0 where it never does.

    bins: (runs, rows), -1 for a row that does not count
    """
    limits = np.stack([promise.limits for promise in promises])[:, None, :, None]  # (runs, bins, rates, bets)
    bets = ODDS * limits / (1 - limits + ODDS * limits)
    is_loss = promises[0].bins.T[..., None]
    factors = np.where(is_loss, bets / limits, (1 - bets) / (1 - limits))
    factors = np.concatenate([factors, np.ones_like(factors[:, :1])], axis=1)  # the last is of rows that do not count
    counted = bins >= 0
    blocks, places = np.divmod(counted.cumsum(axis=1) - counted, BLOCK)
    starts = np.where(counted & (places == 0), 1 / ((blocks + 1.0) * (blocks + 2.0)), 0.0)
    capital = np.zeros_like(factors[:, 0])
    first = np.zeros(len(bins), dtype=int)
    runs = np.arange(len(bins))
    with np.errstate(over="ignore"):  # infinite evidence is an alarm
        for row in range(bins.shape[1]):
            capital = (capital + starts[:, row, None, None]) * factors[runs, bins[:, row]]
            if (row + 1) % batch == 0:
                first[(first == 0) & (capital.mean(axis=(1, 2)) >= alarm)] = row + 1
    return first


def summarize(case: Case, runs: list[dict[str, int]], length: int) -> dict[str, Any]:
    """The share of repetitions with an alarm, by test; with a change, the median delay and the share of early alarms."""
    change = length // 2 if case.has_change else 0
    tests = sorted({name for alarms in runs for name in alarms})
    ours = [name for name in tests if name in ("risk", "coverage", "answered", "inputs")]
    tests = {name: (name,) for name in tests} | {"monitor": tuple(ours)}
    summary: dict[str, Any] = {"name": case.name, "repetitions": len(runs), "tests": {}}
    for title, names in tests.items():
        first = np.array([min((alarms[name] for name in names if name in alarms), default=np.inf) for alarms in runs])
        delays = np.sort(first[first > change]) - change
        middle = delays[len(delays) // 2] if len(delays) else np.inf
        summary["tests"][title] = {
            "alarms": float(np.isfinite(first).mean()),
            "early": float((first <= change).mean()),
            "median_delay": int(middle) if case.has_change and np.isfinite(middle) else None,
        }
    return summary


def render(content: dict[str, Any]) -> str:
    """A row per case: of each test the share of runs with an alarm, and where something changes the median delay."""
    tests = ("monitor", "z-test every 500 rows", KS)
    lines = [["", "what changes", "the monitor", "z-test", "Kolmogorov-Smirnov"], ["---"] * 5]
    for case in content["cases"]:
        has_change = any(test["median_delay"] is not None or test["early"] for test in case["tests"].values())
        cells = []
        for name in tests:
            test = case["tests"].get(name, {"alarms": 0.0, "early": 0.0, "median_delay": None})
            cells.append(f"{100 * test['alarms']:.1f} %")
            if has_change:
                delay = "not within 2,500" if test["median_delay"] is None else f"{test['median_delay']:,}"
                cells[-1] = f"{delay} rows, {100 * test['early']:.1f} % too early"
        kind = "nothing: false alarms" if not has_change else "delay"
        lines.append([f"{case['pool']}, {case['name']}", kind, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--length", type=int, default=5000, help="rows that are watched")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pool", action="append", default=[], metavar="NAME=FILE", help="scores of a real model")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    files = dict(text.split("=", 1) for text in options.pool)
    pools = {"made up": Pool()} | {name: Pool(dict(np.load(file))) for name, file in files.items()}
    rows = json.loads(options.output.read_text())["cases"] if options.output.exists() else []
    done = {(row["pool"], row["name"]) for row in rows}
    with ProcessPoolExecutor(options.workers) as workers:
        for pool_name, pool in pools.items():
            for case in (*FALSE_ALARMS, *DELAYS) if pool.rows is None else (FALSE_ALARMS[0], *DELAYS[-2:]):
                if (pool_name, case.name) in done:
                    continue
                runs = []
                drawn = 0
                while missing := options.repetitions - len(runs):  # no run where no threshold can be promised
                    numbers = range(drawn, drawn + missing)
                    chunks = [numbers[start : start + CHUNK] for start in range(0, missing, CHUNK)]
                    simulated = workers.map(partial(repetitions, case, pool, options.length), chunks)
                    runs += [alarms for chunk in simulated for alarms in chunk if alarms is not None]
                    drawn += missing
                    if not runs:
                        raise ValueError(f"{pool_name}: a risk of {case.risk} can never be promised")
                machine = where_it_ran("cpu")
                about = {"pool": pool_name, "commit": machine["commit"], "package": machine["package"]}
                rows.append(about | summarize(case, runs, options.length))
                print(json.dumps(rows[-1]), flush=True)
                content = {"machine": machine, "cases": rows}
                write_atomically(options.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
