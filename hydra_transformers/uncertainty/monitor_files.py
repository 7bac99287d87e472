"""Reads the saved state of a `Monitor`, and refuses one that no monitor could have written."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any


VERSION = 1
BLOCK = 50  # rows until bets start anew, and that a block of counts has at first
REMEDY = "Use an earlier copy of it, or start a new one"
FIELDS = ("level", "settings", "streams", "stream", "batches")


def check_may_be_written(file: str | os.PathLike) -> None:
    """Raise for a name that no monitor may write to: a folder's, or a protected file's."""
    if os.path.isdir(file):
        raise ValueError(f"monitor is {file}, a folder: pass a file, such as {os.path.join(file, 'monitor.json')}")
    if os.path.exists(file) and not os.access(file, os.W_OK):
        raise ValueError(f"{file} is protected from writing: change its permissions, or pass another file")


def parse_state(text: str, file: str | os.PathLike) -> dict[str, Any]:
    """Return the content of a monitor's file; raise an error that says what is wrong with it.

    Args:
        text (`str`): what the file holds.
        file (`str` or `os.PathLike`): its name, for the error.
    """
    try:
        saved = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        saved = None
    if not isinstance(saved, dict) or saved.get("version") != VERSION or not set(FIELDS) <= saved.keys():
        raise ValueError(f"{file} is not the state of a monitor: pass a file of Monitor.save")

    problem = _problem_of_state(saved)
    if problem is not None:
        raise ValueError(f"{file} is damaged: {problem}. {REMEDY}")
    return saved


def check_bins(streams: Mapping[str, Any], num_bins: Mapping[str, int], file: str | os.PathLike) -> None:
    """Raise for counts of a promise that the monitor has not, or in other bins than its.

    Args:
        streams (`dict`): the counts by stream and promise.
        num_bins (`dict`): of each promise.
        file (`str` or `os.PathLike`): where they come from, for the error.
    """
    for stream, promises in streams.items():
        for name, counts in promises.items():
            if name not in num_bins:
                raise ValueError(f"{file} is damaged: streams.{stream}.{name} is of no promise. {REMEDY}")
            if any(len(block) != num_bins[name] for block in counts["blocks"]):
                expected = f"should have {num_bins[name]} counts"
                raise ValueError(f"{file} is damaged: blocks of streams.{stream}.{name} {expected}. {REMEDY}")


def _problem_of_state(saved: Mapping[str, Any]) -> str | None:
    if not _is_number(saved["level"]) or not 0 < saved["level"] < 1:
        return f"level is {_shown(saved['level'])}, and should be a share"
    problem = _problem_of_settings(saved["settings"])
    if problem is not None:
        return problem
    if not isinstance(saved["stream"], str):
        return f"stream is {_shown(saved['stream'])}, and should be a name"
    if not isinstance(saved["batches"], list) or not all(isinstance(name, str) for name in saved["batches"]):
        return f"batches is {_shown(saved['batches'])}, and should be a list of names"
    if not isinstance(saved["streams"], dict):
        return f"streams is {_shown(saved['streams'])}, and should hold counts"
    num_score_bins = len(saved["settings"]["validation"]["scores"])
    for stream, promises in saved["streams"].items():
        if not isinstance(promises, dict):
            return f"streams.{stream} is {_shown(promises)}, and should hold counts"
        for name, counts in promises.items():
            problem = _problem_of_counts(counts, num_score_bins)
            if problem is not None:
                return f"streams.{stream}.{name}{problem}"
    return None


def _problem_of_settings(settings: Any) -> str | None:
    """What is wrong with the part of a decision's settings that a monitor reads."""
    if not isinstance(settings, dict) or not isinstance(settings.get("validation"), dict):
        return "settings has no validation"
    threshold = settings.get("threshold")
    if threshold is not None and not _is_number(threshold) and threshold not in ("inf", "-inf"):
        return f"settings.threshold is {_shown(threshold)}, and should be a number"
    validation = settings["validation"]
    for place, value in (("settings.alpha", settings.get("alpha")), ("validation.risk", validation.get("risk"))):
        if value is not None and not (_is_number(value) and 0 < value < 1):
            return f"{place} is {_shown(value)}, and should be a share"
    rows, answered = (validation.get(name) for name in ("rows", "answered"))
    is_known = answered is not None  # not after a calibration on audited answers alone
    if not _are_counts([rows, answered] if is_known else [rows]) or rows == 0 or (is_known and answered > rows):
        return f"validation has {_shown(answered)} answered of {_shown(rows)} rows"
    for name in ("wrong", "missed"):
        value = validation.get(name)
        if value is not None and not (_are_counts(value) and len(value) == 2 and value[0] <= value[1] > 0):
            return f"validation.{name} is {_shown(value)}, and should be how many of how many"
    problem = _problem_of_groups(validation)
    if problem is not None:
        return problem
    cuts, scores = (validation.get(name) for name in ("cuts", "scores"))
    if not isinstance(cuts, list) or not all(_is_number(cut) for cut in cuts) or sorted(cuts) != cuts:
        return f"validation.cuts is {_shown(cuts)}, and should be numbers in order"
    if not _are_counts(scores) or len(scores) != len(cuts) + 1:
        return f"validation.scores is {_shown(scores)}, and should be {len(cuts) + 1} counts"
    return None


