"""Counts requests, latencies and abstentions for Prometheus."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CAUSES = ("detector", "empty", "not_a_number")


class Metrics:
    """Counts of one server since it started, with the model's name as a label."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()

        def metric(kind: Any, name: str, meaning: str, *labels: str, **settings: Any) -> Any:
            made = kind(f"hydra_{name}", meaning, ("model", *labels), registry=self.registry, **settings)
            return (lambda value: made.labels(model, value)) if labels else made.labels(model)

        self.requests = metric(Counter, "requests", "Requests by status.", "status")
        self.refused = metric(Counter, "refused", "Inputs the model abstained on.", "cause")
        self.inputs = metric(Counter, "inputs", "Inputs that were answered.")
        self.epistemic = metric(Counter, "epistemic_nats", "Sum of the epistemic uncertainty of all inputs.")
        self.seconds = metric(Histogram, "request_seconds", "From a request to its response.", buckets=SECONDS)
        self.in_flight = metric(Gauge, "requests_in_flight", "Requests that wait or are being answered.")
        for cause in CAUSES:  # those of no input yet are shown as 0
            self.refused(cause)

    def count_answers(self, answers: list[dict[str, Any]]) -> None:
        """answers: as they are sent, with None for what is not a number"""
        for answer in answers:
            self.inputs.inc()
            self.epistemic.inc(max(0.0, answer.get("epistemic") or 0.0))  # rounding can make it negative
            if answer.get("abstain"):
                reason = answer.get("reason") or ""
                cause = (
                    "not_a_number" if "not a number" in reason else "detector" if "threshold" in reason else "empty"
                )
                self.refused(cause).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
