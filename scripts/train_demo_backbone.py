"""Trains the backbone that the demo ships, from the digits of scikit-learn, and puts it in its place.

python scripts/train_demo_backbone.py                      # into hydra_transformers/demo/trained
python scripts/train_demo_backbone.py --output somewhere/else  # to compare with the one that ships
"""

import argparse
from pathlib import Path

import torch

from hydra_transformers.demo.backbone import SETTINGS, SHIPPED, accuracy, save_backbone, train_backbone
from hydra_transformers.demo.digits import load_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SHIPPED, help="folder for the backbone (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # another number of threads sums in another order
    data = load_data()
    model = train_backbone(data.train, SETTINGS)
    save_backbone(model, SETTINGS, arguments.output)
    size = sum(path.stat().st_size for path in arguments.output.iterdir())
    print(f"accuracy: {accuracy(model, data.validation):.4f} on validation, {accuracy(model, data.test):.4f} on test")
    print(f"{arguments.output}: {size:,} bytes")


if __name__ == "__main__":
    main()
