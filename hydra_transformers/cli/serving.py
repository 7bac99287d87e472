"""`serve`: answers over HTTP."""

import argparse
import sys
from pathlib import Path
from typing import Any

from .._version import __version__
from ..data.prediction import config_of
from ..hub.handler import Answerer
from ..models.auto import auto_class_of
from ..uncertainty.features import taken_apart
from .deciding import ZERO_SHOT, classes_decided_on, load_to_answer
from .folders import load_config
from .problems import CommandError


KINDS = {
    "AutoModelForSequenceClassification": "text",
    "AutoModelForImageClassification": "image",
    ZERO_SHOT: "zero-shot",
}


def answerer_of(arguments: argparse.Namespace) -> tuple[Answerer, dict[str, Any]]:
    """The model, ready to answer, and what may be told of it."""
    from ..serving import ModelAnswerer

    config = load_config(arguments.model)
    task = auto_class_of(config)
    if task not in KINDS:
        raise CommandError(
            f"{arguments.model} reads neither texts nor images: serve has no way to send it anything else"
        )
    if getattr(config, "problem_type", None) == "regression":
        raise CommandError(
            f"{arguments.model} is made for regression, and answers choose among classes: pass a classifier"
        )
    classes = classes_decided_on(arguments.model)
    model, processor = load_to_answer(arguments)
    kind = "image" if classes is not None else KINDS[task]
    if kind != "zero-shot":
        classes = classes or list(config_of(model).id2label.values())
    path = Path(arguments.model)
    about = {
        "model": path.resolve().name if path.exists() else arguments.model,  # not where it lies
        "kind": kind,
        "labels": classes,
        "members": getattr(config, "num_members", None),
        "calibrated": taken_apart(model)[1] is not None,
        "hydra_transformers": __version__,
    }
    return ModelAnswerer(model, processor, kind), about


def serve(arguments: argparse.Namespace) -> None:
    try:
        from ..serving import create_app, run
    except ImportError as error:
        raise CommandError(f"serve needs {error.name}: pip install fastapi uvicorn pillow") from error
    answerer, about = answerer_of(arguments)
    limits = {name: getattr(arguments, name) for name in ("max_batch", "max_wait_ms", "max_queue")}
    app = create_app(answerer, about, **limits, max_body=arguments.max_body_mb * 1_000_000, docs=not arguments.no_docs)
    print(f"{about['model']} answers at POST /predict; Ctrl+C closes it when what waits is answered.", file=sys.stderr)
    run(app, arguments.host, arguments.port)
