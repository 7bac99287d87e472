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
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import betaln, xlog1py, xlogy
from scipy.stats import beta
from torch import Tensor, nn

from .._io.files import write_atomically
from ..models.decision_settings import places_of_groups, typed_settings
from ..models.task import DecisionOutput
from .abstention import check_share
from .features import without_decision
from .monitor_files import BLOCK, VERSION, check_bins, check_may_be_written, parse_state
from .task import Outcomes
from .tasks import task_fit_of


# How the rows that somebody has checked were chosen, and the promises that they count for.
CHOICES = {"random": ("risk", "coverage"), "answered": ("risk",), "other": ()}
RISK_OF = "risk of "  # the promises of single predictions, before their names
LEFT_OUT = "other"  # the counts of rows that were chosen otherwise, beside those of the promises
CUTS = np.array([0.5, 0.1, 0.25, 0.75, 0.9, 0.95, 0.99])  # at which ranks of scores are compared; the first is shown
SCORE_BINS, ROUNDING = 50, 1e-6  # of scores, on another device or in a batch of another size
# The odds of a loss under the bets, relative to those at the limit.
ODDS = np.array([1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0])
MOST_BLOCKS = 128  # when there are more, two become one
SPARKS = "▁▂▃▄▅▆▇█"
WORDS = {  # a promise's title, and its losses
    "risk": ("Wrong answers", "of the checked answers are wrong"),
    "coverage": ("Sets or intervals", "of them miss the label"),
    "answered": ("Share answered", "of the rows are not answered"),
    "inputs": ("Inputs", "of the rows are less sure than the median of the validation rows and those before"),
}


class PromiseState(NamedTuple):
    """Whether a promise is kept.

    Attributes:
        status (`str`): "broken", "kept so far" or "not known yet".
        e_value (`float`): the evidence against the promise; it is broken from `Monitor.alarm` on.
        rows (`int`): that were counted.
        rate (`float` or `None`): the share of losses, such as wrong answers; None without rows.
        interval (`tuple[float, float]`): where the rate lies, valid at any time if it does not change.
        sentence (`str`): all of it in words.
    """

    status: str
    e_value: float
    rows: int
    rate: float | None
    interval: tuple[float, float]
    sentence: str


