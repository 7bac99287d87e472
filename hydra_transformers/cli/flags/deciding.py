"""The arguments of `calibrate` and `predict`."""

import argparse

from .choices import DECIDING_DETECTORS
from .shared import add_batch_size, add_data, add_device, add_output, positive, share


SETS = ("lac", "aps", "raps", "none")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the output of `fuse`, or any classifier, CLIP or SigLIP model or saved baseline",
    )
    add_data(parser, "validation, test or train, whichever comes first; best rows that the model was not trained on")
    group = parser.add_argument_group("when to abstain (default: never)")
    target = group.add_mutually_exclusive_group()
    target.add_argument("--risk", type=share, metavar="SHARE", help="at most this share of the answers is wrong: 0.05")
    target.add_argument("--coverage", type=share, metavar="SHARE", help="at least this share is answered: 0.9")
    target.add_argument("--tpr", type=share, metavar="SHARE", help="this share of --ood-data is refused: 0.95")
    group.add_argument(
        "--confidence",
        type=share,
        metavar="SHARE",
        help="promise it for new rows in this share of all calibrations: 0.95",
    )
    group.add_argument(
        "--ood-data", metavar="NAME_OR_FOLDER", help="rows from elsewhere, for --tpr, or to see their share"
    )
    group.add_argument(
        "--detector",
        choices=DECIDING_DETECTORS,
        default="msp",
        metavar="NAME",
        help=f"the score by which it abstains, of {', '.join(DECIDING_DETECTORS)} (default: %(default)s)",
    )
    group.add_argument(
        "--training-data",
        metavar="NAME_OR_FOLDER",
        help="what a detector that needs a fit learns (default: half of --data)",
    )
    group = parser.add_argument_group("prediction sets")
    group.add_argument(
        "--alpha",
        type=share,
        default=0.1,
        metavar="SHARE",
        help="how many may miss the right class (default: %(default)s)",
    )
    group.add_argument("--sets", choices=SETS, default="lac", help="their kind (default: %(default)s)")
    add_batch_size(parser, 32)
    add_device(parser)
    add_output(parser, "gets the calibrated model with its code, processor and circuits")


def add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the output of `calibrate` or `fuse`, or any classifier, CLIP or SigLIP model or saved baseline",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="texts, image files or URLs, or audio files; - reads them from stdin, one per line",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON per input, in place of a table")
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="for CLIP and SigLIP: the classes to choose from (default: those it was calibrated for)",
    )
    parser.add_argument(
        "--top-k", type=positive, default=5, metavar="N", help="scores per input (default: %(default)s)"
    )
    parser.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with the model")
    add_batch_size(parser, 8)
    add_device(parser)
