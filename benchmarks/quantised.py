"""What a Hydra loses when its weights are quantised by torchao: int8 weights of its MLPs, of all its linear layers, and int8
activations besides.

    python benchmarks/quantised.py --model vit-cifar10 --data DIR     # a folder with a ViT for CIFAR-10, and its images
    python benchmarks/quantised.py --smallest                         # does it run? made-up model and images, seconds

DIR holds plain files (see experiments/local_files.py). Three members are cut out of the model: each loses the sixth of the heads
that has the lowest Taylor scores on its own 100 training images. Every quantised Hydra answers the same test images; "change" is
the mean of |difference| of a class's probability, "other answers" the images that get another label than from the Hydra as it is.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTForImageClassification


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments import smallest
from experiments.local_files import read_images
from experiments.rows import PrepareImages, TensorRows
from hydra_transformers import AutoHydra
from hydra_transformers._io.files import write_atomically
from hydra_transformers.data.prediction import collect_member_logits
from hydra_transformers.fusion import with_linear_layers
from hydra_transformers.models.modeling_hydra import log_mean_probability
from hydra_transformers.pruning import prune_heads, taylor_scores
from hydra_transformers.pruning.heads import as_heads_to_prune
from hydra_transformers.uncertainty import classification_metrics
from provenance import where_it_ran


MEMBERS, IMAGES_PER_MEMBER = 3, 100
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Quantise = Callable[[nn.Module], None]


@dataclass
class Row:
    """linear_layers: how many there are; megabytes: of all weights and buffers in memory; accuracy and other_answers: shares"""

    what: str
    linear_layers: int
    megabytes: float
    accuracy: float
    nll: float
    ece: float
    change: float
    other_answers: float


def hydra_of(backbone: PreTrainedModel, train: TensorRows) -> PreTrainedModel:
    """Members that differ in the images their heads were scored on."""
    members = []
    for number in range(MEMBERS):
        own = train.part(slice(number, MEMBERS * IMAGES_PER_MEMBER, MEMBERS))
        scores = taylor_scores(backbone, own.batches(100))
        lowest = sorted(scores, key=scores.get)[: round(len(scores) / 6)]
        members.append(prune_heads(backbone, as_heads_to_prune(lowest)))
    return AutoHydra.from_pruned_members(members, trunk_layers=0, allow_equal=True).eval()


# The ways to quantise


def torchao_quantisers() -> tuple[Quantise, Quantise]:
    """int8 weights; int8 weights and activations."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    return (
        lambda model: quantize_(model, Int8WeightOnlyConfig()),
        lambda model: quantize_(model, Int8DynamicActivationInt8WeightConfig()),
    )


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """What int8 makes of the weights of linear layers, as ordinary numbers: stands in for torchao in the smallest form."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.abs().amax(dim=1, keepdim=True) / 127
            module.weight.copy_((module.weight / scale).round() * scale)


AS_IT_IS = "as it is"
WAYS = {
    "mlps": "int8 weights, MLPs",
    "weights": "int8 weights, all layers",
    "activations": "int8 weights and activations, all layers",
}


def quantised(hydra: PreTrainedModel, way: str, quantisers: tuple[Quantise, Quantise]) -> PreTrainedModel:
    """A quantised copy."""
    model = copy.deepcopy(hydra) if way == "mlps" else with_linear_layers(hydra)
    quantisers[way == "activations"](model)
    return model


# Measuring


def measure(
    hydra: PreTrainedModel, test: TensorRows, ways: list[str], quantisers: tuple[Quantise, Quantise]
) -> list[Row]:
    batches, rows, expected = test.batches(100), [], None
    for way in (AS_IT_IS, *ways):
        model = hydra if way == AS_IT_IS else quantised(hydra, way, quantisers)
        member_logits, labels = collect_member_logits(model, batches)
        probabilities = log_mean_probability(member_logits).exp()
        expected = probabilities if expected is None else expected
        metrics = classification_metrics(member_logits, labels)
        rows.append(
            Row(
                WAYS.get(way, way),
                sum(isinstance(module, nn.Linear) for module in model.modules()),
                bytes_of(model) / 1e6,
                metrics["accuracy"],
                metrics["nll"],
                metrics["ece"],
                (probabilities - expected).abs().mean().item(),
                (probabilities.argmax(dim=1) != expected.argmax(dim=1)).double().mean().item(),
            )
        )
        print(to_line(rows[-1]), flush=True)
    return rows


def bytes_of(model: nn.Module) -> int:
    """In memory, of all weights and buffers; of quantised ones the codes and scales."""

    def size(tensor: Tensor) -> int:
        if hasattr(tensor, "__tensor_flatten__"):
            return sum(size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return tensor.numel() * tensor.element_size()

    return sum(map(size, [*model.parameters(), *model.buffers()]))


def to_line(row: Row) -> str:
    scores = f"{row.accuracy:.2%} | {row.nll:.4f} | {row.ece:.4f} | {row.change:.5f} | {row.other_answers:.2%}"
    return f"| {row.what} | {row.megabytes:.2f} | {scores} |"


def to_markdown(rows: list[Row], machine: dict) -> str:
    lines = [f"{key}: {value}  " for key, value in machine.items()]
    lines += ["", "| | MB | accuracy | NLL | ECE | change | other answers |", "|---|--:|--:|--:|--:|--:|--:|"]
    return "\n".join([*lines, *map(to_line, rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with a ViT for CIFAR-10")
    parser.add_argument("--data", type=Path, help="folder with vision/")
    parser.add_argument("--images", type=int, default=2000, help="how many test images to answer")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        choices=list(WAYS),
        help="what to quantise; a CPU without int8 products takes long for activations",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder for quantised.md and quantised.json")
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="a tiny model on made-up images, whose weights are only rounded: shows that it runs; needs no torchao",
    )
    args = parser.parse_args()
    if args.smallest:
        torch.manual_seed(0)
        backbone, train, test = smallest.new_backbone(), smallest.images(64, 0), smallest.images(48, 1)
        quantisers, by = (round_weights, round_weights), "rounding"
    else:
        if args.model is None or args.data is None:
            parser.error("--model or --data is missing: pass the folder with the ViT, and the folder with vision/")
        try:
            quantisers = torchao_quantisers()
        except ImportError:
            parser.error("torchao is not installed: pip install torchao, or pass --smallest")
        import torchao

        by, prepare = f"torchao {torchao.__version__}", PrepareImages(CIFAR10_MEAN, CIFAR10_STD)
        backbone = ViTForImageClassification.from_pretrained(args.model, dtype=torch.float32)
        train, test = (read_images(args.data, name, prepare) for name in ("cifar10_train", "cifar10_test"))
    test = test.part(slice(args.images))
    hydra = hydra_of(backbone.to(args.device).eval(), train.to(args.device))
    kept = [sum(len(layer[member]) for layer in hydra.config.kept_heads) for member in range(MEMBERS)]
    machine = where_it_ran(args.device) | {
        "measured": f"{len(test)} test images, {MEMBERS} members of {kept[0]} heads, float32; by {by}"
    }
    rows = measure(hydra, test.to(args.device), args.ways, quantisers)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output / "quantised.md", to_markdown(rows, machine))
        report = {"machine": machine, "rows": [asdict(row) for row in rows]}
        write_atomically(args.output / "quantised.json", json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
