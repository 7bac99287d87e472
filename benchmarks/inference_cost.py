"""What an ensemble costs at inference: the paper's table 7 in one run, on a GPU or a CPU.

    python benchmarks/inference_cost.py                                     # everything, eager
    python benchmarks/inference_cost.py --families vit --batches 4 256 --modes eager compiled
    python benchmarks/inference_cost.py --device cpu --families vit --batches 8 --dtypes float32

Compared, with random weights: the Transformers model with sdpa (= 1); that model pruned to 8 heads per layer (a
one-member Hydra); three Transformers models one after the other; `torch.func.vmap` over three models; a Hydra of
3 members x 8 heads, one of 5 x 8, and one of 3 members that keep as many heads in all but not in each layer, as circuits
do. All run in one process, in turns, on inputs they have not seen.
"""

import argparse
import copy
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
)

from hydra_transformers import HydraBertForSequenceClassification, HydraCLIPModel, HydraViTForImageClassification


SINGLE = "single"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Family:
    backbone: Callable[[], nn.Module]
    hydra: type
    inputs: Callable[[int], dict[str, torch.Tensor]]
    num_layers: int = 12


def image_inputs(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 224, 224)}


def text_inputs(batch: int, tokens: int, vocabulary: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1000, vocabulary - 1, (batch, tokens))}


def clip_inputs(batch: int) -> dict[str, torch.Tensor]:
    return {**image_inputs(batch), **text_inputs(batch, 77, 49407)}


FAMILIES = {
    "vit": Family(
        lambda: ViTForImageClassification(ViTConfig(num_labels=1000)), HydraViTForImageClassification, image_inputs
    ),
    "bert": Family(
        lambda: BertForSequenceClassification(BertConfig()),
        HydraBertForSequenceClassification,
        lambda batch: text_inputs(batch, 128, 30522),
    ),
    "clip": Family(
        lambda: CLIPModel(CLIPConfig(text_config={"num_attention_heads": 8}, vision_config={"patch_size": 32})),
        HydraCLIPModel,
        clip_inputs,
    ),
}


class Sequence(nn.Module):
    """Models one after the other."""

    def __init__(self, models: list[nn.Module]):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, **inputs):
        return [logits(model(**inputs)) for model in self.models]


class Vmapped(nn.Module):
    """`torch.func.vmap` over stacked models."""

    def __init__(self, models: list[nn.Module]):
        super().__init__()
        parameters, buffers = torch.func.stack_module_state(models)
        self.stacked = nn.ParameterList(
            nn.Parameter(tensor.detach(), requires_grad=False) for tensor in parameters.values()
        )
        self.names = list(parameters)
        self.stacked_buffers = buffers
        self.template = [copy.deepcopy(models[0]).to("meta")]

    def forward(self, **inputs):
        def one(parameters, buffers):
            return logits(torch.func.functional_call(self.template[0], (parameters, buffers), kwargs=inputs))

        return torch.func.vmap(one)(dict(zip(self.names, self.stacked, strict=True)), self.stacked_buffers)


def logits(outputs) -> torch.Tensor:
    return outputs["logits_per_image"] if "logits_per_image" in outputs else outputs["logits"]


