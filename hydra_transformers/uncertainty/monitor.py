"""Does a calibrated model still keep its promises? Anytime-valid tests on what it answers, with and without labels.

Every promise is a rate that may not be higher than a limit, such as the share of wrong answers. A test bets against it: the
capital is multiplied by q/a for a loss and by (1 - q)/(1 - a) otherwise, for several q above the limit a (Waudby-Smith and Ramdas,
2024). While the promise is kept, the chance that the capital ever reaches 1/level is at most the level (Ville), however often one
looks. Bets start anew after every block of rows, each with a share of the capital, so that good months do not hide a bad week.
"""

import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import betaln, xlog1py, xlogy
from scipy.stats import beta
from torch import Tensor, nn

from .._io.files import write_atomically
from ..models.decision import DecisionOutput
from .abstention import check_share
from .features import without_decision
from .task import Outcomes, Task
from .tasks import task_of


VERSION = 1
# Inputs are compared by how many ranks lie above each; the first is shown.
CUTS = np.array([0.5, 0.1, 0.25, 0.75, 0.9, 0.95, 0.99])
SCORE_BINS = 50
# The odds of a loss under the bets, relative to those at the limit.
ODDS = np.array([1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0])
BLOCK, MOST_BLOCKS = 50, 128  # rows until bets start anew; when there are too many blocks, two become one
SPARKS = "▁▂▃▄▅▆▇█"
WORDS = {  # a promise's title, and its losses
    "risk": ("Wrong answers", "of the checked answers are wrong"),
    "coverage": ("Sets or intervals", "of them miss the label"),
    "answered": ("Share answered", "of the rows are not answered"),
    "inputs": ("Inputs", "of the rows are less sure than the median validation row"),
}


@dataclass(frozen=True)
class Promise:
    """Rates that may not be above their limits. Rows are counted in bins; a rate is the share of the rows in some of them.

    title, loss, expected: for sentences
    bins: (rates, bins) bool, which bins each rate counts; the first rate is shown
    limits: (rates,), which allow for the chance in the validation rows
    """

    title: str
    loss: str
    expected: str
    bins: np.ndarray
    limits: np.ndarray


@dataclass(frozen=True)
class PromiseState:
    """Whether a promise is kept.

    Attributes:
        name (`str`): "risk", "coverage", "answered" or "inputs".
        status (`str`): "broken", "kept so far" or "not known yet".
        e_value, alarm (`float`): the evidence against the promise, and from where on it is broken.
        rows (`int`): that were counted.
        rate (`float` or `None`): the share of losses: wrong answers, misses, rows not answered, rows less sure than the median of the
            validation rows.
        interval (`tuple[float, float]`): where the rate lies, valid at any time if it does not change.
        sentence (`str`): all of it in words.
    """

    name: str
    status: str
    e_value: float
    alarm: float
    rows: int
    rate: float | None
    interval: tuple[float, float]
    sentence: str


def validation_summary(outcomes: Outcomes, other_scores: Tensor, risk: float | None) -> dict[str, Any]:
    """What a decision keeps of its validation rows, so that a monitor can compare others with them.

    other_scores: of other validation rows; they say how finely scores are told apart, which these rows may not
    risk: the share of wrong answers that is promised
    """
    shares = np.linspace(0, 1, SCORE_BINS + 1)[1:-1]
    cuts = np.unique(np.quantile(other_scores.double(), shares, method="inverted_cdf"))
    counts = np.bincount(_bins(outcomes.scores, cuts), minlength=len(cuts) + 1)
    summary = {"rows": len(outcomes.answered), "answered": int(outcomes.answered.sum()), "risk": risk}
    summary |= {"cuts": cuts.tolist(), "scores": counts.tolist()}
    for name, values in (("wrong", outcomes.wrong), ("missed", outcomes.missed)):
        summary[name] = None if values is None or not len(values) else [int(values.sum()), len(values)]
    return summary


def _bins(scores: Tensor, cuts: Any) -> np.ndarray:
    """The bin of each score; a row without one is less sure than any."""
    return np.searchsorted(cuts, scores.double().nan_to_num(nan=math.inf).numpy(), side="left")


def _of_predictions(rows: Sequence[Mapping[str, Any]], random: torch.Generator) -> Outcomes:
    """Of the rows that `predict` returns; of a row with several units one, drawn at random."""
    units = []
    for row in rows:
        candidates = row.get("entities", [row])
        if candidates:
            units.append(candidates[int(torch.randint(len(candidates), (), generator=random))])
    scores = [math.nan if unit["detector_score"] is None else unit["detector_score"] for unit in units]
    answered = torch.tensor([not unit["abstain"] for unit in units], dtype=torch.bool)
    return Outcomes(torch.tensor(scores, dtype=torch.float64), answered)


