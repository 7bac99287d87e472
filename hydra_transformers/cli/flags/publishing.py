"""The arguments of `card` and `push`."""

import argparse
from pathlib import Path


def _add_card_fields(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="report.json of `evaluate` (default: DIR/evaluation/…)"
    )
    parser.add_argument(
        "--report-model", metavar="NAME", help="which of the report's models this is, where --report has several"
    )
    parser.add_argument("--dataset", metavar="NAME", help="the report's in-distribution data on the Hub")
    parser.add_argument("--base-model", metavar="NAME", help="the backbone on the Hub")
    parser.add_argument("--license", metavar="ID", help='for example "apache-2.0"')
    parser.add_argument("--fine-tuning", metavar="SENTENCE", help="how the members were fine-tuned")


def add_card(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the output of `fuse`, or a saved baseline; gets README.md"
    )
    parser.add_argument("--repo", metavar="REPO", help="where the model will lie on the Hub, me/my-hydra")
    parser.add_argument("--overwrite", action="store_true", help="replace a README.md that is there")
    _add_card_fields(parser)


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the output of `fuse`, or a saved baseline")
    parser.add_argument("repo", metavar="REPO", help="me/my-hydra; made where it does not exist")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--overwrite-card", action="store_true", help="replace the whole card on the Hub")
    group = parser.add_argument_group("a page to try it on")
    group.add_argument(
        "--space",
        metavar="NAME",
        help="me/my-page: publish the page of `hydra-transformers app` as a Space, too; its files are written to DIR/space first, "
        "and published as they are where they are there",
    )
    group.add_argument("--space-single", metavar="MODEL", help="a model on the Hub, whose answers stand beside")
    group.add_argument("--space-examples", type=Path, metavar="PATH", help="to click on, as for `app --examples`")
    _add_card_fields(parser)
