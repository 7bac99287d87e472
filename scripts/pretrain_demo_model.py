"""Pre-trains the model that the demo ships, on digits of scikit-learn without their labels, and puts it in its place.

python scripts/pretrain_demo_model.py                          # into hydra_transformers/demo/trained
python scripts/pretrain_demo_model.py --output somewhere/else  # to compare with the one that ships
"""

import argparse
from pathlib import Path

import torch

from hydra_transformers.demo.digits import load_data
from hydra_transformers.demo.pretraining import SETTINGS, SHIPPED, accuracy_on_turns, pretrain, save_pretrained_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SHIPPED, help="folder for the model (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # another number of threads sums in another order
    data = load_data()
    model = pretrain(data.train, SETTINGS)
    save_pretrained_model(model, SETTINGS, arguments.output)
    size = sum(path.stat().st_size for path in arguments.output.iterdir())
    print(f"knows how {accuracy_on_turns(model, data.validation):.1%} of the validation images are turned")
    print(f"{arguments.output}: {size:,} bytes")


if __name__ == "__main__":
    main()
