"""How fast exported Hydras are on a CPU: PyTorch as it is (eager), PyTorch's archive of the graph, and ONNX Runtime.

    python benchmarks/export_speed.py --output benchmarks/results
    python benchmarks/export_speed.py --smallest            # does it run? a tiny model, half a minute

A ViT-B/16 Hydra of 3 members with 8 of 12 heads each, random weights, float32, one thread. All run in turns on the same images. The time
is that of the CPU (`time.process_time`), which other programs on the machine change little; the median of the rounds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hydra_transformers import HydraViTForImageClassification, export
from hydra_transformers._io.files import write_atomically
from hydra_transformers.cost import unpruned_backbone
from hydra_transformers.reports.table import Table
from provenance import where_it_ran


MEMBERS, CUT = 3, 3  # one in three heads is cut out, another one for each member
TINY = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 12}
SMALLEST = ViTConfig(num_labels=5, image_size=16, patch_size=8, **TINY)
SINGLE, EAGER, ARCHIVE, ONNX = "one ViT, eager", "Hydra, eager", "Hydra, torch.export archive", "Hydra, ONNX Runtime"


@dataclass
class Row:
    """milliseconds: CPU time of one batch, the median; megabytes: of the file, of the weights where there is none; difference:
    the largest from the eager Hydra's member logits"""

    what: str
    batch: int
    milliseconds: float
    megabytes: float
    difference: float


def hydra_of(config: ViTConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    backbone = ViTForImageClassification(config)
    heads, layers = range(config.num_attention_heads), range(config.num_hidden_layers)
    cut = [{layer: [head for head in heads if head % CUT == member] for layer in layers} for member in range(MEMBERS)]
    members = [HydraViTForImageClassification.from_backbone(backbone, each) for each in cut]
    return HydraViTForImageClassification.from_pruned_members(members, trunk_layers=0, allow_equal=True).eval()


def runners(hydra: PreTrainedModel, folder: Path) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name, images -> member logits; of the single model its logits."""
    single = unpruned_backbone(hydra, "cpu")
    export(hydra, folder, ["onnx", "torch"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    program = torch.export.load(folder / "model.pt2").module()
    return {
        SINGLE: lambda images: single(images).logits,
        EAGER: lambda images: hydra(images).member_logits,
        ARCHIVE: lambda images: program(pixel_values=images)["member_logits"],
        ONNX: lambda images: torch.as_tensor(session.run(["member_logits"], {"pixel_values": images.numpy()})[0]),
    }


@torch.inference_mode()
def measure(hydra: PreTrainedModel, folder: Path, batches: list[int], rounds: int) -> list[Row]:
    ways = runners(hydra, folder)
    files = {ARCHIVE: folder / "model.pt2", ONNX: folder / "model.onnx"}
    weights = sum(parameter.numel() * parameter.element_size() for parameter in hydra.parameters()) / 1e6
    rows = []
    for batch in batches:
        size = hydra.config.image_size
        images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))
        times, found = {name: [] for name in ways}, {}
        for number in range(rounds + 1):
            for name, run in ways.items():
                start = time.process_time()
                found[name] = run(images)
                if number > 0:
                    times[name].append(1000 * (time.process_time() - start))
        for name in ways:
            size_of = megabytes(files[name]) if name in files else weights if name == EAGER else 0.0
            differs = 0.0 if name == SINGLE else (found[name] - found[EAGER]).abs().max().item()
            rows.append(Row(name, batch, statistics.median(times[name]), size_of, differs))
            print(rows[-1], flush=True)
    return rows


def megabytes(path: Path) -> float:
    """Of a file, and of the weights that ONNX may put into one of their own beside it."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*")) / 1e6


def to_markdown(rows: list[Row], machine: dict[str, str]) -> str:
    eager = {row.batch: row.milliseconds for row in rows if row.what == EAGER}
    table = Table(
        ["", "batch", "ms per batch", "x eager Hydra", "MB", "largest difference of a logit"],
        [
            [
                row.what,
                str(row.batch),
                f"{row.milliseconds:.1f}",
                f"{row.milliseconds / eager[row.batch]:.2f}",
                f"{row.megabytes:.1f}" if row.megabytes else "",
                "" if row.what in (SINGLE, EAGER) else f"{row.difference:.1e}",
            ]
            for row in rows
        ],
    ).markdown()
    return "\n".join([*(f"{key}: {value}  " for key, value in machine.items()), "", table]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5, help="to take the median of, after one that does not count")
    parser.add_argument("--layers", type=int, default=12, help="of the ViT; fewer where a batch takes too long")
    parser.add_argument("--name", default="export_speed_cpu", help="of the results (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder for NAME.md and NAME.json")
    parser.add_argument("--smallest", action="store_true", help="a tiny model: shows that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hydra = hydra_of(SMALLEST if args.smallest else ViTConfig(num_labels=1000, num_hidden_layers=args.layers))
    machine = where_it_ran("cpu") | {
        "measured": f"{hydra.config.num_hidden_layers} layers, CPU time of one thread, median of {args.rounds} rounds; "
        f"ONNX Runtime {onnxruntime.__version__}"
    }
    with tempfile.TemporaryDirectory() as temporary:
        rows = measure(hydra, Path(temporary, "exported"), args.batches, args.rounds)
    if args.output:
        write_atomically(args.output / f"{args.name}.md", to_markdown(rows, machine))
        report = {"machine": machine, "rows": [asdict(row) for row in rows]}
        write_atomically(args.output / f"{args.name}.json", json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
