"""The `hydra-transformers` command: each step's output folder is the next step's input."""

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from logging import NOTSET, WARNING, Handler, LogRecord, getLogger

from .._version import __version__
from .problems import sentence_of


@dataclass(frozen=True)
class Command:
    """One command: a line of help, an example, and the module that runs it; that of the same name in `flags` declares its
    arguments."""

    module: str
    summary: str
    example: str


COMMANDS = {
    "demo": Command("demo", "the whole story on digits, without a download", "hydra-transformers demo"),
    "build": Command(
        "build",
        "from a pre-trained model and data to a Hydra: fine-tune several times, prune, fuse, evaluate; or choose for me (--target)",
        "hydra-transformers build facebook/dinov2-small --data cifar100 --ood-data svhn:cropped_digits --output my-hydra",
    ),
    "finetune": Command(
        "building",
        "fine-tune a pre-trained model several times, or pruned members one by one",
        "hydra-transformers finetune facebook/dinov2-small --members 3 --data cifar100 --part training --output finetuned",
    ),
    "prune": Command(
        "building",
        "cut heads out of several fine-tunings, each by its own circuit, or different heads out of copies of one model",
        "hydra-transformers prune finetuned --data cifar100 --part validation --ood-data svhn:cropped_digits --output pruned",
    ),
    "fuse": Command("building", "make one model of the members", "hydra-transformers fuse pruned --output my-hydra"),
    "evaluate": Command(
        "judging",
        "accuracy, calibration and out-of-distribution detection, as tables and plots",
        "hydra-transformers evaluate my-hydra --data cifar100 --near tin=zh-plus/tiny-imagenet --far svhn=svhn:cropped_digits",
    ),
    "calibrate": Command(
        "deciding",
        "fit when a model says that it does not know, and which classes it may be; saved with the model",
        "hydra-transformers calibrate my-hydra --data cifar100 --split 'test[:5000]' --risk 0.05 --output my-calibrated-hydra",
    ),
    "predict": Command(
        "deciding",
        "answers to texts or images, with their uncertainty",
        "hydra-transformers predict my-calibrated-hydra one.jpg two.jpg --json",
    ),
    "app": Command(
        "showing",
        "a page in the browser to try a model on: its answer, its members', its uncertainty",
        "hydra-transformers app my-calibrated-hydra --single finetuned/member-0 --examples pictures",
    ),
    "benchmark": Command(
        "judging",
        "parameters, multiply-adds and time, against one model and a Deep Ensemble",
        "hydra-transformers benchmark my-hydra --batch-sizes 1 8 64",
    ),
    "analyse": Command(
        "analysing",
        "which heads see what, who is pruned, how many can go: a folder with a report and pictures",
        "hydra-transformers analyse finetuned/member-0 --data cifar100 --ood svhn=svhn:cropped_digits --output heads",
    ),
    "info": Command("judging", "which heads each member keeps, sizes and cost", "hydra-transformers info my-hydra"),
    "card": Command(
        "publishing",
        "write the model card",
        "hydra-transformers card my-hydra --repo me/my-hydra --dataset cifar100 --license apache-2.0",
    ),
    "export": Command(
        "exporting",
        "write the model as ONNX, or as PyTorch's archive of a graph, to run without this package",
        "hydra-transformers export my-calibrated-hydra --to onnx --output my-onnx",
    ),
    "serve": Command(
        "serving",
        "answer over HTTP, with uncertainty and abstention",
        "hydra-transformers serve my-calibrated-hydra --port 8000",
    ),
    "push": Command(
        "publishing", "publish model, code, processor and card", "hydra-transformers push my-hydra me/my-hydra"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 when it worked, 1 when something was wrong, 2 when it was called wrongly (argparse exits)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser, runs = build_parser(argv)
    arguments = parser.parse_args(argv)
    try:
        with quiet_libraries():
            runs[arguments.command](arguments)
    except KeyboardInterrupt:
        print("stopped: the same command goes on where it was", file=sys.stderr)
        return 1
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"hydra-transformers {arguments.command}: {sentence_of(error)}", file=sys.stderr)
        return 1
    return 0


def build_parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, dict[str, Callable]]:
    """The parser, and by command what runs it; nothing is imported but the arguments of the command in `argv`, so
    that help comes at once."""
    parser = argparse.ArgumentParser(
        prog="hydra-transformers",
        description="Fine-tune a transformer several times, prune each, fuse them into one model that knows when it does not know.",
        epilog="The way: finetune, prune, fuse, evaluate (or build, which does all four), calibrate, card, push. Each step's "
        "output folder is the next step's input.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    chosen = next((word for word in argv if word in COMMANDS), None)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = {}
    for name, command in COMMANDS.items():
        description = f"{command.summary[0].upper()}{command.summary[1:]}."
        subparser = commands.add_parser(
            name,
            help=command.summary,
            description=description,
            epilog=f"Example: {command.example}",
        )
        if name == chosen:
            runs[name] = _declared(subparser, name, command.module)
        subparser.add_argument("--debug", action="store_true", help="show the whole trace when something goes wrong")
    return parser, runs


def _declared(parser: argparse.ArgumentParser, name: str, module: str) -> Callable:
    """Adds a command's arguments and returns what runs it, which imports its module no sooner than that."""
    if module == "demo":
        from ..demo import __main__ as demo

        demo.add_arguments(parser)
        return demo.run
    getattr(import_module(f".flags.{module}", __name__), f"add_{name}")(parser)
    return lambda arguments: getattr(import_module(f".{module}", __name__), name)(arguments)


class _Notes(Handler):
    def emit(self, record: LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Of the libraries errors only, and no bars for weights; our own warnings as notes. Afterwards all is as it was."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity, had_bars, hub_verbosity = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        hub_logging.get_verbosity(),
    )
    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ours, notes = getLogger("transformers.hydra_transformers"), _Notes(WARNING)
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
