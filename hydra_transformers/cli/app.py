"""`app`: a page in the browser to try a model on."""

from pathlib import Path

from .options import ModelArgument, option


def app(
    model: ModelArgument,
    examples: option(
        Path | None, "a folder of images or WAV files (or of such folders), or a file with one text per line", "PATH"
    ) = None,
    labels: option(list[str] | None, "for CLIP and SigLIP: a class to choose; repeat it for each", "LABEL") = None,
    host: option(str, "0.0.0.0 lets other machines in; 127.0.0.1 this one only") = "127.0.0.1",
    port: option(int | None, "default: the first free one from 7860 on", "N", min=1, max=2**16 - 1) = None,
) -> None:
    """Open a page in the browser to try a model on: its answer, its members', its uncertainty."""
    from .serve import predictor_of

    predictor = predictor_of(model)
    if labels and not predictor.needs_classes:
        raise ValueError(f"--labels is for CLIP and SigLIP, {model} has its own classes: leave it out")
    from ..serving.page import launch_page

    page = launch_page(predictor, examples, class_names=labels or (), host=host, port=port)
    print(f"The page of {predictor.name} is at {page.local_url} (Ctrl-C ends it).", flush=True)
    page.block_thread()
