"""The arguments of `evaluate`, `benchmark` and `info`."""

import argparse
from pathlib import Path

from .choices import DETECTORS, SEVERITIES
from .shared import add_batch_size, add_data, add_device, add_named, positive, seconds


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the output of `fuse`, or any classifier, CLIP or SigLIP model or saved baseline",
    )
    add_named(parser, "--compare", "MODEL", "another model, judged as well, with its own processor; may be repeated")
    for group in ("near", "far"):
        add_named(parser, f"--{group}", "DATA", f"{group} out-of-distribution data; may be repeated")
    parser.add_argument(
        "--score",
        choices=DETECTORS,
        default="msp",
        help="OOD score (default: %(default)s); those that know the training data are fitted first",
    )
    parser.add_argument(
        "--fit-data", metavar="NAME_OR_FOLDER", help="data to fit the score on (default: that of --data)"
    )
    parser.add_argument("--fit-split", help="default: train")
    parser.add_argument(
        "--corruptions",
        type=_names,
        metavar="NAMES",
        help="judge on the corrupted data, too: names with commas between them, of corruptions (gaussian_noise, "
        "jpeg_compression, typos, ...) or groups (noise, blur, colour, digital, characters, words), or all",
    )
    parser.add_argument(
        "--severities", type=_severities, metavar="N,N", help="of the corruptions, of 1 to 5 (default: 1,2,3,4,5)"
    )
    add_batch_size(parser, 32)
    add_device(parser)
    add_data(parser, "validation, test or train, whichever comes first")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="gets report.md, report.html, report.json and plots (default: MODEL/evaluation)",
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _severities(text: str) -> list[int]:
    found = [part.strip() for part in text.split(",")]
    if not set(found) <= set(map(str, SEVERITIES)):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of severities: pass some of 1 to 5, as 1,3,5")
    return [int(part) for part in found]


def add_benchmark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hydra: the output of `fuse`, a member, or a Hub name")
    parser.add_argument("--batch-sizes", nargs="+", type=positive, default=[1, 8], metavar="N", help="default: 1 8")
    parser.add_argument(
        "--seconds", type=seconds, default=5.0, help="to measure per batch size (default: %(default)s)"
    )
    add_device(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table to this file, too")


def add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="FOLDER_OR_REPO",
        help="a Hydra, of which no weights are read, a baseline, or a folder of members",
    )