class Monitor:
    """Watches whether a calibrated model keeps its promises in use.

        risk      of the answered and labelled rows, at most the promised share is wrong
        coverage  of the labelled rows, at most the promised share of sets or intervals misses the label
        answered  the share of answered rows is that of the validation rows; needs no labels
        inputs    the detector's scores are like those of the validation rows; needs no labels

    The last two notice inputs that look different. They cannot notice that the same inputs now have other labels.

    The chance that any of them is reported as broken while all are kept is at most `level`, however long and however often one
    looks. Labels may be of any rows, as long as which rows are checked does not depend on whether the model was right.

    Args:
        model (`nn.Module`): a calibrated model.
        level (`float`, *optional*, defaults to 0.05): the chance of a false alarm, over all promises and for ever.

    Example:

        monitor = Monitor.of(hydra)
        monitor.update(hydra(**inputs))                  # every batch
        monitor.update(hydra(**checked), labels)         # rows that somebody has checked
        print(monitor)
        monitor.save("monitor.json")
    """

    def __init__(self, settings: Mapping[str, Any], level: float = 0.05):
        if "validation" not in settings:
            raise ValueError("this model was calibrated without what a monitor compares with: call calibrate() again")
        self.level = check_share(level, "level")
        self.settings = {name: settings[name] for name in ("task", "alpha", "threshold", "validation", "digests")}
        self.promises = _promises(self.settings, level)
        self.stream, self.streams, self.batches = uuid.uuid4().hex[:16], {}, set()
        self.task: Task | None = None
        self.decision_settings = settings

    @classmethod
    def of(cls, model: nn.Module, level: float = 0.05, file: str | os.PathLike | None = None) -> "Monitor":
        """The monitor of a calibrated model; see above. It goes on with the state in `file`, if there is one."""
        inner, decision = without_decision(model)
        if decision is None:
            raise ValueError("model is not calibrated, or has changed since: call calibrate() first")
        monitor = cls(decision.settings, level)
        monitor.task, monitor.decision_settings = task_of(inner), decision.settings
        return monitor.load(file) if file is not None and Path(file).exists() else monitor

    # Counting

    def update(self, outputs: Any, labels: Any = None, *, batch: str | None = None) -> None:
        """Counts the rows of a batch.

        Args:
            outputs: a model's output, or the rows that `predict` returns.
            labels (*optional*): the right labels, for rows that somebody has checked. Rows with labels count for risk and coverage
                alone, rows without for the other two, so a row may be passed first without and later with its label.
            batch (`str`, *optional*): a name; a batch with a name that was counted before is not counted again.
        """
        name = None if batch is None else f"{'rows' if labels is None else 'labels'} {batch}"
        if name in self.batches:
            return
        random = torch.Generator().manual_seed(_num_rows(self.streams.get(self.stream, {})))
        if isinstance(outputs, Sequence):
            if labels is not None:
                raise ValueError("labels are for a model's output: pass that, not rows of predict")
            self.count(_of_predictions(outputs, random))
        elif outputs.abstain is None:
            raise ValueError("outputs has no abstain: the model has changed since calibrate(), or is in training mode")
        else:
            parts = [getattr(outputs, field.name, None) for field in fields(DecisionOutput)]
            output = DecisionOutput(*(None if part is None else part.detach().cpu() for part in parts))
            labels = None if labels is None else torch.as_tensor(labels).cpu()
            self.count(self.task.outcomes(output, labels, self.decision_settings, random))
        self.batches |= {name} - {None}

    def count(self, outcomes: Outcomes) -> None:
        """`update` with the outcomes themselves."""
        if outcomes.wrong is None and outcomes.missed is None:
            self._add("answered", (~outcomes.answered).long().numpy())
            if "inputs" in self.promises:
                self._add("inputs", np.searchsorted(np.sort(CUTS), self._ranks(outcomes.scores)))
            return
        for name, values in (("risk", outcomes.wrong), ("coverage", outcomes.missed)):
            if values is not None:
                self._add(name, values.long().numpy())

    def _ranks(self, scores: Tensor) -> np.ndarray:
        """The rank of each score among the validation rows and all rows before it, from 0 to 1, ties broken at random: independent and
        uniform for exchangeable rows, whatever the validation rows are."""
        validation = self.settings["validation"]
        bins, counts = _bins(scores, validation["cuts"]), self._counts("inputs")
        pool, rows = np.array(counts.get("pool", validation["scores"])), np.arange(len(bins))
        is_bin = np.eye(len(pool), dtype=int)[bins]
        before = pool + is_bin.cumsum(axis=0) - is_bin
        below = before.cumsum(axis=1)[rows, bins] - before[rows, bins]
        random = np.random.default_rng(int(pool.sum())).random(len(bins))
        counts["pool"] = (pool + is_bin.sum(axis=0)).tolist()
        return (below + random * (before[rows, bins] + 1)) / (before.sum(axis=1) + 1)

    def _counts(self, name: str) -> dict[str, Any]:
        empty = {"size": BLOCK, "blocks": [], "peak": 0.0}
        return self.streams.setdefault(self.stream, {}).setdefault(name, empty)

    def _add(self, name: str, bins: np.ndarray) -> None:
        if name not in self.promises or not len(bins):
            return
        num_bins, counts = self.promises[name].bins.shape[1], self._counts(name)
        while len(bins):
            blocks = counts["blocks"]
            if not blocks or sum(blocks[-1]) >= counts["size"]:
                if len(blocks) == MOST_BLOCKS:
                    counts["size"] *= 2
                    blocks[:] = np.reshape(blocks, (-1, 2, num_bins)).sum(axis=1).tolist()
                blocks.append([0] * num_bins)
            taken, bins = np.split(bins, [counts["size"] - sum(blocks[-1])])
            blocks[-1] = (np.bincount(taken, minlength=num_bins) + blocks[-1]).tolist()
        counts["peak"] = max(counts["peak"], _e_value(self.promises[name], counts))

    # Reading

    def state(self) -> dict[str, PromiseState]:
        """The state of each promise, by its name."""
        return {name: self._state(name, promise) for name, promise in self.promises.items()}

    @property
    def alarm(self) -> float:
        """The e-value from which on a promise is broken. Half of the level is for the chance in the validation rows."""
        return 2 * len(self.promises) / self.level

    def _state(self, name: str, promise: Promise) -> PromiseState:
        streams = [stream[name] for stream in self.streams.values() if name in stream]
        total = sum((np.sum(counts["blocks"], axis=0) for counts in streams), np.zeros(promise.bins.shape[1]))
        losses, rows, level = promise.bins @ total, int(total.sum()), 1 / self.alarm
        # Of one stream the highest, which it ever had; of several the average of e-values, which is one.
        e_values = [counts["peak"] if len(streams) == 1 else _e_value(promise, counts) for counts in streams]
        intervals = [_interval(int(loss), rows, level / len(losses)) for loss in losses]
        e_value, status = float(np.mean(e_values or 0.0)), "not known yet"
        if e_value >= self.alarm:
            status = "broken"
        elif all(high <= limit for (_, high), limit in zip(intervals, promise.limits, strict=True)):
            status = "kept so far"
        rate, (low, high) = float(losses[0] / rows) if rows else None, intervals[0]
        sentence = f"{promise.title}: {status}. No rows yet; {promise.expected}."
        if rows:
            between = f"{rows:,} rows, between {100 * low:.3g} and {100 * high:.3g} %"
            sentence = f"{promise.title}: {status}. {100 * rate:.3g} % {promise.loss} ({between}; {promise.expected})."
        return PromiseState(name, status, e_value, self.alarm, rows, rate, (low, high), sentence)

    def __str__(self) -> str:
        """A sentence for each promise, and its rate over time as bars: half as high as the line is the limit."""
        lines = []
        for name, state in self.state().items():
            blocks = [block for stream in self.streams.values() for block in stream.get(name, {}).get("blocks", [])]
            promise = self.promises[name]
            rates = [np.dot(block, promise.bins[0]) / sum(block) for block in blocks[-64:]]
            bars = "".join(SPARKS[min(7, int(4 * rate / promise.limits[0]))] for rate in rates)
            lines += [state.sentence] + ([f"  over time {bars}"] if bars else [])
        return "\n".join(lines)

    # Files

    def save(self, file: str | os.PathLike) -> None:
        """Writes its state whole: a small JSON file."""
        content = {name: getattr(self, name) for name in ("level", "settings", "streams", "stream")}
        write_atomically(file, json.dumps(content | {"version": VERSION, "batches": sorted(self.batches)}))

    def load(self, file: str | os.PathLike) -> "Monitor":
        """Goes on with a saved state of the same calibration, and returns the monitor."""
        saved = Monitor.read(file)
        if saved.settings != self.settings or saved.level != self.level:
            raise ValueError(f"{file} watches another calibration or has another level: pass another file")
        self.stream, self.streams, self.batches = saved.stream, saved.streams, saved.batches
        return self

    @classmethod
    def read(cls, *files: str | os.PathLike) -> "Monitor":
        """The state in one or several files, to look at: those of several processes or days are put together. A stream of rows that
        is in several files is counted once."""
        monitor = None
        for file in files:
            try:
                saved = json.loads(Path(file).read_text())
                if saved["version"] != VERSION:
                    raise KeyError("version")
                monitor = monitor or cls(saved["settings"], saved["level"])
                is_same = (monitor.settings, monitor.level) == (saved["settings"], saved["level"])
                monitor.stream, monitor.batches = saved["stream"], monitor.batches | set(saved["batches"])
                streams = saved["streams"].items()
            except (KeyError, TypeError, json.JSONDecodeError) as error:
                raise ValueError(f"{file} is not the state of a monitor: pass a file of Monitor.save") from error
            if not is_same:
                raise ValueError(f"{file} watches another calibration than {files[0]}: pass files of one")
            for name, stream in streams:
                known = monitor.streams.get(name, {})
                monitor.streams[name] = max(known, stream, key=_num_rows)
        return monitor


