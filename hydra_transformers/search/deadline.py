"""The time limit of a search: when it is over, and what ends with it."""

import math
import time

from transformers import TrainerCallback


class OutOfTime(Exception):
    """The time limit has come."""


class Deadline:
    """Begins when it is made.

    minutes: None for no limit
    """

    def __init__(self, minutes: float | None):
        self.seconds = math.inf if minutes is None else 60 * minutes
        self.start = time.monotonic()

    @property
    def is_set(self) -> bool:
        return math.isfinite(self.seconds)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def check(self) -> None:
        if self.spent > self.seconds:
            raise OutOfTime


class EndAtDeadline(TrainerCallback):
    """Ends a training when the time is over; its last checkpoint stays, from which the same call goes on."""

    def __init__(self, deadline: Deadline):
        self.deadline = deadline

    def on_step_end(self, args, state, control, **kwargs):
        self.deadline.check()


def in_words(seconds: float) -> str:
    """1 s, 40 s, 3 min, 1.5 h"""
    if seconds < 90:
        return f"{max(1, math.ceil(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
