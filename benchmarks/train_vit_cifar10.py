"""The recipe of the CIFAR-10 backbones that `benchmarks/uncertainty.py` compares methods on, by itself.

    python benchmarks/train_vit_cifar10.py --data DIR --output vit-cifar10 --seed 0

DIR holds plain files (see real_data/local_files.py). The ViT starts from new weights; every tenth training image is held
out. Stopped and started again, it goes on from its last checkpoint. OUTPUT loads with
`ViTForImageClassification.from_pretrained`.
"""

import argparse
from pathlib import Path

import torch

from real_data.from_scratch import accuracy_of, train_from_scratch
from real_data.settings import CIFAR10_SCHEDULE, new_cifar10_vit, read_cifar10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    splits = read_cifar10(args.data, None)
    parts = splits.train, splits.validation, splits.test
    train, validation, test = (rows.to(args.device) for rows in parts)
    torch.manual_seed(args.seed)
    model = new_cifar10_vit().to(args.device)
    [model] = train_from_scratch([model], train, validation, CIFAR10_SCHEDULE, [args.output], args.seed)
    print(f"test accuracy {accuracy_of(model, test):.4f}")


if __name__ == "__main__":
    main()