def _num_rows(stream: Mapping[str, Any]) -> int:
    return sum(int(np.sum(counts["blocks"])) for counts in stream.values())


def _promises(settings: Mapping[str, Any], level: float) -> dict[str, Promise]:
    """The promises that a calibration makes.

    The validation rows are a sample, too: with e losses among n of them the true rate may be as high as the Clopper-Pearson bound,
    which for sets is the quantile of the coverage that one calibration has by chance. Half of the level is spent on it.
    """
    validation, two = settings["validation"], np.eye(2, dtype=bool)[::-1]  # of two bins the second, and the first
    rows, answered = validation["rows"], validation["answered"]
    least = None if settings["threshold"] is None else 0.0
    planned = {
        "risk": (validation["risk"], validation["wrong"], two[:1]),
        "coverage": (settings["alpha"], validation["missed"], two[:1]),
        "answered": (least, ([rows - answered, answered], rows), two),
    }
    planned = {name: plan for name, plan in planned.items() if None not in plan[:2]}
    num_promises, promises = len(planned) + bool(validation["cuts"]), {}
    for name, (promised, (losses, total), bins) in planned.items():
        losses, chance = np.atleast_1d(losses), level / num_promises / 2 / len(bins)
        bounds = beta.ppf(1 - chance, losses + 1, np.maximum(total - losses, 1))
        limits = np.maximum(np.where(losses < total, bounds, 1 - 1e-9), promised)
        expected = f"{100 * losses[0] / total:.3g} % on the validation rows"
        expected = f"at most {100 * promised:.3g} % promised" if promised else expected
        promises[name] = Promise(*WORDS[name], expected, bins, limits)
    if validation["cuts"]:
        above = np.arange(len(CUTS) + 1) > np.argsort(np.argsort(CUTS))[:, None]  # (cuts, bins)
        bins, limits = np.concatenate([above, ~above]), np.concatenate([1 - CUTS, CUTS])  # ranks are uniform
        promises["inputs"] = Promise(*WORDS["inputs"], "50 % expected", bins, limits)
    return promises


