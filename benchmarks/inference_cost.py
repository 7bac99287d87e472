"""What an ensemble costs at inference: the paper's table 7 in one run, on a GPU or a CPU.

    python benchmarks/inference_cost.py                                     # everything, eager
    python benchmarks/inference_cost.py --families vit --batches 4 256 --modes eager compiled
    python benchmarks/inference_cost.py --device cpu --families vit --batches 8 --dtypes float32
    python benchmarks/inference_cost.py --paper                             # table 7's own row: ViT-B/16, batches of 4
    python benchmarks/inference_cost.py --smallest                          # does it run? tiny models, seconds

Compared, with random weights: the Transformers model with sdpa (= 1); that model pruned to 8 heads per layer (a
one-member Hydra); three Transformers models one after the other; a Hydra of 3 members x 8 heads, one of 5 x 8, and one of 3
members that keep as many heads in all but not in each layer, as circuits do; a Hydra of 3 that keep all heads, with nothing merged and
with the first three quarters of the layers; one as it is fine-tuned in one run, with MLPs and norms per member behind three
quarters of the layers, and one behind 11 of 12; two such runs, fused, which is what `finetune` makes; and two plain models, fused,
with nine of 12 layers merged and MLPs apart. Each is saved once and loaded by `from_pretrained`, as its users get it. All run in
one process, in turns, on inputs they have not seen.
"""

import argparse
import copy
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.vit import modeling_vit

from hydra_transformers import HydraBertForSequenceClassification, HydraCLIPModel, HydraViTForImageClassification
from provenance import where_it_ran


SINGLE = "single"
IN_SEQUENCE = "3 models in sequence"
WHOLE = "Hydra 3, nothing merged"  # nor pruned
THREE_QUARTERS = "Hydra 3, three quarters merged"
# Not for CLIP, which has no classifier.
ONE_RUN = "Hydra 3, one run"
ONE_RUN_11 = "Hydra 3, one run, 11 of 12 layers shared"
TWO_RUNS = "Hydra 2 x 3, two runs fused, 11 of 12 layers shared"
TRAINED = (ONE_RUN, ONE_RUN_11, TWO_RUNS)
TWO_FUSED = "Hydra 2, three quarters merged, MLPs apart"
OWN = ("embeddings",)  # what is shared behind the trunk where MLPs and norms are apart
# Table 7: one model, one that is pruned, Deep Ensembles, three and five members of eight heads.
PAPER_METHODS = [SINGLE, "pruned to 8 heads", IN_SEQUENCE, "Hydra 3 x 8", "Hydra 3, ragged", "Hydra 5 x 8"]
METHODS = [*PAPER_METHODS, WHOLE, THREE_QUARTERS, TWO_FUSED, *TRAINED]
# As --modes names them, and as torch.compile does.
COMPILE_MODES = {"compiled": "default", "reduce-overhead": "reduce-overhead"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Family:
    """
    backbone, hydra: the classes of the Transformers model and of its Hydra
    config, smallest: of the backbone that is measured, and of the one that only shows that it runs
    inputs: (the backbone's config, batch) -> what a model reads
    """

    backbone: type[PreTrainedModel]
    hydra: type[PreTrainedModel]
    config: PreTrainedConfig
    smallest: PreTrainedConfig
    inputs: Callable[[PreTrainedConfig, int], dict[str, torch.Tensor]]


def image_inputs(config: PreTrainedConfig, batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, config.image_size, config.image_size)}


def text_inputs(config: PreTrainedConfig, batch: int) -> dict[str, torch.Tensor]:
    """Texts of 128 tokens, or as long as the model reads."""
    tokens = min(128, config.max_position_embeddings)
    return {"input_ids": torch.randint(1, config.vocab_size - 2, (batch, tokens))}


def clip_inputs(config: PreTrainedConfig, batch: int) -> dict[str, torch.Tensor]:
    return {**image_inputs(config.vision_config, batch), **text_inputs(config.text_config, batch)}


TINY = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 12}
TINY_IMAGE = {"image_size": 16, "patch_size": 8}
TINY_TEXT = {"vocab_size": 50, "max_position_embeddings": 12}
FAMILIES = {
    "vit": Family(
        ViTForImageClassification,
        HydraViTForImageClassification,
        ViTConfig(num_labels=1000),
        ViTConfig(num_labels=5, **TINY, **TINY_IMAGE),
        image_inputs,
    ),
    "bert": Family(
        BertForSequenceClassification,
        HydraBertForSequenceClassification,
        BertConfig(),
        BertConfig(**TINY, **TINY_TEXT),
        text_inputs,
    ),
    "clip": Family(
        CLIPModel,
        HydraCLIPModel,
        CLIPConfig(text_config={"num_attention_heads": 8}, vision_config={"patch_size": 32}),
        CLIPConfig(
            text_config={**TINY, **TINY_TEXT, "num_attention_heads": 8, "bos_token_id": 48, "eos_token_id": 49},
            vision_config={**TINY, **TINY_IMAGE},
        ),
        clip_inputs,
    ),
}


