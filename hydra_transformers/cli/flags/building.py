"""The arguments of `prune`, `finetune` and `fuse`."""

import argparse

from .choices import CIRCUIT_SCORES, OBJECTIVES, RECIPES, SHARED_PARTS
from .shared import (
    add_batch_size,
    add_data,
    add_device,
    add_output,
    add_training,
    count,
    learning_rate,
    or_best,
    positive,
    seed,
)


def add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="an image, text or audio classifier or a CLIP or SigLIP model, by Hub name or folder; or several fine-tunings of one pre-trained "
        "model, or the folder of `finetune` that holds them: then each makes one member, by a circuit of its own",
    )
    parser.add_argument("--method", choices=("taylor", "circuits"), default="circuits", help="default: %(default)s")
    parser.add_argument("--members", type=positive, default=None, metavar="M", help="how many members (default: 3)")
    parser.add_argument(
        "--budget",
        type=or_best(positive),
        metavar="N",
        help="circuits: heads each member loses (default: a sixth of those that compete); best: those that its own circuit scores "
        "best without, at most a third",
    )
    parser.add_argument(
        "--heads-per-layer", type=positive, metavar="N", help="taylor: heads each layer keeps (default: two thirds)"
    )
    parser.add_argument(
        "--objectives",
        nargs="+",
        choices=OBJECTIVES,
        help="circuits: what a circuit is extracted for, one member each; with a single one, members are sampled from its "
        "ranking (default: acc ood avg with --ood-data, otherwise acc); of several models a single one (default: avg with "
        "--ood-data, otherwise acc)",
    )
    parser.add_argument(
        "--out-of",
        type=positive,
        metavar="N",
        help="circuits, with a single objective: the first N heads of its ranking are those to sample from (default: twice "
        "the budget)",
    )
    parser.add_argument(
        "--trunk-layers",
        type=count,
        default=0,
        metavar="N",
        help="cut nothing out of the first N layers, for members that run them once when fused (default: %(default)s)",
    )
    parser.add_argument("--mode", choices=("exact", "shortlist"), default="exact", help="default: %(default)s")
    parser.add_argument("--ood-data", metavar="NAME_OR_FOLDER", help="out-of-distribution data for ood and avg")
    parser.add_argument("--ood-split", help="default: train, validation or test, whichever comes first")
    parser.add_argument(
        "--score",
        choices=CIRCUIT_SCORES,
        default="msp",
        help="circuits for ood and avg: the OOD score, best the one that will be used (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    parser.add_argument(
        "--allow-equal", action="store_true", help="take members that lose the same heads, to be trained apart"
    )
    add_batch_size(parser, 32)
    add_device(parser)
    add_data(parser, "train")
    add_output(parser, "gets member-0, member-1, ... and the circuits; run again to go on after a stop")


def add_finetune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="DIR_OR_MODEL",
        help="the output of `prune`; or a pre-trained model, by folder or Hub name, which is fine-tuned several times, each "
        "time with a new classifier for the classes of the data",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        help="how to train (default: as finetune-images or finetune-texts from a pre-trained model, otherwise as tune-images or "
        "tune-texts, with epochs by the number of rows and an early end; imagenet1k, cifar100 and sst2 are the paper's)",
    )
    parser.add_argument(
        "--members", type=positive, metavar="M", help="how many fine-tunings of a pre-trained model (default: 3)"
    )
    parser.add_argument(
        "--validation-split",
        help="default: with --part training the part for validation; otherwise a tenth of the training rows, at most 3,000, is "
        "held out, drawn at random; with the recipe sst2 the first rows are",
    )
    parser.add_argument(
        "--learning-rates",
        nargs="+",
        type=learning_rate,
        metavar="LR",
        help='to choose from by validation, or "grid" for the recipe\'s',
    )
    add_training(parser, "")
    parser.add_argument(
        "--max-steps", type=positive, metavar="N", help="train for N steps instead of the recipe's length"
    )
    parser.add_argument(
        "--trunk-layers",
        type=count,
        default=0,
        metavar="N",
        help="do not train the first N layers, nor the embeddings: fused members run them once (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="member i trains with seed + i (default: %(default)s)")
    add_batch_size(parser, 32)
    add_data(parser, "train")
    add_output(parser, "gets the trained members; run again to go on after a stop")


def add_fuse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "members",
        nargs="+",
        metavar="DIR_OR_MODEL",
        help="the output of `finetune` or `prune`; or the members themselves, several models by folder or Hub name: plain ones "
        "of Transformers, fine-tuned from one pre-trained model, or Hydras",
    )
    parser.add_argument(
        "--shared",
        nargs="*",
        choices=SHARED_PARTS,
        default=list(SHARED_PARTS),
        metavar="PART",
        help=f"what becomes the mean over the members, of {', '.join(SHARED_PARTS)} (default: all; none for a Deep Ensemble "
        "in one forward)",
    )
    parser.add_argument(
        "--trunk-layers",
        type=count,
        metavar="N",
        help="merge the first N layers whole, attention too, so that they run once for all members; 0 for none (default: those "
        "that are equal in all members, which changes no answer)",
    )
    parser.add_argument("--allow-equal", action="store_true", help="fuse members although they are the same model")
    parser.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with the first member")
    add_output(parser, "gets the Hydra with its code and processor, ready for the Hub")
