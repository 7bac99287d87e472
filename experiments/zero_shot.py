"""The paper's comparison on CLIP (5.3, tables 3 and 24 to 27): methods that train nothing more, judged as zero-shot classifiers.

    python -m experiments.zero_shot --data DIR --start DINOV2 --seeds 3 --workers 3     # a small CLIP, trained first
    python -m experiments.zero_shot --smallest                                          # does it run? made-up data

DIR holds plain files (see local_files.py). A seed's work is done by one process, up to `--workers` of them at a time. Stopped and started again, it goes on with what lies in `--runs`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import BayesVLM, ViLU, collect_confidences, failure_metrics
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.pruning import Circuit, extract_circuit, prune_heads, taylor_prune
from hydra_transformers.uncertainty import TemperatureScaling, classification_metrics, ood_metrics

from .methods import EVALUATION_BATCH, OBJECTIVES, Comparison, fused
from .results import RESULTS, gather, results_file, rounded, write_results
from .rows import TensorRows
from .tables import print_tables
from .zero_shot_settings import CLIP_TINYIMAGENET, SMALLEST, LabelSet, ZeroShotSetting


TOWERS = {"both": None, "vision": ("vision",)}


@dataclass(frozen=True)
class ZeroShotComparison(Comparison):
    """A setting with its data on a device; the data's classes are those of the first of `label_sets`."""

    setting: ZeroShotSetting
    label_sets: Mapping[str, LabelSet] = field(kw_only=True)
    start: str | None = field(kw_only=True)

    def run_seed(self, seed: int) -> None:
        super().run_seed(seed)
        self.failures(seed)
        self.carried(seed)

    def clip(self, seed: int) -> tuple[PreTrainedModel, Any]:
        """The model and its tokenizer."""
        folder = self.folder / f"clip-{seed}"
        return self.setting.clip(self.start, self.splits, self.label_sets, folder, seed, self.device)

    def prompts(self, seed: int, label_set: str | None = None) -> dict[str, Tensor]:
        names = self.label_sets[label_set or next(iter(self.label_sets))].prompts
        tokens = self.once(self.clip, seed)[1](names, padding=True, return_tensors="pt")
        return {name: value.to(self.device) for name, value in tokens.items()}

    def classifier(self, seed: int, model: nn.Module, label_set: str | None = None) -> ZeroShotClassifier:
        return ZeroShotClassifier(model, self.prompts(seed, label_set))

    def circuit_of_towers(self, seed: int, towers: str, objective: str) -> Circuit:
        clip = prune_heads(self.once(self.clip, seed)[0])
        return extract_circuit(
            clip.to(torch.bfloat16) if self.device == "cuda" else clip,
            *self.once(self.circuit_data),
            objective,
            budget=self.setting.heads_to_prune,
            class_prompts=self.prompts(seed),
            towers=TOWERS[towers],
            mode=self.setting.circuit_mode,
            checkpoint=self.folder / f"circuit-{seed}-{towers}-{objective}.json",
        )

    def pruned(self, seed: int, towers: str, objective: str, heads: int) -> PreTrainedModel:
        circuit = self.once(self.circuit_of_towers, seed, towers, objective)
        return prune_heads(self.once(self.clip, seed)[0], circuit.heads_to_prune(heads))

    def methods(self, seed: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """(name, how to make it); none of them trains anything."""
        clip = self.once(self.clip, seed)[0]
        setting = self.setting
        heads = setting.heads_to_prune

        def classifier(model: nn.Module) -> ZeroShotClassifier:
            return self.classifier(seed, model)

        def hydra(towers: str, heads: int) -> ZeroShotClassifier:
            return classifier(fused(self.pruned(seed, towers, objective, heads) for objective in OBJECTIVES))

        yield "single", lambda: classifier(clip)
        yield "bayesvlm", lambda: self.once(self.bayesvlm, seed)
        yield "taylor", lambda: classifier(self.taylor(seed))
        for towers in TOWERS:
            yield f"circ-avg-{towers}", lambda towers=towers: classifier(self.pruned(seed, towers, "avg", heads))
            yield f"hydra-circ-{towers}", lambda towers=towers: hydra(towers, heads)
            yield f"hydra-circ-{towers}-fewer", lambda towers=towers: hydra(towers, setting.fewer_heads)

    def stream(self, rows: TensorRows) -> Iterator[dict[str, Tensor]]:
        """Batches, prepared one at a time."""
        for start in range(0, len(rows), EVALUATION_BATCH):
            yield rows.prepare(rows.part(slice(start, start + EVALUATION_BATCH)).tensors)

    def bayesvlm(self, seed: int) -> nn.Module:
        """Fitted on training images, each with its class's prompt."""
        prompts = self.prompts(seed)

        def pairs() -> Iterator[dict[str, Tensor]]:
            for batch in self.stream(self.setting.pairs(self.splits)):
                labels = batch.pop("labels")
                yield batch | {name: value[labels] for name, value in prompts.items()}

        return BayesVLM(self.once(self.clip, seed)[0]).fit(pairs()).zero_shot(prompts)

    def vilu(self, seed: int) -> nn.Module:
        """Trained on rows that the CLIP was not trained on, several augmented views of each."""
        rows = self.setting.views(self.splits)

        def views() -> Iterator[dict[str, Tensor]]:
            torch.manual_seed(seed)
            for _ in range(self.setting.num_views):
                yield from self.stream(rows)

        prompts = self.prompts(seed)
        return ViLU(self.once(self.clip, seed)[0]).fit(views(), prompts, seed=seed).zero_shot(prompts)

    def taylor(self, seed: int) -> PreTrainedModel:
        """Pruned in the vision tower, as the paper has it."""
        clip = self.once(self.clip, seed)[0]
        data = self.once(self.circuit_data)[0]
        heads = self.setting.heads_per_layer
        pruning = taylor_prune(clip, data, heads_per_layer=heads, class_prompts=self.prompts(seed))
        return prune_heads(clip, pruning.heads_to_prune)

    def failures(self, seed: int) -> None:
        """Writes how well ViLU's confidence tells wrong answers and out-of-distribution images, beside the probabilities of others."""
        path = self.folder / "failures" / f"{seed}.json"
        if path.exists():
            return
        clip = self.once(self.clip, seed)[0]
        heads = self.setting.heads_to_prune
        single = self.classifier(seed, clip)
        validation = self.answers(single, self.splits.validation)
        scaling = TemperatureScaling.fit(validation["member_logits"], validation["labels"])
        members = [self.pruned(seed, "both", objective, heads) for objective in OBJECTIVES]
        models = {
            "single": single,
            "temperature": scaling.wrap(single),
            "bayesvlm": self.once(self.bayesvlm, seed),
            "vilu": self.vilu(seed),
            "hydra-circ-both": self.classifier(seed, fused(members)),
        }
        results = {name: self.failures_of(model) for name, model in models.items()}
        write_atomically(path, json.dumps(results, indent=1) + "\n")

    def failures_of(self, model: nn.Module) -> dict[str, Any]:
        """`failure_metrics`, and detection of out-of-distribution images by the same confidence, {"ood": {group: {set: metrics}}}"""

        def confidences(rows: Any) -> tuple[Tensor, Tensor | None]:
            return collect_confidences(model, self.batches(rows), EVALUATION_BATCH)

        confidence, is_right = confidences(self.splits.test)
        ood = {
            group: {name: ood_metrics(1 - confidence, 1 - confidences(rows)[0]) for name, rows in of_group.items()}
            for group, of_group in self.splits.ood.items()
        }
        return failure_metrics(confidence, is_right) | {"ood": ood}

    def carried(self, seed: int) -> None:
        """Writes how well a temperature that is fitted with one label set does with the others."""
        path = self.folder / "carried" / f"{seed}.json"
        if path.exists():
            return
        clip = self.once(self.clip, seed)[0]
        classifiers = {name: self.classifier(seed, clip, name) for name in self.label_sets}
        test = {name: self.answers(classifiers[name], each.test) for name, each in self.label_sets.items()}
        fitted = {"none": TemperatureScaling(1.0)}
        for name, each in self.label_sets.items():
            answers = self.answers(classifiers[name], each.validation)
            fitted[name] = TemperatureScaling.fit(answers["member_logits"], answers["labels"])
        results = {
            source: {"temperature": scaling.temperature}
            | {
                "sets": {
                    name: classification_metrics(scaling(answers["member_logits"]), answers["labels"])
                    for name, answers in test.items()
                }
            }
            for source, scaling in fitted.items()
        }
        write_atomically(path, json.dumps(results, indent=1) + "\n")


def collected(folder: Path, device: str) -> dict[str, Any]:
    """What `results.gather` finds, what tells failures, and temperatures that were carried from one label set to another."""
    further = {
        kind: {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}/*.json"))}
        for kind in ("failures", "carried")
    }
    return gather(folder, device) | rounded(further)


def run_seeds(setting: ZeroShotSetting, args: argparse.Namespace, seeds: list[int]) -> None:
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    start = args.start or setting.start
    splits, label_sets = setting.read(args.data, start)
    splits = splits.to(args.device)
    label_sets = {name: each.to(args.device) for name, each in label_sets.items()}
    folder = args.runs / setting.name
    for seed in seeds:
        began = time.time()
        comparison = ZeroShotComparison(setting, splits, folder, args.device, label_sets=label_sets, start=start)
        comparison.run_seed(seed)
        print(f"seed {seed}: {time.time() - began:.0f} s", flush=True)


def run_workers(args: argparse.Namespace) -> None:
    """A process per seed, `--workers` at a time; ends with an error if one did."""
    waiting = list(range(args.seeds))
    running = {}
    failed = []
    while waiting or running:
        while waiting and len(running) < args.workers:
            seed = waiting.pop(0)
            command = [sys.executable, "-m", "experiments.zero_shot", *sys.argv[1:], "--seed", str(seed)]
            running[seed] = subprocess.Popen(command)
        time.sleep(0.5)
        for seed, process in list(running.items()):
            if process.poll() is not None:
                failed += [seed] if process.returncode else []
                del running[seed]
    if failed:
        sys.exit(f"seeds {', '.join(map(str, failed))} did not finish: see above; started again, what is done stays")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", help="what the CLIP's vision tower starts from")
    parser.add_argument("--data", type=Path, help="a folder of plain files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="do the work of this seed only, and write no results")
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where work in progress lies")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results files")
    parser.add_argument(
        "--smallest", action="store_true", help="a tiny model on made-up data, and tables printed: shows that it runs"
    )
    args = parser.parse_args()
    setting = SMALLEST if args.smallest else CLIP_TINYIMAGENET
    if not args.smallest and args.data is None:
        parser.error(f"--data is missing: {setting.name} reads the files of a folder")
    if args.smallest:
        with tempfile.TemporaryDirectory() as folder:
            args.runs = args.results = Path(folder)
            run_seeds(setting, args, [0])
            write_results(collected(args.runs / setting.name, args.device), results_file(args.results, setting.name))
            return print_tables(args.results)
    if args.seed is not None:
        return run_seeds(setting, args, [args.seed])
    run_workers(args)
    write_results(collected(args.runs / setting.name, args.device), results_file(args.results, setting.name))
    return print_tables(args.results)


if __name__ == "__main__":
    main()