def _problem_of_groups(validation: Mapping[str, Any]) -> str | None:
    """What is wrong with the promises by class."""
    groups = validation.get("groups", [])
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return f"validation.groups is {_shown(groups)}, and should be a list of promises"
    names = validation.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return f"validation.names is {_shown(names)}, and should be a list of names"
    if not isinstance(validation.get("column", ""), str):
        return f"validation.column is {_shown(validation['column'])}, and should be a name"
    lost = validation.get("lost")
    promises = [(group, group.get("risk"), group.get("wrong")) for group in groups]
    if lost is not None:
        if not isinstance(lost, dict) or not _are_counts([lost.get("label")]):
            return f"validation.lost is {_shown(lost)}, and should be a promise"
        promises.append((lost, lost.get("share"), lost.get("rows")))
    for promise, share, counts in promises:
        is_share = share is None or (_is_number(share) and 0 < share < 1)
        are_counts = _are_counts(counts) and len(counts) == 2 and counts[0] <= counts[1]
        if not is_share or not are_counts or not isinstance(promise.get("name"), str):
            return f"validation has the promise {_shown(promise)}, whose share or counts are none"
    if any(not _are_counts(group.get("classes")) for group in groups):
        return "validation.groups has classes that are no numbers of classes"
    return None


def _problem_of_counts(counts: Any, num_score_bins: int) -> str | None:
    """What is wrong with the counts of one promise."""
    if not isinstance(counts, dict) or not {"size", "blocks", "peak"} <= counts.keys():
        return f" is {_shown(counts)}, and should have size, blocks and peak"
    size, blocks, pool = counts["size"], counts["blocks"], counts.get("pool")
    if not _are_counts([size]) or size == 0 or size % BLOCK != 0:
        return f".size is {_shown(size)}, and should be a multiple of {BLOCK}"
    if not isinstance(blocks, list):
        return f".blocks is {_shown(blocks)}, and should be a list"
    for place, block in enumerate(blocks):
        is_last = place == len(blocks) - 1
        if not _are_counts(block) or len(block) != len(blocks[0]):
            return f".blocks[{place}] is {_shown(block)}, and should be counts"
        if sum(block) > size or (sum(block) < size and not is_last):
            return f".blocks[{place}] has {sum(block)} rows, and should have {size}"
    if not _is_number(counts["peak"]) or counts["peak"] < 0:
        return f".peak is {_shown(counts['peak'])}, and should be 0 or more"
    if pool is not None and (not _are_counts(pool) or len(pool) != num_score_bins):
        return f".pool is {_shown(pool)}, and should be {num_score_bins} counts"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_counts(values: Any) -> bool:
    """Whether it is a list of whole numbers from 0 on."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _shown(value: Any) -> str:
    return repr(value)[:60]
