"""What a `Monitor` says of a promised risk, by how the rows were chosen that somebody has checked.

Each draw calibrates on new rows and watches 5,000 others. Rows are made up: a row of score s is wrong with probability s / 2, so
that the true risk of every threshold is known exactly. Under shift all rows are wrong more often, by one factor.

    python -m experiments.checked_rows --output experiments/results/checked-rows.json
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import betainc

from benchmarks.provenance import where_it_ran
from hydra_transformers._io.files import write_atomically
from hydra_transformers.uncertainty.abstention import Abstention
from hydra_transformers.uncertainty.monitor import Monitor, validation_summary
from hydra_transformers.uncertainty.task import Outcomes


RISK = 0.05
CONFIDENCE = 0.9
SHAPE = (0.6, 2.0)  # of the beta distribution of scores
WATCHED = 5000
BATCH = 250


@dataclass(frozen=True)
class Case:
    """
    checked: "random", "least sure" or "surest": which of the answered rows of each batch somebody checks
    share: how many of them
    risk: of the answered rows, where it is not what the calibration left
    chosen: what the monitor is told of the choice
    """

    name: str
    checked: str
    share: float
    risk: float | None = None
    chosen: str = "answered"


CASES = (
    Case("a random 20 %", "random", 0.2),
    Case("the least sure 20 %", "least sure", 0.2),
    Case("the least sure 20 %, marked", "least sure", 0.2, chosen="other"),
    Case("a random half", "random", 0.5, risk=0.077),
    Case("the surest half", "surest", 0.5, risk=0.077),
    Case("the surest half, marked", "surest", 0.5, risk=0.077, chosen="other"),
)


def true_risk(threshold: float) -> float:
    """The share of wrong rows among those up to a threshold, if nothing shifts."""
    first, second = SHAPE
    mean = first / (first + second)
    return float(0.5 * mean * betainc(first + 1, second, threshold) / betainc(first, second, threshold))


def watch(case: Case, rows: int, number: int) -> str | None:
    """The state of the risk after all rows; None where the calibration missed its target by chance, or has none."""
    random = np.random.default_rng([number, rows])
    scores = random.beta(*SHAPE, (2, rows))
    wrong = random.random(rows) < 0.5 * scores[0]
    try:
        fitted = Abstention.fit(torch.tensor(scores[0]), ~torch.tensor(wrong), risk=RISK, confidence=CONFIDENCE)
    except ValueError:
        return None
    risk = true_risk(fitted.threshold)
    if risk > RISK:
        return None
    answered = torch.tensor(scores[0] <= fitted.threshold)
    outcomes = Outcomes(torch.tensor(scores[0]), answered, torch.tensor(wrong)[answered])
    summary = validation_summary(outcomes, torch.tensor(scores[1]), RISK)
    settings = {"task": "", "alpha": None, "threshold": fitted.threshold, "validation": summary, "digests": {}}
    monitor = Monitor(settings)
    factor = 1.0 if case.risk is None else case.risk / risk
    for _ in range(WATCHED // BATCH):
        new_scores = np.sort(random.beta(*SHAPE, BATCH))
        new_scores = new_scores[new_scores <= fitted.threshold]
        new_wrong = random.random(len(new_scores)) < 0.5 * factor * new_scores
        places = choose(case, len(new_scores), random)
        part = torch.tensor(new_scores[places])
        monitor.count(Outcomes(part, torch.ones_like(part).bool(), torch.tensor(new_wrong[places])), case.chosen)
    return monitor.state()["risk"].status  # what was broken once stays so


def choose(case: Case, count: int, random: np.random.Generator) -> np.ndarray:
    """The places, among rows in the order of their scores, of those that somebody checks."""
    checked = max(1, round(case.share * count))
    if case.checked == "random":
        return random.choice(count, checked, replace=False)
    return np.arange(checked) if case.checked == "surest" else np.arange(count - checked, count)


def summarize(case: Case, rows: int, draws: int) -> dict[str, Any]:
    """The share of draws in which the risk was ever reported as broken, and in which it was kept so far at the end."""
    states: list[str] = []
    number = 0
    while len(states) < draws:
        state = watch(case, rows, number)
        states += [] if state is None else [state]
        number += 1
    shares = {name: states.count(name) / draws for name in ("broken", "kept so far", "not known yet")}
    return asdict(case) | {"rows": rows, "draws": draws, "states": shares}


def render(content: dict[str, Any]) -> str:
    """A row per case."""
    lines = [["rows that are checked", "true risk", "promised", "reported as broken", "kept so far"], ["---"] * 5]
    for row in content["cases"]:
        risk = "5 % or less" if row["risk"] is None else f"{100 * row['risk']:.3g} %"
        states = [f"{100 * row['states'][name]:.1f} %" for name in ("broken", "kept so far")]
        lines.append([row["name"], risk, f"{100 * RISK:.3g} %", *states])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=2000, help="of each half of the validation rows")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    cases = []
    for case in CASES:
        cases.append(summarize(case, options.rows, options.draws))
        print(json.dumps(cases[-1]), flush=True)
    content = {"machine": where_it_ran("cpu"), "what": "checked rows", "cases": cases}
    write_atomically(options.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
