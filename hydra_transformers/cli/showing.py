"""`app`: a page in the browser to try a model on."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .deciding import load_to_answer
from .problems import CommandError


if TYPE_CHECKING:
    from ..serving.page_answers import AskedModel


def app(arguments: argparse.Namespace) -> None:
    from ..serving.page import launch_page
    from ..serving.page_examples import read_examples
    from ..serving.page_inputs import Limits

    limits = Limits(megabytes=arguments.max_megabytes, characters=arguments.max_characters)
    model = _asked(arguments.model, arguments)
    if arguments.labels is not None and not model.needs_classes:
        raise CommandError(f"--labels is for CLIP and SigLIP, {arguments.model} has classes of its own: leave it out")
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
    from ..serving.page_answers import AskedModel

    folder = Path(name)
    loaded = load_to_answer(argparse.Namespace(**vars(arguments) | {"model": name}))
    return AskedModel(folder.resolve().name if folder.is_dir() else name, *loaded)
