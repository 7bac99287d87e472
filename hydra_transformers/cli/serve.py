"""`serve`: predictions over HTTP."""

import sys
from typing import TYPE_CHECKING, Any

from .cascades import check_is_no_cascade, load_cascade, then_option
from .options import ModelArgument, MonitorFile, best_device, duration, option


if TYPE_CHECKING:
    from ..serving.predictor import HydraPredictor

UNCALIBRATED = "note: this model was not calibrated, so it never abstains and has no sets"
NEVER_ABSTAINS = "note: this model was calibrated without a target (--risk, --coverage), so it never abstains"


def serve(
    model: ModelArgument,
    host: option(str, "127.0.0.1 lets only this machine in") = "127.0.0.1",
    port: option(int, "0 takes a free one", "N", min=0, max=2**16 - 1) = 8000,
    max_batch: option(int, "inputs per pass of the model, and per request", "N", min=1) = 16,
    max_wait_ms: option(float, "how long a request waits for others to share its pass", "MS", parser=duration) = 5.0,
    max_queue: option(int, "requests at a time; others are asked to retry", "N", min=1) = 64,
    max_body_mb: option(int, "per request", "MB", min=1) = 10,
    monitor: MonitorFile = None,
    then: then_option("As calibrated with `calibrate --then`") = None,
) -> None:
    """Predict over HTTP, with uncertainty and abstention."""
    try:
        from ..serving import create_app, run
    except ImportError as error:
        raise ImportError(f"serve needs {error.name}: pip install 'hydra-transformers[serve]'") from error
    if not then:
        check_is_no_cascade(model)
    predictor = load_cascade(model, then, best_device()) if then else predictor_of(model)
    limits = {"max_batch": max_batch, "max_wait_ms": max_wait_ms, "max_queue": max_queue}
    app = create_app(predictor, **limits, max_body=max_body_mb * 1_000_000, monitor=monitor)
    print(f"{predictor.name} answers at POST /predict; Ctrl+C stops it once requests are answered.", file=sys.stderr)
    run(app, host, port)


def predictor_of(name: str, **settings: Any) -> "HydraPredictor":
    """Return the predictor of a model; print a note on stderr if it never abstains."""
    from ..serving.predictor import HydraPredictor

    predictor = HydraPredictor(name, device=best_device(), **settings)
    if predictor.calibration is None:
        print(UNCALIBRATED, file=sys.stderr)
    elif predictor.calibration["threshold"] is None:
        print(NEVER_ABSTAINS, file=sys.stderr)
    return predictor
