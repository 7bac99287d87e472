# /// script
# requires-python = ">=3.10"
# dependencies = ["hydra-transformers[images,plots]"]
# ///
"""Fine-tune a Hydra, calibrate it, evaluate it and publish it.

It needs nothing but uv, and suits a rented GPU:

    uv run train.py facebook/dinov2-small cifar100 --repository you/hydra-cifar100
    uv run --with ./checkout train.py facebook/dinov2-small pictures/    # the package from a clone

Stopped, the same command goes on where it was. For `--repository`, log in with `hf auth login` or
set HF_TOKEN.
"""

import argparse
from pathlib import Path

from hydra_transformers import evaluate_uncertainty, finetune
from hydra_transformers.hub import push_hydra_to_hub


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a pre-trained model: a Hub name or a folder")
    parser.add_argument("data", help="a Hub name, a file or a folder with labels")
    parser.add_argument("--output", type=Path, default=Path("my-hydra"), help="a folder for the model")
    parser.add_argument("--runs", type=int, default=2, help="how many fine-tunings are fused")
    parser.add_argument("--epochs", type=float, help="of each; by default by the number of rows")
    parser.add_argument("--risk", type=float, default=0.05, help="at most this share of its answers may be wrong")
    parser.add_argument("--repository", help="publish the model there: you/your-model")
    args = parser.parse_args()

    # Train, or go on with what a stop left behind.
    result = finetune(args.model, args.data, args.output, runs=args.runs, epochs=args.epochs)
    print(result)

    # Let it abstain where it is too unsure, by rows that it was not trained on.
    print(result.model.calibrate(result.validation, target={"risk": args.risk}))
    report = evaluate_uncertainty({"Hydra": result.model}, result.test)
    print(report)

    # The folder is the same with and without the Hub.
    result.model.save_pretrained(args.output)
    if args.repository:
        push_hydra_to_hub(result.model, args.repository, result.processor, report, dataset=dataset_on_hub(args.data))
        print(f"published: {args.repository}")


def dataset_on_hub(data: str) -> str | None:
    """Return the data set's name for the model's card, unless it is files of this machine."""
    return None if Path(data).exists() else data.partition(":")[0]


if __name__ == "__main__":
    main()