class InSequence(nn.Module):
    """Models one after the other."""

    def __init__(self, models: list[nn.Module]):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, **inputs):
        return [logits(model(**inputs)) for model in self.models]


def logits(outputs) -> torch.Tensor:
    return outputs["logits_per_image"] if "logits_per_image" in outputs else outputs["logits"]


def pruned(family: Family, model: nn.Module, member: int, ragged: bool = False) -> nn.Module:
    """A member without one in three heads (8 of 12 stay): of each layer, or ragged, of all layers together."""

    def heads(config) -> dict[int, list[int]]:
        count = config.num_attention_heads
        layers = range(config.num_hidden_layers)
        if not ragged:
            return {layer: [(4 * member + i) % count for i in range(count // 3)] for layer in layers}
        drawn = random.Random(member).sample(range(config.num_hidden_layers * count), len(layers) * (count // 3))
        return {layer: [head % count for head in drawn if head // count == layer] for layer in layers}

    if hasattr(model.config, "vision_config"):
        towers = {"vision": heads(model.config.vision_config), "text": heads(model.config.text_config)}
        return family.hydra.from_backbone(model, towers)
    return family.hydra.from_backbone(model, heads(model.config))


class SavedModels:
    """The models of one family, each built in memory when it is first asked for, saved, and loaded for every use."""

    def __init__(self, family: Family, config: PreTrainedConfig, folder: Path):
        self.family = family
        self.config = config
        self.folder = folder

    def load(self, method: str, dtype: torch.dtype, device: str) -> nn.Module:
        if method == IN_SEQUENCE:
            return InSequence([self._load(f"backbone-{index}", dtype, device) for index in range(3)])
        return self._load("backbone-0" if method == SINGLE else method, dtype, device)

    def _load(self, name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
        folder = self.folder / name.replace(" ", "-")
        if not folder.exists():
            self._build(name).save_pretrained(folder)
        model_class = self.family.backbone if name.startswith("backbone") else self.family.hydra
        return model_class.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()

    def _build(self, name: str) -> PreTrainedModel:
        if name.startswith("backbone"):
            torch.manual_seed(int(name.removeprefix("backbone-")))
            return self.family.backbone(copy.deepcopy(self.config))
        backbone = self._load("backbone-0", torch.float32, "cpu")
        if name == "pruned to 8 heads":
            return pruned(self.family, backbone, 0)
        if name in (WHOLE, THREE_QUARTERS):
            members = [backbone] * 3
            trunk_layers = 0.75 if name == THREE_QUARTERS else 0
            return self.family.hydra.from_pruned_members(members, trunk_layers=trunk_layers, allow_equal=True)
        if name == TWO_FUSED:
            return self.family.hydra.from_pruned_members([backbone] * 2, OWN, trunk_layers=0.75, allow_equal=True)
        if name == TWO_RUNS:
            runs = [self._one_run(backbone, 11 / 12, seed) for seed in range(2)]
            return self.family.hydra.from_pruned_members(
                runs, OWN, trunk_layers=11 / 12, allow_equal=True, check=False
            )
        if name in (ONE_RUN, ONE_RUN_11):
            return self._one_run(backbone, 0.75 if name == ONE_RUN else 11 / 12)
        count = 5 if name == "Hydra 5 x 8" else 3
        members = [pruned(self.family, backbone, member, "ragged" in name) for member in range(count)]
        return self.family.hydra.from_pruned_members(members, allow_equal=True)

    def _one_run(self, backbone: PreTrainedModel, trunk_layers: float, seed: int = 0) -> PreTrainedModel:
        """Return a Hydra of three members as fine-tuning in one run starts with it."""
        classes = backbone.config.num_labels
        options = {"num_members": 3, "num_labels": classes, "seed": seed}
        return self.family.hydra.from_backbone(backbone, trunk_layers=trunk_layers, **options)


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


def time_in_turns(
    runs: dict[str, Callable],
    pool: list[dict],
    device: str,
    seconds: float,
    fewest_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds per call, each method in turn so that clocks and temperature are the same for all."""
    times = {method: [] for method in runs}
    for run in runs.values():  # warm-up
        for inputs in pool[:3]:
            run(**inputs)
    synchronise(device)
    calls = {}
    for method, run in runs.items():
        start = clock()
        run(**pool[0])
        synchronise(device)
        calls[method] = max(1, min(20, int(0.05 / max(clock() - start, 1e-5)))) if seconds else 1
    deadline = clock() + seconds
    rounds = 0
    while rounds < fewest_rounds or (clock() < deadline and rounds < 60):
        for method, run in runs.items():
            synchronise(device)
            start = clock()
            for call in range(calls[method]):
                run(**pool[(rounds + call) % len(pool)])
            synchronise(device)
            times[method].append(1000 * (clock() - start) / calls[method])
        rounds += 1
    return times


def count_multiply_adds(model: nn.Module, inputs: dict) -> float:
    """On the meta device, where every attention kernel is counted."""
    model = copy.deepcopy(model).to("meta")
    with FlopCounterMode(display=False) as counter:
        model(**{key: value.to("meta") for key, value in inputs.items()})
    return counter.get_total_flops() / 2


@torch.no_grad()
def measure(
    args: argparse.Namespace, saved: SavedModels, family_name: str, dtype_name: str, batch: int, mode: str
) -> tuple[list[Row], list[str]]:
    """The rows of one group, and a line on each method that does not run."""
    dtype = DTYPES[dtype_name]
    device = args.device
    pool = []
    for _ in range(8):
        inputs = {key: value.to(device) for key, value in saved.family.inputs(saved.config, batch).items()}
        pool.append({key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()})

    models = {}
    runs = {}
    costs = {}
    peaks = {}
    broken = []
    for method in args.methods:
        if (method in TRAINED and family_name == "clip") or (method == IN_SEQUENCE and mode in COMPILE_MODES):
            continue  # compiled, three models take three times as long as one
        try:
            model = saved.load(method, dtype, device)
            one = {key: value[:1] for key, value in pool[0].items()}
            costs[method] = count_multiply_adds(model, one)
            run = model
            if mode in COMPILE_MODES:
                run = torch.compile(model, mode=COMPILE_MODES[mode], dynamic=False)
            run(**pool[0])
        except Exception as error:
            if method == SINGLE:  # there is nothing to compare with
                raise
            what = f"{family_name} {dtype_name} batch {batch} {mode}: {method} does not run"
            broken.append(f"{what}: {type(error).__name__}: {str(error)[:500]}")
            print(broken[-1], flush=True)
            continue
        models[method], runs[method] = model, run
        peaks[method] = peak_beyond_weights(run, pool[1], device)
    times = time_in_turns(runs, pool, device, args.seconds, fewest_rounds=2 if args.smallest else 5)

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
    return rows, broken


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 32, 256])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), help="bfloat16 and float32, if none is given")
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=["eager", *COMPILE_MODES])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument(
        "--paper",
        action="store_true",
        help="table 7: ViT-B/16 in batches of 4, bfloat16 and float32, the paper's methods",
    )
    parser.add_argument("--limit", type=float, help="seconds after which no further group is begun")
    parser.add_argument(
        "--no-masks",
        action="store_true",
        help="keep Transformers' ViT from making a mask that masks nothing where it is compiled, as it does before 5.22",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="time to spend per table row group")
    parser.add_argument("--output", type=Path, help="folder for inference_cost.md and inference_cost.json")
    parser.add_argument("--models", type=Path, help="folder that keeps the models, for another run")
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="tiny models, one batch size, few calls: shows that it runs, not what it costs",
    )
    args = parser.parse_args()
    if args.paper:
        args.families = ["vit"]
        args.batches = [4]
        args.methods = PAPER_METHODS
    if SINGLE not in args.methods:
        args.methods = [SINGLE, *args.methods]
    # CPUs without instructions for bfloat16 take a hundred times as long for it.
    args.dtypes = args.dtypes or (["float32"] if args.smallest and args.device == "cpu" else ["bfloat16", "float32"])
    if args.smallest:
        args.batches = [2]
        args.seconds = 0.0
    if args.no_masks and hasattr(modeling_vit, "create_bidirectional_mask"):
        modeling_vit.create_bidirectional_mask = lambda *_, **__: None

    with tempfile.TemporaryDirectory() as temporary:
        broken = measure_all(args, args.models or Path(temporary))
    if broken:
        sys.exit("\n".join(broken))


def measure_all(args: argparse.Namespace, folder: Path) -> list[str]:
    """Prints and writes the rows group by group; returns a line on each method that does not run."""
    started = time.perf_counter()
    machine = where_it_ran(args.device)
    rows = []
    broken = []
    saved = {}
    for name in args.families:
        family = FAMILIES[name]
        config = family.smallest if args.smallest else family.config
        saved[name] = SavedModels(family, config, folder / (f"smallest-{name}" if args.smallest else name))
    # What is compiled comes last, and of every family the first batch sizes first: a limit cuts off the least.
    modes = sorted(args.modes, key=lambda mode: mode in COMPILE_MODES)
    for mode, dtype, batch, name in product(modes, args.dtypes, args.batches, args.families):
        if args.limit and time.perf_counter() - started > args.limit:
            print(f"{args.limit:g} seconds are over: {name} {dtype} batch {batch} {mode} is left out", flush=True)
            continue
        measured, not_run = measure(args, saved[name], name, dtype, batch, mode)
        rows += measured
        broken += not_run
        torch.compiler.reset()
        print(to_markdown(measured, machine).split("|---|\n")[-1], flush=True)
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
            (args.output / "inference_cost.md").write_text(to_markdown(rows, machine))
            report = {"machine": machine, "rows": [asdict(row) for row in rows]}
            (args.output / "inference_cost.json").write_text(json.dumps(report, indent=1))
    return broken


if __name__ == "__main__":
    main()
