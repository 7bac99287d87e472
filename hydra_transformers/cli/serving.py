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
from .arguments import add_device, positive, seconds
from .deciding import ZERO_SHOT, classes_decided_on, load_to_answer
from .folders import load_config
from .problems import CommandError


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the output of `calibrate` or `fuse`, or any classifier, CLIP model or saved baseline",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, which only this machine reaches")
    parser.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="default: %(default)s; 0 takes a free one"
    )
    parser.add_argument(
        "--max-batch",
        type=positive,
        default=16,
        metavar="N",
        help="inputs per pass of the model, and per request (default: %(default)s)",
    )
    parser.add_argument(
        "--max-wait-ms",
        type=seconds,
        default=5.0,
        metavar="MS",
        help="how long a request waits for others to share its pass (default: %(default)s)",
    )
    parser.add_argument(
        "--max-queue",
        type=positive,
        default=64,
        metavar="N",
        help="requests at a time; others are told to come again (default: %(default)s)",
    )
    parser.add_argument(
        "--max-body-mb", type=positive, default=10, metavar="MB", help="of one request (default: %(default)s)"
    )
    parser.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with the model")
    add_device(parser)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{value} is no port: pass 0 to {2**16 - 1:,}")
    return value


def answerer_of(arguments: argparse.Namespace) -> tuple[Answerer, dict[str, Any]]:
    """The model, ready to answer, and what may be told of it."""
    from ..serving import ModelAnswerer

    config = load_config(arguments.model)
    task = auto_class_of(config.model_type)
    if getattr(config, "problem_type", None) == "regression":
        raise CommandError(
            f"{arguments.model} is made for regression, and answers choose among classes: pass a classifier"
        )
    classes = classes_decided_on(arguments.model)
    model, processor = load_to_answer(arguments)
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
        "calibrated": isinstance(model, DecidingClassifier) or getattr(config, "decision", None) is not None,
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