class Promise(NamedTuple):
    """Rates that may not be above their limits. Rows are counted in bins; a rate is the share of the rows in some of them.

    bins: (rates, bins) bool, which bins each rate counts; the first rate is shown
    limits: (rates,), above which it is broken: they allow for the chance in the validation rows
    kept: (rates,), up to which it is kept: what was promised, where that is a number
    """

    title: str
    loss: str
    expected: str
    bins: np.ndarray
    limits: np.ndarray
    kept: np.ndarray

    def add(self, counts: dict[str, Any], bins: np.ndarray) -> None:
        """Count rows by their bins, and remember the highest evidence."""
        add_to_blocks(counts, bins, self.bins.shape[1])
        counts["peak"] = max(counts["peak"], self.e_value(counts))

    def e_value(self, counts: Mapping[str, Any]) -> float:
        """The average capital of the bets against each limit."""
        blocks = np.array(counts["blocks"], dtype=float)
        starts = np.arange(len(blocks)) * (counts["size"] // BLOCK)
        weights = 1 / ((starts + 1.0) * (starts + 2.0))  # of the capital, for the bets that start with each block
        limits = self.limits[:, None]
        bets = ODDS * limits / (1 - limits + ODDS * limits)  # (rates, bets)
        losses, rows = (blocks @ self.bins.T)[..., None], blocks.sum(axis=1)[:, None, None]
        gains = losses * np.log(bets / limits) + (rows - losses) * np.log((1 - bets) / (1 - limits))
        capital = gains[::-1].cumsum(axis=0).clip(max=600.0)  # the latest start first
        return float((np.exp(capital) * weights[::-1, None, None]).sum(axis=0).mean())

    def state(self, streams: Sequence[Mapping[str, Any]], alarm: float) -> PromiseState:
        """streams: the counts of each; alarm: the e-value from which on the promise is broken"""
        total = sum((np.sum(counts["blocks"], axis=0) for counts in streams), np.zeros(self.bins.shape[1]))
        losses, rows = self.bins @ total, int(total.sum())
        lows, highs = _intervals(losses, rows, 1 / alarm / len(losses))
        # Of several streams the average of e-values, which is one. When a stream had its highest, the average was at least its share.
        e_values, peaks = [self.e_value(counts) for counts in streams], [counts["peak"] for counts in streams]
        e_value, status = float(max(sum(e_values), *peaks, 0.0)) / max(len(streams), 1), "not known yet"
        if e_value >= alarm:
            status = "broken"
        elif (highs <= self.kept).all():
            status = "kept so far"
        rate, low, high = None, float(lows[0]), float(highs[0])
        sentence = f"{self.title}: {status}. No rows yet; {self.expected}."
        if rows:
            rate = float(losses[0] / rows)
            between = f"{rows:,} rows, between {100 * low:.3g} and {100 * high:.3g} %"
            sentence = f"{self.title}: {status}. {100 * rate:.3g} % {self.loss} ({between}; {self.expected})."
        return PromiseState(status, e_value, rows, rate, (low, high), sentence)


def add_to_blocks(counts: dict[str, Any], bins: np.ndarray, num_bins: int) -> None:
    """Count rows by their bins, in blocks of equally many rows; when there are too many blocks, two become one."""
    blocks = counts["blocks"]
    while len(bins):
        if not blocks or sum(blocks[-1]) >= counts["size"]:
            if len(blocks) == MOST_BLOCKS:
                counts["size"] *= 2
                blocks[:] = np.reshape(blocks, (-1, 2, num_bins)).sum(axis=1).tolist()
            blocks.append([0] * num_bins)
        taken, bins = np.split(bins, [counts["size"] - sum(blocks[-1])])
        blocks[-1] = (np.bincount(taken, minlength=num_bins) + blocks[-1]).tolist()


def _intervals(losses: np.ndarray, rows: int, level: float) -> np.ndarray:
    """(2, rates): between which rates a bet with a uniform prior rules none out, a confidence sequence for rates that do not change."""
    inside, outside = losses / max(rows, 1), np.repeat([[0.0], [1.0]], len(losses), axis=1)
    for _ in range(50):
        middle = (inside + outside) / 2
        evidence = betaln(losses + 1, rows - losses + 1) - xlogy(losses, middle) - xlog1py(rows - losses, -middle)
        is_out = evidence >= -math.log(level)
        inside, outside = np.where(is_out, inside, middle), np.where(is_out, middle, outside)
    return outside


def validation_summary(outcomes: Outcomes, other_scores: Tensor, risk: float | None) -> dict[str, Any]:
    """What a decision keeps of its validation rows, so that a monitor can compare others with them.

    other_scores: of other validation rows; they say how finely scores are told apart, which these rows may not
    risk: the share of wrong answers that is promised
    """
    shares, scores = np.linspace(0, 1, SCORE_BINS + 1)[1:-1], other_scores if len(other_scores) else torch.zeros(1)
    cuts = np.unique(np.quantile(scores.double(), shares, method="inverted_cdf"))
    # Midway to the next score, so that many rows of one score, which is rounded otherwise elsewhere, stay in its bin.
    tolerance, values = ROUNDING * (1 + np.abs(cuts)), np.unique(scores.double())
    values = np.append(values, values[-1] + 2 * tolerance[-1])
    cuts = np.unique((cuts + values[np.searchsorted(values[:-1], cuts + tolerance)]) / 2)
    counts = np.bincount(_score_bins(outcomes.scores, cuts), minlength=len(cuts) + 1)
    summary = {"rows": len(outcomes.answered), "answered": int(outcomes.answered.sum()), "risk": risk}
    summary |= {"cuts": cuts.tolist(), "scores": counts.tolist()}
    for name, values in (("wrong", outcomes.wrong), ("missed", outcomes.missed)):
        summary[name] = None if values is None or not len(values) else [int(values.sum()), len(values)]
    return summary


def _score_bins(scores: Tensor, cuts: Any) -> np.ndarray:
    """The bin of each score; a row without one is less sure than any."""
    return np.searchsorted(cuts, scores.double().nan_to_num(nan=math.inf).numpy(), side="left")


class Monitor:
    """Watches whether a calibrated model keeps its promises in use.

        risk      of the answered and labelled rows, at most the promised share is wrong
        risk of X  the same of the rows that are predicted X, or whose group is X, where it was promised by prediction or column
        lost      of the labelled rows of a class, at most the promised share is answered as another, where it was promised
        coverage  of the labelled rows, at most the promised share of sets or intervals misses the label
        answered  the share of answered rows is that of the validation rows; needs no labels
        inputs    the detector's scores are like those of the validation rows; needs no labels

    The last two notice inputs that look different. They cannot notice that the same inputs now have other labels.

    The chance that any of them is reported as broken while all are kept is at most `level`, however long and however often one
    looks. A promise is an average over rows, so that the rows with labels must be a random choice among those that it speaks of:
    all rows for coverage, the answered ones for risk. Rows that were chosen by their score, by their prediction, or because a
    user complained, tell of neither: pass them with `chosen="other"`, and they are counted apart.

    Args:
        settings (`dict`): of a calibrated model's decision; `Monitor.of(model)` takes them from the model.
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
        groups = self.settings["validation"].get("groups", ())
        self.column: str | None = self.settings["validation"].get("column")  # by which promises are made
        # The groups that each of these promises speaks of, by their indices.
        self.groups = {RISK_OF + group["name"]: group["classes"] for group in groups}
        self.alarm = 2 * len(self.promises) / level  # half of the level is for the chance in the validation rows
        self.stream, self.streams, self.batches = uuid.uuid4().hex[:16], {}, set()
        self.decision_settings, self.model, self.task = settings, None, None
        self.files: dict[str, str] = {}  # what is in those that were loaded or saved

    @classmethod
    def of(cls, model: nn.Module, level: float = 0.05, file: str | os.PathLike | None = None) -> "Monitor":
        """The monitor of a calibrated `model`, with the `level` above. It goes on with the state in `file`, if there is one."""
        inner, decision = without_decision(model)
        if decision is None:
            raise ValueError("model is not calibrated, or has changed since: call calibrate() first")
        monitor = cls(typed_settings(decision.settings).to_dict(), level)
        if file is not None and Path(file).exists():
            check_may_be_written(file)
            monitor.load(file)
        monitor.model, monitor.task = model, task_fit_of(inner)
        return monitor

    def update(
        self,
        outputs: Any,
        labels: Any = None,
        *,
        chosen: str = "random",
        batch: str | None = None,
        groups: Sequence[Any] | None = None,
    ) -> None:
        """Count the rows of a batch.

        Args:
            outputs: a model's output, or the rows that `predict` returns.
            labels (*optional*): the right labels, for rows that somebody has checked. Rows with labels count for risk and coverage
                alone, rows without for the other two, so a row may be passed first without and later with its label.
            chosen (`str`, *optional*, defaults to `"random"`): how the rows with labels were chosen: "random" among all rows,
                "answered" at random among the answered ones, which count for the risk alone, or "other", for no promise.
            batch (`str`, *optional*): a name; a batch with a name that was counted before is not counted again.
            groups (`list`, *optional*): of a model that was calibrated with by=column: the group of each row that has a label.
        """
        if chosen not in CHOICES:
            raise ValueError(f"chosen is {chosen!r}: pass one of {', '.join(CHOICES)}")
        name = f"{'rows' if labels is None else 'labels'} {batch}"
        if batch is not None and name in self.batches:
            return
        random = torch.Generator().manual_seed(_num_rows(self.streams.get(self.stream, {})))
        if isinstance(outputs, Sequence):
            if labels is not None:
                raise ValueError("labels are for a model's output: pass that, not rows of predict")
            self.count(_outcomes_of_predictions(outputs, _thresholds_in(self.settings), random))
        elif outputs.abstain is None:
            raise ValueError("outputs has no abstain: the model has changed since calibrate(), or is in training mode")
        elif _settings_in(self.model) != self.decision_settings:
            raise ValueError("this monitor is not of the model's calibration: make one with Monitor.of(model)")
        else:
            parts = [getattr(outputs, field.name, None) for field in fields(DecisionOutput)]
            output = DecisionOutput(*(None if part is None else part.detach().cpu() for part in parts))
            labels = None if labels is None else torch.as_tensor(labels).cpu()
            outcomes = self.task.outcomes(output, labels, self.decision_settings, random)
            if self.column is not None and labels is not None:
                outcomes = outcomes._replace(groups=self._groups_of_answers(groups, outcomes.answered))
            self.count(outcomes, chosen)
        if batch is not None:
            self.batches.add(name)

    def _groups_of_answers(self, groups: Sequence[Any] | None, answered: Tensor) -> Tensor:
        """Return the places of the groups of answered rows."""
        if groups is None or len(groups) != len(answered):
            count = "missing" if groups is None else f"of {len(groups)} rows"
            raise ValueError(
                f"groups is {count}: pass the {self.column} of each of {len(answered)} rows, by which promises are made"
            )
        return places_of_groups(groups, self.settings["validation"]["names"])[answered]

    def count(self, outcomes: Outcomes, chosen: str = "random") -> None:
        """Count the outcomes of rows, see `update`."""
        if outcomes.wrong is None and outcomes.missed is None:
            self._count_as("answered", ~outcomes.answered)
            self._count_as("inputs", outcomes.scores)
            return
        losses = {"risk": outcomes.wrong, "coverage": outcomes.missed}
        for name in CHOICES[chosen]:
            self._count_as(name, losses[name])
        if "risk" in CHOICES[chosen] and outcomes.groups is not None and outcomes.wrong is not None:
            for name, members in self.groups.items():
                self._count_as(name, outcomes.wrong[torch.isin(outcomes.groups, torch.tensor(members))])
        if chosen == "random":
            self._count_as("lost", outcomes.lost)
        if chosen == "other":
            self._count_as(LEFT_OUT, outcomes.missed if outcomes.wrong is None else outcomes.wrong)

    def _count_as(self, name: str, values: Tensor | None) -> None:
        """Count the losses of rows, or for `inputs` their scores, for a promise, or apart from all promises."""
        is_counted = name in self.promises or name == LEFT_OUT
        if not is_counted or values is None or not len(values):
            return
        empty = {"size": BLOCK, "blocks": [], "peak": 0.0}
        counts = self.streams.setdefault(self.stream, {}).setdefault(name, empty)
        if name == LEFT_OUT:
            add_to_blocks(counts, values.long().numpy(), 2)
        elif name == "inputs":
            self.promises[name].add(counts, self._rank_bins(values, counts))
        else:
            self.promises[name].add(counts, values.long().numpy())

    def _rank_bins(self, scores: Tensor, counts: dict[str, Any]) -> np.ndarray:
        """Between which cuts lies the rank of each score among the validation rows and all rows before it, ties broken at random?
        Ranks are independent and uniform for exchangeable rows, whatever the validation rows are."""
        validation = self.settings["validation"]
        pool = np.array(counts.get("pool", validation["scores"]))
        is_bin = np.eye(len(pool), dtype=int)[_score_bins(scores, validation["cuts"])]  # (rows, bins)
        before = pool + is_bin.cumsum(axis=0) - is_bin
        ties = (before * is_bin).sum(axis=1)
        below = (before.cumsum(axis=1) * is_bin).sum(axis=1) - ties
        random = np.random.default_rng(int(pool.sum())).random(len(ties))
        counts["pool"] = (pool + is_bin.sum(axis=0)).tolist()
        return np.searchsorted(np.sort(CUTS), (below + random * (ties + 1)) / (before.sum(axis=1) + 1))

    def state(self) -> dict[str, PromiseState]:
        """The state of each promise, by its name."""
        return {name: promise.state(self._counts(name), self.alarm) for name, promise in self.promises.items()}

    def _counts(self, name: str) -> list[dict[str, Any]]:
        return [stream[name] for stream in self.streams.values() if name in stream]

    def __str__(self) -> str:
        """A sentence for each promise, and its rate over time as bars: half as high as the line is the limit."""
        lines = []
        for name, promise in self.promises.items():
            streams = self._counts(name)
            lines.append(promise.state(streams, self.alarm).sentence)
            blocks = [block for counts in streams for block in counts["blocks"]]
            rates = [np.dot(block, promise.bins[0]) / sum(block) for block in blocks[-64:]]
            bars = "".join(SPARKS[min(7, int(4 * rate / promise.limits[0]))] for rate in rates)
            lines += [f"  over time {bars}"] if bars else []
        left_out = sum((np.sum(counts["blocks"], axis=0) for counts in self._counts(LEFT_OUT)), np.zeros(2))
        if left_out.any():
            loss = "miss their intervals" if self.settings["task"] == "regression" else "are wrong"
            share = f"{100 * left_out[1] / left_out.sum():.3g} %"
            lines.append(f"Chosen otherwise: {share} of {int(left_out.sum()):,} checked rows {loss}, in no promise.")
        return "\n".join(lines)

    def save(self, file: str | os.PathLike) -> None:
        """Writes its state whole: a small JSON file. One that has rows of another monitor or process is not replaced."""
        check_may_be_written(file)
        content = {name: getattr(self, name) for name in ("level", "settings", "streams", "stream")}
        content |= {"version": VERSION, "batches": sorted(self.batches)}
        text, place = json.dumps(content), os.path.realpath(file)
        if os.path.exists(place) and Path(place).read_text() != self.files.get(place):
            raise ValueError(f"{file} was written by another monitor or process: save into a file of its own")
        write_atomically(place, text)
        self.files[place] = text

    def load(self, file: str | os.PathLike) -> "Monitor":
        """Goes on with a saved state of the same calibration, and returns the monitor. A stream of rows that it has is counted once."""
        text = Path(file).read_text()
        saved, streams = parse_state(text, file), {}
        if (_with_null_digests(saved["settings"]), saved["level"]) != (_with_null_digests(self.settings), self.level):
            raise ValueError(f"{file} watches another calibration or has another level: pass another file")
        num_bins = {name: promise.bins.shape[1] for name, promise in self.promises.items()}
        check_bins(saved["streams"], num_bins | {LEFT_OUT: 2}, file)
        for name, stream in saved["streams"].items():
            earlier, streams[name] = sorted((self.streams.get(name, {}), stream), key=_num_rows)
            if not _goes_on(streams[name], earlier):
                raise ValueError(f"{file} and another state both go on from the same rows: pass one of them")
        self.stream, self.batches = saved["stream"], self.batches | set(saved["batches"])
        self.streams, self.files[os.path.realpath(file)] = self.streams | streams, text
        return self

    @classmethod
    def read(cls, *files: str | os.PathLike) -> "Monitor":
        """The state in one or several files, to look at: those of several processes or days are put together."""
        saved = parse_state(Path(files[0]).read_text(), files[0])
        monitor = cls(saved["settings"], saved["level"])
        for file in files:
            monitor.load(file)
        return monitor


def _num_rows(stream: Mapping[str, Any]) -> int:
    return sum(int(np.sum(counts["blocks"])) for counts in stream.values())


def _goes_on(stream: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Whether a stream begins with the rows of an earlier state of it."""
    for name, before in earlier.items():
        now = stream.get(name, {"size": 0, "blocks": []})
        starts = range(0, len(before["blocks"]), max(now["size"] // before["size"], 1))
        blocks, counts = np.add.reduceat(before["blocks"], starts), np.array(now["blocks"][: len(starts)])
        if len(counts) < len(blocks) or (counts[:-1] != blocks[:-1]).any() or (counts[-1] < blocks[-1]).any():
            return False
    return True


def _with_null_digests(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a monitor with a digest of None where there is none: version 0.3 wrote none of settings."""
    return {**settings, "digests": {"settings": None, **(settings["digests"] or {})}}


def _settings_in(model: nn.Module | None) -> dict[str, Any] | None:
    """Return the settings of a model's decision as JSON has them; None without one."""
    decision = getattr(model, "decision", None)
    return None if decision is None else typed_settings(decision.settings).to_dict()


def _thresholds_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the thresholds that a prediction of the calibrated model can name, as texts."""
    groups = settings["validation"].get("groups")
    if groups is None:
        return {str(settings["threshold"])}
    thresholds = {str(group["threshold"]) for group in groups}
    if "column" in settings["validation"]:  # also of rows of an unknown group, or without one
        thresholds |= {str(-math.inf), str(None)}
    return thresholds


def _outcomes_of_predictions(
    rows: Sequence[Mapping[str, Any]], thresholds: set[str], random: torch.Generator
) -> Outcomes:
    """Of the rows that `predict` returns; of a row with several units one, drawn at random."""
    if any(row["detector"] is None or str(row["threshold"]) not in thresholds for row in rows):
        raise ValueError("these rows are not of the calibrated model that is watched: predict with it")
    candidates = [row.get("entities", [row]) for row in rows]
    units = [units[int(torch.randint(len(units), (), generator=random))] for units in candidates if units]
    scores = np.array([unit["detector_score"] for unit in units], dtype=float)  # None becomes NaN
    abstain = [unit["abstain"] or False for unit in units]  # None without a threshold
    return Outcomes(torch.from_numpy(scores), ~torch.tensor(abstain, dtype=torch.bool))


def _promises(settings: Mapping[str, Any], level: float) -> dict[str, Promise]:
    """The promises that a calibration makes.

    The validation rows are a sample, too: with e losses among n of them the true rate may be as high as the Clopper-Pearson bound,
    which for sets is the quantile of the coverage that one calibration has by chance. Half of the level is spent on it.
    """
    validation, two = settings["validation"], np.eye(2, dtype=bool)[::-1]  # of two bins the second, and the first
    rows, answered = validation["rows"], validation["answered"]
    # Nobody knows the share of answers after a calibration on audited answers alone.
    least = None if settings["threshold"] is None or answered is None else 0.0
    unanswered = [rows - answered, answered] if answered is not None else None
    planned = {
        "risk": (validation["risk"], validation["wrong"], two[:1]),
        "coverage": (settings["alpha"], validation["missed"], two[:1]),
        "answered": (least, (unanswered, rows), two),
    }
    words = dict(WORDS)
    for group in validation.get("groups", ()):
        if group["risk"] is not None and group["wrong"][1] > 0:  # otherwise nothing is promised, or never answered
            name = RISK_OF + group["name"]
            planned[name] = (group["risk"], group["wrong"], two[:1])
            kind = validation.get("column", "predicted")
            words[name] = (f"Wrong answers, {kind} {group['name']}", "of the checked answers are wrong")
    if "lost" in validation:
        lost = validation["lost"]
        planned["lost"] = (lost["share"], lost["rows"], two[:1])
        words["lost"] = (f"Lost rows of {lost['name']}", "of the checked rows of it are answered as another label")
    planned = {name: plan for name, plan in planned.items() if None not in plan[:2]}
    promises = {}
    for name, (promised, (losses, total), bins) in planned.items():
        losses, chance = np.atleast_1d(losses), level / (len(planned) + 1) / 2 / len(bins)
        bounds = beta.ppf(1 - chance, losses + 1, np.maximum(total - losses, 1))
        limits = np.maximum(np.where(losses < total, bounds, 1 - 1e-9), promised)
        expected = f"{100 * losses[0] / total:.3g} % on the validation rows"
        expected = f"at most {100 * promised:.3g} % promised" if promised else expected
        kept = np.full(len(bins), promised) if promised else np.where(losses < total, limits, 1.0)
        promises[name] = Promise(*words[name], expected, bins, limits, kept)
    above = np.append(0.0, np.sort(CUTS)) >= CUTS[:, None]  # (cuts, bins)
    bins, limits = np.concatenate([above, ~above]), np.concatenate([1 - CUTS, CUTS])  # ranks are uniform
    return promises | {"inputs": Promise(*WORDS["inputs"], "50 % expected", bins, limits, limits)}
