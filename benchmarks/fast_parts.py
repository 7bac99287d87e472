"""What each part of fast inference gains: ViT-B/16 in bfloat16, a Hydra of three with nine of twelve layers merged, loaded from folders.

    python benchmarks/fast_parts.py --output fast_parts.json                # everything, three minutes on an H200
    python benchmarks/fast_parts.py --smallest --device cpu                 # does it run? a tiny model, seconds

Compared in one process and in turns: the Transformers model (= 1); the Hydra through its plain modules; through the fast path;
through the fast path with one part after the other switched off; and both models compiled.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit import modeling_vit

from hydra_transformers import AutoHydra, HydraViTForImageClassification
from hydra_transformers.fast import kernels as fast_kernels
from hydra_transformers.fast import layers as fast_inference
from hydra_transformers.models import modeling_hydra
from hydra_transformers.models.images import PatchProjection
from provenance import where_it_ran


TINY = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
SINGLE, PLAIN, FAST = "Transformers", "plain modules", "fast path"
# (module or class, name, what stands there instead)
Patches = list[tuple[object, str, object]]


def loaded_models(config: ViTConfig, folder: Path, args) -> dict[str, nn.Module]:
    """One Transformers model and a Hydra of three random ones, both as a user has them: saved, then loaded."""
    members = []
    for seed in range(3):
        torch.manual_seed(seed)
        members.append(ViTForImageClassification(config))
    members[0].save_pretrained(folder / "single")
    AutoHydra.from_pruned_members(members, trunk_layers=0.75).save_pretrained(folder / "hydra")
    found = {
        SINGLE: ViTForImageClassification.from_pretrained(folder / "single", dtype=args.dtype),
        "Hydra": HydraViTForImageClassification.from_pretrained(folder / "hydra", dtype=args.dtype),
    }
    return {name: model.to(args.device).eval() for name, model in found.items()}


def added_behind_the_product(layer, norm, heads, residual, batch, after=None):
    """`_project_add_norm` with a sum of its own."""
    if batch.first_token_only:
        residual = fast_inference._first_tokens(residual, batch)
    weight, bias = layer.o
    if batch.is_large or not layer.is_uniform:
        return fast_inference.add_and_layer_norm(norm, residual, heads @ weight, before=bias, after=after)
    total = residual + fast_inference._product(heads, weight, bias, batch)
    normed = fast_inference._norm(norm, total, batch)
    return total if after is None else total + after, normed


def mlp_added_behind_the_product(layer, total, states, is_launch_bound=False):
    """`_add_mlp` with a sum of its own."""
    inner = layer.activation.forward(fast_inference.linear(states.view(-1, states.shape[-1]), *layer.fc1))
    return total + nn.functional.linear(inner, layer.fc2[0]).view(total.shape)


SWITCHED_OFF: dict[str, Patches] = {
    "sums inside of products": [
        (fast_inference, "_project_add_norm", added_behind_the_product),
        (fast_inference, "_add_mlp", mlp_added_behind_the_product),
    ],
    "Triton norms": [
        (fast_inference, "is_worth_a_kernel", lambda *_: False),
        (fast_kernels, "is_worth_a_kernel", lambda *_: False),
    ],
    "quickly launched attention": [(fast_inference, "quickly_launched_attention", lambda: None)],
    "patches by a product": [(PatchProjection, "forward", nn.Conv2d.forward)],
    "first token alone in the last layer": [(HydraViTForImageClassification, "reads_first_token", False)],
    "looking at each layer's parts": [(fast_inference, "fast_layer", cache(fast_inference.fast_layer))],
}
SLOW = [(modeling_hydra, "fast_layers", None)]


@dataclass
class Run:
    call: Callable
    patches: Patches = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @contextmanager
    def patched(self):
        with ExitStack() as stack:
            for where, name, instead in self.patches:
                stack.enter_context(patch.object(where, name, instead))
            yield


def synchronise(args) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def time_in_turns(runs: dict[str, Run], inputs: list[torch.Tensor], args) -> None:
    """Milliseconds per call, each run in turn so that clocks and temperature are the same for all."""
    for run in runs.values():
        with run.patched():
            for pixel_values in (*inputs, *inputs):
                run.call(pixel_values)
    synchronise(args)
    deadline, rounds = time.perf_counter() + args.seconds, 0
    while rounds < 2 or time.perf_counter() < deadline:
        for run in runs.values():
            with run.patched():
                synchronise(args)
                start, calls = time.perf_counter(), 0
                while calls < 1 or time.perf_counter() - start < args.seconds / 200:
                    run.call(inputs[(rounds + calls) % len(inputs)])
                    calls += 1
                synchronise(args)
                run.times.append(1000 * (time.perf_counter() - start) / calls)
        rounds += 1


def eager_runs(models: dict[str, nn.Module]) -> dict[str, Run]:
    single, hydra = models[SINGLE], models["Hydra"]
    runs = {SINGLE: Run(single), PLAIN: Run(hydra, SLOW)}
    runs[FAST] = Run(hydra)
    return runs | {f"without {part}": Run(hydra, patches) for part, patches in SWITCHED_OFF.items()}


def compiled_runs(models: dict[str, nn.Module], mode: str) -> dict[str, Run]:
    """Both without a mask: before 5.22 Transformers makes one that masks nothing, which doubles a compiled ViT's time."""
    torch.compiler.reset()
    if hasattr(modeling_vit, "create_bidirectional_mask"):
        modeling_vit.create_bidirectional_mask = lambda *_, **__: None
    return {
        SINGLE: Run(torch.compile(models[SINGLE], mode=mode, dynamic=False)),
        "Hydra": Run(torch.compile(models["Hydra"], mode=mode, dynamic=False)),
    }


