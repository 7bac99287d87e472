"""Times circuit extraction against the naive loop of Algorithm 1, on the same data in one process.

    python benchmarks/circuit_extraction.py --preset cpu
    python benchmarks/circuit_extraction.py --preset vit-b16 --output benchmarks/results/circuit_extraction_h200
    python benchmarks/circuit_extraction.py --smallest        # does it run? a tiny model, seconds

The model is saved and loaded by `from_pretrained`, as users get theirs. The naive loop is a plain Transformers model whose
output projection is zeroed slice by slice; its data lies ready on the device, in the same batches. Cutting heads out makes the engine faster as the run goes on, so both are timed twice: at
the first removal, and in the middle of the run, where half of the budget is gone. The weights are random and the labels
mostly the model's own predictions, so that heads matter.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.extraction import CHECK_EVERY, GreedySearch
from hydra_transformers.pruning.heads import as_heads_to_prune, heads_of
from hydra_transformers.pruning.objectives import SampleValues, Score, objective_scores, sample_values
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
        self.model, self.id_batches, self.ood_batches = model, id_batches, ood_batches
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


class Measured:
    """Seconds and peak memory of what runs inside. On a CPU, seconds of processor time: other programs do not count."""

    def __init__(self, device: str):
        self.device = device

    def __enter__(self) -> "Measured":
        self._reset_peak()
        self.clock = time.perf_counter if self.device == "cuda" else time.process_time
        self.start = self.clock()
        return self

    def __exit__(self, *_) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds = self.clock() - self.start
        self.peak_gib = self._peak() / 2**30

    def _reset_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                print("(the peak memory of this process cannot be reset: later peaks include earlier ones)")

    def _peak(self) -> int:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        status = Path("/proc/self/status")
        if not status.exists():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return next(
            int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )


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


def time_state(preset: Preset, folder: Path, device: str, removed: list) -> dict:
    """One removal by the naive loop and by the exact mode, and one cycle of the shortlist, with `removed` gone before."""
    naive, start = naive_and_engine(preset, folder, device, getattr(torch, preset.dtype), preset.images, removed)
    result = {"heads_removed_before": len(removed), "candidates": len(naive.candidates)}
    naive.score()  # warm up
    with Measured(device) as measured:
        naive_choice, naive_score = naive.remove_one()
    result["naive"] = {"seconds_per_removal": measured.seconds, "peak_gib": measured.peak_gib}

    with Measured(device) as setup:
        search = start("exact")
    search.evaluate(search.engine.heads[:1])  # warm up
    with Measured(device) as exact:
        search.remove_one()
    circuit = search.circuit
    result["exact"] = {
        "seconds_per_removal": exact.seconds,
        "ratio": measured.seconds / exact.seconds,
        "peak_gib": exact.peak_gib,
        "setup_seconds": setup.seconds,
        "same_choice_as_naive": circuit.ranking == [naive_choice],
        "score_difference": abs(circuit.scores[0] - naive_score),
    }

    search = start("shortlist")
    search.remove_one()  # the first removal has nothing to make a short list from
    cycle = CHECK_EVERY
    with Measured(device) as shortlist:
        for _ in range(cycle):
            search.remove_one()
    result["shortlist"] = {
        "seconds_per_removal": shortlist.seconds / cycle,
        "ratio": measured.seconds / (shortlist.seconds / cycle),
        "peak_gib": shortlist.peak_gib,
        "shortlist": search.shortlist_size,
        "check_every": cycle,
        "checks_agreed": [agreed for _, agreed in search.circuit.checks],
    }
    return result


def compare_rankings(preset: Preset, folder: Path, device: str, removals: int) -> dict:
    """The first choices of both, in float32, where rounding does not decide."""
    naive, start = naive_and_engine(preset, folder, device, torch.float32, preset.images_for_ranking, [])
    search = start("exact")
    choices = [naive.remove_one() for _ in range(removals)]
    for _ in range(removals):
        search.remove_one()
    ranking, scores = zip(*choices, strict=True)
    return {
        "images": f"{preset.images_for_ranking} + {preset.images_for_ranking}",
        "naive": [list(head) for head in ranking],
        "exact": [list(head) for head in search.circuit.ranking],
        "agree": list(ranking) == search.circuit.ranking,
        "largest_score_difference": max(abs(a - b) for a, b in zip(scores, search.circuit.scores, strict=True)),
    }


def as_markdown(results: dict) -> str:
    preset, ranking = results["preset"], results["ranking_check"]
    rows = [
        "| heads removed before | way | s per removal | ratio to naive | peak memory (GiB) | |",
        "|---|---|---|---|---|---|",
    ]
    for state in results["states"]:
        before, exact, short = state["heads_removed_before"], state["exact"], state["shortlist"]
        notes = {
            "naive": f"{state['candidates']} evaluations of the whole network",
            "exact": f"{'same' if exact['same_choice_as_naive'] else 'other'} choice as the naive loop, score difference "
            f"{exact['score_difference']:.1e}; {exact['setup_seconds']:.1f} s once to copy, read and fingerprint",
            "shortlist": f"{short['shortlist']} candidates, all of them every {short['check_every']} removals; the short "
            f"list held the exact choice in {sum(short['checks_agreed'])} of {len(short['checks_agreed'])} checks",
        }
        for way, note in notes.items():
            ratio = f"{state[way]['ratio']:.2f}x" if "ratio" in state[way] else ""
            seconds, peak = state[way]["seconds_per_removal"], state[way]["peak_gib"]
            rows.append(f"| {before} | {way} | {seconds:.2f} | {ratio} | {peak:.2f} | {note} |")
    return "\n".join(
        [
            "# Circuit extraction: the naive loop and the engine",
            "",
            f"`{results['command']}` on {results['machine']['machine']}, {results['machine']['date']}, "
            f"{results['machine']['versions']}, commit {results['machine']['commit']}.",
            "",
            f"ViT of {preset['layers']} layers, {preset['heads']} heads, hidden size {preset['hidden']}, "
            f"{(preset['image_size'] // preset['patch_size']) ** 2 + 1} tokens; {preset['images']} + {preset['images']} images "
            f'in batches of {preset["batch"]}, {preset["dtype"]}, objective "{OBJECTIVE}", random weights. One removal of each way '
            f"was timed per state (one cycle for the shortlist). A run of {preset['budget']} removals lies on average at "
            f"{preset['budget'] // 2} heads removed. Seconds are {results['clock']}.",
            "",
            *rows,
            "",
            f"Ranking check in float32 ({ranking['images']} images): naive {ranking['naive']}, exact {ranking['exact']}, "
            f"{'equal' if ranking['agree'] else 'NOT EQUAL'}, largest score difference {ranking['largest_score_difference']:.1e}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--device", default=None, help="cpu or cuda; by default cuda for vit-b16")
    parser.add_argument("--dtype", default=None, help="instead of the preset's, e.g. float32")
    parser.add_argument("--images", type=int, default=None, help="images of each kind, instead of the preset's")
    parser.add_argument("--batch", type=int, default=None, help="images per batch, instead of the preset's")
    parser.add_argument("--ranking-removals", type=int, default=1, help="removals of the ranking check")
    parser.add_argument("--output", default=None, help="path without suffix: writes .json and .md")
    parser.add_argument("--smallest", action="store_const", dest="preset", const="smallest", help="--preset smallest")
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in ("dtype", "images", "batch")}
    preset = replace(PRESETS[arguments.preset], **{name: value for name, value in given.items() if value is not None})
    device = arguments.device or ("cuda" if arguments.preset == "vit-b16" else "cpu")

    order = torch.randperm(preset.layers * preset.heads, generator=torch.Generator().manual_seed(SEED)).tolist()
    half = sorted((place // preset.heads, place % preset.heads) for place in order[: preset.budget // 2])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(preset, folder)
        results = {
            "command": " ".join(["python", *sys.argv]),
            "machine": where_it_ran(device),
            "preset": asdict(preset),
            "clock": "elapsed time" if device == "cuda" else "processor time of the process",
            "states": [time_state(preset, folder, device, removed) for removed in ([], half)],
            "ranking_check": compare_rankings(preset, folder, device, arguments.ranking_removals),
        }
    print(as_markdown(results))
    if arguments.output:
        output = Path(arguments.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        output.with_suffix(".md").write_text(as_markdown(results))


if __name__ == "__main__":
    main()
