"""`serve`: answers over HTTP."""

import sys
from pathlib import Path
from typing import Annotated, Any

from .._version import __version__
from ..data.prediction import config_of
from ..hub.handler import Answerer
from ..models.auto import auto_class_of
from ..uncertainty.features import without_decision
from .folders import load_config
from .options import Device, ModelArgument, Processor, option, switch
from .options import seconds as parse_milliseconds
from .predict import ZERO_SHOT, classes_decided_on, load_to_answer


KINDS = {
    "AutoModelForSequenceClassification": "text",
    "AutoModelForImageClassification": "image",
    ZERO_SHOT: "zero-shot",
}


def serve(
    model: ModelArgument,
    host: Annotated[str, option("127.0.0.1 is what only this machine reaches")] = "127.0.0.1",
    port: Annotated[int, option("0 takes a free one", "N", min=0, max=2**16 - 1)] = 8000,
    max_batch: Annotated[int, option("inputs per pass of the model, and per request", "N", min=1)] = 16,
    max_wait_ms: Annotated[
        float, option("how long a request waits for others to share its pass", "MS", parser=parse_milliseconds)
    ] = 5.0,
    max_queue: Annotated[int, option("requests at a time; others are told to come again", "N", min=1)] = 64,
    max_body_mb: Annotated[int, option("of one request", "MB", min=1)] = 10,
    no_docs: Annotated[
        bool, switch("--no-docs", "without /docs, a page about the API whose scripts come from a public server")
    ] = False,
    processor: Processor = None,
    device: Device = None,
) -> None:
    """Answer over HTTP, with uncertainty and abstention."""
    try:
        from ..serving import create_app, run
    except ImportError as error:
        raise ImportError(f"serve needs {error.name}: pip install fastapi uvicorn pillow") from error
    answerer, about = answerer_of(model, processor, device)
    limits = {"max_batch": max_batch, "max_wait_ms": max_wait_ms, "max_queue": max_queue}
    app = create_app(answerer, about, **limits, max_body=max_body_mb * 1_000_000, docs=not no_docs)
    print(f"{about['model']} answers at POST /predict; Ctrl+C closes it when what waits is answered.", file=sys.stderr)
    run(app, host, port)


def answerer_of(name: str, processor: str | None = None, device: str | None = None) -> tuple[Answerer, dict[str, Any]]:
    """The model, ready to answer, and what may be told of it."""
    from ..serving import ModelAnswerer

    config = load_config(name)
    task = auto_class_of(config)
    if task not in KINDS:
        raise ValueError(f"{name} reads neither texts nor images: serve has no way to send it anything else")
    if getattr(config, "problem_type", None) == "regression":
        raise ValueError(f"{name} is made for regression, and answers choose among classes: pass a classifier")
    classes = classes_decided_on(name)
    model, reader = load_to_answer(name, processor, device)
    kind = "image" if classes is not None else KINDS[task]
    if kind != "zero-shot":
        classes = classes or list(config_of(model).id2label.values())
    path = Path(name)
    about = {
        "model": path.resolve().name if path.exists() else name,  # not where it lies
        "kind": kind,
        "labels": classes,
        "members": getattr(config, "num_members", None),
        "calibrated": without_decision(model)[1] is not None,
        "hydra_transformers": __version__,
    }
    return ModelAnswerer(model, reader, kind), about
