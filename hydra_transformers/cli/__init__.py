"""The `hydra-transformers` command.

Commands import what they need when they run, so that `--help` is quick.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache, wraps
from logging import NOTSET, WARNING, Formatter, StreamHandler, getLogger
from typing import Annotated, Any

import typer

from .._version import __version__
from ..models import register
from . import app as page
from . import calibrate, compare, demo, evaluate, export, finetune, fuse, info, predict, prune, push, serve, watch
from .errors import MISTAKES, sentence_of
from .options import command


NAME = "hydra-transformers"
INTERRUPTED = 130  # typer returns it for a KeyboardInterrupt
# The commands that several processes run together (torchrun, accelerate launch).
FOR_SEVERAL_PROCESSES = ("finetune", "prune", "evaluate")
# The commands by panel of the help, each with an example.
COMMANDS = {
    "Start": [
        (demo.demo, ""),
        (finetune.finetune, "facebook/dinov2-small --data cifar100 --output my-hydra"),
        (calibrate.calibrate, "my-hydra --data cifar100 --split validation --risk 0.05 --output calibrated"),
        (predict.predict, "calibrated photo.jpg another.jpg"),
    ],
    "Look at a model": [
        (evaluate.evaluate, "calibrated --data cifar100 --split test --far svhn=svhn:cropped_digits"),
        (info.info, "my-hydra"),
        (page.app, "calibrated --examples pictures"),
    ],
    "Use and publish": [
        (serve.serve, "calibrated --port 8000"),
        (watch.watch, "monitor.json"),
        (export.export, "calibrated --to onnx --output my-onnx"),
        (push.push, "calibrated me/my-hydra --dataset cifar100"),
    ],
    "From checkpoints, or from one model": [
        (compare.compare, "seed-0 seed-1 seed-2 --data cifar100 --split validation"),
        (fuse.fuse, "seed-0 seed-1 seed-2 --trunk-layers 0.75 --output my-hydra"),
        (prune.prune, "my-vit --data cifar100 --split validation --ood-data svhn:cropped_digits --output pruned"),
    ],
}


def quietly(function: Callable) -> Callable:
    """Return a command that starts once its words are read: wrong ones are answered at once."""

    @wraps(function)
    def start(**values: Any) -> None:
        with quiet_libraries(), joined_processes(function.__name__):
            register()
            function(**values)

    return start


app = typer.Typer(
    name=NAME,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    help="Fine-tune a transformer once and get an ensemble that knows when it does not know.",
    epilog="The usual way: finetune, calibrate, evaluate, predict. "
    "Each command's output folder is the next one's input.",
)
for panel, commands in COMMANDS.items():
    for function, example in commands:
        example = f"Example: {NAME} {function.__name__} {example}".rstrip()
        add = app.command(function.__name__, rich_help_panel=panel, epilog=example)
        add(command(quietly(function)))


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the whole trace when something goes wrong")] = False,
) -> None:
    pass


@cache
def runner() -> Any:
    """The typer command."""
    return typer.main.get_command(app)


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success, 2 for an error that the user can fix, 1 otherwise."""
    if words is None:
        words = sys.argv[1:]
    words = list(words)

    # Which command it is, for messages; None for a word that is none.
    called = next((word for word in words if not word.startswith("-")), None)
    name = NAME
    flags = []
    if called in runner().commands:
        name = f"{NAME} {called}"
        flags = [flag for option in runner().commands[called].params for flag in option.opts]

    try:
        code = runner().main(words, prog_name=NAME, standalone_mode=False) or 0
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return code
    except typer.TyperException as error:  # a wrong call
        print(f"{name}: {error.format_message()} (see {name} --help)", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("stopped: the same command continues", file=sys.stderr)
        return 1
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        # Of several processes that fail alike, one says so.
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first or not getattr(error, "is_everywhere", False):
            print(f"{name}: {sentence_of(error, flags)}", file=sys.stderr)
        return 2 if isinstance(error, MISTAKES) else 1


@contextmanager
def joined_processes(called: str) -> Iterator[None]:
    """Let processes that were started together work together.

    Only the first one prints; the others print errors alone.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    if called not in FOR_SEVERAL_PROCESSES:
        raise ValueError(f"{called} runs in one process: start it without torchrun and accelerate launch")
    import torch
    from accelerate import PartialState

    is_on_cpu = not torch.cuda.is_available()
    if is_on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # without it, Trainer would not see the other processes
    processes = PartialState(cpu=is_on_cpu)
    if processes.is_main_process:
        yield
    else:
        with open(os.devnull, "w") as sink, redirect_stdout(sink), redirect_stderr(sink):
            yield
    processes.destroy_process_group()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show only errors of the libraries, no bars for weights, and our own warnings as notes."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    hub_verbosity = hub_logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()

    # The libraries.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # it logs what it raises
    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    # Our own warnings.
    ours = getLogger("transformers.hydra_transformers")
    notes = StreamHandler(sys.stderr)
    notes.setFormatter(Formatter("note: %(message)s"))
    ours.addHandler(notes)
    ours.setLevel(WARNING)
    ours.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=UserWarning, module=r"hydra_transformers\b")
            warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
            yield
    finally:
        ours.removeHandler(notes)
        ours.setLevel(NOTSET)
        ours.propagate = True
        hub_logging.set_verbosity(hub_verbosity)
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
