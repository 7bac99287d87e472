"""The arguments of `serve`."""

import argparse

from .shared import add_device, positive, seconds


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the output of `calibrate` or `fuse`, or any classifier, CLIP or SigLIP model or saved baseline",
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
    parser.add_argument(
        "--no-docs",
        action="store_true",
        help="without /docs, a page about the API whose scripts come from a public server",
    )
    parser.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with the model")
    add_device(parser)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{value} is no port: pass 0 to {2**16 - 1:,}")
    return value
