"""The arguments of `analyse`."""

import argparse

from .shared import add_batch_size, add_data, add_device, add_named, add_output, positive, seconds


ROWS = 2_000  # of each set, unless told otherwise: an analysis answers thousands of times


def add_analyse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a fine-tuned classifier, a CLIP or SigLIP model, or a Hydra with one member"
    )
    ood = "out-of-distribution data; may be repeated. Circuits are extracted with one half of the rows of the first"
    add_named(parser, "--ood", "DATA", ood, required=True)
    parser.add_argument(
        "--noisy",
        metavar="NAME_OR_FOLDER",
        help="labelled noisy data (default: the data itself with Gaussian noise on pixels, or some tokens replaced)",
    )
    parser.add_argument(
        "--budget", type=positive, metavar="N", help="heads that the compared sets cut out (default: a quarter)"
    )
    parser.add_argument(
        "--budgets", nargs="+", type=positive, metavar="N", help="numbers of heads to go without (default: up to half)"
    )
    parser.add_argument(
        "--mode", choices=("exact", "shortlist"), default="exact", help="of circuits (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=0.0, help="to measure the time of each pruned model (default: not at all)"
    )
    add_batch_size(parser, 32)
    add_device(parser)
    add_data(parser, f"validation, test or train, whichever comes first; {ROWS:,} rows unless --limit says otherwise")
    parser.set_defaults(limit=ROWS)
    add_output(parser, "gets report.md, results.json, circuits and pictures; must be new")
