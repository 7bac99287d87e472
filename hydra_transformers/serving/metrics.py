"""Counts requests, latencies and abstentions for Prometheus."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CAUSES = ("detector", "empty", "not_a_number")


class Metrics:
    """Counts of one server since it started, with the model's name as a label."""

    def __init__(self, model: str):
        registry = CollectorRegistry()
        of_model = {"labelnames": ("model",), "registry": registry}
        requests = Counter("hydra_requests", "Requests by status.", ("model", "status"), registry=registry)
        refused = Counter("hydra_refused", "Inputs the model abstained on.", ("model", "cause"), registry=registry)
        inputs = Counter("hydra_inputs", "Inputs that were answered.", **of_model)
        epistemic = Counter("hydra_epistemic_nats", "Sum of the epistemic uncertainty of all inputs.", **of_model)
        seconds = Histogram("hydra_request_seconds", "From a request to its response.", buckets=SECONDS, **of_model)
        in_flight = Gauge("hydra_requests_in_flight", "Requests that wait or are being answered.", **of_model)
        self.registry, self.model, self.requests = registry, model, requests
        self.refused = {cause: refused.labels(model, cause) for cause in CAUSES}
        self.inputs, self.epistemic = inputs.labels(model), epistemic.labels(model)
        self.seconds, self.in_flight = seconds.labels(model), in_flight.labels(model)

    def count_request(self, status: int, seconds: float) -> None:
        self.requests.labels(self.model, status).inc()
        self.seconds.observe(seconds)

    def count_answers(self, answers: list[dict[str, Any]]) -> None:
        """answers: as they are sent, with None for what is not a number"""
        for answer in answers:
            self.inputs.inc()
            self.epistemic.inc(max(0.0, answer.get("epistemic") or 0.0))  # rounding can make it negative
            if answer.get("abstain"):
                self.refused[_cause(answer.get("reason") or "")].inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _cause(reason: str) -> str:
    """Why a model abstained; "detector" if a score is on the wrong side of its threshold."""
    if "not a number" in reason:
        return "not_a_number"
    return "detector" if "threshold" in reason else "empty"
