"""The recipe of the CIFAR-10 backbones that `python -m experiments` compares methods on, by itself.

    python -m experiments.train_vit_cifar10 --data DIR --output vit-cifar10 --seed 0
    python -m experiments.train_vit_cifar10 --smallest                              # does it run? made-up data, seconds

DIR holds plain files (see local_files.py). The ViT starts from new weights; every tenth training image is held
out. Stopped and started again, it goes on from its last checkpoint. OUTPUT loads with
`ViTForImageClassification.from_pretrained`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from . import smallest
from .from_scratch import Schedule, accuracy_of, train_from_scratch
from .settings import CIFAR10_SCHEDULE, new_cifar10_vit, read_cifar10
from .splits import Splits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="a tiny model on made-up data, kept in no file: shows that it runs",
    )
    args = parser.parse_args()
    if args.smallest:
        with tempfile.TemporaryDirectory() as folder:
            model, splits = smallest.new_backbone(), smallest.splits()
            return train(model, splits, smallest.SCHEDULE, Path(folder) / "vit", args)
    if args.data is None or args.output is None:
        parser.error("--data or --output is missing: pass the folder with vision/, and where the model goes")
    torch.manual_seed(args.seed)
    train(new_cifar10_vit(), read_cifar10(args.data, None), CIFAR10_SCHEDULE, args.output, args)


def train(model: PreTrainedModel, splits: Splits, schedule: Schedule, output: Path, args: argparse.Namespace) -> None:
    on_device = splits.to(args.device)
    [model] = train_from_scratch(
        [model.to(args.device)], on_device.train, on_device.validation, schedule, [output], args.seed
    )
    print(f"test accuracy {accuracy_of(model, on_device.test):.4f}")


if __name__ == "__main__":
    main()