def row(batch: int, mode: str, runs: dict[str, Run]) -> dict:
    reference = statistics.median(runs[SINGLE].times)
    found = {name: statistics.median(run.times) for name, run in runs.items()}
    quartiles = {name: statistics.quantiles(run.times, n=4)[::2] for name, run in runs.items()}
    return {
        "batch": batch,
        "mode": mode,
        "ms": found,
        "quartiles": quartiles,
        "ratio": {name: ms / reference for name, ms in found.items()},
    }


def to_markdown(rows: list[dict], machine: dict) -> str:
    lines = [f"{key}: {value}  " for key, value in machine.items()]
    for mode in dict.fromkeys(each["mode"] for each in rows):
        of_mode = [each for each in rows if each["mode"] == mode]
        lines += ["", f"{mode}: ms per batch, and x Transformers", ""]
        lines += ["| |" + "".join(f" batch {each['batch']} |" for each in of_mode), "|---|" + "---|" * len(of_mode)]
        for name in of_mode[0]["ms"]:
            cells = [f" {each['ms'][name]:.2f} (**{each['ratio'][name]:.3f}**) |" for each in of_mode]
            lines.append(f"| {name} |" + "".join(cells))
    return "\n".join(lines) + "\n"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 32, 256])
    parser.add_argument("--only", choices=["eager", "compiled"])
    parser.add_argument(
        "--seconds", type=float, default=14.0, help="for each batch size, of eager runs; compiled a sixth"
    )
    parser.add_argument("--limit", type=float, default=225.0, help="seconds after which nothing more is compiled")
    parser.add_argument("--output", type=Path, help="file for the figures (JSON); a table is written beside it (.md)")
    parser.add_argument("--smallest", action="store_true", help="a tiny model and few calls: shows that it runs")
    args = parser.parse_args()
    started, args.dtype = time.perf_counter(), torch.bfloat16
    fields = {"num_labels": 1000}
    if args.smallest:
        fields, args.batches, args.seconds, args.dtype = {**fields, **TINY}, [2], 0.2, torch.float32
    config = ViTConfig(**fields)
    with tempfile.TemporaryDirectory() as folder:
        models = loaded_models(config, Path(folder), args)
    machine, rows = where_it_ran(args.device), []

    def inputs(batch: int) -> list[torch.Tensor]:
        size = (batch, 3, config.image_size, config.image_size)
        return [torch.randn(size, device=args.device, dtype=args.dtype) for _ in range(4)]

    def keep(measured: dict) -> None:
        rows.append(measured)
        print(to_markdown([measured], {}), flush=True)
        if args.output:
            args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
            args.output.with_suffix(".md").write_text(to_markdown(rows, machine))

    if args.only != "compiled":
        for batch in args.batches:
            runs = eager_runs(models)
            time_in_turns(runs, inputs(batch), args)
            keep(row(batch, "eager", runs))
    if args.only != "eager":
        args.seconds /= 6
        for mode in ("default",):
            for batch in sorted(args.batches, key=lambda size: (size not in (4, 256), size)):
                if time.perf_counter() - started > args.limit:
                    print(f"{args.limit:g} seconds are over: {mode}, batch {batch} is left out", flush=True)
                    continue
                runs = compiled_runs(models, mode)
                time_in_turns(runs, inputs(batch), args)
                keep(row(batch, f"compiled, {mode}", runs))


if __name__ == "__main__":
    main()
