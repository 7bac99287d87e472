"""`export`: a Hydra in a format that runs without this package."""

import argparse
import sys
from pathlib import Path

from ..formats import FILES
from ..formats import export as write
from ..uncertainty import DecidingClassifier
from .arguments import add_output, check_named_once
from .folders import check_is_new, check_takes_files, load_config, load_model, load_processor
from .judging import check_is_hydra


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hydra: the output of `fuse` or `calibrate`, or a Hub name")
    parser.add_argument(
        "--to",
        nargs="+",
        choices=list(FILES),
        default=["onnx"],
        metavar="FORMAT",
        help=f"of {', '.join(f'{name} ({file})' for name, file in FILES.items())}, or both (default: onnx)",
    )
    parser.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with the model")
    add_output(parser, "a new folder: gets the exported model, config.json and the processor")


def export(arguments: argparse.Namespace) -> None:
    check_named_once(arguments.to, "--to")
    check_is_new(arguments.output)
    check_takes_files(arguments.output)
    config = load_config(arguments.model)
    check_is_hydra(config, arguments.model)
    processor = load_processor(arguments.processor or arguments.model, config)
    if DecidingClassifier.is_saved_in(arguments.model):
        print(
            "note: CLIP is exported without its decision, which is about the classes of one data set", file=sys.stderr
        )
    model = load_model(arguments.model).float()
    write(model, arguments.output, arguments.to, processor)
    is_calibrated = getattr(config, "decision", None) is not None
    told = "with its calibration" if is_calibrated else "not calibrated, so it has no abstain and no prediction_set"
    files = " and ".join(str(Path(arguments.output) / FILES[each]) for each in arguments.to)
    print(f"{files}: {told}; it answers as the model does (docs/export.md tells how to run it).")