def pruned(family: Family, model: nn.Module, member: int, ragged: bool = False) -> nn.Module:
    """A member that keeps two thirds of the heads (8 of 12): of each layer, or ragged, of all layers together."""

    def heads(config) -> dict[int, list[int]]:
        count, layers = config.num_attention_heads, config.num_hidden_layers
        if not ragged:
            return {layer: [(4 * member + i) % count for i in range(count // 3)] for layer in range(layers)}
        drawn = random.Random(member).sample(range(layers * count), layers * (count // 3))
        return {layer: [head % count for head in drawn if head // count == layer] for layer in range(layers)}

    if hasattr(model.config, "vision_config"):
        towers = {"vision": heads(model.config.vision_config), "text": heads(model.config.text_config)}
        return family.hydra.from_backbone(model, towers)
    return family.hydra.from_backbone(model, heads(model.config))


def build(family: Family, method: str, device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        backbone = family.backbone().to(dtype).eval()
        if method == SINGLE:
            return backbone
        if method == "pruned to 8 heads":
            return pruned(family, backbone, 0)
        if method == "3 models in sequence":
            return Sequence([backbone, family.backbone().to(dtype).eval(), family.backbone().to(dtype).eval()])
        if method == "vmap over 3 models":
            return Vmapped([backbone, family.backbone().to(dtype).eval(), family.backbone().to(dtype).eval()])
        members = 5 if method == "Hydra 5 x 8" else 3
        ragged = method == "Hydra 3, ragged"
        return family.hydra.from_pruned_members([pruned(family, backbone, m, ragged) for m in range(members)])


METHODS = [
    SINGLE,
    "pruned to 8 heads",
    "3 models in sequence",
    "vmap over 3 models",
    "Hydra 3 x 8",
    "Hydra 3, ragged",
    "Hydra 5 x 8",
]


@dataclass
class Row:
    family: str
    dtype: str
    batch: int
    mode: str
    method: str
    parameters: int
    multiply_adds: float
    milliseconds: float
    spread: tuple[float, float]
    peak_bytes: int | None
    ratio: float = 0.0
    memory_ratio: float | None = None


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_beyond_weights(run: Callable, inputs: dict, device: str) -> int | None:
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(**inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def time_in_turns(runs: dict[str, Callable], pool: list[dict], device: str, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per call, each method in turn so that clocks and temperature are the same for all."""
    times = {method: [] for method in runs}
    for run in runs.values():  # warm-up
        for inputs in pool[:3]:
            run(**inputs)
    synchronise(device)
    calls = {}
    for method, run in runs.items():
        start = time.perf_counter()
        run(**pool[0])
        synchronise(device)
        calls[method] = max(1, min(20, int(0.05 / max(time.perf_counter() - start, 1e-5))))
    deadline, rounds = time.perf_counter() + seconds, 0
    while rounds < 5 or (time.perf_counter() < deadline and rounds < 60):
        for method, run in runs.items():
            synchronise(device)
            start = time.perf_counter()
            for call in range(calls[method]):
                run(**pool[(rounds + call) % len(pool)])
            synchronise(device)
            times[method].append(1000 * (time.perf_counter() - start) / calls[method])
        rounds += 1
    return times


def count_multiply_adds(model: nn.Module, inputs: dict) -> float:
    """On the meta device, where every attention kernel is counted."""
    model = copy.deepcopy(model).to("meta")
    with FlopCounterMode(display=False) as counter:
        model(**{key: value.to("meta") for key, value in inputs.items()})
    return counter.get_total_flops() / 2


@torch.no_grad()
def measure(args, family_name: str, dtype_name: str, batch: int, mode: str) -> list[Row]:
    family, dtype, device = FAMILIES[family_name], DTYPES[dtype_name], args.device
    pool = []
    for _ in range(8):
        inputs = {key: value.to(device) for key, value in family.inputs(batch).items()}
        pool.append({key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()})

    models, runs, costs, peaks = {}, {}, {}, {}
    for method in args.methods:
        if method == "vmap over 3 models" and mode == "compiled":
            continue
        try:
            model = build(family, method, device, dtype)
            one = {key: value[:1] for key, value in pool[0].items()}
            same_work = {"vmap over 3 models": "3 models in sequence"}.get(method, method)
            costs[method] = costs.get(same_work) or count_multiply_adds(model, one)
            run = torch.compile(model, mode=args.compile_mode) if mode == "compiled" else model
            run(**pool[0])
        except Exception as error:
            print(
                f"{family_name} {dtype_name} batch {batch} {mode}: {method} does not run: {str(error)[:200]}",
                flush=True,
            )
            continue
        models[method], runs[method] = model, run
        peaks[method] = peak_beyond_weights(run, pool[1], device)
    times = time_in_turns(runs, pool, device, args.seconds)

    rows = []
    for method, values in times.items():
        quartiles = statistics.quantiles(values, n=4)
        rows.append(
            Row(
                family_name,
                dtype_name,
                batch,
                mode,
                method,
                sum(parameter.numel() for parameter in models[method].parameters()),
                costs[method],
                statistics.median(values),
                (quartiles[0], quartiles[2]),
                peaks[method],
            )
        )
    reference = next(row for row in rows if row.method == SINGLE)
    for row in rows:
        row.ratio = row.milliseconds / reference.milliseconds
        row.memory_ratio = None if row.peak_bytes is None else row.peak_bytes / reference.peak_bytes
    return rows


def to_markdown(rows: list[Row], machine: dict) -> str:
    lines = [f"{key}: {value}  " for key, value in machine.items()]
    lines += [
        "",
        "| model | dtype | batch | mode | method | parameters (M) | multiply-adds (G) | ms per batch (quartiles) ",
    ]
    lines[-1] += "| x single | memory beyond weights, x single |"
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        memory = "-" if row.memory_ratio is None else f"{row.memory_ratio:.2f}"
        lines.append(
            f"| {row.family} | {row.dtype} | {row.batch} | {row.mode} | {row.method} | {row.parameters / 1e6:.2f} "
            f"| {row.multiply_adds / 1e9:.2f} | {row.milliseconds:.2f} ({row.spread[0]:.2f} to {row.spread[1]:.2f}) "
            f"| **{row.ratio:.2f}** | {memory} |"
        )
    return "\n".join(lines) + "\n"


def describe_machine(device: str) -> dict[str, str]:
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    return {
        "machine": name,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 32, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(DTYPES))
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=["eager", "compiled"])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--compile-mode", default="default", help="mode of torch.compile, e.g. reduce-overhead")
    parser.add_argument("--seconds", type=float, default=4.0, help="time to spend per table row group")
    parser.add_argument("--output", type=Path, help="folder for inference_cost.md and inference_cost.json")
    args = parser.parse_args()
    if SINGLE not in args.methods:
        args.methods = [SINGLE, *args.methods]

    machine, rows = describe_machine(args.device), []
    for family in args.families:
        for dtype in args.dtypes:
            for batch in args.batches:
                for mode in args.modes:
                    rows += measure(args, family, dtype, batch, mode)
                    torch.compiler.reset()
                    print(to_markdown(rows[-len(args.methods) :], machine).split("|---|\n")[-1], flush=True)
                    if args.output:
                        args.output.mkdir(parents=True, exist_ok=True)
                        (args.output / "inference_cost.md").write_text(to_markdown(rows, machine))
                        report = {"machine": machine, "rows": [asdict(row) for row in rows]}
                        (args.output / "inference_cost.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