def _e_value(promise: Promise, counts: Mapping[str, Any]) -> float:
    """The average capital of the bets against each limit."""
    blocks = np.array(counts["blocks"], dtype=float)
    starts = np.arange(len(blocks)) * (counts["size"] // BLOCK)
    weights = 1 / ((starts + 1.0) * (starts + 2.0))  # of the capital, for the bets that start with each block
    limits = promise.limits[:, None]
    bets = ODDS * limits / (1 - limits + ODDS * limits)  # (rates, bets)
    losses, rows = (blocks @ promise.bins.T)[..., None], blocks.sum(axis=1)[:, None, None]
    gains = losses * np.log(bets / limits) + (rows - losses) * np.log((1 - bets) / (1 - limits))
    capital = gains[::-1].cumsum(axis=0).clip(max=600.0)  # the latest start first
    return float((np.exp(capital) * weights[::-1, None, None]).sum(axis=0).mean())


def _interval(losses: int, rows: int, level: float) -> tuple[float, float]:
    """The rates that a bet with a uniform prior has not ruled out: a confidence sequence for a rate that does not change."""
    if rows == 0:
        return 0.0, 1.0
    evidence = betaln(losses + 1, rows - losses + 1)

    def is_out(rate: float) -> bool:
        return evidence - xlogy(losses, rate) - xlog1py(rows - losses, -rate) >= -math.log(level)

    def edge(inside: float, outside: float) -> float:
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if is_out(middle) else (middle, outside)
        return outside

    return edge(losses / rows, 0.0), edge(losses / rows, 1.0)
