"""What an operator watches, in the text format of Prometheus: requests, latencies, refusals."""

from bisect import bisect_left
from collections import Counter
from typing import Any


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts of a server since it started. All calls come from its event loop."""

    def __init__(self, model: str):
        self.model = model
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.buckets = [0] * (len(SECONDS) + 1)
        self.seconds, self.inputs, self.epistemic = 0.0, 0, 0.0
        self.refused: Counter[str] = Counter({"detector": 0, "empty": 0, "not_a_number": 0})

    def count_request(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.buckets[bisect_left(SECONDS, seconds)] += 1
        self.seconds += seconds

    def count_answers(self, answers: list[dict[str, Any]]) -> None:
        """answers: as they are sent, with None for what is not a number"""
        for answer in answers:
            self.inputs += 1
            self.epistemic += answer.get("epistemic") or 0.0
            if answer.get("abstain"):
                self.refused[_cause_of_refusal(answer)] += 1

    def text(self, waiting: int) -> str:
        """waiting: requests in the server now"""
        lines = _heading("hydra_requests_total", "counter", "Requests by path and status.")
        lines += [
            f"hydra_requests_total{self._labels(path=path, status=status)} {count}"
            for (path, status), count in sorted(self.requests.items())
        ]
        lines += _heading("hydra_request_seconds", "histogram", "Time from a request to its response.")
        total = 0
        for limit, count in zip((*SECONDS, "+Inf"), self.buckets, strict=True):
            total += count
            lines.append(f"hydra_request_seconds_bucket{self._labels(le=limit)} {total}")
        lines += [f"hydra_request_seconds_sum{self._labels()} {self.seconds:.6f}"]
        lines += [f"hydra_request_seconds_count{self._labels()} {total}"]
        lines += _heading("hydra_inputs_total", "counter", "Texts or images that were answered.")
        lines += [f"hydra_inputs_total{self._labels()} {self.inputs}"]
        lines += _heading("hydra_refused_total", "counter", "Inputs that the model abstained from, by cause.")
        for cause, count in self.refused.items():
            lines.append(f"hydra_refused_total{self._labels(cause=cause)} {count}")
        lines += _heading("hydra_epistemic_nats_total", "counter", "Sum of the epistemic uncertainty of all inputs.")
        lines += [f"hydra_epistemic_nats_total{self._labels()} {self.epistemic:.6f}"]
        lines += _heading("hydra_requests_in_flight", "gauge", "Requests that are read, wait or are being answered.")
        lines += [f"hydra_requests_in_flight{self._labels()} {waiting}"]
        return "\n".join(lines) + "\n"

    def _labels(self, **labels: Any) -> str:
        escaped = {
            name: str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            for name, value in {"model": self.model, **labels}.items()
        }
        return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _heading(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]


def _cause_of_refusal(answer: dict[str, Any]) -> str:
    """ "detector": a score is on the wrong side of its threshold, so the input is foreign or too hard; else it is empty."""
    reason = answer.get("reason") or ""
    if "not a number" in reason:
        return "not_a_number"
    return "detector" if "threshold" in reason else "empty"
