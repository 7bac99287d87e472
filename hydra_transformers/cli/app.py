"""`app`: a page in the browser to try a model on."""

from pathlib import Path

from ..serving.predictor import kind_of
from . import flags
from .folders import load_config
from .options import megabytes, option
from .serve import predictor_of


LIMITS = "Access and limits"


def app(
    model: flags.ModelArgument,
    examples: option(
        Path | None,
        "to click on: a folder of images or WAV files, each subfolder a group, or for texts a file with one per line, or a folder of these",
        "PATH",
    ) = None,
    labels: option(
        list[str] | None, "for CLIP and SigLIP: the first classes; users may name others", "LABEL..."
    ) = None,
    processor: flags.Processor = None,
    host: option(str, "0.0.0.0 lets other machines in; 127.0.0.1 this one only", panel=LIMITS) = "127.0.0.1",
    port: option(int | None, "default: the first free one from 7860 on", "N", LIMITS, min=1, max=2**16 - 1) = None,
    max_megabytes: option(float, "per file of an image or audio", "N", LIMITS, parser=megabytes) = 10.0,
    max_characters: option(int, "per text", "N", LIMITS, min=1) = 10_000,
    device: flags.Device = None,
) -> None:
    """Open a page in the browser to try a model on: its answer, its members', its uncertainty."""
    from ..serving.page import launch_page
    from ..serving.page_inputs import Limits, read_examples

    limits = Limits(megabytes=max_megabytes, characters=max_characters)
    kind_of(load_config(model), model)
    predictor = predictor_of(model, processor, device)
    if labels and not predictor.needs_classes:
        raise ValueError(f"--labels is for CLIP and SigLIP, {model} has its own classes: leave it out")
    shown = None
    if examples is not None:
        rate = {"rate": predictor.processor.sampling_rate} if predictor.reads == "audio" else {}
        shown = read_examples(examples, predictor.reads, limits, **rate)
    try:
        page = launch_page(predictor, shown, limits, labels or (), host, port)
    except OSError as error:
        where = "any port from 7860 on" if port is None else f"port {port}"
        raise OSError(
            f"the page cannot be served at {where} of {host} ({error}): pass another --port or --host"
        ) from error
    print(f"The page of {predictor.name} is at {page.local_url} (Ctrl-C ends it).", flush=True)
    page.block_thread()
