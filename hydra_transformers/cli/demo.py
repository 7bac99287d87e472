"""`demo`: the whole story on digits."""

from pathlib import Path

from .options import option, switch


def demo(
    output: option(Path, "folder for the results", "DIR") = Path("demo-output"),
    train: switch("--train", "pre-train the model, too, instead of loading it") = False,
    fast: switch("--fast", "a few steps of everything: quick, and worth nothing else") = False,
) -> None:
    """Tell the whole story on digits, without a download."""
    import torch

    from ..demo.story import FAST, FULL, tell

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums is fixed, and so are the figures
    try:
        tell(output, FAST if fast else FULL, train)
    finally:
        torch.set_num_threads(threads)
