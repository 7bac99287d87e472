"""Times circuit extraction against the naive loop of Algorithm 1, on the same data in one process.

    python benchmarks/circuit_extraction.py --preset cpu
    python benchmarks/circuit_extraction.py --preset vit-b16 --output OUT
    python benchmarks/circuit_extraction.py --smallest        # does it run? a tiny model, seconds

The model is saved and loaded by `from_pretrained`, as users get theirs. The naive loop is a plain Transformers model whose output
projection is zeroed slice by slice; its data lies ready on the device, in the same batches. Cutting heads out makes the engine
faster as the run goes on, so both are timed twice: at the first removal, and in the middle of the run, where half of the budget is
gone. The weights are random and the labels mostly the model's own predictions, so that heads matter. Seconds on a CPU are
processor time: other programs do not count.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.extraction import CHECK_EVERY, GreedySearch
from hydra_transformers.pruning.heads import Head, as_heads_to_prune, heads_of
from hydra_transformers.pruning.objectives import SampleValues, Score, objective_scores, sample_values
from hydra_transformers.reports.table import markdown_table
from provenance import where_it_ran


@dataclass(frozen=True)
class Preset:
    """What is measured: a ViT, a number of images of each kind, the heads to remove in a whole run."""

    layers: int
    heads: int
    hidden: int
    image_size: int
    patch_size: int
    classes: int
    images: int
    batch: int
    budget: int
    dtype: str
    images_for_ranking: int


PRESETS = {
    "cpu": Preset(8, 8, 128, 32, 4, 10, 25, 25, 20, "float32", 10),
    "vit-b16": Preset(12, 12, 768, 224, 16, 1000, 1000, 100, 48, "bfloat16", 50),
    "smallest": Preset(3, 5, 40, 8, 4, 5, 20, 10, 4, "float32", 20),
}
OBJECTIVE = "avg"
SEED = 0


def save_model(preset: Preset, folder: Path) -> None:
    torch.manual_seed(SEED)
    config = ViTConfig(
        hidden_size=preset.hidden,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        intermediate_size=4 * preset.hidden,
        image_size=preset.image_size,
        patch_size=preset.patch_size,
        num_labels=preset.classes,
    )
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():
        for layer in model.vit.layers:
            # Heads of very different weight, as in a trained model.
            weight = layer.attention.o_proj.weight
            scale = torch.exp(2 + torch.randn(preset.heads)).repeat_interleave(preset.hidden // preset.heads)
            weight.mul_(scale)
            layer.attention.v_proj.weight.mul_(2)
        model.vit.embeddings.patch_embeddings.projection.weight.mul_(3)
        model.classifier.weight.mul_(5)
    model.save_pretrained(folder)


def load_model(folder: Path, dtype: torch.dtype, device: str) -> ViTForImageClassification:
    model = ViTForImageClassification.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()


def build_data(preset: Preset, model: ViTForImageClassification, dtype: torch.dtype) -> tuple[list[dict], list[dict]]:
    """ID and OOD batches on the model's device: blurred and sharp noise; a fifth of the labels is random."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (preset.images, 3, preset.image_size, preset.image_size)
    coarse = torch.randn(*shape[:2], preset.image_size // 8, preset.image_size // 8, generator=generator)
    id_images = torch.nn.functional.interpolate(coarse, size=preset.image_size, mode="nearest")
    ood_images = 0.8 * id_images.roll(1, dims=0) + 0.6 * torch.randn(shape, generator=generator)
    in_batches = [images.to(model.device, dtype).split(preset.batch) for images in (id_images, ood_images)]
    with torch.inference_mode():
        predicted = torch.cat([model(images.to(model.dtype)).logits.argmax(-1) for images in in_batches[0]]).cpu()
    is_random = torch.rand(preset.images, generator=generator) < 0.2
    labels = torch.where(is_random, torch.randint(preset.classes, (preset.images,), generator=generator), predicted)
    labels = labels.to(model.device).split(preset.batch)
    id_batches = [
        {"pixel_values": images, "labels": of_batch} for images, of_batch in zip(in_batches[0], labels, strict=True)
    ]
    return id_batches, [{"pixel_values": images} for images in in_batches[1]]


class NaiveLoop:
    """Algorithm 1 word for word: zero a slice, evaluate everything, put the slice back."""

    def __init__(
        self, model: ViTForImageClassification, id_batches: list[dict], ood_batches: list[dict], removed: list
    ):
        self.model = model
        self.id_batches = id_batches
        self.ood_batches = ood_batches
        config = model.config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.candidates = [
            (layer, head) for layer in range(config.num_hidden_layers) for head in range(config.num_attention_heads)
        ]
        for head in removed:
            self.remove(head)

    def _slice(self, head: tuple[int, int]) -> torch.Tensor:
        columns = slice(head[1] * self.head_dim, (head[1] + 1) * self.head_dim)
        return self.model.vit.layers[head[0]].attention.o_proj.weight.data[:, columns]

    def remove(self, head: tuple[int, int]) -> None:
        self._slice(head).zero_()
        self.candidates.remove(head)

    @torch.inference_mode()
    def score(self) -> Score:
        on_id = [
            sample_values(self.model(batch["pixel_values"]).logits.unsqueeze(0), batch["labels"])
            for batch in self.id_batches
        ]
        on_ood = [
            sample_values(self.model(batch["pixel_values"]).logits.unsqueeze(0), None).confidence
            for batch in self.ood_batches
        ]
        id_values = SampleValues(*(torch.cat(values, dim=1) for values in zip(*on_id, strict=True)))
        return objective_scores(OBJECTIVE, id_values, SampleValues(torch.cat(on_ood, dim=1)))[0]

    def remove_one(self) -> tuple[tuple[int, int], float]:
        """The best candidate, which is gone afterwards, and its score."""
        scores = {}
        for head in self.candidates:
            before = self._slice(head).clone()
            self._slice(head).zero_()
            scores[head] = self.score()
            self._slice(head).copy_(before)
        best = max(scores, key=scores.__getitem__)
        self.remove(best)
        return best, scores[best].value


def measured(work: Callable[[], object], device: str) -> tuple[float, float | None]:
    """Seconds, and on a GPU the peak memory in GiB."""
    if device != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30


def naive_and_engine(preset: Preset, folder: Path, device: str, dtype: torch.dtype, images: int, removed: list):
    """The naive loop, and a function that starts a search, on one loaded model and one data set."""
    labeller = load_model(folder, torch.float32, device)
    id_batches, ood_batches = build_data(replace(preset, images=images), labeller, dtype)
    del labeller
    model = load_model(folder, dtype, device)
    pruned = prune_heads(model, as_heads_to_prune(removed))

    def start(mode: str) -> GreedySearch:
        budget = len(heads_of(pruned)) - 1
        return GreedySearch(pruned, id_batches, ood_batches, OBJECTIVE, budget=budget, mode=mode)

    return NaiveLoop(model, id_batches, ood_batches, removed), start


def time_state(preset: Preset, folder: Path, device: str, removed: list[Head]) -> dict:
    """One removal by the naive loop and by the exact mode, and one cycle of the shortlist, with `removed` gone before."""
    naive, start = naive_and_engine(preset, folder, device, getattr(torch, preset.dtype), preset.images, removed)
    state = {"heads_removed_before": len(removed), "candidates": len(naive.candidates)}
    naive.score()  # warm up
    choices = []
    seconds, peak = measured(lambda: choices.append(naive.remove_one()), device)
    state["naive"] = {"seconds_per_removal": seconds, "peak_gib": peak}
    [(choice, score)] = choices

    search = start("exact")
    search.evaluate(search.engine.heads[:1])  # warm up
    exact, peak = measured(search.remove_one, device)
    circuit = search.circuit
    state["exact"] = {
        "seconds_per_removal": exact,
        "ratio": seconds / exact,
        "peak_gib": peak,
        "same_choice_as_naive": circuit.ranking == [choice],
        "score_difference": abs(circuit.scores[0] - score),
    }

    search = start("shortlist")
    search.remove_one()  # the first removal has nothing to make a short list from
    cycle, peak = measured(lambda: [search.remove_one() for _ in range(CHECK_EVERY)], device)
    state["shortlist"] = {
        "seconds_per_removal": cycle / CHECK_EVERY,
        "ratio": seconds / (cycle / CHECK_EVERY),
        "peak_gib": peak,
        "shortlist": search.shortlist_size,
        "check_every": CHECK_EVERY,
        "checks_agreed": [agreed for _, agreed in search.circuit.checks],
    }
    return state


def compare_rankings(preset: Preset, folder: Path, device: str) -> dict:
    """The first choice of both, in float32, where rounding does not decide."""
    naive, start = naive_and_engine(preset, folder, device, torch.float32, preset.images_for_ranking, [])
    search = start("exact")
    head, score = naive.remove_one()
    search.remove_one()
    [exact], [exact_score] = search.circuit.ranking, search.circuit.scores
    return {"naive": list(head), "exact": list(exact), "score_difference": abs(score - exact_score)}


def as_markdown(results: dict) -> str:
    preset = results["preset"]
    ranking = results["ranking_check"]
    rows = []
    for state in results["states"]:
        exact = state["exact"]
        short = state["shortlist"]
        notes = {
            "naive": f"{state['candidates']} evaluations of the whole network",
            "exact": f"{'same' if exact['same_choice_as_naive'] else 'other'} choice as the naive loop, score difference "
            f"{exact['score_difference']:.1e}",
            "shortlist": f"{short['shortlist']} candidates, all of them every {short['check_every']} removals; the short "
            f"list held the exact choice in {sum(short['checks_agreed'])} of {len(short['checks_agreed'])} checks",
        }
        for way, note in notes.items():
            found = state[way]
            ratio = f"{found['ratio']:.2f}x" if "ratio" in found else ""
            peak = "-" if found["peak_gib"] is None else f"{found['peak_gib']:.2f}"
            before = str(state["heads_removed_before"])
            seconds = f"{found['seconds_per_removal']:.2f}"
            rows.append([before, way, seconds, ratio, peak, note])
    heading = ["heads removed before", "way", "s per removal", "ratio to naive", "peak memory (GiB)", ""]
    return "\n".join(
        [
            *(f"{key}: {value}  " for key, value in results["machine"].items()),
            f"model: ViT of {preset['layers']} layers, {preset['heads']} heads, hidden size {preset['hidden']}; "
            f"{preset['images']} + {preset['images']} images in batches of {preset['batch']}, {preset['dtype']}  ",
            "",
            markdown_table(heading, rows),
            "",
            f"First choice in float32: naive {ranking['naive']}, exact {ranking['exact']}, "
            f"{'equal' if ranking['naive'] == ranking['exact'] else 'NOT EQUAL'}, score difference "
            f"{ranking['score_difference']:.1e}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--device", help="cpu or cuda; by default cuda for vit-b16")
    parser.add_argument("--output", type=Path, help="folder for circuit_extraction.md and .json")
    parser.add_argument("--smallest", action="store_const", dest="preset", const="smallest", help="--preset smallest")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    device = args.device or ("cuda" if args.preset == "vit-b16" else "cpu")
    order = torch.randperm(preset.layers * preset.heads, generator=torch.Generator().manual_seed(SEED)).tolist()
    half = sorted((place // preset.heads, place % preset.heads) for place in order[: preset.budget // 2])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(preset, folder)
        results = {
            "command": " ".join(["python", *sys.argv]),
            "machine": where_it_ran(device),
            "preset": asdict(preset),
            "states": [time_state(preset, folder, device, removed) for removed in ([], half)],
            "ranking_check": compare_rankings(preset, folder, device),
        }
    print(as_markdown(results))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "circuit_extraction.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.output / "circuit_extraction.md").write_text(as_markdown(results))


if __name__ == "__main__":
    main()
