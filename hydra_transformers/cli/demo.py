"""`demo`: the whole story in two minutes."""

from pathlib import Path

from .options import option, switch


def demo(
    output: option(Path, "folder for the results", "DIR") = Path("demo-output"),
    fast: switch("--fast", "a few steps of everything, to see that it runs; the model learns nothing") = False,
) -> None:
    """Fine-tune, calibrate and try a text classifier, without a download: two minutes."""
    from ..demo import run_demo

    run_demo(output, fast=fast)
