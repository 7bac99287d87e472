"""The arguments of `build`."""

import argparse

from .choices import OBJECTIVES, RECIPES
from .shared import (
    add_batch_size,
    add_data,
    add_device,
    add_named,
    add_output,
    add_training,
    count,
    or_best,
    positive,
    seed,
)


def add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pretrained", metavar="PRETRAINED", help="a pre-trained model, by folder or Hub name")
    parser.add_argument(
        "others",
        nargs="*",
        metavar="MODEL",
        help="with --target: where the first is a fine-tuned classifier, others of the same pre-trained model; then nothing is "
        "fine-tuned, and --data is rows that none of them was trained on",
    )
    parser.add_argument(
        "--target",
        type=target,
        metavar="TARGET",
        help="choose for me: try budgets, trunks, what to share and tuning, and take what fits: balance (the fastest Hydra at "
        "most half a point below the best), quality (the best detection at most half a point of accuracy below the best), "
        "cost=1.3 (the best within 1.3 times one model's time, measured here) or accuracy_within=1",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="MINUTES",
        help="with --target: end then with the best found so far; what is cut off is told before it starts and at the end",
    )
    parser.add_argument(
        "--members",
        type=positive,
        default=3,
        metavar="M",
        help="fine-tunings (default: %(default)s); with --target the most members, fewer are tried too",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        help="default: as finetune-images or finetune-texts, with epochs by the number of rows and an early end",
    )
    add_training(parser, " of each fine-tuning, not of what --tune trains")
    parser.add_argument(
        "--budget",
        type=or_best(count),
        metavar="N",
        help="heads each member loses; 0 prunes nothing; best: those that its own circuit scores best without, at most a third "
        "(default: a sixth of all)",
    )
    parser.add_argument(
        "--ood-data", metavar="NAME_OR_FOLDER", help="out-of-distribution data, by which heads are chosen as well"
    )
    parser.add_argument("--ood-split", help="default: train, validation or test, whichever comes first")
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="what the circuits are extracted for (default: avg with --ood-data; without, nothing is pruned)",
    )
    parser.add_argument("--mode", choices=("exact", "shortlist"), default="exact", help="default: %(default)s")
    parser.add_argument(
        "--circuit-rows", type=positive, default=1_000, metavar="N", help="rows of each set (default: %(default)s)"
    )
    parser.add_argument("--tune", action="store_true", help="fine-tune again after pruning")
    parser.add_argument(
        "--trunk-layers",
        type=count,
        metavar="N",
        help="merge the first N layers whole, from which nothing is pruned: they run once for all members",
    )
    parser.add_argument(
        "--freeze-trunk",
        action="store_true",
        default=None,
        help="do not train the layers of the trunk nor the embeddings, so that merging them changes nothing",
    )
    parser.add_argument("--max-steps", type=positive, metavar="N", help="of each training, to try it out")
    parser.add_argument("--test-data", metavar="NAME_OR_FOLDER", help="default: a tenth of the data, not trained on")
    parser.add_argument("--test-split", help="a split of --test-data, or of --data")
    for group in ("near", "far"):
        add_named(parser, f"--{group}", "DATA", f"{group} out-of-distribution data to evaluate on; may be repeated")
    parser.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    add_batch_size(parser, 32)
    add_device(parser)
    add_data(parser, "train", has_own_classes=False)
    add_output(parser, "gets the Hydra and its evaluation; DIR-steps the members. Run again to go on after a stop")


def target(text: str) -> str | dict[str, float]:
    """balance, quality, cost=1.3 or accuracy_within=0.5"""
    name, sign, value = text.partition("=")
    if not sign and name in ("balance", "quality"):
        return name
    try:
        if name in ("cost", "accuracy_within"):
            return {name: float(value)}
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is no target: pass balance, quality, cost=1.3 or accuracy_within=0.5")
