"""Counts requests, latencies and abstentions for Prometheus, and whether promises are kept."""

import logging
import os
import threading
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from torch import nn

from ..uncertainty import Monitor


logger = logging.getLogger(__name__)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counts of one server since it started."""

    def __init__(self, watched: "WatchedPromises | None" = None):
        self.registry = CollectorRegistry()
        to = {"registry": self.registry}
        self.requests = Counter("hydra_requests", "Requests by status.", ["status"], **to)
        self.seconds = Histogram("hydra_request_seconds", "From a request to its response.", buckets=SECONDS, **to)
        self.inputs = Counter("hydra_inputs", "Inputs that were answered.", **to)
        self.abstentions = Counter("hydra_abstentions", "Inputs the model abstained on.", **to)
        self.epistemic = Counter("hydra_epistemic_nats", "Sum of the epistemic uncertainty of all inputs.", **to)

        # A gauge for each promise, which asks the monitor when it is read.
        broken = Gauge("hydra_promise_broken", "1 for a promise that is broken.", ["promise"], **to)
        if watched is not None:
            for name in watched.monitor.promises:
                broken.labels(name).set_function(lambda name=name: watched.states()[name] == "broken")

    def count_answers(self, answers: list[dict[str, Any]]) -> None:
        """Count answers as they are sent, with None for what is not a number."""
        for answer in answers:
            self.inputs.inc()
            self.epistemic.inc(max(0.0, answer.get("epistemic") or 0.0))  # rounding can make it negative
            self.abstentions.inc(bool(answer.get("abstain")))

    def text(self) -> bytes:
        """Return all counts as Prometheus reads them."""
        return generate_latest(self.registry)


class WatchedPromises:
    """A monitor for several threads, whose file is written at most once a second."""

    def __init__(self, model: nn.Module, file: str | os.PathLike):
        self.monitor = Monitor.of(model, file=file)
        self.file = file
        self.lock = threading.Lock()
        self.save()  # raises its error before the server starts

    def count(self, answers: list[dict[str, Any]]) -> None:
        """Count answers, and write the file if that was a second ago."""
        with self.lock:
            self.monitor.update(answers)
        if time.monotonic() > self.written + 1.0:
            try:
                self.save()
            except (OSError, ValueError) as error:  # whoever asked gets an answer all the same
                logger.error(f"the monitor's state cannot be saved: {error}")

    def save(self) -> None:
        """Write the monitor's file."""
        with self.lock:
            self.written = time.monotonic()
            self.monitor.save(self.file)

    def states(self) -> dict[str, str]:
        """Return how each promise stands: {"risk": "kept so far", ...}."""
        with self.lock:
            return {name: state.status for name, state in self.monitor.state().items()}
