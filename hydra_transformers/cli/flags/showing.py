"""The arguments of `app`."""

import argparse
import math
from pathlib import Path

from .shared import add_device, positive


def add_app(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the output of `calibrate` or `fuse`, or any classifier, CLIP or SigLIP model or saved baseline; folder or Hub name",
    )
    parser.add_argument(
        "--single", metavar="MODEL", help="another model, whose answers stand beside: one backbone, for example"
    )
    parser.add_argument(
        "--examples",
        type=Path,
        metavar="PATH",
        help="to click on: a folder of images, its folders being groups with their names, or for texts a file with one on each "
        "line, or a folder of such files",
    )
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="for CLIP and SigLIP: the classes that are there first; users may name others",
    )
    parser.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with each model")
    group = parser.add_argument_group("who may send what")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="0.0.0.0 for all who can reach this machine (default: %(default)s, this machine alone)",
    )
    group.add_argument("--port", type=_port, metavar="N", help="default: the first free one from 7860 on")
    group.add_argument(
        "--max-megabytes", type=_megabytes, default=10.0, metavar="N", help="of an image's file (default: %(default)g)"
    )
    group.add_argument(
        "--max-characters", type=positive, default=10_000, metavar="N", help="of a text (default: %(default)s)"
    )
    add_device(parser)


def _port(text: str) -> int:
    value = int(text)
    if not 0 < value < 2**16:
        raise argparse.ArgumentTypeError(f"{value} is no port: pass 1 to 65535")
    return value


def _megabytes(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no size: pass a positive number")
    return value
