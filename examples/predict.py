# /// script
# requires-python = ">=3.10"
# dependencies = ["hydra-transformers[images]"]
# ///
"""Predict for every row of a data set: an answer, or "I don't know" with the reason.

It needs nothing but uv:

    uv run predict.py you/hydra-cifar100 pictures/ answers.csv
    uv run predict.py my-hydra messages.jsonl answers.parquet --monitor monitor.json

Stopped, the same command goes on where it was. No row is lost or predicted twice.
"""

import argparse
from pathlib import Path

from hydra_transformers.serving import predict_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a calibrated Hydra: a Hub name or a folder")
    parser.add_argument("data", help="a Hub name, a file or a folder")
    parser.add_argument("output", type=Path, help="a new file: .csv, .jsonl or .parquet")
    parser.add_argument("--monitor", type=Path, help="the file of a Monitor, which counts these rows")
    args = parser.parse_args()

    print(predict_data(args.model, args.data, args.output, monitor=args.monitor))


if __name__ == "__main__":
    main()
