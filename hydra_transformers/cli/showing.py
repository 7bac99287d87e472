"""`app`: a page in the browser to try a model on."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import add_device, positive
from .deciding import load_to_answer
from .problems import CommandError


if TYPE_CHECKING:
    from ..app import AskedModel


def add_app(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the output of `calibrate` or `fuse`, or any classifier, CLIP model or saved baseline; folder or Hub name",
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
        help="for CLIP: the classes that are there first; users may name others",
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


def app(arguments: argparse.Namespace) -> None:
    from ..app import Limits, launch_page, read_examples

    limits = Limits(megabytes=arguments.max_megabytes, characters=arguments.max_characters)
    model = _asked(arguments.model, arguments)
    if arguments.labels is not None and not model.needs_classes:
        raise CommandError(f"--labels is for CLIP, {arguments.model} has classes of its own: leave it out")
    examples = None if arguments.examples is None else read_examples(arguments.examples, model.reads, limits)
    single = None if arguments.single is None else _asked(arguments.single, arguments)
    try:
        page = launch_page(model, single, examples, limits, arguments.labels or (), arguments.host, arguments.port)
    except OSError as error:
        where = "any port from 7860 on" if arguments.port is None else f"port {arguments.port}"
        raise CommandError(
            f"the page cannot be served at {where} of {arguments.host} ({error}): pass another --port or --host"
        ) from error
    print(f"The page of {model.name} is at {page.local_url} (Ctrl-C ends it).", flush=True)
    page.block_thread()


def _asked(name: str, arguments: argparse.Namespace) -> "AskedModel":
    from ..app import AskedModel

    folder = Path(name)
    loaded = load_to_answer(argparse.Namespace(**vars(arguments) | {"model": name}))
    return AskedModel(folder.resolve().name if folder.is_dir() else name, *loaded)


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
