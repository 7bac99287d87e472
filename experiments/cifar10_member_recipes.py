"""How to fine-tune pruned ViTs on CIFAR-10: recipes compared on validation images, which no method is evaluated on.

    python -m experiments.cifar10_member_recipes --data DIR --runs RUNS --workers 12
    python -m experiments.cifar10_member_recipes --smallest                          # does it run? made-up data, seconds

DIR holds plain files (see local_files.py), RUNS the backbones that `python -m experiments` has trained. For each recipe
and backbone, the members of three circuits are trained, and the single model, with all its heads. The best recipe is the one
whose fused members have the highest average of accuracy and OOD AUROC against the images that the circuits saw: what
circuits are extracted by. Stopped and started again, it goes on with what is left.
"""

import argparse
import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import torch

from benchmarks.provenance import where_it_ran
from hydra_transformers._io.files import write_atomically

from .augmentation import crop_and_flip, strong
from .methods import Comparison, fused
from .settings import SETTINGS, Setting, changed_images
from .smallest import SMALLEST
from .units import CIRC, OBJECTIVES, Unit, missing_packages


SETTING = SETTINGS["cifar10-vit"]
RESULTS = Path(__file__).parent / "results" / "cifar10_member_recipes.md"
CHANGES = {"mild": crop_and_flip, "strong": strong}
METHODS = {"hydra-circ": "members, fused", "single-tuned": "single, tuned on", "single": "single"}


@dataclass(frozen=True)
class Choice:
    """changes: to the training images"""

    changes: str
    learning_rate: float
    epochs: int

    def __str__(self) -> str:
        return f"{self.changes}-{self.learning_rate:g}-{self.epochs}"


CHOICES = (
    Choice("mild", 2e-4, 4),
    Choice("mild", 5e-4, 4),
    Choice("strong", 2e-4, 4),
    Choice("strong", 5e-4, 4),
    Choice("strong", 1e-3, 4),
    Choice("strong", 5e-4, 6),
    Choice("strong", 1e-3, 6),
)
SMALLEST_CHOICES = (Choice("mild", 5e-4, 1), Choice("strong", 1e-3, 1))


def setting_of(args: argparse.Namespace) -> Setting:
    return SMALLEST if args.smallest else SETTING


def choices_of(args: argparse.Namespace) -> tuple[Choice, ...]:
    return SMALLEST_CHOICES if args.smallest else CHOICES


def comparison_of(args: argparse.Namespace) -> Comparison:
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    setting = setting_of(args)
    splits = setting.read(args.data, None).to(args.device)
    return Comparison(setting, splits, args.runs / setting.name, args.device, args.seeds, args.seeds)


def train_backbones(args: argparse.Namespace) -> None:
    comparison_of(args).trained_backbones(range(args.seeds))


def extract(args: argparse.Namespace, job: tuple[int, str]) -> None:
    comparison_of(args).circuit(*job)


def try_out(args: argparse.Namespace, job: tuple[Choice, int]) -> None:
    """Trains by one recipe, from one backbone, and judges on validation images."""
    choice, seed = job
    backbones = comparison_of(args)
    known = {("backbone", seed): backbones.backbone(seed)}
    known |= {("circuit", seed, name): backbones.circuit(seed, name) for name in OBJECTIVES}
    setting = backbones.setting
    recipe = replace(setting.member_recipe, learning_rate=choice.learning_rate, epochs=choice.epochs)
    splits = backbones.splits
    changed = replace(
        splits,
        train=changed_images(splits.train, CHANGES[choice.changes]),
        test=splits.validation,
        ood={"circuits": {"objects": splits.circuit_ood, "altered": splits.circuit_altered}},
    )
    trial = replace(
        backbones,
        setting=replace(setting, member_recipe=recipe),
        splits=changed,
        folder=backbones.folder / "recipes" / str(choice),
        made=known,
    )

    def tuned(name: str) -> torch.nn.Module:
        return trial.member(Unit("member", seed, name))

    trial.judge(seed, "single", lambda: known["backbone", seed])
    trial.judge(seed, "single-tuned", lambda: tuned("single"))
    trial.judge(seed, "hydra-circ", lambda: fused(map(tuned, CIRC)))


