"""The arguments of `export`."""

import argparse

from .choices import FORMATS
from .shared import add_output


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hydra: the output of `fuse` or `calibrate`, or a Hub name")
    parser.add_argument(
        "--to",
        nargs="+",
        choices=FORMATS,
        default=["onnx"],
        metavar="FORMAT",
        help="of onnx (model.onnx) and torch (model.pt2, which torch.export.load reads), or both (default: onnx)",
    )
    parser.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with the model")
    add_output(parser, "a new folder: gets the exported model, config.json and the processor")
