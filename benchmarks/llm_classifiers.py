"""What three classifiers on a large language model cost, apart and as one Hydra.

    python benchmarks/llm_classifiers.py                                # parameters and memory of Qwen2-7B; nothing is computed
    python benchmarks/llm_classifiers.py --device cuda --preset medium  # the time of a forward, 1.5 B parameters, bfloat16
    python benchmarks/llm_classifiers.py --device cpu --preset tiny
    python benchmarks/llm_classifiers.py --smallest                     # does it run? a tiny model, seconds

Members of the Hydras have an attention and a classifier of their own and share all else. Compared: one model of Transformers
(= 1), three of them, and Hydras of three members with all heads, with half of the heads that read each key and value, with the
heads of half of the keys, whose keys and values then go too, and the same with the first half of the layers in common, which
keep all heads and run once. Weights are random, which changes neither size nor time. What is timed runs in turns in one process.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from inference_cost import peak_beyond_weights, synchronise
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForSequenceClassification

from hydra_transformers import HydraQwen2Config, HydraQwen2ForSequenceClassification
from hydra_transformers.cost import multiply_adds_of, readable_count
from hydra_transformers.fusion.building import default_dtype
from hydra_transformers.fusion.structure import without_weights
from hydra_transformers.reports.table import markdown_table
from provenance import where_it_ran


MEMBERS = 3
SINGLE, THREE = "one model", "three models"
ALL, HALF, HALF_OF_KEYS = "Hydra, all heads", "Hydra, half of each key's heads", "Hydra, heads of half of the keys"
TRUNK = f"{HALF_OF_KEYS}, half trunk"
METHODS = (SINGLE, THREE, ALL, HALF, HALF_OF_KEYS, TRUNK)
# As Qwen2's models of these sizes have them.
QWEN2_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
PRESETS = {
    "medium": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 200,
    },
}


@dataclass
class Size:
    """parameters, gigabytes: of all weights in bfloat16; multiply_adds: of a text"""

    method: str
    parameters: int
    gigabytes: float
    multiply_adds: int


@dataclass
class Speed:
    """milliseconds: the median of a forward; spread: its quartiles; beyond_weights: bytes that it needs more, on a GPU"""

    method: str
    batch: int
    milliseconds: float
    spread: tuple[float, float]
    beyond_weights: int | None = None


class InSequence(nn.Module):
    """Several models, one after the other."""

    def __init__(self, models: list[PreTrainedModel]):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(**inputs).logits for model in self.models], dim=1)


def hydra_config(method: str, sizes: dict) -> HydraQwen2Config:
    """Members that keep different heads, where they do not keep all."""
    layers, heads, keys = (sizes[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads"))
    per_key = heads // keys

    def kept(member: int, layer: int) -> list[int]:
        if method == ALL or (method == TRUNK and layer < layers // 2):
            return list(range(heads))
        if method == HALF:  # of seven heads, four of every second key and three of the others
            counts = [(per_key + key % 2) // 2 for key in range(keys)]
            return sorted(
                key * per_key + (member + layer + place) % per_key
                for key in range(keys)
                for place in range(counts[key])
            )
        first = (member + layer) % keys
        chosen = {(first + place) % keys for place in range(keys // 2)}
        return [head for head in range(heads) if head // per_key in chosen]

    kept_heads = [[kept(member, layer) for member in range(MEMBERS)] for layer in range(layers)]
    trunk = layers // 2 if method == TRUNK else 0
    return HydraQwen2Config(**sizes, num_labels=2, pad_token_id=0, kept_heads=kept_heads, trunk_layers=trunk)


def plain_config(sizes: dict) -> Qwen2Config:
    return Qwen2Config(**sizes, num_labels=2, pad_token_id=0)


def sizes_of(sizes: dict, tokens: int) -> list[Size]:
    """Counted on the meta device: no weight exists."""
    text = {"input_ids": torch.ones(1, tokens, dtype=torch.long, device="meta")}
    rows = []
    for method in METHODS:
        times = MEMBERS if method == THREE else 1
        if method in (SINGLE, THREE):
            model = without_weights(Qwen2ForSequenceClassification, plain_config(sizes))
        else:
            model = without_weights(HydraQwen2ForSequenceClassification, hydra_config(method, sizes))
        parameters = times * model.num_parameters()
        rows.append(Size(method, parameters, 2 * parameters / 1e9, times * multiply_adds_of(model, **text)))
    return rows


def built(method: str, sizes: dict, device: str) -> nn.Module:
    with torch.device(device), default_dtype(torch.bfloat16):
        if method not in (SINGLE, THREE):
            return HydraQwen2ForSequenceClassification(hydra_config(method, sizes)).eval()
        models = [
            Qwen2ForSequenceClassification(plain_config(sizes)) for _ in range(MEMBERS if method == THREE else 1)
        ]
        return (InSequence(models) if method == THREE else models[0]).eval()


@torch.inference_mode()
def speeds_of(sizes: dict, args: argparse.Namespace) -> list[Speed]:
    models = {method: built(method, sizes, args.device) for method in args.methods}
    rows = []
    for batch in args.batches:
        shape = (batch, args.tokens)
        inputs = [{"input_ids": torch.randint(1, sizes["vocab_size"], shape).to(args.device)} for _ in range(4)]
        times: dict[str, list[float]] = {method: [] for method in models}
        for model in models.values():  # warm-up
            model(**inputs[0])
        beyond = {method: peak_beyond_weights(model, inputs[0], args.device) for method, model in models.items()}
        for number in range(args.rounds):
            for method, model in models.items():
                synchronise(args.device)
                start = time.perf_counter()
                model(**inputs[number % len(inputs)])
                synchronise(args.device)
                times[method].append(1000 * (time.perf_counter() - start))
        for method, taken in times.items():
            first, _, third = statistics.quantiles(taken, n=4)
            rows.append(Speed(method, batch, statistics.median(taken), (first, third), beyond[method]))
    return rows


def table_of_sizes(rows: list[Size]) -> str:
    first = rows[0]
    cells = [
        [
            row.method,
            f"{row.parameters:,}",
            f"{row.gigabytes:.2f}",
            f"{row.parameters / first.parameters:.2f}",
            readable_count(row.multiply_adds),
            f"{row.multiply_adds / first.multiply_adds:.2f}",
        ]
        for row in rows
    ]
    return markdown_table(["", "parameters", "GB in bfloat16", "x one", "multiply-adds of a text", "x one"], cells)


def table_of_speeds(rows: list[Speed]) -> str:
    single = {row.batch: row.milliseconds for row in rows if row.method == SINGLE}
    cells = [
        [
            row.method,
            str(row.batch),
            f"{row.milliseconds:.2f} ({row.spread[0]:.2f} to {row.spread[1]:.2f})",
            f"{row.milliseconds / single[row.batch]:.2f}" if single else "",
            "-" if row.beyond_weights is None else f"{row.beyond_weights / 1e9:.2f}",
        ]
        for row in rows
    ]
    return markdown_table(["", "batch", "ms of a forward (quartiles)", "x one", "GB beyond the weights"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", choices=list(PRESETS), help="time a model of this size; without it, count Qwen2-7B's"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="to time on")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="to time")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=512, help="in each text")
    parser.add_argument("--rounds", type=int, default=20, help="each times every method once")
    parser.add_argument(
        "--output", type=Path, help="folder for llm_classifiers.md and .json, of a preset with its name"
    )
    parser.add_argument("--smallest", action="store_true", help="the tiny preset, few calls: shows that it runs")
    args = parser.parse_args()
    if args.smallest:
        args.preset, args.batches, args.tokens, args.rounds = "tiny", [2], 8, 2
    sizes = PRESETS[args.preset] if args.preset else QWEN2_7B
    counted = sizes_of(sizes, args.tokens)
    name, of = ("Qwen2-7B", "") if args.preset is None else (f"Qwen2 ({args.preset})", f"_{args.preset}")
    machine = where_it_ran(args.device) | {"model": f"{name}, texts of {args.tokens} tokens, 2 classes"}
    report = {"machine": machine, "sizes": [asdict(row) for row in counted]}
    lines = [*(f"{key}: {value}  " for key, value in machine.items()), "", table_of_sizes(counted)]
    if args.preset:
        timed = speeds_of(sizes, args)
        report["speeds"] = [asdict(row) for row in timed]
        lines += ["", table_of_speeds(timed)]
    page = "\n".join(lines) + "\n"
    print(page)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / f"llm_classifiers{of}.md").write_text(page)
        (args.output / f"llm_classifiers{of}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