def to_markdown(folder: Path, args: argparse.Namespace) -> str:
    """Means over the backbones, the best recipe first."""
    found = {}
    for choice, method in product(choices_of(args), METHODS):
        results = [
            json.loads((folder / "recipes" / str(choice) / "results" / str(seed) / f"{method}.json").read_text())
            for seed in range(args.seeds)
        ]
        accuracy = mean(100 * result["id"]["accuracy"] for result in results)
        auroc = mean(100 * result["ood"]["msp"]["circuits"]["objects"]["auroc"] for result in results)
        found[METHODS[method], choice if method != "single" else None] = {
            "average": (accuracy + auroc) / 2,
            "Acc": accuracy,
            "AUROC": auroc,
            "AUROC, altered set": mean(
                100 * result["ood"]["msp"]["circuits"]["altered"]["auroc"] for result in results
            ),
            "NLL": mean(result["id"]["nll"] for result in results),
            "ECE": mean(result["id"]["ece"] for result in results),
        }
    ranked = sorted(found.items(), key=lambda item: -item[1]["average"])
    columns = list(ranked[0][1])
    where = ", ".join(where_it_ran(args.device).values())
    lines = [
        f"Recipes for pruned ViTs on CIFAR-10, judged on validation images ({args.seeds} backbones, {where}).",
        "",
        "| | images | learning rate | epochs | " + " | ".join(columns) + " |",
        "|---|---|--:|--:|" + "--:|" * len(columns),
    ]
    for (method, choice), numbers in ranked:
        how = f"{choice.changes} | {choice.learning_rate:g} | {choice.epochs}" if choice else "- | - | -"
        cells = [f"{numbers[name]:.3f}" if name in ("NLL", "ECE") else f"{numbers[name]:.2f}" for name in columns]
        lines.append(f"| {method} | {how} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=Path, help="where backbones lie, and work in progress")
    parser.add_argument("--seeds", type=int, default=2, help="how many backbones are pruned")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="one tiny backbone on made-up data, and a table printed: shows that it runs, writes nothing",
    )
    args = parser.parse_args()
    if min(args.seeds, args.workers, args.threads) < 1:
        parser.error("--seeds, --workers and --threads are at least 1")
    if args.smallest:
        with tempfile.TemporaryDirectory() as runs:
            args.runs, args.results, args.seeds = Path(runs), Path(runs) / "recipes.md", 1
            return compare(args)
    if args.data is None or args.runs is None:
        parser.error("--data or --runs is missing: pass the folder with vision/, and where backbones lie")
    folder = args.runs / SETTING.name
    missing = [index for index in range(args.seeds) if not (folder / f"backbone-{index}").exists()]
    if missing:
        parser.error(f"--runs: there is no {folder / f'backbone-{missing[0]}'}, run python -m experiments first")
    compare(args)


def compare(args: argparse.Namespace) -> None:
    """Circuits, then every recipe on every backbone, then the table."""
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        if args.smallest:  # there are no backbones yet
            pool.submit(train_backbones, args).result()
        list(pool.map(partial(extract, args), product(range(args.seeds), OBJECTIVES)))
        trials = list(product(choices_of(args), range(args.seeds)))
        missing = missing_packages(Unit("member", 0))
        if missing and args.smallest:
            print(f"needs {', '.join(missing)}: {len(trials)} of {len(trials)} trials of a recipe")
            return
        list(pool.map(partial(try_out, args), trials))
    write_atomically(args.results, to_markdown(args.runs / setting_of(args).name, args))
    print(args.results.read_text())


if __name__ == "__main__":
    main()
