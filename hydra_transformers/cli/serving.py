"""`serve`: answers over HTTP."""

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import __version__
from ..hub.handler import Answerer
from ..models.auto import auto_class_of
from ..prediction import config_of
from ..uncertainty import DecidingClassifier
from .arguments import device_of
from .deciding import ZERO_SHOT, load_to_predict
from .folders import load_config
from .problems import CommandError


def answerer_of(arguments: argparse.Namespace) -> tuple[Answerer, dict[str, Any]]:
    """The model, ready to answer, and what may be told of it."""
    from ..serving import ModelAnswerer

    config = load_config(arguments.model)
    task = auto_class_of(config.model_type)
    if getattr(config, "problem_type", None) == "regression":
        raise CommandError(
            f"{arguments.model} is made for regression, and answers choose among classes: pass a classifier"
        )
    is_decided = DecidingClassifier.is_saved_in(arguments.model)
    classes = DecidingClassifier.classes_saved_in(arguments.model) if is_decided else None
    model, processor = load_to_predict(arguments.model, arguments.processor, device_of(arguments))
    is_calibrated = is_decided or getattr(config, "decision", None) is not None
    if not is_calibrated:
        print("note: this model was not calibrated, so it never abstains and has no sets", file=sys.stderr)
    if task == ZERO_SHOT and classes is None:
        kind = "zero-shot"
    else:
        kind = "text" if task == "AutoModelForSequenceClassification" else "image"
        classes = classes or list(config_of(model).id2label.values())
    path = Path(arguments.model)
    about = {
        "model": path.resolve().name if path.exists() else arguments.model,  # not where it lies
        "kind": kind,
        "labels": classes,
        "members": getattr(config, "num_members", None),
        "calibrated": is_calibrated,
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
    app = create_app(answerer, about, **limits, max_body=arguments.max_body_mb * 1_000_000)
    print(f"{about['model']} answers at POST /predict; Ctrl+C closes it when what waits is answered.", file=sys.stderr)
    run(app, arguments.host, arguments.port)
